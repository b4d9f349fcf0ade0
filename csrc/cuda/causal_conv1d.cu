// SPDX-License-Identifier: Apache-2.0
// Depthwise causal convolution of a few taps: over many tokens, and one to eight tokens at a time behind a kept window.
//
//     out[c, t] = act(bias[c] + sum_k weight[c, k] * x[c, t - (W-1) + k])     fp32, fma, oldest tap first, rounded once
//
// Taps before a sequence's first token come from its window in conv_state, or count as zero. Every path below does the
// same operations in the same order: layout, tile and packing leave no mark in the bits.

#include "../common/gates.h"
#include "conv_elements.cuh"
#include "launch.cuh"
#include "ops.h"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "tile/pack.cuh"

namespace gdn::cuda {
namespace {

constexpr int kRound = 4;           // vectors that a thread has in flight, and the length of its ring of taps
constexpr int kSlowAxis = 8;         // elements of the slower axis per thread where nothing is vectorised
constexpr int kRunChannels = 4;      // per thread, channels contiguous: few registers, so many warps hide the silu
constexpr int kLongestRun = 64;      // tokens per thread, channels contiguous: re-reads 3 of 64 from the L2
constexpr int kUpdateTokens = 8;     // most tokens that an update takes

// Blocks of conv_channels on a multiprocessor.
template <class io_t, bool kPacked>
constexpr int kRunBlocks = sizeof(io_t) == 2 && !kPacked ? 6 : 5;

// Channels per thread of the vectorised update: one 16-byte access of a window of 4, or three of a window of 3.
template <class io_t, int kWindow>
constexpr int kUpdateChannels = kWindow == 4 ? 4 / static_cast<int>(sizeof(io_t)) : 4;
template <class io_t, int kWindow>
constexpr int kUpdateUnit = kWindow == 4 ? kVector<io_t> : 4;   // elements of an access of the window
constexpr int kUpdateRows = 2;   // rows per thread of the update of one token
template <int kWindow>
constexpr int kUpdateBlocks = kWindow == 4 ? 8 : 6;   // of the update of one token on a multiprocessor

struct UpdateTiles {
  uint32_t fast, num_blocks;   // blocks along the channels, blocks
  uint32_t channels, rows;
  uint32_t asking;             // so many blocks, the first ones, ask for their rows before they may read them
};

// ---- nothing vectorised ----

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
__device__ __forceinline__ void write_channels(const ConvParams& p, const float (&ring)[kRound][kRunChannels],
                                               const int32_t (&document)[kRound], const float* weight,
                                               const float* bias, int slot, io_t* gmem_out) {
  constexpr int kChannels = kRunChannels;
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
// The next round's loads are issued as this one's registers fall free.
template <class io_t, bool kPacked>
__device__ __forceinline__ void run_of_channels(const ConvParams& p, int64_t b, int64_t c, int64_t t0, int count) {
  constexpr int kChannels = kRunChannels;
  const io_t* gmem_x = static_cast<const io_t*>(p.x.data) + p.x.offset(b, c, t0);
  io_t* gmem_out = static_cast<io_t*>(p.out.data) + p.out.offset(b, c, t0);
  PackOf<io_t, kChannels> pack[kRound] = {};
#pragma unroll
  for (int s = 0; s < kRound; ++s) {
    if (s < count) pack[s] = load_pack<io_t, kChannels>(gmem_x + s * p.x.stride[2]);
  }
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
    const io_t* gmem_next = gmem_x + kRound * p.x.stride[2];
    if (is_inside && i + kRound <= count) {
#pragma unroll
      for (int s = 0; s < kRound; ++s) {
        unpack<io_t, kChannels>(pack[s], ring[s]);
        if (i + kRound + s < count) pack[s] = load_pack<io_t, kChannels>(gmem_next + s * p.x.stride[2]);
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
#pragma unroll
      for (int s = 0; s < kRound; ++s) {
        if (i + kRound + s < count) pack[s] = load_pack<io_t, kChannels>(gmem_next + s * p.x.stride[2]);
      }
    }
    gmem_x = gmem_next;
    gmem_out += kRound * p.out.stride[2];
  }
}

// Convolution with the channels contiguous in x and out, one dtype for both.
// Grid    x: heads (sequence, kThreads channels), then B * ceil(T / run) * C / kRunChannels threads, channels fastest.
// Block   a thread keeps the taps and the last inputs of kRunChannels channels in registers and walks `run` tokens.
// Reads   x once by 8 or 16 bytes, and W - 1 tokens before each run once more (from the L2), weights once a run.
// Writes  out by 8 or 16 bytes; the heads: conv_state.
// Needs   W = 4; C, strides and addresses in multiples of 16 bytes; any arch. kPacked: seq_idx is given.
template <class io_t, bool kPacked>
__global__ void __launch_bounds__(kThreads, kRunBlocks<io_t, kPacked>)
conv_channels(const __grid_constant__ ConvParams p, const __grid_constant__ Tiles tiles) {
  for (int64_t block = blockIdx.x; block < tiles.num_blocks; block += gridDim.x) {
    if (block < tiles.head_blocks) {
      head_block(p, tiles, block);
      continue;
    }
    const int64_t item = (block - tiles.head_blocks) * kThreads + threadIdx.x;
    const int64_t row = item / tiles.fast, b = row / tiles.slow;
    const int64_t c = (item - row * tiles.fast) * kRunChannels, t0 = (row - b * tiles.slow) * tiles.run;
    if (b >= p.B) continue;
    const int count = p.T - t0 < tiles.run ? static_cast<int>(p.T - t0) : tiles.run;
    run_of_channels<io_t, kPacked>(p, b, c, t0, count);
  }
}

// ---- tokens contiguous ----

// Outputs of a vector of tokens of one channel, `age` tokens after the sequence's first. x: the kWidth inputs before
// the vector, then its own. Inputs before the sequence count as zero, outputs of a head are left to it.
template <class io_t>
__device__ __forceinline__ void write_tokens(const ConvParams& p, float (&x)[kWidth + kVector<io_t>], int64_t age,
                                             const float* weight, float bias, io_t* gmem_out) {
  constexpr int kTokens = kVector<io_t>;
  const bool is_first = age < kWidth - 1;
#pragma unroll
  for (int j = 1; j < kWidth; ++j) x[j] = is_first && age + j < kWidth ? 0.0f : x[j];
  float acc[kTokens];
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
  if (!is_first || !p.conv_state.given()) {
    store_pack<io_t, kTokens>(gmem_out, acc);
    return;
  }
#pragma unroll
  for (int e = 0; e < kTokens; ++e) {
    if (age + e >= kWidth - 1) gmem_out[e] = from_float<io_t>(acc[e]);
  }
}

// Convolution with the tokens contiguous in x and out, one dtype for both.
// Grid    x: heads (sequence, kThreads channels), then B * slow * fast tiles.
// Block   2^token_lanes_log2 threads follow the tokens of a channel, kRound vectors each; the rest take more channels.
// Reads   x by 16 bytes, the four elements before each vector once more (from the L1), weights once a thread.
// Writes  out by 16 bytes; the heads: conv_state.
// Needs   W = 4; the strides of b and c and the addresses in multiples of 16 bytes; no seq_idx; any arch.
// Order   a vector that is not whole or holds a boundary goes element by element: same operations.
template <class io_t>
__global__ void __launch_bounds__(kThreads, 6) conv_tokens(const __grid_constant__ ConvParams p,
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
    PackOf<io_t, kWidth> before[kRound] = {};
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
      if (!place.is_live || t + kTokens > place.last) {
        left_over |= 1u << i;
        continue;
      }
      float x[kWidth + kTokens];
      unpack<io_t, kWidth>(before[i], x);
      unpack<io_t, kTokens>(pack[i], x + kWidth);
      write_tokens<io_t>(p, x, t - place.first, weight, bias, gmem_out + t);
    }
    place = {0, 0, false};
#pragma unroll 1
    for (int i = left_over == 0 ? kRound * kTokens : 0; i < kRound * kTokens; ++i) {
      const int64_t t = t0 + (i / kTokens) * extent + i % kTokens;
      if ((left_over >> (i / kTokens) & 1) != 0 && t < p.T) write_token(p, b, c, t, place);
    }
  }
}

// ---- what updates share ----

// One channel's output for a new token, which then is the newest column of its window.
template <int kWindow>
__device__ __forceinline__ float push_token(const float* weight, float bias, float x, float* window) {
  float acc = bias;
#pragma unroll
  for (int k = 0; k + 1 < kWidth; ++k) acc = fma(weight[k], window[kWindow - (kWidth - 1) + k], acc);
#pragma unroll
  for (int k = 0; k + 1 < kWindow; ++k) window[k] = window[k + 1];
  window[kWindow - 1] = x;
  return fma(weight[kWidth - 1], x, acc);
}

template <int kCount>
__device__ __forceinline__ void finish_outputs(float (&acc)[kCount], bool use_silu, bool is_live) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if (use_silu) acc[e] = silu(acc[e]);
    if (!is_live) acc[e] = 0.0f;
  }
}

