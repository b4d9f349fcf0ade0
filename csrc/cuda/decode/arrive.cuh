// SPDX-License-Identifier: Apache-2.0
// A token from memory to shared memory, for a whole block, by its first warp. The copies are asynchronous: waiting for them is
// not waiting for the state, whose loads are under way as well, so the token is ready before the state is.
#pragma once

#include "../tile/word.cuh"
#include "compute.cuh"

namespace gdn::cuda {
namespace {

// Shared memory, in floats: k, q [kKeyDim]; StepScalars; k and q as they are stored, one behind the other; g, beta, a word each.
template <class Shape>
struct TokenSmem {
  static constexpr int kK = 0, kQ = kK + Shape::kKeyDim, kScalars = kQ + Shape::kKeyDim, kRaw = kScalars + 8;
  static constexpr int kGates = kRaw + 2 * Shape::kKeyDim, kFloats = kGates + 4;
};

// Bits of elements to fp32 in place, the dtype tested once.
template <int kCount>
__device__ __forceinline__ void widen_all(DType dtype, float (&x)[kCount]) {
  const auto widen_as = [&](auto io) {
    using io_t = decltype(io);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = to_float(io_t{static_cast<uint16_t>(float_bits(x[i]))});
  };
  if (dtype == DType::kBFloat16) widen_as(bf16_t{});
  else if (dtype == DType::kFloat16) widen_as(fp16_t{});
}

// Issues the copies of a token. All lanes of the warp.
template <class Shape>
__device__ __forceinline__ void copy_token(const Call& call, const Work& work, float* smem) {
  using Smem = TokenSmem<Shape>;
  const int lane = threadIdx.x % 32, size = dtype_size(call.dtype);
  const char* const k = token_address(call.k, work.n, 0, work.key_head);
  const char* const q = token_address(call.q, work.n, 0, work.key_head);
  if (call.moves_keys) {
    const int chunks = Shape::kKeyDim * size / 16;
    const uint32_t to = ptx::shared_address(smem + Smem::kRaw);
#pragma unroll
    for (int i = 0; i < 2 * Shape::kKeyDim * 4 / 16; i += 32) {
      const int chunk = i + lane;
      const char* const from = chunk < chunks ? k + 16 * chunk : q + 16 * (chunk - chunks);
      if (chunk < 2 * chunks) ptx::cp_async_16(to + 16 * chunk, from, 16);
    }
  } else {
    char* const raw = reinterpret_cast<char*>(smem + Smem::kRaw);
#pragma unroll 1
    for (int i = lane; i < 2 * Shape::kKeyDim; i += 32) {
      const bool is_q = i >= Shape::kKeyDim;
      const uint32_t bits = load_bits(is_q ? q : k, call.dtype, is_q ? i - Shape::kKeyDim : i);
      if (size == 4) reinterpret_cast<uint32_t*>(raw)[i] = bits;
      else reinterpret_cast<uint16_t*>(raw)[i] = static_cast<uint16_t>(bits);
    }
  }
  const char* const g = token_address(call.g, work.n, 0, work.head);
  const char* const beta = token_address(call.beta, work.n, 0, work.head);
  if (lane < 2 && (lane == 0 ? call.g.data : call.beta.data) != nullptr) {
    copy_word(smem + Smem::kGates + lane, lane == 0 ? g : beta);
  }
}

// The copies are there, for all lanes: k, q and the scalars to shared memory. Where kByResidue element lane + 32 j of k and q
// stands at kSteps * lane + j, else where it is.
template <class Shape, bool kByResidue>
__device__ __forceinline__ void stage_token(const Call& call, const Work& work, float* smem) {
  using Smem = TokenSmem<Shape>;
  constexpr int kSteps = Shape::kSteps;
  const int lane = threadIdx.x % 32, size = dtype_size(call.dtype);
  // Element lane + 32 j, so that a lane is a residue of rule.h.
  const char* const raw = reinterpret_cast<const char*>(smem + Smem::kRaw) + (lane * size & ~3);
  const int shift = (lane * size & 2) * 8;
  float x[2 * kSteps];
#pragma unroll
  for (int j = 0; j < 2 * kSteps; ++j) x[j] = bits_float(*reinterpret_cast<const uint32_t*>(raw + 32 * j * size) >> shift);
  widen_all(call.dtype, x);
  float kk = 0.0f, qq = 0.0f, kq = 0.0f;
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const float k = x[j], q = x[kSteps + j];
    smem[Smem::kK + (kByResidue ? kSteps * lane + j : lane + 32 * j)] = k;
    smem[Smem::kQ + (kByResidue ? kSteps * lane + j : lane + 32 * j)] = q;
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
  float alpha = 1.0f, beta = 1.0f;
  if (call.g.data != nullptr) {
    const uint32_t bits = bits_of_word(smem[Smem::kGates], token_address(call.g, work.n, 0, work.head));
    alpha = decay_of(widen_bits(bits, call.g_dtype), call.gate_is_linear);
  }
  if (call.beta.data != nullptr) {
    const uint32_t bits = bits_of_word(smem[Smem::kGates + 1], token_address(call.beta, work.n, 0, work.head));
    beta = widen_bits(bits, call.beta_dtype);
  }
  if (lane == 0) {
    *reinterpret_cast<StepScalars*>(smem + Smem::kScalars) = step_scalars(alpha, beta, call.scale, sk, sq, kq);
  }
}

}  // namespace
}  // namespace gdn::cuda
