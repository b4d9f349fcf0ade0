// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "../../torch-ext/torch_binding.h"
#include "../common/conv.h"
#include "../cuda/ops.h"
#include "rule_inputs.h"

namespace gdn::api {
namespace {

// The dims, from the state, the projection and num_key_heads.
Dims step_dims(const Checker& check, const Tensor& mixed_qkv, const Tensor& state, int64_t num_key_heads) {
  check.require_dim("mixed_qkv", mixed_qkv, 3, "[B, T, channels]");
  check.require_dim("state", state, 4, "[slots, Hv, K, V]");
  const int64_t B = mixed_qkv.size(0), T = mixed_qkv.size(1), Hv = state.size(1);
  check.require(T <= kMaxStepTokens, "mixed_qkv", "[B, T, channels] with T at most 8", mixed_qkv);
  if (num_key_heads < 1 || Hv < 1 || Hv % num_key_heads != 0) {
    check.require(false, "num_key_heads must divide the state's value heads, " + std::to_string(Hv) + ", got " +
                             std::to_string(num_key_heads));
  }
  const Dims dims{B, T, B, num_key_heads, Hv, state.size(2), state.size(3)};
  check.require(dims.K >= 1 && dims.K <= kMaxHeadDim && dims.V >= 1 && dims.V <= kMaxHeadDim, "state",
                "of head dims 1 to 256", state);
  return dims;
}

// A view of value heads that lie one after the other, [B, T, Hv, D].
GroupedView by_key_head(View view, int64_t group) {
  const int64_t member = view.stride[2];
  view.stride[2] *= group;
  return {view, member};
}

// Part of a projection's row: heads from element `first` on, `head` elements from a key head to the next.
View part_of_row(const View& row, int64_t first, int64_t head) {
  View part = row.from(first * row.stride[2]);
  part.stride[3] = row.stride[2];
  part.stride[2] = head * row.stride[2];
  return part;
}

// Packed projections: mixed_qkv is q | k | v, z a b are tensors of their own.
void add_packed(const Checker& check, const View& row, const OptionalTensor& z, const OptionalTensor& a, const Tensor& b,
                StepParams& params) {
  const Dims& d = params.dims;
  const int64_t group = params.group();
  check.require(z.has_value(), "z must be given with layout qkv, got None");
  check.require(a.has_value(), "a must be given with layout qkv, got None");
  params.q = part_of_row(row, 0, d.K);
  params.k = part_of_row(row, d.Hk * d.K, d.K);
  params.v = {part_of_row(row, 2 * d.Hk * d.K, group * d.V), d.V * row.stride[2]};
  params.z = by_key_head(check.view("z", *z, {d.B, d.T, d.Hv, d.V}, "[B, T, Hv, V]"), group);
  params.a = by_key_head(check.view("a", *a, {d.B, d.T, d.Hv}, "[B, T, Hv]"), group);
  params.b = by_key_head(check.view("b", b, {d.B, d.T, d.Hv}, "[B, T, Hv]"), group);
}

// Interleaved ones: a key head after the other, mixed_qkv with q, k, its v's, its z's, and b with its b's and a's.
void add_interleaved(const Checker& check, const View& row, const OptionalTensor& z, const OptionalTensor& a, const Tensor& b,
                     StepParams& params) {
  const Dims& d = params.dims;
  const int64_t group = params.group(), head = 2 * d.K + 2 * group * d.V, step = row.stride[2];
  check.require(!z, "z must be None with layout interleaved: mixed_qkv holds it");
  check.require(!a, "a must be None with layout interleaved: b holds it");
  const View gates = check.view("b", b, {d.B, d.T, 2 * d.Hv}, "[B, T, 2 * Hv]");
  params.q = part_of_row(row, 0, head);
  params.k = part_of_row(row, d.K, head);
  params.v = {part_of_row(row, 2 * d.K, head), d.V * step};
  params.z = {part_of_row(row, 2 * d.K + group * d.V, head), d.V * step};
  params.b = {part_of_row(gates, 0, 2 * group), gates.stride[2]};
  params.a = {part_of_row(gates, group, 2 * group), gates.stride[2]};
}

void add_convolution(const Checker& check, const Tensor& conv_state, const Tensor& weight, const OptionalTensor& bias,
                     StepParams& params) {
  const Dims& d = params.dims;
  const int64_t channels = 2 * d.Hk * d.K + d.Hv * d.V;
  check.require_dim("conv_weight", weight, 2, "[C, W]");
  params.width = weight.size(1);
  check.require(params.width >= kMinTaps && params.width <= kMaxTaps, "conv_weight", "[C, W] with W 2 to 4", weight);
  params.conv_weight = check.view("conv_weight", weight, {channels, params.width}, "[C, W]");
  params.conv_bias = check.view("conv_bias", bias, {channels}, "[C]");
  check.require_dim("conv_state", conv_state, 3, "[slots, C, W - 1 or W]");
  params.window = conv_state.size(2);
  check.require(params.window == params.width - 1 || params.window == params.width, "conv_state",
                "of window W - 1 or W for W = " + std::to_string(params.width), conv_state);
  params.conv_state = check.written("conv_state", conv_state, {conv_state.size(0), channels, params.window},
                                    "[slots, C, W - 1 or W]");
}

}  // namespace

void gated_delta_step(Tensor mixed_qkv, OptionalTensor z, OptionalTensor a, Tensor b, Tensor conv_state, Tensor state,
                      Tensor conv_weight, OptionalTensor conv_bias, Tensor A_log, Tensor dt_bias, Tensor norm_weight,
                      Tensor out, double eps, double scale, int64_t num_key_heads, bool is_interleaved, bool use_silu,
                      bool norm_before_gate, bool allow_neg_eigval, OptionalTensor slots) {
  const Checker check("gated_delta_step", "mixed_qkv", mixed_qkv);
  StepParams params{};
  params.dims = step_dims(check, mixed_qkv, state, num_key_heads);
  const Dims& d = params.dims;
  params.state = state_view(check, "state", state, true, d);
  const int64_t channels = 2 * d.Hk * d.K + d.Hv * d.V;
  const View row = is_interleaved ? check.view("mixed_qkv", mixed_qkv, {d.B, d.T, channels + d.Hv * d.V},
                                               "[B, T, 2 * Hk * K + 2 * Hv * V]")
                                  : check.view("mixed_qkv", mixed_qkv, {d.B, d.T, channels}, "[B, T, 2 * Hk * K + Hv * V]");
  (is_interleaved ? add_interleaved : add_packed)(check, row, z, a, b, params);
  add_convolution(check, conv_state, conv_weight, conv_bias, params);
  params.A_log = check.view("A_log", A_log, {d.Hv}, "[Hv]");
  params.dt_bias = check.view("dt_bias", dt_bias, {d.Hv}, "[Hv]");
  params.norm_weight = check.view("norm_weight", norm_weight, {d.V}, "[V]");
  params.out = by_key_head(check.written("out", out, {d.B, d.T, d.Hv, d.V}, "[B, T, Hv, V]"), params.group());
  check.require_apart("out", out, "mixed_qkv", mixed_qkv);
  if (z) check.require_apart("out", out, "z", *z);
  check.require_apart("out", out, "state", state);
  check.require_apart("out", out, "conv_state", conv_state);
  params.slots = check.index("slots", slots, d.N);
  require_pool(check, "conv_state", conv_state, slots.has_value(), d.N);
  require_pool(check, "state", state, slots.has_value(), d.N);
  params.pool = std::min(conv_state.size(0), state.size(0));
  params.eps = static_cast<float>(eps);
  params.scale = static_cast<float>(scale);
  params.use_silu = use_silu;
  params.norm_before_gate = norm_before_gate;
  params.allow_neg_eigval = allow_neg_eigval;
  run<StepParams, cpu::gated_delta_step, cuda::gated_delta_step>(check, params);
}

}  // namespace gdn::api
