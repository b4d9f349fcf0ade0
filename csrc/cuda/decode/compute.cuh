// SPDX-License-Identifier: Apache-2.0
// rule.h's step on a thread's share of the state.
#pragma once

#include "state.cuh"

namespace gdn::cuda {
namespace {

// kCount floats of shared memory by the widest accesses. Aligned to as much.
template <int kCount>
__device__ __forceinline__ void load_smem(const float* smem, float* x) {
  constexpr int kWide = kCount % 4 == 0 ? 4 : (kCount % 2 == 0 ? 2 : 1);
#pragma unroll
  for (int i = 0; i < kCount; i += kWide) {
    const Words<4 * kWide> words = *reinterpret_cast<const Words<4 * kWide>*>(smem + i);
#pragma unroll
    for (int e = 0; e < kWide; ++e) x[i + e] = bits_float(words.word[e]);
  }
}

template <int kCount>
__device__ __forceinline__ void store_smem(float* smem, const float* x) {
  constexpr int kWide = kCount % 4 == 0 ? 4 : (kCount % 2 == 0 ? 2 : 1);
#pragma unroll
  for (int i = 0; i < kCount; i += kWide) {
    Words<4 * kWide> words;
#pragma unroll
    for (int e = 0; e < kWide; ++e) words.word[e] = float_bits(x[i + e]);
    *reinterpret_cast<Words<4 * kWide>*>(smem + i) = words;
  }
}

// The sums of S * x over the rows that the thread's warp holds, of the thread's columns; x in shared memory.
template <class Shape>
__device__ __forceinline__ void sum_in_thread(const float* smem_x, const Place<Shape>& place,
                                              const Fragment<Shape>& fragment, float (&sum)[Shape::kColumns]) {
  constexpr int kOwned = Shape::kOwned, kColumns = Shape::kColumns;
  float part[kOwned][kColumns] = {};
#pragma unroll
  for (int j = 0; j < Shape::kSteps; ++j) {
    float x[kOwned];
    load_smem<kOwned>(smem_x + kResidues * j + kOwned * place.group, x);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) part[i][c] = accumulate(fragment.s[j][i][c], x[i], part[i][c]);
    }
  }
#pragma unroll
  for (int width = 1; width < kOwned; width *= 2) {
#pragma unroll
    for (int i = 0; i < kOwned; i += 2 * width) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) part[i][c] = add(part[i][c], part[i + width][c]);
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sum[c] = part[0][c];
}

// The levels of the tree between lanes, all sums side by side.
template <class Shape>
__device__ __forceinline__ void sum_over_lanes(float (&u)[Shape::kColumns], float (&w)[Shape::kColumns]) {
  constexpr int kNeighbour = Shape::kVFirst ? 1 : Shape::kColumnLanes;   // lanes from a group to the next
#pragma unroll
  for (int width = 1; width < Shape::kGroupLanes; width *= 2) {
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c) {
      u[c] = add(u[c], __shfl_xor_sync(0xffffffffu, u[c], width * kNeighbour));
      w[c] = add(w[c], __shfl_xor_sync(0xffffffffu, w[c], width * kNeighbour));
    }
  }
}

// x[c] <- the tree over the warps of smem[warp * step + c].
template <class Shape, int kCount>
__device__ __forceinline__ void sum_of_warps(const float* smem, float* x) {
  float part[Shape::kWarpsOfColumn][kCount];
#pragma unroll
  for (int warp = 0; warp < Shape::kWarpsOfColumn; ++warp) load_smem<kCount>(smem + warp * 2 * Shape::kTile, part[warp]);
#pragma unroll
  for (int width = 1; width < Shape::kWarpsOfColumn; width *= 2) {
#pragma unroll
    for (int warp = 0; warp < Shape::kWarpsOfColumn; warp += 2 * width) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) part[warp][c] = add(part[warp][c], part[warp + width][c]);
    }
  }
#pragma unroll
  for (int c = 0; c < kCount; ++c) x[c] = part[0][c];
}

// The last levels of the tree, where a column's rows are spread over warps: through smem_sums [warp][u, w][kTile]. One
// barrier: all warps' sums are there. The next token uses another buffer, so nobody overtakes a reader.
template <class Shape>
__device__ __forceinline__ void sum_over_warps(const Place<Shape>& place, float* smem_sums, float (&u)[Shape::kColumns],
                                               float (&w)[Shape::kColumns]) {
  constexpr int kPart = Shape::kColumns < 4 ? Shape::kColumns : 4;   // few sums in registers at a time
  if (place.group_lane == 0) {
    store_smem<Shape::kColumns>(smem_sums + place.warp_of_column * 2 * Shape::kTile + place.first, u);
    store_smem<Shape::kColumns>(smem_sums + place.warp_of_column * 2 * Shape::kTile + Shape::kTile + place.first, w);
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < Shape::kColumns; c += kPart) {
    sum_of_warps<Shape, kPart>(smem_sums + place.first + c, u + c);
    sum_of_warps<Shape, kPart>(smem_sums + Shape::kTile + place.first + c, w + c);
  }
}

// One token. Gives o and f of the column that this thread answers for: column `group` of its share, if there is one. The
// state moves on if `needs_state`.
template <class Shape>
__device__ __forceinline__ void step(const float* smem_token, float* smem_sums, const Place<Shape>& place,
                                     bool needs_state, Fragment<Shape>& fragment, float& own_o, float& own_f) {
  constexpr int kOwned = Shape::kOwned, kColumns = Shape::kColumns;
  float u[kColumns], w[kColumns], v[kColumns], f[kColumns];
  sum_in_thread<Shape>(smem_token, place, fragment, u);   // one after the other: half the partial sums in registers
  sum_in_thread<Shape>(smem_token + Shape::kSmemQ, place, fragment, w);
  sum_over_lanes<Shape>(u, w);
  if constexpr (Shape::kWarpsOfColumn > 1) sum_over_warps<Shape>(place, smem_sums, u, w);

  const StepScalars scalars = *reinterpret_cast<const StepScalars*>(smem_token + Shape::kSmemScalars);
  if constexpr (Shape::kVFirst) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) v[c] = smem_token[Shape::kSmemV + place.first + c * place.kColumnStep];
  } else {
    load_smem<kColumns>(smem_token + Shape::kSmemV + place.first, v);
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    f[c] = write_factor(scalars.neg_alpha_sk, scalars.beta, scalars.sk, u[c], v[c]);
    const float o = read_output(scalars.scale_sq, scalars.kq, scalars.alpha, f[c], w[c]);
    if (c == 0 || place.group == c) {   // every group holds the same
      own_o = o;
      own_f = f[c];
    }
  }
  if (!needs_state) return;
#pragma unroll
  for (int j = 0; j < Shape::kSteps; ++j) {
    float k[kOwned];
    load_smem<kOwned>(smem_token + kResidues * j + kOwned * place.group, k);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        fragment.s[j][i][c] = write_state(scalars.alpha, k[i], f[c], fragment.s[j][i][c]);
      }
    }
  }
}

}  // namespace
}  // namespace gdn::cuda