// ---- one token behind a kept window ----

// Update of one token with channels contiguous, a dense window, and one dtype for all tensors.
// Grid    x: ceil(N / kUpdateRows) * ceil(C / (kChannels * kThreads)), channels fastest.
// Block   a thread per kChannels channels of kUpdateRows rows: slots first, then every load, then the work.
// Reads   x, the window by 16 bytes (a window of 3 in three parts), the weights once for all rows.
// Writes  out and the window, likewise.
// Early   the grid starts while the one before it drains, and the asking blocks have their rows brought to the L2 before they
//         wait for that one. The slots are looked at past the L1 for this, all of them first, and read once more behind the
//         wait: they only say what to bring.
// Needs   W = 4, window 3 or 4; weights and bias dense; C, strides and addresses in multiples of the accesses. Any arch.
template <class io_t, int kWindow>
__global__ void __launch_bounds__(kThreads, kUpdateBlocks<kWindow>)
conv_update_token(const __grid_constant__ ConvParams p, const __grid_constant__ UpdateTiles tiles) {
  constexpr int kChannels = kUpdateChannels<io_t, kWindow>, kRows = kUpdateRows, kUnit = kUpdateUnit<io_t, kWindow>;
  constexpr int kUnits = kChannels * kWindow / kUnit;
  for (uint32_t block = blockIdx.x; block < tiles.num_blocks; block += gridDim.x) {
    const uint32_t group = block / tiles.fast, n0 = group * kRows;
    const uint32_t c = ((block - group * tiles.fast) * kThreads + threadIdx.x) * kChannels;
    const uint32_t rows = c < tiles.channels ? tiles.rows - n0 : 0;   // or more
    const io_t* const gmem_x = static_cast<const io_t*>(p.x.data) + p.x.offset(n0) + c;
    io_t* const gmem_out = static_cast<io_t*>(p.out.data) + p.out.offset(n0) + c;
    io_t* const gmem_pool = static_cast<io_t*>(p.conv_state.data) + c * kWindow;
    if (block == blockIdx.x) {
      if (block < tiles.asking && rows > 0) {
        int64_t slot[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) slot[r] = p.slots.given() ? p.slots.peek(r < rows ? n0 + r : n0) : n0 + r;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (r < rows) ptx::prefetch_l2(gmem_x + r * p.x.stride[0]);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const bool asks = r < rows && slot_or_padding(slot[r], p.pool) >= 0;
          if (asks) ptx::prefetch_l2(gmem_pool + slot[r] * p.conv_state.stride[0]);
        }
      }
      ptx::griddepcontrol_wait();
      ptx::griddepcontrol_launch_dependents();
    }
    if (rows == 0) continue;
    int64_t slot[kRows];
    io_t* gmem_window[kRows];   // nullptr: padding
    bool has_past[kRows];
    PackOf<io_t, kChannels> pack[kRows];
    PackOf<io_t, kUnit> past[kRows][kUnits];   // [channel][column]
#pragma unroll
    for (int r = 0; r < kRows; ++r) slot[r] = p.slots.given() ? p.slots.at(r < rows ? n0 + r : n0) : n0 + r;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool is_live = r < rows && slot_or_padding(slot[r], p.pool) >= 0;
      gmem_window[r] = is_live ? gmem_pool + slot[r] * p.conv_state.stride[0] : nullptr;
      has_past[r] = is_live && p.has_initial_state.at(n0 + r);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < rows) pack[r] = load_pack<io_t, kChannels>(gmem_x + r * p.x.stride[0]);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        past[r][i] = {};
        if (has_past[r]) past[r][i] = load_pack_streaming<io_t, kUnit>(gmem_window[r] + i * kUnit);
      }
    }
    float weight[kChannels * kWidth], bias[kChannels] = {};
    load_dense<io_t, kChannels * kWidth>(static_cast<const io_t*>(p.weight.data) + c * kWidth, weight);
    if (p.bias.given()) load_dense<io_t, kChannels>(static_cast<const io_t*>(p.bias.data) + c, bias);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
      float window[kChannels * kWindow], x[kChannels], acc[kChannels];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) unpack<io_t, kUnit>(past[r][i], window + i * kUnit);
      unpack<io_t, kChannels>(pack[r], x);
