// SPDX-License-Identifier: Apache-2.0
// Where rows and segments of rows are in a launch, and what is kept of them in the workspace behind the prepared chunks:
//     starts       [segment rows][Hv][V][K] fp32    S^T at the start of the second segment of each row; at those behind it
//                                                   B^T of the one before, as store_sums (steps.cuh) leaves it
//     transitions  [segment rows][Hv] Transition    A^T of each segment between: S at its end = A S + what it writes itself
//     queue        Queue                            which tasks are taken (tasks.cuh), and the rows of a ragged call, the
//                                                   longest first
//     relay        Relay                            what says which chunks are prepared (relay.cuh)
// A call has either the first two or one of the last two: they start at the same place.
// With the two-level scan (params.segment_tokens > 0) a row is cut every so many tokens into segments. A segment row is the
// place of a segment; as with chunk rows, ragged sequences start where there is room for those before whatever their lengths
// are: row = first token / segment_tokens + sequence + segment.
#pragma once

#include "prepared.h"

namespace gdn::cuda::chunk_sm90 {

GDN_INLINE bool is_scanned(const RuleParams& p) { return p.segment_tokens > 0; }
GDN_INLINE bool is_relayed(const RuleParams& p) { return p.items_ahead > 0; }

// Segments that end in so many tokens, by a division of 32 bits: one of 64 takes 150 instructions.
GDN_INLINE int64_t whole_segments(const RuleParams& p, int64_t tokens) {
  return static_cast<uint32_t>(tokens) / static_cast<uint32_t>(p.segment_tokens);
}
GDN_INLINE int64_t segments_of_length(const RuleParams& p, int64_t tokens) {
  return whole_segments(p, tokens + p.segment_tokens - 1);
}

GDN_INLINE int64_t num_segment_rows(const RuleParams& p) {
  return p.cu_seqlens.given() ? whole_segments(p, p.dims.T) + p.dims.N + 1 : p.dims.N * segments_of_length(p, p.dims.T);
}

// Segments that the first pass has blocks for, all of a row but its last (of an uncut row that one); that the second has: all
// but the first.
GDN_INLINE int64_t num_earlier_segments(const RuleParams& p) {
  if (p.cu_seqlens.given()) return num_segment_rows(p);
  const int64_t count = segments_of_length(p, p.dims.T);
  return p.dims.N * (count > 1 ? count - 1 : count);
}
GDN_INLINE int64_t num_later_segments(const RuleParams& p) {
  return p.cu_seqlens.given() ? num_segment_rows(p) : p.dims.N * (segments_of_length(p, p.dims.T) - 1);
}

GDN_INLINE int64_t first_segment_row(const RuleParams& p, int64_t n, int64_t first_token) {
  return p.cu_seqlens.given() ? whole_segments(p, first_token) + n : n * segments_of_length(p, p.dims.T);
}

// Whether blocks take rows in the order of their lengths, and whether that order is in the workspace (few rows are compared
// by each block).
constexpr int64_t kRowsComparedByBlocks = 32;
GDN_INLINE bool sorts_rows(const RuleParams& p) {   // beside their preparation rows come as they are prepared
  return p.cu_seqlens.given() && p.dims.N > 1 && !is_scanned(p) && !is_relayed(p);
}
GDN_INLINE bool has_order(const RuleParams& p) { return sorts_rows(p) && num_rows(p) > kRowsComparedByBlocks; }

// A^T [kKeyDim of the start][kKeyDim of the end], of each row high + low, fp16, times the row's factor, a power of two. Both
// halves are images of shared memory (tile/swizzle.cuh).
template <int kKeyDim>
struct alignas(16) Transition {
  fp16_t high[kKeyDim * kKeyDim], low[kKeyDim * kKeyDim];
  float factor[kKeyDim];   // at factor_place
};

// A row of A^T is a column of S^T: a lane finds those of its columns as it does factors of tokens.
GDN_INLINE constexpr int factor_place(int row) { return row / kChunk * kChunk + token_place(row % kChunk); }

template <int kKeyDim>
GDN_INLINE float* start_of(const RuleParams& p, int64_t segment_row, int64_t head) {
  float* const starts = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + prepared_bytes<kKeyDim>(p));
  return starts + (segment_row * p.dims.Hv + head) * p.dims.V * kKeyDim;
}

template <int kKeyDim>
GDN_INLINE Transition<kKeyDim>* transition_of(const RuleParams& p, int64_t segment_row, int64_t head) {
  return reinterpret_cast<Transition<kKeyDim>*>(start_of<kKeyDim>(p, num_segment_rows(p), 0)) + segment_row * p.dims.Hv + head;
}

// What the preparation leaves for blocks that take one task after the other.
struct Queue {
  uint32_t taken;     // tasks behind those that blocks begin with, zero at the start
  int32_t order[1];   // [N + 1] where has_order says so
};
GDN_INLINE bool has_queue(const RuleParams& p) { return !is_scanned(p) && !is_relayed(p); }
GDN_INLINE int64_t queue_words(const RuleParams& p) { return 1 + (has_order(p) ? num_rows(p) : 0); }

template <int kKeyDim>
GDN_INLINE Queue* queue_of(const RuleParams& p) {
  return reinterpret_cast<Queue*>(static_cast<char*>(p.workspace) + prepared_bytes<kKeyDim>(p));
}

// Words of a call that prepares and carries side by side, all zero at its start.
struct Relay {
  uint32_t next;    // item behind the first ones that nobody has begun, counted from these
  uint32_t ended;   // blocks of the preparation that left their multiprocessor to the carrying, or tried to
  uint32_t ready[1];   // [chunk rows][Hk] not zero: the chunk is prepared
};
GDN_INLINE int64_t relay_words(const RuleParams& p) { return 2 + num_chunk_rows(p) * p.dims.Hk; }

template <int kKeyDim>
GDN_INLINE Relay* relay_of(const RuleParams& p) {
  return reinterpret_cast<Relay*>(static_cast<char*>(p.workspace) + prepared_bytes<kKeyDim>(p));
}

template <int kKeyDim>
GDN_INLINE int64_t workspace_bytes(const RuleParams& p) {
  int64_t bytes = prepared_bytes<kKeyDim>(p);
  if (is_scanned(p)) {
    const int64_t of_head = p.dims.V * kKeyDim * sizeof(float) + sizeof(Transition<kKeyDim>);
    bytes += num_segment_rows(p) * p.dims.Hv * of_head;
  }
  if (has_queue(p)) bytes += queue_words(p) * static_cast<int64_t>(sizeof(int32_t));
  if (is_relayed(p)) bytes += relay_words(p) * static_cast<int64_t>(sizeof(uint32_t));
  return bytes;
}

}  // namespace gdn::cuda::chunk_sm90
