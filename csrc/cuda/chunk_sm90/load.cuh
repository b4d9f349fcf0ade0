// SPDX-License-Identifier: Apache-2.0
// A chunk on its way in: q, k rows and gates from global memory, normalisation, running sums of the log decay.
// By 128 threads. Thread i owns pieces of 16 bytes of rows i / 4 and 32 + i / 4 of k and q from the load to the normalised
// value, so nothing but four lanes' sums has to be exchanged.
#pragma once

#include "../ptx/cp_async.cuh"
#include "../ptx/ex2.cuh"
#include "../ptx/shared.cuh"
#include "../tile/fragment.cuh"
#include "../tile/scan.cuh"
#include "../tile/swizzle.cuh"
#include "prepared.h"

namespace gdn::cuda::chunk_sm90 {

constexpr int kPrepareThreads = 128;

constexpr int kLanesPerRow = 4;
constexpr int kRowsPerPass = kPrepareThreads / kLanesPerRow;

// Which chunk a chunk row holds: tokens [first, first + count) of batch row `batch`; count 0: none.
struct ChunkOfRow {
  int64_t batch, first;
  int count;
};

// Gates of tokens 2 lane and 2 lane + 1 as stored bits, so that nobody waits for the loads before they are used.
struct GateBits {
  uint32_t g[2], beta[2];
  uint32_t A_log, dt_bias;   // of the head, where gates are raw
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

// Starts to copy the 16-bit rows of k or q, row 0 at `gmem`, to where the normalised ones will be, a thread its own pieces;
// rows from `count` on are row count - 1 once more, for who normalises to make zeros of.
template <int kKeyDim>
__device__ __forceinline__ void copy_rows_in(const char* gmem, int64_t stride, int count, int thread, fp16_t* smem_tile) {
  const Pieces pieces(thread);
  const uint32_t smem = ptx::shared_address(smem_tile);
#pragma unroll
  for (int pass = 0; pass < kChunk / kRowsPerPass; ++pass) {
    const int row = min(pass * kRowsPerPass + thread / kLanesPerRow, count - 1);
    // Opaque: each address of a row is one addition to these, not a sum of its own.
    const char* const even = ptx::opaque(gmem + 2 * row * stride) + 2 * (8 * (thread % kLanesPerRow) + pieces.shift);
    const char* const odd = ptx::opaque(even) - 4 * pieces.shift;
#pragma unroll
    for (int i = 0; i < kKeyDim / 32; ++i) {
      ptx::cp_async_16_evict_first(smem + pieces.offset(pass, i), (i % 2 == 0 ? even : odd) + 64 * i, 16);
    }
  }
}

// Gates of a value head for the chunk, by one warp; those of missing tokens are the last token's.
__device__ __forceinline__ void load_gates(const RuleParams& p, const ChunkOfRow& chunk, int64_t head, int lane,
                                           GateBits& bits) {
  const int64_t token[2] = {min(2 * lane, chunk.count - 1), min(2 * lane + 1, chunk.count - 1)};
  auto load = [&](const View& view, uint32_t (&x)[2]) {   // both loads behind one test of the dtype
    const int64_t start = ptx::opaque(view.offset(chunk.batch, chunk.first, head));
    const int64_t at[2] = {start + token[0] * view.stride[1], start + token[1] * view.stride[1]};
    if (view.dtype == DType::kFloat32) {
      x[0] = static_cast<const uint32_t*>(view.data)[at[0]];
      x[1] = static_cast<const uint32_t*>(view.data)[at[1]];
    } else {
      x[0] = static_cast<const uint16_t*>(view.data)[at[0]];
      x[1] = static_cast<const uint16_t*>(view.data)[at[1]];
    }
  };
  if (p.g.given()) load(p.g, bits.g);
  if (p.beta.given()) load(p.beta, bits.beta);
  if (p.A_log.given()) bits.A_log = load_bits(p.A_log.data, p.A_log.dtype, p.A_log.offset(head));
  if (p.dt_bias.given()) bits.dt_bias = load_bits(p.dt_bias.data, p.dt_bias.dtype, p.dt_bias.offset(head));
}

// With l2norm a row of k is kept times a power of two, 2^(ceil(-log2 length)), which fp16 holds exactly (but for elements below
// 2^-14 of the row): what rounding a normalised key does to the state would be half of all errors where keys are alike. Times
// k_scale, 1/2 to 1, it is the normalised row. The last token's row is kept normalised: there decay * k_scale is the decay of
// the whole chunk.
struct KeyFactors {
  float power, k_scale, inverse;   // inverse: 1 / k_scale
};
GDN_INLINE KeyFactors key_factors(float squares, float factor, int row) {
  if (row == kChunk - 1 || factor == 0.0f) return {factor, 1.0f, 1.0f};   // 0: missing, or its squares overflow
  const uint32_t power = (float_bits(factor) + 0x007fffffu) & 0x7f800000u;
  const float k_scale = factor * bits_float(0x7f000000u - power);
  return {bits_float(power), k_scale, bits_float(power) * ((squares + kNormEpsilon) * factor)};
}

// What a row of k or q is to be multiplied by: 1 / length with l2norm, 0 from row `count` on.
__device__ __forceinline__ float row_factor(float squares, bool use_l2norm, bool is_inside) {
  return !is_inside ? 0.0f : use_l2norm ? rsqrtf(squares + kNormEpsilon) : 1.0f;
}

// A thread's pieces of a row of k or q as they came in -> times factor_of(row, pieces, sum of the row's squares), fp16, in the
// same place and, if there is one, in its image.
template <class io_t, int kKeyDim, class FactorOf>
__device__ __forceinline__ void scale_row(int pass, int thread, fp16_t* smem_tile, fp16_t* gmem_image,
                                          const FactorOf& factor_of) {
  constexpr int kPieces = kKeyDim / 32;
  const Pieces pieces(thread);
  const auto piece_of = [&](fp16_t* tile, int i) {
    return reinterpret_cast<Words<16>*>(reinterpret_cast<char*>(tile) + pieces.offset(pass, i));
  };
  Words<16> piece[kPieces];
  float squares[2] = {};
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    piece[i] = *piece_of(smem_tile, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float low, high;
      widen_pair<io_t>(piece[i].word[j], low, high);
      squares[0] += low * low;
      squares[1] += high * high;
    }
  }
  float sum = squares[0] + squares[1];
#pragma unroll
  for (int distance = 1; distance < kLanesPerRow; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  const float factor = factor_of(pass * kRowsPerPass + thread / kLanesPerRow, piece, sum);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float low, high;
      widen_pair<io_t>(piece[i].word[j], low, high);
      piece[i].word[j] = round_pair_fp16(low * factor, high * factor);
    }
    *piece_of(smem_tile, i) = piece[i];
    if (gmem_image != nullptr) *piece_of(gmem_image, i) = piece[i];
  }
}

