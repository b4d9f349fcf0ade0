// SPDX-License-Identifier: Apache-2.0
// Depthwise causal convolution of a few taps: over many tokens, and one to eight tokens at a time behind a kept window.
//
//     out[c, t] = act(bias[c] + sum_k weight[c, k] * x[c, t - (W-1) + k])     fp32, fma, oldest tap first, rounded once
//
// Taps before a sequence's first token come from its window in conv_state, or count as zero. Every path below does the
// same operations in the same order: layout, tile and packing leave no mark in the bits.

#include "../common/gates.h"
#include "launch.cuh"
#include "ops.h"
#include "tile/pack.cuh"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWidth = 4;             // taps of every vectorised path, and the most there can be
constexpr int kRound = 4;            // vectors that a thread has in flight, and the length of its ring of taps
constexpr int kSlowAxis = 8;         // elements of the slower axis per thread where nothing is vectorised
constexpr int kLongestRun = 32;      // tokens per thread, channels contiguous: re-reads 3 of 32 from the L2
constexpr int kUpdateTokens = 8;     // most tokens that an update takes
constexpr int kUpdateChannels = 4;   // per thread of the vectorised update

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
// blocks is needed. past[j] holds the input at position j - 4 before the current token.
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
  const float bias = p.bias.given() ? p.bias.load(p.bias.offset(c)) : 0.0f;
  float past[kWidth], weight[kWidth];   // both right-aligned
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int column = j - (kWidth - window), k = j - (kWidth - width);
    past[j] = has_past && column >= 0 ? p.conv_state.load(p.conv_state.offset(slot, c, column)) : 0.0f;
    weight[j] = k >= 0 ? p.weight.load(p.weight.offset(c, k)) : 0.0f;
  }
  for (int64_t t = 0; t < num_outputs; ++t) {
#pragma unroll
    for (int j = 0; j + 1 < kWidth; ++j) past[j] = past[j + 1];
    past[kWidth - 1] = p.x.load(gmem_x + t * p.x.stride[2]);
    float acc = bias;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (j >= kWidth - width) acc = fma(weight[j], past[j], acc);
    }
    p.out.store(gmem_out + t * p.out.stride[2], p.use_silu ? silu(acc) : acc);
  }
  const bool stays = span.length == 0 && has_past;
  if (!p.write_state || stays) return;
  int64_t t = span.length - window;   // what the window takes from beyond the outputs above
  for (t = t < num_outputs ? num_outputs : t; t < span.length; ++t) {
#pragma unroll
    for (int j = 0; j + 1 < kWidth; ++j) past[j] = past[j + 1];
    past[kWidth - 1] = p.x.load(gmem_x + t * p.x.stride[2]);
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int column = j - (kWidth - window);
    if (column >= 0) p.conv_state.store(p.conv_state.offset(slot, c, column), past[j]);
  }
}

// Head blocks: kThreads channels of one sequence.
__device__ __forceinline__ void head_block(const ConvParams& p, const Tiles& tiles, int64_t block) {
  const int64_t channel_blocks = ceil_div(p.C, kThreads);
  const int64_t n = block / channel_blocks;
  const int64_t c = (block - n * channel_blocks) * kThreads + threadIdx.x;
  if (c < p.C) sequence_head(p, n, c, tiles.head_outputs);
}

// Convolution where nothing can be vectorised: odd strides, odd C, mixed dtypes, W < 4; and such updates (heads alone).
// Grid    x: heads (sequence, kThreads channels), then B * slow * fast tiles of kSlowAxis x kThreads elements.
// Block   neighbouring threads follow the axis of x with the smaller stride; a thread takes kSlowAxis of the other.
// Reads   x, W times each through the L1.   Writes out; the heads: conv_state.
__global__ void __launch_bounds__(kThreads, 4) conv_any(const __grid_constant__ ConvParams p,
                                                        const __grid_constant__ Tiles tiles) {
  for (int64_t block = blockIdx.x; block < tiles.num_blocks; block += gridDim.x) {
    if (block < tiles.head_blocks) {
      head_block(p, tiles, block);
      continue;
    }
    const int64_t tile = block - tiles.head_blocks;
    const int64_t row = tile / tiles.fast, b = row / tiles.slow;
    const int64_t fast = (tile - row * tiles.fast) * kThreads + threadIdx.x;
    const int64_t slow = (row - b * tiles.slow) * kSlowAxis;
    Place place = {0, 0, false};   // holds no token: the first one looks its own up
    for (int i = 0; i < kSlowAxis; ++i) {
      const int64_t c = tiles.tokens_fast ? slow + i : fast, t = tiles.tokens_fast ? fast : slow + i;
      if (c < p.C && t < p.T) write_token(p, b, c, t, place);
    }
  }
}

