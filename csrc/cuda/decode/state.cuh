// SPDX-License-Identifier: Apache-2.0
// A lane's share of the state between memory and registers: 16 bytes an access, all loads in flight at once.
#pragma once

#include "../ptx/cp_async.cuh"
#include "../ptx/ld_st.cuh"
#include "../tile/pack.cuh"
#include "config.cuh"

namespace gdn::cuda {
namespace {

// The share as it is stored, vector by vector. K-first: idx = (step, row of the group); V-first: idx = (step, column).
template <class Shape>
struct Packs {
  uint32_t word[Shape::kLoads][4];
};

// s[j][i][c]: row 32 j + kOwned * group + i, column c of the share.
template <class Shape>
struct Fragment {
  float s[Shape::kSteps][Shape::kOwned][Shape::kColumns];
};

// Where the share's first vector lies. place: the Shape's.
template <class Shape, class PlaceOf>
__device__ __forceinline__ char* share_address(const StateRows& state, int slot, const Work& work, const PlaceOf& place) {
  const int column = work.column + place.first, row = Shape::kOwned * place.group;
  return state.data + wide(slot, state.slot) + wide(work.head, state.head) + wide(Shape::kVFirst ? column : row, state.line) +
         (Shape::kVFirst ? row : column) * static_cast<int>(sizeof(typename Shape::state_t));
}

// Calls visit(idx, address, inside) for each vector of the share, the first at gmem; inside: within the `columns` columns
// from the lane's first on.
template <class Shape, class Visit>
__device__ __forceinline__ void visit_vectors(char* gmem, int line, int columns, Visit&& visit) {
  constexpr int kBytes = static_cast<int>(sizeof(typename Shape::state_t));
  if constexpr (Shape::kVFirst) {
#pragma unroll
    for (int c = 0; c < Shape::kColumns; ++c) {
#pragma unroll
      for (int j = 0; j < Shape::kSteps; ++j) {
        visit(j * Shape::kColumns + c, gmem + kResidues * kBytes * j, c * Place<Shape>::kColumnStep < columns);
      }
      gmem += Place<Shape>::kColumnStep * line;
    }
  } else {
    const bool inside = columns > 0;
#pragma unroll
    for (int j = 0; j < Shape::kSteps; ++j) {
#pragma unroll
      for (int i = 0; i < Shape::kOwned; ++i) {
        visit(j * Shape::kOwned + i, gmem, inside);
        gmem += (i + 1 < Shape::kOwned ? 1 : kResidues - Shape::kOwned + 1) * line;
      }
    }
  }
}

// Asks for the lines of a share on their way to the L2, each by the first of the lanes that lie on it side by side.
template <class Shape>
__device__ __forceinline__ void prefetch_share(const StateRows& state, char* gmem, int columns) {
  constexpr int kLine = 128, kOnLine = kLine / 16;
  constexpr int kSide = Shape::kVFirst ? Shape::kGroups : (Shape::kColumnLanes < kOnLine ? Shape::kColumnLanes : kOnLine);
  if (threadIdx.x % kSide != 0) return;
  visit_vectors<Shape>(gmem, state.line, columns, [&](int idx, const char* vector, bool inside) {
    const bool is_in_line_before = Shape::kVFirst && idx / Shape::kColumns * kSide * 16 % kLine != 0;
    if (inside && !is_in_line_before) ptx::prefetch_l2(vector);
  });
}

// Issues the loads of a share, with the hint that it is not read again or without. Outside the columns: zeros.
template <class Shape, bool kStreams>
__device__ __forceinline__ void load_share(char* gmem, int line, int columns, Packs<Shape>& packs) {
  visit_vectors<Shape>(gmem, line, columns, [&](int idx, const char* vector, bool inside) {
#pragma unroll
    for (int w = 0; w < 4; ++w) packs.word[idx][w] = 0;
    if (!inside) return;
    if constexpr (kStreams) ptx::ld_global_streaming_v4(vector, packs.word[idx]);
    else ptx::ld_global_v4(vector, packs.word[idx]);
  });
}

// Asks for a piece's share of the state to be brought to the L2, all threads of the block together. Only a hint: the slot is
// looked up past the L1, since somebody may still be writing it.
template <class Shape>
__device__ __forceinline__ void prefetch_piece(const Call& call, const Cut& cut, uint32_t piece) {
  constexpr int kItem = static_cast<int>(sizeof(typename Shape::state_t)), kLine = 128;
  constexpr int kLineBytes = (Shape::kVFirst ? Shape::kKeyDim : Shape::kTile) * kItem;   // contiguous in the tile
  constexpr int kOfLine = kLineBytes < kLine ? 1 : kLineBytes / kLine, kLines = Shape::kVFirst ? Shape::kTile : Shape::kKeyDim;
  const Work work = work_of_piece(cut, piece, Shape::kTile);
  if (work.n >= call.N) return;
  const int64_t slot = hinted_slot_of_row(call.slots, work.n, call.pool_in);
  if (slot < 0) return;
  const char* const tile = call.in.data + wide(static_cast<int>(slot), call.in.slot) + wide(work.head, call.in.head) +
                           wide(work.column, Shape::kVFirst ? call.in.line : kItem);
#pragma unroll
  for (int idx = threadIdx.x; idx < kLines * kOfLine; idx += Shape::kThreads) {
    const int line = idx / kOfLine, byte = idx % kOfLine * kLine;
    const int column = work.column + (Shape::kVFirst ? line : byte / static_cast<int>(kItem));
    if (column < call.V) ptx::prefetch_l2(tile + wide(line, call.in.line) + byte);
  }
}

// The elements of vector idx: kVector of them along the contiguous dim.
template <class Shape>
__device__ __forceinline__ void widen_vector(const Packs<Shape>& packs, int idx, float* x) {
  PackOf<typename Shape::state_t, Shape::kVector> pack;
#pragma unroll
  for (int w = 0; w < 4; ++w) pack.word[w] = packs.word[idx][w];
  unpack<typename Shape::state_t, Shape::kVector>(pack, x);
}

template <class Shape>
__device__ __forceinline__ void round_vector(const float* x, uint32_t (&word)[4]) {
  using state_t = typename Shape::state_t;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(state_t) == 4) word[w] = float_bits(x[w]);
    else word[w] = round_pair(x[2 * w], x[2 * w + 1], state_t{});
  }
}

