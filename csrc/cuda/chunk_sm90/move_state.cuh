// SPDX-License-Identifier: Apache-2.0
// S between the accumulators of a tile group and memory, any strides, any dtype. Each thread moves its own elements, nobody
// waits for anybody. What counts here is the number of instructions: code that runs once costs ten clocks each. (Through
// shared memory and out in 16 bytes a thread took 6 us in and 9 us out.)
#pragma once

#include "../ptx/arch.cuh"
#include "config.h"
#include "range.cuh"

namespace gdn::cuda::chunk_sm90 {

// A thread's elements of S^T; `mine` is the first of its rows, strides are those of a row and of a column. Loads true values
// at exponent 0, stores true values. kPairs: neighbours of a row lie side by side and are moved together.
template <bool kIsLoad, bool kPairs, class state_t, int kKeyDim>
__device__ __forceinline__ void move_elements(state_t* mine, int64_t row_stride, int64_t column_stride, State<kKeyDim>& state) {
  struct alignas(2 * sizeof(state_t)) Pair {
    state_t low, high;
  };
  const float factor[2] = {power_of_two(state.exponent[0]), power_of_two(state.exponent[1])};
#pragma unroll
  for (int i = 0; i < kKeyDim / 2; i += 4) {   // eight columns, two of them the lane's
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float &low = state.s[i / 32][i % 32 + 2 * r], &high = state.s[i / 32][i % 32 + 2 * r + 1];
      state_t* const at = mine + 8 * r * row_stride;
      if constexpr (kIsLoad) {
        const Pair pair = kPairs ? *reinterpret_cast<const Pair*>(at) : Pair{at[0], at[column_stride]};
        low = to_float(pair.low);
        high = to_float(pair.high);
      } else {
        const Pair pair = {from_float<state_t>(low * factor[r]), from_float<state_t>(high * factor[r])};
        if constexpr (kPairs) {
          *reinterpret_cast<Pair*>(at) = pair;
        } else {
          at[0] = pair.low;
          at[column_stride] = pair.high;
        }
      }
    }
    mine += kPairs ? 8 : 8 * column_stride;
  }
}

template <bool kIsLoad, class state_t, int kKeyDim>
__device__ __forceinline__ void move_elements(const View& view, int64_t first, State<kKeyDim>& state) {
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x % kGroupThreads));   // or addresses live through all chunks
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const int64_t row_stride = view.stride[3], column_stride = view.stride[2];
  state_t* const mine = static_cast<state_t*>(view.data) + first + row * row_stride + sum_column(lane, 0) * column_stride;
  if (column_stride == 1 && row_stride % 2 == 0 && reinterpret_cast<uintptr_t>(mine) % (2 * sizeof(state_t)) == 0) {
    move_elements<kIsLoad, true>(mine, row_stride, column_stride, state);
  } else {
    move_elements<kIsLoad, false>(mine, row_stride, column_stride, state);
  }
}

// `first` is the element of S at row 0 of K and the group's first column of V.
template <bool kIsLoad, int kKeyDim>
__device__ __forceinline__ void move_state(const View& view, int64_t first, State<kKeyDim>& state) {
  if (view.dtype == DType::kFloat32) {
    move_elements<kIsLoad, float>(view, first, state);
  } else if (view.dtype == DType::kBFloat16) {
    move_elements<kIsLoad, bf16_t>(view, first, state);
  } else {
    move_elements<kIsLoad, fp16_t>(view, first, state);
  }
}

}  // namespace gdn::cuda::chunk_sm90
