// SPDX-License-Identifier: Apache-2.0
// The staging warps: tokens to shared memory, o to global memory. A warp has four tokens in its hands, eight lanes each:
// lane r of a token takes rows 32 j + 4 r .. + 3 of k and q, quads r and r + 8 of v and o, and the gates of head r.
#pragma once

#include "config.cuh"

namespace gdn::cuda {
namespace {

// Four elements as stored, two to a word if they have 16 bits: widened only when staged, a chunk after they were asked for.
struct StoredQuad {
  uint32_t words[4];
};

template <int kSteps>
struct Token {
  StoredQuad k[kSteps], q[kSteps], v[kQuadsOfLane];
  uint32_t g, beta;
};

// Where a lane finds its elements of the span's first token.
struct TokenSource {
  int key_rows;                          // K - 4 r: how many rows there are from the lane's first one on
  int inside[kQuadsOfLane];              // elements of a quad of v and o that are inside V
  const char *k, *q, *v[kQuadsOfLane];
  char* out[kQuadsOfLane];
  const char *g, *beta;                  // nullptr: not given, or no head of this lane
};

__device__ __forceinline__ char* element(const View& view, int64_t offset) {
  return static_cast<char*>(view.data) + offset * dtype_size(view.dtype);
}

__device__ __forceinline__ TokenSource source_of_span(const RuleParams& p, const Tiling& tiling, const Work& work,
                                                      const Span& span, int lane) {
  const int r = lane % kTokenLanes;
  TokenSource source;
  source.key_rows = static_cast<int>(p.dims.K) - 4 * r;
  source.k = element(p.k, p.k.offset(span.batch, span.first, work.key_head, 4 * r));
  source.q = element(p.q, p.q.offset(span.batch, span.first, work.key_head, 4 * r));
#pragma unroll
  for (int i = 0; i < kQuadsOfLane; ++i) {
    const int idx = 4 * (r + kTokenLanes * i), head = idx / tiling.tile;
    const int64_t column = work.column + idx % tiling.tile;
    source.inside[i] = head < tiling.heads ? static_cast<int>(p.dims.V - column) : 0;
    source.v[i] = element(p.v, p.v.offset(span.batch, span.first, work.head + head, column));
    source.out[i] = element(p.out, p.out.offset(span.batch, span.first, work.head + head, column));
  }
  const bool has_head = r < tiling.heads;
  const int64_t head = work.head + r;
  source.g = has_head && p.g.given() ? element(p.g, p.g.offset(span.batch, span.first, head)) : nullptr;
  source.beta = has_head && p.beta.given() ? element(p.beta, p.beta.offset(span.batch, span.first, head)) : nullptr;
  return source;
}

// The first `inside` of four elements `stride` apart; the others are zeros.
template <class io_t>
__device__ __forceinline__ StoredQuad load_quad(const char* data, bool at_once, int64_t stride, int inside) {
  constexpr int kWords = sizeof(io_t), kOfWord = 4 / sizeof(io_t);
  StoredQuad quad = {};
  if (at_once) {
    if (inside > 0) {
      const auto words = *reinterpret_cast<const Pack<uint32_t, kWords>*>(data);
#pragma unroll
      for (int i = 0; i < kWords; ++i) quad.words[i] = words.x[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t bits = 0;
      if constexpr (kOfWord == 1) {
        if (i < inside) bits = reinterpret_cast<const uint32_t*>(data)[i * stride];
      } else {
        if (i < inside) bits = reinterpret_cast<const uint16_t*>(data)[i * stride];
      }
      quad.words[i / kOfWord] |= bits << (16 * (i % kOfWord));
    }
  }
  return quad;
}

template <class io_t>
__device__ __forceinline__ Pack<float, 4> widen(const StoredQuad& quad) {
  Pack<float, 4> wide;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(io_t) == 4) {
      wide.x[i] = bits_float(quad.words[i]);
    } else {
      wide.x[i] = to_float(io_t{static_cast<uint16_t>(quad.words[i / 2] >> (16 * (i % 2)))});
    }
  }
  return wide;
}

// Issues the loads of token t. Behind the last one: zeros.
template <class io_t, int kSteps>
__device__ __forceinline__ void load_token(const RuleParams& p, const InQuads& in_quads, const TokenSource& source,
                                           int64_t t, bool exists, Token<kSteps>& token) {
  const char* const k = source.k + t * p.k.stride[1] * sizeof(io_t);
  const char* const q = source.q + t * p.q.stride[1] * sizeof(io_t);
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const int inside = exists ? source.key_rows - 32 * j : 0;
    token.k[j] = load_quad<io_t>(k + 32 * j * p.k.stride[3] * sizeof(io_t), in_quads.k, p.k.stride[3], inside);
    token.q[j] = load_quad<io_t>(q + 32 * j * p.q.stride[3] * sizeof(io_t), in_quads.q, p.q.stride[3], inside);
  }
#pragma unroll
  for (int i = 0; i < kQuadsOfLane; ++i) {
    const char* const v = source.v[i] + t * p.v.stride[1] * sizeof(io_t);
    token.v[i] = load_quad<io_t>(v, in_quads.v, p.v.stride[3], exists ? source.inside[i] : 0);
  }
  token.g = exists && source.g != nullptr ? load_bits(source.g, p.g.dtype, t * p.g.stride[1]) : 0u;
  token.beta = exists && source.beta != nullptr ? load_bits(source.beta, p.beta.dtype, t * p.beta.stride[1]) : 0u;
}

