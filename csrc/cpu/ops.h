// SPDX-License-Identifier: Apache-2.0
// Entry points of the CPU backend. No torch here: whoever calls hands in the thread pool.
#pragma once

#include "../common/params.h"

namespace gdn::cpu {

// Runs body(begin, end, context) over [begin, end) cut into pieces of at least `grain`, on any threads; returns when all
// are done.
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain,
                             void (*body)(int64_t begin, int64_t end, void* context), void* context);

void gated_delta_rule(const RuleParams& params, ParallelFor parallel_for);
void gated_delta_step(const StepParams& params, ParallelFor parallel_for);
void gated_delta_verify(const VerifyParams& params, ParallelFor parallel_for);
void fold_ring(const FoldParams& params, ParallelFor parallel_for);
void move_slots(const PoolParams& params, ParallelFor parallel_for);
void conv_state_write(const ConvWriteParams& params, ParallelFor parallel_for);
void causal_conv1d(const ConvParams& params, ParallelFor parallel_for);
void causal_conv1d_update(const ConvParams& params, ParallelFor parallel_for);
void gated_delta_gates(const GatesParams& params, ParallelFor parallel_for);
void rms_norm_gated(const NormParams& params, ParallelFor parallel_for);
void qk_norm_rope(const RopeParams& params, ParallelFor parallel_for);
void output_gate(const OutputGateParams& params, ParallelFor parallel_for);

}  // namespace gdn::cpu
