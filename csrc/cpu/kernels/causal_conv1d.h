// SPDX-License-Identifier: Apache-2.0
// Depthwise causal convolution over a range of units, a unit being one sequence and a block of channels.
//
//     y[t] = act(bias + sum_j weight[j] * x[t - W + 1 + j])      acc = bias, then fma, oldest tap first
//
// Who      channels adjacent in memory: packs over channels, token by token. Tokens adjacent: packs over tokens, channel by
//          channel. Anything else takes the first way with strided loads.
// Moves    x and out once. Inputs are widened into small fp32 buffers; the last kHistory of them are kept there, so that
//          out may be x and the window's new columns come from what was read.
// History  entry kHistory - d holds the input d tokens before the next one: x, or the window where the sequence starts.
#pragma once

#include "../../common/gates.h"
#include "rows.h"

namespace gdn::cpu::GDN_ISA {

constexpr int kHistory = 4;             // W and the window's length are at most this
constexpr int kTokenBlock = 256;

// One unit: the sequence, its channels, its place in the pool.
struct ConvUnit {
  Span span;
  int64_t channel, channels;
  int64_t slot;                         // -1: no window
  bool is_padding;
  bool reads_window;
};

inline ConvUnit conv_unit(const ConvParams& p, int64_t unit) {
  const int64_t blocks = ceil_div(p.C, kChannelBlock), n = unit / blocks;
  ConvUnit u;
  u.span = sequence_span(p.cu_seqlens, n, p.T);
  u.channel = unit % blocks * kChannelBlock;
  u.channels = smaller(kChannelBlock, p.C - u.channel);
  const int64_t slot = slot_of_row(p.slots, n, p.conv_state.given() ? p.pool : INT64_MAX);
  u.is_padding = slot < 0;
  u.slot = p.conv_state.given() ? slot : -1;
  u.reads_window = u.slot >= 0 && p.has_initial_state.at(n);
  return u;
}

// Document of a token: 0 without seq_idx, negative for padding.
GDN_INLINE int64_t document_of(const ConvParams& p, int64_t batch, int64_t token) {
  if (!p.seq_idx.given()) return 0;
  const int64_t offset = batch * p.seq_idx_row + token * p.seq_idx.stride;
  return IndexView{p.seq_idx.data, 1, p.seq_idx.is_int64}.at(offset);
}

inline void activate(const ConvParams& p, float* row, int64_t count) {
  if (!p.use_silu) return;
  for (int64_t i = 0; i < count; ++i) row[i] = silu(row[i]);
}

// row += tap * input, one tap for a run of outputs that lie side by side.
inline void add_tap(float* __restrict__ row, const float* input, const float* tap, int64_t count) {
  for (int64_t i = 0; i < count; ++i) row[i] = fma(tap[i], input[i], row[i]);
}
inline void add_tap(float* __restrict__ row, const float* input, float tap, int64_t count) {
  for (int64_t i = 0; i < count; ++i) row[i] = fma(tap, input[i], row[i]);
}

// Columns of the rows [row, row + count) of a matrix [rows, columns], at most kHistory of them: window or weights of a block
// of channels. Rows that lie side by side are widened as they lie.
inline bool is_dense(const View& matrix, int row_dim, int64_t columns) {
  return matrix.stride[row_dim + 1] == 1 && matrix.stride[row_dim] == columns && columns >= 3;
}
inline void load_columns(const View& matrix, int row_dim, int64_t offset, int64_t columns, int64_t count, float* const* to) {
  if (!is_dense(matrix, row_dim, columns)) {
    for (int64_t j = 0; j < columns; ++j) {
      load_row(matrix, offset + j * matrix.stride[row_dim + 1], matrix.stride[row_dim], count, to[j]);
    }
    return;
  }
  alignas(64) float rows[kHistory * kChannelBlock];
  load_row(matrix, offset, 1, columns * count, rows);
  if (columns == 4) split_columns(rows, count, to[0], to[1], to[2], to[3]);
  else split_columns(rows, count, to[0], to[1], to[2]);
}
inline void store_columns(const View& matrix, int row_dim, int64_t offset, int64_t columns, int64_t count,
                          const float* const* from) {
  if (!is_dense(matrix, row_dim, columns)) {
    for (int64_t j = 0; j < columns; ++j) {
      store_row(matrix, offset + j * matrix.stride[row_dim + 1], matrix.stride[row_dim], count, from[j]);
    }
    return;
  }
  alignas(64) float rows[kHistory * kChannelBlock];
  if (columns == 4) join_columns(rows, count, from[0], from[1], from[2], from[3]);
  else join_columns(rows, count, from[0], from[1], from[2]);
  store_row(matrix, offset, 1, columns * count, rows);
}

inline void zero_conv_outputs(const ConvParams& p, const ConvUnit& u) {
  const float zeros[kTokenBlock] = {};
  for (int64_t c = 0; c < u.channels; ++c) {
    for (int64_t t = 0; t < u.span.length; t += kTokenBlock) {
      store_row(p.out, p.out.offset(u.span.batch, u.channel + c, u.span.first + t), p.out.stride[2],
                smaller(kTokenBlock, u.span.length - t), zeros);
    }
  }
}

// Packs over channels. A ring of kHistory rows of inputs, by token modulo kHistory; tokens before the sequence are negative.
inline void conv_by_channel(const ConvParams& p, const ConvUnit& u) {
  alignas(64) float ring[kHistory][kChannelBlock], taps[kHistory][kChannelBlock], bias[kChannelBlock], acc[kChannelBlock];
  const auto row_of = [&](int64_t t) { return ring[(t + kHistory) % kHistory]; };
  const int64_t W = p.width, batch = u.span.batch;
  float* const tap_rows[kHistory] = {taps[0], taps[1], taps[2], taps[3]};
  load_columns(p.weight, 0, p.weight.offset(u.channel), W, u.channels, tap_rows);
  fill_row(bias, u.channels, 0.0f);
  if (p.bias.given()) load_row(p.bias, p.bias.offset(u.channel), p.bias.stride[0], u.channels, bias);
  const int64_t window = p.window;
  float* window_rows[kHistory] = {};
  for (int64_t j = 0; j < window; ++j) window_rows[j] = row_of(j - window);
  if (u.reads_window) {
    load_columns(p.conv_state, 1, p.conv_state.offset(u.slot, u.channel), window, u.channels, window_rows);
  } else {
    fill_row(ring[0], kHistory * kChannelBlock, 0.0f);
  }
  for (int64_t t = 0; t < u.span.length; ++t) {
    const int64_t token = u.span.first + t, document = document_of(p, batch, token);
    load_row(p.x, p.x.offset(batch, u.channel, token), p.x.stride[1], u.channels, row_of(t));
    std::memcpy(acc, bias, u.channels * sizeof(float));
    for (int64_t j = 0; j < W; ++j) {
      const int64_t source = t - W + 1 + j;
      if (p.seq_idx.given() && (source < 0 || document_of(p, batch, u.span.first + source) != document)) continue;
      add_tap(acc, row_of(source), taps[j], u.channels);
    }
    activate(p, acc, u.channels);
    if (document < 0) fill_row(acc, u.channels, 0.0f);
    store_row(p.out, p.out.offset(batch, u.channel, token), p.out.stride[1], u.channels, acc);
  }
  if (u.slot < 0 || !p.write_state) return;
  for (int64_t j = 0; j < window; ++j) window_rows[j] = row_of(u.span.length + j - window);
  store_columns(p.conv_state, 1, p.conv_state.offset(u.slot, u.channel), window, u.channels, window_rows);
}

// Inputs d tokens back that belong to another document count as 0. documents[i] belongs to inputs[i]; INT64_MIN: none.
inline void mask_taps(const float* inputs, const int64_t* documents, int64_t back, int64_t count, float* masked) {
  for (int64_t i = 0; i < count; ++i) masked[i] = documents[i] == documents[i + back] ? inputs[i] : 0.0f;
}

// Packs over tokens, one channel. inputs holds kHistory earlier ones in front of the block's own.
inline void conv_channel(const ConvParams& p, const ConvUnit& u, int64_t c) {
  constexpr int64_t kNoDocument = INT64_MIN;
  alignas(64) float inputs[kHistory + kTokenBlock], acc[kTokenBlock], masked[kTokenBlock];
  int64_t documents[kHistory + kTokenBlock];
  const int64_t W = p.width, batch = u.span.batch;
  fill_row(inputs, kHistory, 0.0f);
  if (u.reads_window) {
    load_row(p.conv_state, p.conv_state.offset(u.slot, c), p.conv_state.stride[2], p.window, inputs + kHistory - p.window);
  }
  for (int64_t& document : documents) document = kNoDocument;
  const float bias = p.bias.given() ? p.bias.load(p.bias.offset(c)) : 0.0f;
  for (int64_t t = 0; t < u.span.length; t += kTokenBlock) {
    const int64_t token = u.span.first + t, count = smaller(kTokenBlock, u.span.length - t);
    load_row(p.x, p.x.offset(batch, c, token), p.x.stride[2], count, inputs + kHistory);
    if (p.seq_idx.given()) {
      for (int64_t i = 0; i < count; ++i) documents[kHistory + i] = document_of(p, batch, token + i);
    }
    fill_row(acc, count, bias);
    for (int64_t j = 0; j < W; ++j) {
      const int64_t back = W - 1 - j;
      const float* source = inputs + kHistory - back;
      if (p.seq_idx.given()) {
        mask_taps(source, documents + kHistory - back, back, count, masked);
        source = masked;
      }
      add_tap(acc, source, p.weight.load(p.weight.offset(c, j)), count);
    }
    activate(p, acc, count);
    if (p.seq_idx.given()) {
      for (int64_t i = 0; i < count; ++i) acc[i] = documents[kHistory + i] < 0 ? 0.0f : acc[i];
    }
    store_row(p.out, p.out.offset(batch, c, token), p.out.stride[2], count, acc);
    std::memmove(inputs, inputs + count, kHistory * sizeof(float));
    std::memmove(documents, documents + count, kHistory * sizeof(int64_t));
  }
  if (u.slot < 0 || !p.write_state) return;
  store_row(p.conv_state, p.conv_state.offset(u.slot, c), p.conv_state.stride[2], p.window, inputs + kHistory - p.window);
}

inline void causal_conv1d_range(const ConvParams& p, int64_t begin, int64_t end) {
  // Few tokens do not fill a pack: channels then, even with strided loads.
  const bool by_token = p.x.stride[2] == 1 && p.x.stride[1] != 1 && p.T >= 16;
  for (int64_t unit = begin; unit < end; ++unit) {
    const ConvUnit u = conv_unit(p, unit);
    if (u.is_padding) {
      zero_conv_outputs(p, u);
    } else if (by_token) {
      for (int64_t c = 0; c < u.channels; ++c) conv_channel(p, u, u.channel + c);
    } else {
      conv_by_channel(p, u);
    }
  }
}

}  // namespace gdn::cpu::GDN_ISA
