// SPDX-License-Identifier: Apache-2.0
// T = (I + A)^-1 diag(beta) for a strictly lower triangular A of 64 x 64 held by four warps, 16 rows each.
//     D_i  = (I + A_ii)^-1                                     16 x 16, fp32, forward substitution
//     T_ii = D_i diag(beta_i);  T_ij = -D_i sum_{m=j}^{i-1} A_im T_mj   for j < i, fp16 operands, fp32 sums
// Blocks at distance d below the diagonal need those nearer to it: three rounds with a barrier before each.
#pragma once

#include <cstdint>

#include "../ptx/arch.cuh"
#include "../ptx/bar.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/shared.cuh"
#include "fragment.cuh"
#include "swizzle.cuh"

namespace gdn::cuda {

// Scratch of one warp, 768 bytes: a diagonal block of A, fp32, first rows 0..7 of 8 columns, then rows 8..15 of 16. Then, in
// the same place, D, fp16, row-major.
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

// The diagonal block of warp `warp`: scratch.a -> T_ii into smem_t, D as an A operand. Lanes 0..15 write T, 16..31 D.
__device__ __forceinline__ void solve_diagonal(SolveScratch& scratch, const float* smem_beta, char* smem_t, int warp,
                                               int lane, uint32_t (&inverse)[4]) {
  const int column = lane % 16;
  float x[16];
  __syncwarp();   // scratch.a is written by the whole warp
  invert_unit_lower_16(scratch.a, column, x);
  __syncwarp();   // and read
  // Lanes below 16: T, each row's 16-byte chunk swizzled by its row % 8; the others: D, plain rows of 32 bytes.
  const bool is_t = lane < 16;
  const float factor = is_t ? smem_beta[16 * warp + column] : 1.0f;
  const int first = is_t ? static_cast<int>(swizzled_offset<64>(16 * warp, 2 * warp + column / 8)) + 2 * (column % 8)
                         : static_cast<int>(reinterpret_cast<char*>(scratch.a) - smem_t) + 2 * column;
  const int pitch = is_t ? kPanelRowBytes : 32, flip = is_t ? 16 : 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    *reinterpret_cast<fp16_t*>(smem_t + ((first ^ (flip * (i % 8))) + pitch * i)) = from_float<fp16_t>(x[i] * factor);
  }
  __syncwarp();
  lane = ptx::opaque(lane);   // or its address is made ahead of the whole and spilled
  ptx::ldmatrix_x4(ptx::shared_address(scratch.a) + (lane % 16) * 32 + (lane / 16) * 16, inverse);
}

// T_{warp, column_block} into the tile at shared address t. off_diagonal[m]: A_{warp, m} as A operands.
__device__ __forceinline__ void solve_block(const uint32_t (&off_diagonal)[3][4], const uint32_t (&inverse)[4], uint32_t t,
                                            int warp, int column_block, int lane) {
  float z[2][4] = {};   // sum of A_im T_mj, columns 0..7 and 8..15
#pragma unroll
  for (int m = 0; m < 3; ++m) {
    if (m >= column_block && m < warp) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(block_address(t, m, column_block, lane), b);
      ptx::mma_m16n8k16(z[0], off_diagonal[m], b[0], b[1]);
      ptx::mma_m16n8k16(z[1], off_diagonal[m], b[2], b[3]);
    }
  }
  uint32_t block[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t upper = ptx::movmatrix_trans(round_pair_fp16(-z[half][0], -z[half][1]));
    const uint32_t lower = ptx::movmatrix_trans(round_pair_fp16(-z[half][2], -z[half][3]));
    float r[4] = {};
    ptx::mma_m16n8k16(r, inverse, upper, lower);
    block[2 * half] = round_pair_fp16(r[0], r[1]);
    block[2 * half + 1] = round_pair_fp16(r[2], r[3]);
  }
  ptx::stmatrix_x4(block_address(t, warp, column_block, lane), block);
}

// All blocks below the diagonal; `barrier_id` is a barrier of the four warps. One body for the three rounds, for the
// instruction cache.
__device__ __forceinline__ void solve_off_diagonal(const uint32_t (&off_diagonal)[3][4], const uint32_t (&inverse)[4],
                                                   uint32_t t, int barrier_id, int warp, int lane) {
#pragma unroll 1
  for (int distance = 1; distance < 4; ++distance) {
    ptx::bar_sync(barrier_id, 128);   // the blocks at smaller distances are written
    if (warp >= distance) solve_block(off_diagonal, inverse, t, warp, warp - distance, lane);
  }
}

}  // namespace gdn::cuda
