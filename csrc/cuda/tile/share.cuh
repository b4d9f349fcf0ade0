// SPDX-License-Identifier: Apache-2.0
// A tile of the state over the threads of a block: which rows and columns of S a thread holds, 16 bytes an access.
#pragma once

#include "pack.cuh"

namespace gdn::cuda {

// A block holds kTile columns of one head's S, kThreads threads wide. A thread's share is what 16-byte accesses give it:
//     K-first   kColumns = 16 bytes of neighbouring columns, of as many neighbouring residues as it takes (kOwned)
//     V-first   kOwned = 16 bytes of neighbouring residues, of as many columns as it takes (kColumns)
// and of those residues all rows, 32 apart (kSteps of them): the partial sums of rule.h are the thread's own.
template <class StateT, bool kIsVFirst, int kStepsOfK, int kTileColumns, int kBlockThreads>
struct Share {
  using state_t = StateT;
  static constexpr bool kVFirst = kIsVFirst;
  static constexpr int kSteps = kStepsOfK, kKeyDim = kResidues * kSteps, kTile = kTileColumns;
  static constexpr int kThreads = kBlockThreads, kWarps = kThreads / 32;
  static constexpr int kBytes = static_cast<int>(sizeof(state_t)), kVector = 16 / kBytes;
  static constexpr int kSize = kResidues * kTile / kThreads;                      // residues x columns of a thread
  static constexpr int kColumns = kVFirst ? kSize / kVector : kVector;
  static constexpr int kOwned = kVFirst ? kVector : kSize / kVector;
  static constexpr int kGroups = kResidues / kOwned;                              // threads that share a column
  static constexpr int kColumnLanes = kVFirst || kTile / kColumns > 32 ? 32 / (kVFirst ? kGroups : 1) : kTile / kColumns;
  static constexpr int kGroupLanes = 32 / kColumnLanes;
  static constexpr int kWarpsOfColumn = kGroups / kGroupLanes;                    // warps whose sums have to meet
  static constexpr int kOfStep = kSize / kVector, kLoads = kSteps * kOfStep;      // 16-byte accesses of a thread: 32 rows, all
  static constexpr int kColumnStep = kVFirst ? kColumnLanes : 1;                  // from a column of the share to the next
  static constexpr int kNeighbour = kVFirst ? 1 : kColumnLanes;                   // lanes from a group to the next

  static_assert(kSize % kVector == 0 && kColumns * kOwned == kSize, "the share is whole vectors");
  static_assert(kWarpsOfColumn >= 1 && kWarps % kWarpsOfColumn == 0, "a column's threads are whole warps or part of one");
  static_assert(kGroups >= kColumns, "a thread answers for at most one column");
  static_assert(kWarps / kWarpsOfColumn * kColumnLanes * kColumns == kTile, "the warps cover the tile");
};

// Where a thread's share lies in the tile: residues kOwned * group + .., columns first + c * kColumnStep.
template <class Share>
struct SharePlace {
  int group, first, warp_of_column, group_lane;

  GDN_INLINE explicit SharePlace(int thread) {
    const int warp = thread / 32, lane = thread % 32;
    // Neighbouring lanes follow the contiguous dim.
    group_lane = Share::kVFirst ? lane % Share::kGroupLanes : lane / Share::kColumnLanes;
    const int column_lane = Share::kVFirst ? lane / Share::kGroupLanes : lane % Share::kColumnLanes;
    warp_of_column = warp % Share::kWarpsOfColumn;
    group = warp_of_column * Share::kGroupLanes + group_lane;
    first = warp / Share::kWarpsOfColumn * Share::kColumnLanes * Share::kColumns +
            column_lane * (Share::kVFirst ? 1 : Share::kColumns);
  }
  // The column that this thread answers for, of those it holds; every group's sums are the same after the tree.
  GDN_INLINE bool answers() const { return group < Share::kColumns; }
  GDN_INLINE int own_column() const { return first + group * Share::kColumnStep; }
};

// Byte offset of an access of the share from the first one, `line` bytes between rows (K-first) or columns (V-first). It is
// for rows 32 step + residue: K-first the residue `place` of the share, V-first its column. Offsets in a head fit in 32 bits.
template <class Share>
GDN_INLINE int share_offset(int step, int place, int line) {
  return Share::kVFirst ? place * Share::kColumnStep * line + kResidues * Share::kBytes * step
                        : (kResidues * step + place) * line;
}

// The vector of an access, widened; smem: the share's, 16 bytes an access and thread, [access][thread].
template <class Share>
__device__ __forceinline__ void read_vector(const float* smem, int idx, float (&x)[Share::kVector]) {
  using state_t = typename Share::state_t;
  const auto words = *reinterpret_cast<const Words<16>*>(smem + 4 * (Share::kThreads * idx + static_cast<int>(threadIdx.x)));
  unpack<state_t, Share::kVector>(words, x);
}

// Adds up part[i] over kCount neighbouring residues, in the order of rule.h's tree, into part[0].
template <int kCount, int kColumns>
__device__ __forceinline__ void sum_residues(float (*part)[kColumns]) {
#pragma unroll
  for (int width = 1; width < kCount; width *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2 * width) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) part[i][c] = add(part[i][c], part[i + width][c]);
    }
  }
}

