// SPDX-License-Identifier: Apache-2.0
// The state group: the chain over the chunks of a sequence.
//     X = V - decay_t (K S);  S <- decay_end S + K^T (T'' X)
// everything transposed so that S^T [64 v, K] stays in the accumulators and every left operand comes from registers: K S is
// S^T k^T, and so on. Warp w owns rows (columns of S) 16 w .. 16 w + 15. This group does nothing that is not on the way from S
// to the next S; what o needs of it, S^T and X^T as operands, goes to the output group through shared memory while the tensor
// cores work on the next product.
#pragma once

#include "../ptx/arch.cuh"
#include "exchange.cuh"
#include "range.cuh"

namespace gdn::cuda::chunk_sm90 {

// V^T as pairs of tokens in the order of operands; of_v: exponents of the largest |v| that this thread has of its two rows.
template <class io_t>
__device__ __forceinline__ void read_values(const uint16_t* smem_v, int warp, int lane, uint32_t (&v)[4][4], int (&of_v)[2]) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    ptx::ldmatrix_x4_trans(transposed_block_address(ptx::shared_address(smem_v), b, warp, lane), v[b]);
  }
  uint32_t largest[2] = {0, 0};   // magnitudes order as integers
#pragma unroll
  for (int i = 0; i < 16; ++i) largest[i % 2] = __vmaxu2(largest[i % 2], v[i / 4][i % 4] & 0x7fff7fffu);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    of_v[r] = exponent_of(to_float(io_t{static_cast<uint16_t>(max(largest[r] & 0xffffu, largest[r] >> 16))}));
  }
}

// Issues sums = S^T tile^T [64 v, 64 t] as one group.
template <int kKeyDim>
__device__ __forceinline__ void issue_read(const State<kKeyDim>& state, const fp16_t* tile, float (&sums)[32]) {
  const uint64_t b = k_major_descriptor(tile);
  ptx::wgmma_m64n64k16<false>(sums, state.operand[0], b);
#pragma unroll
  for (int s = 1; s < kKeyDim / 16; ++s) ptx::wgmma_m64n64k16<true>(sums, state.operand[s], b + k_major_step(s));
  ptx::wgmma_commit_group();
}

// Issues sums = operand tile^T [64 v, 64 t] with a tile [64 t out][64 t in] as one group.
__device__ __forceinline__ void issue_tokens(const uint32_t (&operand)[4][4], const fp16_t* tile, float (&sums)[32]) {
  const uint64_t b = k_major_descriptor(tile);
  ptx::wgmma_m64n64k16<false>(sums, operand[0], b);
#pragma unroll
  for (int s = 1; s < 4; ++s) ptx::wgmma_m64n64k16<true>(sums, operand[s], b + k_major_step(s));
  ptx::wgmma_commit_group();
}

// Issues s += operand k [64 v, K], a group for each panel of 64 columns: the same k tile, read along its rows.
template <int kKeyDim>
__device__ __forceinline__ void issue_write(const uint32_t (&operand)[4][4], const fp16_t* smem_k, State<kKeyDim>& state) {
  constexpr uint64_t kStep = 16 * kPanelRowBytes / 16;
#pragma unroll
  for (int panel = 0; panel < state.kPanels; ++panel) {
    const uint64_t b = ptx::wgmma_descriptor_128b(ptx::shared_address(smem_k) + panel * (kChunk * kPanelRowBytes),
                                                  kChunk * kPanelRowBytes, 8 * kPanelRowBytes);
#pragma unroll
    for (int step = 0; step < 4; ++step) ptx::wgmma_m64n64k16_trans<true>(state.s[panel], operand[step], b + step * kStep);
    ptx::wgmma_commit_group();
  }
}

// V^T at the chunk's scale.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void scale_values(const uint32_t (&v)[4][4], const State<kKeyDim>& state, float (&scaled)[32]) {
  const float factor[2] = {power_of_two(-state.exponent[0]), power_of_two(-state.exponent[1])};
#pragma unroll
  for (int i = 0; i < 16; ++i) {   // pairs of tokens
    float low, high;
    widen_pair<io_t>(v[i / 4][i % 4], low, high);
    scaled[2 * i] = low * factor[i % 2];
    scaled[2 * i + 1] = high * factor[i % 2];
  }
}

// X^T = V^T - decay_t (S^T k^T), rounded to the operand of T'' X.
__device__ __forceinline__ void subtract_prediction(const float2 (&decay)[8], const float (&v)[32], const float (&sums)[32],
                                                    uint32_t (&operand)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    operand[i / 4][i % 4] = round_pair_fp16(fmaf(-decay[i / 2].x, sums[2 * i], v[2 * i]),
                                            fmaf(-decay[i / 2].y, sums[2 * i + 1], v[2 * i + 1]));
  }
}

// Sums of 64 tokens, rounded to the operand of the next product.
__device__ __forceinline__ void round_tokens(const float (&x)[32], uint32_t (&operand)[4][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) round_to_operand(x + 8 * step, operand[step]);
}

