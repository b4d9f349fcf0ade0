// SPDX-License-Identifier: Apache-2.0
//
// Gated delta rule, chunk by chunk on the tensor cores of Hopper. Per (sequence, value head) and chunk of 64 tokens, with
// sum_t the running sum of the log decay in the chunk and k, q divided by their length where asked:
//     A_ij = beta_i e^(sum_i - sum_j) (k_i . k_j), j < i;   T = (I + A)^-1;   P_ij = e^(sum_i - sum_j) (q_i . k_j), j <= i
//     X = V - diag(e^sum) K S;   M = P T diag(beta);   O = scale (diag(e^sum) Q S + M X)
//     T'' = diag(e^(sum_64 - sum)) T diag(beta);       S <- e^(sum_64) S + K^T (T'' X)
// T'', M, normalised k and q and the decays come from the workspace, where prepare_kernel (prepare.cuh) has left them, or
// leaves them while this kernel runs (relay.cuh).
// Grid    x: tiles of 64 columns of V: sequence (slowest, in ragged input the longest first), value head, columns (fastest);
//         the first blocks may carry two tiles of a head each (Pairs), the others carry one. Ragged input adds a sequence
//         that writes zeros outside all others; with pairs its last blocks find nothing to do. Of rows that are cut
//         (segments.cuh) one kernel has the first segment, another, later_kernel, the others, both by the functions here.
// Block   a warpgroup for each tile (state.cuh), which keeps S^T [64 v, K] in fp32 accumulators from the first to the last
//         chunk, and one behind them (transfer.cuh), which brings chunks and V in, o out. In a grid with pairs, and in the
//         first pass of segments.cuh, a block of one tile has a third group, which ends at once.
// Reads   Keys, Solved, v [T, 64]; S [K, 64] once; of a later segment transitions and starts (steps.cuh).
// Writes  o [T, 64], S once.
// Numbers Operands are fp16 (keys and queries after normalisation, rows of S, X, T'' X scaled by powers of two), sums fp32, the
//         inverse of the 16 x 16 diagonal blocks fp32. What a chunk computes depends on its tokens and on S at its start
//         only: any batch, and any split at a multiple of 64, gives the same bits.
// Needs   sm_90a; T < 2^31 - kTokensAhead (takes.h); q, k, v bf16 or fp16, unit stride in the head dim, rows at multiples of 16
//         bytes; K 64 or 128, V a multiple of 64.
// Source  The chunked WY form of Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024).
#pragma once

#include "../ptx/arch.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "steps.cuh"
#include "move_state.cuh"
#include "output.cuh"
#include "padding.cuh"
#include "places.cuh"
#include "state.cuh"
#include "transfer.cuh"

namespace gdn::cuda::chunk_sm90 {

struct NoObserver {
  template <class... Args>
  __device__ __forceinline__ void prediction(const Args&...) const {}
  template <class... Args>
  __device__ __forceinline__ void difference(const Args&...) const {}
  template <class... Args>
  __device__ __forceinline__ void write(const Args&...) const {}
  template <class... Args>
  __device__ __forceinline__ void operands(const Args&...) const {}
  __device__ __forceinline__ void start(int, int) const {}
  __device__ __forceinline__ void phase(Phase) const {}
};

// What to do with tile `tile` of the grid's order: sequence (slowest), value head, columns of V (fastest).
template <int kKeyDim, bool kIsLater>
__device__ __forceinline__ Work work_of_tile(const RuleParams& p, uint32_t tile) {
  const uint32_t tiles = static_cast<uint32_t>(p.dims.V) / kValueTile, heads = static_cast<uint32_t>(p.dims.Hv);
  const uint32_t rest = tile / tiles, index = rest / heads, head = rest - index * heads;
  const Segment segment = kIsLater ? find_later_segment(p, index) : Segment{find_row<kKeyDim>(p, index), 0, 1, index};
  return {segment, key_head(head, p.dims.Hk, p.dims.Hv), head, static_cast<int64_t>(tile - rest * tiles) * kValueTile};
}

// Zeros for a tile's tokens where no sequence is; whether that is so.
__device__ __forceinline__ bool is_padding(const RuleParams& p, const Work& work) {
  return write_padding(p, work.segment.n, work.head, work.column, [&] { return segment_span(p, work.segment); });
}

template <class out_t>
__device__ __forceinline__ Writer<out_t> writer_of(const RuleParams& p, const Work& work, const Span& span) {
  // By a shuffle: what ptxas can make of threadIdx again, it makes again for each chunk.
  const int lane = __shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % kGroupThreads / 32, 0);
  const int64_t column = work.column + 16 * warp;
  out_t* const gmem = static_cast<out_t*>(p.out.data) + p.out.offset(span.batch, span.first, work.head, column);
  return {gmem, p.out.stride[1], warp, lane};
}

