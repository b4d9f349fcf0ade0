// SPDX-License-Identifier: Apache-2.0
// Everything of a chunk that does not depend on the state, for all chunks of a call side by side.
//     A_ij = beta_i d_ij (k_i . k_j) for j < i;   T = (I + A)^-1;   P_ij = d_ij (q_i . k_j) for j <= i
//     d_ij = 2^(sum_i - sum_j), the decay between two tokens: never the exponential of a positive number for decays <= 1
// Grid    blocks of 128 threads walk over (chunk row, key head), fewer than 2^31, chunk rows slowest: k, q and their products
//         are computed once for all value heads of a key head.
// Block   warp w owns rows 16 r .. 16 r + 15 of A, T and P, r = w + block (mod 4): low rows are less work, and warps w of all
//         blocks share a scheduler.
// Reads   q, k [64, K], g, beta [64] of each value head.   Writes   Keys, Solved (prepared.h); Hopper's also the order of the
//         rows of a ragged call (segments.h).
#pragma once

#include "../ptx/pdl.cuh"
#include "../tile/solve.cuh"
#include "load.cuh"
#include "rows.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kHeadsAtOnce = 4;   // value heads whose gates are in shared memory, a warp's each

// Running sums of log2 decay, inclusive, and betas of a value head's tokens; of missing tokens beta is 0.
struct SolverGates {
  float sum[kChunk];
  float beta[kChunk];
};

// T and P of a value head until they are copied out.
struct alignas(1024) Tiles {
  fp16_t t[kChunk * kChunk];
  fp16_t p[kChunk * kChunk];
};

template <int kKeyDim>
struct alignas(1024) PrepareMemory {
  union {
    Keys<kKeyDim> keys;   // until their products are made
    Tiles tiles[2];       // of value heads in turn, so that one is copied out while the next is made
  };
  float4 qk[8][kPrepareThreads];   // Q K^T: products of each thread, pieces of four
  SolverGates gates[kHeadsAtOnce];
  SolveScratch scratch[4];
};

// Which chunk a chunk row holds: tokens [first, first + count) of batch row `batch`; count 0: none.
struct ChunkOfRow {
  int64_t batch, first;
  int count;
};

// By all threads of the block: sequences are counted that start at this row or before, 128 at a time.
__device__ __forceinline__ ChunkOfRow find_chunk(const RuleParams& p, int64_t chunk_row) {
  int64_t n = 0;
  if (!p.cu_seqlens.given()) {
    n = static_cast<uint32_t>(chunk_row) / static_cast<uint32_t>(ceil_div(p.dims.T, kChunk));   // 64 bits take 150 instructions
  } else {
    int64_t started = 0;
    for (int64_t base = 0; base < p.dims.N; base += kPrepareThreads) {
      const int64_t candidate = base + threadIdx.x;
      const bool starts = candidate < p.dims.N &&
                          first_chunk_row(p, candidate, sequence_span(p.cu_seqlens, candidate, p.dims.T).first) <= chunk_row;
      const int count = __syncthreads_count(starts);
      started += count;
      if (count < kPrepareThreads) break;
    }
    n = started - 1;
  }
  if (n < 0 || !takes_row(p, n)) return {0, 0, 0};
  const Span span = sequence_span(p.cu_seqlens, n, p.dims.T);
  const int64_t before = (chunk_row - first_chunk_row(p, n, span.first)) * kChunk, left = span.length - before;
  return {span.batch, span.first + before, left <= 0 ? 0 : static_cast<int>(left < kChunk ? left : kChunk)};
}

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

// d_ij of a lane's rows and columns 8 half_block .. of the products.
__device__ __forceinline__ void decays(const SolverGates& gates, const float (&sum_i)[2], int half_block, int lane,
                                       float (&d)[4]) {
  const float2 sum_j = *reinterpret_cast<const float2*>(gates.sum + sum_column(lane, 4 * half_block));
#pragma unroll
  for (int i = 0; i < 4; ++i) {   // right of the diagonal this may be anything, inf too: never used
    d[i] = ptx::ex2_approx_ftz(sum_i[i / 2] - (i % 2 == 0 ? sum_j.x : sum_j.y));
  }
}

