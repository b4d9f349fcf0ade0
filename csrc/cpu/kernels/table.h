// SPDX-License-Identifier: Apache-2.0
// All range kernels of one instruction set. Included last by each isa_*.cpp, after it has set the target.
#pragma once

#include "causal_conv1d.h"
#include "gated_delta_gates.h"
#include "gated_delta_rule.h"
#include "rms_norm_gated.h"

namespace gdn::cpu::GDN_ISA {

constexpr Kernels table(const char* isa) {
  return {isa, gated_delta_rule_range, causal_conv1d_range, gated_delta_gates_range, rms_norm_gated_range};
}

}  // namespace gdn::cpu::GDN_ISA
