// SPDX-License-Identifier: Apache-2.0
// What a thread of the clustered step loads before it computes: its channel of the convolution, its head's gates, its column
// of the norm. All as stored, widened only when used. What the convolution takes comes by cp.async, ahead of the state, so
// that no load waits for another.
#pragma once

#include "../../common/conv.h"
#include "../../common/gates.h"
#include "../ptx/cp_async.cuh"
#include "../tile/pack.cuh"
#include "../tile/word.cuh"
#include "call.cuh"

namespace gdn::cuda {
namespace {

// Where a block works: row n, key head, its value head, first column of its tile, rank in the cluster; slot of both memories.
struct StepWork {
  int n, key_head, member, column, rank, slot;
};

__device__ __forceinline__ char* element(const Heads& heads, const StepWork& work, int i) {
  return heads.data + wide(work.n, heads.row) + (work.key_head * heads.head + work.member * heads.member + i * heads.element);
}
__device__ __forceinline__ const char* element(const Vector& vector, int i) { return vector.data + i * vector.step; }

// A row of up to four elements to 16 bytes of shared memory, as stored and right-aligned among four; what stands before it is
// left as it is.
__device__ __forceinline__ void copy_row(const Rows& rows, const char* gmem, float* smem) {
  const int missing = kMaxTaps - rows.columns;
  const uint32_t to = ptx::shared_address(smem);
  if (rows.is_packed) {
    if (rows.dtype == DType::kFloat32) ptx::cp_async_ca<16>(to, gmem);
    else ptx::cp_async_ca<8>(to, gmem);
  } else if (rows.dtype == DType::kFloat32) {
#pragma unroll
    for (int j = 0; j < kMaxTaps; ++j) {
      if (j >= missing) ptx::cp_async_ca<4>(to + 4 * j, gmem + 4 * (j - missing));
    }
  } else {
    uint16_t* const halves = reinterpret_cast<uint16_t*>(smem);
#pragma unroll
    for (int j = 0; j < kMaxTaps; ++j) {
      if (j >= missing) halves[j] = reinterpret_cast<const uint16_t*>(gmem)[j - missing];
    }
  }
}

__device__ __forceinline__ void read_row(DType dtype, const float* smem, float (&x)[kMaxTaps]) {
  if (dtype == DType::kFloat32) {
    load_floats<kMaxTaps>(smem, x);
    return;
  }
  const auto words = *reinterpret_cast<const Words<8>*>(smem);
  if (dtype == DType::kBFloat16) unpack<bf16_t, kMaxTaps>(words, x);
  else unpack<fp16_t, kMaxTaps>(words, x);
}

__device__ __forceinline__ void store_row(const Rows& rows, char* gmem, const float (&x)[kMaxTaps]) {
  const int missing = kMaxTaps - rows.columns;
  if (rows.dtype == DType::kFloat32) {
    gmem -= 4 * missing;
#pragma unroll
    for (int j = 0; j < kMaxTaps; ++j) {
      if (j >= missing) *reinterpret_cast<float*>(gmem + 4 * j) = x[j];
    }
    return;
  }
  const bool is_bf16 = rows.dtype == DType::kBFloat16;
  uint32_t pair[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    pair[j] = is_bf16 ? round_pair(x[2 * j], x[2 * j + 1], bf16_t{}) : round_pair(x[2 * j], x[2 * j + 1], fp16_t{});
  }
  if (rows.is_packed) {
    *reinterpret_cast<Words<8>*>(gmem) = {pair[0], pair[1]};
    return;
  }
  gmem -= 2 * missing;
#pragma unroll
  for (int j = 0; j < kMaxTaps; ++j) {
    if (j >= missing) *reinterpret_cast<uint16_t*>(gmem + 2 * j) = static_cast<uint16_t>(pair[j / 2] >> (16 * (j % 2)));
  }
}

// A thread's channel: threads below `tile` have the block's value columns; the cluster's blocks share out q | k, 2 K
// channels in runs of `per_block`, from thread `tile` on.
struct Channel {
  int key_channel;       // in q | k of the key head; below 0: none of those
  bool is_value;
  int number, in_row;    // among all channels; bytes from the start of the row of x

