// SPDX-License-Identifier: Apache-2.0
// The run-time choice of instruction set: one table of range kernels per set, compiled by one isa_*.cpp each.
#pragma once

#include "ops.h"

namespace gdn::cpu {

// Columns of S that one unit of the rule's work holds.
constexpr int kTileColumns = 16;
// Channels of the convolution that one unit of work holds.
constexpr int kChannelBlock = 256;
// Elements of a vector that one unit of the output gate holds.
constexpr int kOutputGateChunk = 256;

// Each entry does the units [begin, end) of its op; what a unit is stands in the op's .cpp.
struct Kernels {
  const char* isa;
  void (*gated_delta_rule)(const RuleParams& params, int64_t begin, int64_t end);
  void (*gated_delta_verify)(const VerifyParams& params, int64_t begin, int64_t end);
  void (*fold_ring)(const FoldParams& params, int64_t begin, int64_t end);
  void (*conv_state_write)(const ConvWriteParams& params, int64_t begin, int64_t end);
  void (*causal_conv1d)(const ConvParams& params, int64_t begin, int64_t end);
  void (*gated_delta_gates)(const GatesParams& params, int64_t begin, int64_t end);
  void (*rms_norm_gated)(const NormParams& params, int64_t begin, int64_t end);
  void (*qk_norm_rope)(const RopeParams& params, int64_t begin, int64_t end);
  void (*output_gate)(const OutputGateParams& params, int64_t begin, int64_t end);
  void (*gated_delta_step)(const StepParams& params, int64_t begin, int64_t end);
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// The best set this machine has, or the one that GATED_DELTANET_CPU_ISA names (baseline, avx2, avx512); chosen once.
const Kernels& kernels();

// Runs kernel over [0, units) on the pool.
template <class Params>
void run_units(const Params& params, void (*kernel)(const Params&, int64_t, int64_t), int64_t units, int64_t grain,
               ParallelFor parallel_for) {
  if (units <= 0) return;
  struct Context {
    const Params& params;
    void (*kernel)(const Params&, int64_t, int64_t);
  } context{params, kernel};
  const auto body = [](int64_t begin, int64_t end, void* opaque) {
    const Context& c = *static_cast<const Context*>(opaque);
    c.kernel(c.params, begin, end);
  };
  parallel_for(0, units, grain < 1 ? 1 : grain, body, &context);
}

}  // namespace gdn::cpu