__device__ __forceinline__ void store_quad(float* smem, const Pack<float, 4>& quad) {
  *reinterpret_cast<Pack<float, 4>*>(smem) = quad;
}

// What the rule takes of raw gates of value head h. Out of line: its registers would be the whole kernel's.
__device__ __noinline__ float2 open_gates(const RuleParams& p, float g, float beta, int64_t h) {
  return make_float2(gate_of(p, g, h), beta_of(p, beta));
}

// k, q and v to shared memory as fp32, with the scalars of every head. The sums k k, q q and k q are rule.h's.
template <class io_t, int kSteps>
__device__ __forceinline__ void stage_token(const RuleParams& p, const Tiling& tiling, const Token<kSteps>& token,
                                            int64_t first_head, int lane, float* smem_token) {
  using Layout = TokenLayout<kSteps>;
  const int r = lane % kTokenLanes;
  float kk[4] = {}, qq[4] = {}, kq[4] = {};
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const Pack<float, 4> k = widen<io_t>(token.k[j]), q = widen<io_t>(token.q[j]);
    store_quad(smem_token + Layout::kKeys + kResidues * j + 4 * r, k);
    store_quad(smem_token + Layout::kQueries + kResidues * j + 4 * r, q);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      kk[i] = accumulate(k.x[i], k.x[i], kk[i]);
      qq[i] = accumulate(q.x[i], q.x[i], qq[i]);
      kq[i] = accumulate(k.x[i], q.x[i], kq[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kQuadsOfLane; ++i) {
    store_quad(smem_token + Layout::kV + 4 * (r + kTokenLanes * i), widen<io_t>(token.v[i]));
  }
  float sum_kk = add(add(kk[0], kk[1]), add(kk[2], kk[3]));
  float sum_qq = add(add(qq[0], qq[1]), add(qq[2], qq[3]));
  float sum_kq = add(add(kq[0], kq[1]), add(kq[2], kq[3]));
#pragma unroll
  for (int mask = 1; mask < kTokenLanes; mask <<= 1) {   // the three side by side: one latency
    sum_kk = add(sum_kk, __shfl_xor_sync(0xffffffffu, sum_kk, mask));
    sum_qq = add(sum_qq, __shfl_xor_sync(0xffffffffu, sum_qq, mask));
    sum_kq = add(sum_kq, __shfl_xor_sync(0xffffffffu, sum_kq, mask));
  }
  float sk = 1.0f, sq = 1.0f;
  if (p.use_qk_l2norm) {   // even lanes take the root for k, odd ones for q
    const float factor = l2norm_factor(lane % 2 == 0 ? sum_kk : sum_qq);
    sk = __shfl_sync(0xffffffffu, factor, lane - r);
    sq = __shfl_sync(0xffffffffu, factor, lane - r + 1);
  }
  if (r < tiling.heads) {
    float2 gates = make_float2(widen_bits(token.g, p.g.dtype), widen_bits(token.beta, p.beta.dtype));
    if (has_raw_gates(p)) gates = open_gates(p, gates.x, gates.y, first_head + r);
    const float alpha = p.g.given() ? decay_of(gates.x, p.gate_domain == GateDomain::kLinear) : 1.0f;
    const float beta = p.beta.given() ? gates.y : 1.0f;
    const StepScalars x = step_scalars(alpha, beta, p.scale, sk, sq, sum_kq);
    *reinterpret_cast<StepScalars*>(smem_token + Layout::kScalars + 8 * r) = x;
    smem_token[Layout::kAlpha + r] = x.alpha;
  }
}

// o of token t from shared memory to where it belongs.
template <class out_t>
__device__ __forceinline__ void store_out_as(const View& out, bool at_once, const TokenSource& source, int64_t t, int r,
                                             const float* smem_out) {
#pragma unroll
  for (int i = 0; i < kQuadsOfLane; ++i) {
    if (source.inside[i] <= 0) continue;
    const auto values = *reinterpret_cast<const Pack<float, 4>*>(smem_out + 4 * (r + kTokenLanes * i));
    out_t* const data = reinterpret_cast<out_t*>(source.out[i]) + t * out.stride[1];
    Pack<out_t, 4> rounded;
#pragma unroll
    for (int j = 0; j < 4; ++j) rounded.x[j] = from_float<out_t>(values.x[j]);
    if (at_once) {
      *reinterpret_cast<Pack<out_t, 4>*>(data) = rounded;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < source.inside[i]) data[j * out.stride[3]] = rounded.x[j];
      }
    }
  }
}

