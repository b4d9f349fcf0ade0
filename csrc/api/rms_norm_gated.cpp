// SPDX-License-Identifier: Apache-2.0
#include "../../torch-ext/torch_binding.h"
#include "../cuda/ops.h"
#include "checks.h"

namespace gdn::api {

void rms_norm_gated(Tensor x, Tensor z, Tensor weight, Tensor out, double eps, bool use_silu, bool norm_before_gate,
                    int64_t group_size) {
  const Checker check("rms_norm_gated", "x", x);
  check.require_dim("x", x, 4, "[B, T, H, V]");
  const int64_t B = x.size(0), T = x.size(1), H = x.size(2), V = x.size(3);
  check.require(V >= 1, "x", "of at least one element in its last dim", x);
  check.require(group_size >= 1 && V % group_size == 0, "group_size must divide the last dim, " + std::to_string(V) +
                                                            ", got " + std::to_string(group_size));
  NormParams params{B, T, H, V, group_size, {}, {}, {}, {}, static_cast<float>(eps), use_silu, norm_before_gate};
  params.x = check.view("x", x, {B, T, H, V}, "[B, T, H, V]");
  params.z = check.view("z", z, {B, T, H, V}, "[B, T, H, V]");
  params.out = check.written("out", out, {B, T, H, V}, "[B, T, H, V]");
  params.weight = check.view("weight", weight, {V}, "[V]");
  run<NormParams, cpu::rms_norm_gated, cuda::rms_norm_gated>(check, params);
}

}  // namespace gdn::api
