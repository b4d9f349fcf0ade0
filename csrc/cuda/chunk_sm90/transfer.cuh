// SPDX-License-Identifier: Apache-2.0
// The transfer group: all that goes between global and shared memory while the other two compute. Prepared chunks by bulk
// copies, V by cp.async, o by ordinary stores. It is a group of its own because a fence to the tensor cores waits for all
// that its thread has under way, stores to global memory too. Eight lanes move the 128 bytes of a token.
#pragma once

#include "../ptx/bulk.cuh"
#include "../ptx/cp_async.cuh"
#include "exchange.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kLanesOfToken = 8, kTokensAtOnce = kGroupThreads / kLanesOfToken;

// Tokens of 64 columns of V or o, 16 bytes a thread.
struct Tokens {
  uint16_t* gmem;   // token 0 of the sequence, the thread's columns of the block's first tile
  int64_t stride;   // from token to token
  int thread;       // of the group

  __device__ __forceinline__ int token(int i) const { return i * kTokensAtOnce + thread / kLanesOfToken; }
  __device__ __forceinline__ uint32_t smem_offset(int i) const {
    return swizzled_offset<kChunk>(token(i), thread % kLanesOfToken);
  }

  // The same columns of a later tile.
  __device__ __forceinline__ Tokens of_tile(int tile) const { return {gmem + tile * kValueTile, stride, thread}; }

  // Starts to copy tokens first .. first + 63 to a tile; those from `length` on are zeros.
  __device__ __forceinline__ void copy_in(int first, int length, uint16_t* smem_tile) const {
#pragma unroll
    for (int i = 0; i < kChunk / kTokensAtOnce; ++i) {
      const int t = first + token(i);
      ptx::cp_async_16(ptx::shared_address(smem_tile) + smem_offset(i), gmem + min(t, length - 1) * stride,
                       t < length ? 16 : 0);
    }
  }
  __device__ __forceinline__ void read(const uint16_t* smem_tile, Words<16> (&x)[kChunk / kTokensAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kChunk / kTokensAtOnce; ++i) {
      x[i] = *reinterpret_cast<const Words<16>*>(reinterpret_cast<const char*>(smem_tile) + smem_offset(i));
    }
  }
  // Tokens from `length` on are left out.
  __device__ __forceinline__ void write(int first, int length, const Words<16> (&x)[kChunk / kTokensAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kChunk / kTokensAtOnce; ++i) {
      const int t = first + token(i);
      if (t < length) *reinterpret_cast<Words<16>*>(gmem + t * stride) = x[i];
    }
  }
};

// Starts to copy V of `chunk`; the state group has read what was in its place.
__device__ __forceinline__ void bring_values(int chunk, int length, const Tokens& v, Tile& tile) {
  v.copy_in(chunk * kChunk, length, tile.v[chunk % 2]);
  ptx::cp_async_mbarrier_arrive(ptx::shared_address(&tile.v_ready[chunk % 2]));
}

// Brings the chunks of the workspace to the stages. By one thread.
template <int kKeyDim>
struct Copier {
  const Keys<kKeyDim>* keys;   // of the sequence's first chunk
  const Solved* solved;
  int64_t keys_stride, solved_stride;   // from chunk to chunk
#if defined(PREFETCH)
  int left = 0;
#endif

  // The next chunk, to stage `slot`, which nobody reads any more.
  template <int kTiles>
  __device__ __forceinline__ void copy(int slot, Feed<kKeyDim, kTiles>& smem) {
    Stage<kKeyDim>& stage = smem.stage[slot];
    const uint32_t full = ptx::shared_address(&smem.full[slot]);
    ptx::mbarrier_arrive_expect_tx(full, sizeof(Keys<kKeyDim>) + sizeof(Solved));
    ptx::bulk_copy_to_shared(ptx::shared_address(&stage.keys), keys, sizeof(Keys<kKeyDim>), full);
    ptx::bulk_copy_to_shared(ptx::shared_address(&stage.solved), solved, sizeof(Solved), full);
#if defined(SAMECHUNK)
    return;
#endif
    keys += keys_stride;
    solved += solved_stride;
#if defined(PREFETCH)
    if (left-- > kStages) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(keys), "r"(static_cast<int>(sizeof(Keys<kKeyDim>))));
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(solved), "r"(static_cast<int>(sizeof(Solved))));
    }
