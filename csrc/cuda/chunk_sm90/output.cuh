// SPDX-License-Identifier: Apache-2.0
// The output group: prepared chunks and V in, o out.
//     O = scale (decay_t (Q S) + P U)
// transposed as the state is: Q S is S^T q^T. S^T at the chunk's start and U^T come from the state group, a chunk's steps
// apart. Warp w owns columns 16 w .. 16 w + 15 of V and o, which for it are a tile of rows of 32 bytes.
#pragma once

#include "../ptx/bar.cuh"
#include "../ptx/bulk.cuh"
#include "exchange.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kOutputBarrier = 1;   // of the group's 128 threads

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

// Issues sums = a tile^T over kKeyDim columns, both in shared memory, as one group.
template <int kKeyDim>
__device__ __forceinline__ void issue_query(const fp16_t* smem_a, const fp16_t* tile, float (&sums)[32]) {
  const uint64_t a = k_major_descriptor(smem_a), b = k_major_descriptor(tile);
  ptx::wgmma_m64n64k16<false>(sums, a, b);
#pragma unroll
  for (int s = 1; s < kKeyDim / 16; ++s) {
    ptx::wgmma_m64n64k16<true>(sums, a + k_major_step(s), b + k_major_step(s));
  }
  ptx::wgmma_commit_group();
}

// Issues sums += a tile^T, both [64][64] in shared memory, as one group.
__device__ __forceinline__ void issue_mix(const void* smem_a, const fp16_t* tile, float (&sums)[32]) {
  const uint64_t a = k_major_descriptor(static_cast<const fp16_t*>(smem_a)), b = k_major_descriptor(tile);
#pragma unroll
  for (int s = 0; s < 4; ++s) ptx::wgmma_m64n64k16<true>(sums, a + k_major_step(s), b + k_major_step(s));
  ptx::wgmma_commit_group();
}

// o of a chunk on its way out: 16-bit o through shared memory, so that tokens become rows of 32 bytes; fp32 o from the
// accumulators, 32 bytes a row already.
template <class out_t>
struct Writer {
  out_t* gmem;          // token 0 of the sequence, the warp's first column
  int64_t token_stride;
  int lane;

  // Rows from `count` on are left out. smem: 2 KB of this warp.
  __device__ __forceinline__ void write(const float (&o)[32], const float (&factor)[2], uint16_t* smem, int first,
                                        int count) const {
    if constexpr (sizeof(out_t) == 2) {
      uint32_t pairs[4][4];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        pairs[i / 4][i % 4] = round_pair(o[2 * i] * factor[i % 2], o[2 * i + 1] * factor[i % 2], out_t{});
      }
#pragma unroll
      for (int b = 0; b < 4; ++b) ptx::stmatrix_x4_trans(column_block(smem, b, lane), pairs[b]);
      __syncwarp();
      Words<16> rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rows[i] = *reinterpret_cast<const Words<16>*>(reinterpret_cast<const char*>(smem) +
                                                      column_offset(16 * i + lane / 2, lane % 2));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = 16 * i + lane / 2;
        out_t* const to = gmem + static_cast<int64_t>(first + t) * token_stride + 8 * (lane % 2);
        if (t < count) *reinterpret_cast<Words<16>*>(to) = rows[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int t = sum_column(lane, i);
        if (t < count) {
          gmem[static_cast<int64_t>(first + t) * token_stride + sum_row(lane, i)] = o[i] * factor[i / 2 % 2];
        }
      }
    }
  }
};

// V of `chunk` to the state group, when that has read the one two chunks before; the next one on its way.
template <int kKeyDim>
__device__ __forceinline__ void pass_values(int chunk, int length, int warp, Values& values, SharedMemory<kKeyDim>& smem) {
  const int half = chunk % 2;
  wait_phase(smem.v_free[half], chunk / 2 % 2 ^ 1);
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

// The whole life of the output group.
template <class out_t, int kKeyDim, class Observer>
__device__ __forceinline__ void run_output(int length, const Writer<out_t>& writer, Values& values, Copier<kKeyDim>& copier,
                                           SharedMemory<kKeyDim>& smem, const Observer& observer) {
  const int lane = writer.lane, warp = __shfl_sync(0xffffffffu, threadIdx.x % kGroupThreads / 32, 0);
  const int num_chunks = (length + kChunk - 1) / kChunk;
  const bool copies = warp == 0 && lane == 0;
  if (copies) {
    for (int slot = 0; slot < min(num_chunks, kStages); ++slot) copier.copy(slot, smem);
  }
  __syncwarp();
  values.load(0, length);
  pass_values(0, length, warp, values, smem);
  if (num_chunks > 1) pass_values(1, length, warp, values, smem);
  Turn turn;
  int before = kStages - 1;   // the stage of the chunk before
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int parity = chunk % 2, first = chunk * kChunk;
    const Stage<kKeyDim>& stage = smem.stage[turn.slot];
    float o[32];
    observer.start(chunk, 1);
    observer.phase(Phase::kStart);
    wait_phase(smem.full[turn.slot], turn.parity);
    wait_phase(smem.s_ready, parity);
    // The state group is past the chunk before, and so is this one: its stage is free.
    if (copies && chunk > 0 && chunk - 1 + kStages < num_chunks) copier.copy(before, smem);
    __syncwarp();
    ptx::fence_proxy_async_shared();   // S^T was written by ordinary stores of the state group
    observer.phase(Phase::kReady);
    ptx::wgmma_fence();
    issue_query<kKeyDim>(smem.s, stage.keys.q, o);
    if (chunk + 2 < num_chunks) pass_values(chunk + 2, length, warp, values, smem);
    const float factor[2] = {smem.out_factor[16 * warp + lane / 4], smem.out_factor[16 * warp + lane / 4 + 8]};
    float2 decay[8];
    read_factors(stage.solved.gates.decay, lane, decay);
    ptx::wgmma_wait_group<0>();   // S^T q^T
    hold(o);
    arrive(smem.s_free, lane);
    observer.phase(Phase::kSq);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      o[2 * i] *= decay[i / 2].x;
      o[2 * i + 1] *= decay[i / 2].y;
    }
    wait_phase(smem.u_ready, parity);
    ptx::fence_proxy_async_shared();
    observer.phase(Phase::kWritten);
    ptx::wgmma_fence();
    issue_mix(smem.u, stage.solved.p, o);
    ptx::wgmma_wait_group<0>();   // O
    hold(o);
    arrive(smem.u_free, lane);
    observer.phase(Phase::kOut);
    writer.write(o, factor, smem.o[warp], first, min(length - first, kChunk));
    ptx::bar_sync(kOutputBarrier, kGroupThreads);   // the stage is read by all four warps
    before = turn.slot;
    turn = turn.next();
  }
}

}  // namespace gdn::cuda::chunk_sm90
