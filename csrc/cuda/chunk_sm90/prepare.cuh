// SPDX-License-Identifier: Apache-2.0
// Everything of a chunk that does not depend on the state, for all chunks of a call side by side: k and q normalised, T'' and
// M of each value head (head.cuh).
// Grid    blocks of 128 threads walk over (chunk row, key head), fewer than 2^31, chunk rows slowest: k, q and their products
//         are made once for all value heads of a key head. Beside the carrying some blocks end sooner (relay.cuh).
// Block   all warps bring k and q, normalise and multiply them; then each warp makes every fourth value head, by itself. The
//         gates of its first one are asked for before k and q and summed while these come.
// Reads   q, k [64, K], g, beta [64] of each value head.   Writes   Keys, Solved (prepared.h); Hopper's also the words of
//         tasks.cuh, with the order of the rows of a ragged call, or those of relay.cuh (segments.h).
#pragma once

#include "../ptx/bulk.cuh"
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
    Keys<kKeyDim> keys;         // until their products are made and, on Hopper, they have left
    HeadMemory head[kWarps];    // a warp's each
  };
  Tables tables[kWarps];        // a warp's each
  Products products;
  float k_scale[kChunk];        // load.cuh
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

// Normalises them in shared memory, as Keys says, and, if it is not null, to `gmem`. One row after the other in one piece of
// code, of each token that of k, then that of q.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void normalise_keys(bool use_l2norm, int count, int thread, Keys<kKeyDim>& smem,
                                               float* smem_k_scale, Keys<kKeyDim>* gmem) {
  float inverse = 1.0f;
  const auto factor_of = [&](int row, bool is_q, float squares) {
    const float factor = row_factor(squares, use_l2norm, row < count);
    if (is_q) return use_l2norm ? kQueryFactor * factor * inverse : factor;
    const KeyFactors key = use_l2norm ? key_factors(squares, factor, row) : KeyFactors{factor, 1.0f, 1.0f};
    inverse = key.inverse;
    if (thread % kLanesPerRow == 0) smem_k_scale[row] = key.k_scale;
    return key.power;
  };
  ptx::cp_async_wait_group<0>();   // each thread reads what itself has copied
#pragma unroll 2
  for (int i = 0; i < 2 * kChunk / kRowsPerPass; ++i) {
    const bool is_q = i % 2 == 1;
    fp16_t* const gmem_image = gmem == nullptr ? nullptr : is_q ? gmem->q : gmem->k;
    scale_row<io_t, kKeyDim>(i / 2, thread, is_q ? smem.q : smem.k, gmem_image,
                             [&](int row, const auto&, float squares) { return factor_of(row, is_q, squares); });
  }
}

// This thread of the block, not known to be the same as before: no address is kept in registers from item to item.
__device__ __forceinline__ int own_thread() {
  return static_cast<int>(static_cast<uint32_t>(ptx::opaque(static_cast<int>(threadIdx.x))) % kPrepareThreads);
}

// The first value head of a warp. Another warp of each block of a multiprocessor has a head more than the others, whichever
// blocks these are.
__device__ __forceinline__ int first_head_of(int smem_shift) { return (own_thread() / 32 + smem_shift) & (kWarps - 1); }

// By one warp: finds the block's item behind item `before`, or its first one behind blockIdx.x - gridDim.x.
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

// The gates of a warp's value head to its tables.
__device__ __forceinline__ void make_gates(const RuleParams& p, const GateBits& bits, int count, int lane, Tables& smem) {
  float2 sum, beta;
  sum_gates(p, bits, count, lane, sum, beta);
  make_tables(sum, beta, lane, smem);
}

// The same when the keys are there: what the carriers of the state need, and the tables with what keys lack.
__device__ __forceinline__ void scale_gates(const float* smem_k_scale, int lane, Gates* gmem, Tables& smem) {
  const float2 k_scale = reinterpret_cast<const float2*>(smem_k_scale)[lane];
  write_gates(reinterpret_cast<const float2*>(smem.sum)[lane], k_scale, lane, gmem);
  scale_tables(k_scale, lane, smem);
}

// Keys and products of an item whose k and q are under way, by all warps; then one finds the next item. On Hopper one thread
// has the keys copied to the workspace as they lie there, elsewhere each thread writes its own.
template <class Section, class io_t, int kKeyDim>
__device__ __forceinline__ void make_products(const RuleParams& p, const Item& mine, PrepareMemory<kKeyDim>& smem) {
  const int thread = own_thread(), count = mine.chunk.count;
  Keys<kKeyDim>* const gmem = keys_of<kKeyDim>(p, mine.chunk_row, mine.key_head);
  if constexpr (Section::kHasWgmma) {
    const bool copies = count > 0 && thread == 0;
    if (count > 0) normalise_keys<io_t, kKeyDim>(p.use_qk_l2norm, count, thread, smem.keys, smem.k_scale, nullptr);
    ptx::fence_proxy_async();
    __syncthreads();   // k and q are there
    if (copies) ptx::bulk_copy_to_global(gmem, ptx::shared_address(&smem.keys), sizeof(smem.keys));
    if (count > 0) multiply_as_group(smem.keys, smem.k_scale, thread / 32, thread % 32, smem.products);
    if (copies) ptx::bulk_wait_until_read();
  } else {
    if (count > 0) normalise_keys<io_t>(p.use_qk_l2norm, count, thread, smem.keys, smem.k_scale, gmem);
    __syncthreads();   // k and q are there
    if (count > 0) multiply(smem.keys, smem.k_scale, first_head_of(smem.shift), thread % 32, smem.products);
  }
  if (is_relayed(p)) {   // the words of relay.cuh are needed from here on; each time but the first this waits for nothing
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
  }
  __syncthreads();   // and read: their place is the heads'
  if (first_head_of(smem.shift) == kWarps - 1) look_ahead<kKeyDim>(p, mine.index, thread % 32, smem.item);
}

