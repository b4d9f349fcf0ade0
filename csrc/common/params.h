// SPDX-License-Identifier: Apache-2.0
// One plain struct per op: what api/ has checked and either backend computes from.
#pragma once

#include "dims.h"
#include "gates.h"
#include "view.h"

namespace gdn {

// Which form of the rule computes a call; the numbers are those of the schema.
enum class RuleMode : int { kRecurrent = 0, kChunk = 1, kAuto = 2 };

// The rows that one launch computes, by their number of tokens. The others belong to another launch, which writes them.
struct RowRange {
  int64_t min_length = 0, max_length = INT64_MAX;
};

struct RuleParams {
  Dims dims;
  View q, k;                     // [B, T, Hk, K]
  View v;                        // [B, T, Hv, V]
  View g, beta;                  // [B, T, Hv] decay, as gate_domain says, and write strength; not given: no decay, ones
  View A_log, dt_bias;           // [Hv], of raw gates; dt_bias not given: 0
  View out;                      // [B, T, Hv, V]
  View initial_state;            // [pool_in, Hv, K, V], read; not given: start from zero
  View state;                    // [pool_out, Hv, K, V], written; not given: dropped. May be the same memory
  int64_t pool_in, pool_out;     // number of slots of each
  IndexView slots, out_slots;    // [N] slot read, slot written; not given: row n uses slot n, out_slots defaults to slots
  IndexView cu_seqlens;          // [N + 1]; not given: dense
  FlagView has_initial_state;    // [N]
  float scale;
  bool use_qk_l2norm;
  GateDomain gate_domain;        // what g holds
  bool beta_is_raw;              // beta holds b, before its sigmoid
  bool allow_neg_eigval;         // then: beta = 2 sigmoid(b)
  RuleMode mode;                 // which kernel; the CPU has one for all
  bool is_high_precision;        // of the chunk kernels: operands split in two, so that products keep fp32's digits
  bool may_scan;                 // of Hopper's chunk kernel: a long row may be cut; then only repeats keep their bits
  RowRange rows;
  int64_t segment_tokens;        // of that kernel, set by its launcher: tokens from cut to cut of a row; 0: none
  // Of that kernel, set by its launcher where it prepares and carries side by side (relay.cuh): chunks of key heads that are
  // prepared before, 0: all; multiprocessors that the preparation then leaves to the carrying; blocks of it that go on at
  // least.
  int64_t items_ahead, released_multiprocessors, staying_blocks;
  View checkpoints;              // [total_checkpoints, Hv, K, V], written; not given: none
  int64_t total_checkpoints;
  int64_t checkpoint_every;      // tokens between two of a sequence, a multiple of 64
  IndexView checkpoint_starts;   // [N] row of a sequence's first; not given: n * (T / checkpoint_every)
  void* workspace;               // device memory of the bytes that the backend asks for; not given where it asks for none

  // Row for the state after `tokens` tokens of sequence n, a multiple of checkpoint_every; -1: outside, not written.
  GDN_INLINE int64_t checkpoint_row(int64_t n, int64_t tokens) const {
    const int64_t start = checkpoint_starts.given() ? checkpoint_starts.at(n) : n * (dims.T / checkpoint_every);
    return start < 0 || start >= total_checkpoints ? -1
                                                   : slot_or_padding(start + tokens / checkpoint_every - 1, total_checkpoints);
  }
};

// Rows of a call: the sequences, and, in ragged input, the tokens outside all of them as row N.
GDN_INLINE int64_t num_rows(const RuleParams& params) { return params.dims.N + (params.cu_seqlens.given() ? 1 : 0); }

// The slot that row n starts from; below 0: padding. Without an initial state it only says which rows are padding.
GDN_INLINE int64_t slot_to_read(const RuleParams& params, int64_t n) {
  return slot_of_row(params.slots, n, params.initial_state.given() ? params.pool_in : params.pool_out);
}

// The slot that takes the state of row n; below 0: none.
GDN_INLINE int64_t slot_to_write(const RuleParams& params, int64_t n) {
  if (!params.state.given()) return -1;
  return slot_of_row(params.out_slots.given() ? params.out_slots : params.slots, n, params.pool_out);
}

// Whether g or beta are not yet what the rule takes.
GDN_INLINE bool has_raw_gates(const RuleParams& params) {
  return params.gate_domain == GateDomain::kRaw || params.beta_is_raw;
}

// The gates of a token of value head h from what g and beta hold there, bit for bit those of gated_delta_gates. Of g: the
// decay where the domain is linear, else the log decay.
GDN_INLINE float gate_of(const RuleParams& params, float g, int64_t h) {
  if (params.gate_domain != GateDomain::kRaw) return g;
  const float dt_bias = params.dt_bias.given() ? params.dt_bias.load(params.dt_bias.offset(h)) : 0.0f;
  return log_decay(g, params.A_log.load(params.A_log.offset(h)), dt_bias);
}
GDN_INLINE float beta_of(const RuleParams& params, float beta) {
  return params.beta_is_raw ? write_strength(beta, params.allow_neg_eigval) : beta;
}

// Whether a launch computes rows of so many tokens; whether it computes row n. The tokens outside all sequences go with the
// empty ones.
GDN_INLINE bool takes_length(const RuleParams& params, int64_t length) {
  return length >= params.rows.min_length && length <= params.rows.max_length;
}
GDN_INLINE bool takes_row(const RuleParams& params, int64_t n) {
  return takes_length(params, n < params.dims.N ? sequence_span(params.cu_seqlens, n, params.dims.T).length : 0);
}

// Tokens that may be taken back. Where the state after them goes is one of three: records in a ring, a slot for each token, a
// state for each token in a buffer.
struct VerifyParams {
  RuleParams rule;               // initial_state: the pool. state: the same where rows commit or a table names slots
  View ring;                     // [ring_rows, Hk, ring_length, stride], records as ring.h has them; not given: none
  int64_t ring_rows, ring_length;
  IndexView ring_slots;          // [N] row of the ring; not given: row n
  TableView state_table;         // [N, table_length] slot that takes the state after each token; not given: none
  int64_t table_length;
  IndexView num_accepted;        // [N] start from slot state_table[n, num_accepted[n] - 1]; not given: rule.slots
  View states_out;               // [N, states_length, Hv, K, V], one View with N and token in the first dim; not given: none
  int64_t states_length;
  int64_t states_row_stride;     // elements between two sequences of it

