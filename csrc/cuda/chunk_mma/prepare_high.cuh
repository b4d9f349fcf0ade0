// SPDX-License-Identifier: Apache-2.0
// The preparation at high precision: what chunk_sm90/prepare.cuh does, in fp32 wherever that rounds to fp16.
//     A_ij = beta_i d_ij (k_i . k_j) for j < i;   T = (I + A)^-1 diag(beta);   P_ij = d_ij (q_i . k_j) for j <= i
// k and q stay as they came, times a power of two a row, which fp16 holds exactly; their lengths are factors. d_ij comes from
// sums kept in two floats, since a difference of large sums loses digits. The inverse is fp32 throughout, by blocks of 16.
// Grid    blocks of 128 threads walk over (chunk row, key head), as there.
// Block   warp w owns rows 16 r .. 16 r + 15 of A, T, P, r = w + block (mod 4), until T and P are written: two threads a row.
// Reads   q, k [64, K], g, beta [64] of each value head.   Writes   Keys, HighSolved (prepared.h).
#pragma once

#include "../chunk_sm90/prepare.cuh"
#include "../tile/pack.cuh"
#include "../tile/solve.cuh"
#include "prepared.h"
#include "products.cuh"

namespace gdn::cuda::chunk_mma {

using chunk_sm90::ChunkOfRow;
using chunk_sm90::GateBits;
using chunk_sm90::kPrepareThreads;
using chunk_sm90::power_of_two;

constexpr int kHighBlocks = 3;      // of a multiprocessor, as many as run side by side
constexpr int kHeadsAtOnce = 4;     // value heads whose gates are in shared memory, a warp's each
constexpr int kPitch = kChunk + 4;  // floats from row to row of an fp32 tile
// The largest element of a row of k or q is in [2^-2, 2^-1): the row is about a unit vector, so that u with what k lacks stays
// in fp16's normal range, and what 16 bits lose below 2^-14 is 2^-23 of the largest.
constexpr int kKeyExponent = -2;
constexpr int kSolvedExponent = 6;   // of a row of T or P, in [2^6, 2^7)
constexpr int kLowestSolved = -100;  // rows that are smaller stay small
constexpr int kLowestOfQuery = -60;  // so do rows of P, against q: what q S is scaled to meet them by stays in fp32

// Of a value head's tokens; the running sums of log2 decay are sum + rest.
struct WideGates {
  float sum[kChunk], rest[kChunk], beta[kChunk];
};

// fp32, [64][kPitch]; right of the diagonal anything.
struct WideTiles {
  float a[kChunk * kPitch], t[kChunk * kPitch], p[kChunk * kPitch];
};

template <int kKeyDim>
struct alignas(1024) HighPrepareMemory {
  union {
    Keys<kKeyDim> keys;   // until their products are in registers
    WideTiles tiles;
  };
  WideGates gates[kHeadsAtOnce];
  float k_scale[kChunk], q_scale[kChunk];   // rows of k and q are those of Keys times these
  SolveScratch scratch[4];
};

// The exponent of the largest magnitude of a row of 16-bit elements, a thread's pieces of it, by the row's four lanes.
template <class io_t, int kPieces>
__device__ __forceinline__ int exponent_of_row(const Words<16> (&piece)[kPieces]) {
  uint32_t largest = 0;   // magnitudes order as integers
#pragma unroll
  for (int i = 0; i < 4 * kPieces; ++i) largest = __vmaxu2(largest, piece[i / 4].word[i % 4] & 0x7fff7fffu);
  largest = max(largest & 0xffffu, largest >> 16);
#pragma unroll
  for (int distance = 1; distance < chunk_sm90::kLanesPerRow; distance *= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  return max(chunk_sm90::exponent_of(to_float(io_t{static_cast<uint16_t>(largest)})), chunk_sm90::kLowestExponent);
}

// k and q, times a power of two a row, in shared memory and to the workspace; what a row lacks to its scale.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void scale_keys(bool use_l2norm, int count, int thread, HighPrepareMemory<kKeyDim>& smem,
                                           Keys<kKeyDim>* gmem) {
  ptx::cp_async_wait_group<0>();   // each thread reads what itself has copied
#pragma unroll 1
  for (int i = 0; i < 2 * kChunk / chunk_sm90::kRowsPerPass; ++i) {
    const bool is_k = i % 2 == 0;
    float* const scale = is_k ? smem.k_scale : smem.q_scale;
    chunk_sm90::scale_row<io_t, kKeyDim>(
        i / 2, thread, is_k ? smem.keys.k : smem.keys.q, is_k ? gmem->k : gmem->q,
        [&](int row, const auto& piece, float squares) {
          const int e = exponent_of_row<io_t>(piece);
          if (thread % chunk_sm90::kLanesPerRow == 0) {
            scale[row] = chunk_sm90::row_factor(squares, use_l2norm, row < count) * power_of_two(e - kKeyExponent);
          }
          return row < count ? power_of_two(kKeyExponent - e) : 0.0f;
        });
  }
}

// As chunk_sm90::log2_decay, in double.
__device__ __forceinline__ double log2_decay(float g, GateDomain domain) {
  const double x = domain == GateDomain::kLinear ? static_cast<double>(log2f(g)) : g * 1.4426950408889634;
  return x < -185.0 ? -185.0 : x;
}

// By one warp: the gates of a value head, from the bits that load_gates left with it.
__device__ __forceinline__ void sum_gates(const RuleParams& p, const GateBits& bits, int count, int lane, WideGates& smem) {
  double sum[2];
  float g[2], beta[2];
  chunk_sm90::read_gates(p, bits, g, beta);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool inside = 2 * lane + i < count;
    sum[i] = inside && p.g.given() ? log2_decay(g[i], p.gate_domain) : 0.0;
    smem.beta[2 * lane + i] = inside ? (p.beta.given() ? beta[i] : 1.0f) : 0.0f;
  }
  inclusive_sum_64(sum[0], sum[1], lane);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float rounded = ptx::opaque(static_cast<float>(sum[i]));   // g++ 12 takes (double)(float)x for x in a vector
    smem.sum[2 * lane + i] = rounded;
    smem.rest[2 * lane + i] = static_cast<float>(sum[i] - rounded);
  }
}

