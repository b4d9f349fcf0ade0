// SPDX-License-Identifier: Apache-2.0
// A tile group: the chain over the chunks of a sequence, and o, of 64 columns of V.
//     X = V - decay_t (K S);  U = T'' X;  O = scale (decay_t (Q S) + M X);  S <- decay_end S + K^T U
// everything transposed, so that S^T [64 v, K] stays in the accumulators and every left operand comes from registers: K S is
// S^T k^T, and so on. Warp w owns rows (columns of S) 16 w .. 16 w + 15. What bounds it is its own instructions, a warp of it
// on each scheduler: what the transfer group or the preparation can do is done there.
#pragma once

#include "../ptx/arch.cuh"
#include "output.cuh"
#include "values.cuh"

namespace gdn::cuda::chunk_sm90 {

// Issues sums = S^T tile^T [64 v, 64 t] as one group.
template <int kKeyDim>
__device__ __forceinline__ void issue_read(const State<kKeyDim>& state, const fp16_t* tile, float (&sums)[32]) {
  const uint64_t b = k_major_descriptor(tile);
  ptx::wgmma_m64n64k16<false>(sums, state.operand[0], b);
#pragma unroll
  for (int s = 1; s < kKeyDim / 16; ++s) ptx::wgmma_m64n64k16<true>(sums, state.operand[s], b + k_major_step(s));
  ptx::wgmma_commit_group();
}

// Issues sums (+)= operand tile^T [64 v, 64 t] with T'' or M [64 t out][64 t in] as one group. Blocks of 16 tokens come out in
// the order of the rows of its panels.
template <bool kAccumulate, class Places>
__device__ __forceinline__ void issue_tokens(const uint32_t (&operand)[4][4], const SpreadSolved& solved, float (&sums)[32]) {
  const uint64_t b = panels_descriptor(solved);
  ptx::wgmma_m64n64k16<kAccumulate>(sums, operand[0], b + panel_step<Places>(0));
#pragma unroll
  for (int s = 1; s < 4; ++s) ptx::wgmma_m64n64k16<true>(sums, operand[s], b + panel_step<Places>(s));
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

// X^T = V^T - decay_t (S^T k^T), rounded to the operand of U.
__device__ __forceinline__ void subtract_prediction(const float2 (&decay)[8], const float (&v)[32], const float (&sums)[32],
                                                    uint32_t (&operand)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    operand[i / 4][i % 4] = round_pair_fp16(fmaf(-decay[i / 2].x, sums[2 * i], v[2 * i]),
                                            fmaf(-decay[i / 2].y, sums[2 * i + 1], v[2 * i + 1]));
  }
}

// U^T, its blocks of tokens in falling order, as the operand of the next product.
__device__ __forceinline__ void round_tokens(const float (&u)[32], uint32_t (&operand)[4][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) round_to_operand(u + 8 * (3 - step), operand[step]);
}

// x times the factors of its tokens.
__device__ __forceinline__ void scale_tokens(const float2 (&factors)[8], float (&x)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[2 * i] *= factors[i / 2].x;
    x[2 * i + 1] *= factors[i / 2].y;
  }
}

// x times the factors of its rows.
__device__ __forceinline__ void scale_rows(const float (&factor)[2], float (&x)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) x[i] *= factor[i / 2 % 2];
}

// V of a chunk, which is there, from shared memory; of_v as in read_values.
template <class io_t>
__device__ __forceinline__ void take_values(int chunk, int warp, int lane, Tile& tile, uint32_t (&v)[4][4], int (&of_v)[2]) {
  read_values<io_t>(tile.v[chunk % 2], warp, lane, v, of_v);
  arrive(tile.v_free[chunk % 2]);
}

// O^T of a chunk, at the scale of the rows of S, to the transfer group. That its place is free is known from V of the next
// chunk, which the transfer group brings later than it takes o of two chunks before; of the task's last chunk by asking.
template <class out_t, int kKeyDim>
__device__ __forceinline__ void give_output(int chunk, int length, bool is_known_free, float scale, const Writer<out_t>& writer,
                                            int parity, const State<kKeyDim>& state, Tile& tile, float (&o)[32]) {
  const float factor[2] = {scale * power_of_two(state.exponent[0]), scale * power_of_two(state.exponent[1])};
  scale_rows(factor, o);
  const int half = chunk % 2, first = chunk * kChunk;
  if (!is_known_free) wait_phase(tile.o_taken, parity);
  writer.write(o, tile.o[half], first, min(length - first, kChunk));
  arrive(tile.o_ready[half]);
}

