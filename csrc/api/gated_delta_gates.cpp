// SPDX-License-Identifier: Apache-2.0
#include "../../torch-ext/torch_binding.h"
#include "../cuda/ops.h"
#include "checks.h"

namespace gdn::api {

void gated_delta_gates(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor g, Tensor beta, bool allow_neg_eigval) {
  const Checker check("gated_delta_gates", "a", a);
  check.require_dim("a", a, 3, "[B, T, Hv]");
  const int64_t B = a.size(0), T = a.size(1), H = a.size(2);
  GatesParams params{B, T, H, {}, {}, {}, {}, {}, {}, allow_neg_eigval};
  params.a = check.view("a", a, {B, T, H}, "[B, T, Hv]");
  params.b = check.view("b", b, {B, T, H}, "[B, T, Hv]");
  params.A_log = check.view("A_log", A_log, {H}, "[Hv]");
  params.dt_bias = check.view("dt_bias", dt_bias, {H}, "[Hv]");
  params.g = check.written("g", g, {B, T, H}, "[B, T, Hv]");
  params.beta = check.written("beta", beta, {B, T, H}, "[B, T, Hv]");
  check.require_dtype("g", g, DType::kFloat32);
  check.require_dtype("beta", beta, DType::kFloat32);
  run<GatesParams, cpu::gated_delta_gates, cuda::gated_delta_gates>(check, params);
}

}  // namespace gdn::api
