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

// Token t of the piece's row.
template <class Shape>
__device__ __forceinline__ void load_token(const Call& call, const Piece& piece, int t, int lane, TokenBits<Shape>& token) {
  const Work& work = piece.work;
  const char* const k = token_address(call.k, piece, t, work.key_head);
  const char* const q = token_address(call.q, piece, t, work.key_head);
  const char* const v = token_address(call.v, piece, t, work.head);
  const auto load_vectors = [&](auto bits) {
    using bits_t = decltype(bits);
#pragma unroll
    for (int j = 0; j < Shape::kSteps; ++j) {
      token.k[j] = reinterpret_cast<const bits_t*>(k)[lane + 32 * j];
      token.q[j] = reinterpret_cast<const bits_t*>(q)[lane + 32 * j];
    }
#pragma unroll
    for (int i = 0; i < token.kValues; ++i) {
      const int column = work.column + lane + 32 * i;
      token.v[i] = column < call.V ? reinterpret_cast<const bits_t*>(v)[column] : bits_t{0};
    }
  };
  if (call.dtype == DType::kFloat32) load_vectors(uint32_t{});
  else load_vectors(uint16_t{});
  if (call.g.data != nullptr) token.g = load_bits(token_address(call.g, piece, t, work.head), call.g_dtype, 0);
  if (call.beta.data != nullptr) {
    token.beta = load_bits(token_address(call.beta, piece, t, work.head), call.beta_dtype, 0);
  }
}

template <class Shape>
__device__ __forceinline__ void stage_token(const Call& call, const TokenBits<Shape>& token, int lane, float* smem_token) {
  float kk = 0.0f, qq = 0.0f, kq = 0.0f;
#pragma unroll
  for (int j = 0; j < Shape::kSteps; ++j) {
    const float k = widen_bits(token.k[j], call.dtype), q = widen_bits(token.q[j], call.dtype);
    smem_token[lane + 32 * j] = k;
    smem_token[Shape::kSmemQ + lane + 32 * j] = q;
    kk = accumulate(k, k, kk);
    qq = accumulate(q, q, qq);
    kq = accumulate(k, q, kq);
  }
#pragma unroll
  for (int i = 0; i < token.kValues; ++i) {
    if (lane + 32 * i < Shape::kTile) smem_token[Shape::kSmemV + lane + 32 * i] = widen_bits(token.v[i], call.dtype);
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask <<= 1) {   // lane = residue: rule.h's tree, the three side by side
    kk = add(kk, __shfl_xor_sync(0xffffffffu, kk, mask));
    qq = add(qq, __shfl_xor_sync(0xffffffffu, qq, mask));
    kq = add(kq, __shfl_xor_sync(0xffffffffu, kq, mask));
  }
  float sk = 1.0f, sq = 1.0f;
  if (call.use_qk_l2norm) {   // even lanes take the root for k, odd ones for q
    const float factor = l2norm_factor(lane % 2 == 0 ? kk : qq);
    sk = __shfl_sync(0xffffffffu, factor, 0);
    sq = __shfl_sync(0xffffffffu, factor, 1);
  }
  if (lane == 0) {
    const float alpha = call.g.data != nullptr ? decay_of(widen_bits(token.g, call.g_dtype), call.gate_is_linear) : 1.0f;
    const float beta = call.beta.data != nullptr ? widen_bits(token.beta, call.beta_dtype) : 1.0f;
    *reinterpret_cast<StepScalars*>(smem_token + Shape::kSmemScalars) = step_scalars(alpha, beta, call.scale, sk, sq, kq);
  }
}

}  // namespace
}  // namespace gdn::cuda
