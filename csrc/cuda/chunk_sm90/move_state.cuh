// SPDX-License-Identifier: Apache-2.0
// S between the accumulators of a tile group and memory, any strides, any dtype. Each thread moves its own elements, nobody
// waits for anybody. What counts here is the number of instructions: code that runs once costs ten clocks each. (Through
// shared memory and out in 16 bytes a thread took 6 us in and 9 us out.)
#pragma once

#include "../ptx/arch.cuh"
#include "config.h"
#include "range.cuh"

namespace gdn::cuda::chunk_sm90 {

// How an element of a state is stored: fp32, or 16 bits of which only the call says what they are. One piece of code for both
// kinds of 16 bits: with two, calls of 2,048 tokens took 58.8 us for 57.5 (H200), the kernel 6,553 instructions for 6,217.
struct Stored32 {
  using Word = float;
  __device__ __forceinline__ float widen(float x) const { return x; }
  __device__ __forceinline__ float round(float x) const { return x; }
};
struct Stored16 {
  using Word = uint16_t;
  bool is_bf16;
  __device__ __forceinline__ float widen(uint16_t x) const { return is_bf16 ? to_float(bf16_t{x}) : to_float(fp16_t{x}); }
  __device__ __forceinline__ uint16_t round(float x) const {
    return is_bf16 ? from_float<bf16_t>(x).bits : from_float<fp16_t>(x).bits;
  }
};

// A thread's elements of S^T; `mine` is the first of its rows, strides are those of a row and of a column. Loads true values
// at exponent 0, stores true values. kPairs: neighbours of a row lie side by side and are moved together.
template <bool kIsLoad, bool kPairs, class Stored, int kKeyDim>
__device__ __forceinline__ void move_elements(const Stored& stored, typename Stored::Word* mine, int64_t row_stride,
                                              int64_t column_stride, State<kKeyDim>& state) {
  using Word = typename Stored::Word;
  struct alignas(2 * sizeof(Word)) Pair {
    Word low, high;
  };
  const float factor[2] = {power_of_two(state.exponent[0]), power_of_two(state.exponent[1])};
#pragma unroll
  for (int i = 0; i < kKeyDim / 2; i += 4) {   // eight columns, two of them the lane's
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float &low = state.s[i / 32][i % 32 + 2 * r], &high = state.s[i / 32][i % 32 + 2 * r + 1];
      Word* const at = mine + 8 * r * row_stride;
      if constexpr (kIsLoad) {
        const Pair pair = kPairs ? *reinterpret_cast<const Pair*>(at) : Pair{at[0], at[column_stride]};
        low = stored.widen(pair.low);
        high = stored.widen(pair.high);
      } else {
        const Pair pair = {stored.round(low * factor[r]), stored.round(high * factor[r])};
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

template <bool kIsLoad, class Stored, int kKeyDim>
__device__ __forceinline__ void move_elements(const Stored& stored, const View& view, int64_t first, State<kKeyDim>& state) {
  using Word = typename Stored::Word;
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x % kGroupThreads));   // or addresses live through all chunks
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const int64_t row_stride = view.stride[3], column_stride = view.stride[2];
  Word* const mine = static_cast<Word*>(view.data) + first + row * row_stride + sum_column(lane, 0) * column_stride;
  if (column_stride == 1 && row_stride % 2 == 0 && reinterpret_cast<uintptr_t>(mine) % (2 * sizeof(Word)) == 0) {
    move_elements<kIsLoad, true>(stored, mine, row_stride, column_stride, state);
  } else {
    move_elements<kIsLoad, false>(stored, mine, row_stride, column_stride, state);
  }
}

// `first` is the element of S at row 0 of K and the group's first column of V.
template <bool kIsLoad, int kKeyDim>
__device__ __forceinline__ void move_state(const View& view, int64_t first, State<kKeyDim>& state) {
  if (view.dtype == DType::kFloat32) {
    move_elements<kIsLoad>(Stored32{}, view, first, state);
  } else {
    move_elements<kIsLoad>(Stored16{view.dtype == DType::kBFloat16}, view, first, state);
  }
}

}  // namespace gdn::cuda::chunk_sm90