#endif
  }
};

// Behind `chunk` V of its next but two, where that of its next was.
template <int kKeyDim, int kTiles>
__device__ __forceinline__ void next_values(int chunk, int num_chunks, int length, int tiles, const Tokens& v,
                                            Feed<kKeyDim, kTiles>& smem) {
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    if (chunk + 1 < num_chunks) wait_phase(smem.tile[i].v_free[(chunk + 1) % 2], (chunk + 1) / 2 % 2);
    if (chunk + 3 < num_chunks) bring_values(chunk + 3, length, v.of_tile(i), smem.tile[i]);
  }
}

// o of `chunk` to where it belongs.
template <class out_t, int kKeyDim, int kTiles>
__device__ __forceinline__ void take_output(int chunk, int length, int tiles, const Tokens& out, Feed<kKeyDim, kTiles>& smem) {
  const int half = chunk % 2;
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    Tile& tile = smem.tile[i];
    wait_phase(tile.o_ready[half], chunk / 2 % 2);
    if constexpr (sizeof(out_t) == 2) {
      Words<16> x[kChunk / kTokensAtOnce];
      out.read(tile.o[half], x);
      arrive(tile.o_free[half]);
#if defined(NOSTORE)
      if (x[0].word[0] != 0x12345678) continue;
#endif
      out.of_tile(i).write(chunk * kChunk, length, x);
    } else {
      arrive(tile.o_free[half]);
    }
  }
}

// The whole life of the transfer group of a block that carries the first `tiles` of its memory's tiles.
template <class out_t, int kKeyDim, int kTiles, class Observer>
__device__ __forceinline__ void run_transfer(int length, int tiles, const Tokens& v, const Tokens& out,
                                             Copier<kKeyDim>& copier, Feed<kKeyDim, kTiles>& smem, const Observer& observer) {
  const int num_chunks = (length + kChunk - 1) / kChunk;
  const bool copies = v.thread == 0;
#if defined(PREFETCH)
  copier.left = num_chunks;
#endif
  if (copies) {
    for (int slot = 0; slot < min(num_chunks, kStages); ++slot) copier.copy(slot, smem);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    for (int chunk = 0; chunk < min(num_chunks, 2); ++chunk) bring_values(chunk, length, v.of_tile(i), smem.tile[i]);
  }
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    wait_phase(smem.tile[i].v_free[0], 0);
    if (num_chunks > 2) bring_values(2, length, v.of_tile(i), smem.tile[i]);
  }
  Turn before;   // the stage of the chunk before, and the parity of its phase
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    observer.start(chunk, 2);
    observer.phase(Phase::kStart);
    const auto copy_next = [&] {
      if (chunk == 0) return;
      if (copies && chunk - 1 + kStages < num_chunks) {
        if constexpr (kTiles > 1) wait_phase(smem.empty[before.slot], before.parity);
        copier.copy(before.slot, smem);
      }
      __syncwarp();
      before = before.next();
    };
    if constexpr (kTiles == 1) {
      next_values(chunk, num_chunks, length, tiles, v, smem);
      observer.phase(Phase::kRead);
      copy_next();   // the state group is in this chunk, the output group past the one before: that one's stage is free
      observer.phase(Phase::kX);
      take_output<out_t>(chunk, length, tiles, out, smem);
    } else {   // o before the next V: at a checkpoint that is not read before o's place is free
      copy_next();
      observer.phase(Phase::kRead);
      take_output<out_t>(chunk, length, tiles, out, smem);
      observer.phase(Phase::kX);
      next_values(chunk, num_chunks, length, tiles, v, smem);
    }
    observer.phase(Phase::kNext);
  }
}

}  // namespace gdn::cuda::chunk_sm90
