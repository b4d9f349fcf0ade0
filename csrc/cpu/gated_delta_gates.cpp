// SPDX-License-Identifier: Apache-2.0
// A unit of work: one token, all heads.
#include "isa.h"

namespace gdn::cpu {

void gated_delta_gates(const GatesParams& params, ParallelFor parallel_for) {
  if (params.H == 0) return;
  constexpr int64_t kGrainElements = 4096;
  run_units(params, kernels().gated_delta_gates, params.B * params.T, ceil_div(kGrainElements, params.H), parallel_for);
}

}  // namespace gdn::cpu