// ---- channels contiguous ----

// Outputs of one token for a vector of channels. ring[s] holds the inputs of the token with number s modulo 4 and
// document[s] its seq_idx; the current token is in `slot`, a constant once the callers' loops are unrolled.
template <class io_t, bool kPacked>
__device__ __forceinline__ void write_channels(const ConvParams& p, const float (&ring)[kRound][kVector<io_t>],
                                               const int32_t (&document)[kRound], const float* weight,
                                               const float* bias, int slot, io_t* gmem_out) {
  constexpr int kChannels = kVector<io_t>;
  float acc[kChannels];
#pragma unroll
  for (int e = 0; e < kChannels; ++e) {
    acc[e] = bias[e];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const int tap = (slot + kRound - (kWidth - 1) + k) % kRound;
      const bool counts = !kPacked || document[tap] == document[slot];
      acc[e] = fma(weight[e * kWidth + k], counts ? ring[tap][e] : 0.0f, acc[e]);
    }
  }
  if (p.use_silu) {
#pragma unroll
    for (int e = 0; e < kChannels; ++e) acc[e] = silu(acc[e]);
  }
  if (kPacked && document[slot] < 0) {
#pragma unroll
    for (int e = 0; e < kChannels; ++e) acc[e] = 0.0f;
  }
  store_pack<io_t, kChannels>(gmem_out, acc);
}

// A run of tokens for a vector of channels: tokens t0 .. t0 + count of row b, channels from c. A round of kRound tokens
// inside one sequence goes without a test; a round with a boundary, or with a head's outputs, goes token by token.
template <class io_t, bool kPacked>
__device__ __forceinline__ void run_of_channels(const ConvParams& p, int64_t b, int64_t c, int64_t t0, int count) {
  constexpr int kChannels = kVector<io_t>;
  const io_t* gmem_x = static_cast<const io_t*>(p.x.data) + p.x.offset(b, c, t0);
  io_t* gmem_out = static_cast<io_t*>(p.out.data) + p.out.offset(b, c, t0);
  float weight[kChannels * kWidth], bias[kChannels], ring[kRound][kChannels];
  int32_t document[kRound] = {};
  load_weights<kChannels>(p, c, weight, bias);
  Place place = place_of_token(p, b, t0);
#pragma unroll
  for (int s = 0; s < kRound; ++s) {   // the tokens before the run in slots 1 to 3
#pragma unroll
    for (int e = 0; e < kChannels; ++e) ring[s][e] = 0.0f;
    const int64_t t = t0 - kRound + s;
    if (s > kRound - kWidth && t >= place.first) {
      unpack<io_t, kChannels>(load_pack<io_t, kChannels>(gmem_x + (s - kRound) * p.x.stride[2]), ring[s]);
      if (kPacked) document[s] = document_of_token(p, b, t);
    }
  }
  for (int i = 0; i < count; i += kRound) {
    const int64_t t = t0 + i;
    const bool is_inside = place.is_live && t - place.first >= kWidth - 1 && t + kRound <= place.last;
    if (is_inside && i + kRound <= count) {
      PackOf<io_t, kChannels> pack[kRound];
#pragma unroll
      for (int s = 0; s < kRound; ++s) pack[s] = load_pack<io_t, kChannels>(gmem_x + s * p.x.stride[2]);
#pragma unroll
      for (int s = 0; s < kRound; ++s) {
        unpack<io_t, kChannels>(pack[s], ring[s]);
        if (kPacked) document[s] = document_of_token(p, b, t + s);
        write_channels<io_t, kPacked>(p, ring, document, weight, bias, s, gmem_out + s * p.out.stride[2]);
      }
    } else {
#pragma unroll 1
      for (int j = 0; j < kRound && i + j < count; ++j) {   // the current token in slot 0, then all move down by one
        if (t + j >= place.last) {
          place = place_of_token(p, b, t + j);
#pragma unroll
          for (int s = 1; s < kRound; ++s) {
#pragma unroll
            for (int e = 0; e < kChannels; ++e) ring[s][e] = 0.0f;
          }
        }
        unpack<io_t, kChannels>(load_pack<io_t, kChannels>(gmem_x + j * p.x.stride[2]), ring[0]);
        if (kPacked) document[0] = document_of_token(p, b, t + j);
        if (!place.is_live) {
          const float zeros[kChannels] = {};
          store_pack<io_t, kChannels>(gmem_out + j * p.out.stride[2], zeros);
        } else if (!is_output_of_head(p, place, t + j)) {
          write_channels<io_t, kPacked>(p, ring, document, weight, bias, 0, gmem_out + j * p.out.stride[2]);
        }
#pragma unroll
        for (int s = 1; s < kRound; ++s) {
          document[s] = document[(s + 1) % kRound];
#pragma unroll
          for (int e = 0; e < kChannels; ++e) ring[s][e] = ring[(s + 1) % kRound][e];
        }
      }
    }
    gmem_x += kRound * p.x.stride[2];
    gmem_out += kRound * p.out.stride[2];
  }
}

