// SPDX-License-Identifier: Apache-2.0
// K K^T and Q K^T of a chunk's keys and queries, once for all value heads of a key head: in shared memory, on and below the
// diagonal, token i's row times c_i^2, c the k_scales (load.cuh): normalised keys' times c_i / c_j, as the fragments that
// head.cuh multiplies with. By the four warps of a block, on Hopper with wgmma (a warp has the rows that wgmma gives it),
// elsewhere with mma.sync (each warp a quarter of the blocks).
#pragma once

#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "exchange.cuh"
#include "load.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kBlocks16 = kChunk / 16;

// Index of block (i, j), j <= i, among those on and below the diagonal.
__host__ __device__ __forceinline__ constexpr int lower_block(int i, int j) { return i * (i + 1) / 2 + j; }
constexpr int kLowerBlocks = lower_block(kBlocks16, 0);
// The same among those below the diagonal, j < i.
__host__ __device__ __forceinline__ constexpr int below_block(int i, int j) { return lower_block(i - 1, j); }

// Products of blocks, of each what the lanes of a warp hold of it: the diagonal ones of K K^T as sums, columns 0..7, 8..15; the
// others of it, and those of Q K^T, as right operands of products with their transposes, fp16.
struct Products {
  float4 on_diagonal[kBlocks16][2][32];
  Words<16> kk[below_block(kBlocks16, 0)][32];
  Words<16> qk[kLowerBlocks][32];
};

// Sums of a block of Q K^T or K K^T as a right operand. On the diagonal of Q K^T zeros right of the diagonal.
__device__ __forceinline__ Words<16> right_operand(const float (&x)[8], bool is_cut, int lane) {
  const int row = lane / 4, column = 2 * (lane % 4);
  const bool first_in = !is_cut || column <= row, second_in = !is_cut || column < row;
  return {{round_pair_fp16(first_in ? x[0] : 0.0f, second_in ? x[1] : 0.0f),
           round_pair_fp16(is_cut ? 0.0f : x[4], is_cut ? 0.0f : x[5]), round_pair_fp16(x[2], x[3]),
           round_pair_fp16(first_in ? x[6] : 0.0f, second_in ? x[7] : 0.0f)}};
}

// Sums of a block of rows, of which `smem_k_scale` are the first one's on, times their factors.
__device__ __forceinline__ void scale_block(const float* smem_k_scale, int lane, float (&x)[8]) {
  const float of_upper = smem_k_scale[lane / 4], of_lower = smem_k_scale[lane / 4 + 8];
  const float upper = of_upper * of_upper, lower = of_lower * of_lower;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= i / 2 % 2 == 0 ? upper : lower;
}

// Sums of diagonal block `i` of K K^T to where they are used.
__device__ __forceinline__ void put_diagonal(const float (&x)[8], int i, int lane, Products& smem) {
  smem.on_diagonal[i][0][lane] = make_float4(x[0], x[1], x[2], x[3]);
  smem.on_diagonal[i][1][lane] = make_float4(x[4], x[5], x[6], x[7]);
}

// A quarter of the products, five blocks: K K^T or Q K^T, those of row blocks 3 and 0 or of 2 and 1.
template <int kKeyDim>
__device__ __forceinline__ void multiply(const Keys<kKeyDim>& keys, const float* k_scale, int quarter, int lane,
                                         Products& smem) {
  constexpr uint32_t kBlockRowBytes = 16 * kPanelRowBytes;
  // Blocks (low, 0), (low, 1), (low, 2), (high, 0), (last, last): row blocks 3, 0, 3 or 2, 1, 1.
  const int low = 3 - quarter % 2, high = quarter % 2, last = 3 - 2 * high;
  const uint32_t left = quarter < 2 ? 0 : static_cast<uint32_t>(sizeof(keys.k));   // from k to the rows
  float sums[5][8] = {};
  uint32_t rows_at[4], columns_at[4];   // as left operands; as right ones, whose halves are pairs of registers then
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    rows_at[s] = block_address(ptx::shared_address(keys.k) + left, 0, s, lane);
    columns_at[s] = transposed_block_address(ptx::shared_address(keys.k), 0, s, lane);
  }
