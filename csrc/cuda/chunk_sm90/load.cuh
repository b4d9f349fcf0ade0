// SPDX-License-Identifier: Apache-2.0
// A chunk on its way in: q, k rows and gates from global memory, normalisation, running sums of the log decay.
// All by one auxiliary warpgroup of 128 threads. Thread i owns pieces of 16 bytes of rows i / 4 and 32 + i / 4 of k and q
// from the copy to the normalised value, so nothing but four lanes' sums has to be exchanged.
#pragma once

#include "../../common/params.h"
#include "../ptx/cluster.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ex2.cuh"
#include "../ptx/shared.cuh"
#include "../tile/fragment.cuh"
#include "../tile/scan.cuh"
#include "../tile/swizzle.cuh"
#include "config.h"

namespace gdn::cuda::chunk_sm90 {

constexpr int kLanesPerRow = 4;
constexpr int kRowsPerPass = kGroupThreads / kLanesPerRow;

// Gates of tokens 2 lane and 2 lane + 1 as stored bits, so that nobody waits for the loads before they are used.
struct GateBits {
  uint32_t g[2], beta[2];
};

// The pieces of a thread in its rows: piece i is chunk thread % 4 + 4 (i ^ (row % 2)), so that neighbouring rows use
// different banks. Both rows have the same row % 8.
struct Pieces {
  uint32_t first;   // offset of piece 0 in the tile; odd pieces differ in one bit, pairs of pieces by a panel
  int shift;        // columns: even pieces i lie this much right of 32 i, odd ones left of it

  __device__ __forceinline__ explicit Pieces(int thread) {
    const int row = thread / kLanesPerRow, odd = row % 2;
    first = swizzled_offset<kChunk>(row, thread % kLanesPerRow + 4 * odd);
    shift = 32 * odd;
  }
  __device__ __forceinline__ uint32_t offset(int pass, int i) const {
    return (i % 2 == 0 ? first : first ^ 64u) + (i / 2) * (kChunk * kPanelRowBytes) + pass * (kRowsPerPass * kPanelRowBytes);
  }
};

// Where a thread reads: token 0 of the sequence, its first column of k and q; elements from the base of g and beta.
struct Source {
  const uint16_t *k, *q;
  int64_t g, beta;

  __device__ __forceinline__ Source(const RuleParams& p, const Work& work, const Span& span, int thread)
      : k(static_cast<const uint16_t*>(p.k.data) + p.k.offset(span.batch, span.first, work.key_head) +
          8 * (thread % kLanesPerRow)),
        q(static_cast<const uint16_t*>(p.q.data) + p.q.offset(span.batch, span.first, work.key_head) +
          8 * (thread % kLanesPerRow)),
        g(p.g.offset(span.batch, span.first, work.head)),
        beta(p.beta.offset(span.batch, span.first, work.head)) {}
};

// Issues the copies of k and q of the chunk from token `first` on; rows from `count` on become zeros. One cp.async group.
template <int kKeyDim>
__device__ __forceinline__ void load_keys(const RuleParams& p, const Source& source, int first, int count, int thread,
                                          Stage<kKeyDim>& stage) {
  const uint32_t smem_k = ptx::shared_address(stage.k), smem_q = ptx::shared_address(stage.q);
  const Pieces pieces(thread);
#pragma unroll
  for (int pass = 0; pass < kChunk / kRowsPerPass; ++pass) {
    const int row = pass * kRowsPerPass + thread / kLanesPerRow, bytes = row < count ? 16 : 0;
    const int64_t time = first + (row < count ? row : 0);
    const uint16_t* even = source.k + time * p.k.stride[1] + pieces.shift;
    const uint16_t* odd = even - 2 * pieces.shift;
#pragma unroll
    for (int i = 0; i < kKeyDim / 32; ++i) {
      ptx::cp_async_16(smem_k + pieces.offset(pass, i), (i % 2 == 0 ? even : odd) + 32 * i, bytes);
    }
    even = source.q + time * p.q.stride[1] + pieces.shift;
    odd = even - 2 * pieces.shift;
#pragma unroll
    for (int i = 0; i < kKeyDim / 32; ++i) {
      ptx::cp_async_16(smem_q + pieces.offset(pass, i), (i % 2 == 0 ? even : odd) + 32 * i, bytes);
    }
  }
  ptx::cp_async_commit_group();
}

// Brings k and q of a later chunk to L2, a row per thread: load_keys finds them there.
template <int kKeyDim>
__device__ __forceinline__ void prefetch_keys(const RuleParams& p, const Source& source, int first, int count, int thread) {
  const int row = thread % kChunk;
  if (row >= count) return;
  const bool is_k = thread < kChunk;
  const uint16_t* const data = (is_k ? source.k : source.q) - 8 * (thread % kLanesPerRow) +
                               static_cast<int64_t>(first + row) * (is_k ? p.k.stride[1] : p.q.stride[1]);
#pragma unroll
  for (int i = 0; i < kKeyDim; i += 64) ptx::prefetch_l2(data + i);
}

// Gates of the chunk from token `first` on, by one warp; those of tokens past the end are the last token's.
__device__ __forceinline__ void load_gates(const RuleParams& p, const Source& source, int first, int count, int lane,
                                           GateBits& bits) {
  int64_t time[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) time[i] = first + min(2 * lane + i, count - 1);
  auto load = [&](const View& view, int64_t base, uint32_t (&x)[2]) {   // both loads behind one test of the dtype
    const int64_t at[2] = {base + time[0] * view.stride[1], base + time[1] * view.stride[1]};
    if (view.dtype == DType::kFloat32) {
      x[0] = static_cast<const uint32_t*>(view.data)[at[0]];
      x[1] = static_cast<const uint32_t*>(view.data)[at[1]];
    } else {
      x[0] = static_cast<const uint16_t*>(view.data)[at[0]];
      x[1] = static_cast<const uint16_t*>(view.data)[at[1]];
    }
  };
  if (p.g.given()) load(p.g, source.g, bits.g);
  if (p.beta.given()) load(p.beta, source.beta, bits.beta);
}

// Raw rows of k, then of q -> fp16 rows, divided by their length with l2norm. In place, each thread its own pieces. One
// body for both, for the instruction cache.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void normalise(Stage<kKeyDim>& stage, bool use_l2norm, int thread) {
  constexpr int kPieces = kKeyDim / 32, kPasses = kChunk / kRowsPerPass;
  const Pieces pieces(thread);
  char* base = reinterpret_cast<char*>(stage.k);
#pragma unroll 1
  for (int tensor = 0; tensor < 2; ++tensor) {
    Words<16> raw[kPasses][kPieces];
    float squares[kPasses][2] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        raw[pass][i] = *reinterpret_cast<const Words<16>*>(base + pieces.offset(pass, i));
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kPieces; ++i) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        float low, high;
        widen_pair<io_t>(raw[pass][i / 4].word[i % 4], low, high);
        squares[pass][0] += low * low;
        squares[pass][1] += high * high;
      }
    }
    float factor[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) factor[pass] = squares[pass][0] + squares[pass][1];
