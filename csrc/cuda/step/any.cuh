// SPDX-License-Identifier: Apache-2.0
//
// A gated delta net layer between its projections where the clustered kernel does not fit: any arch, 1 to 8 tokens, any head
// dims up to 256, any strides and mix of dtypes. The same operations in the same order.
// Grid    x: row (slowest), key head. A block has all that a key head's windows are read for, so nobody else touches them.
// Block   the value heads of the group one after the other, 32 columns of S at a time: lane = column, a warp holds the rows
//         of eight residues, in shared memory and fp32 for all tokens.
// Reads   everything once, element by element.   Writes out, windows, S once.
#pragma once

#include "../../common/conv.h"
#include "../../common/gates.h"
#include "../../common/params.h"
#include "../ptx/pdl.cuh"

namespace gdn::cuda {
namespace {

constexpr int kAnyThreads = 128, kAnyWarps = kAnyThreads / 32, kAnyTile = 32;
constexpr int kOwnedResidues = kResidues / kAnyWarps;

// Shared memory, in floats from its start.
struct AnySmem {
  int q, k, v, o, scalars, norms, sums, state, floats;

  GDN_INLINE explicit AnySmem(const Dims& d) {
    const int T = static_cast<int>(d.T), K = static_cast<int>(d.K), V = static_cast<int>(d.V);
    scalars = 0;                                   // [T] StepScalars of the value head, 16-byte aligned
    norms = scalars + 8 * T;                       // [T] sk, sq, kq of the key head
    q = norms + 4 * T;                             // [T][K]
    k = q + T * K;
    v = k + T * K;                                 // [T][V]
    o = v + T * V;
    sums = o + T * V;                              // [2][warp][u, w][kAnyTile]
    state = sums + 2 * kAnyWarps * 2 * kAnyTile;   // [K][kAnyTile]
    floats = state + K * kAnyTile;
  }
};

// `count` channels of the row from `channel` on, x: the first of them; results to smem [T][count].
__device__ __forceinline__ void convolve_any(const StepParams& p, int64_t slot, const View& x, int64_t channel, int count,
                                             float* smem) {
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kAnyThreads) {
    const int64_t c = channel + i;
    const int window = static_cast<int>(p.window), width = static_cast<int>(p.width);
    ConvTaps taps;
    taps.bias = p.conv_bias.given() ? p.conv_bias.load(p.conv_bias.offset(c)) : 0.0f;
#pragma unroll
    for (int j = 0; j < kMaxTaps; ++j) {
      const int column = j - (kMaxTaps - window), tap = j - (kMaxTaps - width);
      taps.past[j] = column >= 0 ? p.conv_state.load(p.conv_state.offset(slot, c, column)) : 0.0f;
      taps.weight[j] = tap >= 0 ? p.conv_weight.load(p.conv_weight.offset(c, tap)) : 0.0f;
    }
    for (int t = 0; t < p.dims.T; ++t) {
      const float y = silu(taps.push(x.load(x.offset(0, t, 0, i)), width));
      smem[t * count + i] = rounded_to(y, x.dtype);
    }
#pragma unroll
    for (int j = 0; j < kMaxTaps; ++j) {
      const int column = j - (kMaxTaps - window);
      if (column >= 0) p.conv_state.store(p.conv_state.offset(slot, c, column), taps.past[j]);
    }
  }
}

// The tree over 32 lanes, lane = residue.
__device__ __forceinline__ float sum_of_residues(float partial) {
#pragma unroll
  for (int mask = 1; mask < 32; mask <<= 1) partial = add(partial, __shfl_xor_sync(0xffffffffu, partial, mask));
  return partial;
}

// sk, sq and kq of each token, a warp a token.
__device__ __forceinline__ void norms_any(const StepParams& p, const AnySmem& at, float* smem) {
  const int lane = threadIdx.x % 32, K = static_cast<int>(p.dims.K);
#pragma unroll 1
  for (int t = threadIdx.x / 32; t < p.dims.T; t += kAnyWarps) {
    const float *q = smem + at.q + t * K, *k = smem + at.k + t * K;
    float kk = 0.0f, qq = 0.0f, kq = 0.0f;
    for (int i = lane; i < K; i += 32) {
      kk = accumulate(k[i], k[i], kk);
      qq = accumulate(q[i], q[i], qq);
      kq = accumulate(k[i], q[i], kq);
    }
    kk = sum_of_residues(kk);
    qq = sum_of_residues(qq);
    kq = sum_of_residues(kq);
    if (lane == 0) {
      smem[at.norms + 4 * t] = l2norm_factor(kk);
      smem[at.norms + 4 * t + 1] = l2norm_factor(qq);
      smem[at.norms + 4 * t + 2] = kq;
    }
  }
}

__device__ __forceinline__ void scalars_any(const StepParams& p, const AnySmem& at, int64_t n, int64_t hk, int m, float* smem) {
  const int t = threadIdx.x;
  if (t >= p.dims.T) return;
  const int64_t h = hk * p.group() + m;
  const float g = log_decay(p.a.view.load(p.a.offset(n, t, hk, m)), p.A_log.load(p.A_log.offset(h)),
                            p.dt_bias.load(p.dt_bias.offset(h)));
  const float beta = write_strength(p.b.view.load(p.b.offset(n, t, hk, m)), p.allow_neg_eigval);
  const float* norms = smem + at.norms + 4 * t;
  reinterpret_cast<StepScalars*>(smem + at.scalars)[t] = step_scalars(exp(g), beta, p.scale, norms[0], norms[1], norms[2]);
}

// u and w of the thread's column: its residues, then the warps'. One barrier; tokens take turns with two buffers.
__device__ __forceinline__ void sums_any(const float* q, const float* k, const float* smem_state, int K, float* smem_sums,
                                         float& u, float& w) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kOwnedResidues;
  float part_u[kOwnedResidues] = {}, part_w[kOwnedResidues] = {};
#pragma unroll 1
  for (int base = first; base < K; base += kResidues) {
#pragma unroll
    for (int e = 0; e < kOwnedResidues; ++e) {
      if (base + e >= K) break;
      const float s = smem_state[(base + e) * kAnyTile + lane];
      part_u[e] = accumulate(s, k[base + e], part_u[e]);
      part_w[e] = accumulate(s, q[base + e], part_w[e]);
    }
  }
#pragma unroll
  for (int width = 1; width < kOwnedResidues; width *= 2) {
#pragma unroll
    for (int e = 0; e < kOwnedResidues; e += 2 * width) {
      part_u[e] = add(part_u[e], part_u[e + width]);
      part_w[e] = add(part_w[e], part_w[e + width]);
    }
  }
  float* const mine = smem_sums + threadIdx.x / 32 * 2 * kAnyTile + lane;
  mine[0] = part_u[0];
  mine[kAnyTile] = part_w[0];
  __syncthreads();
  const float* sum = smem_sums + lane;
  constexpr int kWarp = 2 * kAnyTile;
  u = add(add(sum[0], sum[kWarp]), add(sum[2 * kWarp], sum[3 * kWarp]));
  sum += kAnyTile;
  w = add(add(sum[0], sum[kWarp]), add(sum[2 * kWarp], sum[3 * kWarp]));
}