// Convolution with the channels contiguous in x and out, one dtype for both.
// Grid    x: heads (sequence, kThreads channels), then B * ceil(T / run) * C / kVector threads, channels fastest.
// Block   a thread keeps the taps and the last inputs of a vector of channels in registers and walks `run` tokens.
// Reads   x once by 16 bytes, and W - 1 tokens before each run once more (from the L2), weights once a run.
// Writes  out by 16 bytes; the heads: conv_state.
// Needs   W = 4; C, strides and addresses in multiples of 16 bytes; any arch. kPacked: seq_idx is given.
template <class io_t, bool kPacked>
__global__ void __launch_bounds__(kThreads, 4) conv_channels(const __grid_constant__ ConvParams p,
                                                             const __grid_constant__ Tiles tiles) {
  for (int64_t block = blockIdx.x; block < tiles.num_blocks; block += gridDim.x) {
    if (block < tiles.head_blocks) {
      head_block(p, tiles, block);
      continue;
    }
    const int64_t item = (block - tiles.head_blocks) * kThreads + threadIdx.x;
    const int64_t row = item / tiles.fast, b = row / tiles.slow;
    const int64_t c = (item - row * tiles.fast) * kVector<io_t>, t0 = (row - b * tiles.slow) * tiles.run;
    if (b >= p.B) continue;
    const int count = p.T - t0 < tiles.run ? static_cast<int>(p.T - t0) : tiles.run;
    run_of_channels<io_t, kPacked>(p, b, c, t0, count);
  }
}

// ---- tokens contiguous ----

