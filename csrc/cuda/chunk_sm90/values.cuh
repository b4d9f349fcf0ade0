// SPDX-License-Identifier: Apache-2.0
// V of a chunk from the values group to the tile group, which has no time for it: widened, scaled and
// laid out so that a thread of the tile group reads its elements of V^T in eight pieces and does nothing to them.
//
// The scale of a row of V^T is 2^-exponent with the exponent that the tile group has two chunks before; where S or V ask for
// another one, the tile group corrects it. Either way an element is v 2^-exponent, rounded once at most: the first factor is
// exact, since it is not smaller than 2^-kLargestExponent and too small to overflow.
#pragma once

#include "../tile/pack.cuh"
#include "../ptx/bar.cuh"
#include "exchange.cuh"
#include "range.cuh"
#include "tokens.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kValuesBarrier = 3;   // of the group; tile groups have 1 and 2 (move_state.cuh, segments.cuh)
constexpr int kLargestExponent = 16;   // 2^-133, the last digit of bf16, times 2^-16 is the last digit of fp32

// A thread's piece j: tokens 8 j + 2 (lane % 4) and the next one of rows lane / 4 and lane / 4 + 8 of its warp. Odd pieces of
// four threads change places with the next four's, so that the writers use all banks.
__device__ __forceinline__ int piece_place(int j, int thread) { return j * kGroupThreads + (thread ^ j % 2 * 4); }

// The largest |v| of each of a warp's 16 columns, over all lanes, from pairs of 16-bit magnitudes, which order as integers.
// Lane l gets those of columns 2 (l / 4) and the next one.
__device__ __forceinline__ uint32_t largest_of_columns(uint32_t (&m)[8], int lane) {
#pragma unroll
  for (int width = 4; width > 0; width /= 2) {   // halves of the columns to halves of the lanes
    const bool is_high = (lane & 4 * width) != 0;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const uint32_t kept = is_high ? m[i + width] : m[i], given = is_high ? m[i] : m[i + width];
      m[i] = __vmaxu2(kept, __shfl_xor_sync(0xffffffffu, given, 4 * width));
    }
  }
  m[0] = __vmaxu2(m[0], __shfl_xor_sync(0xffffffffu, m[0], 2));
  return __vmaxu2(m[0], __shfl_xor_sync(0xffffffffu, m[0], 1));
}

// Notes of a row of V^T its largest exponent and the one that it is scaled by. exponent: the tile group's, two chunks before.
template <class io_t>
__device__ __forceinline__ void note_row(uint16_t largest, int exponent, RowScale& row, float& factor) {
  const int of_v = exponent_of(to_float(io_t{largest}));
  exponent = min(exponent, kLargestExponent);
  if (of_v - exponent > 126) exponent = kLargestExponent;
  row = {of_v, exponent};
  factor = power_of_two(-exponent);
}

// V of a chunk as it came, [64 t][64 v]: two tokens of 16 columns. A warp takes 16 columns.
struct ColumnsOfTokens {
  Words<16> x[2][2];   // [token][eight columns]

  __device__ __forceinline__ void read(const uint16_t* smem_v, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i / 2][i % 2] = *reinterpret_cast<const Words<16>*>(reinterpret_cast<const char*>(smem_v) +
                                                            swizzled_offset<kChunk>(2 * lane + i / 2, 2 * warp + i % 2));
    }
  }

  // By a warp: its rows' scales, with the exponents that the tile group had two chunks before.
  template <class io_t>
  __device__ __forceinline__ void note_rows(const int (&exponents)[kValueTile], int warp, int lane, RowScale (&row)[kValueTile],
                                            float (&factors)[kValueTile]) const {
    uint32_t m[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      m[i] = __vmaxu2(x[0][i / 4].word[i % 4] & 0x7fff7fffu, x[1][i / 4].word[i % 4] & 0x7fff7fffu);
    }
    const uint32_t largest = largest_of_columns(m, lane);
    if (lane % 4 == 0) {
      const int r = 16 * warp + lane / 2;
      note_row<io_t>(static_cast<uint16_t>(largest), exponents[r], row[r], factors[r]);
      note_row<io_t>(static_cast<uint16_t>(largest >> 16), exponents[r + 1], row[r + 1], factors[r + 1]);
    }
    __syncwarp();
  }

  // Scaled, to piece lane / 4 of eight threads of the tile group.
  template <class io_t>
  __device__ __forceinline__ void write(int warp, int lane, ScaledValues& values) const {
    float4* const to = values.piece + piece_place(lane / 4, 32 * warp + lane % 4);
    const int step = lane / 4 % 2 == 0 ? 4 : -4;   // rows side by side change places in odd pieces
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {   // of rows 2 pair, 2 pair + 1 and the same eight on
      const float2 low = reinterpret_cast<const float2*>(values.factor)[8 * warp + pair];
      const float2 high = reinterpret_cast<const float2*>(values.factor)[8 * warp + pair + 4];
      float a[4][2];   // [token, token of the row eight on][row]
#pragma unroll
      for (int i = 0; i < 4; ++i) widen_pair<io_t>(x[i % 2][i / 2].word[pair], a[i][0], a[i][1]);
      to[8 * pair] = make_float4(a[0][0] * low.x, a[1][0] * low.x, a[2][0] * high.x, a[3][0] * high.x);
      to[8 * pair + step] = make_float4(a[0][1] * low.y, a[1][1] * low.y, a[2][1] * high.y, a[3][1] * high.y);
    }
  }
};

