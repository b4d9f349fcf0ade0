// SPDX-License-Identifier: Apache-2.0
// A unit of work: 16 columns of one value head's state for one sequence (kernels/gated_delta_rule.h).
#include "isa.h"
#include "uncovered.h"

namespace gdn::cpu {

void gated_delta_rule(const RuleParams& params, ParallelFor parallel_for) {
  const Dims& d = params.dims;
  // Fewer state elements times tokens than this are not worth waking a thread for.
  constexpr int64_t kGrainElements = 64 * 1024;
  const int64_t units = d.N * d.Hv * ceil_div(d.V, kTileColumns);
  const int64_t tokens = d.N > 0 ? ceil_div(d.B * d.T, d.N) : 0;   // of a sequence, on average
  const int64_t unit_elements = d.K * kTileColumns * (tokens > 0 ? tokens : 1);
  run_units(params, kernels().gated_delta_rule, units, ceil_div(kGrainElements, unit_elements), parallel_for);
  zero_uncovered_tokens(params);
}

}  // namespace gdn::cpu