// The decay from token j to token i.
__device__ __forceinline__ float decay_between(const WideGates& gates, int i, int j) {
  return ptx::ex2_approx_ftz((gates.sum[i] - gates.sum[j]) + (gates.rest[i] - gates.rest[j]));
}

// K K^T and Q K^T of a warp's 16 rows.
struct Products {
  float kk[32], qk[32];
};

// K K^T and Q K^T of a warp's 16 rows with all columns up to them; blocks of 16 columns right of the diagonal are left out.
template <int kKeyDim>
__device__ __forceinline__ void multiply(const Keys<kKeyDim>& keys, int row_block, int lane, float (&kk)[32], float (&qk)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) kk[i] = qk[i] = 0.0f;
#pragma unroll 1
  for (int s = 0; s < kKeyDim / 16; ++s) {
    const uint32_t panel = s / 4 * (kChunk * kPanelRowBytes);
    const uint32_t k = ptx::shared_address(keys.k) + panel, q = ptx::shared_address(keys.q) + panel;
    uint32_t k_rows[4], q_rows[4];
    ptx::ldmatrix_x4(block_address(k, row_block, s % 4, lane), k_rows);
    ptx::ldmatrix_x4(block_address(q, row_block, s % 4, lane), q_rows);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block > row_block) continue;
      uint32_t b[4];
      ptx::ldmatrix_x4(block_address(k, block, s % 4, lane), b);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::mma_m16n8k16(*reinterpret_cast<float(*)[4]>(kk + 8 * block + 4 * half), k_rows, b[half], b[2 + half]);
        ptx::mma_m16n8k16(*reinterpret_cast<float(*)[4]>(qk + 8 * block + 4 * half), q_rows, b[half], b[2 + half]);
      }
    }
  }
}

