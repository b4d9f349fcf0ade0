// SPDX-License-Identifier: Apache-2.0
//
// Between the passes of the two-level scan: the state at the start of each segment, from segment to segment,
//     S_(j+1) = A_j S_j + B_j
// in fp32 (fma, sums in a fixed order). starts[j + 1] holds B_j before and S_(j+1) afterwards; starts[1] is right already.
// Grid    x: sequence (slowest), value head, 8 columns of V for each group of a block (fastest); neighbours are a cluster.
// Block   1, 2 or 4 groups of four warps. Warp w of a group makes a quarter of the rows of A S, for all the group's columns;
//         its lanes split the columns of A, and add up what they have by shuffles. A warp more brings A, some steps ahead: each
//         block of the cluster a part, by bulk copies to all of them. (Each block all of it: 8 MB a step for the chip, which
//         the L2 gives in more than a microsecond.)
// Reads   transitions once for each cluster, starts.   Writes   starts.
#pragma once

#include "../ptx/bar.cuh"
#include "../ptx/bulk.cuh"
#include "../ptx/cluster.cuh"
#include "../tile/pipeline.cuh"
#include "places.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kCombineColumns = 8, kCombineWarps = 4, kCombineThreads = 32 * kCombineWarps;   // of a group
constexpr int kMostCombineGroups = 4, kCombineCluster = 4;
static_assert(kValueTile % (kCombineColumns * kCombineCluster) == 0, "clusters of one head");

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

// What a block has in shared memory: transitions, as many as fit, then its groups, then two barriers for each transition.
GDN_INLINE constexpr int combine_stages(int groups) { return groups == 1 ? 3 : 2; }
template <int kKeyDim>
constexpr size_t combine_bytes(int groups) {
  return combine_stages(groups) * sizeof(Transition<kKeyDim>) + groups * sizeof(CombineGroup<kKeyDim>) + 6 * sizeof(uint64_t);
}
static_assert(combine_bytes<128>(1) <= 227 * 1024 && combine_bytes<128>(kMostCombineGroups) <= 227 * 1024,
              "shared memory of a block");

// By one thread: all transitions of a row of `count` segments, this block's part of each to all blocks of the cluster.
template <int kKeyDim>
__device__ __forceinline__ void bring_transitions(const RuleParams& p, int64_t first_row, int count, int64_t head, int stages,
                                                  Transition<kKeyDim>* smem_transitions, uint64_t* full, uint64_t* empty) {
  constexpr uint32_t kPart = sizeof(Transition<kKeyDim>) / kCombineCluster;
  const uint32_t offset = kPart * ptx::cluster_rank();
  const char* transition = reinterpret_cast<const char*>(transition_of<kKeyDim>(p, first_row + 1, head)) + offset;
  int stage = 0, parity = 1;
#pragma unroll 1
  for (int left = count - 2; left > 0; --left) {
    const uint32_t barrier = ptx::shared_address(&full[stage]);
    wait_phase(empty[stage], parity);
    ptx::mbarrier_arrive_expect_tx(barrier, sizeof(Transition<kKeyDim>));
    ptx::bulk_copy_to_cluster(ptx::shared_address(&smem_transitions[stage]) + offset, transition, kPart, barrier,
                              (1u << kCombineCluster) - 1);
    transition += p.dims.Hv * kKeyDim * kKeyDim * sizeof(float);
    stage = stage + 1 < stages ? stage + 1 : 0;
    parity ^= stage == 0;
  }
}

// Where a lane works: the warp has a quarter of the rows of A and all columns of S; a lane kKeyDim / 32 neighbouring rows,
// and of each sixteen columns of A four, those of its part (0 to 3). Register c of its sums is column c ^ flip of S, so that
// what it gives away of them is at the same registers in every lane.
template <int kKeyDim>
struct CombineLane {
  int row, part, flip;

  __device__ __forceinline__ CombineLane(int warp, int lane)
      : row(warp * (kKeyDim / kCombineWarps) + lane % 8 * (kKeyDim / 32)),
        part(lane / 8),
        flip(4 * (part % 2) + 2 * (part / 2)) {}

  // A S, of which the lane keeps two columns, flip and flip + 1.
  __device__ __forceinline__ void multiply(const Transition<kKeyDim>& transition,
                                           const float (&smem_s)[kCombineColumns][kKeyDim],
                                           LaneRows<kKeyDim> (&product)[2]) const {
    constexpr int kRows = kKeyDim / 32;
    const float* const a_row = &transition.a[4 * part][row];
    const float* of_pair[kCombineColumns / 2];
#pragma unroll
    for (int pair = 0; pair < kCombineColumns / 2; ++pair) of_pair[pair] = &smem_s[(2 * pair) ^ flip][4 * part];
    float sums[kCombineColumns][kRows] = {};
#pragma unroll
    for (int k = 0; k < kKeyDim; k += 16) {
      LaneRows<kKeyDim> a[4];
      float4 s[kCombineColumns];
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = *reinterpret_cast<const LaneRows<kKeyDim>*>(a_row + (k + j) * kKeyDim);
#pragma unroll
      for (int c = 0; c < kCombineColumns; ++c) s[c] = *reinterpret_cast<const float4*>(of_pair[c / 2] + c % 2 * kKeyDim + k);
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
    for (int half = kCombineColumns / 2; half >= 2; half /= 2) {   // with part ^ 1, then with part ^ 2
#pragma unroll
      for (int c = 0; c < half; ++c) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) sums[c][i] += __shfl_xor_sync(0xffffffffu, sums[half + c][i], half == 2 ? 16 : 8);
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) product[c].x[i] = sums[c][i];
    }
  }
};

