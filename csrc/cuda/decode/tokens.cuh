// SPDX-License-Identifier: Apache-2.0
// The tokens of a chunk between memory and shared memory: k, q, v and scalars on the way in, o and f on the way out.
#pragma once

#include "keep.cuh"

namespace gdn::cuda {
namespace {

// A token in floats: k, q; v, f and o of the tile; scalars.
template <class Shape>
struct SmemToken {
  static constexpr int kQ = Shape::kKeyDim, kV = 2 * Shape::kKeyDim, kF = kV + Shape::kTile, kOut = kF + Shape::kTile;
  static constexpr int kScalars = kOut + Shape::kTile, kFloats = kScalars + 8;
};
static_assert(sizeof(StepScalars) == 8 * sizeof(float), "a token's scalars are one record of 8 floats");

// A lane's part of a token as stored, two elements to a word if they have 16 bits: many loads in flight, widened later.
template <int kSteps, int kOwned, int kValues>
struct TokenPart {
  uint32_t k[kSteps][kOwned], q[kSteps][kOwned], v[kValues], g, beta;
};

// Neighbouring elements by one access.
template <class io_t, int kCount>
__device__ __forceinline__ void load_words(const char* gmem, uint32_t (&word)[kCount]) {
  const auto pack = load_pack<io_t, kCount>(reinterpret_cast<const io_t*>(gmem));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack) / 4); ++i) word[i] = pack.word[i];
}

// The words' elements as fp32 bits, in their place.
template <class io_t, int kCount>
__device__ __forceinline__ void widen_words(uint32_t (&word)[kCount]) {
  PackOf<io_t, kCount> pack;
  float x[kCount];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack) / 4); ++i) pack.word[i] = word[i];
  unpack<io_t, kCount>(pack, x);
#pragma unroll
  for (int i = 0; i < kCount; ++i) word[i] = float_bits(x[i]);
}

template <class io_t, int kSteps, int kOwned, int kValues>
__device__ __forceinline__ void widen_part(TokenPart<kSteps, kOwned, kValues>& part) {
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    widen_words<io_t>(part.k[j]);
    widen_words<io_t>(part.q[j]);
  }
  widen_words<io_t>(part.v);
}

// Issues the loads of token t; lane r of its lanes takes rows 32 j + kOwned r + i and kValues columns of the tile.
template <int kSteps, int kOwned, int kValues>
__device__ __forceinline__ void load_part(const Call& call, const Work& work, int origin, int t, int r,
                                          TokenPart<kSteps, kOwned, kValues>& part) {
  const char* const k = token_address(call.k, origin, t, work.key_head);
  const char* const q = token_address(call.q, origin, t, work.key_head);
  const char* const v = token_address(call.v, origin, t, work.head);
  const int column = work.column + kValues * r;
  const auto load_as = [&](auto io) {
    using io_t = decltype(io);
    constexpr int kItem = static_cast<int>(sizeof(io_t));
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      load_words<io_t>(k + (kResidues * j + kOwned * r) * kItem, part.k[j]);
      load_words<io_t>(q + (kResidues * j + kOwned * r) * kItem, part.q[j]);
    }
    if (column < call.V) load_words<io_t>(v + column * kItem, part.v);
  };
  if (call.g.data != nullptr) part.g = load_bits(token_address(call.g, origin, t, work.head), call.g_dtype, 0);
  if (call.beta.data != nullptr) part.beta = load_bits(token_address(call.beta, origin, t, work.head), call.beta_dtype, 0);
  if (call.dtype == DType::kFloat32) load_as(float{});
  else load_as(bf16_t{});
}

// rule.h's sums of k k, q q and k q over the kLanes lanes that have a token: a lane owns whole residues.
template <int kLanes, int kSteps, int kOwned, int kValues>
__device__ __forceinline__ void sum_part(const TokenPart<kSteps, kOwned, kValues>& part, float& kk, float& qq, float& kq) {
  float x[kOwned][3] = {};
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const float k = bits_float(part.k[j][i]), q = bits_float(part.q[j][i]);
      x[i][0] = accumulate(k, k, x[i][0]);
      x[i][1] = accumulate(q, q, x[i][1]);
      x[i][2] = accumulate(k, q, x[i][2]);
    }
  }
#pragma unroll
  for (int s = 0; s < 3; ++s) {
#pragma unroll
    for (int width = 1; width < kOwned; width *= 2) {
#pragma unroll
      for (int i = 0; i < kOwned; i += 2 * width) x[i][s] = add(x[i][s], x[i + width][s]);
    }
  }
#pragma unroll
  for (int mask = 1; mask < kLanes; mask <<= 1) {   // the three side by side
#pragma unroll
    for (int s = 0; s < 3; ++s) x[0][s] = add(x[0][s], __shfl_xor_sync(kAllLanes, x[0][s], mask));
  }
  kk = x[0][0];
  qq = x[0][1];
  kq = x[0][2];
}

