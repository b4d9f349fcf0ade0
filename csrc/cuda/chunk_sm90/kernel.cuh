// SPDX-License-Identifier: Apache-2.0
//
// Gated delta rule, chunk by chunk on the tensor cores of Hopper. Per (sequence, value head) and chunk of 64 tokens, with
// sum_t the running sum of the log decay in the chunk and k, q divided by their length where asked:
//     A_ij = beta_i e^(sum_i - sum_j) (k_i . k_j), j < i;   T = (I + A)^-1;   P_ij = e^(sum_i - sum_j) (q_i . k_j), j <= i
//     X = V - diag(e^sum) K S;   M = P T diag(beta);   O = scale (diag(e^sum) Q S + M X)
//     T'' = diag(e^(sum_64 - sum)) T diag(beta);       S <- e^(sum_64) S + K^T (T'' X)
// T'', M, k, q and e^sum come from the workspace, where prepare_kernel (prepare.cuh) has left them, or leaves them while this
// kernel runs (relay.cuh); as prepared.h says, k there is k / k_scale, which is in e^sum before K S and in rows of T'' instead.
// Grid    x: tasks, each a tile of 64 columns of V of a sequence and value head, the first ones two tiles of a head (Pairs), in
//         the order sequence (slowest, in ragged input the longest first), value head, columns (fastest). Ragged input adds a
//         sequence that writes zeros outside all others. A block to a multiprocessor at most: those that are done take the
//         tasks that are left (tasks.cuh). Beside the preparation, and of rows that are cut, each task has its own block; of
//         the latter (segments.cuh) one kernel has the first segment, another, later_kernel, the others, both by the
//         functions here.
// Block   a warpgroup for each tile (state.cuh), which keeps S^T [64 v, K] in fp32 accumulators from the first to the last
//         chunk, and one behind them (transfer.cuh), which brings chunks and V in, o out, and finds the next task. In a grid
//         with pairs, and in the first pass of segments.cuh, the second tile group ends at the first task of one tile.
// Reads   Keys, Solved, v [T, 64]; S [K, 64] once, of all tasks but a block's first asked for ahead; the words of tasks.cuh; of
//         a later segment transitions and starts (steps.cuh).
// Writes  o [T, 64], S once, checkpoints; the word of tasks.cuh that says which tasks are taken.
// Numbers Operands are fp16 (keys and queries as prepared.h says, rows of S, X, T'' X scaled by powers of two), sums fp32, the
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
#include "places.cuh"
#include "state.cuh"
#include "tasks.cuh"
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
  const uint32_t key_heads = static_cast<uint32_t>(p.dims.Hk);
  return {segment, key_head(head, key_heads, heads), head, static_cast<int64_t>(tile - rest * tiles) * kValueTile};
}

// Where a sequence would begin of which the task's chunks are those from task.first_chunk on; and where it ends, counted from
// there.
__device__ __forceinline__ int64_t token_zero(const Task& task) { return task.span.first - task.first_chunk * kChunk; }
__device__ __forceinline__ int length_from_zero(const Task& task) {
  return static_cast<int>(task.span.length) + task.first_chunk * kChunk;
}

template <class out_t>
__device__ __forceinline__ Writer<out_t> writer_of(const RuleParams& p, const Work& work, const Task& task) {
  // By a shuffle: what ptxas can make of threadIdx again, it makes again for each chunk.
  const int lane = __shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % kGroupThreads / 32, 0);
  const int64_t column = work.column + 16 * warp;
  out_t* const gmem = static_cast<out_t*>(p.out.data) + p.out.offset(task.span.batch, token_zero(task), work.head, column);
  return {gmem, p.out.stride[1], warp, lane};
}

// A tile group: S in, all chunks of a task, S out.
template <class io_t, class out_t, bool kIsLater, bool kIsWhole, int kKeyDim, class Observer>
__device__ __forceinline__ void carry_tile(const RuleParams& p, const Task& task, const Work& work, SharedMemory<kKeyDim>& smem,
                                           Tile& tile, const Observer& observer) {
  State<kKeyDim> state = {};
  const Writer<out_t> writer = writer_of<out_t>(p, work, task);
  const Place from = kIsLater ? second_start<kKeyDim>(p, work.segment, work.head)
                              : initial_place(p, task);
  if (from.is_given) move_state<true>(from.view, from.first(work.column), state);
  if constexpr (kIsLater) step_to_start(p, work, smem, state);
  const int64_t length = task.span.length;
  const int num_chunks = chunks_of(task);
  int chunk = 0;
  do {   // up to the next checkpoint, or to the end
    const int end = next_stop(p, work.segment, chunk, num_chunks), before = task.first_chunk;
    if (end > chunk) {
      run_tile<io_t>(task, work, before + chunk, before + end, length_from_zero(task), output_scale(p), writer, smem, tile,
                     state, observer);
    }
    chunk = end;
#pragma unroll 1
    for (int i = p.checkpoints.given() ? 0 : 1; i < 2; ++i) {   // both from one copy of the code, which is long
      const Place to = i == 0 ? checkpoint_after(p, work.segment, work.head, chunk, length)
                              : end_of_segment<kKeyDim, kIsWhole>(p, task, work, chunk == num_chunks);
      if (to.is_given) move_state<false>(to.view, to.first(work.column), state);
    }
  } while (chunk < num_chunks);
}

