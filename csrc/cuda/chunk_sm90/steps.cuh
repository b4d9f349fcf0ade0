// SPDX-License-Identifier: Apache-2.0
// How a tile group of a later segment comes to the state that its segment starts from: step by step, from the start of the
// row's second segment, which the first pass (segments.cuh) has left,
//     S_(j+1) = A_j S_j + B_j
// with what that pass says of the segments between. Every tile does so for itself: no kernel between the passes, nothing
// exchanged, and the states of the steps never leave the registers. As in state.cuh everything is transposed: S^T is the left
// operand, A^T lies in shared memory, B^T comes to registers while the products run.
// Numbers A and S are each two fp16, high and low, together 22 bits: rows of A^T and of S^T times powers of two that bring them
//         into fp16's range whatever their size. Factors of A^T's rows go to S^T's columns. Of the products three are made,
//         sums in fp32: a step adds a relative error of about 1e-7, a chunk one of 1e-4.
// Who     A thread of the copying warp brings transitions, the tile group multiplies. What store_ and load_sums move is the
//         first pass's end of a chain.   Reads   transitions, starts.
#pragma once

#include "../ptx/pdl.cuh"
#include "places.cuh"
#include "state.cuh"
#include "transfer.cuh"

namespace gdn::cuda::chunk_sm90 {

// Halves of transitions, low and high in turns, go through the places of the stages' keys before the chunks do: half h of
// 2 steps to stage (steps + h) % 3, so that the last three lie in stages 0, 1, 2, in the order of the first chunks.
__device__ __forceinline__ Turn turn_of_half(int half, int steps) {
  return {(steps + half) % kStages, half / kStages % 2};   // half 2 steps would be in stage 0
}
static_assert(kStages == 3, "turn_of_half");

__device__ __forceinline__ int steps_of(const Segment& segment) { return static_cast<int>(segment.idx) - 1; }

// What rounding two numbers to the pair `high` left of them.
__device__ __forceinline__ uint32_t round_rest(float x, float y, uint32_t high) {
  float high_x, high_y;
  widen_pair<fp16_t>(high, high_x, high_y);
  return round_pair_fp16(x - high_x, y - high_y);
}

// Two numbers as a pair of fp16 each, high + low.
__device__ __forceinline__ void split_pair(float x, float y, uint32_t& high, uint32_t& low) {
  high = round_pair_fp16(x, y);
  low = round_rest(x, y, high);
}

// The end of a chain of B, true values, to `gmem`: each thread's elements in pieces of 16 bytes, those of a group side by side,
// as they are read again. (Written as rows, every piece of 8 bytes would be in a line of another.)
template <int kKeyDim>
__device__ __forceinline__ void store_sums(const State<kKeyDim>& state, float* gmem) {
  const float factor[2] = {power_of_two(state.exponent[0]), power_of_two(state.exponent[1])};
  float4* const mine = reinterpret_cast<float4*>(gmem) + threadIdx.x % kGroupThreads;
#pragma unroll
  for (int i = 0; i < kKeyDim / 8; ++i) {
    const float* const x = &state.s[i / 8][4 * (i % 8)];
    mine[i * kGroupThreads] = make_float4(x[0] * factor[0], x[1] * factor[0], x[2] * factor[1], x[3] * factor[1]);
  }
}

template <int kKeyDim>
__device__ __forceinline__ void load_sums(const float* gmem, State<kKeyDim>& state) {
  const float4* const mine = reinterpret_cast<const float4*>(gmem) + threadIdx.x % kGroupThreads;
#pragma unroll
  for (int i = 0; i < kKeyDim / 8; ++i) {
    const float4 piece = mine[i * kGroupThreads];
    float* const x = &state.s[i / 8][4 * (i % 8)];
    x[0] = piece.x, x[1] = piece.y, x[2] = piece.z, x[3] = piece.w;
  }
}

// The end of a chain of A, of a warp: sixteen rows of A^T, from row `first` on, to the workspace as an image of shared memory,
// at the rows' exponents, where fp16 holds them (range.cuh); the factors are their powers of two. By way of `smem`,
// [16][kKeyDim] fp32 of the warp's: rolled, since code that runs once is slow, and in whole lines. Columns 8 c .. of row r lie
// there at place c ^ (r % 4), so that four rows hit different banks.
template <int kKeyDim>
__device__ __forceinline__ void store_transition(int first, int lane, const State<kKeyDim>& state, float* smem,
                                                 Transition<kKeyDim>& to) {
  float* const mine = smem + lane / 4 * kKeyDim + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < kKeyDim / 4; ++i) {   // row i % 2 of the lane's two
    const float* const x = &state.s[i / 16][2 * (i % 16)];
    *reinterpret_cast<float2*>(mine + i % 2 * 8 * kKeyDim + (i / 2 ^ lane / 4 % 4) * 8) = make_float2(x[0], x[1]);
  }
  if (lane % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) to.factor[factor_place(first + lane / 4 + 8 * r)] = power_of_two(state.exponent[r]);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < kKeyDim / 16; ++i) {   // four rows of a panel
    const int panel = i / 4, row = i % 4 * 4 + lane / 8, chunk = lane % 8;
    const float4* const x = reinterpret_cast<const float4*>(smem + row * kKeyDim + (8 * panel + (chunk ^ row % 4)) * 8);
    const float4 left = x[0], right = x[1];
    uint4 high, low;
    split_pair(left.x, left.y, high.x, low.x);
    split_pair(left.z, left.w, high.y, low.y);
    split_pair(right.x, right.y, high.z, low.z);
    split_pair(right.z, right.w, high.w, low.w);
    const uint32_t at = swizzled_offset<kKeyDim>(first + row, 8 * panel + chunk) / sizeof(uint16_t);
    *reinterpret_cast<uint4*>(&to.high[at]) = high;
    *reinterpret_cast<uint4*>(&to.low[at]) = low;
  }
}