// A tile group: S in, all chunks, S out.
template <class io_t, class out_t, bool kIsLater, int kKeyDim, class Observer>
__device__ __forceinline__ void carry_tile(const RuleParams& p, const Work& work, const Span& span, SharedMemory<kKeyDim>& smem,
                                           Tile& tile, const Observer& observer) {
  State<kKeyDim> state = {};
  const Writer<out_t> writer = writer_of<out_t>(p, work, span);
  const Place from = kIsLater ? second_start<kKeyDim>(p, work.segment, work.head)
                              : initial_place(p, work.segment.n, work.head, slot_to_read(p, work.segment.n));
  if (from.is_given) move_state<true>(from.view, from.first(work.column), state);
  if constexpr (kIsLater) step_to_start(p, work, smem, state);
  const int length = static_cast<int>(span.length), num_chunks = (length + kChunk - 1) / kChunk;
  int chunk = 0;
  do {   // up to the next checkpoint, or to the end
    const int end = next_stop(p, work.segment, chunk, num_chunks);
    if (end > chunk) run_tile<io_t>(work, chunk, end, length, output_scale(p), writer, smem, tile, state, observer);
    chunk = end;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {   // both from one copy of the code, which is long
      const Place to = i == 0 ? checkpoint_after(p, work.segment, work.head, chunk, span.length)
                              : end_of_segment<kKeyDim>(p, work.segment, work.head, chunk == num_chunks);
      if (to.is_given) move_state<false>(to.view, to.first(work.column), state);
    }
  } while (chunk < num_chunks);
}

// What a thread moves of a tile's V or o.
__device__ __forceinline__ Moved tokens_of(const View& view, const Work& work, const Span& span) {
  const int thread = threadIdx.x % kMovers;
  const int64_t column = work.column + 8 * (thread % kLanesOfToken);
  return {static_cast<uint16_t*>(view.data) + view.offset(span.batch, span.first, work.head, column), view.stride[1], thread};
}

// The last block waits for the grid before this one even if it has nothing to do, so that this grid does not end before it.
__device__ __forceinline__ bool is_last_block() { return blockIdx.x + 1 == gridDim.x; }

// The thread that brings the chunks.
__device__ __forceinline__ int copying_thread(int tiles) {
  return tiles * kGroupThreads + (tiles == kMostTiles ? 0 : tiles * kMovers);
}

// The warp that brings the chunks of a block of one tile, and the transitions before those of a later segment.
template <bool kIsLater, int kKeyDim>
__device__ __forceinline__ void carry_copies(const RuleParams& p, const Work& work, const Span& span,
                                             SharedMemory<kKeyDim>& smem) {
  const int num_chunks = static_cast<int>((span.length + kChunk - 1) / kChunk);
  const int64_t chunk_row = first_chunk_row(p, work.segment.n, span.first);
  Prepared prepared = prepared_of<kKeyDim>(p, chunk_row, work.key_head, num_chunks);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if constexpr (kIsLater) {
    if (lane == 0) bring_transitions(p, work, smem);
    __syncwarp();
  }
  const bool waits = !is_relayed(p) && !kIsLater;   // bring_transitions has waited
  run_copies<kIsLater>(p, num_chunks, lane, waits, prepared, smem, [&](int chunk) {
    if constexpr (kIsLater) wait_for_transitions(chunk, steps_of(work.segment), smem);
  });
  if (is_last_block()) ptx::griddepcontrol_wait();   // the others end and leave their places to the next row's tiles
}

// The transfer group: two warps move a tile's V and o. In a block of one tile the third warp brings the chunks and the fourth
// ends at once; in a block of two the first thread brings them.
template <class out_t, bool kIsLater, int kKeyDim>
__device__ __forceinline__ void carry_transfer(const RuleParams& p, const Span& span, int tiles, SharedMemory<kKeyDim>& smem) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % kGroupThreads / 32, 0), tile = warp / (kMovers / 32);
  if (tile < tiles) {
    const Work& work = smem.work[tile];
    const bool copies = static_cast<int>(threadIdx.x) == copying_thread(tiles);
    run_transfer<out_t>(p, static_cast<int>(span.length), copies, tokens_of(p.v, work, span), tokens_of(p.out, work, span),
                        smem.tile[tile], smem);
  } else if (warp == kMovers / 32) {
    carry_copies<kIsLater>(p, smem.work[0], span, smem);
  }
}

