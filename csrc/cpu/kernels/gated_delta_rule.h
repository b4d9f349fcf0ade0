// SPDX-License-Identifier: Apache-2.0
// The recurrent gated delta rule over a range of units of work.
//
// A unit is one tile of 16 columns of S for one whole sequence, numbered with the key head slowest:
//     unit = ((hk * N + n) * group + value head in the group) * tiles + tile
// so that any cut of the range gives every thread its share of long and short sequences, and neighbours in a range share
// their keys and queries.
#pragma once

#include "rule_decode.h"

namespace gdn::cpu::GDN_ISA {

// Tiles that a thread keeps in hand at once: 192 KB of state on its stack, three value heads at K = V = 128.
constexpr int kScratchFloats = 48 * 1024;
constexpr int kMaxTiles = 32;

// What the call says about sequence n.
struct Sequence {
  Span span;
  int64_t read_slot;              // -1: start from zero
  int64_t write_slot;             // -1: drop the state
  bool is_padding;
};

inline Sequence sequence_at(const RuleParams& p, int64_t n) {
  Sequence s{sequence_span(p.cu_seqlens, n, p.dims.T), -1, -1, false};
  // Without an initial state the pool that is written tells which slots exist; with neither, a negative slot is padding.
  const int64_t pool = p.initial_state.given() ? p.pool_in : p.state.given() && p.slots.given() ? p.pool_out : INT64_MAX;
  const int64_t slot = slot_of_row(p.slots, n, pool);
  s.is_padding = slot < 0;
  if (s.is_padding) return s;
  if (p.initial_state.given() && p.has_initial_state.at(n)) s.read_slot = slot;
  if (p.state.given()) s.write_slot = slot_of_row(p.out_slots.given() ? p.out_slots : p.slots, n, p.pool_out);
  return s;
}

// The units [first, last) of one key head and sequence, counted from their own start.
struct Segment {
  int64_t hk, n, first, last;
};

inline int64_t tiles_per_head(const Dims& d) { return ceil_div(d.V, kTileColumns); }

inline Segment segment_at(const Dims& d, int64_t unit, int64_t end) {
  const int64_t length = d.Hv / d.Hk * tiles_per_head(d);
  const int64_t row = unit / length, first = unit % length;
  return {row / d.N, row % d.N, first, smaller(length, first + end - unit)};
}

inline void zero_outputs(const RuleParams& p, const Span& span, int64_t h, int64_t column, int64_t columns) {
  float zeros[kMaxHeadDim] = {};
  for (int64_t t = span.first; t < span.first + span.length; ++t) {
    store_row(p.out, p.out.offset(span.batch, t, h, column), p.out.stride[3], columns, zeros);
  }
}

inline void load_tile(const RuleParams& p, int64_t slot, int padded_dim, Tile& tile) {
  if (slot < 0) {
    fill_row(tile.rows, padded_dim * kTileColumns, 0.0f);
    return;
  }
  const View& state = p.initial_state;
  dispatch_dtype(state.dtype, [&](auto tag) {
    const auto* from = static_cast<const decltype(tag)*>(state.data) + state.offset(slot, tile.h, 0, tile.column);
    load_tile_of(from, state.stride[2], state.stride[3], p.dims.K, padded_dim, tile);
  });
}
inline void store_tile(const View& states, int64_t slot, int64_t K, const Tile& tile) {
  if (slot < 0) return;
  dispatch_dtype(states.dtype, [&](auto tag) {
    auto* to = static_cast<decltype(tag)*>(states.data) + states.offset(slot, tile.h, 0, tile.column);
    store_tile_to(to, states.stride[2], states.stride[3], K, tile);
  });
}

// What is taken from the states while a sequence runs, besides the last one: here its checkpoints. An observer tells how many
// tokens may be taken before it has to look again, where tiles keep their factors, and then sees the tiles.
struct CheckpointObserver {
  const RuleParams& p;
  int64_t n;

