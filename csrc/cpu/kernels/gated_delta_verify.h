// SPDX-License-Identifier: Apache-2.0
// Verify over a range of units of work: the rule's tiles and sweeps, with an observer that keeps what the call asks for.
//
//     ring          f of every token, beside its raw key and alpha; the state itself is dropped
//     state_table   the state after every token, to the slot that the table names
//     states_out    the state after every token, to the buffer
//
// A unit is a unit of gated_delta_rule.h. The first tile of the first value head of a key head writes the records' keys, the
// first tile of each value head its alphas.
#pragma once

#include "../../common/ring.h"
#include "gated_delta_rule.h"

namespace gdn::cpu::GDN_ISA {

struct VerifyObserver {
  const VerifyParams& p;
  int64_t n, hk;
  int64_t ring_row;               // -1: no records
  bool has_states;
  alignas(64) float factors[kMaxTiles][kMaxBlockTokens * kTileColumns];

  int64_t tokens_until_look(int64_t) const { return has_states ? 1 : INT64_MAX; }
  float* factors_of_tile(int i) { return ring_row >= 0 ? factors[i] : nullptr; }

  void look(const TokenBlock& block, int64_t done, int taken, const Tile* tiles, int num_tiles) const {
    for (int i = 0; i < num_tiles; ++i) {
      if (has_states) store_state(done - 1, tiles[i]);
      for (int slot = 0; slot < taken && ring_row >= 0; ++slot) store_record(block, slot, done - taken + slot, tiles[i]);
    }
  }
  void store_state(int64_t t, const Tile& tile) const {
    const int64_t K = p.rule.dims.K;
    if (p.state_table.given()) return store_tile(p.rule.state, p.token_slot(n, t), K, tile);
    if (t >= p.states_length) return;
    View states = p.states_out;
    states.data = static_cast<char*>(states.data) + n * p.states_row_stride * dtype_size(states.dtype);
    store_tile(states, t, K, tile);
  }
  void store_record(const TokenBlock& block, int slot, int64_t t, const Tile& tile) const {
    const Dims& d = p.rule.dims;
    const int64_t group = d.Hv / d.Hk, member = tile.h - hk * group, record = p.ring.offset(ring_row, hk, t);
    if (tile.column == 0 && member == 0) store_row(p.ring, record, 1, d.K, block.k(slot));
    if (tile.column == 0) p.ring.store(record + record_alpha(d.K, d.V, group, member), tile.steps[slot].alpha);
    store_row(p.ring, record + record_factor(d.K, d.V, member) + tile.column, 1, tile.columns,
              tile.factors + slot * kTileColumns);
  }
};

inline void gated_delta_verify_range(const VerifyParams& p, int64_t begin, int64_t end) {
  const RuleParams& rule = p.rule;
  for (int64_t unit = begin; unit < end;) {
    const Segment segment = segment_at(rule.dims, unit, end);
    unit += segment.last - segment.first;
    Sequence sequence{sequence_span(rule.cu_seqlens, segment.n, rule.dims.T), p.start_slot(segment.n), -1, false};
    if (sequence.read_slot < 0) {
      zero_segment(rule, segment, sequence.span);
      continue;
    }
    if (sequence.span.length == 0) continue;
    const bool commits = p.commits(sequence.span.length);
    if (commits) sequence.write_slot = sequence.read_slot;
    VerifyObserver observer{p, segment.n, segment.hk, p.ring.given() && !commits ? p.ring_row(segment.n) : -1,
                            p.state_table.given() || p.states_out.given(), {}};
    run_tiles(rule, segment, sequence, observer);
  }
}

}  // namespace gdn::cpu::GDN_ISA
