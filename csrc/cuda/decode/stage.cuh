// SPDX-License-Identifier: Apache-2.0
// Tokens to shared memory as fp32, each with its scalars, while the loads of the state fly.
#pragma once

#include "config.cuh"

namespace gdn::cuda {
namespace {

// A token's stored bits, widened only when staged: many loads in flight. A lane holds elements lane + 32 j.
template <class Shape>
struct TokenBits {
  static constexpr int kValues = Shape::kTile < 32 ? 1 : Shape::kTile / 32;
  uint32_t k[Shape::kSteps], q[Shape::kSteps], v[kValues], g, beta;
};

template <class Shape>
__device__ __forceinline__ TokenBits<Shape> load_token(const RuleParams& p, const Work& work, int64_t batch, int64_t t,
                                                       int lane) {
  TokenBits<Shape> token = {};
  const int64_t k = p.k.offset(batch, t, work.key_head, lane), q = p.q.offset(batch, t, work.key_head, lane);
  const int64_t v = p.v.offset(batch, t, work.head, work.column + lane);
  const auto load_vectors = [&](auto bits) {
    using bits_t = decltype(bits);
#pragma unroll
    for (int j = 0; j < Shape::kSteps; ++j) {
      token.k[j] = static_cast<const bits_t*>(p.k.data)[k + 32 * j * p.k.stride[3]];
      token.q[j] = static_cast<const bits_t*>(p.q.data)[q + 32 * j * p.q.stride[3]];
    }
#pragma unroll
    for (int i = 0; i < token.kValues; ++i) {
      const bool inside = lane + 32 * i < Shape::kTile && work.column + lane + 32 * i < p.dims.V;
      if (inside) token.v[i] = static_cast<const bits_t*>(p.v.data)[v + 32 * i * p.v.stride[3]];
    }
  };
  if (p.q.dtype == DType::kFloat32) load_vectors(uint32_t{});
  else load_vectors(uint16_t{});
  if (p.g.given()) token.g = load_bits(p.g.data, p.g.dtype, p.g.offset(batch, t, work.head));
  if (p.beta.given()) token.beta = load_bits(p.beta.data, p.beta.dtype, p.beta.offset(batch, t, work.head));
  return token;
}

template <class Shape>
__device__ __forceinline__ void stage_token(const RuleParams& p, const TokenBits<Shape>& token, int lane,
                                            float* smem_token) {
  float kk = 0.0f, qq = 0.0f, kq = 0.0f;
#pragma unroll
  for (int j = 0; j < Shape::kSteps; ++j) {
    const float k = widen_bits(token.k[j], p.q.dtype), q = widen_bits(token.q[j], p.q.dtype);
    smem_token[lane + 32 * j] = k;
    smem_token[Shape::kSmemQ + lane + 32 * j] = q;
    kk = accumulate(k, k, kk);
    qq = accumulate(q, q, qq);
    kq = accumulate(k, q, kq);
  }
#pragma unroll
  for (int i = 0; i < token.kValues; ++i) {
    if (lane + 32 * i < Shape::kTile) smem_token[Shape::kSmemV + lane + 32 * i] = widen_bits(token.v[i], p.q.dtype);
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask <<= 1) {   // lane = residue: rule.h's tree, the three side by side
    kk = add(kk, __shfl_xor_sync(0xffffffffu, kk, mask));
    qq = add(qq, __shfl_xor_sync(0xffffffffu, qq, mask));
    kq = add(kq, __shfl_xor_sync(0xffffffffu, kq, mask));
  }
  float sk = 1.0f, sq = 1.0f;
  if (p.use_qk_l2norm) {   // even lanes take the root for k, odd ones for q
    const float factor = l2norm_factor(lane % 2 == 0 ? kk : qq);
    sk = __shfl_sync(0xffffffffu, factor, 0);
    sq = __shfl_sync(0xffffffffu, factor, 1);
  }
  if (lane == 0) {
    const float alpha = p.g.given() ? decay_of(widen_bits(token.g, p.g.dtype), p.gate_is_linear) : 1.0f;
    const float beta = p.beta.given() ? widen_bits(token.beta, p.beta.dtype) : 1.0f;
    *reinterpret_cast<StepScalars*>(smem_token + Shape::kSmemScalars) = step_scalars(alpha, beta, p.scale, sk, sq, kq);
  }
}

// The row's tokens from `first` on, a chunk of them, a warp each in turn.
template <class Shape>
__device__ __forceinline__ void stage_tokens(const RuleParams& p, const Cut& cut, const Work& work, int64_t first,
                                             float* smem_tokens) {
  const Span span = span_of(p, work);
  const int lane = threadIdx.x % 32, count = tokens_from(span, first, cut);
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < count; i += Shape::kWarps) {
    const TokenBits<Shape> token = load_token<Shape>(p, work, span.batch, span.first + first + i, lane);
    stage_token<Shape>(p, token, lane, smem_tokens + i * Shape::kSmemToken);
  }
}

}  // namespace
}  // namespace gdn::cuda
