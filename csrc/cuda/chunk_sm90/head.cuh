// SPDX-License-Identifier: Apache-2.0
// T'' and M of one value head from the products of its key head, by one warp. With sum and e^sum as in kernel.cuh, L the part
// of K K^T below the diagonal and N that of Q K^T on and below it, the decays leave the inverse:
//     A = diag(e^sum) diag(beta) L diag(e^-sum), so T = diag(e^sum) W diag(e^-sum),   W = (I + diag(beta) L)^-1 diag(beta)
//     T''_ij = W_ij d_64,j;   M_ij = d_ij (N W)_ij;   d_ij = e^(sum_i - sum_j)      (here T has its diag(beta))
// In blocks of 16 rows and columns, indices of blocks from here on:
//     W_ii = (I + diag(beta_i) L_ii)^-1 diag(beta_i), fp32 (tile/solve.cuh);   T''_ii = W_ii diag(d_64,i)
//     W_ij = -W_ii sum_{m=j}^{i-1} (K_i K_m^T) W_mj for j < i;                 T'' the same, from T''_mj
// Keys are kept as k = c k', c the k_scale of a token (load.cuh). K K^T and Q K^T come with c_i / c_j (products.cuh), so W
// comes out with c_i / c_j. T'' is to be times c_i, for K'^T (T'' X) is the write; M is to be as it is. So decays d_ij and
// d_64,j get c_j / c_i and c_j, by tables for sum - log2 c in the place of sum. (Where keys are alike so are their c: operands
// then have the same magnitudes as with normalised keys. Times c_i alone they were rounded alike, too, by a distance that the
// keys' length decides: .96 |k'|.)
// Operands are fp16, sums fp32. T'' has a recursion of its own because what rounding a row of it does is then made up for in
// the rows below: rounded from W it has a tenth more error in the state where keys are alike.
// All are made transposed, so that sums become left operands and K_i K_m^T and N_im right ones as they lie in registers.
// Nothing is exchanged between warps. Without decays W is bounded where beta |k|^2 <= 2, the rule's own region.
#pragma once

#include "../ptx/half.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "../tile/solve.cuh"
#include "products.cuh"

namespace gdn::cuda::chunk_sm90 {

// The gates of a head as its warp uses them.
struct Tables {
  float sum[kChunk], beta[kChunk];   // running sums of log2 decay, inclusive, less log2 c; betas, of missing tokens 0
  float from[kChunk];                // the decay from the end of the block before to the token, over c
  float reach[kBlocks16][kChunk];    // [i - 1]: that from the token to the end of block i - 1, times c, for tokens up to there

  __device__ __forceinline__ const float* to_end() const { return reach[kBlocks16 - 1]; }
};

// What a warp needs for a head besides, 6 KB.
struct alignas(256) HeadMemory {
  Block16 strip[kBlocks16];   // a row of blocks of T'', then of M, on their way out
  union {
    float a[kBlocks16 * kUnitLowerFloats];   // diagonal blocks of diag(beta) L
    struct {
      Block16 solved[kBlocks16];             // W_ii
      Block16 ended[kBlocks16];              // T''_ii
    };
  };
};

// Running sums and betas of tokens 2 lane and 2 lane + 1 -> the warp's tables, c left out: the keys need not be there.
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

// What c does to a warp's tables.
__device__ __forceinline__ void scale_tables(const float2& k_scale, int lane, Tables& smem) {
  const auto multiply = [&](float* smem_table, float x, float y) {
    float2& mine = reinterpret_cast<float2*>(smem_table)[lane];
    mine = make_float2(mine.x * x, mine.y * y);
  };
#pragma unroll
  for (int i = 0; i < kBlocks16; ++i) multiply(smem.reach[i], k_scale.x, k_scale.y);
  const float2 log = make_float2(log2f(k_scale.x), log2f(k_scale.y));
  multiply(smem.from, ptx::ex2_approx_ftz(-log.x), ptx::ex2_approx_ftz(-log.y));
  float2& sum = reinterpret_cast<float2*>(smem.sum)[lane];
  sum = make_float2(sum.x - log.x, sum.y - log.y);
}

// The diagonal blocks of diag(beta) L to shared memory. Of rows 0..7 the columns 0..7, of rows 8..15 all.
__device__ __forceinline__ void make_diagonal(const Products& products, const Tables& tables, int lane, HeadMemory& smem) {
  const int row = lane / 4, column = 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < kBlocks16; ++i) {
    float* const a = smem.a + kUnitLowerFloats * i;
    const float beta[2] = {tables.beta[16 * i + row], tables.beta[16 * i + row + 8]};
    const float4 left = products.on_diagonal[i][0][lane], right = products.on_diagonal[i][1][lane];
    float* const upper = a + scratch_row(row) + column;
    float* const lower = a + scratch_row(row + 8) + column;
    *reinterpret_cast<float2*>(upper) = make_float2(beta[0] * left.x, beta[0] * left.y);
    *reinterpret_cast<float2*>(lower) = make_float2(beta[1] * left.z, beta[1] * left.w);
    *reinterpret_cast<float2*>(lower + 8) = make_float2(beta[1] * right.z, beta[1] * right.w);
  }
}

