// SPDX-License-Identifier: Apache-2.0
// One plain struct per op: what api/ has checked and either backend computes from.
#pragma once

#include "dims.h"
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
  View g, beta;                  // [B, T, Hv] log decay (or decay, see below) and write strength; not given: no decay, ones
  View out;                      // [B, T, Hv, V]
  View initial_state;            // [pool_in, Hv, K, V], read; not given: start from zero
  View state;                    // [pool_out, Hv, K, V], written; not given: dropped. May be the same memory
  int64_t pool_in, pool_out;     // number of slots of each
  IndexView slots, out_slots;    // [N] slot read, slot written; not given: row n uses slot n, out_slots defaults to slots
  IndexView cu_seqlens;          // [N + 1]; not given: dense
  FlagView has_initial_state;    // [N]
  float scale;
  bool use_qk_l2norm;
  bool gate_is_linear;           // g holds alpha itself, not its logarithm
  RuleMode mode;                 // which kernel; the CPU has one for all
  RowRange rows;
};

// Rows of a call: the sequences, and, in ragged input, the tokens outside all of them as row N.
GDN_INLINE int64_t num_rows(const RuleParams& params) { return params.dims.N + (params.cu_seqlens.given() ? 1 : 0); }

// Whether a launch computes row n. The tokens outside all sequences go with the empty ones.
GDN_INLINE bool takes_row(const RuleParams& params, int64_t n) {
  const int64_t length = n < params.dims.N ? sequence_span(params.cu_seqlens, n, params.dims.T).length : 0;
  return length >= params.rows.min_length && length <= params.rows.max_length;
}

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
  IndexView seq_idx;             // int32 [B, T] with row stride seq_idx_row; tokens of another document count as absent, < 0 is padding
  int64_t seq_idx_row;
  FlagView has_initial_state;    // [N]
  bool use_silu;
  bool write_state;
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

}  // namespace gdn
