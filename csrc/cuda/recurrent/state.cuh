// SPDX-License-Identifier: Apache-2.0
// The state of a head between memory and the registers of the computing warps: read once, written once.
#pragma once

#include "config.cuh"

namespace gdn::cuda {
namespace {

// Where a lane's columns lie in a state: element offset of the first, step to the next, how many are inside V.
template <int kColumns>
struct Columns {
  static constexpr bool kOfHeads = kColumns < 4;   // one column of several heads, not several of one
  int64_t first, step;
  int inside;
};

template <int kColumns>
__device__ __forceinline__ Columns<kColumns> columns_of_lane(const View& state, int64_t slot, int64_t head,
                                                             int64_t column, int64_t V) {
  Columns<kColumns> columns;
  columns.first = state.offset(slot, head, 0, column);
  columns.step = state.stride[columns.kOfHeads ? 1 : 3];
  const int64_t left = V - column;
  columns.inside = columns.kOfHeads ? (left > 0 ? kColumns : 0) : static_cast<int>(left < kColumns ? left : kColumns);
  return columns;
}

// Loads the fragment (rows and columns outside are zero) or stores it, four elements an access along the contiguous dim.
template <class state_t, bool kIsLoad, int kSteps, int kColumns>
__device__ __forceinline__ void move_quads(const View& view, const Columns<kColumns>& columns, int K, int row_group,
                                           Fragment<kSteps, kColumns>& fragment) {
  const bool k_contiguous = view.stride[2] == 1;
  state_t* const data = static_cast<state_t*>(view.data) + columns.first;
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const int row = 32 * j + kRowsPerGroup * row_group;
    if (k_contiguous) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const bool inside = row < K && c < columns.inside;
        auto* const quad = reinterpret_cast<Quad<state_t>*>(data + row + c * columns.step);
        Quad<state_t> values{};
        if (kIsLoad && inside) values = *quad;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (kIsLoad) fragment.s[c][j][i] = to_float(values.x[i]);
          else values.x[i] = from_float<state_t>(fragment.s[c][j][i]);
        }
        if (!kIsLoad && inside) *quad = values;
      }
    } else if constexpr (!Columns<kColumns>::kOfHeads) {
#pragma unroll
      for (int i = 0; i < kRowsPerGroup; ++i) {
        const bool inside = row + i < K && columns.inside > 0;
        auto* const quad = reinterpret_cast<Quad<state_t>*>(data + (row + i) * view.stride[2]);
        Quad<state_t> values{};
        if (kIsLoad && inside) values = *quad;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (kIsLoad) fragment.s[c][j][i] = to_float(values.x[c]);
          else values.x[c] = from_float<state_t>(fragment.s[c][j][i]);
        }
        if (!kIsLoad && inside) *quad = values;
      }
    }
  }
}

// The same one element an access: any strides.
template <bool kIsLoad, int kSteps, int kColumns>
__device__ __forceinline__ void move_elements(const View& view, const Columns<kColumns>& columns, int K, int row_group,
                                              Fragment<kSteps, kColumns>& fragment) {
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
#pragma unroll
    for (int i = 0; i < kRowsPerGroup; ++i) {
      const int row = 32 * j + kRowsPerGroup * row_group + i;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const bool inside = row < K && c < columns.inside;
        const int64_t element = columns.first + row * view.stride[2] + c * columns.step;
        if (kIsLoad) fragment.s[c][j][i] = inside ? view.load(element) : 0.0f;
        else if (inside) view.store(element, fragment.s[c][j][i]);
      }
    }
  }
}

template <bool kIsLoad, int kSteps, int kColumns>
__device__ __forceinline__ void move_state(const View& view, const Columns<kColumns>& columns, bool in_quads, int K,
                                           int row_group, Fragment<kSteps, kColumns>& fragment) {
  if (!in_quads) {
    move_elements<kIsLoad>(view, columns, K, row_group, fragment);
  } else if (view.dtype == DType::kFloat32) {
    move_quads<float, kIsLoad>(view, columns, K, row_group, fragment);
  } else if (view.dtype == DType::kBFloat16) {
    move_quads<bf16_t, kIsLoad>(view, columns, K, row_group, fragment);
  } else {
    move_quads<fp16_t, kIsLoad>(view, columns, K, row_group, fragment);
  }
}

}  // namespace
}  // namespace gdn::cuda
