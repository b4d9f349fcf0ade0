// SPDX-License-Identifier: Apache-2.0
// What a block works on, one task after the other: task blockIdx.x of the grid's order, behind it the next one that nobody has
// taken, counted in a word that the preparation has set to zero. So a grid has at most as many blocks as multiprocessors: only
// the device knows how many tasks a ragged call has (Pairs), and a block without a task costs 2 to 3 us (H200), since it takes
// the whole shared memory of a multiprocessor.
// One warp of the transfer group, the finding one, looks for the next task when the last V of the one at hand is under way:
// late, so that rows of different lengths are shared out evenly, and early enough to be hidden. Chunks of the next task are
// brought while S of this one leaves. Which block takes a task decides how soon all is done and nothing else.
#pragma once

#include "../ptx/arch.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/global_sync.cuh"
#include "../ptx/pdl.cuh"
#include "exchange.cuh"
#include "padding.cuh"
#include "rows.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr uint32_t kNoTask = ~0u;

// Chunks of a task.
__device__ __forceinline__ int chunks_of(const Task& task) {
  return task.is_padding ? 0 : (static_cast<int>(task.span.length) + kChunk - 1) / kChunk;
}

// Where the chunks of the task behind `task` come in the count of the block, and its parity.
__device__ __forceinline__ void count_on(const Task& task, Task& next) {
  const int chunks = chunks_of(task);
  next.first_chunk = (task.first_chunk + chunks % kChunkCycle) % kChunkCycle;
  next.parity = task.parity ^ (chunks > 0 ? 1 : 0);
}

// The next task that nobody has taken. By one warp.
template <int kKeyDim>
__device__ __forceinline__ uint32_t take_task(const RuleParams& p, const Tasks& tasks, uint32_t pairs, int lane) {
  const uint32_t all = static_cast<uint32_t>(tasks.tiles) - pairs;
  if (tasks.tiles == 0 || gridDim.x >= all) return kNoTask;
  uint32_t taken = 0;
  if (lane == 0) {
    ptx::griddepcontrol_wait();   // the preparation has set the word to zero
    taken = ptx::atomic_add_relaxed_gpu(&queue_of<kKeyDim>(p)->taken, 1);
  }
  const uint32_t index = gridDim.x + __shfl_sync(0xffffffffu, taken, 0);
  return index < all ? index : kNoTask;
}

// How many of the first tasks are pairs. By one warp.
template <int kKeyDim>
__device__ __forceinline__ uint32_t count_pairs(const RuleParams& p, const Pairs& pairs) {
  const bool has_none = pairs.count > 0 && p.cu_seqlens.given() && longest_length<kKeyDim>(p) > pairs.longest;
  return has_none ? 0 : static_cast<uint32_t>(pairs.count);
}

// Whether there is something to do for a segment; if so, what is the same for all its tiles of a head, from one lane to `smem`,
// and the slot that it starts from, or -1. Here and not in the tile groups, which would wait for it.
__device__ __forceinline__ bool describe_task(const RuleParams& p, const Segment& segment, int64_t head, int lane,
                                              int64_t& start_slot, Task& smem) {
  const int64_t n = segment.n;
  if (n > p.dims.N) return false;
  const bool is_outside = n == p.dims.N;
  const Span row = is_outside ? Span{0, 0, 0} : sequence_span(p.cu_seqlens, n, p.dims.T);
  if (!takes_length(p, row.length)) return false;
  if (is_outside && p.cu_seqlens.at(0) <= 0 && p.cu_seqlens.at(n) >= p.dims.T) return false;
  const bool is_zeros = is_padding(p, n);
  const bool has_start = !is_zeros && p.initial_state.given() && p.has_initial_state.at(n);
  start_slot = has_start ? slot_to_read(p, n) : -1;
  const int64_t end_slot = is_zeros ? -1 : slot_to_write(p, n);
  if (lane == 0) {
    smem.span = segment_span(p, segment, row);
    smem.start = start_slot < 0 ? -1 : p.initial_state.offset(start_slot, head);
    smem.end = end_slot < 0 ? -1 : p.state.offset(end_slot, head);
    smem.is_padding = is_zeros;
  }
  return true;
}

