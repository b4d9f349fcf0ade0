// SPDX-License-Identifier: Apache-2.0
// Entry points of the CUDA backend: launches on `stream` of the current device. Returns nullptr, or what went wrong.
// No torch and no CUDA header here: `stream` is a cudaStream_t.
#pragma once

#include "../common/params.h"

namespace gdn::cuda {

const char* gated_delta_rule(const RuleParams& params, void* stream);
// Bytes of params.workspace that this call needs; known from shapes, dtypes, strides and mode.
int64_t gated_delta_rule_workspace(const RuleParams& params);
const char* gated_delta_step(const StepParams& params, void* stream);
const char* gated_delta_verify(const VerifyParams& params, void* stream);
const char* fold_ring(const FoldParams& params, void* stream);
const char* move_slots(const PoolParams& params, void* stream);
const char* conv_state_write(const ConvWriteParams& params, void* stream);
const char* causal_conv1d(const ConvParams& params, void* stream);
const char* causal_conv1d_update(const ConvParams& params, void* stream);
const char* gated_delta_gates(const GatesParams& params, void* stream);
const char* rms_norm_gated(const NormParams& params, void* stream);
const char* qk_norm_rope(const RopeParams& params, void* stream);
const char* output_gate(const OutputGateParams& params, void* stream);

}  // namespace gdn::cuda