  // A sequence of this many tokens writes its state to the pool itself and records nothing.
  GDN_INLINE bool commits(int64_t length) const { return ring.given() && length > ring_length; }
  // Slot that sequence n starts from, or -1: padding.
  GDN_INLINE int64_t start_slot(int64_t n) const {
    if (!num_accepted.given()) return slot_of_row(rule.slots, n, rule.pool_in);
    const int64_t accepted = num_accepted.at(n);
    if (accepted < 1 || accepted > table_length) return -1;
    return slot_or_padding(state_table.at(n, accepted - 1), rule.pool_in);
  }
  // Slot that takes the state after token t of sequence n, or -1.
  GDN_INLINE int64_t token_slot(int64_t n, int64_t t) const {
    return t < table_length ? slot_or_padding(state_table.at(n, t), rule.pool_out) : -1;
  }
  // Row of the ring that takes the records of sequence n, or -1.
  GDN_INLINE int64_t ring_row(int64_t n) const { return slot_of_row(ring_slots, n, ring_rows); }
};

struct FoldParams {
  int64_t layers, batch;
  int64_t Hk, Hv, K, V;
  View state;                    // [pool, Hv, K, V]
  View ring;                     // [ring_rows, Hk, ring_length, stride]
  int64_t pool, ring_rows, ring_length;
  TableView slots, ring_slots;   // [layers, batch]
  IndexView num_accepted;        // [batch] leading records to fold; outside [1, ring_length]: the row is skipped

  // What the tables say of a row of a layer, and what that means: slot < 0: skip. Two steps, so that nobody waits in between.
  struct Entry {
    int64_t count, ring_slot, slot;
  };
  struct Row {
    int64_t slot, ring_row;
    int count;
  };
  GDN_INLINE Entry entry(int64_t layer, int64_t n) const {
    return {num_accepted.at(n), ring_slots.at(layer, n), slots.at(layer, n)};
  }
  GDN_INLINE Row row(const Entry& entry) const {
    const int64_t ring_row = slot_or_padding(entry.ring_slot, ring_rows);
    if (entry.count < 1 || entry.count > ring_length || ring_row < 0) return {-1, -1, 0};
    return {slot_or_padding(entry.slot, pool), ring_row, static_cast<int>(entry.count)};
  }
  GDN_INLINE Row row(int64_t layer, int64_t n) const { return row(entry(layer, n)); }
};

struct ConvParams {
  int64_t B, C, T;               // as x lies: ragged x has B = 1
  int64_t N;                     // sequences
  int64_t width;                 // W, 2..4
  int64_t window;                // columns of conv_state: W - 1 or W, oldest first
  View x, out;                   // strides in the order [B, C, T]
  View weight;                   // [C, W]
  View bias;                     // [C]; not given: 0
  View conv_state;               // [pool, C, window]; not given: start from zero, keep nothing
  int64_t pool;
  IndexView slots;               // [N]
  IndexView cu_seqlens;          // [N + 1]; not given: dense
  IndexView seq_idx;             // int32 [B, T] with row stride seq_idx_row; another document's tokens are absent, < 0: padding
  int64_t seq_idx_row;
  FlagView has_initial_state;    // [N]
  bool use_silu;
  bool write_state;
};

struct ConvWriteParams {
  int64_t B, C, T;               // as x lies: ragged x has B = 1
  int64_t N;                     // sequences
  int64_t window;                // columns of conv_state, 1..4, oldest first
  View x;                        // strides in the order [B, C, T]
  View conv_state;               // [pool, C, window]
  int64_t pool;
  IndexView slots;               // [N]
  IndexView cu_seqlens;          // [N + 1]; not given: dense
  IndexView num_accepted;        // [N] leading tokens that the window moves over; outside [1, length]: the row is skipped
  FlagView has_initial_state;    // [N]