// Starts to copy V of `chunk`, if there is such a chunk; the group has read what was in its place.
template <int kKeyDim, int kTiles>
__device__ __forceinline__ void bring_values(int chunk, int length, int tiles, const Tokens& v,
                                             SharedMemory<kKeyDim, kTiles>& smem) {
  if (chunk * kChunk < length) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i < tiles) v.of_tile(i).copy_in(chunk * kChunk, length, smem.tile[i].v[chunk % kValueStages]);
    }
  }
  ptx::cp_async_commit_group();
}

// The whole life of the values group of a block that carries the first `tiles` of its memory's tiles.
template <class io_t, int kKeyDim, int kTiles>
__device__ __forceinline__ void run_values(int length, int tiles, const Tokens& v, SharedMemory<kKeyDim, kTiles>& smem) {
  const int lane = ptx::opaque(v.thread % 32), warp = __shfl_sync(0xffffffffu, v.thread / 32, 0);
  const int num_chunks = (length + kChunk - 1) / kChunk;
  for (int chunk = 0; chunk < kValueStages - 1; ++chunk) bring_values(chunk, length, tiles, v, smem);
  for (int i = 0; i < kTiles; ++i) {   // until the tile groups know better
    smem.tile[i].exponent[v.thread / kValueTile][v.thread % kValueTile] = 0;
  }
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    ptx::cp_async_wait_group<kValueStages - 2>();
    ptx::bar_sync(kValuesBarrier, kGroupThreads);   // what the others have copied; and they have read the chunk before
    bring_values(chunk + kValueStages - 1, length, tiles, v, smem);
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      Tile& tile = smem.tile[i];
      ColumnsOfTokens columns;
      columns.read(tile.v[chunk % kValueStages], warp, lane);
      columns.template note_rows<io_t>(tile.exponent[chunk % 2], warp, lane, tile.values.row[chunk % 2], tile.values.factor);
      if (chunk > 0) wait_phase(tile.v_free, chunk % 2 ^ 1);
      columns.template write<io_t>(warp, lane, tile.values);
      arrive(tile.v_ready);
    }
  }
}

// By the tile group: of_v, exponents of the largest |v| of a thread's two rows.
__device__ __forceinline__ void read_largest(const RowScale (&row)[kValueTile], int warp, int lane, int (&of_v)[2],
                                             int (&scaled_by)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowScale of_row = row[16 * warp + lane / 4 + 8 * r];
    of_v[r] = of_row.largest;
    scaled_by[r] = of_row.exponent;
  }
}

// Brings a thread's pieces to other exponents, where they are: rare, and the loop is short.
__device__ __forceinline__ void rescale_values(const int (&change)[2], float4* even, float4* odd) {
  const float low[2] = {power_of_two(change[0] / 2), power_of_two(change[0] - change[0] / 2)};
  const float high[2] = {power_of_two(change[1] / 2), power_of_two(change[1] - change[1] / 2)};
#pragma unroll 1
  for (int j = 0; j < 8; ++j) {
    float4& x = (j % 2 == 0 ? even : odd)[j / 2 * 2 * kGroupThreads];
    x = make_float4(x.x * low[0] * low[1], x.y * low[0] * low[1], x.z * high[0] * high[1], x.w * high[0] * high[1]);
  }
}

// V^T at the state's exponents.
template <int kKeyDim>
__device__ __forceinline__ void read_values(ScaledValues& values, int thread, const int (&scaled_by)[2],
                                            const State<kKeyDim>& state, float (&v)[32]) {
  float4* const even = values.piece + piece_place(0, thread);
  float4* const odd = values.piece + piece_place(1, thread);
  const int change[2] = {scaled_by[0] - state.exponent[0], scaled_by[1] - state.exponent[1]};
  if (!__all_sync(0xffffffffu, change[0] == 0 && change[1] == 0)) rescale_values(change, even, odd);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 piece = (j % 2 == 0 ? even : odd)[j / 2 * 2 * kGroupThreads];
    v[4 * j] = piece.x;
    v[4 * j + 1] = piece.y;
    v[4 * j + 2] = piece.z;
    v[4 * j + 3] = piece.w;
  }
}

}  // namespace gdn::cuda::chunk_sm90