// The place in a stage of a transition's factors, which come with its low half; no zeros of SpreadSolved lie there.
template <int kKeyDim>
__device__ __forceinline__ float* factors_in(Stage<kKeyDim>& stage) {
  static_assert(sizeof(Transition<kKeyDim>::factor) <= sizeof(stage.solved.first));
  return reinterpret_cast<float*>(&stage.solved.first);
}

// All transitions of the way to a segment's start. By one thread.
template <int kKeyDim>
__device__ __forceinline__ void bring_transitions(const RuleParams& p, const Work& work, SharedMemory<kKeyDim>& smem) {
  ptx::griddepcontrol_wait();   // for the first pass
  const int steps = steps_of(work.segment);
  const Transition<kKeyDim>* transition = transition_of<kKeyDim>(p, work.segment.row - steps, work.head);
#pragma unroll 1
  for (int half = 0; half < 2 * steps; ++half) {
    const Turn turn = turn_of_half(half, steps);
    const bool is_low = half % 2 == 0;
    const auto& gmem_half = is_low ? transition->low : transition->high;
    const auto& gmem_factor = transition->factor;
    Stage<kKeyDim>& stage = smem.stage[turn.slot];
    wait_phase(smem.half_read[turn.slot], turn.parity ^ 1);
    const uint32_t there = ptx::shared_address(&smem.half_there[turn.slot]);
    ptx::mbarrier_arrive_expect_tx(there, sizeof(gmem_half) + (is_low ? sizeof(gmem_factor) : 0));
    ptx::bulk_copy_to_shared(ptx::shared_address(&stage.keys), gmem_half, sizeof(gmem_half), there);
    if (is_low) {
      ptx::bulk_copy_to_shared(ptx::shared_address(factors_in(stage)), gmem_factor, sizeof(gmem_factor), there);
    } else {
      transition += p.dims.Hv;
    }
  }
}

// Until the stage of chunk 0, 1 or 2 is free of transitions.
template <int kKeyDim>
__device__ __forceinline__ void wait_for_transitions(int chunk, int steps, SharedMemory<kKeyDim>& smem) {
  const int last = 2 * steps - kStages + chunk;   // the half that was there
  if (last >= 0) wait_phase(smem.half_read[chunk], last / kStages % 2);
}

// Takes S^T, true values, to the scales of a step: its columns times the factors of A^T's rows, its rows at exponents that put
// the sum of a row's magnitudes in [2^14, 2^15). So nothing is beyond fp16, and the largest element is 2^7 at least, far above
// 2^-25, the least that low can lose. (A maximum would do no better and takes twice the issue slots.) Inf and NaN pass through.
template <int kKeyDim>
__device__ __forceinline__ void scale_to_step(const float* smem_factors, int lane, State<kKeyDim>& state) {
  float sum[4] = {};   // of rows 0, 0, 1, 1: an addition waits for the one before
#pragma unroll
  for (int panel = 0; panel < state.kPanels; ++panel) {
    float2 factor[8];
    read_factors(smem_factors + 64 * panel, lane, factor);
    scale_tokens(factor, state.s[panel]);
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i % 4] += fabsf(state.s[panel][i]);
  }
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float x = sum[2 * r] + sum[2 * r + 1];
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    state.exponent[r] = max(exponent_of(x) - 14, -126);   // 2^126 and 2^-126 are both normal numbers
    factor[r] = power_of_two(-state.exponent[r]);
  }
#pragma unroll
  for (int panel = 0; panel < state.kPanels; ++panel) scale_rows(factor, state.s[panel]);
}

