// SPDX-License-Identifier: Apache-2.0
//
// Between the passes of the two-level scan: the state at the start of each segment, from segment to segment,
//     S_(j+1) = A_j S_j + B_j
// in fp32 (fma, sums in a fixed order). starts[j + 1] holds B_j before and S_(j+1) afterwards; starts[1] is right already.
// Grid    x: sequence (slowest), value head, 8 columns of V for each group of a block (fastest).
// Block   1, 2 or 4 groups of four warps. Warp w of a group makes a quarter of the rows of A S, for all the group's columns;
//         its lanes split the columns of A, and add up what they have by shuffles. A comes by bulk copies, some steps ahead:
//         what a step waits for is arithmetic, and that is a quarter of A for each scheduler, times 8 columns of S.
// Reads   transitions, starts once for each block.   Writes   starts.
#pragma once

#include "../ptx/bulk.cuh"
#include "../tile/pipeline.cuh"
#include "places.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kCombineColumns = 8, kCombineWarps = 4, kCombineThreads = 32 * kCombineWarps;   // of a group
constexpr int kMostCombineGroups = 16 / kCombineWarps;
constexpr int kKeptColumns = kCombineColumns / kCombineWarps;   // of a lane

// Neighbouring rows of S or A, those of a lane.
template <int kKeyDim>
struct alignas(kKeyDim / 8) LaneRows {
  float x[kKeyDim / 32];
};

template <int kKeyDim>
struct CombineGroup {
  float s[2][kCombineColumns][kKeyDim];   // S^T of a step and of the next
};

template <int kKeyDim>
struct Transition {
  float a[kKeyDim][kKeyDim];   // A^T
};

// What a block has in shared memory: transitions, as many as fit, then its groups, then a barrier for each transition.
GDN_INLINE constexpr int combine_stages(int groups) { return groups == 1 ? 3 : 2; }
template <int kKeyDim>
constexpr size_t combine_bytes(int groups) {
  return combine_stages(groups) * sizeof(Transition<kKeyDim>) + groups * sizeof(CombineGroup<kKeyDim>) + 3 * sizeof(uint64_t);
}
static_assert(combine_bytes<128>(1) <= 227 * 1024 && combine_bytes<128>(kMostCombineGroups) <= 227 * 1024,
              "shared memory of a block");

// Where a lane works. A warp has its share of the rows of A and all columns of S; a lane kKeyDim / 32 neighbouring ones of
// these rows, and of each 4 kCombineWarps columns of A four, those of its part. Register c of its sums is column c ^ flip of S,
// so that what it gives away of them is at the same registers in every lane.
template <int kKeyDim>
struct CombineLane {
  static constexpr int kRows = kKeyDim / 32, kLanes = 32 / kCombineWarps;   // kLanes: of a part

  int row, part, flip;

  __device__ __forceinline__ CombineLane(int warp, int lane)
      : row((warp * kLanes + lane % kLanes) * kRows),
        part(lane / kLanes),
        flip(4 * (part % 2) + 2 * (part / 2 % 2) + part / 4) {}

  // A S, of which the lane keeps columns flip .. flip + kKeptColumns - 1.
  __device__ __forceinline__ void multiply(const Transition<kKeyDim>& transition,
                                           const float (&smem_s)[kCombineColumns][kKeyDim],
                                           LaneRows<kKeyDim> (&product)[kKeptColumns]) const {
    const float* const a_row = &transition.a[4 * part][row];
    const float* s_columns[kCombineWarps];
#pragma unroll
    for (int i = 0; i < kCombineWarps; ++i) s_columns[i] = &smem_s[(kKeptColumns * i) ^ flip][4 * part];
    float sums[kCombineColumns][kRows] = {};
#pragma unroll
    for (int k = 0; k < kKeyDim; k += 4 * kCombineWarps) {
      LaneRows<kKeyDim> a[4];
      float4 s[kCombineColumns];
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = *reinterpret_cast<const LaneRows<kKeyDim>*>(a_row + (k + j) * kKeyDim);
#pragma unroll
      for (int c = 0; c < kCombineColumns; ++c) {
        s[c] = *reinterpret_cast<const float4*>(s_columns[c / kKeptColumns] + c % kKeptColumns * kKeyDim + k);
      }
#pragma unroll
      for (int c = 0; c < kCombineColumns; ++c) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float of_two = fmaf(a[1].x[i], s[c].y, fmaf(a[0].x[i], s[c].x, sums[c][i]));
          sums[c][i] = fmaf(a[3].x[i], s[c].w, fmaf(a[2].x[i], s[c].z, of_two));
        }
      }
    }
#pragma unroll
    for (int half = kCombineColumns / 2, lanes = kLanes; half >= kKeptColumns; half /= 2, lanes *= 2) {
#pragma unroll
      for (int c = 0; c < half; ++c) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) sums[c][i] += __shfl_xor_sync(0xffffffffu, sums[half + c][i], lanes);
      }
    }
