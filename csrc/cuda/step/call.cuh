// SPDX-License-Identifier: Apache-2.0
// A call as the clustered step reads it: StepParams with the strides in bytes and in 32 bits, offsets within a row or a slot
// in 32 bits too. What is unusual does not fit and goes to the other kernel: the few instructions before the first loads are
// most of what a small batch costs beyond its bytes.
#pragma once

#include "../../common/params.h"

namespace gdn::cuda {
namespace {

// A tensor of value heads, one token: element i of member m of key head hk of row n.
struct Heads {
  char* data;
  int32_t row, head, member, element;
  DType dtype;
};
// Rows of up to four elements side by side: weights [C, W], a slot's window [C, window].
struct Rows {
  char* data;
  int32_t row, columns;
  DType dtype;
  bool is_packed;   // four columns, rows side by side and aligned: a row is one access
};
struct Vector {
  char* data;
  int32_t step;
  DType dtype;
};

// A term of a 64-bit address, by one multiply-add.
GDN_INLINE int64_t wide(int32_t x, int32_t stride) { return static_cast<int64_t>(x) * stride; }

struct StepCall {
  Heads q, v, z, out, a, b;             // q has no members
  int32_t from_q_to_k;                  // bytes
  Rows weight, window;
  Vector bias, A_log, dt_bias, norm_weight;
  int32_t window_slot;
  char* state;
  int32_t state_slot, state_head, state_line;   // line: K-first a row of V elements, V-first a column of K
  IndexView slots;
  int64_t pool;
  int32_t key_heads, group, V, width;
  float eps, scale;
  bool use_silu, norm_before_gate, allow_neg_eigval;
};

inline bool is_v_first(const View& state) { return state.stride[3] != 1; }

// Whether `bytes` can be an offset in 32 bits.
inline bool is_small(int64_t bytes) { return bytes > -(1 << 30) && bytes < (1 << 30); }

inline bool fits(const View& view, int64_t heads, int64_t member, int64_t elements) {
  const int size = dtype_size(view.dtype);
  return is_small(view.stride[0] * size) && is_small(heads * view.stride[2] * size) && is_small(heads * member * size) &&
         is_small(elements * view.stride[3] * size);
}

inline Heads heads_of(const View& view, int64_t member) {
  const int size = dtype_size(view.dtype);
  const auto bytes = [&](int64_t stride) { return static_cast<int32_t>(stride * size); };
  return {static_cast<char*>(view.data), bytes(view.stride[0]), bytes(view.stride[2]), bytes(member), bytes(view.stride[3]),
          view.dtype};
}

// dim: of the rows.
inline Rows rows_of(const View& view, int dim, int64_t columns) {
  const int size = dtype_size(view.dtype);
  const bool is_packed = columns == 4 && view.stride[dim] == 4 && (dim == 0 || view.stride[0] % 4 == 0) &&
                         reinterpret_cast<uintptr_t>(view.data) % (4 * size) == 0;
  return {static_cast<char*>(view.data), static_cast<int32_t>(view.stride[dim] * size), static_cast<int32_t>(columns),
          view.dtype, is_packed};
}
inline bool fits_rows(const View& view, int dim, int64_t channels) {
  const int size = dtype_size(view.dtype);
  return view.stride[dim + 1] == 1 && is_small(channels * view.stride[dim] * size) &&
         (dim == 0 || is_small(view.stride[0] * size));
}

inline Vector vector_of(const View& view) {
  return {static_cast<char*>(view.data), static_cast<int32_t>(view.stride[0] * dtype_size(view.dtype)), view.dtype};
}

// Whether a StepCall can hold the call: one token, small strides, windows and weights with their columns side by side,
// 16-byte accesses to the state.
inline bool has_call(const StepParams& p) {
  const Dims& d = p.dims;
  const int64_t channels = 2 * d.Hk * d.K + d.Hv * d.V;
  if (d.T != 1 || d.N * d.Hk > INT32_MAX / 16 || p.pool > INT32_MAX) return false;
  for (const GroupedView* heads : {&p.v, &p.z, &p.out, &p.a, &p.b}) {
    if (!fits(heads->view, d.Hv, heads->member, d.V)) return false;
  }
  for (const View* vector : {&p.conv_bias, &p.A_log, &p.dt_bias, &p.norm_weight}) {
    if (!is_small(channels * vector->stride[0] * 4)) return false;
  }
  if (!fits(p.q, d.Hv, 0, d.K) || !fits_rows(p.conv_weight, 0, channels) || !fits_rows(p.conv_state, 1, channels)) return false;
  const bool v_first = is_v_first(p.state);
  const int size = dtype_size(p.state.dtype);
  const int64_t line = p.state.stride[v_first ? 3 : 2], vector = 16 / size;
  const bool is_whole = p.state.stride[v_first ? 2 : 3] == 1 && line % vector == 0 && p.state.stride[0] % vector == 0 &&
                        p.state.stride[1] % vector == 0 && reinterpret_cast<uintptr_t>(p.state.data) % 16 == 0;
  return is_whole && is_small(p.state.stride[0] * size) && is_small(p.state.stride[1] * d.Hv * size) &&
         is_small(line * kMaxHeadDim * size);
}

inline StepCall call_of(const StepParams& p) {
  const int state_size = dtype_size(p.state.dtype);
  StepCall call = {};
  call.q = heads_of(p.q, 0);
  call.v = heads_of(p.v.view, p.v.member);
  call.z = heads_of(p.z.view, p.z.member);
  call.out = heads_of(p.out.view, p.out.member);
  call.a = heads_of(p.a.view, p.a.member);
  call.b = heads_of(p.b.view, p.b.member);
  call.from_q_to_k = static_cast<int32_t>(static_cast<char*>(p.k.data) - static_cast<char*>(p.q.data));
  call.weight = rows_of(p.conv_weight, 0, p.width);
  call.window = rows_of(p.conv_state, 1, p.window);
  call.bias = vector_of(p.conv_bias);
  call.A_log = vector_of(p.A_log);
  call.dt_bias = vector_of(p.dt_bias);
  call.norm_weight = vector_of(p.norm_weight);
  call.window_slot = static_cast<int32_t>(p.conv_state.stride[0] * dtype_size(p.conv_state.dtype));
  call.state = static_cast<char*>(p.state.data);
  call.state_slot = static_cast<int32_t>(p.state.stride[0] * state_size);
  call.state_head = static_cast<int32_t>(p.state.stride[1] * state_size);
  call.state_line = static_cast<int32_t>(p.state.stride[is_v_first(p.state) ? 3 : 2] * state_size);
  call.slots = p.slots;
  call.pool = p.pool;
  call.key_heads = static_cast<int32_t>(p.dims.Hk);
  call.group = static_cast<int32_t>(p.group());
  call.V = static_cast<int32_t>(p.dims.V);
  call.width = static_cast<int32_t>(p.width);
  call.eps = p.eps;
  call.scale = p.scale;
  call.use_silu = p.use_silu;
  call.norm_before_gate = p.norm_before_gate;
  call.allow_neg_eigval = p.allow_neg_eigval;
  return call;
}

}  // namespace
}  // namespace gdn::cuda