  int64_t tokens_until_look(int64_t t) const {
    return p.checkpoints.given() ? p.checkpoint_every - t % p.checkpoint_every : INT64_MAX;
  }
  float* factors_of_tile(int) const { return nullptr; }
  // `done` tokens of the sequence are in the tiles, the last `taken` of them from the slots of the block.
  void look(const TokenBlock&, int64_t done, int, const Tile* tiles, int num_tiles) const {
    if (!p.checkpoints.given() || done % p.checkpoint_every != 0) return;
    const int64_t row = p.checkpoint_row(n, done);
    for (int i = 0; i < num_tiles; ++i) store_tile(p.checkpoints, row, p.dims.K, tiles[i]);
  }
};

// v of the block's tokens into the tiles' own memory, and o from there. Token by token and tile by tile, as the rows lie:
// fetched one by one from between the sweeps, lines that are Hv*V elements apart would miss every cache, and a store that
// waits for its line holds up the sweep's stores behind it. The sweeps ask for the next block's lines.
inline void load_values(const RuleParams& p, const Span& span, int64_t t, int count, Tile* tiles, int num_tiles) {
  const int64_t token = span.first + t, next = token + count;
  for (int slot = 0; slot < count; ++slot) {
    for (int i = 0; i < num_tiles; ++i) {
      Tile& tile = tiles[i];
      float* row = tile.values + slot * kTileColumns;
      load_row(p.v, p.v.offset(span.batch, token + slot, tile.h, tile.column), p.v.stride[3], tile.columns, row);
      fill_row(row + tile.columns, kTileColumns - tile.columns, 0.0f);
    }
  }
  const bool has_next = t + count < span.length;
  for (int i = 0; i < num_tiles; ++i) {
    Tile& tile = tiles[i];
    tile.next_v = has_next ? address_of(p.v, p.v.offset(span.batch, next, tile.h, tile.column)) : nullptr;
    tile.next_out = has_next ? address_of(p.out, p.out.offset(span.batch, next, tile.h, tile.column)) : nullptr;
    tile.v_step = p.v.stride[1] * dtype_size(p.v.dtype);
    tile.out_step = p.out.stride[1] * dtype_size(p.out.dtype);
  }
}
inline void store_values(const RuleParams& p, int64_t batch, int64_t token, int count, const Tile* tiles, int num_tiles) {
  for (int slot = 0; slot < count; ++slot) {
    for (int i = 0; i < num_tiles; ++i) {
      const Tile& tile = tiles[i];
      store_row(p.out, p.out.offset(batch, token + slot, tile.h, tile.column), p.out.stride[3], tile.columns,
                tile.values + slot * kTileColumns);
    }
  }
}

// All tokens of the sequence for num_tiles tiles in hand.
template <class Observer>
void run_tokens(const RuleParams& p, int64_t hk, const Span& span, TokenBlock& block, Tile* tiles, int num_tiles,
                Observer& observer) {
  StepScalars steps[kMaxTiles][kMaxBlockTokens];   // [value head in hand][slot]
  alignas(64) float values[kMaxTiles][kMaxBlockTokens * kTileColumns];
  const RunBlock run = pick_run_block(block.padded_dim);
  const int64_t first_head = tiles[0].h, last_head = tiles[num_tiles - 1].h;
  for (int i = 0; i < num_tiles; ++i) {
    tiles[i].steps = steps[tiles[i].h - first_head];
    tiles[i].values = values[i];
    tiles[i].factors = observer.factors_of_tile(i);
  }
  int filled = 0;                                  // slots that already hold their token
  for (int64_t t = 0; t < span.length;) {
    const int64_t token = span.first + t;          // of slot 0
    // Tokens to take, and one more to look ahead at where there is one.
    const int64_t left = span.length - t, most = smaller(block.tokens, left);
    const int taken = static_cast<int>(smaller(most == left ? most : most - 1, observer.tokens_until_look(t)));
    const int count = static_cast<int>(smaller(most, taken + 1));
    for (int slot = filled; slot < count; ++slot) load_token(p, span.batch, token + slot, hk, block, slot);
    for (int64_t h = first_head; h <= last_head; ++h) {
      for (int slot = 0; slot < taken; ++slot) {
        steps[h - first_head][slot] = token_scalars(p, span.batch, token + slot, h, block, slot);
      }
    }
    load_values(p, span, t, taken, tiles, num_tiles);
    const int64_t next = t + count, more = smaller(block.tokens, span.length - next);
    for (int i = 0; i < num_tiles; ++i) {
      for (int64_t j = more * i / num_tiles; j < more * (i + 1) / num_tiles; ++j) {
        prefetch_token(p, span.batch, span.first + next + j, hk);
      }
      run(block, count, taken, t == 0, tiles[i]);
    }
    store_values(p, span.batch, token, taken, tiles, num_tiles);
    t += taken;
    observer.look(block, t, taken, tiles, num_tiles);
    if (taken < count) block.copy_slot(taken, 0);
    filled = 1;
  }
}

template <class Observer>
void run_tiles(const RuleParams& p, const Segment& segment, const Sequence& sequence, Observer& observer) {
  alignas(64) float scratch[kScratchFloats];
  Tile tiles[kMaxTiles];
  TokenBlock block;
  block.shape(p.dims.K);
  const int64_t per_head = tiles_per_head(p.dims), group = p.dims.Hv / p.dims.Hk;
  const int64_t tile_floats = block.padded_dim * kTileColumns, at_once = smaller(kMaxTiles, kScratchFloats / tile_floats);
  for (int64_t first = segment.first; first < segment.last; first += at_once) {
    const int count = static_cast<int>(smaller(at_once, segment.last - first));
    for (int i = 0; i < count; ++i) {
      Tile& tile = tiles[i];
      tile.rows = scratch + i * tile_floats;
      tile.h = segment.hk * group + (first + i) / per_head;
      tile.column = static_cast<int>((first + i) % per_head) * kTileColumns;
      tile.columns = static_cast<int>(smaller(kTileColumns, p.dims.V - tile.column));
      load_tile(p, sequence.read_slot, block.padded_dim, tile);
    }
    run_tokens(p, segment.hk, sequence.span, block, tiles, count, observer);
    for (int i = 0; i < count; ++i) store_tile(p.state, sequence.write_slot, p.dims.K, tiles[i]);
  }
}

// Whether the state of this sequence can be read and written where it lies.
inline bool fits_decode(const RuleParams& p, const Sequence& s) {
  if (s.span.length != 1 || s.read_slot < 0 || p.dims.K % kResidues != 0 || p.dims.V % kTileColumns != 0) return false;
  const View& in = p.initial_state;
  const bool k_first = in.stride[3] == 1, v_first = in.stride[2] == 1;
  if (!k_first && !v_first) return false;
  if (s.write_slot < 0) return true;
  return p.state.dtype == in.dtype && p.state.stride[k_first ? 3 : 2] == 1;
}

template <class T>
void decode_segment(const RuleParams& p, const Segment& segment, const Sequence& sequence, const Segment& following,
                    const Sequence& after) {
  const Dims& d = p.dims;
  const bool v_first = p.initial_state.stride[3] != 1;
  const int row_dim = v_first ? 3 : 2;
  const int64_t per_head = tiles_per_head(d), group = d.Hv / d.Hk, batch = sequence.span.batch, token = sequence.span.first;
  TokenBlock block;
  block.shape(d.K);
  load_token(p, batch, token, segment.hk, block, 0);
  const auto state_at = [&](int64_t slot, int64_t hk, int64_t unit) {
    const int64_t h = hk * group + unit / per_head;
    return static_cast<const T*>(p.initial_state.data) + p.initial_state.offset(slot, h, 0, unit % per_head * kTileColumns);
  };
  for (int64_t unit = segment.first; unit < segment.last;) {
    const int64_t h = segment.hk * group + unit / per_head, column = unit % per_head * kTileColumns;
    const int64_t next_unit = smaller(segment.last, (unit / per_head + 1) * per_head);
    alignas(64) float v[kMaxHeadDim], o[kMaxHeadDim];
    DecodeHead<T> head;
    head.columns = static_cast<int>(next_unit - unit) * kTileColumns;
    head.read = state_at(sequence.read_slot, segment.hk, unit);
    head.write = nullptr;
    if (sequence.write_slot >= 0) {
      head.write = static_cast<T*>(p.state.data) + p.state.offset(sequence.write_slot, h, 0, column);
    }
    head.next = nullptr;
    if (next_unit < segment.last) {
      head.next = state_at(sequence.read_slot, segment.hk, next_unit);
    } else if (after.read_slot >= 0) {
      head.next = state_at(after.read_slot, following.hk, following.first);
    }
    head.read_stride = p.initial_state.stride[row_dim];
    head.write_stride = p.state.stride[row_dim];
    head.k = block.k(0);
    head.q = block.q(0);
    head.step = token_scalars(p, batch, token, h, block, 0);
    load_row(p.v, p.v.offset(batch, token, h, column), p.v.stride[3], head.columns, v);
    head.v = v;
    head.o = o;
    decode_head(head, v_first, d.K);
    store_row(p.out, p.out.offset(batch, token, h, column), p.out.stride[3], head.columns, o);
    unit = next_unit;
  }
}

inline void zero_segment(const RuleParams& p, const Segment& segment, const Span& span) {
  const int64_t per_head = tiles_per_head(p.dims), group = p.dims.Hv / p.dims.Hk;
  for (int64_t unit = segment.first; unit < segment.last; ++unit) {
    const int64_t column = unit % per_head * kTileColumns;
    zero_outputs(p, span, segment.hk * group + unit / per_head, column, smaller(kTileColumns, p.dims.V - column));
  }
}

inline void run_segment(const RuleParams& p, const Segment& segment, const Segment& following) {
  const Sequence sequence = sequence_at(p, segment.n);
  if (sequence.is_padding) return zero_segment(p, segment, sequence.span);
  if (fits_decode(p, sequence)) {
    // After the last segment of a range there is nothing to ask for.
    Sequence after{{}, -1, -1, true};
    if (following.first != following.last) after = sequence_at(p, following.n);
    dispatch_dtype(p.initial_state.dtype, [&](auto tag) {
      decode_segment<decltype(tag)>(p, segment, sequence, following, after);
    });
    return;
  }
  // An empty sequence hands its state on; where it is already there, nothing is touched.
  const bool same_memory = p.initial_state.data == p.state.data && sequence.read_slot == sequence.write_slot;
  if (sequence.span.length == 0 && (sequence.write_slot < 0 || same_memory)) return;
  CheckpointObserver observer{p, segment.n};
  run_tiles(p, segment, sequence, observer);
}

inline void gated_delta_rule_range(const RuleParams& p, int64_t begin, int64_t end) {
  for (int64_t unit = begin; unit < end;) {
    const Segment segment = segment_at(p.dims, unit, end);
    unit += segment.last - segment.first;
    const Segment following = unit < end ? segment_at(p.dims, unit, end) : Segment{0, 0, 0, 0};
    run_segment(p, segment, following);
  }
}

}  // namespace gdn::cpu::GDN_ISA