// Convolution with the tokens contiguous in x and out, one dtype for both.
// Grid    x: heads (sequence, kThreads channels), then B * slow * fast tiles.
// Block   2^token_lanes_log2 threads follow the tokens of a channel, kRound vectors each; the rest take more channels.
// Reads   x by 16 bytes, the four elements before each vector once more (from the L1), weights once a thread.
// Writes  out by 16 bytes; the heads: conv_state.
// Needs   W = 4; the strides of b and c and the addresses in multiples of 16 bytes; no seq_idx; any arch.
// Order   a vector that is not whole or holds a boundary goes element by element: same operations.
template <class io_t>
__global__ void __launch_bounds__(kThreads, 4) conv_tokens(const __grid_constant__ ConvParams p,
                                                           const __grid_constant__ Tiles tiles) {
  constexpr int kTokens = kVector<io_t>;
  for (int64_t block = blockIdx.x; block < tiles.num_blocks; block += gridDim.x) {
    if (block < tiles.head_blocks) {
      head_block(p, tiles, block);
      continue;
    }
    const int64_t tile = block - tiles.head_blocks;
    const int64_t row = tile / tiles.fast, b = row / tiles.slow;
    const int lanes_log2 = tiles.token_lanes_log2, extent = kTokens << lanes_log2;
    const int64_t c = (row - b * tiles.slow) * (kThreads >> lanes_log2) + (threadIdx.x >> lanes_log2);
    const int lane = static_cast<int>(threadIdx.x) & ((1 << lanes_log2) - 1);
    const int64_t t0 = (tile - row * tiles.fast) * (extent * kRound) + lane * kTokens;
    if (c >= p.C) continue;
    const io_t* gmem_x = static_cast<const io_t*>(p.x.data) + p.x.offset(b, c);
    io_t* gmem_out = static_cast<io_t*>(p.out.data) + p.out.offset(b, c);
    PackOf<io_t, kTokens> pack[kRound];
    PackOf<io_t, kWidth> before[kRound];
#pragma unroll
    for (int i = 0; i < kRound; ++i) {
      const int64_t t = t0 + i * extent;
      if (t + kTokens <= p.T) pack[i] = load_pack<io_t, kTokens>(gmem_x + t);
      if (t > 0 && t < p.T) before[i] = load_pack<io_t, kWidth>(gmem_x + t - kWidth);
    }
    float weight[kWidth], bias;
    load_weights<1>(p, c, weight, &bias);
    Place place = {0, 0, false};
    unsigned left_over = 0;   // bit i: vector i goes element by element
#pragma unroll
    for (int i = 0; i < kRound; ++i) {
      const int64_t t = t0 + i * extent;
      if (t >= p.T) break;
      if (t >= place.last) place = place_of_token(p, b, t);
      if (place.is_live && t - place.first >= kWidth - 1 && t + kTokens <= place.last) {
        float x[kWidth + kTokens], acc[kTokens];
        unpack<io_t, kWidth>(before[i], x);
        unpack<io_t, kTokens>(pack[i], x + kWidth);
#pragma unroll
        for (int e = 0; e < kTokens; ++e) {
          acc[e] = bias;
#pragma unroll
          for (int k = 0; k < kWidth; ++k) acc[e] = fma(weight[k], x[1 + e + k], acc[e]);
        }
        if (p.use_silu) {
#pragma unroll
          for (int e = 0; e < kTokens; ++e) acc[e] = silu(acc[e]);
        }
        store_pack<io_t, kTokens>(gmem_out + t, acc);
      } else {
        left_over |= 1u << i;
      }
    }
    place = {0, 0, false};
#pragma unroll 1
    for (int i = 0; i < kRound * kTokens; ++i) {
      const int64_t t = t0 + (i / kTokens) * extent + i % kTokens;
      if ((left_over >> (i / kTokens) & 1) != 0 && t < p.T) write_token(p, b, c, t, place);
    }
  }
}

// ---- one to eight tokens behind a kept window ----

// Update with channels contiguous, a dense window, and one dtype for x, out and conv_state.
// Grid    x: N * ceil(C / (4 * kThreads)), channels fastest.   Block: a thread per kUpdateChannels channels of a row.
// Reads   x, the window (both in flight at once), the weights.   Writes out and the window, by 8 or 16 bytes.
// Needs   W = 4, window 3 or 4, C a multiple of 4, strides and addresses likewise; kOneToken: T = 1. Any arch.
template <class io_t, int kWindow, bool kOneToken>
__global__ void __launch_bounds__(kThreads) conv_update(const __grid_constant__ ConvParams p,
                                                        const __grid_constant__ Tiles tiles) {
  constexpr int kChannels = kUpdateChannels, kTokens = kOneToken ? 1 : kUpdateTokens;
  for (int64_t block = blockIdx.x; block < tiles.num_blocks; block += gridDim.x) {
    const int64_t n = block / tiles.fast;
    const int64_t c = ((block - n * tiles.fast) * kThreads + threadIdx.x) * kChannels;
    if (c >= p.C) continue;
    const io_t* gmem_x = static_cast<const io_t*>(p.x.data) + p.x.offset(n, c);
    io_t* gmem_out = static_cast<io_t*>(p.out.data) + p.out.offset(n, c);
    const int64_t slot = slot_of_row(p.slots, n, p.pool);
    if (slot < 0) {
      const float zeros[kChannels] = {};
      for (int64_t t = 0; t < p.T; ++t) store_pack<io_t, kChannels>(gmem_out + t * p.out.stride[2], zeros);
      continue;
    }
    io_t* gmem_window = static_cast<io_t*>(p.conv_state.data) + p.conv_state.offset(slot, c);
    const bool has_past = p.has_initial_state.at(n);
    PackOf<io_t, kChannels> pack[kTokens];
    float window[kChannels * kWindow] = {}, weight[kChannels * kWidth], bias[kChannels];   // [channel][column]
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t < p.T) pack[t] = load_pack<io_t, kChannels>(gmem_x + t * p.x.stride[2]);
    }
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
      if (!has_past) break;
      unpack<io_t, kChannels>(load_pack<io_t, kChannels>(gmem_window + i * kChannels), window + i * kChannels);
    }
    load_weights<kChannels>(p, c, weight, bias);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= p.T) break;
      float x[kChannels], acc[kChannels];
      unpack<io_t, kChannels>(pack[t], x);