// Chunks first .. end - 1 of a task, counted as in the block: its own first one is task.first_chunk, its tokens end at `length`
// from where that count begins. `state` holds S before and behind them, as in a call that starts or ends there. The observer
// is shown what a test wants to look at; NoObserver costs nothing. Conditions that always hold (end > 0) keep ptxas from moving
// what they guard behind the next wait.
template <class io_t, class out_t, int kKeyDim, class Observer>
__device__ __forceinline__ void run_tile(const Task& task, const Work& work, int first, int end, int length, float scale,
                                         const Writer<out_t>& writer, SharedMemory<kKeyDim>& smem, Tile& tile,
                                         State<kKeyDim>& state, const Observer& observer) {
  constexpr int kPanels = State<kKeyDim>::kPanels;
  const int lane = writer.lane, warp = writer.warp, start = __shfl_sync(0xffffffffu, first, 0);   // for uniform counters
  Turn turn = {start % kStages, start / kStages % 2};
  int of_v[2], arrivals = arrivals_of_thread(task), parity = task.parity;
  uint32_t stored_v[4][4], largest[2];
  wait_phase(tile.v_there, parity);   // not yet for the keys; behind a checkpoint the chunk has been waited for already
  take_values<io_t>(start, warp, lane, tile, stored_v, of_v);
  start_operand(of_v, state);
  wait_phase(smem.full[turn.slot], turn.parity);
  float chunk_decay = smem.stage[turn.slot].solved.first.gates.read[kChunk - 1];
#pragma unroll 1
  for (int chunk = start; chunk < end; ++chunk) {
    const bool is_last = chunk + 1 == end;
    const Stage<kKeyDim>& stage = smem.stage[turn.slot];
    observer.start(chunk, 0);
    observer.operands(work, chunk, warp, lane, stage);
    observer.phase(Phase::kStart);
    float sums[32], o[32];   // S^T k^T, then U^T; S^T q^T, then O^T
    uint32_t x[4][4], u[4][4];
    ptx::wgmma_fence();
    issue_read(state, stage.keys.k, sums);
    float2 read[8];   // e^sum k_scale
    {
      float v[32];
      if (end > 0) read_factors(stage.solved.first.gates.read, lane, read);
      scale_values<io_t>(stored_v, state, v);
      ptx::wgmma_wait_group<0>();   // S^T k^T
      hold(sums);
      observer.phase(Phase::kRead);
      observer.prediction(work, chunk, warp, lane, sums, state);
      subtract_prediction(read, v, sums, x);
      observer.difference(work, chunk, warp, lane, x, state);
    }
    ptx::wgmma_fence();
    issue_tokens<false, PlacesOfT>(x, stage.solved, sums);
    issue_read(state, stage.keys.q, o);
    if (end > 0) decay_state(chunk_decay, state);
    observer.phase(Phase::kX);
    ptx::wgmma_wait_group<1>();   // U^T
    hold(sums);
    observer.phase(Phase::kU);
    observer.write(work, chunk, warp, lane, sums, state);
    round_tokens(sums, u);
    ptx::wgmma_fence();
    issue_write(u, stage.keys.k, state);
    ptx::wgmma_wait_group<kPanels>();   // S^T q^T
    hold(o);
    hold(state.operand);
    scale_tokens(read, o);
    ptx::wgmma_fence();
    issue_tokens<true, PlacesOfM>(x, stage.solved, o);
    observer.phase(Phase::kUpdate);
    const int slot = turn.slot;
    turn = turn.next();
    const bool has_next = (chunk + 1) * kChunk < length;   // behind a checkpoint too
    if (has_next) wait_phase(smem.full[turn.slot], turn.parity);
    if (!is_last) {
      take_values<io_t>(chunk + 1, warp, lane, tile, stored_v, of_v);
      chunk_decay = smem.stage[turn.slot].solved.first.gates.read[kChunk - 1];
    }
    observer.phase(Phase::kTaken);
    largest[0] = largest[1] = 0;
    if constexpr (kPanels == 2) {   // the first panel is rounded while the second is under way
      ptx::wgmma_wait_group<2>();
      hold(state.s[0]);
      if (!is_last) round_panel(0, state, largest);
    }
    ptx::wgmma_wait_group<1>();   // S
    hold(state.s[kPanels - 1]);
    hold(u);
    ptx::wgmma_wait_group<0>();   // O^T
    hold(o);
    hold(x);
    arrive(smem.empty[slot], arrivals);
    give_output(chunk, length, has_next, scale, writer, parity, state, tile, o);
    observer.phase(Phase::kUpdated);
    finish_operand(of_v, state, largest);
  }
}

}  // namespace gdn::cuda::chunk_sm90