// What a thread moves of a tile's V or o, counted from token_zero.
__device__ __forceinline__ Moved tokens_of(const View& view, const Work& work, const Task& task) {
  const int thread = threadIdx.x % kMovers;
  const int64_t column = work.column + 8 * (thread % kLanesOfToken);
  uint16_t* const gmem = static_cast<uint16_t*>(view.data) + view.offset(task.span.batch, token_zero(task), work.head, column);
  return {gmem, view.stride[1], thread};
}

// The last block waits for the grid before this one even if it has nothing to do, so that this grid does not end before it.
__device__ __forceinline__ bool is_last_block() { return blockIdx.x + 1 == gridDim.x; }

// The warp that brings the chunks of a task of one tile, and the transitions before those of a later segment.
template <bool kIsLater, int kKeyDim>
__device__ __forceinline__ void carry_copies(const RuleParams& p, const Task& task, SharedMemory<kKeyDim>& smem) {
  const Work& work = task.work[0];
  const int num_chunks = chunks_of(task);
  const int64_t chunk_row = first_chunk_row(p, work.segment.n, task.span.first);
  Prepared prepared = prepared_of<kKeyDim>(p, chunk_row, work.key_head, num_chunks);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if constexpr (kIsLater) {
    if (lane == 0) bring_transitions(p, work, smem);
    __syncwarp();
  }
  const bool waits = !is_relayed(p) && !kIsLater;   // bring_transitions has waited
  const int absent = (tiles_of_block() - task.tiles) * kMovers;
  run_copies<kIsLater>(p, task, num_chunks, lane, waits, absent, prepared, smem, [&](int chunk) {
    if constexpr (kIsLater) wait_for_transitions(chunk, steps_of(work.segment), smem);
  });
}

// In the transfer group, for two tiles, all warps move V and o, two each, and the first thread brings the chunks; for one the
// third warp brings them, and the fourth has ended: a warp that only waits takes a tile group's issue slots.
constexpr int kWarpsOfMovers = kMovers / 32, kFindingWarp = kWarpsOfMovers - 1, kCopyingWarp = kWarpsOfMovers;

// The part of one warp of the transfer group in a task.
template <class out_t, bool kIsLater, int kKeyDim, class FindNext>
__device__ __forceinline__ void transfer_task(const RuleParams& p, const Task& task, int warp, SharedMemory<kKeyDim>& smem,
                                              const FindNext& find_next) {
  if (warp < task.tiles * kWarpsOfMovers) {
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {   // what the turns need is made anew behind find_next: it would not fit in registers
      const int tile = warp / kWarpsOfMovers, first = task.first_chunk, end = first + chunks_of(task);
      const int find_turn = end - kStages;   // before it the last V is under way
      const bool copies = task.tiles == kMostTiles && threadIdx.x % kGroupThreads == 0;
      if (part == 0 && copies) smem.to_copy = first_to_copy<kKeyDim>(p, task);
      if (end > first) {
        const Work& work = task.work[ptx::opaque(tile)];
        run_transfer<out_t>(p, task, part == 0 ? first - kStages : find_turn, part == 0 ? find_turn : end,
                            length_from_zero(task), copies, tokens_of(p.v, work, task), tokens_of(p.out, work, task),
                            smem.tile[tile], smem);
      }
      if (part == 0) find_next();
    }
  } else if (warp == kCopyingWarp && !task.is_padding) {
    carry_copies<kIsLater>(p, task, smem);
  }
}

// The transfer group, task after task. The finding warp begins with one of no chunks, to find the first.
template <class out_t, bool kIsLater, bool kWalks, int kKeyDim, class WorkOf>
__device__ __forceinline__ void run_transfers(const RuleParams& p, const Tasks& tasks, const WorkOf& work_of,
                                              SharedMemory<kKeyDim>& block_smem) {
  SharedMemory<kKeyDim>& smem = ptx::kept(block_smem);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % kGroupThreads / 32, 0);