#pragma unroll
      for (int e = 0; e < kChannels; ++e) {
        acc[e] = push_token<kWindow>(weight + e * kWidth, bias[e], x[e], window + e * kWindow);
      }
      finish_outputs<kChannels>(acc, p.use_silu, gmem_window[r] != nullptr);
      store_pack<io_t, kChannels>(gmem_out + r * p.out.stride[0], acc);
      if (!p.write_state || gmem_window[r] == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) store_pack<io_t, kUnit>(gmem_window[r] + i * kUnit, window + i * kUnit);
    }
  }
}

// ---- two to eight tokens behind a kept window ----

// Update of up to kUpdateTokens tokens with channels contiguous, a dense window, and one dtype for x, out and conv_state.
// Grid    x: N * ceil(C / (kChannels * kThreads)), channels fastest.
// Block   a thread per kChannels channels of a row; all its loads are in flight before the first value is used.
// Reads, writes and needs as conv_update_token, but weights and bias of any dtype and strides.
template <class io_t, int kWindow>
__global__ void __launch_bounds__(kThreads, 4)
conv_update_tokens(const __grid_constant__ ConvParams p, const __grid_constant__ UpdateTiles tiles) {
  constexpr int kChannels = kUpdateChannels<io_t, kWindow>, kTokens = kUpdateTokens, kUnit = kUpdateUnit<io_t, kWindow>;
  constexpr int kUnits = kChannels * kWindow / kUnit;
  for (uint32_t block = blockIdx.x; block < tiles.num_blocks; block += gridDim.x) {
    const uint32_t n = block / tiles.fast;
    const uint32_t c = ((block - n * tiles.fast) * kThreads + threadIdx.x) * kChannels;
    if (c >= tiles.channels) continue;
    const io_t* const gmem_x = static_cast<const io_t*>(p.x.data) + p.x.offset(n) + c;
    io_t* const gmem_out = static_cast<io_t*>(p.out.data) + p.out.offset(n) + c;
    PackOf<io_t, kChannels> pack[kTokens];
    PackOf<io_t, kUnit> past[kUnits] = {};   // [channel][column]
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t < p.T) pack[t] = load_pack<io_t, kChannels>(gmem_x + t * p.x.stride[2]);
    }
    const int64_t slot = slot_of_row(p.slots, n, p.pool);
    io_t* const gmem_window = static_cast<io_t*>(p.conv_state.data) + p.conv_state.offset(slot) + c * kWindow;
    if (slot >= 0 && p.has_initial_state.at(n)) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) past[i] = load_pack<io_t, kUnit>(gmem_window + i * kUnit);
    }
    float weight[kChannels * kWidth], bias[kChannels], window[kChannels * kWindow];
    load_weights<kChannels>(p, c, weight, bias);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) unpack<io_t, kUnit>(past[i], window + i * kUnit);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= p.T) break;
      float x[kChannels], acc[kChannels];
      unpack<io_t, kChannels>(pack[t], x);
