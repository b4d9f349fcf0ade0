// SPDX-License-Identifier: Apache-2.0
// What every path of the causal convolution shares: how a launch is cut, the weights, which sequence a token belongs to,
// and the convolution one element at a time, for any strides and any mix of dtypes.
#pragma once

#include <cstdint>

#include "../common/conv.h"
#include "../common/gates.h"
#include "../common/params.h"
#include "tile/pack.cuh"

namespace gdn::cuda {

constexpr int kThreads = 128;
constexpr int kWidth = kMaxTaps;   // taps of every vectorised path, and the most there can be

// How a launch is cut. The first head_blocks blocks own one (sequence, channel) per thread, see sequence_head.
struct Tiles {
  int64_t head_blocks, num_blocks;
  int64_t head_outputs;        // outputs per sequence that its head computes
  int64_t fast, slow;          // blocks, or items, along the two axes of x
  int run;                     // channels contiguous: tokens per thread
  int token_lanes_log2;        // tokens contiguous: threads along the tokens
  bool tokens_fast;            // not vectorised: which axis neighbouring threads follow
};

// ---- weights ----

// Taps of kChannels channels, [kChannels][kWidth], and their biases.
template <int kChannels>
__device__ __forceinline__ void load_weights(const ConvParams& p, int64_t c, float* weight, float* bias) {
  load_rows<kChannels, kWidth>(p.weight, c, weight);
#pragma unroll
  for (int e = 0; e < kChannels; ++e) bias[e] = 0.0f;
  if (p.bias.given()) load_rows<kChannels, 1>(p.bias, c, bias);
}

// ---- which sequence a token belongs to ----

// Tokens [first, last) of a batch row that share a fate. Not live (padding slot, outside cu_seqlens): outputs are zero.
struct Place {
  int64_t first, last;
  bool is_live;
};

// Without a conv_state no slot is looked up: nothing is padding.
GDN_INLINE bool is_live_row(const ConvParams& p, int64_t n) {
  return !p.conv_state.given() || slot_of_row(p.slots, n, p.pool) >= 0;
}

// The last sequence that starts at or before t, by bisection: of equal offsets (empty sequences) the one that holds t.
// Offsets that do not ascend give some place; every access below is bounded by T, not by them.
GDN_INLINE Place place_of_token(const ConvParams& p, int64_t b, int64_t t) {
  if (!p.cu_seqlens.given()) return {0, p.T, is_live_row(p, b)};
  int64_t low = 0, high = p.N + 1;   // offsets before low are <= t, offsets from high on are > t
  while (low < high) {
    const int64_t middle = (low + high) >> 1;
    if (p.cu_seqlens.at(middle) <= t) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const int64_t n = low - 1;
  if (n < 0) {
    const int64_t start = p.cu_seqlens.at(0);
    return {0, start < p.T ? start : p.T, false};
  }
  if (n >= p.N) return {0, p.T, false};
  const Span span = sequence_span(p.cu_seqlens, n, p.T);
  return {span.first, span.first + span.length, is_live_row(p, n)};
}

GDN_INLINE int32_t document_of_token(const ConvParams& p, int64_t b, int64_t t) {
  return static_cast<const int32_t*>(p.seq_idx.data)[b * p.seq_idx_row + t * p.seq_idx.stride];
}

// Where there are windows, a sequence's first W - 1 outputs are computed by its head.
GDN_INLINE bool is_output_of_head(const ConvParams& p, const Place& place, int64_t t) {
  return p.conv_state.given() && t - place.first < p.width - 1;
}

// ---- one element at a time: any strides, any mix of dtypes ----

// One output from x alone. Taps before the place's first token count as zero.
GDN_INLINE float output_at(const ConvParams& p, int64_t b, int64_t c, int64_t t, int64_t first) {
  const bool has_documents = p.seq_idx.given();
  const int32_t document = has_documents ? document_of_token(p, b, t) : 0;
  if (document < 0) return 0.0f;
  float acc = p.bias.given() ? p.bias.load(p.bias.offset(c)) : 0.0f;
  for (int64_t k = 0; k < p.width; ++k) {
    const int64_t tap = t - (p.width - 1) + k;
    const bool counts = tap >= first && (!has_documents || document_of_token(p, b, tap) == document);
    const float x = counts ? p.x.load(p.x.offset(b, c, tap)) : 0.0f;
    acc = fma(p.weight.load(p.weight.offset(c, k)), x, acc);
  }
  return p.use_silu ? silu(acc) : acc;
}

// Token t of channel c, unless its head writes it. place: that of an earlier token of the row, brought up to t.
GDN_INLINE void write_token(const ConvParams& p, int64_t b, int64_t c, int64_t t, Place& place) {
  if (t >= place.last) place = place_of_token(p, b, t);
  if (place.is_live && is_output_of_head(p, place, t)) return;
  p.out.store(p.out.offset(b, c, t), place.is_live ? output_at(p, b, c, t, place.first) : 0.0f);
}

// What touches a window: the first head_outputs outputs of sequence n, channel c, and the window after its last token.
// The body reads no window, so the one thread that reads this window is the one that rewrites it: no order between
// blocks is needed.
GDN_INLINE void sequence_head(const ConvParams& p, int64_t n, int64_t c, int64_t head_outputs) {
  const Span span = sequence_span(p.cu_seqlens, n, p.T);
  const int64_t slot = slot_of_row(p.slots, n, p.pool);
  const int64_t num_outputs = span.length < head_outputs ? span.length : head_outputs;
  const int width = static_cast<int>(p.width), window = static_cast<int>(p.window);
  const int64_t gmem_x = p.x.offset(span.batch, c, span.first), gmem_out = p.out.offset(span.batch, c, span.first);
  if (slot < 0) {
    for (int64_t t = 0; t < num_outputs; ++t) p.out.store(gmem_out + t * p.out.stride[2], 0.0f);
    return;
  }
  const bool has_past = p.has_initial_state.at(n);
  ConvTaps taps;
  taps.bias = p.bias.given() ? p.bias.load(p.bias.offset(c)) : 0.0f;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int column = j - (kWidth - window), k = j - (kWidth - width);
    taps.past[j] = has_past && column >= 0 ? p.conv_state.load(p.conv_state.offset(slot, c, column)) : 0.0f;
    taps.weight[j] = k >= 0 ? p.weight.load(p.weight.offset(c, k)) : 0.0f;
  }
  for (int64_t t = 0; t < num_outputs; ++t) {
    const float acc = taps.push(p.x.load(gmem_x + t * p.x.stride[2]), width);
    p.out.store(gmem_out + t * p.out.stride[2], p.use_silu ? silu(acc) : acc);
  }
  const bool stays = span.length == 0 && has_past;
  if (!p.write_state || stays) return;
  int64_t t = span.length - window;   // what the window takes from beyond the outputs above
  for (t = t < num_outputs ? num_outputs : t; t < span.length; ++t) {
    taps.push(p.x.load(gmem_x + t * p.x.stride[2]), width);
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int column = j - (kWidth - window);
    if (column >= 0) p.conv_state.store(p.conv_state.offset(slot, c, column), taps.past[j]);
  }
}

// Head blocks: kThreads channels of one sequence.
__device__ __forceinline__ void head_block(const ConvParams& p, const Tiles& tiles, int64_t block) {
  const int64_t channel_blocks = ceil_div(p.C, kThreads);
  const int64_t n = block / channel_blocks;
  const int64_t c = (block - n * channel_blocks) * kThreads + threadIdx.x;
  if (c < p.C) sequence_head(p, n, c, tiles.head_outputs);
}

}  // namespace gdn::cuda
