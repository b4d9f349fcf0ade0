// SPDX-License-Identifier: Apache-2.0
// T'' and M of one value head from the products of its key head, by one warp.
//     A_ij = beta_i d_ij (k_i . k_j) for j < i;   T = (I + A)^-1 diag(beta);   P_ij = d_ij (q_i . k_j) for j <= i
//     T''_ij = d_64,i T_ij;   M = P T
// In blocks of 16 rows and columns, indices of blocks from here on:
//     d_ij = 2^(sum_i - sum_j) is from_i reach_ij below the diagonal: from the token to the end of block i - 1, and from there
//     on; neither is the exponential of a positive number for decays <= 1
//     D_i = (I + A_ii)^-1, fp32 (tile/solve.cuh);   T_ii = D_i diag(beta_i);   G_i = -D_i diag(beta_i from_i)
//     T_ij = G_i sum_{m=j}^{i-1} (K_i K_m^T reach_im) T_mj;   M_ij = sum_{m=j}^i P_im T_mj      fp16 operands, fp32 sums
// T and M are made transposed, so that sums become left operands and K_i K_m^T and P_im right ones as they lie in registers.
// What T'' is rounded from is the fp32 T_ij. Nothing is exchanged between warps.
#pragma once

#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "../tile/solve.cuh"
#include "load.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kBlocks16 = kChunk / 16;

// Index of block (i, j), j <= i, among those on and below the diagonal.
__host__ __device__ __forceinline__ constexpr int lower_block(int i, int j) { return i * (i + 1) / 2 + j; }
constexpr int kLowerBlocks = lower_block(kBlocks16, 0);

// K K^T and Q K^T, on and below the diagonal: of each block what the lanes of a warp hold of it as sums, columns 0..7, 8..15.
struct Products {
  float4 kk[kLowerBlocks][2][32];
  float4 qk[kLowerBlocks][2][32];
};

// The gates of a head as its warp uses them.
struct Tables {
  float sum[kChunk], beta[kChunk];   // running sums of log2 decay, inclusive; betas, of missing tokens 0
  float from[kChunk];                // the decay from the end of the block before to the token
  float reach[kBlocks16][kChunk];    // [i - 1]: the decay from the token to the end of block i - 1, for tokens up to there

  __device__ __forceinline__ const float* to_end() const { return reach[kBlocks16 - 1]; }
};

// What a warp needs for a head besides, 8 KB.
struct alignas(1024) HeadMemory {
  fp16_t strip[16 * kChunk];   // 16 rows of T'', then of M, on their way out; swizzled, right of the diagonal zeros
  union {
    float a[kBlocks16 * kUnitLowerFloats];   // diagonal blocks of A
    struct {
      fp16_t solved[kBlocks16][16 * 16];     // T_ii
      fp16_t ended[kBlocks16][16 * 16];      // T''_ii
      fp16_t factor[kBlocks16][16 * 16];     // G_i
    };
  };
};

// Running sums and betas of tokens 2 lane and 2 lane + 1 -> the warp's tables.
__device__ __forceinline__ void make_tables(const float2& sum, const float2& beta, int lane, Tables& smem) {
  reinterpret_cast<float2*>(smem.sum)[lane] = sum;
  reinterpret_cast<float2*>(smem.beta)[lane] = beta;
  float start = 0.0f;
#pragma unroll
  for (int i = 1; i <= kBlocks16; ++i) {
    const float end = __shfl_sync(0xffffffffu, sum.y, 8 * i - 1);
    if (lane >= 8 * i) start = end;
    reinterpret_cast<float2*>(smem.reach[i - 1])[lane] =
        make_float2(ptx::ex2_approx_ftz(end - sum.x), ptx::ex2_approx_ftz(end - sum.y));
  }
  reinterpret_cast<float2*>(smem.from)[lane] =
      make_float2(ptx::ex2_approx_ftz(sum.x - start), ptx::ex2_approx_ftz(sum.y - start));
}