// The products -> P, and A: its diagonal block into scratch, those left of it as operands.
__device__ __forceinline__ void split(const SolverGates& gates, const float (&kk)[32], const float4* smem_qk, int row_block,
                                      int lane, uint32_t smem_p, SolveScratch& scratch, uint32_t (&off_diagonal)[3][4]) {
  const int row = 16 * row_block + lane / 4;
  const float sum_i[2] = {gates.sum[row], gates.sum[row + 8]}, beta_i[2] = {gates.beta[row], gates.beta[row + 8]};
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block > row_block) continue;
    float a[8], x[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float d[4];
      const float4 piece = smem_qk[(2 * block + half) * kPrepareThreads];
      const float qk[4] = {piece.x, piece.y, piece.z, piece.w};
      decays(gates, sum_i, 2 * block + half, lane, d);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[4 * half + i] = beta_i[i / 2] * d[i] * kk[8 * block + 4 * half + i];
        x[4 * half + i] = d[i] * qk[i];
      }
    }
    if (block < row_block) {
      if (block < 3) round_to_operand(a, off_diagonal[block]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        a[i] = sum_column(lane, i) < sum_row(lane, i) ? a[i] : 0.0f;
        x[i] = sum_column(lane, i) <= sum_row(lane, i) ? x[i] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 8; i += 2) {   // rows 0..7 have no columns 8..15
        if (i == 4) continue;
        float* const to = scratch.a + scratch_row(sum_row(lane, i)) + sum_column(lane, i);
        *reinterpret_cast<float2*>(to) = make_float2(a[i], a[i + 1]);
      }
    }
    uint32_t p[4];
    round_to_operand(x, p);
    ptx::stmatrix_x4(block_address(smem_p, row_block, block, lane), p);
  }
}

// Zeros for the blocks right of the diagonal of a warp's rows of T and P.
__device__ __forceinline__ void clear_right(Tiles& tiles, int row_block, int lane) {
  constexpr uint32_t kZeros[4] = {};
  for (int block = row_block + 1; block < 4; ++block) {
    ptx::stmatrix_x4(block_address(ptx::shared_address(tiles.t), row_block, block, lane), kZeros);
    ptx::stmatrix_x4(block_address(ptx::shared_address(tiles.p), row_block, block, lane), kZeros);
  }
}

// A warp's 16 rows of a tile, 2 KB, to its image.
__device__ __forceinline__ void copy_rows(const fp16_t* smem_tile, int row_block, int lane, fp16_t* gmem_image) {
  const Words<16>* const from = reinterpret_cast<const Words<16>*>(smem_tile + 16 * kChunk * row_block);
  Words<16>* const to = reinterpret_cast<Words<16>*>(gmem_image + 16 * kChunk * row_block);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[lane + 32 * i] = from[lane + 32 * i];
}

// T and P of one value head from the products of its key head.
__device__ __forceinline__ void solve_head(const SolverGates& gates, const float (&kk)[32], const float4* smem_qk,
                                           int row_block, int lane, Tiles& tiles, SolveScratch& scratch, Solved* gmem) {
  uint32_t off_diagonal[3][4] = {}, inverse[4];
  split(gates, kk, smem_qk, row_block, lane, ptx::shared_address(tiles.p), scratch, off_diagonal);
  solve_diagonal(scratch, gates.beta, reinterpret_cast<char*>(tiles.t), row_block, lane, inverse);
  solve_off_diagonal(off_diagonal, inverse, ptx::shared_address(tiles.t), 0, row_block, lane);
  __syncwarp();
  copy_rows(tiles.t, row_block, lane, gmem->t);
  copy_rows(tiles.p, row_block, lane, gmem->m);
}

// Starts to bring k and q of the chunk, as they are.
template <int kKeyDim>
__device__ __forceinline__ void bring_keys(const RuleParams& p, const ChunkOfRow& chunk, int64_t key_head, int thread,
                                           Keys<kKeyDim>& smem) {
  copy_rows_in<kKeyDim>(static_cast<const uint16_t*>(p.k.data) + p.k.offset(chunk.batch, chunk.first, key_head), p.k.stride[1],
                        chunk.count, thread, smem.k);
  copy_rows_in<kKeyDim>(static_cast<const uint16_t*>(p.q.data) + p.q.offset(chunk.batch, chunk.first, key_head), p.q.stride[1],
                        chunk.count, thread, smem.q);
  ptx::cp_async_commit_group();
}

