// SPDX-License-Identifier: Apache-2.0
// A call as the decode kernels read it: RuleParams with the strides in bytes and, where they can be, in 32 bits.
#pragma once

#include "../../common/params.h"

namespace gdn::cuda {
namespace {

// Tensors as these kernels walk them, strides in bytes.
struct TokenRows {     // of q, k, v (elements of a head side by side), g, beta, out
  char* data;
  int32_t origin;      // from a sequence to the next; ragged: from a token to the next
  int32_t token, head;
};
struct StateRows {
  char* data;
  int32_t slot;
  int32_t head, line;  // line: K-first a row of V elements, V-first a column of K
};

// A term of a 64-bit address, by one multiply-add.
GDN_INLINE int64_t wide(int32_t x, int32_t stride) { return static_cast<int64_t>(x) * stride; }

struct Call {
  TokenRows q, k, v, g, beta, out;
  StateRows in, state;
  IndexView slots, out_slots, cu_seqlens;
  FlagView has_initial_state;
  RowRange rows;
  int64_t pool_in, pool_out;
  int32_t T, N, V, out_dim;              // out_dim: bytes from a column to the next
  DType dtype, g_dtype, beta_dtype, out_dtype;
  float scale;
  bool use_qk_l2norm, gate_is_linear;
  bool moves_keys;                       // rows of q and k are whole 16-byte chunks
  bool is_plain;                         // dense, row n at slot n, none left out: nothing to read before the state
};

inline bool is_v_first(const View& state) { return state.stride[3] != 1; }

// Whether all strides fit in 32 bits of bytes, and the bytes of `columns` elements too.
inline bool fits(const View& view, int64_t columns) {
  for (int64_t stride : {view.stride[0], view.stride[1], view.stride[2], columns * view.stride[3]}) {
    if (stride > INT32_MAX / 4 || stride < -(INT32_MAX / 4)) return false;
  }
  return true;
}

// 16 bytes of the contiguous dim at once: it and all strides are whole vectors, the base is aligned.
inline bool moves_in_vectors(const View& state, const Dims& dims) {
  const bool v_first = is_v_first(state);
  if (state.stride[v_first ? 2 : 3] != 1) return false;
  const int64_t vector = 16 / dtype_size(state.dtype);
  const bool strides = state.stride[0] % vector == 0 && state.stride[1] % vector == 0 &&
                       state.stride[v_first ? 3 : 2] % vector == 0;
  return strides && (v_first || dims.V % vector == 0) && reinterpret_cast<uintptr_t>(state.data) % 16 == 0 &&
         fits(state, 1);
}

// Four neighbouring elements of a token's vector by one access.
inline bool moves_in_quads(const View& view) {
  bool whole = view.stride[3] == 1 && reinterpret_cast<uintptr_t>(view.data) % (4 * dtype_size(view.dtype)) == 0;
  for (int i = 0; i < 3; ++i) whole = whole && view.stride[i] % 4 == 0;
  return whole;
}

// 16 bytes of a token's vector of `columns` elements at once.
inline bool moves_in_chunks(const View& view, int64_t columns) {
  const int64_t vector = 16 / dtype_size(view.dtype);
  bool whole = view.stride[3] == 1 && columns % vector == 0 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (int i = 0; i < 3; ++i) whole = whole && view.stride[i] % vector == 0;
  return whole;
}

// Whether a Call can hold these strides and sizes. Raw gates are the recurrence's: they would lie in the way of all others.
inline bool has_call(const RuleParams& p) {
  const Dims& dims = p.dims;
  const View &in = p.initial_state, &out = p.state;
  if (has_raw_gates(p) || dims.B * dims.T >= 1 << 24 || p.pool_in > INT32_MAX || p.pool_out > INT32_MAX) return false;
  if (in.given() && out.given() && (in.dtype != out.dtype || is_v_first(in) != is_v_first(out))) return false;
  for (const View* state : {&in, &out}) {
    if (state->given() && !moves_in_vectors(*state, dims)) return false;
  }
  for (const View* view : {&p.q, &p.k, &p.v, &p.out, &p.g, &p.beta}) {
    if (view->given() && !fits(*view, dims.V)) return false;
  }
  return p.q.stride[3] == 1 && p.k.stride[3] == 1 && p.v.stride[3] == 1;
}

inline TokenRows token_rows(const View& view, bool is_ragged) {
  const int size = dtype_size(view.dtype);
  return {static_cast<char*>(view.data), static_cast<int32_t>(view.stride[is_ragged ? 1 : 0]) * size,
          static_cast<int32_t>(view.stride[1]) * size, static_cast<int32_t>(view.stride[2]) * size};
}

inline StateRows state_rows(const View& view, bool v_first) {
  const int size = dtype_size(view.dtype);
  return {static_cast<char*>(view.data), static_cast<int32_t>(view.stride[0]) * size,
          static_cast<int32_t>(view.stride[1]) * size, static_cast<int32_t>(view.stride[v_first ? 3 : 2]) * size};
}

inline Call call_of(const RuleParams& p) {
  const bool is_ragged = p.cu_seqlens.given(), v_first = is_v_first(p.initial_state.given() ? p.initial_state : p.state);
  Call call = {};
  call.q = token_rows(p.q, is_ragged);
  call.k = token_rows(p.k, is_ragged);
  call.v = token_rows(p.v, is_ragged);
  call.g = token_rows(p.g, is_ragged);
  call.beta = token_rows(p.beta, is_ragged);
  call.out = token_rows(p.out, is_ragged);
  call.in = state_rows(p.initial_state, v_first);
  call.state = state_rows(p.state, v_first);
  call.slots = p.slots;
  call.out_slots = p.out_slots;
  call.cu_seqlens = p.cu_seqlens;
  call.has_initial_state = p.has_initial_state;
  call.rows = p.rows;
  call.pool_in = p.pool_in;
  call.pool_out = p.pool_out;
  call.T = static_cast<int32_t>(p.dims.T);
  call.N = static_cast<int32_t>(p.dims.N);
  call.V = static_cast<int32_t>(p.dims.V);
  call.out_dim = static_cast<int32_t>(p.out.stride[3]) * dtype_size(p.out.dtype);
  call.dtype = p.q.dtype;
  call.out_dtype = p.out.dtype;
  call.g_dtype = p.g.dtype;
  call.beta_dtype = p.beta.dtype;
  call.scale = p.scale;
  call.use_qk_l2norm = p.use_qk_l2norm;
  call.gate_is_linear = p.gate_domain == GateDomain::kLinear;
  call.moves_keys = moves_in_chunks(p.q, p.dims.K) && moves_in_chunks(p.k, p.dims.K);
  call.is_plain = !is_ragged && !p.slots.given() && !p.out_slots.given() && p.has_initial_state.data == nullptr &&
                  p.rows.min_length <= p.dims.T && p.rows.max_length >= p.dims.T &&
                  (!p.initial_state.given() || p.pool_in >= p.dims.N) && (!p.state.given() || p.pool_out >= p.dims.N);
  return call;
}

}  // namespace
}  // namespace gdn::cuda
