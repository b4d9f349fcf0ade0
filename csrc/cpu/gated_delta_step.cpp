// SPDX-License-Identifier: Apache-2.0
// A unit of work: one sequence and one key head with its value heads (kernels/gated_delta_step.h).
#include "isa.h"

namespace gdn::cpu {

void gated_delta_step(const StepParams& params, ParallelFor parallel_for) {
  const Dims& d = params.dims;
  if (d.T == 0) return;
  // Fewer state elements times tokens than this are not worth waking a thread for.
  constexpr int64_t kGrainElements = 64 * 1024;
  run_units(params, kernels().gated_delta_step, d.N * d.Hk, ceil_div(kGrainElements, params.group() * d.K * d.V * d.T),
            parallel_for);
}

}  // namespace gdn::cpu