// What the rule takes of the gates, from the bits that load_gates left: g, the log decay or the decay itself, and beta of
// tokens 2 lane and 2 lane + 1. What is not given is of no account.
__device__ __forceinline__ void read_gates(const RuleParams& p, const GateBits& bits, float (&g)[2], float (&beta)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    g[i] = widen_bits(bits.g[i], p.g.dtype);
    beta[i] = widen_bits(bits.beta[i], p.beta.dtype);
  }
  if (p.gate_domain == GateDomain::kRaw) {
    const float rate = decay_rate(widen_bits(bits.A_log, p.A_log.dtype)), dt_bias = widen_bits(bits.dt_bias, p.dt_bias.dtype);
#pragma unroll
    for (int i = 0; i < 2; ++i) g[i] = log_decay_at(rate, g[i], dt_bias);
  }
  if (p.beta_is_raw) {
#pragma unroll
    for (int i = 0; i < 2; ++i) beta[i] = write_strength(beta[i], p.allow_neg_eigval);
  }
}

// log2 of the decay, from what read_gates gives. One token's is cut at 2^-185, which is 0 in fp32: a sum over the chunk stays
// finite and keeps digits behind a token that forgets everything (-inf, -1e4). NaN stays.
__device__ __forceinline__ float log2_decay(float g, GateDomain domain) {
  const float x = domain == GateDomain::kLinear ? log2f(g) : g * 1.44269504f;
  return x < -185.0f ? -185.0f : x;
}

// By one warp, from the bits that load_gates left with it: running sums and betas of tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ void sum_gates(const RuleParams& p, const GateBits& bits, int count, int lane, float2& sum,
                                          float2& beta) {
  float log_decay[2], factor[2];
  read_gates(p, bits, log_decay, factor);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool inside = 2 * lane + i < count;
    log_decay[i] = inside && p.g.given() ? log2_decay(log_decay[i], p.gate_domain) : 0.0f;
    factor[i] = inside ? (p.beta.given() ? factor[i] : 1.0f) : 0.0f;
  }
  inclusive_sum_64(log_decay[0], log_decay[1], lane);
  sum = make_float2(log_decay[0], log_decay[1]);
  beta = make_float2(factor[0], factor[1]);
}

// What the carriers of the state need of the gates, from the running sums and k_scales of tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ void write_gates(const float2& sum, const float2& k_scale, int lane, Gates* gmem) {
  *reinterpret_cast<float2*>(gmem->read + token_place(2 * lane)) =
      make_float2(ptx::ex2_approx_ftz(sum.x) * k_scale.x, ptx::ex2_approx_ftz(sum.y) * k_scale.y);
}

}  // namespace gdn::cuda::chunk_sm90
