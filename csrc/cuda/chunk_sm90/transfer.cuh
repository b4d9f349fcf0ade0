// SPDX-License-Identifier: Apache-2.0
// The transfer group: prepared chunks in, by bulk copies, V in, by cp.async, and 16-bit o out, by ordinary stores. A group of
// its own because the instructions of a tile group are what bounds the kernel.
#pragma once

#include "../ptx/bulk.cuh"
#include "relay.cuh"
#include "tokens.cuh"

namespace gdn::cuda::chunk_sm90 {

using Moved = Tokens<kMovers>;   // of V or o, by the two warps of a tile

// Starts to bring the next chunk of the workspace to its stage, when nobody reads that any more. By one thread. With `waits` it
// waits for the preparation, as late as it can: code that runs for the first time is slow. It arrives for `absent` threads too,
// which would copy V of a tile that is not there. kEvictsFirst: its lines make room in the L2 first, which pays where the tiles
// of all value heads, its readers, keep together.
template <bool kEvictsFirst, int kKeyDim>
__device__ __forceinline__ void bring_chunk(const RuleParams& p, bool waits, int absent, ChunkToCopy<kKeyDim>& next,
                                            SharedMemory<kKeyDim>& smem) {
  const Turn turn = {next.slot, next.parity}, after = turn.next();
  const Keys<kKeyDim>* const keys = next.keys;
  const Solved* const solved = next.solved;
  next = {keys + p.dims.Hk, solved + p.dims.Hv, after.slot, after.parity};
  wait_phase(smem.empty[turn.slot], turn.parity ^ 1);
  Stage<kKeyDim>& stage = smem.stage[turn.slot];
  const uint32_t full = ptx::shared_address(&smem.full[turn.slot]);
  if (absent > 0) ptx::mbarrier_arrive(full, absent);
  ptx::mbarrier_arrive_expect_tx(full, sizeof(Keys<kKeyDim>) + sizeof(Solved));
  if (waits) ptx::griddepcontrol_wait();
  const auto copy_piece = [&](auto& smem_piece, const auto& gmem_piece) {
    ptx::bulk_copy_to_shared<kEvictsFirst>(ptx::shared_address(&smem_piece), &gmem_piece, sizeof(smem_piece), full);
  };
  copy_piece(stage.keys, *keys);
  copy_piece(stage.solved.first, solved->first);
  copy_piece(stage.solved.second, solved->second);
  copy_piece(stage.solved.third, solved->third);
}

// What is copied first of a task.
template <int kKeyDim>
__device__ __forceinline__ ChunkToCopy<kKeyDim> first_to_copy(const RuleParams& p, const Task& task) {
  const Work& work = task.work[0];
  const int64_t chunk_row = first_chunk_row(p, work.segment.n, task.span.first);
  return {keys_of<kKeyDim>(p, chunk_row, work.key_head), solved_of<kKeyDim>(p, chunk_row, work.head),
          task.first_chunk % kStages, task.first_chunk / kStages % 2};
}

// All chunks of a task of one tile, by a warp that has nothing else to do; with `waits` the first one when all is prepared.
// Before each of the first kStages chunks wait_for_stage(chunk) returns when nobody reads what lay in its stage.
template <bool kEvictsFirst, int kKeyDim, class WaitForStage>
__device__ __forceinline__ void run_copies(const RuleParams& p, const Task& task, int num_chunks, int lane, bool waits,
                                           int absent, Prepared& prepared, SharedMemory<kKeyDim>& smem,
                                           const WaitForStage& wait_for_stage) {
  ChunkToCopy<kKeyDim> next = first_to_copy<kKeyDim>(p, task);
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    prepared.wait_for(chunk, lane);
    if (lane == 0) {
      if (chunk < kStages) wait_for_stage(chunk);
      bring_chunk<kEvictsFirst>(p, waits && chunk == 0, absent, next, smem);
    }
  }
}

// Starts to copy V of `chunk`, if there is such a chunk, to where V of the one two before was.
template <int kKeyDim>
__device__ __forceinline__ void bring_values(int chunk, int slot, int length, const Moved& v, Tile& tile,
                                             SharedMemory<kKeyDim>& smem) {
  if (chunk * kChunk >= length) return;
  const int half = chunk % 2;
  wait_phase(tile.v_free[half], chunk / 2 % 2 ^ 1);
  v.copy_in(chunk * kChunk, length, tile.v[half]);
  ptx::cp_async_mbarrier_arrive(ptx::shared_address(&smem.full[slot]));
}

// o of `chunk` of a tile to where it belongs.
template <class out_t>
__device__ __forceinline__ void take_output(int chunk, int length, const Moved& out, Tile& tile) {
  const int half = chunk % 2;
  wait_phase(tile.o_ready[half], chunk / 2 % 2);
  if constexpr (sizeof(out_t) == 2) out.copy_out(chunk * kChunk, length, tile.o[half]);
}

// Turns `from` .. `to` - 1 of the two warps that move V and o of a tile: in turn c o of chunk c leaves, V of chunk c + kStages
// comes. A task's turns begin with task.first_chunk - kStages, for V of its first chunks comes before o of any; it has a chunk
// at least. The thread with `copies` brings the chunks in between, of a task of two tiles. Chunks are counted as in the block,
// `v`, `out` and `length` from where that count begins.
template <class out_t, int kKeyDim>
__device__ __forceinline__ void run_transfer(const RuleParams& p, const Task& task, int from, int to, int length, bool copies,
                                             const Moved& v, const Moved& out, Tile& tile, SharedMemory<kKeyDim>& smem) {
  const int first = task.first_chunk, end = (length + kChunk - 1) / kChunk;
  int slot = (from + kStages) % kStages;   // the stage of chunk c and of chunk c + kStages
#pragma unroll 1
  for (int chunk = from; chunk < to; ++chunk) {
    if (copies && chunk + kStages > first && chunk - 1 + kStages < end) {
      bring_chunk<false>(p, chunk - 1 + kStages == first, 0, smem.to_copy, smem);
    }
    __syncwarp();
    if (chunk >= first) take_output<out_t>(chunk, length, out, tile);
    if (chunk + 3 == end) arrive(tile.o_taken);   // two places: the last chunk's is that of the last but two
    // Behind o: who sees V of a chunk knows that o's place is free.
    bring_values(chunk + kStages, slot, length, v, tile, smem);
    if (chunk + kStages == first) ptx::cp_async_mbarrier_arrive(ptx::shared_address(&tile.v_there));
    slot = slot + 1 < kStages ? slot + 1 : 0;
  }
}

}  // namespace gdn::cuda::chunk_sm90
