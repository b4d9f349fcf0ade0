// SPDX-License-Identifier: Apache-2.0
// How a tile group of a later segment comes to the state that its segment starts from: step by step, from the start of the
// row's second segment, which the first pass (segments.cuh) has left,
//     S_(j+1) = A_j S_j + B_j
// with what that pass says of the segments between. Every tile does so for itself: no kernel between the passes, nothing
// exchanged, and the states of the steps never leave the registers. As in state.cuh everything is transposed: S^T is the left
// operand, A^T lies in shared memory, B^T comes to registers while the products run.
// Numbers A and S are each two bf16, high and low, together 16 bits of precision and the range of fp32; of their products three
//         are made, sums in fp32. By the digits dropped a step adds a relative error of about 2e-6, a chunk one of 1e-4.
// Who     A thread of the copying warp brings transitions, the tile group multiplies. What store_ and load_sums move is the
//         first pass's end of a chain.   Reads   transitions, starts.
#pragma once

#include "../ptx/pdl.cuh"
#include "places.cuh"
#include "range.cuh"
#include "transfer.cuh"

namespace gdn::cuda::chunk_sm90 {

// Halves of transitions, high and low in turns, go through the places of the stages' keys before the chunks do: half h of
// 2 steps to stage (steps + h) % 3, so that the last three lie in stages 0, 1, 2, in the order of the first chunks.
__device__ __forceinline__ Turn turn_of_half(int half, int steps) {
  return {(steps + half) % kStages, half / kStages % 2};   // half 2 steps would be in stage 0
}
static_assert(kStages == 3, "turn_of_half");

__device__ __forceinline__ int steps_of(const Segment& segment) { return static_cast<int>(segment.idx) - 1; }

// Two numbers as a pair of bf16 each, high + low.
__device__ __forceinline__ void split_pair(float x, float y, uint32_t& high, uint32_t& low) {
  high = round_pair(x, y, bf16_t{});
  float high_x, high_y;
  widen_pair<bf16_t>(high, high_x, high_y);
  low = round_pair(x - high_x, y - high_y, bf16_t{});
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
__device__ __forceinline__ void load_sums(const float* gmem, float4 (&x)[kKeyDim / 8]) {
  const float4* const mine = reinterpret_cast<const float4*>(gmem) + threadIdx.x % kGroupThreads;
#pragma unroll
  for (int i = 0; i < kKeyDim / 8; ++i) x[i] = mine[i * kGroupThreads];
}

// The end of a chain of A, of a warp: sixteen rows of A^T, from row `first` on, to the workspace as an image of shared memory.
// By way of `smem`, [16][kKeyDim] fp32 of the warp's: rolled, since code that runs once is slow, and in whole lines. Columns
// 8 c .. of row r lie there at place c ^ (r % 4), so that four rows hit different banks.
template <int kKeyDim>
__device__ __forceinline__ void store_transition(int first, int lane, const State<kKeyDim>& state, float* smem,
                                                 Transition<kKeyDim>& to) {
  float* const mine = smem + lane / 4 * kKeyDim + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < kKeyDim / 4; ++i) {   // row i % 2 of the lane's two
    const float* const x = &state.s[i / 16][2 * (i % 16)];
    *reinterpret_cast<float2*>(mine + i % 2 * 8 * kKeyDim + (i / 2 ^ lane / 4 % 4) * 8) = make_float2(x[0], x[1]);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < kKeyDim / 16; ++i) {   // four rows of a panel
    const int panel = i / 4, row = i % 4 * 4 + lane / 8, chunk = lane % 8;
    const float factor = power_of_two(__shfl_sync(0xffffffffu, i % 4 < 2 ? state.exponent[0] : state.exponent[1], row % 8 * 4));
    const float4* const x = reinterpret_cast<const float4*>(smem + row * kKeyDim + (8 * panel + (chunk ^ row % 4)) * 8);
    const float4 left = x[0], right = x[1];
    uint4 high, low;
    split_pair(left.x * factor, left.y * factor, high.x, low.x);
    split_pair(left.z * factor, left.w * factor, high.y, low.y);
    split_pair(right.x * factor, right.y * factor, high.z, low.z);
    split_pair(right.z * factor, right.w * factor, high.w, low.w);
    const uint32_t at = swizzled_offset<kKeyDim>(first + row, 8 * panel + chunk) / sizeof(uint16_t);
    *reinterpret_cast<uint4*>(&to.high[at]) = high;
    *reinterpret_cast<uint4*>(&to.low[at]) = low;
  }
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
    const auto& gmem_half = half % 2 == 0 ? transition->high : transition->low;
    wait_phase(smem.half_read[turn.slot], turn.parity ^ 1);
    const uint32_t there = ptx::shared_address(&smem.half_there[turn.slot]);
    ptx::mbarrier_arrive_expect_tx(there, sizeof(gmem_half));
    ptx::bulk_copy_to_shared(ptx::shared_address(&smem.stage[turn.slot].keys), gmem_half, sizeof(gmem_half), there);
    if (half % 2 == 1) transition += p.dims.Hv;
  }
}