#pragma unroll
    for (int distance = 1; distance < kLanesPerRow; distance *= 2) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) factor[pass] += __shfl_xor_sync(0xffffffffu, factor[pass], distance);
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) factor[pass] = use_l2norm ? rsqrtf(factor[pass] + kNormEpsilon) : 1.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float low, high;
          widen_pair<io_t>(raw[pass][i].word[j], low, high);
          raw[pass][i].word[j] = round_pair_fp16(low * factor[pass], high * factor[pass]);
        }
        *reinterpret_cast<Words<16>*>(base + pieces.offset(pass, i)) = raw[pass][i];
      }
    }
    base += sizeof(stage.k);   // q lies behind k
  }
}

// log2 of the decay. One token's is cut at 2^-185, which is 0 in fp32: a sum over the chunk stays finite and keeps digits
// behind a token that forgets everything (-inf, -1e4). NaN stays.
__device__ __forceinline__ float log2_decay(float g, bool gate_is_linear) {
  const float x = gate_is_linear ? log2f(g) : g * 1.44269504f;
  return x < -185.0f ? -185.0f : x;
}

// By one warp, from the bits that load_gates left with it.
__device__ __forceinline__ void write_gates(const RuleParams& p, const GateBits& bits, int count, int lane, Gates& gates) {
  float log_decay[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool inside = 2 * lane + i < count;
    log_decay[i] =
        inside && p.g.given() ? log2_decay(widen_bits(bits.g[i], p.g.dtype), p.gate_is_linear) : 0.0f;
    beta[i] = inside ? (p.beta.given() ? widen_bits(bits.beta[i], p.beta.dtype) : 1.0f) : 0.0f;
  }
  inclusive_sum_64(log_decay[0], log_decay[1], lane);
  const float last = __shfl_sync(0xffffffffu, log_decay[1], 31);
  reinterpret_cast<float2*>(gates.sum)[lane] = make_float2(log_decay[0], log_decay[1]);
  reinterpret_cast<float2*>(gates.beta)[lane] = make_float2(beta[0], beta[1]);
  reinterpret_cast<float2*>(gates.decay)[lane] =
      make_float2(ptx::ex2_approx_ftz(log_decay[0]), ptx::ex2_approx_ftz(log_decay[1]));
  reinterpret_cast<float2*>(gates.to_end)[lane] =
      make_float2(ptx::ex2_approx_ftz(last - log_decay[0]), ptx::ex2_approx_ftz(last - log_decay[1]));
}

}  // namespace gdn::cuda::chunk_sm90