// Issues sums (+)= operand half [64 v, K], a group for each panel of 64 columns: half of A^T, rows of 128 bytes in panels, read
// along the rows.
template <bool kAccumulate, int kKeyDim>
__device__ __forceinline__ void issue_half(const uint32_t (&operand)[kKeyDim / 16][4], const void* smem_half,
                                           float (&sums)[kKeyDim / 64][32]) {
  constexpr uint64_t kStep = 16 * kPanelRowBytes / 16;
#pragma unroll
  for (int panel = 0; panel < kKeyDim / 64; ++panel) {
    constexpr uint32_t kPanelBytes = kKeyDim * kPanelRowBytes;
    const uint64_t b = ptx::wgmma_descriptor_128b(ptx::shared_address(smem_half) + panel * kPanelBytes, kPanelBytes,
                                                  8 * kPanelRowBytes);
    ptx::wgmma_m64n64k16_trans<kAccumulate>(sums[panel], operand[0], b);
#pragma unroll
    for (int step = 1; step < kKeyDim / 16; ++step) {
      ptx::wgmma_m64n64k16_trans<true>(sums[panel], operand[step], b + step * kStep);
    }
    ptx::wgmma_commit_group();
  }
}

// A tile group: the segment's start, from that of the second one, which `state` holds, true values. Of a step S_high A_low
// comes first, and S_low is made beside it; then S_low A_high, and S_high A_high last: what is small is added up while the sums
// are small, for the tensor cores cut off their last digits. A half's place is free when its products are done. `always` holds,
// as in run_tile: what it guards stays beside the products.
template <int kKeyDim>
__device__ __forceinline__ void step_to_start(const RuleParams& p, const Work& work, SharedMemory<kKeyDim>& smem,
                                              State<kKeyDim>& state) {
  constexpr int kPanels = State<kKeyDim>::kPanels;
  const int lane = threadIdx.x % 32;
  const int steps = __shfl_sync(0xffffffffu, steps_of(work.segment), 0);   // for uniform counters
  const bool always = ptx::opaque(steps) >= 0;
  const float* b = start_of<kKeyDim>(p, work.segment.row - steps + 1, work.head) + work.column * kKeyDim;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const Turn of_low = turn_of_half(2 * step, steps), of_high = turn_of_half(2 * step + 1, steps);
    wait_phase(smem.half_there[of_low.slot], of_low.parity);
    scale_to_step(factors_in(smem.stage[of_low.slot]), lane, state);
    float sums[kPanels][32];
    uint32_t low[kKeyDim / 16][4];
#pragma unroll
    for (int i = 0; i < kKeyDim / 4; ++i) {
      const float* const x = &state.s[i / 16][2 * (i % 16)];
      state.operand[i / 4][i % 4] = round_pair_fp16(x[0], x[1]);
    }
    ptx::wgmma_fence();
    issue_half<false, kKeyDim>(state.operand, &smem.stage[of_low.slot].keys, sums);
    if (always) {
#pragma unroll
      for (int i = 0; i < kKeyDim / 4; ++i) {
        const float* const x = &state.s[i / 16][2 * (i % 16)];
        low[i / 4][i % 4] = round_rest(x[0], x[1], state.operand[i / 4][i % 4]);
      }
    }
    load_sums(b, state);
    b += p.dims.Hv * p.dims.V * kKeyDim;
    wait_phase(smem.half_there[of_high.slot], of_high.parity);
    ptx::wgmma_fence();   // as ptxas would have it behind a wait
    issue_half<true, kKeyDim>(low, &smem.stage[of_high.slot].keys, sums);
    ptx::wgmma_wait_group<kPanels>();   // S_high A_low: the next step's high half will lie in its place
    arrive(smem.half_read[of_low.slot]);
    ptx::wgmma_fence();
    issue_half<true, kKeyDim>(state.operand, &smem.stage[of_high.slot].keys, sums);
    const float factor[2] = {power_of_two(state.exponent[0]), power_of_two(state.exponent[1])};
    const auto add = [&](int panel) {
#pragma unroll
      for (int i = 0; i < 32; ++i) state.s[panel][i] = fmaf(sums[panel][i], factor[i / 2 % 2], state.s[panel][i]);
    };
    if constexpr (kPanels == 2) {   // the first panel is done while the second is under way
      ptx::wgmma_wait_group<1>();
      hold(sums[0]);
      if (always) add(0);
    }
    ptx::wgmma_wait_group<0>();
    hold(sums[kPanels - 1]);
    hold(state.operand);
    hold(low);
    arrive(smem.half_read[of_high.slot]);
    add(kPanels - 1);
    state.exponent[0] = state.exponent[1] = 0;
  }
}

}  // namespace gdn::cuda::chunk_sm90
