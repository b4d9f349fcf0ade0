// SPDX-License-Identifier: Apache-2.0
// The two gates of a token and value head, from what the projections emit.

#include "../common/gates.h"
#include "launch.cuh"
#include "ops.h"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 256;

//     g = -exp(A_log) * softplus(a + dt_bias);   beta = sigmoid(b), doubled if allow_neg_eigval
// Grid    x: B * T * H / kThreads, value head fastest.   Block: one thread per (token, value head).
// Reads   a b [B, T, H], A_log dt_bias [H], any float dtype.   Writes g beta [B, T, H] fp32.
// Needs   any strides, any arch.
__global__ void __launch_bounds__(kThreads) gates_kernel(const __grid_constant__ GatesParams p, int64_t num_blocks) {
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

}  // namespace

const char* gated_delta_gates(const GatesParams& params, void* stream) {
  const int64_t num_blocks = ceil_div(params.B * params.T * params.H, kThreads);
  return launch(gates_kernel, num_blocks, kThreads, 0, stream, params, num_blocks);
}

}  // namespace gdn::cuda