__device__ __forceinline__ Words<16> finite_pack(const float* x) {
  return {{ptx::round_pair_fp16_finite(x[0], x[1]), ptx::round_pair_fp16_finite(x[2], x[3]),
           ptx::round_pair_fp16_finite(x[4], x[5]), ptx::round_pair_fp16_finite(x[6], x[7])}};
}

// Sixteen numbers, fp16, to row `row` of a 16 x 16 tile (small_tile_offset).
__device__ __forceinline__ void put_row(const float (&x)[16], int row, fp16_t* smem_tile) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    *reinterpret_cast<Words<16>*>(reinterpret_cast<char*>(smem_tile) + small_tile_offset(row, half)) =
        finite_pack(x + 8 * half);
  }
}

// W_ii and T''_ii, all four at once: lane 8 i + r has rows r and r + 8 of block i.
__device__ __forceinline__ void solve_diagonal(const Tables& tables, int lane, HeadMemory& smem) {
  const int block = lane / 8, row = lane % 8;
  float low[16] = {}, high[16] = {};
  invert_unit_lower_rows(smem.a + kUnitLowerFloats * block, row, low, high);
  __syncwarp();   // A is read
  const auto scale_and_put = [&](const float* smem_factors, Block16 (&smem_tiles)[kBlocks16]) {   // columns
    float factor[16];
    load_floats<16>(smem_factors + 16 * block, factor);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (j < 8) low[j] *= factor[j];
      high[j] *= factor[j];
    }
    put_row(low, row, smem_tiles[block]);
    put_row(high, row + 8, smem_tiles[block]);
  };
  scale_and_put(tables.beta, smem.solved);
  scale_and_put(tables.to_end(), smem.ended);
}

// The row i of blocks of T'' or M to the workspace, from the strip, or its diagonal block from elsewhere.
template <class Places>
__device__ __forceinline__ void copy_strip(const HeadMemory& smem, int i, int lane, const Block16& diagonal, Solved* gmem) {
  __syncwarp();   // it is written
#pragma unroll
  for (int j = 0; j <= i; ++j) {
    const Block16& block = j < i ? smem.strip[j] : diagonal;
    Words<16>* const to = reinterpret_cast<Words<16>*>(reinterpret_cast<char*>(gmem) + Places::offset(i, j));
    to[lane] = reinterpret_cast<const Words<16>*>(block)[lane];
  }
  __syncwarp();   // and read
}

// sums [8] += left right of 16 x 16 blocks.
__device__ __forceinline__ void multiply_blocks(const uint32_t (&left)[4], const uint32_t (&right)[4], float (&sums)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ptx::mma_m16n8k16(*reinterpret_cast<float(*)[4]>(sums + 4 * half), left, right[2 * half], right[2 * half + 1]);
  }
}

// Sums as the A operand of a step; beyond fp16's range its largest number.
__device__ __forceinline__ void round_to_finite_operand(const float (&x)[8], uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = ptx::round_pair_fp16_finite(x[2 * i], x[2 * i + 1]);
}

// Block (i, j), j < i, of W^T or T''^T in `x`, from those above as left operands. kk[m]: K_i K_m^T; minus_w: -W_ii^T. Right
// operands.
__device__ __forceinline__ void solve_block(int i, int j, const uint32_t (&kk)[kBlocks16 - 1][4], const uint32_t (&minus_w)[4],
                                            uint32_t (&x)[kLowerBlocks][4]) {
  float z[8] = {}, sums[8] = {};
#pragma unroll
  for (int m = j; m < i; ++m) multiply_blocks(x[lower_block(m, j)], kk[m], z);
  uint32_t left[4];
  round_to_finite_operand(z, left);
  multiply_blocks(left, minus_w, sums);
  round_to_finite_operand(sums, x[lower_block(i, j)]);
}