// By the thread that had the keys copied: says that an item is made (relay.cuh).
template <int kKeyDim>
__device__ __forceinline__ void publish(const RuleParams& p, uint32_t chunk_row, uint32_t key_head) {
  ptx::st_release_gpu(relay_of<kKeyDim>(p)->ready + static_cast<int64_t>(chunk_row) * p.dims.Hk + key_head, 1);
}

// One item. A warp takes a turn for each of its value heads and at least one: in the first all make the products.
template <class Section, class io_t, int kKeyDim>
__device__ __forceinline__ void prepare_item(const RuleParams& p, PrepareMemory<kKeyDim>& smem) {
  const int warp = own_thread() / 32;
  Item& mine = smem.mine[warp];
  if (own_thread() % 32 == 0) mine = smem.item;
  __syncwarp();
  bool is_first = true;
  int head = first_head_of(smem.shift);
#pragma unroll 1
  do {
    const int lane = own_thread() % 32;
    const bool is_there = mine.chunk.count > 0 && head < smem.heads;
    const int64_t head_of_call = mine.key_head * smem.heads + head;
    Solved* const gmem = solved_of<kKeyDim>(p, mine.chunk_row, head_of_call);
    GateBits bits = {};
    if (is_there) load_gates(p, mine.chunk, head_of_call, lane, bits);
    if (is_first && mine.chunk.count > 0) bring_keys(p, mine.chunk, mine.key_head, own_thread(), smem.keys);
    if (is_there) make_gates(p, bits, mine.chunk.count, lane, smem.tables[warp]);
    if (is_first) make_products<Section, io_t>(p, mine, smem);
    if (is_there) {
      scale_gates(smem.k_scale, lane, &gmem->first.gates, smem.tables[warp]);
      solve_head(smem.products, smem.tables[warp], lane, smem.head[warp], gmem);
    }
    is_first = false;
    head += kWarps;
  } while (head < smem.heads);
  const bool publishes = is_relayed(p) && own_thread() == 0;
  if constexpr (Section::kHasWgmma) {
    if (publishes) ptx::bulk_wait_until_written();
  }
  __syncthreads();   // the next item is found, nobody needs the products any more, and all is written
  if (publishes) publish<kKeyDim>(p, mine.chunk_row, mine.key_head);
}

// Each section of the build that compiles this has a kernel of its own, named by such a struct.
struct Hopper {
  static constexpr int kBlocks = 4;           // of a multiprocessor, as many as run side by side
  static constexpr bool kHasQueue = true;     // for chunk_kernel: which tasks are taken, and the order of ragged rows
  static constexpr bool kHasWgmma = true;     // products by wgmma, keys out by a bulk copy
};

template <class io_t, int kKeyDim, class Section = Hopper>
__global__ void __launch_bounds__(kPrepareThreads, Section::kBlocks) prepare_kernel(const __grid_constant__ RuleParams p) {
  extern __shared__ __align__(1024) char smem_bytes[];
  PrepareMemory<kKeyDim>& smem = *reinterpret_cast<PrepareMemory<kKeyDim>*>(smem_bytes);
  if (!is_relayed(p)) ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    smem.heads = static_cast<int>(p.dims.Hv) / static_cast<int>(p.dims.Hk);
    smem.shift = static_cast<int>(blockIdx.x % kWarps + kWarps * blockIdx.x / gridDim.x);
  } else if (threadIdx.x / 32 == 1) {
    if (is_relayed(p) && blockIdx.x >= p.items_ahead) ptx::griddepcontrol_wait();   // for the words that look_ahead counts in
    look_ahead<kKeyDim>(p, blockIdx.x - gridDim.x, threadIdx.x % 32, smem.item);
  }
  __syncthreads();
  while (smem.item.is_given) prepare_item<Section, io_t>(p, smem);
  if constexpr (Section::kHasQueue) {
    if (has_queue(p) && blockIdx.x == 0 && threadIdx.x == 0) queue_of<kKeyDim>(p)->taken = 0;
    if (has_order(p)) order_rows<kKeyDim>(p);
  }
}

}  // namespace gdn::cuda::chunk_sm90
