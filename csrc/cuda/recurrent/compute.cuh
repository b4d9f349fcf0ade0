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
  return {smem_tokens + Layout::kKeys + kRows * row_group, smem_tokens + Layout::kScalars + 8 * head,
          smem_tokens + Layout::kV + column_in_tile + role.column * v_step, smem_tokens + Layout::kAlpha};
}

// What a lane needs of one token.
template <class Cut>
struct Operands {
  static constexpr int kAlphas = Cut::kHeads == 3 ? 4 : Cut::kHeads;
  Pack<float, kRows> k[Cut::kSteps], q[Cut::kSteps];
  StepScalars scalars;
  Pack<float, kAlphas> alpha;
  float v;
};

template <class Cut>
__device__ __forceinline__ void read_operands(const LaneSource& source, Operands<Cut>& x) {
  const auto* const k = reinterpret_cast<const Pack<float, kRows>*>(source.keys);
  const auto* const q = reinterpret_cast<const Pack<float, kRows>*>(source.keys + TokenLayout<Cut::kSteps>::kQueries);
#pragma unroll
  for (int j = 0; j < Cut::kSteps; ++j) x.k[j] = k[kRowGroups * j];
#pragma unroll
  for (int j = 0; j < Cut::kSteps; ++j) x.q[j] = q[kRowGroups * j];
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
      part[i] = accumulate(fragment.s[c][j][i], kOfKey ? x.k[j].x[i] : x.q[j].x[i], part[i]);
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

// A token's o on its way: the lane's parts of w, what else o needs, where it goes.
template <class Cut>
struct Output {
  float w_parts[Cut::kColumns];
  float scale_sq, kq, alpha, f;
  float* smem;
};

template <class Cut>
__device__ __forceinline__ void finish(const LaneRole<Cut>& role, const Output<Cut>& output) {
  const float w = sum_over_lanes<kColumnGroups>(role.lane, output.w_parts, [](int) {});
  const float o = read_output(output.scale_sq, output.kq, output.alpha, output.f, w);
  if (role.writes_out) *output.smem = o;
}

// One token. The way from u to the new state is the critical one: w is summed while u travels between the lanes, the state
// decays while f does. If the cut overlaps tokens, the w of the token before ends (`output`) while this one's u is summed, and
// `next` receives the operands at `next_source`: behind the shuffles of f, since reads from shared memory share a queue with
// them, and under the write. The two __syncwarp keep them there, before the second column's; where a chunk begins, the barrier
// stands before them.
template <class Cut>
__device__ __forceinline__ void step(const Tiling& tiling, const LaneRole<Cut>& role, const Operands<Cut>& x,
                                     float* smem_out, const LaneSource& next_source, bool begins_chunk,
                                     Operands<Cut>& next, Fragment<Cut>& fragment, Output<Cut>& output) {
  float u_parts[Cut::kColumns], w_parts[Cut::kColumns];
#pragma unroll
  for (int c = 0; c < Cut::kColumns; ++c) u_parts[c] = sum_in_lane<true>(x, fragment, c);
  if constexpr (Cut::kOverlaps) finish(role, output);
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
  output = {{}, scalars.scale_sq, scalars.kq, scalars.alpha, own_f, smem_out};
#pragma unroll
  for (int c = 0; c < Cut::kColumns; ++c) output.w_parts[c] = w_parts[c];
  if (begins_chunk) wait_for_chunk(tiling);
  if constexpr (Cut::kOverlaps) {
    __syncwarp();
    read_operands(next_source, next);
  }
#pragma unroll
  for (int c = 0; c < Cut::kColumns; ++c) {
    const float alpha = x.alpha.x[Cut::kOfHeads ? c : 0];
#pragma unroll
    for (int j = 0; j < Cut::kSteps; ++j) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        fragment.s[c][j][i] = write_state(alpha, x.k[j].x[i], f[c], fragment.s[c][j][i]);
      }
    }
    if (Cut::kOverlaps && c == 0) __syncwarp();
  }
  if constexpr (!Cut::kOverlaps) finish(role, output);
}

// Every token of every chunk (at least one), one after the other. Where the cut keeps checkpoints, look(tokens done) is called
// behind each chunk.
template <class Cut, class Look>
__device__ __forceinline__ void run_in_turn(const Tiling& tiling, int64_t length, const LaneSource& lane_source,
                                            const LaneRole<Cut>& role, Fragment<Cut>& fragment, Look&& look) {
  constexpr int kFloats = TokenLayout<Cut::kSteps>::kFloats;
  const int chunk = tiling.chunk * kFloats;
  Operands<Cut> x;
  Output<Cut> output;
  int place = 0;   // of the chunk in shared memory
  for (int64_t first = 0; first < length; first += tiling.chunk) {
    wait_for_chunk(tiling);
    say_begun(tiling);
    LaneSource source = lane_source.plus(place);
    const int count = static_cast<int>(length - first < tiling.chunk ? length - first : tiling.chunk);
    for (int i = 0; i < count; ++i, source = source.plus(kFloats)) {
      read_operands(source, x);
      step(tiling, role, x, source.v + kMaxValues, source, false, x, fragment, output);
    }
    place = place + chunk < kRing * chunk ? place + chunk : 0;
    if constexpr (Cut::kKeeps) look(first + count);
  }
}

// The same with tokens that overlap, two a turn, for the two sets of operands. Behind the last token another one's place is
// read, for nothing; the o before the first goes to the unused place.
template <class Cut>
__device__ __forceinline__ void run_overlapped(const Tiling& tiling, int64_t length, const LaneSource& lane_source,
                                               const LaneRole<Cut>& role, Fragment<Cut>& fragment) {
  constexpr int kFloats = TokenLayout<Cut::kSteps>::kFloats;
  const int ring = kRing * tiling.chunk;
  LaneSource source = lane_source;
  Operands<Cut> even, odd;
  Output<Cut> output = {};
  output.smem = source.v + ring * kFloats + kMaxValues;
  wait_for_chunk(tiling);
  read_operands(source, even);
  int64_t left = length;
  int left_of_chunk = tiling.chunk, left_of_ring = ring;
  for (; left > 1; left -= 2) {
    if (left_of_chunk == tiling.chunk) say_begun(tiling);
    const LaneSource second = source.plus(kFloats);
    step(tiling, role, even, source.v + kMaxValues, second, false, odd, fragment, output);
    left_of_chunk -= 2;
    left_of_ring -= 2;
    source = source.plus(left_of_ring > 0 ? 2 * kFloats : (2 - ring) * kFloats);
    const bool begins_chunk = left_of_chunk == 0 && left > 2;
    if (left_of_chunk == 0) left_of_chunk = tiling.chunk;
    if (left_of_ring == 0) left_of_ring = ring;
    step(tiling, role, odd, second.v + kMaxValues, source, begins_chunk, even, fragment, output);
  }
  if (left > 0) {
    if (left_of_chunk == tiling.chunk) say_begun(tiling);
    step(tiling, role, even, source.v + kMaxValues, source, false, odd, fragment, output);
  }
  finish(role, output);
}

template <class Cut, class Look>
__device__ __forceinline__ void run_computing(const Tiling& tiling, int64_t length, const LaneSource& lane_source,
                                              const LaneRole<Cut>& role, Fragment<Cut>& fragment, Look&& look) {
  if constexpr (Cut::kOverlaps) run_overlapped(tiling, length, lane_source, role, fragment);
  else run_in_turn(tiling, length, lane_source, role, fragment, look);
  wait_for_chunk(tiling);   // for the staging warps: everything is computed
  say_begun(tiling);
}

}  // namespace
}  // namespace gdn::cuda
