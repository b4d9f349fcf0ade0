// SPDX-License-Identifier: Apache-2.0
// The state of a head between memory and the registers of the computing warps: read once, written once.
#pragma once

#include "config.cuh"

namespace gdn::cuda {
namespace {

// Where a lane's columns lie in a state: element offset of the first, step to the next, how many are inside V.
struct Columns {
  int64_t first, step;
  int inside;
};

template <class Cut>
__device__ __forceinline__ Columns columns_of_lane(const View& state, int64_t slot, int64_t head, int64_t column,
                                                   int64_t V) {
  Columns columns;
  columns.first = state.offset(slot, head, 0, column);
  columns.step = state.stride[Cut::kOfHeads ? 1 : 3];
  columns.inside = Cut::kOfHeads ? (column < V ? Cut::kColumns : 0) : static_cast<int>(V - column);
  return columns;
}

// Loads the fragment (rows and columns outside are zero) or stores it, several elements an access along the contiguous dim:
// the adjacent rows that a lane owns, or its four columns of a head.
template <class state_t, bool kIsLoad, class Cut>
__device__ __forceinline__ void move_packs(const View& view, const Columns& columns, int K, int row_group,
                                           Fragment<Cut>& fragment) {
  const bool k_contiguous = view.stride[2] == 1;
  state_t* const data = static_cast<state_t*>(view.data) + columns.first;
#pragma unroll
  for (int j = 0; j < Cut::kSteps; ++j) {
    const int row = 32 * j + kRows * row_group;
    if (k_contiguous) {
#pragma unroll
      for (int c = 0; c < Cut::kColumns; ++c) {
        const bool inside = row < K && c < columns.inside;
        auto* const pack = reinterpret_cast<Pack<state_t, kRows>*>(data + row + c * columns.step);
        Pack<state_t, kRows> values{};
        if (kIsLoad && inside) values = *pack;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (kIsLoad) fragment.s[c][j][i] = to_float(values.x[i]);
          else values.x[i] = from_float<state_t>(fragment.s[c][j][i]);
        }
        if (!kIsLoad && inside) *pack = values;
      }
    } else if constexpr (!Cut::kOfHeads) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool inside = row + i < K && columns.inside > 0;
        auto* const pack = reinterpret_cast<Pack<state_t, Cut::kColumns>*>(data + (row + i) * view.stride[2]);
        Pack<state_t, Cut::kColumns> values{};
        if (kIsLoad && inside) values = *pack;
#pragma unroll
        for (int c = 0; c < Cut::kColumns; ++c) {
          if (kIsLoad) fragment.s[c][j][i] = to_float(values.x[c]);
          else values.x[c] = from_float<state_t>(fragment.s[c][j][i]);
        }
        if (!kIsLoad && inside) *pack = values;
      }
    }
  }
}

// The same one element an access: any strides.
template <bool kIsLoad, class Cut>
__device__ __forceinline__ void move_elements(const View& view, const Columns& columns, int K, int row_group,
                                              Fragment<Cut>& fragment) {
#pragma unroll
  for (int j = 0; j < Cut::kSteps; ++j) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = 32 * j + kRows * row_group + i;
#pragma unroll
      for (int c = 0; c < Cut::kColumns; ++c) {
        const bool inside = row < K && c < columns.inside;
        const int64_t element = columns.first + row * view.stride[2] + c * columns.step;
        if (kIsLoad) fragment.s[c][j][i] = inside ? view.load(element) : 0.0f;
        else if (inside) view.store(element, fragment.s[c][j][i]);
      }
    }
  }
}

template <bool kIsLoad, class Cut>
__device__ __forceinline__ void move_state(const View& view, const Columns& columns, bool in_quads, int K,
                                           int row_group, Fragment<Cut>& fragment) {
  if (!in_quads) {
    move_elements<kIsLoad>(view, columns, K, row_group, fragment);
  } else if (view.dtype == DType::kFloat32) {
    move_packs<float, kIsLoad>(view, columns, K, row_group, fragment);
  } else if (view.dtype == DType::kBFloat16) {
    move_packs<bf16_t, kIsLoad>(view, columns, K, row_group, fragment);
  } else {
    move_packs<fp16_t, kIsLoad>(view, columns, K, row_group, fragment);
  }
}

}  // namespace
}  // namespace gdn::cuda
