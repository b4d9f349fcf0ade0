// SPDX-License-Identifier: Apache-2.0
// The products of a chunk for one warp's 16 rows of S^T, by mma.sync. An operand is fp16, or at high precision the sum of two
// fp16 parts (22 digits): of two such operands the product of the small parts is left out.
#pragma once

#include "../chunk_sm90/range.cuh"
#include "../ptx/arch.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "../tile/swizzle.cuh"
#include "prepared.h"

namespace gdn::cuda::chunk_mma {

using chunk_sm90::State;

constexpr int kPanelBytes = kChunk * kPanelRowBytes;   // 64 rows of 64 columns

// Left operand of 64 tokens.
template <int kParts>
struct Operand {
  uint32_t part[kParts][4][4];
};

// What rounding two sums to `pair` left of them.
__device__ __forceinline__ uint32_t round_rest(float low, float high, uint32_t pair) {
  float rounded_low, rounded_high;
  widen_pair<fp16_t>(pair, rounded_low, rounded_high);
  return round_pair_fp16(low - rounded_low, high - rounded_high);
}

// Sums of 64 tokens as an operand.
template <int kParts>
__device__ __forceinline__ void round_tokens(const float (&x)[32], Operand<kParts>& operand) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    uint32_t& pair = operand.part[0][i / 4][i % 4];
    pair = round_pair_fp16(x[2 * i], x[2 * i + 1]);
    if constexpr (kParts == 2) operand.part[1][i / 4][i % 4] = round_rest(x[2 * i], x[2 * i + 1], pair);
  }
}

// No instruction: what was made of S before is made anew behind this.
template <int kKeyDim>
__device__ __forceinline__ void forget_operand(State<kKeyDim>& state) {
#pragma unroll
  for (int i = 0; i < kKeyDim / 2; ++i) state.s[i / 32][i % 32] = ptx::opaque(state.s[i / 32][i % 32]);
}

// Byte offsets of the row that a lane gives to ldmatrix, in the 16 x 16 blocks of the first 16 rows of a tile: as block_address
// has them, rows and panels further down are constants behind.
struct LaneRows {
  uint32_t at[4];
  uint32_t in_block;   // the same in a Block16

  __device__ __forceinline__ explicit LaneRows(int lane) : in_block(small_tile_offset(lane % 16, lane / 16)) {
#pragma unroll
    for (int block = 0; block < 4; ++block) at[block] = block_address(0, 0, block, lane);
  }
};
constexpr int kBlockRowBytes = 16 * kPanelRowBytes;

// Four of the sums that start at x.
__device__ __forceinline__ float (&four(float* x))[4] { return *reinterpret_cast<float(*)[4]>(x); }

// sums [16, 64] = S^T tile^T, tile [64][kKeyDim] at a shared address. S^T is rounded here: kept as an operand from one product
// to the other it takes 32 registers.
template <int kKeyDim, int kParts>
__device__ __forceinline__ void read_state(const State<kKeyDim>& state, uint32_t tile, const LaneRows& rows,
                                           float (&sums)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) sums[i] = 0.0f;
#pragma unroll
  for (int step = 0; step < kKeyDim / 16; ++step) {
    const float* const s = state.s[step / 4] + 8 * (step % 4);
    uint32_t operand[4];
    round_to_operand(s, operand);
    uint32_t b[4][4];
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      ptx::ldmatrix_x4(tile + rows.at[step % 4] + step / 4 * kPanelBytes + block * kBlockRowBytes, b[block]);
    }
    if constexpr (kParts == 2) {
      uint32_t rest[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) rest[i] = round_rest(s[2 * i], s[2 * i + 1], operand[i]);
#pragma unroll
      for (int i = 0; i < 8; ++i) ptx::mma_m16n8k16(four(sums + 4 * i), rest, b[i / 2][i % 2], b[i / 2][2 + i % 2]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) ptx::mma_m16n8k16(four(sums + 4 * i), operand, b[i / 2][i % 2], b[i / 2][2 + i % 2]);
  }
}

// Where a lane finds its row of block (i, j) of a matrix of tokens in shared memory, and of a part of it.
template <class Places>
struct OfLowerBlocks {
  uint32_t first;

  __device__ __forceinline__ OfLowerBlocks(const LowerBlocks& smem, const LaneRows& rows)
      : first(ptx::shared_address(&smem) + rows.in_block) {}
  __device__ __forceinline__ uint32_t at(int, int i, int j) const { return first + kBlockBytes * Places::index(i, j); }
};
struct OfHighTiles {
  uint32_t tile;
  const LaneRows& rows;

  __device__ __forceinline__ OfHighTiles(const HighTiles& smem, const LaneRows& rows)
      : tile(ptx::shared_address(&smem)), rows(rows) {}
  __device__ __forceinline__ uint32_t at(int part, int i, int j) const {
    return tile + rows.at[j] + part * kPanelBytes + i * kBlockRowBytes;
  }
};

// sums [16, 64] += x tile^T, tile [64 out][64 in] in kParts parts, of which nothing right of the diagonal is read.
template <int kParts, class Blocks>
__device__ __forceinline__ void multiply_lower(const Operand<kParts>& x, const Blocks& tile, float (&sums)[32]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int block = step; block < 4; ++block) {
      uint32_t b[kParts][4];
#pragma unroll
      for (int part = 0; part < kParts; ++part) ptx::ldmatrix_x4(tile.at(part, block, step), b[part]);
#pragma unroll
      for (int which = 2 * kParts - 2; which >= 0; --which) {   // high high last
        const int of_x = which == 2, of_tile = which == 1;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::mma_m16n8k16(four(sums + 8 * block + 4 * half), x.part[of_x][step], b[of_tile][half], b[of_tile][2 + half]);
        }
      }
    }
  }
}

// s = decay s + scale u k, scale of the row, u [16, 64 t], k [64 t][kKeyDim] at a shared address. The product is summed by
// itself: the tensor cores cut where they add, which over many chunks would not average out.
template <int kKeyDim, int kParts>
__device__ __forceinline__ void write_state(const Operand<kParts>& u, uint32_t k, float decay, const float (&scale)[2],
                                            const LaneRows& rows, State<kKeyDim>& state) {
#pragma unroll
  for (int panel = 0; panel < State<kKeyDim>::kPanels; ++panel) {
    float sums[32] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t b[4][4];
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        ptx::ldmatrix_x4_trans(k + rows.at[block] + panel * kPanelBytes + step * kBlockRowBytes, b[block]);
      }
#pragma unroll
      for (int part = kParts - 1; part >= 0; --part) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          ptx::mma_m16n8k16(four(sums + 4 * i), u.part[part][step], b[i / 2][2 * (i % 2)], b[i / 2][2 * (i % 2) + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      state.s[panel][i] = fmaf(state.s[panel][i], decay, kParts == 2 ? sums[i] * scale[i / 2 % 2] : sums[i]);
    }
  }
}

}  // namespace gdn::cuda::chunk_mma