#pragma unroll
    for (int c = 0; c < kKeptColumns; ++c) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) product[c].x[i] = sums[c][i];
    }
  }
};

// The steps of a group's columns, from `column` on, of a row of `count` segments. All groups of a block go through the same.
template <int kKeyDim>
__device__ __forceinline__ void combine(const RuleParams& p, int64_t first_row, int count, int64_t head, int64_t column,
                                        int stages, Transition<kKeyDim>* smem_transitions, CombineGroup<kKeyDim>& group,
                                        uint64_t* full) {
  using Rows = LaneRows<kKeyDim>;
  const CombineLane<kKeyDim> lane(threadIdx.x / 32 % kCombineWarps, threadIdx.x % 32);
  // Pointers walk from step to step: where a segment row lies takes a hundred instructions.
  const int64_t next_transition = p.dims.Hv * kKeyDim * kKeyDim, next_start = p.dims.Hv * p.dims.V * kKeyDim;
  const float* transition = transition_of<kKeyDim>(p, first_row + 1, head);   // the next one to bring
  float* start = start_of<kKeyDim>(p, first_row + 1, head) + (column + lane.flip) * kKeyDim + lane.row;
  auto own = [&](int c) -> Rows& { return *reinterpret_cast<Rows*>(start + c * kKeyDim); };   // of the lane's columns
  auto bring = [&](int stage) {
    const uint32_t barrier = ptx::shared_address(&full[stage]);
    ptx::mbarrier_arrive_expect_tx(barrier, sizeof(Transition<kKeyDim>));
    ptx::bulk_copy_to_shared(ptx::shared_address(&smem_transitions[stage]), transition, sizeof(Transition<kKeyDim>), barrier);
    transition += next_transition;
  };
  const int steps = count - 2;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < min(stages, steps); ++stage) bring(stage);
  }
  int stage = 0, parity = 0, place = 0, before = 0;   // before: the stage of the step before
  Rows s[kKeptColumns];   // of S_j, then of B_j and S_(j+1)
#pragma unroll
  for (int c = 0; c < kKeptColumns; ++c) s[c] = own(c);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int c = 0; c < kKeptColumns; ++c) *reinterpret_cast<Rows*>(&group.s[place][lane.flip + c][lane.row]) = s[c];
    start += next_start;
#pragma unroll
    for (int c = 0; c < kKeptColumns; ++c) s[c] = own(c);
    __syncthreads();   // S is whole, and the step before has read its stage
    if (threadIdx.x == 0 && step > 0 && step - 1 + stages < steps) bring(before);
    wait_phase(full[stage], parity);
    Rows product[kKeptColumns];
    lane.multiply(smem_transitions[stage], group.s[place], product);
#pragma unroll
    for (int c = 0; c < kKeptColumns; ++c) {
#pragma unroll
      for (int i = 0; i < lane.kRows; ++i) s[c].x[i] += product[c].x[i];
      own(c) = s[c];
    }
    before = stage;
    stage = stage + 1 < stages ? stage + 1 : 0;
    parity ^= stage == 0;
    place ^= 1;
  }
}

template <int kKeyDim>
__global__ void __launch_bounds__(kMostCombineGroups* kCombineThreads) combine_kernel(const __grid_constant__ RuleParams p) {
  extern __shared__ __align__(1024) char smem_bytes[];
  const int groups = blockDim.x / kCombineThreads, stages = combine_stages(groups);
  Transition<kKeyDim>* const transitions = reinterpret_cast<Transition<kKeyDim>*>(smem_bytes);
  CombineGroup<kKeyDim>* const of_groups = reinterpret_cast<CombineGroup<kKeyDim>*>(transitions + stages);
  uint64_t* const full = reinterpret_cast<uint64_t*>(of_groups + groups);
  const uint32_t columns = static_cast<uint32_t>(kCombineColumns * groups), tiles = static_cast<uint32_t>(p.dims.V) / columns;
  const uint32_t heads = static_cast<uint32_t>(p.dims.Hv), rest = blockIdx.x / tiles, group = threadIdx.x / kCombineThreads;
  const int64_t column = static_cast<int64_t>(blockIdx.x - rest * tiles) * columns + group * kCombineColumns;
  const int64_t n = rest / heads, head = rest % heads;
  const Span span = sequence_span(p.cu_seqlens, n, p.dims.T);
  const int64_t count = takes_row(p, n) ? segments_of_length(p, span.length) : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) ptx::mbarrier_init(ptx::shared_address(&full[i]), 1);
    ptx::fence_mbarrier_init();
  }
  if (count < 3 && blockIdx.x > 0) return;
  ptx::griddepcontrol_wait();   // also by one block of a grid that has nothing to do: it does not end before the one before it
  // Not before the wait: who starts now may read what the preparation has written without waiting.
  ptx::griddepcontrol_launch_dependents();
  if (count < 3) return;
  __syncthreads();
  combine(p, first_segment_row(p, n, span.first), static_cast<int>(count), head, column, stages, transitions,
          of_groups[group], full);
}

}  // namespace gdn::cuda::chunk_sm90
