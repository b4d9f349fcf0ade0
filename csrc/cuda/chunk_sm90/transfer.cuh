// SPDX-License-Identifier: Apache-2.0
// The transfer group: all that goes between global and shared memory while the other two compute. Prepared chunks by bulk
// copies, V in, o out. Warp w owns columns 16 w .. 16 w + 15 of V and o, which for it are a tile of rows of 32 bytes.
// It is a group of its own because a fence to the tensor cores waits for all that its thread has under way, global stores too.
#pragma once

#include "../ptx/bulk.cuh"
#include "exchange.cuh"

namespace gdn::cuda::chunk_sm90 {

// V on its way in: a lane moves the 16 bytes of columns 8 (lane % 2) .. of tokens lane / 2 + 16 i.
struct Values {
  const uint16_t* gmem;   // token 0 of the sequence, the lane's half of the warp's columns
  int64_t token_stride;
  int lane;
  Words<16> x[4];

  // Loads the chunk from token `first` on of a sequence of `length`; missing tokens are zeros.
  __device__ __forceinline__ void load(int first, int length) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = first + 16 * i + lane / 2;
      x[i] = {};
      if (t < length) x[i] = *reinterpret_cast<const Words<16>*>(gmem + t * token_stride);
    }
  }

  // What was loaded -> shared memory, with the largest magnitude of each column.
  __device__ __forceinline__ void store(uint16_t* smem_v, uint16_t* smem_largest) const {
    Words<16> largest = {};   // magnitudes order as integers
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<Words<16>*>(reinterpret_cast<char*>(smem_v) + column_offset(16 * i + lane / 2, lane % 2)) = x[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) largest.word[j] = __vmaxu2(largest.word[j], x[i].word[j] & 0x7fff7fffu);
    }
#pragma unroll
    for (int distance = 2; distance < 32; distance *= 2) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        largest.word[j] = __vmaxu2(largest.word[j], __shfl_xor_sync(0xffffffffu, largest.word[j], distance));
      }
    }
    if (lane < 2) *reinterpret_cast<Words<16>*>(smem_largest + 8 * lane) = largest;
  }
};

// 16-bit o of a chunk from shared memory, in which tokens are rows of 32 bytes.
struct Rows {
  uint16_t* gmem;   // token 0 of the sequence, the lane's half of the warp's columns
  int64_t token_stride;
  int lane;
  Words<16> x[4];

  __device__ __forceinline__ void load(const uint16_t* smem_o) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = *reinterpret_cast<const Words<16>*>(reinterpret_cast<const char*>(smem_o) + column_offset(16 * i + lane / 2, lane % 2));
    }
  }
  // Tokens from `length` on are left out.
  __device__ __forceinline__ void store(int first, int length) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = first + 16 * i + lane / 2;
      if (t < length) *reinterpret_cast<Words<16>*>(gmem + t * token_stride) = x[i];
    }
  }
};

// V of `chunk` to the state group, when that has read the one two chunks before; the next one on its way.
template <int kKeyDim>
__device__ __forceinline__ void pass_values(int chunk, int length, int warp, Values& values, SharedMemory<kKeyDim>& smem) {
  const int half = chunk % 2;
  values.store(smem.v[half][warp], smem.largest_v[half] + 16 * warp);
  arrive(smem.v_ready[half], values.lane);
  values.load((chunk + 1) * kChunk, length);
}

// Brings the chunks of the workspace to the stages. By one thread.
template <int kKeyDim>
struct Copier {
  const Keys<kKeyDim>* keys;   // of the sequence's first chunk
  const Solved* solved;
  int64_t keys_stride, solved_stride;   // from chunk to chunk

  // The next chunk, to stage `slot`, which nobody reads any more.
  __device__ __forceinline__ void copy(int slot, SharedMemory<kKeyDim>& smem) {
    Stage<kKeyDim>& stage = smem.stage[slot];
    const uint32_t full = ptx::shared_address(&smem.full[slot]);
    ptx::mbarrier_arrive_expect_tx(full, sizeof(Keys<kKeyDim>) + sizeof(Solved));
    ptx::bulk_copy_to_shared(ptx::shared_address(&stage.keys), keys, sizeof(Keys<kKeyDim>), full);
    ptx::bulk_copy_to_shared(ptx::shared_address(&stage.solved), solved, sizeof(Solved), full);
    keys += keys_stride;
    solved += solved_stride;
  }
};

// The whole life of the transfer group.
template <class out_t, int kKeyDim>
__device__ __forceinline__ void run_transfer(int length, Values& values, Rows& rows, Copier<kKeyDim>& copier,
                                             SharedMemory<kKeyDim>& smem) {
  const int lane = values.lane, warp = __shfl_sync(0xffffffffu, threadIdx.x % kGroupThreads / 32, 0);
  const int num_chunks = (length + kChunk - 1) / kChunk;
  const bool copies = warp == 0 && lane == 0;
  if (copies) {
    for (int slot = 0; slot < min(num_chunks, kStages); ++slot) copier.copy(slot, smem);
  }
  __syncwarp();
  values.load(0, length);
  pass_values(0, length, warp, values, smem);
  if (num_chunks > 1) pass_values(1, length, warp, values, smem);
  int before = kStages - 1;   // the stage of the chunk before
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int parity = chunk % 2;
    wait_phase(smem.v_free[parity], chunk / 2 % 2);
    if (chunk + 2 < num_chunks) pass_values(chunk + 2, length, warp, values, smem);
    // The state group is past the chunk before, and so is the output group: its stage is free.
    if (copies && chunk > 0 && chunk - 1 + kStages < num_chunks) copier.copy(before, smem);
    __syncwarp();
    before = before + 1 < kStages ? before + 1 : 0;
    wait_phase(smem.o_ready, parity);
    if constexpr (sizeof(out_t) == 2) {
      rows.load(smem.o[warp]);
      arrive(smem.o_free, lane);
      rows.store(chunk * kChunk, length);
    } else {
      arrive(smem.o_free, lane);
    }
  }
}

}  // namespace gdn::cuda::chunk_sm90