// The products -> P, and A: its diagonal block into scratch, those left of it into its tile.
template <int kKeyDim>
__device__ __forceinline__ void split(const WideGates& gates, const Products& products, int row_block, int lane,
                                      HighPrepareMemory<kKeyDim>& smem, SolveScratch& scratch) {
#pragma unroll
  for (int i = 0; i < 32; i += 2) {   // pairs of columns
    const int block = i / 8;
    if (block > row_block) continue;
    const int row = 16 * row_block + sum_row(lane, i), column = 16 * block + sum_column(lane, i % 8);
    float a[2], x[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float d = column + c <= row ? decay_between(gates, row, column + c) : 0.0f;
      const float kk = products.kk[i + c] * smem.k_scale[column + c] * smem.k_scale[row];
      const float qk = products.qk[i + c] * smem.k_scale[column + c] * smem.q_scale[row];
      a[c] = column + c < row ? gates.beta[row] * d * kk : 0.0f;
      x[c] = column + c <= row ? d * qk : 0.0f;
    }
    store_floats<2>(smem.tiles.p + kPitch * row + column, x);
    if (block < row_block) {
      store_floats<2>(smem.tiles.a + kPitch * row + column, a);
    } else if (i % 8 != 4) {   // rows 0..7 have no columns 8..15
      store_floats<2>(scratch.a + scratch_row(row % 16) + column % 16, a);
    }
  }
}

// sums [8] += row times 16 rows of a tile, from its columns that start at `columns` on.
__device__ __forceinline__ void multiply_row(const float* row, const float* columns, float (&sums)[8]) {
#pragma unroll 1
  for (int first = 0; first < 16; first += 4) {
    float x[4];
    load_floats<4>(row + first, x);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      float y[8];
      load_floats<8>(columns + kPitch * (first + m), y);
#pragma unroll
      for (int c = 0; c < 8; ++c) sums[c] = fmaf(x[m], y[c], sums[c]);
    }
  }
}

// (I + A)^-1 into tiles.t, as tile/solve.cuh does it: D_i = (I + A_ii)^-1, then D_i sum_m A_im T_mj block by block.
__device__ __forceinline__ void solve(WideTiles& tiles, const SolveScratch& scratch, int row_block, int lane) {
  float x[16];
  __syncwarp();   // scratch.a is written by the whole warp
  invert_unit_lower_16(scratch.a, lane % 16, x);
  float* const diagonal = tiles.t + 16 * row_block * (kPitch + 1);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (lane < 16) diagonal[kPitch * i + lane] = x[i];
  }
  const int row = 16 * row_block + lane / 2, half = 8 * (lane % 2);   // a lane's eight sums of a block
#pragma unroll 1
  for (int distance = 1; distance < 4; ++distance) {
    __syncthreads();   // the blocks at smaller distances are written
    if (row_block < distance) continue;
    const int column = 16 * (row_block - distance) + half;
    float* const block = tiles.t + kPitch * row + column;
    float z[8] = {}, t[8] = {};
#pragma unroll 1
    for (int m = row_block - distance; m < row_block; ++m) {
      multiply_row(tiles.a + kPitch * row + 16 * m, tiles.t + kPitch * 16 * m + column, z);
    }
    store_floats<8>(block, z);
    __syncwarp();
    multiply_row(tiles.t + kPitch * row + 16 * row_block, tiles.t + kPitch * 16 * row_block + column, t);
    __syncwarp();   // z is read
#pragma unroll
    for (int c = 0; c < 8; ++c) t[c] = -t[c];
    store_floats<8>(block, t);
  }
}

// Half a row of a tile, columns times `beta` where given, to both parts of its image; returns what the row lacks.
__device__ __forceinline__ float emit_row(const float* smem_row, const float* beta, int lowest, int row, int half,
                                          fp16_t (&gmem)[2][kChunk * kChunk]) {
  float largest = 0.0f;
  const auto load = [&](int chunk, float (&x)[8]) {   // eight columns
    load_floats<8>(smem_row + 32 * half + 8 * chunk, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int column = 32 * half + 8 * chunk + i;
      x[i] = column <= row ? x[i] * (beta == nullptr ? 1.0f : beta[column]) : 0.0f;
    }
  };
#pragma unroll 1
  for (int chunk = 0; chunk < 4; ++chunk) {
    float x[8];
    load(chunk, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]));
  }
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  const int e = max(chunk_sm90::exponent_of(largest), lowest);
  const float factor = power_of_two(kSolvedExponent - e);
#pragma unroll 1
  for (int chunk = 0; chunk < 4; ++chunk) {
    float x[8];
    load(chunk, x);
    Words<16> rounded, rest;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float low = x[2 * j] * factor, high = x[2 * j + 1] * factor;
      rounded.word[j] = round_pair_fp16(low, high);
      rest.word[j] = round_rest(low, high, rounded.word[j]);
    }
    const uint32_t at = swizzled_offset<kChunk>(row, 4 * half + chunk);
    *reinterpret_cast<Words<16>*>(reinterpret_cast<char*>(gmem[0]) + at) = rounded;
    *reinterpret_cast<Words<16>*>(reinterpret_cast<char*>(gmem[1]) + at) = rest;
  }
  return power_of_two(e - kSolvedExponent);
}

