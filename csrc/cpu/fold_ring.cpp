// SPDX-License-Identifier: Apache-2.0
// A unit of work: one value head of one row of one layer (kernels/fold_ring.h).
#include "isa.h"

namespace gdn::cpu {

void fold_ring(const FoldParams& params, ParallelFor parallel_for) {
  constexpr int64_t kGrainElements = 64 * 1024;
  run_units(params, kernels().fold_ring, params.layers * params.batch * params.Hv,
            ceil_div(kGrainElements, params.K * params.V), parallel_for);
}

}  // namespace gdn::cpu