// u = sum_K S*k and w = sum_K S*q over the rows of the thread's share; q and k [kKeyDim] in shared memory. Two residues
// (K-first) or columns (V-first) after the other, so that few partial sums wait.
template <class Share>
__device__ __forceinline__ void sum_share(const float* smem_state, const float* smem_q, const float* smem_k, int group,
                                          float (&u)[Share::kColumns], float (&w)[Share::kColumns]) {
  constexpr int kAtOnce = Share::kOfStep < 2 ? 1 : 2, kTurns = Share::kOfStep / kAtOnce;
  constexpr int kOwned = Share::kVFirst ? Share::kOwned : kAtOnce, kColumns = Share::kVFirst ? kAtOnce : Share::kColumns;
  float sum_u[kTurns][kColumns], sum_w[kTurns][kColumns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    float part_u[kOwned][kColumns] = {}, part_w[kOwned][kColumns] = {};
    const int residue = Share::kOwned * group + (Share::kVFirst ? 0 : kAtOnce * turn);
#pragma unroll
    for (int step = 0; step < Share::kSteps; ++step) {
      float q[kOwned], k[kOwned];
      load_floats<kOwned>(smem_q + kResidues * step + residue, q);
      load_floats<kOwned>(smem_k + kResidues * step + residue, k);
#pragma unroll
      for (int place = 0; place < kAtOnce; ++place) {
        float s[Share::kVector];
        read_vector<Share>(smem_state, step * Share::kOfStep + kAtOnce * turn + place, s);
#pragma unroll
        for (int e = 0; e < Share::kVector; ++e) {
          const int i = Share::kVFirst ? e : place, c = Share::kVFirst ? place : e;
          part_u[i][c] = accumulate(s[e], k[i], part_u[i][c]);
          part_w[i][c] = accumulate(s[e], q[i], part_w[i][c]);
        }
      }
    }
    sum_residues<kOwned>(part_u);
    sum_residues<kOwned>(part_w);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      sum_u[turn][c] = part_u[0][c];
      sum_w[turn][c] = part_w[0][c];
    }
  }
  if constexpr (!Share::kVFirst) {
    sum_residues<kTurns>(sum_u);
    sum_residues<kTurns>(sum_w);
  }
#pragma unroll
  for (int c = 0; c < Share::kColumns; ++c) {
    u[c] = sum_u[c / kColumns][c % kColumns];
    w[c] = sum_w[c / kColumns][c % kColumns];
  }
}

// The levels of the tree between lanes, all sums side by side.
template <class Share>
__device__ __forceinline__ void sum_over_lanes(float (&u)[Share::kColumns], float (&w)[Share::kColumns]) {
#pragma unroll
  for (int width = 1; width < Share::kGroupLanes; width *= 2) {
#pragma unroll
    for (int c = 0; c < Share::kColumns; ++c) {
      u[c] = add(u[c], __shfl_xor_sync(0xffffffffu, u[c], width * Share::kNeighbour));
      w[c] = add(w[c], __shfl_xor_sync(0xffffffffu, w[c], width * Share::kNeighbour));
    }
  }
}

// x[c] <- the tree over the warps of smem[warp * 2 * kTile + c].
template <class Share, int kCount>
__device__ __forceinline__ void sum_of_warps(const float* smem, float (&x)[kCount]) {
  float part[Share::kWarpsOfColumn][kCount];
#pragma unroll
  for (int warp = 0; warp < Share::kWarpsOfColumn; ++warp) {
    load_floats<kCount>(smem + warp * 2 * Share::kTile, part[warp]);
  }
#pragma unroll
  for (int width = 1; width < Share::kWarpsOfColumn; width *= 2) {
#pragma unroll
    for (int warp = 0; warp < Share::kWarpsOfColumn; warp += 2 * width) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) part[warp][c] = add(part[warp][c], part[warp + width][c]);
    }
  }
#pragma unroll
  for (int c = 0; c < kCount; ++c) x[c] = part[0][c];
}

// The last levels, where a column's rows are spread over warps (K-first): through smem_sums [warp][u, w][kTile]. One
// barrier: all warps' sums are there.
template <class Share>
__device__ __forceinline__ void sum_over_warps(const SharePlace<Share>& place, float* smem_sums,
                                               float (&u)[Share::kColumns], float (&w)[Share::kColumns]) {
  float* const mine = smem_sums + place.warp_of_column * 2 * Share::kTile + place.first;
  if (place.group_lane == 0) {
    store_floats<Share::kColumns>(mine, u);
    store_floats<Share::kColumns>(mine + Share::kTile, w);
  }
  __syncthreads();
  sum_of_warps<Share>(smem_sums + place.first, u);
  sum_of_warps<Share>(smem_sums + Share::kTile + place.first, w);
}

}  // namespace gdn::cuda