// The steps of a group's columns, from `column` on, of a row of `count` segments. All groups of a block go through the same.
template <int kKeyDim>
__device__ __forceinline__ void combine(const RuleParams& p, int64_t first_row, int count, int64_t head, int64_t column,
                                        int stages, const Transition<kKeyDim>* smem_transitions, CombineGroup<kKeyDim>& group,
                                        uint64_t* full, uint64_t* empty) {
  using Rows = LaneRows<kKeyDim>;
  constexpr int kRows = kKeyDim / 32;
  const int threads = blockDim.x - 32;
  const CombineLane<kKeyDim> lane(threadIdx.x / 32 % kCombineWarps, threadIdx.x % 32);
  // A pointer walks from step to step: where a segment row lies takes a hundred instructions.
  const int64_t next_start = p.dims.Hv * p.dims.V * kKeyDim;
  float* start = start_of<kKeyDim>(p, first_row + 1, head) + (column + lane.flip) * kKeyDim + lane.row;
  auto own = [&](int c) -> Rows& { return *reinterpret_cast<Rows*>(start + c * kKeyDim); };   // of the lane's two columns
  auto keep = [&](int place, const Rows(&s)[2]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) *reinterpret_cast<Rows*>(&group.s[place][lane.flip + c][lane.row]) = s[c];
  };
  int stage = 0, parity = 0, place = 0, before = 0;   // before: the stage of the step before
  Rows s[2] = {own(0), own(1)};   // of S_j, then of B_j and S_(j+1)
#pragma unroll 1
  for (int left = count - 2; left > 0; --left) {
    keep(place, s);
    start += next_start;
    s[0] = own(0);
    s[1] = own(1);
    ptx::bar_sync(1, threads);
    if (left > stages - 1 && left < count - 2 && threadIdx.x < kCombineCluster) {   // the step before has read its stage
      ptx::mbarrier_arrive_at(ptx::map_shared(ptx::shared_address(&empty[before]), threadIdx.x));
    }
    wait_phase(full[stage], parity);
    Rows product[2];
    lane.multiply(smem_transitions[stage], group.s[place], product);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) s[c].x[i] += product[c].x[i];
      own(c) = s[c];
    }
    before = stage;
    stage = stage + 1 < stages ? stage + 1 : 0;
    parity ^= stage == 0;
    place ^= 1;
  }
}

template <int kKeyDim>
__global__ void __launch_bounds__(kMostCombineGroups* kCombineThreads + 32)
    combine_kernel(const __grid_constant__ RuleParams p) {
  extern __shared__ __align__(1024) char smem_bytes[];
  const int groups = blockDim.x / kCombineThreads, stages = combine_stages(groups);
  Transition<kKeyDim>* const transitions = reinterpret_cast<Transition<kKeyDim>*>(smem_bytes);
  CombineGroup<kKeyDim>* const of_groups = reinterpret_cast<CombineGroup<kKeyDim>*>(transitions + stages);
  uint64_t* const full = reinterpret_cast<uint64_t*>(of_groups + groups);
  uint64_t* const empty = full + stages;
  const uint32_t columns = static_cast<uint32_t>(kCombineColumns * groups), tiles = static_cast<uint32_t>(p.dims.V) / columns;
  const uint32_t heads = static_cast<uint32_t>(p.dims.Hv), rest = blockIdx.x / tiles;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kCombineThreads, 0);
  const int64_t column = static_cast<int64_t>(blockIdx.x - rest * tiles) * columns + group * kCombineColumns;
  const int64_t n = rest / heads, head = rest % heads;
  const Span span = sequence_span(p.cu_seqlens, n, p.dims.T);
  const int64_t count = takes_row(p, n) ? segments_of_length(p, span.length) : 0;   // the same in all blocks of a cluster
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&empty[i]), kCombineCluster);
    }
    ptx::fence_mbarrier_init();
  }
  if (count < 3 && blockIdx.x > 0) return;
  if (count >= 3) {
    __syncwarp();
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();   // all barriers of the cluster exist
  }
  ptx::griddepcontrol_wait();   // also by one block of a grid that has nothing to do: it does not end before the one before it
  // Not before the wait: who starts now may read what the preparation has written without waiting.
  ptx::griddepcontrol_launch_dependents();
  if (count < 3) return;
  const int64_t first_row = first_segment_row(p, n, span.first);
  if (group < groups) {
    combine(p, first_row, static_cast<int>(count), head, column, stages, transitions, of_groups[group], full, empty);
  } else if (threadIdx.x % 32 == 0) {
    bring_transitions(p, first_row, static_cast<int>(count), head, stages, transitions, full, empty);
  }
}

}  // namespace gdn::cuda::chunk_sm90