// All tokens on columns [column, column + kAnyTile) of a head's state; gmem: the head's.
__device__ __forceinline__ void tile_any(const StepParams& p, const AnySmem& at, int64_t state, int column, float* smem) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kOwnedResidues;
  const int K = static_cast<int>(p.dims.K), V = static_cast<int>(p.dims.V), own = column + lane;
  float* const smem_state = smem + at.state;
  const auto visit_rows = [&](auto&& visit) {   // the thread's rows: nobody else reads or writes them
#pragma unroll 1
    for (int base = first; base < K; base += kResidues) {
      for (int row = base; row < base + kOwnedResidues && row < K; ++row) visit(row);
    }
  };
  visit_rows([&](int row) {
    smem_state[row * kAnyTile + lane] = own < V ? p.state.load(state + p.state.offset(0, 0, row, own)) : 0.0f;
  });
#pragma unroll 1
  for (int t = 0; t < p.dims.T; ++t) {
    const StepScalars scalars = reinterpret_cast<const StepScalars*>(smem + at.scalars)[t];
    const float *q = smem + at.q + t * K, *k = smem + at.k + t * K;
    float u, w;
    sums_any(q, k, smem_state, K, smem + at.sums + t % 2 * kAnyWarps * 2 * kAnyTile, u, w);
    const float v = own < V ? smem[at.v + t * V + own] : 0.0f;
    const float f = write_factor(scalars.neg_alpha_sk, scalars.beta, scalars.sk, u, v);
    if (first == 0 && own < V) {
      smem[at.o + t * V + own] = read_output(scalars.scale_sq, scalars.kq, scalars.alpha, f, w);
    }
    visit_rows([&](int row) {
      float& s = smem_state[row * kAnyTile + lane];
      s = write_state(scalars.alpha, k[row], f, s);
    });
  }
  visit_rows([&](int row) {
    if (own < V) p.state.store(state + p.state.offset(0, 0, row, own), smem_state[row * kAnyTile + lane]);
  });
}