// Normalises them, in shared memory and to the workspace. One row after the other in one piece of code.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void normalise_keys(bool use_l2norm, int count, int thread, Keys<kKeyDim>& smem,
                                               Keys<kKeyDim>* gmem) {
  ptx::cp_async_wait_group<0>();   // each thread reads what itself has copied
#pragma unroll 2
  for (int i = 0; i < 2 * kChunk / kRowsPerPass; ++i) {
    scale_row<io_t, kKeyDim>(i / 2, thread, i % 2 == 0 ? smem.k : smem.q, i % 2 == 0 ? gmem->k : gmem->q,
                             [&](int row, const auto&, float squares) { return row_factor(squares, use_l2norm, row < count); });
  }
}

// One chunk of one key head and its value heads.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void prepare_chunk(const RuleParams& p, int64_t chunk_row, int64_t key_head, int heads,
                                              int row_block, PrepareMemory<kKeyDim>& smem) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const ChunkOfRow chunk = find_chunk(p, chunk_row);
  if (chunk.count == 0) return;
  __syncthreads();   // nobody reads the item before any more
  bring_keys(p, chunk, key_head, thread, smem.keys);
  GateBits bits = {};
  if (warp < heads) load_gates(p, chunk.batch, chunk.first, chunk.count, key_head * heads + warp, lane, bits);
  normalise_keys<io_t>(p.use_qk_l2norm, chunk.count, thread, smem.keys, keys_of<kKeyDim>(p, chunk_row, key_head));
  __syncthreads();
  float kk[32];
  {
    float qk[32];
    multiply(smem.keys, row_block, lane, kk, qk);
#pragma unroll
    for (int i = 0; i < 8; ++i) smem.qk[i][thread] = make_float4(qk[4 * i], qk[4 * i + 1], qk[4 * i + 2], qk[4 * i + 3]);
  }
  __syncthreads();   // k and q are read: their place is T's and P's
  clear_right(smem.tiles[0], row_block, lane);
  clear_right(smem.tiles[1], row_block, lane);
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    Solved* const gmem = solved_of<kKeyDim>(p, chunk_row, key_head * heads + head);
    if (head % kHeadsAtOnce == 0) {   // a warp makes the gates of head + warp
      if (head > 0) {   // rare: what was known of the chunk is found again, not kept in registers
        __syncthreads();
        const ChunkOfRow again = find_chunk(p, chunk_row);
        const int64_t mine = key_head * heads + head + warp;
        if (head + warp < heads) load_gates(p, again.batch, again.first, again.count, mine, lane, bits);
      }
      if (head + warp < heads) {
        float2 sum, beta;
        sum_gates(p, bits, chunk.count, lane, sum, beta);
        reinterpret_cast<float2*>(smem.gates[warp].sum)[lane] = sum;
        reinterpret_cast<float2*>(smem.gates[warp].beta)[lane] = beta;
        write_gates(sum, lane, &gmem[warp].gates);
      }
      __syncthreads();
    }
    solve_head(smem.gates[head % kHeadsAtOnce], kk, &smem.qk[0][thread], row_block, lane, smem.tiles[head % 2],
               smem.scratch[warp], gmem);
  }
}

// Each section of the build that compiles this has a kernel of its own, named by such a struct.
struct Hopper {
  static constexpr int kBlocks = 4;           // of a multiprocessor, as many as run side by side
  static constexpr bool kOrdersRows = true;   // for chunk_kernel, which takes long rows first
};

template <class io_t, int kKeyDim, class Section = Hopper>
__global__ void __launch_bounds__(kPrepareThreads, Section::kBlocks) prepare_kernel(const __grid_constant__ RuleParams p) {
  extern __shared__ __align__(1024) char smem_bytes[];
  PrepareMemory<kKeyDim>& smem = *reinterpret_cast<PrepareMemory<kKeyDim>*>(smem_bytes);
  ptx::griddepcontrol_launch_dependents();
  const int row_block = (threadIdx.x / 32 + blockIdx.x) % 4;
  const uint32_t key_heads = static_cast<uint32_t>(p.dims.Hk), items = static_cast<uint32_t>(num_chunk_rows(p)) * key_heads;
  const int heads = static_cast<int>(p.dims.Hv) / static_cast<int>(key_heads);
  for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    prepare_chunk<io_t, kKeyDim>(p, item / key_heads, item % key_heads, heads, row_block, smem);
  }
  if constexpr (Section::kOrdersRows) {
    if (has_order(p)) order_rows<kKeyDim>(p);
  }
}

}  // namespace gdn::cuda::chunk_sm90
