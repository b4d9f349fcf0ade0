// SPDX-License-Identifier: Apache-2.0
// Everything of a chunk that does not depend on the state, for all chunks of a call side by side: k and q normalised, T'' and
// M of each value head (head.cuh).
// Grid    blocks of 128 threads walk over (chunk row, key head), fewer than 2^31, chunk rows slowest: k, q and their products
//         are made once for all value heads of a key head. Beside the carrying some blocks end sooner (relay.cuh).
// Block   all warps bring k and q, normalise and multiply them; then each warp makes every fourth value head, by itself. The
//         gates of its first one are read while k and q are under way.
// Reads   q, k [64, K], g, beta [64] of each value head.   Writes   Keys, Solved (prepared.h); Hopper's also the order of the
//         rows of a ragged call or the words of relay.cuh (segments.h).
#pragma once

#include "../ptx/pdl.cuh"
#include "head.cuh"
#include "relay.cuh"
#include "rows.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kWarps = kPrepareThreads / 32;

// What a block makes at a time: a chunk of a key head, the index-th of the call.
struct Item {
  ChunkOfRow chunk;
  uint32_t index, chunk_row, key_head;
  bool is_given;
};

template <int kKeyDim>
struct alignas(1024) PrepareMemory {
  union {
    Keys<kKeyDim> keys;         // until their products are made
    HeadMemory head[kWarps];    // a warp's each
  };
  Tables tables[kWarps];        // a warp's each
  Products products;
  Item item;           // here and not in registers; the next one from when the products are made
  Item mine[kWarps];   // a warp's copy for its heads
  int heads, shift;    // value heads of a key head; what first_head_of adds
};

// By a warp: sequences are counted that start at this row or before, 32 at a time.
__device__ __forceinline__ ChunkOfRow find_chunk(const RuleParams& p, int64_t chunk_row) {
  int64_t n = 0;
  if (!p.cu_seqlens.given()) {
    n = static_cast<uint32_t>(chunk_row) / static_cast<uint32_t>(ceil_div(p.dims.T, kChunk));   // 64 bits take 150 instructions
  } else {
    int64_t started = 0;
#pragma unroll 1
    for (int64_t base = 0; base < p.dims.N; base += 32) {
      const int64_t candidate = base + threadIdx.x % 32;
      const bool starts = candidate < p.dims.N &&
                          first_chunk_row(p, candidate, sequence_span(p.cu_seqlens, candidate, p.dims.T).first) <= chunk_row;
      const int count = __popc(__ballot_sync(0xffffffffu, starts));
      started += count;
      if (count < 32) break;
    }
    n = started - 1;
  }
  if (n < 0 || !takes_row(p, n)) return {0, 0, 0};
  const Span span = sequence_span(p.cu_seqlens, n, p.dims.T);
  const int64_t before = (chunk_row - first_chunk_row(p, n, span.first)) * kChunk, left = span.length - before;
  return {span.batch, span.first + before, left <= 0 ? 0 : static_cast<int>(left < kChunk ? left : kChunk)};
}

// A quarter of the products, five blocks: K K^T or Q K^T, those of row blocks 3 and 0 or of 2 and 1.
template <int kKeyDim>
__device__ __forceinline__ void multiply(const Keys<kKeyDim>& keys, int quarter, int lane, Products& smem) {
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
    if (quarter < 2 && is_diagonal) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const x = sums[n] + 4 * half;
        smem.on_diagonal[row][half][lane] = make_float4(x[0], x[1], x[2], x[3]);
      }
    } else {
      to[quarter < 2 ? below_block(row, column) : lower_block(row, column)][lane] = right_operand(sums[n], is_diagonal, lane);
    }
  }
}

// Starts to bring k and q of the chunk, as they are.
template <int kKeyDim>
__device__ __forceinline__ void bring_keys(const RuleParams& p, const ChunkOfRow& chunk, int64_t key_head, int thread,
                                           Keys<kKeyDim>& smem) {
  const auto copy = [&](const View& view, fp16_t* smem_tile) {
    const char* const gmem = static_cast<const char*>(view.data) + 2 * view.offset(chunk.batch, chunk.first, key_head);
    copy_rows_in<kKeyDim>(ptx::opaque(gmem), view.stride[1], chunk.count, thread, smem_tile);
  };
  copy(p.k, smem.k);
  copy(p.q, smem.q);
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
                             [&](int row, const auto&, float squares) {
                               const float factor = row_factor(squares, use_l2norm, row < count);
                               return i % 2 == 1 && use_l2norm ? kQueryFactor * factor : factor;
                             });
  }
}

// This thread of the block, not known to be the same as before: no address is kept in registers from item to item.
__device__ __forceinline__ int own_thread() {
  return static_cast<int>(static_cast<uint32_t>(ptx::opaque(static_cast<int>(threadIdx.x))) % kPrepareThreads);
}

// The first value head of a warp. Another warp of each block of a multiprocessor has a head more than the others, whichever
// blocks these are.
__device__ __forceinline__ int first_head_of(int smem_shift) { return (own_thread() / 32 + smem_shift) & (kWarps - 1); }

