// SPDX-License-Identifier: Apache-2.0
#include "../../torch-ext/torch_binding.h"
#include "../common/conv.h"
#include "../cuda/ops.h"
#include "checks.h"

namespace gdn::api {
namespace {

constexpr int64_t kMaxUpdateTokens = 8;

// What both ops share: x, out and weight; the caller adds the rest.
ConvParams conv_params(const Checker& check, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                       const Tensor& out, bool use_silu) {
  check.require_dim("x", x, 3, "[B, C, T]");
  check.require_dim("weight", weight, 2, "[C, W]");
  ConvParams params{};
  params.B = x.size(0);
  params.C = x.size(1);
  params.T = x.size(2);
  params.width = weight.size(1);
  check.require(params.width >= kMinTaps && params.width <= kMaxTaps, "weight", "[C, W] with W 2 to 4", weight);
  params.x = check.view("x", x, {params.B, params.C, params.T}, "[B, C, T]");
  params.out = check.written("out", out, {params.B, params.C, params.T}, "[B, C, T]");
  check.require_apart("out", out, "x", x);
  params.weight = check.view("weight", weight, {params.C, params.width}, "[C, W]");
  params.bias = check.view("bias", bias, {params.C}, "[C]");
  params.use_silu = use_silu;
  return params;
}

void add_window(const Checker& check, const Tensor& conv_state, const OptionalTensor& slots, ConvParams& params) {
  check.require_dim("conv_state", conv_state, 3, "[slots, C, W - 1 or W]");
  params.window = conv_state.size(2);
  params.pool = conv_state.size(0);
  check.require(params.window == params.width - 1 || params.window == params.width, "conv_state",
                "of window W - 1 or W for W = " + std::to_string(params.width), conv_state);
  params.conv_state = check.written("conv_state", conv_state, {params.pool, params.C, params.window},
                                    "[slots, C, W - 1 or W]");
  require_pool(check, "conv_state", conv_state, slots.has_value(), params.N);
}

// seq_idx: int32 [B, T], documents of one row told apart by number.
void add_documents(const Checker& check, const Tensor& seq_idx, ConvParams& params) {
  using torch::headeronly::ScalarType;
  check.require_same_device("seq_idx", seq_idx);
  check.require(seq_idx.scalar_type() == ScalarType::Int && seq_idx.dim() == 2 && seq_idx.size(0) == params.B &&
                    seq_idx.size(1) == params.T,
                "seq_idx", "int32 [B, T]", seq_idx);
  params.seq_idx = {seq_idx.data_ptr(), seq_idx.stride(1), false};
  params.seq_idx_row = seq_idx.stride(0);
}

}  // namespace

void causal_conv1d(Tensor x, Tensor weight, OptionalTensor bias, OptionalTensor conv_state, Tensor out, bool use_silu,
                   bool write_state, OptionalTensor cu_seqlens, OptionalTensor seq_idx, OptionalTensor slots,
                   OptionalTensor has_initial_state) {
  const Checker check("causal_conv1d", "x", x);
  ConvParams params = conv_params(check, x, weight, bias, out, use_silu);
  params.N = num_sequences(check, cu_seqlens, params.B);
  params.cu_seqlens = check.offsets(cu_seqlens, params.T);
  params.slots = check.index("slots", slots, params.N);
  params.has_initial_state = check.flags("has_initial_state", has_initial_state, params.N);
  params.write_state = write_state;
  check.require(conv_state || !slots, "slots needs conv_state, which is not given");
  check.require(conv_state || !has_initial_state, "has_initial_state needs conv_state, which is not given");
  check.require(!seq_idx || !(conv_state || cu_seqlens), "seq_idx goes with neither conv_state nor cu_seqlens");
  if (conv_state) add_window(check, *conv_state, slots, params);
  if (seq_idx) add_documents(check, *seq_idx, params);
  run<ConvParams, cpu::causal_conv1d, cuda::causal_conv1d>(check, params);
}

void causal_conv1d_update(Tensor x, Tensor conv_state, Tensor weight, OptionalTensor bias, Tensor out, bool use_silu,
                          OptionalTensor slots) {
  const Checker check("causal_conv1d_update", "x", x);
  ConvParams params = conv_params(check, x, weight, bias, out, use_silu);
  check.require(params.T <= kMaxUpdateTokens, "x", "[B, C, T] with T up to 8", x);
  params.N = params.B;
  params.slots = check.index("slots", slots, params.N);
  params.write_state = true;
  add_window(check, conv_state, slots, params);
  run<ConvParams, cpu::causal_conv1d_update, cuda::causal_conv1d_update>(check, params);
}

void conv_state_write(Tensor x, Tensor conv_state, Tensor num_accepted, OptionalTensor slots, OptionalTensor cu_seqlens,
                      OptionalTensor has_initial_state) {
  const Checker check("conv_state_write", "x", x);
  check.require_dim("x", x, 3, "[B, C, T]");
  check.require_dim("conv_state", conv_state, 3, "[slots, C, W - 1 or W]");
  ConvWriteParams params{};
  params.B = x.size(0);
  params.C = x.size(1);
  params.T = x.size(2);
  params.N = num_sequences(check, cu_seqlens, params.B);
  params.window = conv_state.size(2);
  params.pool = conv_state.size(0);
  check.require(params.window >= 1 && params.window <= kMaxTaps, "conv_state", "of window 1 to 4", conv_state);
  params.x = check.view("x", x, {params.B, params.C, params.T}, "[B, C, T]");
  params.conv_state = check.written("conv_state", conv_state, {params.pool, params.C, params.window},
                                    "[slots, C, W - 1 or W]");
  require_pool(check, "conv_state", conv_state, slots.has_value(), params.N);
  params.slots = check.index("slots", slots, params.N);
  params.cu_seqlens = check.offsets(cu_seqlens, params.T);
  params.num_accepted = check.index("num_accepted", num_accepted, params.N);
  params.has_initial_state = check.flags("has_initial_state", has_initial_state, params.N);
  run<ConvWriteParams, cpu::conv_state_write, cuda::conv_state_write>(check, params);
}

}  // namespace gdn::api
