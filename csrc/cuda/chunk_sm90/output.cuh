// SPDX-License-Identifier: Apache-2.0
// The output group.
//     O = scale (decay_t (Q S) + M X)
// transposed as the state is: Q S is S^T q^T. S^T at the chunk's start and X^T come from the state group together. Warp w owns
// columns 16 w .. 16 w + 15 of o.
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

// Issues sums = a tile^T, both [64][64] in shared memory, as one group.
__device__ __forceinline__ void issue_mix(const void* smem_a, const fp16_t* tile, float (&sums)[32]) {
  const uint64_t a = k_major_descriptor(static_cast<const fp16_t*>(smem_a)), b = k_major_descriptor(tile);
  ptx::wgmma_m64n64k16<false>(sums, a, b);
#pragma unroll
  for (int s = 1; s < 4; ++s) ptx::wgmma_m64n64k16<true>(sums, a + k_major_step(s), b + k_major_step(s));
  ptx::wgmma_commit_group();
}

// O^T = factor_v (decay_t S^T q^T + X^T M^T), in the place of S^T q^T.
__device__ __forceinline__ void mix(const float2 (&decay)[8], const float (&factor)[2], const float (&mixed)[32],
                                    float (&o)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    o[2 * i] = factor[i % 2] * fmaf(decay[i / 2].x, o[2 * i], mixed[2 * i]);
    o[2 * i + 1] = factor[i % 2] * fmaf(decay[i / 2].y, o[2 * i + 1], mixed[2 * i + 1]);
  }
}

// O^T of a chunk on its way out: 16-bit o to the transfer group, fp32 o straight to where it belongs.
template <class out_t>
struct Writer {
  out_t* gmem;          // token 0 of the sequence, the warp's first column
  int64_t token_stride;
  int warp, lane;

  // Tokens from `count` on are left out of fp32 o.
  __device__ __forceinline__ void write(const float (&o)[32], uint16_t* smem_o, int first, int count) const {
    if constexpr (sizeof(out_t) == 2) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = round_pair(o[8 * b + 2 * i], o[8 * b + 2 * i + 1], out_t{});
        ptx::stmatrix_x4_trans(transposed_block_address(ptx::shared_address(smem_o), b, warp, lane), pairs);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int t = sum_column(lane, i);
        if (t < count) gmem[static_cast<int64_t>(first + t) * token_stride + sum_row(lane, i)] = o[i];
      }
    }
  }
};

// The whole life of the output group.
template <class out_t, int kKeyDim, class Observer>
__device__ __forceinline__ void run_output(int length, const Writer<out_t>& writer, SharedMemory<kKeyDim>& smem,
                                           const Observer& observer) {
  const int lane = writer.lane, row = 16 * writer.warp + lane / 4;
  const int num_chunks = (length + kChunk - 1) / kChunk;
  Turn turn;
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int parity = chunk % 2, first = chunk * kChunk;
    const Stage<kKeyDim>& stage = smem.stage[turn.slot];
    float o[32], mixed[32];
    observer.start(chunk, 1);
    observer.phase(Phase::kStart);
    wait_phase(smem.full[turn.slot], turn.parity);
    wait_phase(smem.s_ready, parity);
    ptx::fence_proxy_async_shared();   // S^T and X^T were written by ordinary stores of the state group
    observer.phase(Phase::kReady);
    ptx::wgmma_fence();
    issue_query<kKeyDim>(smem.s, stage.keys.q, o);
    issue_mix(smem.x, stage.solved.m, mixed);
    const float factor[2] = {smem.out_factor[row], smem.out_factor[row + 8]};
    float2 decay[8];
    read_factors(stage.solved.gates.decay, lane, decay);
    ptx::wgmma_wait_group<0>();   // S^T q^T, X^T M^T
    hold(o);
    hold(mixed);
    arrive(smem.s_free);
    observer.phase(Phase::kOut);
    mix(decay, factor, mixed, o);
    wait_phase(smem.o_free, parity ^ 1);
    writer.write(o, smem.o, first, min(length - first, kChunk));
    arrive(smem.o_ready);   // and the stage is read
    observer.phase(Phase::kStored);
    turn = turn.next();
  }
}

}  // namespace gdn::cuda::chunk_sm90
