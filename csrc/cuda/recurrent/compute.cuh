// SPDX-License-Identifier: Apache-2.0
// The computing warps: rule.h, token by token, on the columns that a lane holds.
#pragma once

#include "state.cuh"

namespace gdn::cuda {
namespace {

// The sums of a lane's columns end in different lanes: at every level of the tree two lanes split what both hold, each gives
// the other's half away and adds what it is given to its own. The column whose sum a row group ends with; an odd one out is
// kept by both.
template <class Cut>
__device__ __forceinline__ int column_of_row_group(int row_group) {
  int columns[Cut::kColumns];
#pragma unroll
  for (int i = 0; i < Cut::kColumns; ++i) columns[i] = i;
  int count = Cut::kColumns;
#pragma unroll
  for (int bit = 1; bit < kRowGroups; bit <<= 1) {
    const int kept = (count + 1) / 2;
#pragma unroll
    for (int i = 0; i + kept < count; ++i) {
      if (row_group & bit) columns[i] = columns[i + kept];
    }
    count = kept;
  }
  return columns[0];
}

// The first row group that ends with this column.
template <class Cut>
__device__ __forceinline__ int row_group_of_column(int column) {
  int first = 0;
  for (int row_group = kRowGroups - 1; row_group >= 0; --row_group) {
    if (column_of_row_group<Cut>(row_group) == column) first = row_group;
  }
  return first;
}

// A lane's place in the exchange.
template <class Cut>
struct LaneRole {
  int lane;
  int column;                      // the one of its columns whose sums it ends with
  bool writes_out;                 // it is the first of its column's lanes that does
  int delta_lane[Cut::kColumns];   // the lane that does for each of the columns
};

template <class Cut>
__device__ __forceinline__ LaneRole<Cut> role_of_lane(int lane) {
  LaneRole<Cut> role;
  const int row_group = lane / kColumnGroups;
  role.lane = lane;
  role.column = column_of_row_group<Cut>(row_group);
  role.writes_out = row_group_of_column<Cut>(role.column) == row_group;
#pragma unroll
  for (int c = 0; c < Cut::kColumns; ++c) {
    role.delta_lane[c] = row_group_of_column<Cut>(c) * kColumnGroups + lane % kColumnGroups;
  }
  return role;
}

// Where a lane finds a token in shared memory: its rows of k and q; the scalars and v of the column whose sums it ends
// with, o's place behind v; every head's alpha.
struct LaneSource {
  const float *keys, *scalars;
  float* v;
  const float* alpha;

  __device__ __forceinline__ LaneSource plus(int floats) const {
    return {keys + floats, scalars + floats, v + floats, alpha + floats};
  }
};

template <class Cut>
__device__ __forceinline__ LaneSource source_of_lane(const LaneRole<Cut>& role, const Tiling& tiling, int row_group,
                                                     int column_in_tile, float* smem_tokens) {
  using Layout = TokenLayout<Cut::kSteps>;
  const int head = Cut::kOfHeads ? role.column : 0, v_step = Cut::kOfHeads ? tiling.tile : 1;
  return {smem_tokens + Layout::kKeys + 2 * kRows * row_group,
          smem_tokens + Layout::kScalars + 8 * head, smem_tokens + Layout::kV + column_in_tile + role.column * v_step,
          smem_tokens + Layout::kAlpha};
}

// What a lane needs of one token.
template <class Cut>
struct Operands {
  static constexpr int kAlphas = Cut::kHeads == 3 ? 4 : Cut::kHeads;
  Pack<float, 4> pairs[Cut::kSteps][kRows / 2];   // k k q q
  StepScalars scalars;
  Pack<float, kAlphas> alpha;
  float v;

  __device__ __forceinline__ float k(int j, int i) const { return pairs[j][i / 2].x[i % 2]; }
  __device__ __forceinline__ float q(int j, int i) const { return pairs[j][i / 2].x[2 + i % 2]; }
};

template <class Cut>
__device__ __forceinline__ void read_operands(const LaneSource& source, Operands<Cut>& x) {
#pragma unroll
  for (int j = 0; j < Cut::kSteps; ++j) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      x.pairs[j][i] = *reinterpret_cast<const Pack<float, 4>*>(source.keys + 2 * kResidues * j + 4 * i);
    }
  }
  x.scalars = *reinterpret_cast<const StepScalars*>(source.scalars);
  x.alpha = *reinterpret_cast<const Pack<float, Operands<Cut>::kAlphas>*>(source.alpha);
  x.v = *source.v;
}

// The part of u (with the token's key) or w (with its query) of column c that lies in this lane.
template <bool kOfKey, class Cut>
__device__ __forceinline__ float sum_in_lane(const Operands<Cut>& x, const Fragment<Cut>& fragment, int c) {
  float part[kRows] = {};
#pragma unroll
  for (int j = 0; j < Cut::kSteps; ++j) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      part[i] = accumulate(fragment.s[c][j][i], kOfKey ? x.k(j, i) : x.q(j, i), part[i]);
    }
  }
#pragma unroll
  for (int step = 1; step < kRows; step <<= 1) {
#pragma unroll
    for (int i = 0; i < kRows; i += 2 * step) part[i] = add(part[i], part[i + step]);
  }
  return part[0];
}

