// SPDX-License-Identifier: Apache-2.0
// The staging warps: tokens to shared memory, o to global memory.
#pragma once

#include "config.cuh"

namespace gdn::cuda {
namespace {

// One token on its way to shared memory, as stored bits: widened only when staged, so that the loads do not wait for
// one another.
struct Token {
  uint32_t k[8], q[8];             // element lane + 32 i
  uint32_t v[kValuesPerLane];      // value lane + 32 i of the block's heads x tile
  uint32_t g, beta;                // of head `lane`
};

// Where a lane of a staging warp finds its elements of the span's first token.
struct TokenSource {
  const char *k, *q;                     // element lane of the block's key head
  const char* v[kValuesPerLane];         // nullptr: outside the tile
  char* out[kValuesPerLane];             // likewise
  const char *g, *beta;                  // nullptr: not given, or no head of this lane
};

__device__ __forceinline__ char* element(const View& view, int64_t offset) {
  return static_cast<char*>(view.data) + offset * dtype_size(view.dtype);
}

__device__ __forceinline__ TokenSource source_of_span(const RuleParams& p, const Tiling& tiling, const Work& work,
                                                      const Span& span, int lane) {
  TokenSource source;
  source.k = element(p.k, p.k.offset(span.batch, span.first, work.key_head, lane));
  source.q = element(p.q, p.q.offset(span.batch, span.first, work.key_head, lane));
#pragma unroll
  for (int i = 0; i < kValuesPerLane; ++i) {
    const int idx = lane + 32 * i, head = idx / tiling.tile;
    const int64_t column = work.column + idx % tiling.tile;
    const bool inside = head < tiling.heads && column < p.dims.V;
    source.v[i] = inside ? element(p.v, p.v.offset(span.batch, span.first, work.head + head, column)) : nullptr;
    source.out[i] = inside ? element(p.out, p.out.offset(span.batch, span.first, work.head + head, column)) : nullptr;
  }
  const bool has_head = lane < tiling.heads;
  const int64_t head = work.head + lane;
  source.g = has_head && p.g.given() ? element(p.g, p.g.offset(span.batch, span.first, head)) : nullptr;
  source.beta = has_head && p.beta.given() ? element(p.beta, p.beta.offset(span.batch, span.first, head)) : nullptr;
  return source;
}

// Issues the loads of token t. bits_t: uint32_t or uint16_t, the size of an element of q, k and v.
template <int kSteps, class bits_t>
__device__ __forceinline__ void load_vectors(const RuleParams& p, const TokenSource& source, int64_t t, int lane,
                                             Token& token) {
  const bits_t* const k = reinterpret_cast<const bits_t*>(source.k) + t * p.k.stride[1];
  const bits_t* const q = reinterpret_cast<const bits_t*>(source.q) + t * p.q.stride[1];
  const int64_t v = t * p.v.stride[1];
  const int key_dim = static_cast<int>(p.dims.K);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    token.k[i] = lane + 32 * i < key_dim ? k[i * 32 * p.k.stride[3]] : 0u;
    token.q[i] = lane + 32 * i < key_dim ? q[i * 32 * p.q.stride[3]] : 0u;
  }
#pragma unroll
  for (int i = 0; i < kValuesPerLane; ++i) {
    token.v[i] = source.v[i] != nullptr ? reinterpret_cast<const bits_t*>(source.v[i])[v] : 0u;
  }
}

template <int kSteps>
__device__ __forceinline__ void load_token(const RuleParams& p, const TokenSource& source, int64_t t, int lane,
                                           Token& token) {
  if (p.q.dtype == DType::kFloat32) {
    load_vectors<kSteps, uint32_t>(p, source, t, lane, token);
  } else {
    load_vectors<kSteps, uint16_t>(p, source, t, lane, token);
  }
  if (source.g != nullptr) token.g = load_bits(source.g, p.g.dtype, t * p.g.stride[1]);
  if (source.beta != nullptr) token.beta = load_bits(source.beta, p.beta.dtype, t * p.beta.stride[1]);
}

template <int kSteps>
__device__ __forceinline__ void stage_token(const RuleParams& p, const Tiling& tiling, const TokenLayout& layout,
                                            const Token& token, int lane, float* smem_token) {
  float kk = 0.0f, qq = 0.0f, kq = 0.0f;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const float k = widen_bits(token.k[i], p.q.dtype), q = widen_bits(token.q[i], p.q.dtype);
    smem_token[lane + 32 * i] = k;
    smem_token[32 * kSteps + lane + 32 * i] = q;
    kk = accumulate(k, k, kk);
    qq = accumulate(q, q, qq);
    kq = accumulate(k, q, kq);
  }
#pragma unroll
  for (int i = 0; i < kValuesPerLane; ++i) {
    const int idx = layout.v + lane + 32 * i;
    if (idx < layout.scalars) smem_token[idx] = widen_bits(token.v[i], p.q.dtype);
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask <<= 1) {   // the three side by side: one latency
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
  if (lane < tiling.heads) {
    const float alpha = p.g.given() ? decay_of(widen_bits(token.g, p.g.dtype), p.gate_is_linear) : 1.0f;
    const float beta = p.beta.given() ? widen_bits(token.beta, p.beta.dtype) : 1.0f;
    *reinterpret_cast<StepScalars*>(smem_token + layout.scalars + 8 * lane) =
        step_scalars(alpha, beta, p.scale, sk, sq, kq);
  }
}

// Writes the o that was left in shared memory for token t.
__device__ __forceinline__ void store_out(const RuleParams& p, const TokenSource& source, int64_t t, int lane,
                                          const float* smem_v) {
#pragma unroll
  for (int i = 0; i < kValuesPerLane; ++i) {
    if (source.out[i] != nullptr) store_float(source.out[i], p.out.dtype, t * p.out.stride[1], smem_v[lane + 32 * i]);
  }
}

// The role of staging warp `stager`: tokens stager, stager + stagers, ... of every chunk, the next one's loads in flight
// while one is staged. Joins num_chunks + 1 barriers, as run_computing does.
template <int kSteps>
__device__ __forceinline__ void run_staging(const RuleParams& p, const Tiling& tiling, const Work& work, const Span& span,
                                            const TokenLayout& layout, int stager, int lane, float* smem_tokens) {
  const TokenSource source = source_of_span(p, tiling, work, span, lane);
  const int64_t num_chunks = ceil_div(span.length, tiling.chunk);
  for (int64_t c = -1; c <= num_chunks; ++c) {
    if (c >= 0) __syncthreads();   // chunk c is staged, chunk c - 1 is computed
    float* const smem_half = smem_tokens + ((c + 1) & 1) * tiling.chunk * layout.floats;
    const int64_t done = (c - 1) * tiling.chunk, next = (c + 1) * tiling.chunk;
    for (int i = stager; c >= 1 && i < tiling.chunk && done + i < span.length; i += tiling.stagers) {
      store_out(p, source, done + i, lane, smem_half + i * layout.floats + layout.v);
    }
    const int count = static_cast<int>(span.length - next < tiling.chunk ? span.length - next : tiling.chunk);
    Token token;
    if (stager < count) load_token<kSteps>(p, source, next + stager, lane, token);
    for (int i = stager; i < count; i += tiling.stagers) {
      Token ahead;
      if (i + tiling.stagers < count) load_token<kSteps>(p, source, next + i + tiling.stagers, lane, ahead);
      stage_token<kSteps>(p, tiling, layout, token, lane, smem_half + i * layout.floats);
      token = ahead;
    }
  }
}

}  // namespace
}  // namespace gdn::cuda