  // What its copies take of shared memory, in floats: window and weights of four elements a thread, x and bias of a word.
  GDN_INLINE static int row_floats(DType dtype) { return kMaxTaps * dtype_size(dtype) / 4; }
  static int floats(const StepCall& call, int threads) {
    return (row_floats(call.window.dtype) + row_floats(call.weight.dtype) + 2) * threads;
  }
  struct Smem {
    float *window, *weight, *x, *bias;

    __device__ __forceinline__ Smem(const StepCall& call, float* smem, int threads) {
      const int thread = static_cast<int>(threadIdx.x);
      const int of_window = row_floats(call.window.dtype), of_weight = row_floats(call.weight.dtype);
      window = smem + of_window * thread;
      weight = smem + of_window * threads + of_weight * thread;
      x = smem + (of_window + of_weight) * threads + thread;
      bias = x + threads;
    }
  };

  __device__ __forceinline__ bool is_any() const { return is_value || key_channel >= 0; }

  // Which channel it is. Reads no memory.
  __device__ __forceinline__ void find(const StepCall& call, const StepWork& work, int key_dim, int tile, int per_block) {
    const int thread = static_cast<int>(threadIdx.x), run = thread - tile, wanted = work.rank * per_block + run;
    is_value = run < 0;
    key_channel = run >= 0 && run < per_block && wanted < 2 * key_dim ? wanted : -1;
    const bool is_k = wanted >= key_dim;
    const int i = is_value ? work.column + thread : wanted - (is_k ? key_dim : 0);
    const int head = is_value ? work.key_head * call.group + work.member : (is_k ? call.key_heads : 0) + work.key_head;
    number = is_value ? 2 * call.key_heads * key_dim + head * call.V + i : head * key_dim + i;
    in_row = work.key_head * (is_value ? call.v.head : call.q.head) + (is_value ? work.member * call.v.member : 0) +
             (!is_value && is_k ? call.from_q_to_k : 0) + i * call.q.element;
  }

  __device__ __forceinline__ char* window_of(const StepCall& call, int slot) const {
    return call.window.data + wide(slot, call.window_slot) + number * call.window.row;
  }

  __device__ __forceinline__ void prefetch(const StepCall& call, int slot) const {
    if (!is_any()) return;
    ptx::prefetch_l2(window_of(call, slot));
    ptx::prefetch_l2(call.weight.data + number * call.weight.row);
  }

  __device__ __forceinline__ const char* x_of(const StepCall& call, const StepWork& work) const {
    return (is_value ? call.v.data : call.q.data) + wide(work.n, call.q.row) + in_row;
  }

  __device__ __forceinline__ void copy(const StepCall& call, const StepWork& work, const Smem& smem) const {
    if (!is_any()) return;
    copy_row(call.window, window_of(call, work.slot), smem.window);
    copy_row(call.weight, call.weight.data + number * call.weight.row, smem.weight);
    copy_word(smem.x, x_of(call, work));
    if (call.bias.data != nullptr) copy_word(smem.bias, element(call.bias, number));
  }

  // The channel's q, k or v, as a tensor of the projection's dtype would hold it; the window moves on, in memory.
  __device__ __forceinline__ float convolve(const StepCall& call, const StepWork& work, const Smem& smem) const {
    ConvTaps taps;
    read_row(call.window.dtype, smem.window, taps.past);
    read_row(call.weight.dtype, smem.weight, taps.weight);
    taps.bias = call.bias.data == nullptr
                    ? 0.0f
                    : widen_bits(bits_of_word(*smem.bias, element(call.bias, number)), call.bias.dtype);
    const float x = widen_bits(bits_of_word(*smem.x, x_of(call, work)), call.q.dtype);
    const float y = silu(taps.push(x, call.width));
    store_row(call.window, window_of(call, work.slot), taps.past);
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