// The levels of rule.h's tree that lie across lanes, from kMask up. Whichever of two lanes adds, the pair is the same.
// `meanwhile` is called with 0, 1, .. while a level's values travel.
template <int kMask, int kLevel = 0, int kCount, class Meanwhile>
__device__ __forceinline__ float sum_over_lanes(int lane, const float (&sums)[kCount], Meanwhile&& meanwhile) {
  if constexpr (kMask == 32) {
    static_assert(kCount == 1, "every level halves what a lane holds");
    return sums[0];
  } else {
    constexpr int kKept = (kCount + 1) / 2;
    const bool upper = lane & kMask;
    float kept[kKept], given[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const float lower_half = sums[i], upper_half = sums[i + kKept < kCount ? i + kKept : i];
      given[i] = __shfl_xor_sync(0xffffffffu, upper ? lower_half : upper_half, kMask);
      kept[i] = upper ? upper_half : lower_half;
    }
    meanwhile(kLevel);
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[i] = add(kept[i], given[i]);
    return sum_over_lanes<2 * kMask, kLevel + 1>(lane, kept, meanwhile);
  }
}

// One token. The way from u to the new state is the critical one: w is summed while u travels between the lanes, the state
// decays while f does, and w's own way ends behind the write. If the cut reads ahead, `next` receives the next token's
// operands: behind the shuffles of f, since they share a queue with the reads from shared memory, and under the write. The
// __syncwarp keeps them there.
template <class Cut, bool kReadsNext>
__device__ __forceinline__ void step(const LaneRole<Cut>& role, const Operands<Cut>& x, const LaneSource& source,
                                     Operands<Cut>& next, Fragment<Cut>& fragment) {
  float u_parts[Cut::kColumns], w_parts[Cut::kColumns];
#pragma unroll
  for (int c = 0; c < Cut::kColumns; ++c) u_parts[c] = sum_in_lane<true>(x, fragment, c);
  const float u = sum_over_lanes<kColumnGroups>(role.lane, u_parts, [&](int level) {
#pragma unroll
    for (int c = 0; c < Cut::kColumns; ++c) {
      if (c == level || (c == 3 && level == 2)) w_parts[c] = sum_in_lane<false>(x, fragment, c);
    }
  });

  const StepScalars& scalars = x.scalars;
  const float own_f = write_factor(scalars.neg_alpha_sk, scalars.beta, scalars.sk, u, x.v);
  float f[Cut::kColumns];
#pragma unroll
  for (int c = 0; c < Cut::kColumns; ++c) f[c] = __shfl_sync(0xffffffffu, own_f, role.delta_lane[c]);
#pragma unroll
  for (int c = 0; c < Cut::kColumns; ++c) {
    const float alpha = x.alpha.x[Cut::kOfHeads ? c : 0];
#pragma unroll
    for (int j = 0; j < Cut::kSteps; ++j) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        fragment.s[c][j][i] = write_state(alpha, x.k(j, i), f[c], fragment.s[c][j][i]);
      }
    }
  }
  const float w = sum_over_lanes<kColumnGroups>(role.lane, w_parts, [](int) {});
  if constexpr (kReadsNext) {
    __syncwarp();
    read_operands(source.plus(TokenLayout<Cut::kSteps>::kFloats), next);
  }
  const float o = read_output(scalars.scale_sq, scalars.kq, scalars.alpha, own_f, w);
  if (role.writes_out) source.v[kMaxValues] = o;
}

// Every token of every chunk. A cut that reads ahead has two sets of operands that take turns; behind the last token of a
// half it reads the empty one, for nothing.
// look(tokens done) is called behind every chunk.
template <class Cut, class Look>
__device__ __forceinline__ void run_computing(const Tiling& tiling, int64_t length, const LaneSource& lane_source,
                                              const LaneRole<Cut>& role, Fragment<Cut>& fragment, Look&& look) {
  constexpr int kFloats = TokenLayout<Cut::kSteps>::kFloats;
  for (int64_t first = 0, half = 0; first < length; first += tiling.chunk, half ^= 1) {
    __syncthreads();   // the chunk is staged
    const int count = static_cast<int>(length - first < tiling.chunk ? length - first : tiling.chunk);
    LaneSource source = lane_source.plus(static_cast<int>(half) * (tiling.chunk + 1) * kFloats);
    Operands<Cut> even, odd;
    if constexpr (Cut::kReadsAhead) {
      read_operands(source, even);
      for (int i = 0; i < count; i += 2) {
        step<Cut, true>(role, even, source, odd, fragment);
        if (i + 1 == count) break;
        step<Cut, true>(role, odd, source.plus(kFloats), even, fragment);
        source = source.plus(2 * kFloats);
      }
    } else {
      for (int i = 0; i < count; ++i, source = source.plus(kFloats)) {
        read_operands(source, even);
        step<Cut, false>(role, even, source, odd, fragment);
      }
    }
    look(first + count);
  }
  __syncthreads();   // for the staging warps: the last chunk is computed
}

}  // namespace
}  // namespace gdn::cuda