#pragma unroll 4   // all eight: 20 registers more
  for (int s = 0; s < kKeyDim / 16; ++s) {
    const uint32_t panel = s / 4 * (kChunk * kPanelRowBytes), rows = rows_at[s % 4] + panel, k = columns_at[s % 4] + panel;
    uint32_t low_rows[4], high_rows[4], last_rows[4];
    ptx::ldmatrix_x4(rows + low * kBlockRowBytes, low_rows);
    ptx::ldmatrix_x4(rows + high * kBlockRowBytes, high_rows);
    ptx::ldmatrix_x4(rows + last * kBlockRowBytes, last_rows);
    const auto add = [&](const uint32_t(&left_rows)[4], const uint32_t(&columns)[4], float(&sum)[8]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::mma_m16n8k16(*reinterpret_cast<float(*)[4]>(sum + 4 * half), left_rows, columns[2 * half], columns[2 * half + 1]);
      }
    };
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t columns[4];
      ptx::ldmatrix_x4(k + (j < 3 ? j : last) * kBlockRowBytes, columns);
      add(j < 3 ? low_rows : last_rows, columns, sums[j < 3 ? j : 4]);
      if (j == 0) add(high_rows, columns, sums[3]);
    }
  }
  Words<16>(*const to)[32] = quarter < 2 ? smem.kk : smem.qk;
#pragma unroll
  for (int n = 0; n < 5; ++n) {
    const int row = n == 3 ? high : n == 4 ? last : low, column = n < 3 ? n : n == 3 ? 0 : last;
    const bool is_diagonal = n == 4 || row == column;   // of the others block (1, 0) only is not n < 3
    scale_block(k_scale + 16 * row, lane, sums[n]);
    if (quarter < 2 && is_diagonal) {
      put_diagonal(sums[n], row, lane, smem);
    } else {
      to[quarter < 2 ? below_block(row, column) : lower_block(row, column)][lane] = right_operand(sums[n], is_diagonal, lane);
    }
  }
}

// The sums of rows of block `row`, all columns, to where they are used.
__device__ __forceinline__ void put_products(const float* k_scale, float (&kk)[32], float (&qk)[32], int row, int lane,
                                             Products& smem) {
  const auto block = [&](float (&sums)[32], int j) -> const float(&)[8] {
    float(&x)[8] = *reinterpret_cast<float(*)[8]>(sums + 8 * j);
    scale_block(k_scale + 16 * row, lane, x);
    return x;
  };
#pragma unroll
  for (int j = 0; j < kBlocks16; ++j) {
    if (j < row) {
      smem.kk[below_block(row, j)][lane] = right_operand(block(kk, j), false, lane);
    } else if (j == row) {
      put_diagonal(block(kk, j), row, lane, smem);
    }
    if (j <= row) smem.qk[lower_block(row, j)][lane] = right_operand(block(qk, j), j == row, lane);
  }
}

// All products by one warpgroup, of which this is a warp; keys are there for wgmma. Blocks right of the diagonal are multiplied
// too: fewer columns would be other instructions for each warp.
template <int kKeyDim>
__device__ __forceinline__ void multiply_as_group(const Keys<kKeyDim>& keys, const float* k_scale, int warp, int lane,
                                                  Products& smem) {
  float kk[32], qk[32];
  const uint64_t k = k_major_descriptor(keys.k), q = k_major_descriptor(keys.q);
  ptx::wgmma_fence();
  ptx::wgmma_m64n64k16<false>(kk, k, k);
#pragma unroll
  for (int s = 1; s < kKeyDim / 16; ++s) ptx::wgmma_m64n64k16<true>(kk, k + k_major_step(s), k + k_major_step(s));
  ptx::wgmma_commit_group();
  ptx::wgmma_m64n64k16<false>(qk, q, k);
#pragma unroll
  for (int s = 1; s < kKeyDim / 16; ++s) ptx::wgmma_m64n64k16<true>(qk, q + k_major_step(s), k + k_major_step(s));
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  hold(kk);
  hold(qk);
  put_products(k_scale, kk, qk, warp, lane, smem);
}

}  // namespace gdn::cuda::chunk_sm90