// Asks for the state that a task starts from, which comes to the L2 while the task before is carried on: `first` is the first
// element of its tiles, or null. By one warp; only of rows or columns that lie in one piece each.
template <int kKeyDim>
__device__ __forceinline__ void prefetch_state(const View& view, const char* first, int tiles, int lane) {
  const int size = dtype_size(view.dtype), columns = tiles * kValueTile;
  const bool has_rows = view.stride[3] == 1;   // of V, for each of K
  if (first == nullptr || !(has_rows || view.stride[2] == 1)) return;
  const int pieces = has_rows ? kKeyDim : columns, lines = (has_rows ? columns : kKeyDim) * size / 128;
  const int64_t stride = view.stride[has_rows ? 2 : 3] * size;
#pragma unroll 1
  for (int piece = lane; piece < pieces; piece += 32) {
#pragma unroll 1
    for (int line = 0; line < lines; ++line) ptx::prefetch_l2(first + piece * stride + 128 * line);
  }
}

// Until task `idx` of the block is known.
template <int kKeyDim>
__device__ __forceinline__ const Task& wait_for_task(int idx, const SharedMemory<kKeyDim>& smem) {
  wait_phase(smem.task_there[idx % 2], idx / 2 % 2);
  return smem.task[idx % 2];
}

// A thread is done with it; `arrivals`: its own and those of threads that have ended. At a block's first task of one tile, who
// serves a second one arrives and ends: a thread that left without a word might still wait for that task when the next but one
// takes its place, and then for ever.
template <int kKeyDim>
__device__ __forceinline__ void leave_task(int idx, int arrivals, SharedMemory<kKeyDim>& smem) {
  arrive(smem.task_done[idx % 2], arrivals);
}

// Finds the task behind task `before` of the block, behind -1 the first one, and says so. By the finding warp. work_of(tile) is
// what to do with a tile of the grid's order. In the code once, the first search too: twice, calls of 2,048 tokens took 63.6 us
// for 58.8 (H200), since less of the kernel stayed in the instruction cache.
template <bool kWalks, int kKeyDim, class WorkOf>
__device__ __forceinline__ void find_task(const RuleParams& p, const Tasks& tasks, int before, const WorkOf& work_of,
                                          SharedMemory<kKeyDim>& smem) {
  // Made anew here, or what is made of them would be kept in registers from task to task.
  const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32, idx = ptx::opaque(before) + 1;
  Task& task = smem.task[idx % 2];
  bool is_first = idx == 0;
  uint32_t pairs = is_first ? count_pairs<kKeyDim>(p, tasks.pairs) : smem.pairs;
  if (idx >= 2) wait_phase(smem.task_done[idx % 2], (idx / 2 + 1) % 2);   // task idx - 2, whose place it takes
  int tiles = 0;
  const View& pool = p.initial_state;
  const char* state = nullptr;   // in registers: other lanes have written what is in `task`
#pragma unroll 1
  for (;; is_first = false) {
    const uint32_t index = is_first ? blockIdx.x : kWalks ? take_task<kKeyDim>(p, tasks, pairs, lane) : kNoTask;
    if (index == kNoTask) break;
    Work work = work_of(index + min(index, pairs) * (kMostTiles - 1));
    int64_t start_slot;
    if (!describe_task(p, work.segment, work.head, lane, start_slot, task)) continue;
    if (start_slot >= 0) {
      state = static_cast<const char*>(pool.data) +
              pool.offset(start_slot, work.head, 0, work.column) * dtype_size(pool.dtype);
    }
    work.column += lane * kValueTile;
    if (lane < kMostTiles) task.work[lane] = work;
    tiles = index < pairs ? kMostTiles : 1;
    break;
  }
  if (lane == 0) {
    const Task& last = idx == 0 ? smem.none : smem.task[(idx + 1) % 2];
    if (idx == 0) smem.pairs = pairs;
    count_on(last, task);
    task.tiles = tiles;
    task.is_left = last.tiles < kMostTiles;
  }
  arrive(smem.task_there[idx % 2]);
  if (kWalks && idx > 0) prefetch_state<kKeyDim>(pool, state, tiles, lane);
}

}  // namespace gdn::cuda::chunk_sm90
