// SPDX-License-Identifier: Apache-2.0
#include "rule_inputs.h"

namespace gdn::api {
namespace {

Dims rule_dims(const Checker& check, const Tensor& q, const Tensor& v, const OptionalTensor& cu_seqlens) {
  check.require_dim("q", q, 4, "[B, T, Hk, K]");
  check.require_dim("v", v, 4, "[B, T, Hv, V]");
  Dims dims{q.size(0), q.size(1), 0, q.size(2), v.size(2), q.size(3), v.size(3)};
  dims.N = num_sequences(check, cu_seqlens, dims.B);
  if (dims.Hk < 1 || dims.Hv < 1 || dims.Hv % dims.Hk != 0) {
    check.require(false, "v must have a multiple of q's heads (Hv % Hk == 0), got " + std::to_string(dims.Hv) +
                             " value heads over " + std::to_string(dims.Hk) + " key heads");
  }
  check.require(dims.K >= 1 && dims.K <= kMaxHeadDim, "q", "of head dim 1 to 256", q);
  check.require(dims.V >= 1 && dims.V <= kMaxHeadDim, "v", "of head dim 1 to 256", v);
  return dims;
}

}  // namespace

void require_state_layout(const Checker& check, const char* name, const Tensor& state, const View& view, const Dims& dims) {
  const bool k_first = view.stride[3] == 1 || dims.V == 1, v_first = view.stride[2] == 1 || dims.K == 1;
  check.require(k_first || v_first, name, "contiguous in K or in V (stride 1)", state);
}

View state_view(const Checker& check, const char* name, const Tensor& state, bool is_written, const Dims& dims) {
  check.require_dim(name, state, 4, "[slots, Hv, K, V]");
  const auto sizes = {state.size(0), dims.Hv, dims.K, dims.V};
  const View view = is_written ? check.written(name, state, sizes, "[slots, Hv, K, V]")
                               : check.view(name, state, sizes, "[slots, Hv, K, V]");
  require_state_layout(check, name, state, view, dims);
  return view;
}

RuleParams rule_params(const Checker& check, const RuleInputs& in) {
  const Dims dims = rule_dims(check, in.q, in.v, in.cu_seqlens);
  RuleParams params{};
  params.dims = dims;
  params.q = check.view("q", in.q, {dims.B, dims.T, dims.Hk, dims.K}, "[B, T, Hk, K]");
  params.k = check.view("k", in.k, {dims.B, dims.T, dims.Hk, dims.K}, "[B, T, Hk, K]");
  params.v = check.view("v", in.v, {dims.B, dims.T, dims.Hv, dims.V}, "[B, T, Hv, V]");
  check.require_same_dtype("k", in.k, "q", in.q);
  check.require_same_dtype("v", in.v, "q", in.q);
  params.g = check.view("g", in.g, {dims.B, dims.T, dims.Hv}, "[B, T, Hv]");
  params.beta = check.view("beta", in.beta, {dims.B, dims.T, dims.Hv}, "[B, T, Hv]");
  params.out = check.written("out", in.out, {dims.B, dims.T, dims.Hv, dims.V}, "[B, T, Hv, V]");
  check.require_apart("out", in.out, "q", in.q);
  check.require_apart("out", in.out, "k", in.k);
  check.require_apart("out", in.out, "v", in.v);
  params.cu_seqlens = check.offsets(in.cu_seqlens, dims.T);
  params.scale = static_cast<float>(in.scale);
  params.use_qk_l2norm = in.use_qk_l2norm;
  params.gate_domain = in.gate_domain;
  return params;
}

}  // namespace gdn::api
