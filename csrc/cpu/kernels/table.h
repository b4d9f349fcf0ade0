// SPDX-License-Identifier: Apache-2.0
// All range kernels of one instruction set. Included last by each isa_*.cpp, after it has set the target.
#pragma once

#include "causal_conv1d.h"
#include "conv_state_write.h"
#include "fold_ring.h"
#include "gated_delta_gates.h"
#include "gated_delta_rule.h"
#include "gated_delta_step.h"
#include "gated_delta_verify.h"
#include "output_gate.h"
#include "qk_norm_rope.h"
#include "rms_norm_gated.h"

namespace gdn::cpu::GDN_ISA {

constexpr Kernels table(const char* isa) {
  return {isa, gated_delta_rule_range, gated_delta_verify_range, fold_ring_range, conv_state_write_range,
          causal_conv1d_range, gated_delta_gates_range, rms_norm_gated_range, qk_norm_rope_range, output_gate_range,
          gated_delta_step_range};
}

}  // namespace gdn::cpu::GDN_ISA