  // The slot of sequence n, or -1: padding or skipped.
  GDN_INLINE int64_t slot_of(int64_t n, int64_t length) const {
    const int64_t accepted = num_accepted.at(n);
    return accepted < 1 || accepted > length ? -1 : slot_of_row(slots, n, pool);
  }
};

// copy_slots, zero_slots and cast_state: item i takes slot from_slots[i] of `from` to slot to_slots[i] of `to`, element by
// element in the logical order. zero_slots has no `from`.
struct PoolParams {
  int64_t items;
  int64_t sizes[3];              // of a slot; missing dims are 1
  View from, to;                 // [slots, sizes...]
  int64_t from_pool, to_pool;
  IndexView from_slots, to_slots;   // [items]; not given: item i is slot i; outside the pool: the item is skipped

  GDN_INLINE int64_t slot_elements() const { return sizes[0] * sizes[1] * sizes[2]; }
};

struct GatesParams {
  int64_t B, T, H;
  View a, b;                     // [B, T, H] any float dtype
  View A_log, dt_bias;           // [H]
  View g, beta;                  // [B, T, H] fp32, written
  bool allow_neg_eigval;         // beta = 2 sigmoid(b)
};

struct NormParams {
  int64_t B, T, H, V;            // B * T * H vectors of length V, each normed in groups
  int64_t group_size;            // divides V
  View x, z, out;                // [B, T, H, V]
  View weight;                   // [V]
  float eps;
  bool use_silu;                 // else sigmoid
  bool norm_before_gate;         // norm(x) * weight * act(z), else norm(x * act(z)) * weight
};

struct RopeParams {
  int64_t B, T, Hq, Hk, D;       // tokens; heads of q and of k; elements of a head, at most kMaxHeadDim
  int64_t R;                     // leading elements of a head that are rotated: even, at most D
  View q, k, q_out, k_out;       // [B, T, Hq or Hk, D]
  View q_weight, k_weight;       // [D]
  View cos, sin;                 // [B, T, R]
  float eps;
  bool zero_centered;            // weights are kept less one
};

struct OutputGateParams {
  int64_t B, T, H, D;
  View x, gate, out;             // [B, T, H, D]
};

constexpr int64_t kMaxStepTokens = 8;

// A layer between its projections, for the T tokens of N = B sequences: convolution, gates, rule, gated norm.
struct StepParams {
  Dims dims;                     // T is 0 to kMaxStepTokens
  View q, k;                     // [B, T, Hk, K] before the convolution, of the projection's dtype
  GroupedView v, z, out;         // [B, T, Hk, group, V]; v before the convolution, z before the gate's activation
  GroupedView a, b;              // [B, T, Hk, group]
  int64_t width, window;         // taps, 2 to 4; columns of conv_state, width - 1 or width, oldest first
  View conv_weight, conv_bias;   // [C, width], [C]; channels are q | k | v, whatever the projection's order; no bias: 0
  View conv_state;               // [pool, C, window], in place
  View state;                    // [pool, Hv, K, V], in place
  int64_t pool;                  // slots that both have
  IndexView slots;               // [N]
  View A_log, dt_bias;           // [Hv]
  View norm_weight;              // [V]
  float eps, scale;
  bool use_silu;                 // of the gate, else sigmoid
  bool norm_before_gate, allow_neg_eigval;

  GDN_INLINE int64_t group() const { return dims.Hv / dims.Hk; }
  // First channel of a head.
  GDN_INLINE int64_t q_channel(int64_t hk) const { return hk * dims.K; }
  GDN_INLINE int64_t k_channel(int64_t hk) const { return (dims.Hk + hk) * dims.K; }
  GDN_INLINE int64_t v_channel(int64_t h) const { return 2 * dims.Hk * dims.K + h * dims.V; }
};

}  // namespace gdn
