// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/ldmatrix.cuh: 8x8 matrices of 16-bit elements.
#pragma once

#include "../machine.h"

namespace gdn::cuda::ptx {

struct MatrixArgument {
  uint32_t smem;
  uint32_t* x;
};

// Lane l holds row l / 4, columns 2 (l % 4) and the next one, of each of four matrices; lane 8 m + r points at row r of m.
template <bool kIsStore, bool kIsTransposed>
void move_matrices(uint32_t smem, uint32_t* x) {
  if (smem % 16 != 0) emulated::fail("an ldmatrix or stmatrix that is not aligned to 16 bytes");
  MatrixArgument argument{emulated::cluster_address(smem), x};
  emulated::with_warp(&argument, [](void** lanes) {
    for (int i = 0; i < 4 * emulated::kWarp * 2; ++i) {
      const int matrix = i / 64, lane = i / 2 % 32, half = i % 2;
      int row = lane / 4, column = 2 * (lane % 4) + half;
      if (kIsTransposed) std::swap(row, column);
      uint32_t& word = static_cast<MatrixArgument*>(lanes[lane])->x[matrix];
      char* const at = emulated::shared_at(static_cast<MatrixArgument*>(lanes[8 * matrix + row])->smem, 16) + 2 * column;
      uint16_t bits = static_cast<uint16_t>(word >> (16 * half));
      if (kIsStore) {
        std::memcpy(at, &bits, 2);
      } else {
        std::memcpy(&bits, at, 2);
        word = (word & ~(0xffffu << (16 * half))) | static_cast<uint32_t>(bits) << (16 * half);
      }
    }
  });
}

inline void ldmatrix_x4(uint32_t smem, uint32_t (&x)[4]) { move_matrices<false, false>(smem, x); }
inline void ldmatrix_x4_trans(uint32_t smem, uint32_t (&x)[4]) { move_matrices<false, true>(smem, x); }
inline void stmatrix_x4(uint32_t smem, const uint32_t (&x)[4]) { move_matrices<true, false>(smem, const_cast<uint32_t*>(x)); }
inline void stmatrix_x4_trans(uint32_t smem, const uint32_t (&x)[4]) {
  move_matrices<true, true>(smem, const_cast<uint32_t*>(x));
}

inline uint32_t movmatrix_trans(uint32_t x) {
  uint32_t words[2] = {x, 0};
  emulated::with_warp(words, [](void** lanes) {
    for (int i = 0; i < 2 * emulated::kWarp; ++i) {
      const int lane = i / 2, half = i % 2, row = lane / 4, column = 2 * (lane % 4) + half;
      const uint32_t source = static_cast<uint32_t*>(lanes[4 * column + row / 2])[0];
      static_cast<uint32_t*>(lanes[lane])[1] |= (source >> (16 * (row % 2)) & 0xffffu) << (16 * half);
    }
  });
  return words[1];
}

}  // namespace gdn::cuda::ptx
