// SPDX-License-Identifier: Apache-2.0
// A unit of work: kOutputGateChunk elements of one vector, fewer at its end.
#include "isa.h"

namespace gdn::cpu {

void output_gate(const OutputGateParams& params, ParallelFor parallel_for) {
  constexpr int64_t kGrainElements = 16 * 1024;
  const int64_t units = params.B * params.T * params.H * ceil_div(params.D, kOutputGateChunk);
  const int64_t grain = kGrainElements / (params.D < kOutputGateChunk ? params.D + 1 : kOutputGateChunk);
  run_units(params, kernels().output_gate, units, grain, parallel_for);
}

}  // namespace gdn::cpu
