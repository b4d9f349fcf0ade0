// SPDX-License-Identifier: Apache-2.0
#include "../../torch-ext/torch_binding.h"
#include "../cuda/ops.h"
#include "checks.h"

namespace gdn::api {

void qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, Tensor q_out, Tensor k_out,
                  double eps, bool zero_centered) {
  const Checker check("qk_norm_rope", "q", q);
  check.require_dim("q", q, 4, "[B, T, Hq, D]");
  check.require_dim("k", k, 4, "[B, T, Hk, D]");
  check.require_dim("cos", cos, 3, "[B, T, R]");
  const int64_t B = q.size(0), T = q.size(1), Hq = q.size(2), Hk = k.size(2), D = q.size(3), R = cos.size(2);
  check.require(D >= 1 && D <= kMaxHeadDim, "q", "of 1 to 256 elements in its last dim", q);
  check.require(R % 2 == 0 && R <= D, "cos", "of an even last dim, at most q's, " + std::to_string(D), cos);
  RopeParams params{B, T, Hq, Hk, D, R, {}, {}, {}, {}, {}, {}, {}, {}, static_cast<float>(eps), zero_centered};
  params.q = check.view("q", q, {B, T, Hq, D}, "[B, T, Hq, D]");
  params.k = check.view("k", k, {B, T, Hk, D}, "[B, T, Hk, D]");
  params.q_weight = check.view("q_weight", q_weight, {D}, "[D]");
  params.k_weight = check.view("k_weight", k_weight, {D}, "[D]");
  params.cos = check.view("cos", cos, {B, T, R}, "[B, T, R]");
  params.sin = check.view("sin", sin, {B, T, R}, "[B, T, R]");
  params.q_out = check.written("q_out", q_out, {B, T, Hq, D}, "[B, T, Hq, D]");
  params.k_out = check.written("k_out", k_out, {B, T, Hk, D}, "[B, T, Hk, D]");
  run<RopeParams, cpu::qk_norm_rope, cuda::qk_norm_rope>(check, params);
}

}  // namespace gdn::api
