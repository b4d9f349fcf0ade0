// SPDX-License-Identifier: Apache-2.0
// One group that does all of a tile: the chain of state.cuh and o.
//     X = V - decay_t (K S);  U = T' X;  O = scale (decay_t (Q S) + P U);  S <- decay_end S + K^T diag(to_end_t) U
// For blocks that carry two tiles of a head: each group computes while the tensor cores work for the other, so that o may
// lie on the way from S to the next S, and S and U never leave registers. Operations and bits are those of state.cuh and
// output.cuh.
#pragma once

#include "output.cuh"
#include "state.cuh"

namespace gdn::cuda::chunk_sm90 {

// Chunks first .. end - 1 of a sequence of `length` tokens; `state` holds S before and behind them.
template <class io_t, class out_t, int kKeyDim, int kTiles, class Observer>
__device__ __forceinline__ void run_tile(const Work& work, int first, int end, int length, float scale,
                                         const Writer<out_t>& writer, Feed<kKeyDim, kTiles>& smem, Tile& tile,
                                         State<kKeyDim>& state, const Observer& observer) {
  constexpr int kPanels = State<kKeyDim>::kPanels;
  const int lane = writer.lane, warp = writer.warp;
  const int start = __shfl_sync(0xffffffffu, first, 0);   // so that the loop's counters are in uniform registers
  Turn turn = {start % kStages, start / kStages % 2};
  const int never = ptx::opaque(0);
  int of_v[2];
  uint32_t stored_v[4][4], largest[2] = {0, 0};
  wait_phase(smem.full[turn.slot], turn.parity);
  take_values<io_t>(start, warp, lane, tile, stored_v, of_v);
  start_operand(of_v, smem.stage[turn.slot].solved.gates.decay[kChunk - 1], state, largest);
#pragma unroll 1
  for (int chunk = start; chunk < end; ++chunk) {
    const bool is_last = chunk + 1 == end;
    const Stage<kKeyDim>& stage = smem.stage[turn.slot];
    const fp16_t* const smem_k = stage.keys.k;
    const Gates& gates = stage.solved.gates;
    observer.start(chunk, 0);
    observer.phase(Phase::kStart);
    float sums[32], o[32];   // S^T k^T, then U^T, then U^T P^T; S^T q^T, then O^T
    uint32_t x[4][4], u_end[4][4];   // X^T, then U^T
    float2 factors[8];
    ptx::wgmma_fence();
    issue_read(state, smem_k, sums);
#if defined(Q_EARLY)
    issue_read(state, stage.keys.q, o);
#endif
    wait_phase(smem.full[turn.slot], turn.parity);   // it is; no load moves up across the branch, between the products
    read_factors(gates.decay, lane, factors);
    {
#if defined(Q_EARLY)
      float v[32];
#else
      float (&v)[32] = o;
#endif
#if !defined(LATE_V)
      scale_values<io_t>(stored_v, state, v);
#endif
#if !defined(FREE_V)
      hold(v);
#endif
#if defined(Q_EARLY)
      ptx::wgmma_wait_group<1>();   // S^T k^T
#else
      ptx::wgmma_wait_group<0>();   // S^T k^T
#endif
      hold(sums);
#if defined(LATE_V)
      hold(stored_v);
      scale_values<io_t>(stored_v, state, v);
#endif
      observer.phase(Phase::kRead);
      subtract_prediction(factors, v, sums, x);
    }
    ptx::wgmma_fence();
    issue_tokens(x, stage.solved.t, sums);
#if !defined(Q_EARLY)
    {
      const uint64_t b = k_major_descriptor(stage.keys.q);
      ptx::wgmma_m64n64k16(o, state.operand[0], b, never);
#pragma unroll
      for (int s = 1; s < kKeyDim / 16; ++s) ptx::wgmma_m64n64k16<true>(o, state.operand[s], b + k_major_step(s));
      ptx::wgmma_commit_group();
    }
#endif
    observer.phase(Phase::kX);
    read_factors(gates.to_end, lane, factors);
#if defined(Q_EARLY)
    ptx::wgmma_wait_group<0>();   // U^T
    hold(o);
    hold(state.operand);
#else
    ptx::wgmma_wait_group<1>();   // U^T
#endif
    hold(sums);
    hold(x);
    observer.phase(Phase::kU);
#pragma unroll
    for (int step = 0; step < 4; ++step) round_to_operand(sums + 8 * step, x[step]);
    scale_to_operand(factors, sums, u_end);
    ptx::wgmma_fence();
#if defined(UPDATE_FIRST)
    issue_write(u_end, smem_k, state);
    issue_tokens(x, stage.solved.p, sums);
#else
    issue_tokens(x, stage.solved.p, sums);
    issue_write(u_end, smem_k, state);
#endif
#if !defined(Q_EARLY)
    ptx::wgmma_wait_group<kPanels + 1>();   // S^T q^T
    hold(o);
    hold(state.operand);
#endif
    observer.phase(Phase::kUpdate);
    read_factors(gates.decay, lane, factors);
    const int slot = turn.slot;
    turn = turn.next();
    float next_decay = 1.0f;   // behind the last chunk S stays as it is
    if (!is_last) {
      take_values<io_t>(chunk + 1, warp, lane, tile, stored_v, of_v);
      wait_phase(smem.full[turn.slot], turn.parity);
      next_decay = smem.stage[turn.slot].solved.gates.decay[kChunk - 1];
    }
    observer.phase(Phase::kHanded);
    largest[0] = largest[1] = 0;
    const auto give_output = [&] {
      hold(sums);
      hold(x);
      const float factor[2] = {scale * power_of_two(state.exponent[0]), scale * power_of_two(state.exponent[1])};
      mix(factors, factor, sums, o);
      const int half = chunk % 2, first_token = chunk * kChunk;
      wait_phase(tile.o_free[half], chunk / 2 % 2 ^ 1);
      writer.write(o, tile.o[half], first_token, min(length - first_token, kChunk));
      arrive(tile.o_ready[half]);
    };
#if defined(UPDATE_FIRST)
    if constexpr (kPanels == 2) {   // the first panel is rounded while the second is under way
      ptx::wgmma_wait_group<2>();
      hold(state.s[0]);
      round_panel(0, state, largest);
    }
    ptx::wgmma_wait_group<0>();   // S
    hold(state.s[kPanels - 1]);
    hold(u_end);
    give_output();
#else
    ptx::wgmma_wait_group<kPanels>();   // U^T P^T
    give_output();
    if constexpr (kPanels == 2) {   // the first panel is rounded while the second is under way
      ptx::wgmma_wait_group<1>();
      hold(state.s[0]);
      round_panel(0, state, largest);
    }
    ptx::wgmma_wait_group<0>();   // S
    hold(state.s[kPanels - 1]);
    hold(u_end);
#endif
    arrive(smem.empty[slot]);
    observer.phase(Phase::kUpdated);
    finish_operand(of_v, next_decay, state, largest);
  }
}

}  // namespace gdn::cuda::chunk_sm90
