// SPDX-License-Identifier: Apache-2.0
// The output group: prepared chunks and V in, o out.
//     O = scale (decay_t (Q S) + P U)
// transposed as the state is: Q S is S^T q^T. S^T at the chunk's start and U^T come from the state group, a chunk's steps
// apart. Warp w owns columns 16 w .. 16 w + 15 of V and o, which for it are a tile of rows of 32 bytes.
#pragma once

#include "exchange.cuh"

namespace gdn::cuda::chunk_sm90 {

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

// O^T times the factors of its rows -> o. 16-bit o goes to the transfer group, through shared memory; fp32 o from the
// accumulators, whose rows are 32 bytes already, straight to where it belongs.
template <class out_t>
struct Writer {
  out_t* gmem;          // token 0 of the sequence, the warp's first column
  int64_t token_stride;
  int lane;

  // Tokens from `count` on are left out. smem: 2 KB of this warp.
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

// The whole life of the output group.
template <class out_t, int kKeyDim, class Observer>
__device__ __forceinline__ void run_output(int length, const Writer<out_t>& writer, SharedMemory<kKeyDim>& smem,
                                           const Observer& observer) {
  const int lane = writer.lane, warp = __shfl_sync(0xffffffffu, threadIdx.x % kGroupThreads / 32, 0);
  const int num_chunks = (length + kChunk - 1) / kChunk;
  Turn turn;
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int parity = chunk % 2, first = chunk * kChunk;
    const Stage<kKeyDim>& stage = smem.stage[turn.slot];
    float o[32];
    observer.start(chunk, 1);
    observer.phase(Phase::kStart);
    wait_phase(smem.full[turn.slot], turn.parity);
    wait_phase(smem.s_ready, parity);
    ptx::fence_proxy_async_shared();   // S^T was written by ordinary stores of the state group
    observer.phase(Phase::kReady);
    ptx::wgmma_fence();
    issue_query<kKeyDim>(smem.s, stage.keys.q, o);
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
    wait_phase(smem.o_free, parity ^ 1);
    writer.write(o, factor, smem.o[warp], first, min(length - first, kChunk));
    arrive(smem.o_ready, lane);   // and the stage is read
    turn = turn.next();
  }
}

}  // namespace gdn::cuda::chunk_sm90