#pragma unroll
      for (int e = 0; e < kChannels; ++e) {
        float* past = window + e * kWindow;
        acc[e] = bias[e];
#pragma unroll
        for (int k = 0; k + 1 < kWidth; ++k) {
          acc[e] = fma(weight[e * kWidth + k], past[kWindow - (kWidth - 1) + k], acc[e]);
        }
        acc[e] = fma(weight[e * kWidth + kWidth - 1], x[e], acc[e]);
#pragma unroll
        for (int k = 0; k + 1 < kWindow; ++k) past[k] = past[k + 1];
        past[kWindow - 1] = x[e];
      }
      if (p.use_silu) {
#pragma unroll
        for (int e = 0; e < kChannels; ++e) acc[e] = silu(acc[e]);
      }
      store_pack<io_t, kChannels>(gmem_out + t * p.out.stride[2], acc);
    }
    if (!p.write_state) continue;
#pragma unroll
    for (int i = 0; i < kWindow; ++i) store_pack<io_t, kChannels>(gmem_window + i * kChannels, window + i * kChannels);
  }
}

// ---- launchers ----

enum class Path { kAny, kChannels, kTokens };

// Can `axis` (1: channels, 2: tokens) of x or out be moved `bytes` at a time? An axis of one element has no stride.
bool is_vector_axis(const View& view, const ConvParams& p, int axis, int64_t bytes) {
  const int64_t size[3] = {p.B, p.C, p.T}, elements = bytes / dtype_size(view.dtype);
  bool fits = view.stride[axis] == 1 && reinterpret_cast<uintptr_t>(view.data) % bytes == 0;
  for (int i = 0; i < 3; ++i) fits = fits && (i == axis || size[i] == 1 || view.stride[i] % elements == 0);
  return fits;
}

Path pick(const ConvParams& p) {
  const bool is_whole = p.C % (16 / dtype_size(p.x.dtype)) == 0;
  if (p.width != kWidth || p.x.dtype != p.out.dtype) return Path::kAny;
  if (is_whole && is_vector_axis(p.x, p, 1, 16) && is_vector_axis(p.out, p, 1, 16)) return Path::kChannels;
  const bool has_documents = p.seq_idx.given();
  if (!has_documents && is_vector_axis(p.x, p, 2, 16) && is_vector_axis(p.out, p, 2, 16)) return Path::kTokens;
  return Path::kAny;
}

bool can_vectorise_update(const ConvParams& p) {
  const int64_t bytes = kUpdateChannels * dtype_size(p.x.dtype);
  return p.width == kWidth && p.x.dtype == p.out.dtype && p.x.dtype == p.conv_state.dtype &&
         p.C % kUpdateChannels == 0 && is_vector_axis(p.x, p, 1, bytes) && is_vector_axis(p.out, p, 1, bytes) &&
         p.conv_state.stride[2] == 1 && p.conv_state.stride[1] == p.window &&
         p.conv_state.stride[0] % kUpdateChannels == 0 &&
         reinterpret_cast<uintptr_t>(p.conv_state.data) % bytes == 0;
}

Tiles head_tiles(const ConvParams& p, int64_t head_outputs) {
  Tiles tiles = {};
  tiles.head_blocks = p.conv_state.given() ? p.N * ceil_div(p.C, kThreads) : 0;
  tiles.num_blocks = tiles.head_blocks;
  tiles.head_outputs = head_outputs;
  return tiles;
}

