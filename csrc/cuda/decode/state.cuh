// SPDX-License-Identifier: Apache-2.0
// A thread's share of the state between memory and registers: 16 bytes an access, all loads in flight at once.
#pragma once

#include "../ptx/ld_st.cuh"
#include "../tile/pack.cuh"
#include "config.cuh"

namespace gdn::cuda {
namespace {

// s[j][i][c]: row 32 j + kOwned * group + i, column c of the share.
template <class Shape>
struct Fragment {
  float s[Shape::kSteps][Shape::kOwned][Shape::kColumns];
};

// The same as it is stored, vector by vector.
template <class Shape>
struct Packs {
  uint32_t word[Shape::kLoads][4];
};

// Calls visit(idx, pointer) for each vector of the share that lies inside V. K-first: idx = (step, row of the group);
// V-first: idx = (step, column).
template <class Shape, class Visit>
__device__ __forceinline__ void visit_vectors(const View& state, int64_t slot, const Work& work,
                                              const Place<Shape>& place, int V, Visit&& visit) {
  using state_t = typename Shape::state_t;
  const int column = work.column + place.first;
  state_t* const data = static_cast<state_t*>(state.data) +
                        state.offset(slot, work.head, Shape::kOwned * place.group, column);
#pragma unroll
  for (int j = 0; j < Shape::kSteps; ++j) {
    if constexpr (Shape::kVFirst) {
#pragma unroll
      for (int c = 0; c < Shape::kColumns; ++c) {
        const int step = c * Place<Shape>::kColumnStep;
        if (column + step < V) visit(j * Shape::kColumns + c, data + step * state.stride[3] + kResidues * j);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Shape::kOwned; ++i) {
        if (column < V) visit(j * Shape::kOwned + i, data + (kResidues * j + i) * state.stride[2]);
      }
    }
  }
}

// Issues the loads. Not `wanted`, or outside: zeros.
template <class Shape>
__device__ __forceinline__ void load_share(const View& state, int64_t slot, bool wanted, const Work& work,
                                           const Place<Shape>& place, int V, Packs<Shape>& packs) {
#pragma unroll
  for (int idx = 0; idx < Shape::kLoads; ++idx) {
#pragma unroll
    for (int w = 0; w < 4; ++w) packs.word[idx][w] = 0;
  }
  if (!wanted) return;
  visit_vectors<Shape>(state, slot, work, place, V, [&](int idx, typename Shape::state_t* gmem) {
    ptx::ld_global_streaming_v4(gmem, packs.word[idx]);
  });
}

template <class Shape>
__device__ __forceinline__ void widen(const Packs<Shape>& packs, Fragment<Shape>& fragment) {
#pragma unroll
  for (int idx = 0; idx < Shape::kLoads; ++idx) {
    PackOf<typename Shape::state_t, Shape::kVector> pack;
    float x[Shape::kVector];
#pragma unroll
    for (int w = 0; w < 4; ++w) pack.word[w] = packs.word[idx][w];
    unpack<typename Shape::state_t, Shape::kVector>(pack, x);
#pragma unroll
    for (int e = 0; e < Shape::kVector; ++e) {
      if constexpr (Shape::kVFirst) fragment.s[idx / Shape::kColumns][e][idx % Shape::kColumns] = x[e];
      else fragment.s[idx / Shape::kOwned][idx % Shape::kOwned][e] = x[e];
    }
  }
}

// Rounds the share to the state's dtype and writes it.
template <class Shape>
__device__ __forceinline__ void store_share(const View& state, int64_t slot, const Work& work,
                                            const Place<Shape>& place, int V, const Fragment<Shape>& fragment) {
  using state_t = typename Shape::state_t;
  visit_vectors<Shape>(state, slot, work, place, V, [&](int idx, state_t* gmem) {
    float x[Shape::kVector];
#pragma unroll
    for (int e = 0; e < Shape::kVector; ++e) {
      if constexpr (Shape::kVFirst) x[e] = fragment.s[idx / Shape::kColumns][e][idx % Shape::kColumns];
      else x[e] = fragment.s[idx / Shape::kOwned][idx % Shape::kOwned][e];
    }
    uint32_t word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(state_t) == 4) word[w] = float_bits(x[w]);
      else word[w] = round_pair(x[2 * w], x[2 * w + 1], state_t{});
    }
    ptx::st_global_streaming_v4(gmem, word);
  });
}

}  // namespace
}  // namespace gdn::cuda
