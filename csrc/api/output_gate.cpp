// SPDX-License-Identifier: Apache-2.0
#include "../../torch-ext/torch_binding.h"
#include "../cuda/ops.h"
#include "checks.h"

namespace gdn::api {

void output_gate(Tensor x, Tensor gate, Tensor out) {
  const Checker check("output_gate", "x", x);
  check.require_dim("x", x, 4, "[B, T, H, D]");
  const int64_t B = x.size(0), T = x.size(1), H = x.size(2), D = x.size(3);
  OutputGateParams params{B, T, H, D, {}, {}, {}};
  params.x = check.view("x", x, {B, T, H, D}, "[B, T, H, D]");
  params.gate = check.view("gate", gate, {B, T, H, D}, "[B, T, H, D]");
  params.out = check.written("out", out, {B, T, H, D}, "[B, T, H, D]");
  run<OutputGateParams, cpu::output_gate, cuda::output_gate>(check, params);
}

}  // namespace gdn::api
