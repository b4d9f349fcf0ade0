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
// waits for the preparation, as late as it can: code that runs for the first time is slow. kEvictsFirst: its lines make room in
// the L2 first, which pays where the tiles of all value heads, its readers, keep together.
template <bool kEvictsFirst, int kKeyDim>
__device__ __forceinline__ void bring_chunk(const RuleParams& p, bool waits, ChunkToCopy<kKeyDim>& next,
                                            SharedMemory<kKeyDim>& smem) {
  const Turn turn = {next.slot, next.parity}, after = turn.next();
  const Keys<kKeyDim>* const keys = next.keys;
  const Solved* const solved = next.solved;
  next = {keys + p.dims.Hk, solved + p.dims.Hv, after.slot, after.parity};
  wait_phase(smem.empty[turn.slot], turn.parity ^ 1);
  Stage<kKeyDim>& stage = smem.stage[turn.slot];
  const uint32_t full = ptx::shared_address(&smem.full[turn.slot]);
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

// All chunks, by a warp that has nothing else to do; with `waits` the first one when the whole preparation is done. Before
// each of the first kStages chunks wait_for_stage(chunk) returns when nobody reads what lay in its stage.
template <bool kEvictsFirst, int kKeyDim, class WaitForStage>
__device__ __forceinline__ void run_copies(const RuleParams& p, int num_chunks, int lane, bool waits, Prepared& prepared,
                                           SharedMemory<kKeyDim>& smem, const WaitForStage& wait_for_stage) {
  ChunkToCopy<kKeyDim> next = smem.to_copy;
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    prepared.wait_for(chunk, lane);
    if (lane == 0) {
      if (chunk < kStages) wait_for_stage(chunk);
      bring_chunk<kEvictsFirst>(p, waits && chunk == 0, next, smem);
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

// The whole life of the two warps that move V and o of a tile. The thread with `copies` brings the chunks in between.
template <class out_t, int kKeyDim>
__device__ __forceinline__ void run_transfer(const RuleParams& p, int length, bool copies, const Moved& v, const Moved& out,
                                             Tile& tile, SharedMemory<kKeyDim>& smem) {
  const int num_chunks = (length + kChunk - 1) / kChunk;
#pragma unroll 1
  for (int chunk = 0; chunk < min(num_chunks, kStages); ++chunk) {   // V first, for which nobody has to wait
    bring_values(chunk, chunk, length, v, tile, smem);
    if (chunk == 0) ptx::cp_async_mbarrier_arrive(ptx::shared_address(&tile.v_there));
    if (copies) bring_chunk<false>(p, chunk == 0, smem.to_copy, smem);
    __syncwarp();
  }
  int slot = 0;   // the stage of the chunk
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    if (copies && chunk > 0 && chunk - 1 + kStages < num_chunks) bring_chunk<false>(p, false, smem.to_copy, smem);
    __syncwarp();
    take_output<out_t>(chunk, length, out, tile);
    if (chunk + 3 == num_chunks) arrive(tile.o_taken);
    // Behind o: who sees V of a chunk knows that o's place is free.
    bring_values(chunk + kStages, slot, length, v, tile, smem);
    slot = slot + 1 < kStages ? slot + 1 : 0;
  }
}

}  // namespace gdn::cuda::chunk_sm90
