// SPDX-License-Identifier: Apache-2.0
// S between a group's accumulators and memory, any strides, any dtype. It goes through shared memory, a panel of 64 columns of
// S^T at a time, in one loop that is not unrolled: code that runs once costs ten clocks an instruction, and 64 accumulators
// with an address each, in three dtypes and two directions, are some thousands.
#pragma once

#include "../ptx/arch.cuh"
#include "../ptx/bar.cuh"
#include "config.h"
#include "range.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kStateBarrier = 1;   // of group 0's 128 threads; the next one is group 1's

// Where element (row, column) of an fp32 panel lies: the lanes of an accumulator, of a row, of a column hit different banks.
__device__ __forceinline__ int panel_place(int row, int column) {
  return row * 64 + (column ^ (row % 8 * 8 + row / 8 % 4 * 2));
}

// A panel between shared memory and memory; `data` is its first element, strides are those of a row and of a column of S^T.
// kCount neighbours at a time, the number that 16 bytes hold or 1.
template <bool kIsLoad, int kCount, class state_t>
__device__ __forceinline__ void move_pieces(state_t* data, int64_t row_stride, int64_t column_stride, int thread,
                                            float* panel) {
  constexpr int kPieces = 64 / kCount, kAtOnce = kCount == 1 ? 8 : 64 * kPieces / kGroupThreads;
  const bool rows_are_near = row_stride == 1;
  const auto place = [&](int far, int near) { return rows_are_near ? panel_place(near, far) : panel_place(far, near); };
  const auto element = [&](int far, int near) {
    return data + (rows_are_near ? near * row_stride + far * column_stride : far * row_stride + near * column_stride);
  };
  struct alignas(kCount * sizeof(state_t)) Piece {
    state_t x[kCount];
  };
#pragma unroll 1
  for (int first = thread; first < 64 * kPieces; first += kAtOnce * kGroupThreads) {
    Piece piece[kAtOnce];
    if constexpr (kIsLoad) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int idx = first + i * kGroupThreads;
        piece[i] = *reinterpret_cast<const Piece*>(element(idx / kPieces, idx % kPieces * kCount));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int far = (first + i * kGroupThreads) / kPieces, near = (first + i * kGroupThreads) % kPieces * kCount;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        float& staged = panel[place(far, near + j)];
        if constexpr (kIsLoad) {
          staged = to_float(piece[i].x[j]);
        } else {
          piece[i].x[j] = from_float<state_t>(staged);
        }
      }
      if constexpr (!kIsLoad) *reinterpret_cast<Piece*>(element(far, near)) = piece[i];
    }
  }
}

template <bool kIsLoad, class state_t>
__device__ __forceinline__ void move_panel(const View& view, int64_t first, int thread, float* panel) {
  constexpr int kCount = 16 / sizeof(state_t);
  state_t* const data = static_cast<state_t*>(view.data) + first;
  const int64_t row_stride = view.stride[3], column_stride = view.stride[2];
  const bool is_whole = (row_stride == 1 && column_stride % kCount == 0 || column_stride == 1 && row_stride % kCount == 0) &&
                        reinterpret_cast<uintptr_t>(data) % 16 == 0;
  if (is_whole) {
    move_pieces<kIsLoad, kCount>(data, row_stride, column_stride, thread, panel);
  } else {
    move_pieces<kIsLoad, 1>(data, row_stride, column_stride, thread, panel);
  }
}

template <bool kIsLoad>
__device__ __forceinline__ void move_panel(const View& view, int64_t first, int thread, float* panel) {
  if (view.dtype == DType::kFloat32) {
    move_panel<kIsLoad, float>(view, first, thread, panel);
  } else if (view.dtype == DType::kBFloat16) {
    move_panel<kIsLoad, bf16_t>(view, first, thread, panel);
  } else {
    move_panel<kIsLoad, fp16_t>(view, first, thread, panel);
  }
}

// What a thread has of a panel, to or from its place in shared memory.
template <bool kIsLoad>
__device__ __forceinline__ void move_sums(int row, int lane, const float (&factor)[2], float* panel, float (&s)[32]) {
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int r = i / 2 % 2;
    float2& staged = *reinterpret_cast<float2*>(panel + panel_place(row + 8 * r, sum_column(lane, i)));
    if constexpr (kIsLoad) {
      s[i] = staged.x;
      s[i + 1] = staged.y;
    } else {
      staged = make_float2(s[i] * factor[r], s[i + 1] * factor[r]);
    }
  }
}

// By a group that has the barrier for itself. `first` is the element of S at row 0 of K and the group's first column of V;
// panel: 16 KB that nobody uses.
template <bool kIsLoad, int kKeyDim>
__device__ __forceinline__ void move_state(const View& view, int64_t first, int barrier, float* panel, State<kKeyDim>& state) {
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x % kGroupThreads));   // or 16 addresses live through all chunks
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const float factor[2] = {power_of_two(state.exponent[0]), power_of_two(state.exponent[1])};
#pragma unroll 1
  for (int index = 0; index < state.kPanels; ++index) {
    if constexpr (kIsLoad) {
      move_panel<true>(view, first + 64 * index * view.stride[2], thread, panel);
      ptx::bar_sync(barrier, kGroupThreads);
    }
#pragma unroll
    for (int i = 0; i < state.kPanels; ++i) {   // registers have no index
      if (i == index) move_sums<kIsLoad>(row, lane, factor, panel, state.s[i]);
    }
    ptx::bar_sync(barrier, kGroupThreads);
    if constexpr (!kIsLoad) {
      move_panel<false>(view, first + 64 * index * view.stride[2], thread, panel);
      ptx::bar_sync(barrier, kGroupThreads);
    }
  }
}

}  // namespace gdn::cuda::chunk_sm90