// The blocks on the diagonal: A to shared memory, P as right operands.
__device__ __forceinline__ void make_diagonal(const Products& products, const Tables& tables, int lane, HeadMemory& smem,
                                              uint32_t (&p)[kBlocks16][4]) {
  const int row = lane / 4, column = 2 * (lane % 4);
  const bool is_first_in = column <= row, is_second_in = column < row;   // of the two columns, on or left of the diagonal
#pragma unroll
  for (int i = 0; i < kBlocks16; ++i) {
    const float* const sum = tables.sum + 16 * i;
    float* const a = smem.a + kUnitLowerFloats * i;
    const float sum_i[2] = {sum[row], sum[row + 8]};
    const float beta_i[2] = {tables.beta[16 * i + row], tables.beta[16 * i + row + 8]};
    const float2 sum_j[2] = {*reinterpret_cast<const float2*>(sum + column),
                             *reinterpret_cast<const float2*>(sum + 8 + column)};
    const int block = lower_block(i, i);
    const float4 kk = products.kk[block][0][lane], qk = products.qk[block][0][lane];
    const float4 kk_right = products.kk[block][1][lane], qk_right = products.qk[block][1][lane];
    // Of rows 0..7 the columns 0..7, of rows 8..15 all. Right of the diagonal d may be anything, inf too: never used.
    const float d0[2] = {ptx::ex2_approx_ftz(sum_i[0] - sum_j[0].x), ptx::ex2_approx_ftz(sum_i[0] - sum_j[0].y)};
    const float d1[2] = {ptx::ex2_approx_ftz(sum_i[1] - sum_j[0].x), ptx::ex2_approx_ftz(sum_i[1] - sum_j[0].y)};
    const float d2[2] = {ptx::ex2_approx_ftz(sum_i[1] - sum_j[1].x), ptx::ex2_approx_ftz(sum_i[1] - sum_j[1].y)};
    float* const upper = a + scratch_row(row) + column;
    float* const lower = a + scratch_row(row + 8) + column;
    *reinterpret_cast<float2*>(upper) = make_float2(beta_i[0] * d0[0] * kk.x, beta_i[0] * d0[1] * kk.y);
    *reinterpret_cast<float2*>(lower) = make_float2(beta_i[1] * d1[0] * kk.z, beta_i[1] * d1[1] * kk.w);
    *reinterpret_cast<float2*>(lower + 8) = make_float2(beta_i[1] * d2[0] * kk_right.z, beta_i[1] * d2[1] * kk_right.w);
    p[i][0] = round_pair_fp16(is_first_in ? d0[0] * qk.x : 0.0f, is_second_in ? d0[1] * qk.y : 0.0f);
    p[i][1] = 0;
    p[i][2] = round_pair_fp16(d1[0] * qk.z, d1[1] * qk.w);
    p[i][3] = round_pair_fp16(is_first_in ? d2[0] * qk_right.z : 0.0f, is_second_in ? d2[1] * qk_right.w : 0.0f);
  }
}

// Sixteen numbers times `factor`, fp16, to row `row` of a 16 x 16 tile (small_tile_offset).
__device__ __forceinline__ void put_row(const float (&x)[16], float factor, int row, fp16_t* smem_tile) {
  float scaled[16];
#pragma unroll
  for (int j = 0; j < 16; ++j) scaled[j] = x[j] * factor;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    *reinterpret_cast<Words<16>*>(reinterpret_cast<char*>(smem_tile) + small_tile_offset(row, half)) =
        round_to_pack<fp16_t, 8>(scaled + 8 * half);
  }
}

// A_ii -> T_ii, T''_ii and G_i, all four at once: lane 8 i + r has rows r and r + 8 of block i.
__device__ __forceinline__ void solve_diagonal(const Tables& tables, int lane, HeadMemory& smem) {
  const int block = lane / 8, row = lane % 8;
  float low[16] = {}, high[16] = {};
  invert_unit_lower_rows(smem.a + kUnitLowerFloats * block, row, low, high);
  __syncwarp();   // A is read
  const auto put = [&](float low_factor, float high_factor, fp16_t (&smem_tiles)[kBlocks16][16 * 16]) {
    put_row(low, low_factor, row, smem_tiles[block]);
    put_row(high, high_factor, row + 8, smem_tiles[block]);
  };
  const auto scale = [&](const float* smem_factors) {   // columns
    float factor[16];
    load_floats<16>(smem_factors + 16 * block, factor);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (j < 8) low[j] *= factor[j];
      high[j] *= factor[j];
    }
  };
  scale(tables.beta);
  put(1.0f, 1.0f, smem.solved);
  put(tables.to_end()[16 * block + row], tables.to_end()[16 * block + row + 8], smem.ended);
  scale(tables.from);
  put(-1.0f, -1.0f, smem.factor);
}

// Block (i, m), m < i: K_i K_m^T reach_im and P_im, as the right operands of products with their transposes.
__device__ __forceinline__ void make_block(const Products& products, const Tables& tables, int i, int m,
                                           const float (&from)[2], int lane, uint32_t (&a)[4], uint32_t (&p)[4]) {
  const int block = lower_block(i, m), column = 2 * (lane % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 reach = *reinterpret_cast<const float2*>(tables.reach[i - 1] + 16 * m + 8 * half + column);
    const float4 kk = products.kk[block][half][lane], qk = products.qk[block][half][lane];
    a[half] = round_pair_fp16(kk.x * reach.x, kk.y * reach.y);
    a[2 + half] = round_pair_fp16(kk.z * reach.x, kk.w * reach.y);
    p[half] = round_pair_fp16(qk.x * reach.x * from[0], qk.y * reach.y * from[0]);
    p[2 + half] = round_pair_fp16(qk.z * reach.x * from[1], qk.w * reach.y * from[1]);
  }
}