// Until the stage of chunk 0, 1 or 2 is free of transitions.
template <int kKeyDim>
__device__ __forceinline__ void wait_for_transitions(int chunk, int steps, SharedMemory<kKeyDim>& smem) {
  const int last = 2 * steps - kStages + chunk;   // the half that was there
  if (last >= 0) wait_phase(smem.half_read[chunk], last / kStages % 2);
}

// Issues s (+)= operand half [64 v, K] as one group: half of A^T, rows of 128 bytes in panels, read along the rows.
template <bool kAccumulate, int kKeyDim>
__device__ __forceinline__ void issue_half(const uint32_t (&operand)[kKeyDim / 16][4], const void* smem_half,
                                           State<kKeyDim>& state) {
  constexpr uint64_t kStep = 16 * kPanelRowBytes / 16;
#pragma unroll
  for (int panel = 0; panel < state.kPanels; ++panel) {
    constexpr uint32_t kPanelBytes = kKeyDim * kPanelRowBytes;
    const uint64_t b = ptx::wgmma_descriptor_128b(ptx::shared_address(smem_half) + panel * kPanelBytes, kPanelBytes,
                                                  8 * kPanelRowBytes);
    ptx::wgmma_bf16_m64n64k16_trans<kAccumulate>(state.s[panel], operand[0], b);
#pragma unroll
    for (int step = 1; step < kKeyDim / 16; ++step) {
      ptx::wgmma_bf16_m64n64k16_trans<true>(state.s[panel], operand[step], b + step * kStep);
    }
  }
  ptx::wgmma_commit_group();
}

// A tile group: the segment's start, from that of the second one, which `state` holds, true values. Of a step S_high A_high and
// S_low A_high come first, then S_high A_low; a half's place is free when its products are done.
template <int kKeyDim>
__device__ __forceinline__ void step_to_start(const RuleParams& p, const Work& work, SharedMemory<kKeyDim>& smem,
                                              State<kKeyDim>& state) {
  const int steps = __shfl_sync(0xffffffffu, steps_of(work.segment), 0);   // for uniform counters
  const float* b = start_of<kKeyDim>(p, work.segment.row - steps + 1, work.head) + work.column * kKeyDim;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    uint32_t low[kKeyDim / 16][4];
#pragma unroll
    for (int i = 0; i < kKeyDim / 4; ++i) {
      const float* const x = &state.s[i / 16][2 * (i % 16)];
      split_pair(x[0], x[1], state.operand[i / 4][i % 4], low[i / 4][i % 4]);
    }
    const Turn of_high = turn_of_half(2 * step, steps), of_low = turn_of_half(2 * step + 1, steps);
    wait_phase(smem.half_there[of_high.slot], of_high.parity);
    ptx::wgmma_fence();
    issue_half<false>(state.operand, &smem.stage[of_high.slot].keys, state);
    float4 added[kKeyDim / 8];
    load_sums<kKeyDim>(b, added);
    b += p.dims.Hv * p.dims.V * kKeyDim;
    issue_half<true>(low, &smem.stage[of_high.slot].keys, state);
    wait_phase(smem.half_there[of_low.slot], of_low.parity);
    ptx::wgmma_fence();   // as ptxas would have it behind a wait
    issue_half<true>(state.operand, &smem.stage[of_low.slot].keys, state);
    ptx::wgmma_wait_group<1>();
    hold(low);
    arrive(smem.half_read[of_high.slot]);
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int panel = 0; panel < state.kPanels; ++panel) hold(state.s[panel]);
    hold(state.operand);
    arrive(smem.half_read[of_low.slot]);
#pragma unroll
    for (int i = 0; i < kKeyDim / 8; ++i) {
      float* const x = &state.s[i / 8][4 * (i % 8)];
      x[0] += added[i].x;
      x[1] += added[i].y;
      x[2] += added[i].z;
      x[3] += added[i].w;
    }
  }
}

}  // namespace gdn::cuda::chunk_sm90