const char* launch_any(const ConvParams& p, Tiles tiles, void* stream) {
  tiles.tokens_fast = p.T > 1 && (p.x.stride[2] < p.x.stride[1] || p.C == 1);
  tiles.fast = ceil_div(tiles.tokens_fast ? p.T : p.C, kThreads);
  tiles.slow = ceil_div(tiles.tokens_fast ? p.C : p.T, kSlowAxis);
  tiles.num_blocks += p.B * tiles.slow * tiles.fast;
  return launch(conv_any, tiles.num_blocks, kThreads, 0, stream, p, tiles);
}

template <class io_t>
const char* launch_channels(const ConvParams& p, Tiles tiles, void* stream) {
  tiles.fast = p.C / kVector<io_t>;
  const int64_t enough = int64_t{4} * kThreads * num_multiprocessors();   // threads that fill the chip once
  for (tiles.run = kLongestRun; tiles.run > kRound; tiles.run /= 2) {
    if (p.B * ceil_div(p.T, tiles.run) * tiles.fast >= enough) break;
  }
  tiles.slow = ceil_div(p.T, tiles.run);
  tiles.num_blocks += ceil_div(p.B * tiles.slow * tiles.fast, kThreads);
  if (p.seq_idx.given()) {
    return launch(conv_channels<io_t, true>, tiles.num_blocks, kThreads, 0, stream, p, tiles);
  }
  return launch(conv_channels<io_t, false>, tiles.num_blocks, kThreads, 0, stream, p, tiles);
}

template <class io_t>
const char* launch_tokens(const ConvParams& p, Tiles tiles, void* stream) {
  const int64_t vectors = ceil_div(p.T, kVector<io_t>);
  tiles.token_lanes_log2 = 3;   // at least 128 bytes of a channel side by side
  while ((kThreads >> tiles.token_lanes_log2) > 1 && (int64_t{kRound} << tiles.token_lanes_log2) < vectors) {
    ++tiles.token_lanes_log2;
  }
  tiles.fast = ceil_div(vectors, int64_t{kRound} << tiles.token_lanes_log2);
  tiles.slow = ceil_div(p.C, kThreads >> tiles.token_lanes_log2);
  tiles.num_blocks += p.B * tiles.slow * tiles.fast;
  return launch(conv_tokens<io_t>, tiles.num_blocks, kThreads, 0, stream, p, tiles);
}

template <class io_t>
const char* launch_update(const ConvParams& p, Tiles tiles, void* stream) {
  tiles.fast = ceil_div(p.C, kUpdateChannels * kThreads);
  tiles.num_blocks = p.N * tiles.fast;
  const bool keeps_width = p.window == kWidth;
  auto* kernel = p.T == 1 ? (keeps_width ? conv_update<io_t, 4, true> : conv_update<io_t, 3, true>)
                          : (keeps_width ? conv_update<io_t, 4, false> : conv_update<io_t, 3, false>);
  return launch(kernel, tiles.num_blocks, kThreads, 0, stream, p, tiles);
}

}  // namespace

const char* causal_conv1d(const ConvParams& params, void* stream) {
  if (params.B == 0 || params.C == 0) return nullptr;
  const Tiles tiles = head_tiles(params, params.width - 1);
  const Path path = pick(params);
  if (path == Path::kAny || params.T == 0) return launch_any(params, tiles, stream);
  const char* error = nullptr;
  dispatch_dtype(params.x.dtype, [&](auto io) {
    using io_t = decltype(io);
    error = path == Path::kChannels ? launch_channels<io_t>(params, tiles, stream)
                                    : launch_tokens<io_t>(params, tiles, stream);
  });
  return error;
}

const char* causal_conv1d_update(const ConvParams& params, void* stream) {
  if (params.B == 0 || params.C == 0 || params.T == 0) return nullptr;
  const Tiles heads = head_tiles(params, params.T);
  if (params.T > kUpdateTokens || !can_vectorise_update(params)) {
    return launch(conv_any, heads.num_blocks, kThreads, 0, stream, params, heads);
  }
  const char* error = nullptr;
  dispatch_dtype(params.x.dtype, [&](auto io) { error = launch_update<decltype(io)>(params, heads, stream); });
  return error;
}

}  // namespace gdn::cuda
