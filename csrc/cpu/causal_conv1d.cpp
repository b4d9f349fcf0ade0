// SPDX-License-Identifier: Apache-2.0
// A unit of work: one sequence and kChannelBlock channels (kernels/causal_conv1d.h).
#include "isa.h"
#include "uncovered.h"

namespace gdn::cpu {

void causal_conv1d(const ConvParams& params, ParallelFor parallel_for) {
  if (params.C == 0) return;
  constexpr int64_t kGrainElements = 16 * 1024;
  const int64_t tokens = params.N > 0 ? ceil_div(params.B * params.T, params.N) : 0;
  const int64_t unit_elements = kChannelBlock * (tokens > 0 ? tokens : 1);
  run_units(params, kernels().causal_conv1d, params.N * ceil_div(params.C, kChannelBlock),
            ceil_div(kGrainElements, unit_elements), parallel_for);
  for_uncovered_tokens(params.cu_seqlens, params.N, params.T, [&](int64_t t) {
    for (int64_t c = 0; c < params.C; ++c) params.out.store(params.out.offset(0, c, t), 0.0f);
  });
}

}  // namespace gdn::cpu