// S^T and its scale to where the output group reads them.
template <int kKeyDim>
__device__ __forceinline__ void write_state(const State<kKeyDim>& state, float scale, int warp, int lane,
                                            SharedMemory<kKeyDim>& smem) {
  if (lane % 4 == 0) {   // first: stores of matrices hold their address registers for long
    smem.out_factor[16 * warp + lane / 4] = scale * power_of_two(state.exponent[0]);
    smem.out_factor[16 * warp + lane / 4 + 8] = scale * power_of_two(state.exponent[1]);
  }
  write_operand(state.operand, smem.s, warp, lane);
}

// V of a chunk from shared memory; of_v as in read_values.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void take_values(int chunk, int warp, int lane, SharedMemory<kKeyDim>& smem, uint32_t (&v)[4][4],
                                            int (&of_v)[2]) {
  wait_phase(smem.v_ready[chunk % 2], chunk / 2 % 2);
  read_values<io_t>(smem.v[chunk % 2], warp, lane, v, of_v);
  arrive(smem.v_free[chunk % 2]);
}

// Chunks first .. end - 1 of the segment; `state` holds S before and behind them, as in a call that starts or ends there. The
// observer is shown what a test wants to look at; NoObserver costs nothing. Whatever waits for shared memory stands behind the
// issue of a product: beside the products' own reads an access takes 150 clocks.
template <class io_t, int kKeyDim, class Observer>
__device__ __forceinline__ void run_state(const Work& work, int first, int end, float scale, SharedMemory<kKeyDim>& smem,
                                          State<kKeyDim>& state, const Observer& observer) {
  const int lane = ptx::opaque(static_cast<int>(threadIdx.x % 32));   // kept, not read anew
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % kGroupThreads / 32, 0);
  const int start = __shfl_sync(0xffffffffu, first, 0);   // so that the loop's counters are in uniform registers
  Turn turn = {start % kStages, start / kStages % 2};
  int of_v[2];
  uint32_t stored_v[4][4], largest[2] = {0, 0};
  wait_phase(smem.full[turn.slot], turn.parity);
  take_values<io_t>(start, warp, lane, smem, stored_v, of_v);
  start_operand(of_v, smem.stage[turn.slot].solved.gates.decay[kChunk - 1], state, largest);
#pragma unroll 1
  for (int chunk = start; chunk < end; ++chunk) {
    const bool is_last = chunk + 1 == end;
    const Stage<kKeyDim>& stage = smem.stage[turn.slot];
    const fp16_t* const smem_k = stage.keys.k;
    const Gates& gates = stage.solved.gates;
    observer.start(chunk, 0);
    observer.operands(work, chunk, warp, lane, stage);
    observer.phase(Phase::kStart);
    float sums[32], v[32];   // S^T k^T, then (T'' X)^T; V^T
    ptx::wgmma_fence();
    issue_read(state, smem_k, sums);
    wait_phase(smem.s_free, chunk % 2 ^ 1);   // here because no load moves up across its branch, between the products
    uint32_t x[4][4], written[4][4];
    float2 decay[8];
    read_factors(gates.decay, lane, decay);
    scale_values<io_t>(stored_v, state, v);
    hold(v);
    ptx::wgmma_wait_group<0>();   // S^T k^T
    hold(sums);
    observer.phase(Phase::kRead);
    observer.prediction(work, chunk, warp, lane, sums, state);
    subtract_prediction(decay, v, sums, x);
    observer.difference(work, chunk, warp, lane, x, state);
    ptx::wgmma_fence();
    issue_tokens(x, stage.solved.t, sums);
    observer.phase(Phase::kX);
    write_state(state, scale, warp, lane, smem);
    observer.phase(Phase::kNext);
    ptx::wgmma_wait_group<0>();   // (T'' X)^T
    hold(sums);
    hold(x);
    hold(state.operand);
    observer.phase(Phase::kU);
    observer.write(work, chunk, warp, lane, sums, state);
    round_tokens(sums, written);
    ptx::wgmma_fence();
    issue_write(written, smem_k, state);
    observer.phase(Phase::kUpdate);
    turn = turn.next();
    float next_decay = 1.0f;   // behind the last chunk S stays as it is
    if (!is_last) {
      take_values<io_t>(chunk + 1, warp, lane, smem, stored_v, of_v);
      wait_phase(smem.full[turn.slot], turn.parity);
      next_decay = smem.stage[turn.slot].solved.gates.decay[kChunk - 1];
    }
    write_operand(x, smem.x, warp, lane);
    arrive(smem.s_ready);   // the fence to the tensor cores is the reader's: it would hold this group up
    observer.phase(Phase::kHanded);
    largest[0] = largest[1] = 0;
    if constexpr (kKeyDim == 128) {   // the first panel is rounded while the second is under way
      ptx::wgmma_wait_group<1>();
      hold(state.s[0]);
      round_panel(0, state, largest);
    }
    ptx::wgmma_wait_group<0>();   // S
    hold(state.s[state.kPanels - 1]);
    hold(written);
    observer.phase(Phase::kUpdated);
    finish_operand(of_v, next_decay, state, largest);
  }
}

}  // namespace gdn::cuda::chunk_sm90
