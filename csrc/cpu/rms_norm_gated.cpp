// SPDX-License-Identifier: Apache-2.0
// A unit of work: one group of one vector.
#include "isa.h"

namespace gdn::cpu {

void rms_norm_gated(const NormParams& params, ParallelFor parallel_for) {
  constexpr int64_t kGrainElements = 16 * 1024;
  const int64_t units = params.B * params.T * params.H * (params.V / params.group_size);
  run_units(params, kernels().rms_norm_gated, units, ceil_div(kGrainElements, params.group_size), parallel_for);
}

}  // namespace gdn::cpu
