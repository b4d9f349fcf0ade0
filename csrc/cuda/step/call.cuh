// SPDX-License-Identifier: Apache-2.0
// A call as the clustered step reads it: StepParams with the strides in bytes and in 32 bits, so that a term of an address
// is one multiply-add.
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
// Elements by index, of rows of `columns` columns: weights [C, W], a slot's window [C, window]; vectors have one column.
struct Matrix {
  char* data;
  int32_t row, column, columns;
  DType dtype;
  bool is_packed;   // four columns side by side, rows too, aligned: a row is one access
};

GDN_INLINE int64_t wide(int32_t x, int32_t stride) { return static_cast<int64_t>(x) * stride; }

struct StepCall {
  Heads q, k, v, z, out, a, b;          // q and k have no members
  Matrix conv_weight, conv_bias, window, A_log, dt_bias, norm_weight;
  char* state;
  int32_t state_slot, state_head, state_line;   // line: K-first a row of V elements, V-first a column of K
  int32_t window_slot;
  IndexView slots;
  int64_t pool;
  int32_t key_heads, group, V;
  int32_t width;
  float eps, scale;
  bool use_silu, norm_before_gate, allow_neg_eigval;
};

inline bool is_v_first(const View& state) { return state.stride[3] != 1; }

inline bool fits_in_bytes(const View& view) {
  for (int64_t stride : view.stride) {
    if (stride > INT32_MAX / 4 || stride < -(INT32_MAX / 4)) return false;
  }
  return true;
}

inline Heads heads_of(const View& view, int64_t member) {
  const int size = dtype_size(view.dtype);
  const auto bytes = [&](int64_t stride) { return static_cast<int32_t>(stride) * size; };
  return {static_cast<char*>(view.data), bytes(view.stride[0]), bytes(view.stride[2]), bytes(member), bytes(view.stride[3]),
          view.dtype};
}
inline Heads heads_of(const GroupedView& heads) { return heads_of(heads.view, heads.member); }

// dim: of the rows.
inline Matrix matrix_of(const View& view, int dim, int64_t columns) {
  const int size = dtype_size(view.dtype);
  const int64_t column = dim < 3 ? view.stride[dim + 1] : 0;
  const bool is_packed = columns == 4 && column == 1 && view.stride[dim] == 4 &&
                         reinterpret_cast<uintptr_t>(view.data) % (4 * size) == 0 && (dim == 0 || view.stride[0] % 4 == 0);
  return {static_cast<char*>(view.data), static_cast<int32_t>(view.stride[dim]) * size, static_cast<int32_t>(column) * size,
          static_cast<int32_t>(columns), view.dtype, is_packed};
}

// Whether a StepCall can hold the call: one token, 32-bit strides and offsets of a head, 16-byte accesses to the state.
inline bool has_call(const StepParams& p) {
  const Dims& d = p.dims;
  if (d.T != 1 || d.N * d.Hk > INT32_MAX / 16 || p.pool > INT32_MAX) return false;
  for (const View* view : {&p.q, &p.k, &p.v.view, &p.z.view, &p.out.view, &p.a.view, &p.b.view, &p.conv_weight, &p.conv_bias,
                           &p.conv_state, &p.state, &p.A_log, &p.dt_bias, &p.norm_weight}) {
    if (view->given() && !fits_in_bytes(*view)) return false;
  }
  const bool v_first = is_v_first(p.state);
  const int64_t line = p.state.stride[v_first ? 3 : 2], vector = 16 / dtype_size(p.state.dtype);
  const bool is_whole = p.state.stride[v_first ? 2 : 3] == 1 && line % vector == 0 && p.state.stride[0] % vector == 0 &&
                        p.state.stride[1] % vector == 0 && reinterpret_cast<uintptr_t>(p.state.data) % 16 == 0;
  return is_whole && line >= 0 && line < (1 << 20);
}

inline StepCall call_of(const StepParams& p) {
  const int state_size = dtype_size(p.state.dtype);
  StepCall call = {};
  call.q = heads_of(p.q, 0);
  call.k = heads_of(p.k, 0);
  call.v = heads_of(p.v);
  call.z = heads_of(p.z);
  call.out = heads_of(p.out);
  call.a = heads_of(p.a);
  call.b = heads_of(p.b);
  call.conv_weight = matrix_of(p.conv_weight, 0, p.width);
  call.conv_bias = matrix_of(p.conv_bias, 0, 1);
  call.window = matrix_of(p.conv_state, 1, p.window);
  call.A_log = matrix_of(p.A_log, 0, 1);
  call.dt_bias = matrix_of(p.dt_bias, 0, 1);
  call.norm_weight = matrix_of(p.norm_weight, 0, 1);
  call.window_slot = static_cast<int32_t>(p.conv_state.stride[0]) * dtype_size(p.conv_state.dtype);
  call.state = static_cast<char*>(p.state.data);
  call.state_slot = static_cast<int32_t>(p.state.stride[0]) * state_size;
  call.state_head = static_cast<int32_t>(p.state.stride[1]) * state_size;
  call.state_line = static_cast<int32_t>(p.state.stride[is_v_first(p.state) ? 3 : 2]) * state_size;
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