// The gated norm of o [T][V], a warp a token.
__device__ __forceinline__ void norm_any(const StepParams& p, int64_t n, int64_t hk, int m, const float* smem_o) {
  const int lane = threadIdx.x % 32, V = static_cast<int>(p.dims.V);
#pragma unroll 1
  for (int t = threadIdx.x / 32; t < p.dims.T; t += kAnyWarps) {
    const float* o = smem_o + t * V;
    const int64_t gmem_z = p.z.offset(n, t, hk, m), gmem_out = p.out.offset(n, t, hk, m);
    const auto gate_at = [&](int i) {
      return activate_gate(p.z.view.load(gmem_z + i * p.z.view.stride[3]), p.use_silu);
    };
    float sum = 0.0f;
    for (int i = lane; i < V; i += 32) {
      const float y = p.norm_before_gate ? o[i] : mul(o[i], gate_at(i));
      sum = fma(y, y, sum);
    }
    const float factor = rms_factor(sum_of_residues(sum), static_cast<float>(V), p.eps);
    for (int i = lane; i < V; i += 32) {
      const float gate = gate_at(i), weight = p.norm_weight.load(p.norm_weight.offset(i));
      const float value = normed(p.norm_before_gate ? o[i] : mul(o[i], gate), factor, weight);
      p.out.view.store(gmem_out + i * p.out.view.stride[3], p.norm_before_gate ? mul(value, gate) : value);
    }
  }
}

__device__ __forceinline__ void zero_any(const StepParams& p, int64_t n, int64_t hk) {
  const int V = static_cast<int>(p.dims.V), values = static_cast<int>(p.group()) * V;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.dims.T * values; i += kAnyThreads) {
    const int t = i / values, rest = i - t * values;
    p.out.view.store(p.out.offset(n, t, hk, rest / V, rest % V), 0.0f);
  }
}

__global__ void __launch_bounds__(kAnyThreads) step_any(const __grid_constant__ StepParams p, int64_t num_blocks) {
  extern __shared__ float4 smem_words[];
  float* const smem = reinterpret_cast<float*>(smem_words);
  const Dims& d = p.dims;
  const AnySmem at(d);
  ptx::griddepcontrol_wait();
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const int64_t n = block / d.Hk, hk = block - n * d.Hk, slot = slot_of_row(p.slots, n, p.pool);
    if (slot < 0) {
      zero_any(p, n, hk);
      continue;
    }
    convolve_any(p, slot, p.q.from(p.q.offset(n, 0, hk)), p.q_channel(hk), static_cast<int>(d.K), smem + at.q);
    convolve_any(p, slot, p.k.from(p.k.offset(n, 0, hk)), p.k_channel(hk), static_cast<int>(d.K), smem + at.k);
    __syncthreads();   // q and k are there
    norms_any(p, at, smem);
#pragma unroll 1
    for (int m = 0; m < p.group(); ++m) {
      const int64_t h = hk * p.group() + m;
      convolve_any(p, slot, p.v.view.from(p.v.offset(n, 0, hk, m)), p.v_channel(h), static_cast<int>(d.V), smem + at.v);
      __syncthreads();   // v and the key head's norms are there
      scalars_any(p, at, n, hk, m, smem);
      __syncthreads();   // and the scalars
#pragma unroll 1
      for (int column = 0; column < d.V; column += kAnyTile) {
        tile_any(p, at, p.state.offset(slot, h), column, smem);
        __syncthreads();   // o of these columns is there, and nobody reads their sums any more
      }
      norm_any(p, n, hk, m, smem + at.o);
    }
    __syncthreads();   // nobody reads q and k any more
  }
}

}  // namespace
}  // namespace gdn::cuda
