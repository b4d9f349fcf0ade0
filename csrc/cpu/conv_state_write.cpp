// SPDX-License-Identifier: Apache-2.0
// A unit of work: one sequence and kChannelBlock channels (kernels/conv_state_write.h).
#include "isa.h"

namespace gdn::cpu {

void conv_state_write(const ConvWriteParams& params, ParallelFor parallel_for) {
  constexpr int64_t kGrainElements = 16 * 1024;
  run_units(params, kernels().conv_state_write, params.N * ceil_div(params.C, kChannelBlock),
            ceil_div(kGrainElements, kChannelBlock * params.window), parallel_for);
}

}  // namespace gdn::cpu
