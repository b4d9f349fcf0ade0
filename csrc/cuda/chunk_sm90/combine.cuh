// SPDX-License-Identifier: Apache-2.0
//
// Between the passes of the two-level scan: the state at the start of each segment, from segment to segment,
//     S_(j+1) = A_j S_j + B_j
// in fp32 (fma, sums in a fixed order). starts[j + 1] holds B_j before and S_(j+1) afterwards; starts[1] is right already.
// Grid    x: sequence (slowest), value head, 8 columns of V for each group of a block (fastest).
// Block   1, 2 or 4 groups of four warps. Warp w of a group sums a quarter of the columns of A, for all rows and the group's
//         columns; a lane has neighbouring rows. A comes by bulk copies, some steps ahead: what a step waits for is arithmetic,
//         and at that 8 columns of S on every multiprocessor take a clock for each column of A and each row of a lane's eight.
// Reads   transitions, starts once for each block.   Writes   starts.
#pragma once

#include "../ptx/bulk.cuh"
#include "../tile/pipeline.cuh"
#include "places.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kCombineColumns = 8, kCombineWarps = 4, kCombineThreads = 32 * kCombineWarps;   // of a group
constexpr int kMostCombineGroups = 4;

// Neighbouring rows of S or A, those of a lane.
template <int kKeyDim>
struct alignas(kKeyDim / 8) LaneRows {
  float x[kKeyDim / 32];
};

template <int kKeyDim>
struct CombineGroup {
  float2 s[kCombineColumns / 2][kKeyDim];                           // S_j, pairs of columns
  LaneRows<kKeyDim> sums[kCombineWarps][kCombineColumns][32];       // A_j S_j, what each warp has of it
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

// A warp's part of A S for the lane's rows and all columns: columns first .. first + kKeyDim / 4 - 1 of A.
template <int kKeyDim>
__device__ __forceinline__ void multiply_part(const Transition<kKeyDim>& transition, const CombineGroup<kKeyDim>& group,
                                              int first, int lane, float (&sums)[kCombineColumns][kKeyDim / 32]) {
#pragma unroll 4
  for (int k = first; k < first + kKeyDim / kCombineWarps; k += 2) {
    const LaneRows<kKeyDim> a[2] = {reinterpret_cast<const LaneRows<kKeyDim>*>(transition.a[k])[lane],
                                    reinterpret_cast<const LaneRows<kKeyDim>*>(transition.a[k + 1])[lane]};
#pragma unroll
    for (int pair = 0; pair < kCombineColumns / 2; ++pair) {
      const float4 s = *reinterpret_cast<const float4*>(&group.s[pair][k]);
#pragma unroll
      for (int i = 0; i < kKeyDim / 32; ++i) {
        sums[2 * pair][i] = fmaf(a[1].x[i], s.z, fmaf(a[0].x[i], s.x, sums[2 * pair][i]));
        sums[2 * pair + 1][i] = fmaf(a[1].x[i], s.w, fmaf(a[0].x[i], s.y, sums[2 * pair + 1][i]));
      }
    }
  }
}

// The steps of a group's columns, from `column` on, of a row of `count` segments. All groups of a block go through the same.
template <int kKeyDim>
__device__ __forceinline__ void combine(const RuleParams& p, int64_t first_row, int count, int64_t head, int64_t column,
                                        int stages, Transition<kKeyDim>* smem_transitions, CombineGroup<kKeyDim>& group,
                                        uint64_t* full) {
  using Rows = LaneRows<kKeyDim>;
  constexpr int kRows = kKeyDim / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kCombineWarps, own_column = 2 * warp;
  // Pointers walk from step to step: where a segment row lies takes a hundred instructions.
  const int64_t next_transition = p.dims.Hv * kKeyDim * kKeyDim, next_start = p.dims.Hv * p.dims.V * kKeyDim;
  const float* transition = transition_of<kKeyDim>(p, first_row + 1, head);   // the next one to bring
  float* start = start_of<kKeyDim>(p, first_row + 1, head) + (column + own_column) * kKeyDim + kRows * lane;
  auto own = [&](int c) -> Rows& { return *reinterpret_cast<Rows*>(start + c * kKeyDim); };   // of column own_column + c
  auto bring = [&](int stage) {
    const uint32_t barrier = ptx::shared_address(&full[stage]);
    ptx::mbarrier_arrive_expect_tx(barrier, sizeof(Transition<kKeyDim>));
    ptx::bulk_copy_to_shared(ptx::shared_address(&smem_transitions[stage]), transition, sizeof(Transition<kKeyDim>), barrier);
    transition += next_transition;
  };
  int to_bring = count - 2;   // transitions
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages && to_bring > 0; ++stage, --to_bring) bring(stage);
  }
  int stage = 0, parity = 0;
  Rows s[2] = {own(0), own(1)};   // of S_j, then of B_j and S_(j+1)
#pragma unroll 1
  for (int left = count - 2; left > 0; --left) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) group.s[warp][kRows * lane + i] = make_float2(s[0].x[i], s[1].x[i]);
    start += next_start;
    s[0] = own(0);
    s[1] = own(1);
    __syncthreads();
    float sums[kCombineColumns][kRows] = {};
    wait_phase(full[stage], parity);
    multiply_part(smem_transitions[stage], group, warp * (kKeyDim / kCombineWarps), lane, sums);
#pragma unroll
    for (int c = 0; c < kCombineColumns; ++c) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) group.sums[warp][c][lane].x[i] = sums[c][i];
    }
    __syncthreads();
    if (threadIdx.x == 0 && to_bring-- > 0) bring(stage);   // nobody reads the stage any more
    stage = stage + 1 < stages ? stage + 1 : 0;
    parity ^= stage == 0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int other = 0; other < kCombineWarps; ++other) {
        const Rows part = group.sums[other][own_column + c][lane];
#pragma unroll
        for (int i = 0; i < kRows; ++i) s[c].x[i] += part.x[i];
      }
      own(c) = s[c];
    }
  }
}

template <int kKeyDim>
__global__ void __launch_bounds__(kMostCombineGroups* kCombineThreads) combine_kernel(const __grid_constant__ RuleParams p) {
  extern __shared__ __align__(1024) char smem_bytes[];
  const int groups = blockDim.x / kCombineThreads, stages = combine_stages(groups);
  Transition<kKeyDim>* const transitions = reinterpret_cast<Transition<kKeyDim>*>(smem_bytes);
  CombineGroup<kKeyDim>* const of_groups = reinterpret_cast<CombineGroup<kKeyDim>*>(transitions + stages);
  uint64_t* const full = reinterpret_cast<uint64_t*>(of_groups + groups);
  ptx::griddepcontrol_launch_dependents();
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
  if (count < 3) return;
  __syncthreads();
  combine(p, first_segment_row(p, n, span.first), static_cast<int>(count), head, column, stages, transitions,
          of_groups[group], full);
}

}  // namespace gdn::cuda::chunk_sm90