#pragma unroll
      for (int e = 0; e < kChannels; ++e) {
        acc[e] = push_token<kWindow>(weight + e * kWidth, bias[e], x[e], window + e * kWindow);
      }
      finish_outputs<kChannels>(acc, p.use_silu, slot >= 0);
      store_pack<io_t, kChannels>(gmem_out + t * p.out.stride[2], acc);
    }
    if (!p.write_state || slot < 0) continue;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) store_pack<io_t, kUnit>(gmem_window + i * kUnit, window + i * kUnit);
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
  const int64_t size = dtype_size(p.x.dtype), channels = p.window == kWidth ? 4 / size : 4;
  const int64_t unit = p.window == kWidth ? 16 / size : 4;   // elements of an access of the window
  return p.width == kWidth && p.x.dtype == p.out.dtype && p.x.dtype == p.conv_state.dtype && p.C % channels == 0 &&
         p.C < (1 << 28) && is_vector_axis(p.x, p, 1, channels * size) && is_vector_axis(p.out, p, 1, channels * size) &&
         p.conv_state.stride[2] == 1 && p.conv_state.stride[1] == p.window && p.conv_state.stride[0] % unit == 0 &&
         reinterpret_cast<uintptr_t>(p.conv_state.data) % (unit * size) == 0;
}