// T, P and the factors of a value head to the workspace.
template <int kKeyDim>
__device__ __forceinline__ void emit_head(const HighPrepareMemory<kKeyDim>& smem, const WideGates& gates, int thread,
                                          HighSolved* gmem) {
  const int row = thread / 2, half = thread % 2;
  const float solve = emit_row(smem.tiles.t + kPitch * row, gates.beta, kLowestSolved, row, half, gmem->t);
  const int lowest = max(chunk_sm90::exponent_of(smem.q_scale[row]) + kLowestOfQuery, kLowestSolved);
  const float mix = emit_row(smem.tiles.p + kPitch * row, nullptr, lowest, row, half, gmem->p);
  const int place = chunk_sm90::token_place(row);
  const float decay = ptx::ex2_approx_ftz(gates.sum[row] + gates.rest[row]);
  if (half == 0) {
    gmem->gates.read_k[place] = decay * smem.k_scale[row];
    gmem->gates.read_q[place] = decay * smem.q_scale[row] / mix;
    gmem->gates.solve[place] = solve;
    gmem->gates.mix[place] = mix;
  } else {
    gmem->gates.write[place] = decay_between(gates, kChunk - 1, row) * smem.k_scale[row];
    if (row >= kChunk - 4) gmem->gates.decay[row % 4] = ptx::ex2_approx_ftz(gates.sum[kChunk - 1] + gates.rest[kChunk - 1]);
  }
}

// One chunk of one key head and its value heads.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void prepare_chunk(const RuleParams& p, int64_t chunk_row, int64_t key_head, int heads,
                                              int row_block, HighPrepareMemory<kKeyDim>& smem) {
  const int warp = threadIdx.x / 32;
  const ChunkOfRow chunk = chunk_sm90::find_chunk(p, chunk_row);
  if (chunk.count == 0) return;
  __syncthreads();   // nobody reads the item before any more
  chunk_sm90::bring_keys(p, chunk, key_head, threadIdx.x, smem.keys);
  scale_keys<io_t>(p.use_qk_l2norm, chunk.count, threadIdx.x, smem, chunk_sm90::keys_of<kKeyDim>(p, chunk_row, key_head));
  __syncthreads();
  Products products;
  multiply(smem.keys, row_block, threadIdx.x % 32, products.kk, products.qk);
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x)), lane = thread % 32;   // addresses are made anew for each
    __syncthreads();   // the tiles of the head before, or k and q, are read
    if (head % kHeadsAtOnce == 0) {   // a warp makes the gates of head + warp
      if (head + warp < heads) {
        GateBits bits = {};
        chunk_sm90::load_gates(p, chunk, key_head * heads + head + warp, lane, bits);
        sum_gates(p, bits, chunk.count, lane, smem.gates[warp]);
      }
      __syncthreads();
    }
    const WideGates& gates = smem.gates[head % kHeadsAtOnce];
    split(gates, products, row_block, lane, smem, smem.scratch[warp]);
    solve(smem.tiles, smem.scratch[warp], row_block, lane);
    __syncthreads();
    emit_head(smem, gates, thread, solved_of<kKeyDim, HighSolved>(p, chunk_row, key_head * heads + head));
  }
}

template <class io_t, int kKeyDim>
__global__ void __launch_bounds__(kPrepareThreads, kHighBlocks) prepare_high_kernel(const __grid_constant__ RuleParams p) {
  extern __shared__ __align__(1024) char smem_bytes[];
  HighPrepareMemory<kKeyDim>& smem = *reinterpret_cast<HighPrepareMemory<kKeyDim>*>(smem_bytes);
  const int row_block = (threadIdx.x / 32 + blockIdx.x) % 4;
  const uint32_t key_heads = static_cast<uint32_t>(p.dims.Hk), items = static_cast<uint32_t>(num_chunk_rows(p)) * key_heads;
  const int heads = static_cast<int>(p.dims.Hv) / static_cast<int>(key_heads);
  for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    prepare_chunk<io_t>(p, item / key_heads, item % key_heads, heads, row_block, smem);
  }
}

}  // namespace gdn::cuda::chunk_mma
