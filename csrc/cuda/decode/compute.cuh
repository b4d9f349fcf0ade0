// SPDX-License-Identifier: Apache-2.0
// rule.h on a lane's share of the state: its sums, over the lanes of a warp where those hold the column's rows, and the write.
#pragma once

#include "state.cuh"

namespace gdn::cuda {
namespace {

// The levels of rule.h's tree within a lane: part[i] over the kOwned neighbouring residues, left in part[0].
template <class Shape, int kCount>
__device__ __forceinline__ void sum_over_owned(float (&part)[Shape::kOwned][kCount]) {
#pragma unroll
  for (int width = 1; width < Shape::kOwned; width *= 2) {
#pragma unroll
    for (int i = 0; i < Shape::kOwned; i += 2 * width) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) part[i][c] = add(part[i][c], part[i + width][c]);
    }
  }
}

// The sums of S * x over the lane's rows, of its columns; x [kKeyDim] in shared memory, group: of the lane's residues.
template <class Shape>
__device__ __forceinline__ void sum_packs(const float* smem_x, int group, const Packs<Shape>& packs,
                                          float (&sum)[Shape::kColumns]) {
  constexpr int kOwned = Shape::kOwned, kColumns = Shape::kColumns, kLoadsOfStep = Shape::kLoads / Shape::kSteps;
  float part[kOwned][kColumns] = {};
#pragma unroll
  for (int j = 0; j < Shape::kSteps; ++j) {
    float x[kOwned];
    load_floats<kOwned>(smem_x + kResidues * j + kOwned * group, x);
#pragma unroll
    for (int n = 0; n < kLoadsOfStep; ++n) {
      float s[Shape::kVector];
      widen_vector<Shape>(packs, j * kLoadsOfStep + n, s);
#pragma unroll
      for (int e = 0; e < Shape::kVector; ++e) {
        const int i = Shape::kVFirst ? e : n, c = Shape::kVFirst ? n : e;
        part[i][c] = accumulate(s[e], x[i], part[i][c]);
      }
    }
  }
  sum_over_owned<Shape, kColumns>(part);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sum[c] = part[0][c];
}

// The state after the token, vector by vector.
template <class Shape>
__device__ __forceinline__ void write_packs(char* gmem, int line, int columns, const float* smem_k, int group,
                                            const Packs<Shape>& packs, float alpha, const float (&f)[Shape::kColumns]) {
  constexpr int kOwned = Shape::kOwned, kLoadsOfStep = Shape::kLoads / Shape::kSteps;
  float k[Shape::kSteps][kOwned];
#pragma unroll
  for (int j = 0; j < Shape::kSteps; ++j) load_floats<kOwned>(smem_k + kResidues * j + kOwned * group, k[j]);
  visit_vectors<Shape>(gmem, line, columns, [&](int idx, char* vector, bool inside) {
    float s[Shape::kVector];
    uint32_t word[4];
    widen_vector<Shape>(packs, idx, s);
#pragma unroll
    for (int e = 0; e < Shape::kVector; ++e) {
      const int i = Shape::kVFirst ? e : idx % kLoadsOfStep, c = Shape::kVFirst ? idx % kLoadsOfStep : e;
      s[e] = write_state(alpha, k[idx / kLoadsOfStep][i], f[c], s[e]);
    }
    round_vector<Shape>(s, word);
    if (inside) ptx::st_global_v4(vector, word);
  });
}

// The levels between lanes for u and w of the lane's columns at once. At each, a lane gives half of its sums away and
// keeps the other half, so that the lanes of a column end up with different ones: kLeft each, u where !place.has_w(), of
// the columns from place.own_column() on. Which operand stands left does not change a sum.
template <class Shape>
__device__ __forceinline__ void deal_sums(const Place<Shape>& place, const float (&u)[Shape::kColumns],
                                          const float (&w)[Shape::kColumns], float (&left)[Shape::kLeft]) {
  float x[2 * Shape::kColumns];
#pragma unroll
  for (int c = 0; c < Shape::kColumns; ++c) {
    x[c] = u[c];
    x[Shape::kColumns + c] = w[c];
  }
#pragma unroll
  for (int width = 1; width < Shape::kGroups; width *= 2) {
    const int lanes = width * Place<Shape>::kGroupStep;
    if (width < Shape::kDealt) {
      const bool keeps_upper = (place.group & width) != 0;
      const int half = Shape::kColumns / width;
#pragma unroll
      for (int i = 0; i < Shape::kColumns; ++i) {
        if (i < half) {
          const float given = keeps_upper ? x[i] : x[half + i], kept = keeps_upper ? x[half + i] : x[i];
          x[i] = add(kept, __shfl_xor_sync(kAllLanes, given, lanes));
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < Shape::kLeft; ++i) x[i] = add(x[i], __shfl_xor_sync(kAllLanes, x[i], lanes));
    }
  }
#pragma unroll
  for (int i = 0; i < Shape::kLeft; ++i) left[i] = x[i];
}

// f of all the lane's columns, o and f of its own ones; o is meaningful where place.has_w(), own f where not. v: of its own.
template <class Shape>
__device__ __forceinline__ void finish_sums(const Place<Shape>& place, const StepScalars& scalars,
                                            const float (&left)[Shape::kLeft], const float (&v)[Shape::kLeft],
                                            float (&f)[Shape::kColumns], float (&own_o)[Shape::kLeft],
                                            float (&own_f)[Shape::kLeft]) {
#pragma unroll
  for (int i = 0; i < Shape::kLeft; ++i) {
    own_f[i] = write_factor(scalars.neg_alpha_sk, scalars.beta, scalars.sk, left[i], v[i]);
    const float partner = __shfl_xor_sync(kAllLanes, own_f[i], Place<Shape>::kGroupStep);
    own_o[i] = read_output(scalars.scale_sq, scalars.kq, scalars.alpha, partner, left[i]);
  }
  const int lane = static_cast<int>(threadIdx.x) % 32, lane_of_first = lane - place.group * Place<Shape>::kGroupStep;
#pragma unroll
  for (int c = 0; c < Shape::kColumns; ++c) {
    f[c] = __shfl_sync(kAllLanes, own_f[c % Shape::kLeft],
                       lane_of_first + Place<Shape>::group_of(c) * Place<Shape>::kGroupStep);
  }
}

}  // namespace
}  // namespace gdn::cuda