// (N W)^T of block (i, j), j <= i, times its decays: off the diagonal from the column's token to the end of block i - 1, and
// from there to the row's.
__device__ __forceinline__ void decay_block(int i, int j, const Tables& tables, int lane, float (&x)[8]) {
  const int row = lane / 4, column = 2 * (lane % 4);   // of the transpose
  const float* const smem_i = (i == j ? tables.sum : tables.from) + 16 * i + column;
  const float* const smem_j = (i == j ? tables.sum : tables.reach[i - 1]) + 16 * j + row;
  const float2 of_i[2] = {*reinterpret_cast<const float2*>(smem_i), *reinterpret_cast<const float2*>(smem_i + 8)};
  const float of_j[2] = {smem_j[0], smem_j[8]};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float to = n % 2 == 0 ? of_i[n / 4].x : of_i[n / 4].y, at = of_j[n / 2 % 2];
    if (i != j) {
      x[n] *= at * to;
    } else {   // d may be inf where the row is before the column
      const bool is_in = n / 4 > n / 2 % 2 || (n / 4 == n / 2 % 2 && column + n % 2 >= row);
      x[n] = is_in ? x[n] * ptx::ex2_approx_ftz(to - at) : 0.0f;
    }
  }
}

// The whole head, from the tables on.
__device__ __forceinline__ void solve_head(const Products& products, const Tables& tables, int lane, HeadMemory& smem,
                                           Solved* gmem) {
  const uint32_t strip = ptx::shared_address(smem.strip);
  const uint32_t of_lane = small_tile_offset(8 * (lane / 16) + lane % 8, lane / 8 % 2);   // upper left, upper right, lower ones
  __syncwarp();   // the tables are written
  make_diagonal(products, tables, lane, smem);
  __syncwarp();   // diag(beta) L is written
  solve_diagonal(tables, lane, smem);
  __syncwarp();
  const auto load = [&](const Words<16>(&operand)[32], uint32_t(&x)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = operand[lane].word[n];
  };
  const auto store = [&](int j, const uint32_t(&x)[4]) {
    ptx::stmatrix_x4_trans(strip + of_lane + j * kBlockBytes, x);
  };
  uint32_t w[kLowerBlocks][4], t[kLowerBlocks][4];   // W^T and T''^T
#pragma unroll
  for (int i = 0; i < kBlocks16; ++i) {
    uint32_t kk[kBlocks16 - 1][4], minus_w[4];
#pragma unroll
    for (int m = 0; m < i; ++m) load(products.kk[below_block(i, m)], kk[m]);
    ptx::ldmatrix_x4(ptx::shared_address(smem.solved[i]) + of_lane, minus_w);
#pragma unroll
    for (int n = 0; n < 4; ++n) minus_w[n] ^= 0x80008000u;
    ptx::ldmatrix_x4_trans(ptx::shared_address(smem.solved[i]) + of_lane, w[lower_block(i, i)]);
    ptx::ldmatrix_x4_trans(ptx::shared_address(smem.ended[i]) + of_lane, t[lower_block(i, i)]);
#pragma unroll
    for (int j = 0; j < i; ++j) {
      solve_block(i, j, kk, minus_w, t);
      solve_block(i, j, kk, minus_w, w);
    }
#pragma unroll
    for (int j = 0; j < i; ++j) store(j, t[lower_block(i, j)]);
    copy_strip<PlacesOfT>(smem, i, lane, smem.ended[i], gmem);
    uint32_t qk[kBlocks16][4];
#pragma unroll
    for (int m = 0; m <= i; ++m) load(products.qk[lower_block(i, m)], qk[m]);
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      float sums[8] = {};
#pragma unroll
      for (int m = j; m <= i; ++m) multiply_blocks(w[lower_block(m, j)], qk[m], sums);
      decay_block(i, j, tables, lane, sums);
      uint32_t mixed[4];
      round_to_operand(sums, mixed);
      store(j, mixed);
    }
    copy_strip<PlacesOfM>(smem, i, lane, smem.strip[i], gmem);
  }
}

}  // namespace gdn::cuda::chunk_sm90