// The strip, 2 KB, to rows 16 i .. of an image.
__device__ __forceinline__ void copy_strip(const HeadMemory& smem, int i, int lane, fp16_t* gmem_image) {
  __syncwarp();   // it is written
  const Words<16>* const from = reinterpret_cast<const Words<16>*>(smem.strip);
  Words<16>* const to = reinterpret_cast<Words<16>*>(gmem_image + 16 * kChunk * i);
#pragma unroll
  for (int n = 0; n < 4; ++n) to[lane + 32 * n] = from[lane + 32 * n];
  __syncwarp();   // and read
}

// sums [8] += left right of 16 x 16 blocks.
__device__ __forceinline__ void multiply_blocks(const uint32_t (&left)[4], const uint32_t (&right)[4], float (&sums)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ptx::mma_m16n8k16(*reinterpret_cast<float(*)[4]>(sums + 4 * half), left, right[2 * half], right[2 * half + 1]);
  }
}

// T_ij^T for j < i, T''_ij to the strip. t: T_mj^T, m < i, as left operands; a[m]: K_i K_m^T reach_im.
__device__ __forceinline__ void solve_row(int i, const uint32_t (&a)[kBlocks16 - 1][4], uint32_t of_lane, const Tables& tables,
                                          int lane, const HeadMemory& smem, uint32_t (&t)[kLowerBlocks][4]) {
  uint32_t g[4];
  ptx::ldmatrix_x4(ptx::shared_address(smem.factor[i]) + of_lane, g);
  const float* const smem_to_end = tables.to_end() + 16 * i + 2 * (lane % 4);
  const float2 to_end[2] = {*reinterpret_cast<const float2*>(smem_to_end),
                            *reinterpret_cast<const float2*>(smem_to_end + 8)};
#pragma unroll
  for (int j = 0; j < i; ++j) {
    float z[8] = {}, sums[8] = {};
#pragma unroll
    for (int m = j; m < i; ++m) multiply_blocks(t[lower_block(m, j)], a[m], z);
    uint32_t left[4], ended[4];
    round_to_operand(z, left);
    multiply_blocks(left, g, sums);
    round_to_operand(sums, t[lower_block(i, j)]);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      ended[n] = round_pair_fp16(sums[2 * n] * to_end[n / 2].x, sums[2 * n + 1] * to_end[n / 2].y);
    }
    ptx::stmatrix_x4_trans(transposed_block_address(ptx::shared_address(smem.strip), 0, j, lane), ended);
  }
}

// M_ij to the strip, j <= i. p[m]: P_im.
__device__ __forceinline__ void mix_row(int i, const uint32_t (&p)[kBlocks16][4], const uint32_t (&t)[kLowerBlocks][4],
                                        int lane, const HeadMemory& smem) {
#pragma unroll
  for (int j = 0; j <= i; ++j) {
    float sums[8] = {};
#pragma unroll
    for (int m = j; m <= i; ++m) multiply_blocks(t[lower_block(m, j)], p[m], sums);
    uint32_t mixed[4];
    round_to_operand(sums, mixed);
    ptx::stmatrix_x4_trans(transposed_block_address(ptx::shared_address(smem.strip), 0, j, lane), mixed);
  }
}

// The whole head, from the tables on.
__device__ __forceinline__ void solve_head(const Products& products, const Tables& tables, int lane, HeadMemory& smem,
                                           Solved* gmem) {
  const uint32_t strip = ptx::shared_address(smem.strip);
  const uint32_t of_lane = small_tile_offset(8 * (lane / 16) + lane % 8, lane / 8 % 2);   // upper left, upper right, lower ones
  constexpr uint32_t kZeros[4] = {};
#pragma unroll
  for (int j = 1; j < kBlocks16; ++j) ptx::stmatrix_x4(block_address(strip, 0, j, lane), kZeros);
  uint32_t on_diagonal[kBlocks16][4], t[kLowerBlocks][4];   // of P; T^T
  __syncwarp();   // the tables are written
  make_diagonal(products, tables, lane, smem, on_diagonal);
  __syncwarp();   // A is written
  solve_diagonal(tables, lane, smem);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kBlocks16; ++i) {
    uint32_t a[kBlocks16 - 1][4], p[kBlocks16][4], ended[4];
    const float from[2] = {tables.from[16 * i + lane / 4], tables.from[16 * i + lane / 4 + 8]};
#pragma unroll
    for (int m = 0; m < i; ++m) make_block(products, tables, i, m, from, lane, a[m], p[m]);
#pragma unroll
    for (int n = 0; n < 4; ++n) p[i][n] = on_diagonal[i][n];
    ptx::ldmatrix_x4_trans(ptx::shared_address(smem.solved[i]) + of_lane, t[lower_block(i, i)]);
    ptx::ldmatrix_x4(ptx::shared_address(smem.ended[i]) + of_lane, ended);
    ptx::stmatrix_x4(transposed_block_address(strip, 0, i, lane), ended);
    solve_row(i, a, of_lane, tables, lane, smem, t);
    copy_strip(smem, i, lane, gmem->t);
    mix_row(i, p, t, lane, smem);
    copy_strip(smem, i, lane, gmem->m);
  }
}

}  // namespace gdn::cuda::chunk_sm90
