// SPDX-License-Identifier: Apache-2.0
// The two gates of a token and value head, from what the projections emit.
//
//     g = -exp(A_log) * softplus(a + dt_bias);   beta = sigmoid(b), doubled if allow_neg_eigval

#include "../common/gates.h"
#include "launch.cuh"
#include "ops.h"
#include "tile/pack.cuh"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kHeads = 4;   // per thread of the vectorised kernel

// Grid    x: B * T * H / kThreads, value head fastest.   Block: one thread per (token, value head).
// Reads   a b [B, T, H], A_log dt_bias [H], any float dtype.   Writes g beta [B, T, H] fp32.
// Needs   any strides, any arch.
__global__ void __launch_bounds__(kThreads) gates_any(const __grid_constant__ GatesParams p, int64_t num_blocks) {
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const int64_t item = block * kThreads + threadIdx.x;
    const int64_t row = item / p.H, h = item - row * p.H;
    const int64_t b = row / p.T, t = row - b * p.T;
    if (b >= p.B) return;
    const float g = log_decay(p.a.load(p.a.offset(b, t, h)), p.A_log.load(p.A_log.offset(h)),
                              p.dt_bias.load(p.dt_bias.offset(h)));
    const float beta = write_strength(p.b.load(p.b.offset(b, t, h)), p.allow_neg_eigval);
    static_cast<float*>(p.g.data)[p.g.offset(b, t, h)] = g;
    static_cast<float*>(p.beta.data)[p.beta.offset(b, t, h)] = beta;
  }
}

// Value heads contiguous, one dtype for a and b.
// Grid    x: B * T * H / (kHeads * kThreads), value head fastest.   Block: a thread per kHeads heads of a token.
// Reads   a b [B, T, H] by 8 or 16 bytes, A_log dt_bias [H] of any dtype.   Writes g beta [B, T, H] fp32 by 16 bytes.
// Needs   H, strides and addresses in multiples of kHeads elements; any arch.
template <class io_t>
__global__ void __launch_bounds__(kThreads) gates_vectors(const __grid_constant__ GatesParams p, int64_t num_blocks) {
  const int64_t per_token = p.H / kHeads;
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const int64_t item = block * kThreads + threadIdx.x;
    const int64_t row = item / per_token, h = (item - row * per_token) * kHeads;
    const int64_t b = p.B == 1 ? 0 : row / p.T, t = row - b * p.T;
    if (b >= p.B || t >= p.T) return;
    const auto pack_a = load_pack<io_t, kHeads>(static_cast<const io_t*>(p.a.data) + p.a.offset(b, t, h));
    const auto pack_b = load_pack<io_t, kHeads>(static_cast<const io_t*>(p.b.data) + p.b.offset(b, t, h));
    float A_log[kHeads], dt_bias[kHeads], g[kHeads], beta[kHeads];
    load_rows<kHeads, 1>(p.A_log, h, A_log);
    load_rows<kHeads, 1>(p.dt_bias, h, dt_bias);
    unpack<io_t, kHeads>(pack_a, g);
    unpack<io_t, kHeads>(pack_b, beta);
#pragma unroll
    for (int e = 0; e < kHeads; ++e) {
      g[e] = log_decay(g[e], A_log[e], dt_bias[e]);
      beta[e] = write_strength(beta[e], p.allow_neg_eigval);
    }
    store_pack<float, kHeads>(static_cast<float*>(p.g.data) + p.g.offset(b, t, h), g);
    store_pack<float, kHeads>(static_cast<float*>(p.beta.data) + p.beta.offset(b, t, h), beta);
  }
}

bool is_vector_view(const View& view, const GatesParams& p) {
  bool fits = view.stride[2] == 1 && reinterpret_cast<uintptr_t>(view.data) % (kHeads * dtype_size(view.dtype)) == 0;
  fits = fits && (p.B == 1 || view.stride[0] % kHeads == 0);
  return fits && (p.T == 1 || view.stride[1] % kHeads == 0);
}

bool can_vectorise(const GatesParams& p) {
  return p.H % kHeads == 0 && p.a.dtype == p.b.dtype && is_vector_view(p.a, p) && is_vector_view(p.b, p) &&
         is_vector_view(p.g, p) && is_vector_view(p.beta, p);
}

}  // namespace

const char* gated_delta_gates(const GatesParams& params, void* stream) {
  const int64_t num_items = params.B * params.T * params.H;
  if (!can_vectorise(params)) {
    const int64_t num_blocks = ceil_div(num_items, kThreads);
    return launch(gates_any, num_blocks, kThreads, 0, stream, params, num_blocks);
  }
  const int64_t num_blocks = ceil_div(num_items, kHeads * kThreads);
  const char* error = nullptr;
  dispatch_dtype(params.a.dtype, [&](auto io) {
    error = launch(gates_vectors<decltype(io)>, num_blocks, kThreads, 0, stream, params, num_blocks);
  });
  return error;
}

}  // namespace gdn::cuda
