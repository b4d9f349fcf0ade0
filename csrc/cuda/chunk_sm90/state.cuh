// SPDX-License-Identifier: Apache-2.0
// The state group: the chain over the chunks of a sequence.
//     X = V - decay_t (K S);  U = T' X;  S <- decay_end S + K^T diag(to_end_t) U
// with T' = T diag(beta), everything transposed so that S^T [64 v, K] stays in the accumulators and every left operand
// comes from registers: K S is S^T k^T, and so on. Warp w owns rows (columns of S) 16 w .. 16 w + 15. This group does nothing
// that is not on the way from S to the next S; what o needs of it, S^T and U^T as operands, goes to the output group
// through shared memory while the tensor cores work on the next product.
#pragma once

#include "../ptx/arch.cuh"
#include "exchange.cuh"
#include "range.cuh"

namespace gdn::cuda::chunk_sm90 {

// Exponents of the largest |v| of this thread's two rows.
template <class io_t>
__device__ __forceinline__ void value_exponents(const uint16_t* smem_largest, int warp, int lane, int (&e)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) e[r] = exponent_of(to_float(io_t{smem_largest[16 * warp + lane / 4 + 8 * r]}));
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

// X^T = V^T - decay_t (S^T k^T), rounded to the operand of U.
__device__ __forceinline__ void subtract_prediction(const float2 (&decay)[8], const float (&v)[32], const float (&sums)[32],
                                                    uint32_t (&operand)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    operand[i / 4][i % 4] = round_pair_fp16(fmaf(-decay[i / 2].x, sums[2 * i], v[2 * i]),
                                            fmaf(-decay[i / 2].y, sums[2 * i + 1], v[2 * i + 1]));
  }
}

// x times the factors of its tokens, rounded to the operand of the next product.
__device__ __forceinline__ void scale_to_operand(const float2 (&factors)[8], const float (&x)[32], uint32_t (&operand)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    operand[i / 4][i % 4] = round_pair_fp16(x[2 * i] * factors[i / 2].x, x[2 * i + 1] * factors[i / 2].y);
  }
}

// S^T and its scale -> the output group, when that has read those of the chunk before.
template <int kKeyDim>
__device__ __forceinline__ void hand_over_state(const State<kKeyDim>& state, float scale, int parity, int warp, int lane,
                                                SharedMemory<kKeyDim>& smem) {
  wait_phase(smem.s_free, parity ^ 1);
  if (lane % 4 == 0) {   // first: stores of matrices hold their address registers for long
    smem.out_factor[16 * warp + lane / 4] = scale * power_of_two(state.exponent[0]);
    smem.out_factor[16 * warp + lane / 4 + 8] = scale * power_of_two(state.exponent[1]);
  }
  write_operand(state.operand, smem.s, warp, lane);
  arrive(smem.s_ready, lane);   // the fence to the tensor cores is the reader's: it would hold this group up
}

// U^T -> the output group.
template <int kKeyDim>
__device__ __forceinline__ void hand_over_write(const float (&u)[32], int parity, int warp, int lane,
                                                SharedMemory<kKeyDim>& smem) {
  uint32_t operand[4][4];
#pragma unroll
  for (int step = 0; step < 4; ++step) round_to_operand(u + 8 * step, operand[step]);
  wait_phase(smem.u_free, parity ^ 1);
  write_operand(operand, smem.u, warp, lane);
  arrive(smem.u_ready, lane);
}

// The whole life of the state group; `state` holds S at the start and at the end. The observer is shown what a test wants to
// look at; NoObserver costs nothing.
template <class io_t, int kKeyDim, class Observer>
__device__ __forceinline__ void run_state(const Work& work, int num_chunks, float scale, SharedMemory<kKeyDim>& smem,
                                          State<kKeyDim>& state, const Observer& observer) {
  const int lane = ptx::opaque(static_cast<int>(threadIdx.x % 32));   // kept, not read anew
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % kGroupThreads / 32, 0);
  int of_v[2];
  Turn turn;
  wait_phase(smem.full[0], 0);
  wait_phase(smem.v_ready[0], 0);
  value_exponents<io_t>(smem.largest_v[0], warp, lane, of_v);
  uint32_t largest[2] = {0, 0};
#pragma unroll
  for (int panel = 0; panel < state.kPanels - 1; ++panel) round_panel(panel, state, largest);
  finish_operand(of_v, smem.stage[0].solved.gates.decay[kChunk - 1], state, largest);
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int parity = chunk % 2;
    const Stage<kKeyDim>& stage = smem.stage[turn.slot];
    const fp16_t* const smem_k = stage.keys.k;
    const Gates& gates = stage.solved.gates;
    observer.start(chunk, 0);
    observer.operands(work, chunk, warp, lane, stage);
    observer.phase(Phase::kStart);
    float sums[32], v[32];   // S^T k^T, then U^T; V^T
    ptx::wgmma_fence();
    issue_read(state, smem_k, sums);
    uint32_t stored_v[4][4], x[4][4], u_end[4][4];
    read_values(smem.v[parity][warp], lane, stored_v);
    arrive(smem.v_free[parity], lane);
    float2 decay[8], to_end[8];
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
    read_factors(gates.to_end, lane, to_end);   // before the stores, behind which they would wait
    hand_over_state(state, scale, parity, warp, lane, smem);
    ptx::wgmma_wait_group<0>();   // U^T
    hold(sums);
    hold(x);
    hold(state.operand);
    observer.phase(Phase::kU);
    observer.write(work, chunk, warp, lane, sums, state);
    scale_to_operand(to_end, sums, u_end);
    ptx::wgmma_fence();
    issue_write(u_end, smem_k, state);
    hand_over_write(sums, parity, warp, lane, smem);
    observer.phase(Phase::kReady);
    const bool is_last = chunk + 1 == num_chunks;
    turn = turn.next();
    if (!is_last) {
      wait_phase(smem.v_ready[parity ^ 1], (chunk + 1) / 2 % 2);
      wait_phase(smem.full[turn.slot], turn.parity);
    }
    value_exponents<io_t>(smem.largest_v[is_last ? parity : parity ^ 1], warp, lane, of_v);   // behind the last chunk for nothing
    const float next_decay = smem.stage[turn.slot].solved.gates.decay[kChunk - 1];
    observer.phase(Phase::kFree);
    largest[0] = largest[1] = 0;
    if constexpr (kKeyDim == 128) {   // the first panel is rounded while the second is under way
      ptx::wgmma_wait_group<1>();
      hold(state.s[0]);
      round_panel(0, state, largest);
    }
    ptx::wgmma_wait_group<0>();   // S
    hold(state.s[state.kPanels - 1]);
    hold(u_end);
    observer.phase(Phase::kUpdated);
    finish_operand(of_v, is_last ? 1.0f : next_decay, state, largest);   // S stays as it is behind the last chunk
  }
}

}  // namespace gdn::cuda::chunk_sm90
