// SPDX-License-Identifier: Apache-2.0
// What a thread of the clustered step loads before it computes: its channel of the convolution, its head's gates, its column
// of the norm. All as stored, widened only when used: the loads are in flight together, ahead of the state's.
#pragma once

#include "../../common/conv.h"
#include "../../common/gates.h"
#include "../tile/pack.cuh"
#include "call.cuh"

namespace gdn::cuda {
namespace {

// Where a block works: row n, key head, its value head, first column of its tile, rank in the cluster.
struct StepWork {
  int n, key_head, member, column, rank;
  int64_t slot;
};

__device__ __forceinline__ char* element(const Heads& heads, const StepWork& work, int i) {
  return heads.data + wide(work.n, heads.row) + wide(work.key_head, heads.head) + wide(work.member, heads.member) +
         wide(i, heads.element);
}
__device__ __forceinline__ const char* element(const Matrix& vector, int i) { return vector.data + wide(i, vector.row); }

// A row of up to four elements, right-aligned.
__device__ __forceinline__ void load_row(const Matrix& matrix, const char* gmem, uint32_t (&bits)[kMaxTaps]) {
  if (matrix.is_packed) {
    if (matrix.dtype == DType::kFloat32) {
      const auto words = *reinterpret_cast<const Words<16>*>(gmem);
#pragma unroll
      for (int j = 0; j < kMaxTaps; ++j) bits[j] = words.word[j];
    } else {
      const auto words = *reinterpret_cast<const Words<8>*>(gmem);
#pragma unroll
      for (int j = 0; j < kMaxTaps; ++j) bits[j] = words.word[j / 2] >> (16 * (j % 2)) & 0xffffu;
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kMaxTaps; ++j) {
    const int i = j - (kMaxTaps - matrix.columns);
    bits[j] = i >= 0 ? load_bits(gmem + i * matrix.column, matrix.dtype, 0) : 0u;
  }
}

__device__ __forceinline__ void store_row(const Matrix& matrix, char* gmem, const float (&x)[kMaxTaps]) {
  if (matrix.is_packed) {
    if (matrix.dtype == DType::kFloat32) store_pack<float, 4>(reinterpret_cast<float*>(gmem), x);
    else if (matrix.dtype == DType::kBFloat16) store_pack<bf16_t, 4>(reinterpret_cast<bf16_t*>(gmem), x);
    else store_pack<fp16_t, 4>(reinterpret_cast<fp16_t*>(gmem), x);
    return;
  }
#pragma unroll
  for (int j = 0; j < kMaxTaps; ++j) {
    const int i = j - (kMaxTaps - matrix.columns);
    if (i >= 0) store_float(gmem + i * matrix.column, matrix.dtype, 0, x[j]);
  }
}

// A thread's channel: threads below `tile` have the block's value columns; the cluster's blocks share out q | k, 2 K
// channels in runs of `per_block`, from thread `tile` on.
struct Channel {
  int key_channel;       // in q | k of the key head; below 0: none of those
  bool is_value;
  char* window;
  uint32_t x, bias, weight[kMaxTaps], past[kMaxTaps];

  __device__ __forceinline__ bool is_any() const { return is_value || key_channel >= 0; }

  __device__ __forceinline__ void load(const StepCall& call, const StepWork& work, int key_dim, int tile, int per_block) {
    const int thread = static_cast<int>(threadIdx.x), run = thread - tile;
    is_value = run < 0;
    key_channel = run >= 0 && run < per_block && work.rank * per_block + run < 2 * key_dim ? work.rank * per_block + run : -1;
    if (!is_any()) return;
    const bool is_k = key_channel >= key_dim;
    const int i = is_value ? work.column + thread : key_channel - (is_k ? key_dim : 0);
    const int first = is_value ? 2 * call.key_heads * key_dim + (work.key_head * call.group + work.member) * call.V
                               : ((is_k ? call.key_heads : 0) + work.key_head) * key_dim;
    const Heads& heads = is_value ? call.v : (is_k ? call.k : call.q);
    window = call.window.data + work.slot * call.window_slot + wide(first + i, call.window.row);
    x = load_bits(element(heads, work, i), call.q.dtype, 0);
    load_row(call.window, window, past);
    load_row(call.conv_weight, element(call.conv_weight, first + i), weight);
    bias = call.conv_bias.data != nullptr ? load_bits(element(call.conv_bias, first + i), call.conv_bias.dtype, 0) : 0u;
  }

  // The channel's q, k or v, as a tensor of the projection's dtype would hold it; the window moves on, in memory.
  __device__ __forceinline__ float convolve(const StepCall& call) const {
    ConvTaps taps;
    taps.bias = call.conv_bias.data != nullptr ? widen_bits(bias, call.conv_bias.dtype) : 0.0f;
#pragma unroll
    for (int j = 0; j < kMaxTaps; ++j) {
      taps.past[j] = widen_bits(past[j], call.window.dtype);
      taps.weight[j] = widen_bits(weight[j], call.conv_weight.dtype);
    }
    const float y = silu(taps.push(widen_bits(x, call.q.dtype), call.width));
    store_row(call.window, window, taps.past);
    return rounded_to(y, call.q.dtype);
  }
};

// The gates of the block's value head.
struct Gates {
  uint32_t a, b, A_log, dt_bias;

  __device__ __forceinline__ void load(const StepCall& call, const StepWork& work) {
    const int head = work.key_head * call.group + work.member;
    a = load_bits(element(call.a, work, 0), call.a.dtype, 0);
    b = load_bits(element(call.b, work, 0), call.b.dtype, 0);
    A_log = load_bits(element(call.A_log, head), call.A_log.dtype, 0);
    dt_bias = load_bits(element(call.dt_bias, head), call.dt_bias.dtype, 0);
  }
  __device__ __forceinline__ float alpha(const StepCall& call) const {
    return exp(log_decay(widen_bits(a, call.a.dtype), widen_bits(A_log, call.A_log.dtype),
                         widen_bits(dt_bias, call.dt_bias.dtype)));
  }
  __device__ __forceinline__ float beta(const StepCall& call) const {
    return write_strength(widen_bits(b, call.b.dtype), call.allow_neg_eigval);
  }
};

// A column of the norm.
struct NormColumn {
  uint32_t z, weight;

  __device__ __forceinline__ void load(const StepCall& call, const StepWork& work, int column) {
    z = load_bits(element(call.z, work, column), call.z.dtype, 0);
    weight = load_bits(element(call.norm_weight, column), call.norm_weight.dtype, 0);
  }
};

}  // namespace
}  // namespace gdn::cuda