#pragma unroll 1
  for (int idx = warp == kFindingWarp ? -1 : 0;; ++idx) {
    const Task& task = idx < 0 ? smem.none : wait_for_task(idx, smem);
    const bool has_part = warp < task.tiles * kWarpsOfMovers || (warp == kCopyingWarp && task.tiles > 0);
    if (!has_part) {
      if (kWalks && task.tiles > 0) leave_task(idx, 1, smem);
      break;
    }
    transfer_task<out_t, kIsLater>(p, task, warp, smem, [&] {
      if (warp == kFindingWarp && (kWalks || idx < 0)) find_task<kWalks>(p, tasks, idx, work_of, smem);
    });
    if (idx < 0) continue;
    if constexpr (!kWalks) break;
    // The copying warp arrives for the fourth one too, when that has ended.
    leave_task(ptx::opaque(idx), warp == kCopyingWarp && task.is_left ? 2 : 1, smem);
  }
  if (is_last_block()) ptx::griddepcontrol_wait();   // beside the preparation the others leave their places to the next row's
}

// A tile group, task after task, until there is none with a tile for it: those of two tiles come first.
template <class io_t, class out_t, bool kIsLater, bool kWalks, int kKeyDim, class Observer>
__device__ __forceinline__ void run_tiles(const RuleParams& p, int group, SharedMemory<kKeyDim>& block_smem,
                                          const Observer& observer) {
  SharedMemory<kKeyDim>& smem = ptx::kept(block_smem);
#pragma unroll 1
  for (int idx = 0;; ++idx) {
    const Task& task = wait_for_task(idx, smem);
    if (group >= task.tiles) {
      if (kWalks && task.tiles > 0) leave_task(idx, 1, smem);
      break;
    }
    const Work& work = task.work[group];
    if (task.is_padding) {
      const Writers writers = {static_cast<int>(threadIdx.x % kGroupThreads), kGroupThreads};
      write_padding(p, work.segment.n, work.head, work.column, writers, [&] { return task.span; });
    } else {
      carry_tile<io_t, out_t, kIsLater, kWalks>(p, task, work, smem, smem.tile[group], observer);
    }
    if constexpr (!kWalks) break;
    leave_task(idx, task.is_left ? tiles_of_block() : 1, smem);
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
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    init(smem.full[i], 1 + tiles * kMovers);
    init(smem.empty[i], tiles * kGroupThreads);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    init(smem.task_there[i], 32);
    init(smem.task_done[i], (tiles + 1) * kGroupThreads);
  }
  if constexpr (kIsLater) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      init(smem.half_there[i], 1);
      init(smem.half_read[i], kGroupThreads);
    }
  }
  init_tile(smem.tile[0]);
  if (tiles == kMostTiles) init_tile(smem.tile[1]);
  ptx::fence_mbarrier_init();
}

// A block's life: task blockIdx.x, and with kWalks others behind it. kIsLater: tasks are segments behind a row's first.
template <class io_t, class out_t, bool kIsLater, bool kWalks, int kKeyDim, class WorkOf, class Observer>
__device__ __forceinline__ void carry(const RuleParams& p, const Tasks& tasks, const WorkOf& work_of,
                                      SharedMemory<kKeyDim>& smem, const Observer& observer) {
  const int tiles = tiles_of_block(), group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  write_zeros(smem.stage);
  if (threadIdx.x == kOneTileThreads - 32) {   // of a warp that has no zeros to write
    init_barriers<kIsLater>(tiles, smem);
    smem.none.tiles = kMostTiles;
    smem.none.is_padding = true;
    smem.none.first_chunk = smem.none.parity = 0;
  }
  __syncthreads();
  if (group < tiles) {
    ptx::setmaxnreg_inc<kTileRegisters>();
    run_tiles<io_t, out_t, kIsLater, kWalks>(p, group, smem, observer);
  } else {
    ptx::setmaxnreg_dec<kTransferRegisters>();
    run_transfers<out_t, kIsLater, kWalks>(p, tasks, work_of, smem);
  }
}

template <class io_t, class out_t, int kKeyDim, class Observer>
__global__ void __launch_bounds__(kThreads, 1)
    chunk_kernel(const __grid_constant__ RuleParams p, const __grid_constant__ Tasks tasks,
                 const __grid_constant__ Observer observer) {
  if constexpr (!ptx::kHasWgmma) {
    ptx::trap();   // the launcher does not choose this kernel for other targets
  } else {
    extern __shared__ __align__(1024) char smem_bytes[];
    auto& smem = *reinterpret_cast<SharedMemory<kKeyDim>*>(smem_bytes);
    carry<io_t, out_t, false, true>(p, tasks, [&](uint32_t tile) { return work_of_tile<kKeyDim, false>(p, tile); }, smem,
                                    observer);
  }
}

}  // namespace gdn::cuda::chunk_sm90