bool has_dense_weights(const ConvParams& p) {
  const bool same = p.weight.dtype == p.x.dtype && (!p.bias.given() || p.bias.dtype == p.x.dtype);
  const bool dense = p.weight.stride[1] == 1 && p.weight.stride[0] == kWidth && (!p.bias.given() || p.bias.stride[0] == 1);
  return same && dense && (reinterpret_cast<uintptr_t>(p.weight.data) | reinterpret_cast<uintptr_t>(p.bias.data)) % 16 == 0;
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

template <class io_t, bool kPacked>
const char* launch_channels(const ConvParams& p, Tiles tiles, void* stream) {
  tiles.fast = p.C / kRunChannels;
  // Whole waves: as few as the longest run allows, then runs that fill them, beside the heads in the first.
  const int64_t wave = int64_t{kRunBlocks<io_t, kPacked>} * num_multiprocessors(), items = p.B * tiles.fast;
  const int64_t waves = ceil_div(ceil_div(p.T, kLongestRun) * items, wave * kThreads);
  const int64_t room = (waves * wave - tiles.head_blocks) * kThreads / items;   // runs per row of x
  const int64_t run = ceil_div(ceil_div(p.T, room < 1 ? 1 : room), kRound) * kRound;
  tiles.run = static_cast<int>(run < kLongestRun ? run : kLongestRun);
  tiles.slow = ceil_div(p.T, tiles.run);
  tiles.num_blocks += ceil_div(p.B * tiles.slow * tiles.fast, kThreads);
  return launch(conv_channels<io_t, kPacked>, tiles.num_blocks, kThreads, 0, stream, p, tiles);
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

// Blocks of conv_update_token that ask for their rows early: as measured, NOTES.md.
template <int kWindow>
uint32_t asking_blocks(const ConvParams& p) {
  if (kWindow != kWidth) return static_cast<uint32_t>(kUpdateBlocks<kWindow> * num_multiprocessors());   // that start at once
  return p.slots.given() ? 0 : static_cast<uint32_t>(kMaxBlocks);
}

template <class io_t, int kWindow>
const char* launch_update(const ConvParams& p, void* stream) {
  const bool is_token = p.T == 1 && has_dense_weights(p);
  const int64_t fast = ceil_div(p.C, kUpdateChannels<io_t, kWindow> * kThreads);
  const int64_t num_blocks = ceil_div(p.N, is_token ? kUpdateRows : 1) * fast;
  const UpdateTiles tiles = {static_cast<uint32_t>(fast), static_cast<uint32_t>(num_blocks),
                             static_cast<uint32_t>(p.C), static_cast<uint32_t>(p.N), asking_blocks<kWindow>(p)};
  if (num_blocks > kMaxBlocks || p.N > kMaxBlocks) return "more than 2^31 - 1 blocks";
  return is_token ? launch_early(conv_update_token<io_t, kWindow>, num_blocks, kThreads, 0, stream, p, tiles)
                  : launch(conv_update_tokens<io_t, kWindow>, num_blocks, kThreads, 0, stream, p, tiles);
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
    if (path == Path::kTokens) {
      error = launch_tokens<io_t>(params, tiles, stream);
    } else if (params.seq_idx.given()) {
      error = launch_channels<io_t, true>(params, tiles, stream);
    } else {
      error = launch_channels<io_t, false>(params, tiles, stream);
    }
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
  dispatch_dtype(params.x.dtype, [&](auto io) {
    using io_t = decltype(io);
    error = params.window == kWidth ? launch_update<io_t, 4>(params, stream) : launch_update<io_t, 3>(params, stream);
  });
  return error;
}

}  // namespace gdn::cuda