// By one warp: finds the block's item behind item `before`.
template <int kKeyDim>
__device__ __forceinline__ void look_ahead(const RuleParams& p, uint32_t before, int lane, Item& smem) {
  uint32_t index = 0;
  if (lane == 0) index = next_item<kKeyDim>(p, before);
  index = __shfl_sync(0xffffffffu, index, 0);
  const uint32_t key_heads = static_cast<uint32_t>(p.dims.Hk), chunk_row = index / key_heads;
  const bool is_given = chunk_row < static_cast<uint32_t>(num_chunk_rows(p));
  Item item = {{0, 0, 0}, index, chunk_row, index - chunk_row * key_heads, is_given};
  if (is_given) item.chunk = find_chunk(p, chunk_row);
  if (lane == 0) smem = item;
}

// The gates of a warp's value head: to its tables, and what the carriers of the state need.
__device__ __forceinline__ void make_gates(const RuleParams& p, const Item& item, int64_t head, int lane, Gates* gmem,
                                           Tables& smem) {
  GateBits bits = {};
  load_gates(p, item.chunk, head, lane, bits);
  float2 sum, beta;
  sum_gates(p, bits, item.chunk.count, lane, sum, beta);
  write_gates(sum, lane, gmem);
  make_tables(sum, beta, lane, smem);
}

// Keys and the products of an item, from when its k and q are under way, by all warps; then one finds the next item.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void make_products(const RuleParams& p, const Item& mine, PrepareMemory<kKeyDim>& smem) {
  const int thread = own_thread(), count = mine.chunk.count;
  if (count > 0) {
    normalise_keys<io_t>(p.use_qk_l2norm, count, thread, smem.keys, keys_of<kKeyDim>(p, mine.chunk_row, mine.key_head));
  }
  __syncthreads();   // k and q are there
  if (count > 0) multiply(smem.keys, first_head_of(smem.shift), thread % 32, smem.products);
  __syncthreads();   // and read: their place is the heads'
  if (first_head_of(smem.shift) == kWarps - 1) look_ahead<kKeyDim>(p, mine.index, thread % 32, smem.item);
}

// What says that an item is made (relay.cuh); the nothing that a block begins with has no such word.
template <int kKeyDim>
__device__ __forceinline__ uint32_t* word_of(const RuleParams& p, const Item& item) {
  if (!is_relayed(p) || static_cast<int32_t>(item.index) < 0) return nullptr;
  return relay_of<kKeyDim>(p)->ready + static_cast<int64_t>(item.chunk_row) * p.dims.Hk + item.key_head;
}

// One item. A warp takes a turn for each of its value heads and at least one: in the first all make the products.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void prepare_item(const RuleParams& p, PrepareMemory<kKeyDim>& smem) {
  const int thread = own_thread(), warp = thread / 32;
  Item& mine = smem.mine[warp];
  if (thread % 32 == 0) mine = smem.item;
  __syncwarp();
  if (mine.chunk.count > 0) bring_keys(p, mine.chunk, mine.key_head, thread, smem.keys);
  bool is_first = true;
  int head = first_head_of(smem.shift);
#pragma unroll 1
  do {
    const int lane = own_thread() % 32;
    const bool is_there = mine.chunk.count > 0 && head < smem.heads;
    const int64_t head_of_call = mine.key_head * smem.heads + head;
    Solved* const gmem = solved_of<kKeyDim>(p, mine.chunk_row, head_of_call);
    if (is_there) make_gates(p, mine, head_of_call, lane, &gmem->first.gates, smem.tables[warp]);
    if (is_first) make_products<io_t>(p, mine, smem);
    if (is_there) solve_head(smem.products, smem.tables[warp], lane, smem.head[warp], gmem);
    is_first = false;
    head += kWarps;
  } while (head < smem.heads);
  const bool publishes = first_head_of(smem.shift) == kWarps - 1 && own_thread() % 32 == 0;
  uint32_t* const word = publishes ? word_of<kKeyDim>(p, mine) : nullptr;   // read before another item takes this one's place
  __syncthreads();   // the next item is found, nobody needs the products any more, and all is written
  if (word != nullptr) ptx::st_release_gpu(word, 1);
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
  if (is_relayed(p)) ptx::griddepcontrol_wait();   // for the words of relay.cuh, which chunk_kernel reads
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    smem.heads = static_cast<int>(p.dims.Hv) / static_cast<int>(p.dims.Hk);
    smem.shift = static_cast<int>(blockIdx.x % kWarps + kWarps * static_cast<uint64_t>(blockIdx.x) / gridDim.x);
    // Nothing to make, behind which the block's first item is looked for: look_ahead's code stands once.
    smem.item = {{0, 0, 0}, blockIdx.x - gridDim.x, 0, 0, true};
  }
  __syncthreads();
  while (smem.item.is_given) prepare_item<io_t>(p, smem);
  if constexpr (Section::kOrdersRows) {
    if (has_order(p)) order_rows<kKeyDim>(p);
  }
}

}  // namespace gdn::cuda::chunk_sm90
