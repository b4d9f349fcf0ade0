// SPDX-License-Identifier: Apache-2.0
// A unit of work: one head of one token; a token's query heads come before its key heads.
#include "isa.h"

namespace gdn::cpu {

void qk_norm_rope(const RopeParams& params, ParallelFor parallel_for) {
  constexpr int64_t kGrainElements = 16 * 1024;
  const int64_t units = params.B * params.T * (params.Hq + params.Hk);
  run_units(params, kernels().qk_norm_rope, units, ceil_div(kGrainElements, params.D), parallel_for);
}

}  // namespace gdn::cpu