template <class Shape>
__device__ __forceinline__ void widen(const Packs<Shape>& packs, Fragment<Shape>& fragment) {
#pragma unroll
  for (int idx = 0; idx < Shape::kLoads; ++idx) {
    float x[Shape::kVector];
    widen_vector<Shape>(packs, idx, x);
#pragma unroll
    for (int e = 0; e < Shape::kVector; ++e) {
      if constexpr (Shape::kVFirst) fragment.s[idx / Shape::kColumns][e][idx % Shape::kColumns] = x[e];
      else fragment.s[idx / Shape::kOwned][idx % Shape::kOwned][e] = x[e];
    }
  }
}

// Rounds the share to the state's dtype and writes it.
template <class Shape>
__device__ __forceinline__ void store_share(char* gmem, int line, int columns, const Fragment<Shape>& fragment) {
  visit_vectors<Shape>(gmem, line, columns, [&](int idx, char* vector, bool inside) {
    float x[Shape::kVector];
#pragma unroll
    for (int e = 0; e < Shape::kVector; ++e) {
      if constexpr (Shape::kVFirst) x[e] = fragment.s[idx / Shape::kColumns][e][idx % Shape::kColumns];
      else x[e] = fragment.s[idx / Shape::kOwned][idx % Shape::kOwned][e];
    }
    uint32_t word[4];
    round_vector<Shape>(x, word);
    if (inside) ptx::st_global_streaming_v4(vector, word);
  });
}

}  // namespace
}  // namespace gdn::cuda