// By one thread, in straight code: a loop over tiles became loops over lanes, four times the instructions.
template <bool kIsLater, int kKeyDim>
__device__ __forceinline__ void init_barriers(int tiles, SharedMemory<kKeyDim>& smem) {
  const auto init = [](uint64_t& barrier, int arrivals) { ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals); };
  const auto init_tile = [&](Tile& tile) {
    init(tile.v_there, kMovers);
    init(tile.o_taken, kMovers);
    for (uint64_t* barriers : {tile.v_free, tile.o_ready}) {
      init(barriers[0], kGroupThreads);
      init(barriers[1], kGroupThreads);
    }
  };
  const auto init_stages = [&](int of_tiles) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      init(smem.full[i], 1 + of_tiles * kMovers);
      init(smem.empty[i], of_tiles * kGroupThreads);
    }
  };
  init_tile(smem.tile[0]);
  if constexpr (kIsLater) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      init(smem.half_there[i], 1);
      init(smem.half_read[i], kGroupThreads);
    }
  }
  if (tiles == kMostTiles) {
    init_stages(kMostTiles);
    init_tile(smem.tile[1]);
  } else {
    init_stages(1);
  }
  ptx::fence_mbarrier_init();
}

// What a block needs before its groups part: zeros and barriers, what it works on, each by other warps.
template <bool kIsLater, int kKeyDim>
__device__ __forceinline__ void set_up(const RuleParams& p, const Work& work, int tiles, SharedMemory<kKeyDim>& smem) {
  const int thread = threadIdx.x, group = thread / kGroupThreads;
  if (thread == kOneTileThreads - 32) init_barriers<kIsLater>(tiles, smem);
  write_zeros(smem.stage);
  if (thread == 0) smem.span = segment_span(p, work.segment);
  if (group < tiles && thread % kGroupThreads == 0) {
    Work& mine = smem.work[group];
    mine = work;
    mine.column += group * kValueTile;
  }
  if (thread == copying_thread(tiles)) {
    const int64_t chunk_row = first_chunk_row(p, work.segment.n, segment_span(p, work.segment).first);
    smem.to_copy = {keys_of<kKeyDim>(p, chunk_row, work.key_head), solved_of<kKeyDim>(p, chunk_row, work.head), 0, 0};
  }
  __syncthreads();
}

// A block's life: `tiles` tiles of a head side by side, the first that of `work`; kIsLater: of a segment behind a row's first.
template <class io_t, class out_t, bool kIsLater, int kKeyDim, class Observer>
__device__ __forceinline__ void carry(const RuleParams& p, const Work& work, int tiles, SharedMemory<kKeyDim>& smem,
                                      const Observer& observer) {
  bool is_done = work.segment.n > p.dims.N || !takes_row(p, work.segment.n);
  for (int i = 0; i < tiles && !is_done; ++i) {
    Work of_tile = work;
    of_tile.column += i * kValueTile;
    is_done = is_padding(p, of_tile) && i + 1 == tiles;
  }
  if (is_done) {
    if (is_last_block()) ptx::griddepcontrol_wait();
    return;
  }
  set_up<kIsLater>(p, work, tiles, smem);
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  if (group < tiles) {
    ptx::setmaxnreg_inc<kTileRegisters>();
    carry_tile<io_t, out_t, kIsLater>(p, smem.work[group], smem.span, smem, smem.tile[group], observer);
  } else if (group == tiles) {
    ptx::setmaxnreg_dec<kTransferRegisters>();
    carry_transfer<out_t, kIsLater>(p, smem.span, tiles, smem);
  }
}

// How many blocks carry two tiles. By each warp for itself.
template <int kKeyDim>
__device__ __forceinline__ uint32_t count_pairs(const RuleParams& p, const Pairs& pairs) {
  const bool has_none = pairs.count > 0 && p.cu_seqlens.given() && longest_length<kKeyDim>(p) > pairs.longest;
  return has_none ? 0 : static_cast<uint32_t>(pairs.count);
}

template <class io_t, class out_t, int kKeyDim, class Observer>
__global__ void __launch_bounds__(kThreads, 1)
    chunk_kernel(const __grid_constant__ RuleParams p, const __grid_constant__ Pairs pairs,
                 const __grid_constant__ Observer observer) {
  if constexpr (!ptx::kHasWgmma) {
    ptx::trap();   // the launcher does not choose this kernel for other targets
  } else {
    extern __shared__ __align__(1024) char smem_bytes[];
    auto& smem = *reinterpret_cast<SharedMemory<kKeyDim>*>(smem_bytes);
    const uint32_t both = count_pairs<kKeyDim>(p, pairs);
    const int tiles = __shfl_sync(0xffffffffu, blockIdx.x < both ? kMostTiles : 1, 0);   // known to be uniform
    const uint32_t first = blockIdx.x + min(blockIdx.x, both) * (kMostTiles - 1);
    carry<io_t, out_t, false>(p, work_of_tile<kKeyDim, false>(p, first), tiles, smem, observer);
  }
}

}  // namespace gdn::cuda::chunk_sm90
