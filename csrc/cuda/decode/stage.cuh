// SPDX-License-Identifier: Apache-2.0
// A token from memory to shared memory as fp32, and its scalars, while the loads of the state fly. By one warp.
#pragma once

#include "compute.cuh"

namespace gdn::cuda {
namespace {

// k and q as they are stored: element lane + 32 j, so that a lane is a residue of rule.h. Many loads in flight.
template <class Shape>
struct TokenBits {
  uint32_t k[Shape::kSteps], q[Shape::kSteps], g, beta;
};

// Token t of the row that starts at `origin`.
template <class Shape>
__device__ __forceinline__ void load_token(const Call& call, const Work& work, int origin, int t, int lane,
                                           TokenBits<Shape>& token) {
  const char* const k = token_address(call.k, origin, t, work.key_head);
  const char* const q = token_address(call.q, origin, t, work.key_head);
  const auto load_vectors = [&](auto bits) {
    using bits_t = decltype(bits);
#pragma unroll
    for (int j = 0; j < Shape::kSteps; ++j) {
      token.k[j] = reinterpret_cast<const bits_t*>(k)[lane + 32 * j];
      token.q[j] = reinterpret_cast<const bits_t*>(q)[lane + 32 * j];
    }
  };
  if (call.dtype == DType::kFloat32) load_vectors(uint32_t{});
  else load_vectors(uint16_t{});
  if (call.g.data != nullptr) token.g = load_bits(token_address(call.g, origin, t, work.head), call.g_dtype, 0);
  if (call.beta.data != nullptr) token.beta = load_bits(token_address(call.beta, origin, t, work.head), call.beta_dtype, 0);
}

// Widens in place, the dtype tested once.
template <class Shape>
__device__ __forceinline__ void widen_token(DType dtype, TokenBits<Shape>& token) {
  const auto widen_as = [&](auto io) {
    using io_t = decltype(io);
#pragma unroll
    for (int j = 0; j < Shape::kSteps; ++j) {
      token.k[j] = float_bits(to_float(io_t{static_cast<uint16_t>(token.k[j])}));
      token.q[j] = float_bits(to_float(io_t{static_cast<uint16_t>(token.q[j])}));
    }
  };
  if (dtype == DType::kBFloat16) widen_as(bf16_t{});
  else if (dtype == DType::kFloat16) widen_as(fp16_t{});
}

// k to smem_k, q to smem_q [kKeyDim each], element lane + 32 j there or, by residue, at kSteps lane + j; the scalars come back
// to every lane.
template <class Shape, bool kByResidue = false>
__device__ __forceinline__ StepScalars stage_token(const Call& call, TokenBits<Shape>& token, int lane, float* smem_k,
                                                   float* smem_q) {
  float kk = 0.0f, qq = 0.0f, kq = 0.0f;
  widen_token<Shape>(call.dtype, token);
#pragma unroll
  for (int j = 0; j < Shape::kSteps; ++j) {
    const float k = bits_float(token.k[j]), q = bits_float(token.q[j]);
    const int at = kByResidue ? Shape::kSteps * lane + j : lane + 32 * j;
    smem_k[at] = k;
    smem_q[at] = q;
    kk = accumulate(k, k, kk);
    qq = accumulate(q, q, qq);
    kq = accumulate(k, q, kq);
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask <<= 1) {   // the three side by side
    kk = add(kk, __shfl_xor_sync(kAllLanes, kk, mask));
    qq = add(qq, __shfl_xor_sync(kAllLanes, qq, mask));
    kq = add(kq, __shfl_xor_sync(kAllLanes, kq, mask));
  }
  float sk = 1.0f, sq = 1.0f;
  if (call.use_qk_l2norm) {   // even lanes take the root for k, odd ones for q
    const float factor = l2norm_factor(lane % 2 == 0 ? kk : qq);
    sk = __shfl_sync(kAllLanes, factor, 0);
    sq = __shfl_sync(kAllLanes, factor, 1);
  }
  const float alpha = call.g.data != nullptr ? decay_of(widen_bits(token.g, call.g_dtype), call.gate_is_linear) : 1.0f;
  const float beta = call.beta.data != nullptr ? widen_bits(token.beta, call.beta_dtype) : 1.0f;
  return step_scalars(alpha, beta, call.scale, sk, sq, kq);
}

}  // namespace
}  // namespace gdn::cuda
