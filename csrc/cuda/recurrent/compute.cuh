// SPDX-License-Identifier: Apache-2.0
// The computing warps: rule.h, token by token, on the columns that a lane holds.
#pragma once

#include "state.cuh"

namespace gdn::cuda {
namespace {

// What a lane needs of one token.
template <int kSteps, int kColumns>
struct Operands {
  static constexpr int kHeads = Columns<kColumns>::kOfHeads ? kColumns : 1;
  Quad<float> k[kSteps], q[kSteps];
  StepScalars scalars[kHeads];
  float v[kColumns];
};

// Where it stands in shared memory: the lane's rows of k, its v and the scalars of the block's first head; the step from a
// column's v to the next one's.
struct LaneSource {
  const float *k, *scalars;
  float* v;
  int v_step;

  __device__ __forceinline__ void advance(int floats) {
    k += floats;
    scalars += floats;
    v += floats;
  }
};

template <int kSteps, int kColumns>
__device__ __forceinline__ Operands<kSteps, kColumns> read_operands(const LaneSource& source) {
  Operands<kSteps, kColumns> x;
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    x.k[j] = *reinterpret_cast<const Quad<float>*>(source.k + 32 * j);
    x.q[j] = *reinterpret_cast<const Quad<float>*>(source.k + 32 * (kSteps + j));
  }
#pragma unroll
  for (int h = 0; h < x.kHeads; ++h) x.scalars[h] = *reinterpret_cast<const StepScalars*>(source.scalars + 8 * h);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) x.v[c] = source.v[c * source.v_step];
  return x;
}

// u and w of this lane's columns: the sums over K of the old state with the token's key and query.
template <int kSteps, int kColumns>
__device__ __forceinline__ void sum_over_keys(const Operands<kSteps, kColumns>& x,
                                              const Fragment<kSteps, kColumns>& fragment, float (&u)[kColumns],
                                              float (&w)[kColumns]) {
  float u_part[kColumns][kRowsPerGroup] = {}, w_part[kColumns][kRowsPerGroup] = {};
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < kRowsPerGroup; ++i) {
        u_part[c][i] = accumulate(fragment.s[c][j][i], x.k[j].x[i], u_part[c][i]);
        w_part[c][i] = accumulate(fragment.s[c][j][i], x.q[j].x[i], w_part[c][i]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    u[c] = add(add(u_part[c][0], u_part[c][1]), add(u_part[c][2], u_part[c][3]));
    w[c] = add(add(w_part[c][0], w_part[c][1]), add(w_part[c][2], w_part[c][3]));
  }
#pragma unroll
  for (int mask = kColumnGroups; mask < 32; mask <<= 1) {   // the upper levels of rule.h's tree, all sums side by side
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      u[c] = add(u[c], __shfl_xor_sync(0xffffffffu, u[c], mask));
      w[c] = add(w[c], __shfl_xor_sync(0xffffffffu, w[c], mask));
    }
  }
}

// Delta, write and read on this lane's columns; o takes the place of v in shared memory.
template <int kSteps, int kColumns>
__device__ __forceinline__ void write_and_read(const Operands<kSteps, kColumns>& x, const LaneSource& source,
                                               int row_group, const float (&u)[kColumns], const float (&w)[kColumns],
                                               Fragment<kSteps, kColumns>& fragment) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const StepScalars& scalars = x.scalars[x.kHeads == 1 ? 0 : c];
    const float f = write_factor(scalars.neg_alpha_sk, scalars.beta, scalars.sk, u[c], x.v[c]);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
#pragma unroll
      for (int i = 0; i < kRowsPerGroup; ++i) {
        fragment.s[c][j][i] = write_state(scalars.alpha, x.k[j].x[i], f, fragment.s[c][j][i]);
      }
    }
    const float o = read_output(scalars.scale_sq, scalars.kq, scalars.alpha, f, w[c]);
    if (row_group == c) source.v[c * source.v_step] = o;   // all eight lanes of the column hold o
  }
}

// One token. `ahead` receives the operands of the token at next_source: behind the shuffles, which share a queue with the
// loads from shared memory, and under the arithmetic of the write. The __syncwarp keeps them there; it also stands between
// the lanes that have read a v and the one that writes o over it.
template <int kSteps, int kColumns>
__device__ __forceinline__ void step(const Operands<kSteps, kColumns>& x, const LaneSource& source,
                                     const LaneSource& next_source, int row_group, Operands<kSteps, kColumns>& ahead,
                                     Fragment<kSteps, kColumns>& fragment) {
  float u[kColumns], w[kColumns];
  sum_over_keys<kSteps, kColumns>(x, fragment, u, w);
  __syncwarp();
  ahead = read_operands<kSteps, kColumns>(next_source);
  write_and_read<kSteps, kColumns>(x, source, row_group, u, w, fragment);
}

// Every token of every chunk. With few columns the operands are read a token ahead, into two sets that take turns. Behind a
// chunk's last token they are read once more from itself, for nothing: what follows is still being staged.
template <int kSteps, int kColumns>
__device__ __forceinline__ void run_computing(const Tiling& tiling, const TokenLayout& layout, int64_t length,
                                              const LaneSource& lane_source, int row_group,
                                              Fragment<kSteps, kColumns>& fragment) {
  constexpr bool kReadsAhead = kColumns * kSteps <= 12;
  for (int64_t first = 0, half = 0; first < length; first += tiling.chunk, half ^= 1) {
    __syncthreads();
    const int count = static_cast<int>(length - first < tiling.chunk ? length - first : tiling.chunk);
    LaneSource source = lane_source, next_source;
    source.advance(static_cast<int>(half) * tiling.chunk * layout.floats);
    Operands<kSteps, kColumns> even = read_operands<kSteps, kColumns>(source), odd;
    if constexpr (kReadsAhead) {
      for (int i = 0; i < count; i += 2) {
        next_source = source;
        next_source.advance(i + 1 < count ? layout.floats : 0);
        step<kSteps, kColumns>(even, source, next_source, row_group, odd, fragment);
        if (i + 1 >= count) break;
        source = next_source;
        source.advance(i + 2 < count ? layout.floats : 0);
        step<kSteps, kColumns>(odd, next_source, source, row_group, even, fragment);
      }
    } else {
      float u[kColumns], w[kColumns];
      for (int i = 0; i < count; ++i, source.advance(layout.floats)) {
        if (i > 0) even = read_operands<kSteps, kColumns>(source);
        sum_over_keys<kSteps, kColumns>(even, fragment, u, w);
        __syncwarp();   // every lane of a column has read v before one writes o over it
        write_and_read<kSteps, kColumns>(even, source, row_group, u, w, fragment);
      }
    }
  }
  __syncthreads();   // for the staging warps: the last chunk is computed
}

}  // namespace
}  // namespace gdn::cuda
