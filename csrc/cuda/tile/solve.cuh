// SPDX-License-Identifier: Apache-2.0
// (I + A)^-1 for a strictly lower triangular A of 16 x 16, fp32, by substitution.
#pragma once

#include <cstdint>

#include "../ptx/arch.cuh"
#include "pack.cuh"

namespace gdn::cuda {

// Scratch of one warp, 768 bytes: a block of A, fp32, first rows 0..7 of 8 columns, then rows 8..15 of 16.
struct alignas(16) SolveScratch {
  float a[8 * 8 + 8 * 16];
};

// Element of SolveScratch::a at the start of row `row`.
__host__ __device__ __forceinline__ constexpr int scratch_row(int row) { return row < 8 ? 8 * row : 64 + 16 * (row - 8); }

// Column `column` of (I + A)^-1. Above the diagonal of A nothing is used. 120 fma.
__device__ __forceinline__ void invert_unit_lower_16(const float* smem_a, int column, float (&x)[16]) {
  float4 row[4], next[4];   // of A; read a row ahead
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int m = 0; m < i + 1 && i < 15; m += 4) {
      next[m / 4] = *reinterpret_cast<const float4*>(smem_a + scratch_row(i + 1) + m);
    }
    float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 a = row[m / 4];
      sum = fmaf(-a.x, x[m], sum);   // said, not left to the compiler: sections differ in whether it may fuse
      if (m + 1 < i) sum = fmaf(-a.y, x[m + 1], sum);
      if (m + 2 < i) sum = fmaf(-a.z, x[m + 2], sum);
      if (m + 3 < i) sum = fmaf(-a.w, x[m + 3], sum);
    }
    x[i] = ptx::opaque(sum);   // computed here, beside the loads, not behind a later branch
#pragma unroll
    for (int q = 0; q < 4; ++q) row[q] = next[q];
  }
}

// The same four 16 x 16 blocks at a time, by rows, for a warp: lane 8 i + r has rows r and r + 8 of block i.
constexpr int kUnitLowerFloats = 8 * 8 + 8 * 16 + 4;   // of a block; those of neighbours lie in different banks

// Rows `row` and row + 8 of (I + A)^-1; low and high come as zeros. On and above the diagonal of A nothing is used. 148 fma.
//     x (I + A) = e_row, from the last column to the first
__device__ __forceinline__ void invert_unit_lower_rows(const float* smem_a, int row, float (&low)[16], float (&high)[16]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) low[j] = high[j + 8] = j == row ? 1.0f : 0.0f;
#pragma unroll
  for (int m = 15; m > 0; --m) {
    float a[16];
#pragma unroll
    for (int j = 0; j < m; j += 4) load_floats<4>(smem_a + scratch_row(m) + j, *reinterpret_cast<float(*)[4]>(a + j));
#pragma unroll
    for (int j = 0; j < m; ++j) {   // fma is said, not left to the compiler: sections differ in whether it may fuse
      high[j] = fmaf(-high[m], a[j], high[j]);
      if (m < 8) low[j] = fmaf(-low[m], a[j], low[j]);
    }
  }
}

}  // namespace gdn::cuda