__device__ __forceinline__ void store_out(const View& out, bool at_once, const TokenSource& source, int64_t t, int r,
                                          const float* smem_out) {
  if (out.dtype == DType::kFloat32) {
    store_out_as<float>(out, at_once, source, t, r, smem_out);
  } else if (out.dtype == DType::kBFloat16) {
    store_out_as<bf16_t>(out, at_once, source, t, r, smem_out);
  } else {
    store_out_as<fp16_t>(out, at_once, source, t, r, smem_out);
  }
}

// The role of staging warp `stager`: passes of four tokens, its share of every chunk. The loads of a pass are issued when
// the one before it has been staged, so they have a chunk's time to arrive. Behind barrier c, which says that chunk c is
// staged and chunk c - 2 computed, it writes out the latter and puts chunk c + 1 in its place. Joins num_chunks + 1 barriers,
// as run_computing does; at the last one everything is computed.
template <class io_t, int kSteps>
__device__ __forceinline__ void run_staging(const RuleParams& p, const Tiling& tiling, const InQuads& in_quads,
                                            const Work& work, const Span& span, int stager, int lane,
                                            float* smem_tokens) {
  constexpr int kFloats = TokenLayout<kSteps>::kFloats;
  if (span.length == 0) return;
  const TokenSource source = source_of_span(p, tiling, work, span, lane);
  const int64_t num_chunks = ceil_div(span.length, tiling.chunk);
  const int first = stager * kTokensOfPass, step = tiling.stagers * kTokensOfPass, token_of_pass = lane / kTokenLanes;
  Token<kSteps> token;
  load_token<io_t>(p, in_quads, source, first + token_of_pass, first + token_of_pass < span.length, token);
  for (int64_t c = -1; c <= num_chunks + 1; ++c) {
    if (c >= 0 && c <= num_chunks) meet_computing(tiling);
    float* const smem_chunk = smem_tokens + (static_cast<int>((c + 1) % kRing) * tiling.chunk + token_of_pass) * kFloats;
    for (int i = first; c >= 2 && i < tiling.chunk; i += step) {
      const int64_t t = (c - 2) * tiling.chunk + i + token_of_pass;
      const float* const smem_out = smem_chunk + i * kFloats + TokenLayout<kSteps>::kOut;
      if (t < span.length) store_out(p.out, in_quads.out, source, t, lane % kTokenLanes, smem_out);
    }
    for (int i = first; c + 1 < num_chunks && i < tiling.chunk; i += step) {
      stage_token<io_t>(p, tiling, token, work.head, lane, smem_chunk + i * kFloats);
      const int64_t t = (c + 1) * tiling.chunk + i + step + token_of_pass;
      load_token<io_t>(p, in_quads, source, t, t < span.length, token);
    }
  }
}

}  // namespace
}  // namespace gdn::cuda