// Tokens first .. first + count of the row to shared memory, all of them at once, so that their loads and the roots of their
// norms take the time of one.
template <class Shape, class Keeps>
__device__ __forceinline__ void stage_tokens(const Call& call, const Keeps& keeps, const typename Keeps::Target& target,
                                             const Work& work, const Row& row, int first, int count, float* smem) {
  using Token = SmemToken<Shape>;
  constexpr int kLanes = Shape::kThreads / kMostTokens, kOwned = kResidues / kLanes, kValues = Shape::kTile / kLanes;
  static_assert(kLanes <= 32 && kLanes >= 2, "a token is one warp's, k's and q's factors come from different lanes");
  const int r = threadIdx.x % kLanes, t = threadIdx.x / kLanes;
  const bool exists = t < count;
  TokenPart<Shape::kSteps, kOwned, kValues> part = {};
  if (exists) load_part(call, work, row.origin, first + t, r, part);
  if (call.dtype == DType::kBFloat16) widen_part<bf16_t>(part);
  else if (call.dtype == DType::kFloat16) widen_part<fp16_t>(part);

  float kk, qq, kq, sk = 1.0f, sq = 1.0f;
  sum_part<kLanes>(part, kk, qq, kq);
  if (call.use_qk_l2norm) {   // even lanes take the root for k, odd ones for q
    const float factor = l2norm_factor(r % 2 == 0 ? kk : qq);
    const int lane_of_first = static_cast<int>(threadIdx.x % 32) - r;
    sk = __shfl_sync(kAllLanes, factor, lane_of_first);
    sq = __shfl_sync(kAllLanes, factor, lane_of_first + 1);
  }
  if (!exists) return;
  float* const smem_token = smem + t * Token::kFloats;
#pragma unroll
  for (int j = 0; j < Shape::kSteps; ++j) {
    store_floats<kOwned>(smem_token + kResidues * j + kOwned * r, part.k[j]);
    store_floats<kOwned>(smem_token + Token::kQ + kResidues * j + kOwned * r, part.q[j]);
  }
  store_floats<kValues>(smem_token + Token::kV + kValues * r, part.v);
  const float alpha = call.g.data != nullptr ? decay_of(widen_bits(part.g, call.g_dtype), call.gate_is_linear) : 1.0f;
  const float beta = call.beta.data != nullptr ? widen_bits(part.beta, call.beta_dtype) : 1.0f;
  if (r == 0) {
    *reinterpret_cast<StepScalars*>(smem_token + Token::kScalars) = step_scalars(alpha, beta, call.scale, sk, sq, kq);
  }
  keeps.keep_token(target, work, first + t, r, part.k, alpha);
}

// o of the warp's columns and what Keeps takes of f, of the chunk's tokens, from shared memory to where they belong. By each
// warp when it is done with the chunk.
template <class Shape, class Keeps>
__device__ __forceinline__ void write_results(const Call& call, const Keeps& keeps, const typename Keeps::Target& target,
                                              const Work& work, const Row& row, int first, int count, const float* smem) {
  using Token = SmemToken<Shape>;
  constexpr int kColumns = Shape::kWarpColumns, kQuads = kColumns / 4;
  const int lane = threadIdx.x % 32, first_column = threadIdx.x / 32 * kColumns;
  __syncwarp();   // the lanes' results are there
#pragma unroll 1
  for (int idx = lane; idx < count * kQuads; idx += 32) {
    const int t = idx / kQuads, column = first_column + idx % kQuads * 4;
    if (work.column + column >= call.V) continue;
    float o[4];
    load_floats<4>(smem + t * Token::kFloats + Token::kOut + column, o);
    char* const out = token_address(call.out, row.origin, first + t, work.head);
    if (call.out_dtype == DType::kBFloat16) store_pack<bf16_t, 4>(reinterpret_cast<bf16_t*>(out) + work.column + column, o);
    else if (call.out_dtype == DType::kFloat16) store_pack<fp16_t, 4>(reinterpret_cast<fp16_t*>(out) + work.column + column, o);
    else store_pack<float, 4>(reinterpret_cast<float*>(out) + work.column + column, o);
  }
  if constexpr (Keeps::kKeepsFactors) {
#pragma unroll 1
    for (int idx = lane; idx < count * kColumns; idx += 32) {
      const int t = idx / kColumns, column = first_column + idx % kColumns;
      if (work.column + column >= call.V) continue;
      keeps.keep_factor(target, first + t, column, smem[t * Token::kFloats + Token::kF + column]);
    }
  }
}

}  // namespace
}  // namespace gdn::cuda
