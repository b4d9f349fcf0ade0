// SPDX-License-Identifier: Apache-2.0
// Zeros where no sequence is.
#pragma once

#include "prepared.h"

namespace gdn::cuda::chunk_sm90 {

// Who writes: thread `thread` of `threads`.
struct Writers {
  int thread, threads;
};

// Writes zero for tokens [first, last) of batch row `batch`, a head's 64 columns from `column` on, as far as there are so many.
__device__ __forceinline__ void write_zeros(const RuleParams& p, int64_t batch, int64_t first, int64_t last, int64_t head,
                                            int64_t column, const Writers& writers) {
  for (int64_t idx = writers.thread; idx < (last - first) * kValueTile; idx += writers.threads) {
    const int64_t v = column + idx % kValueTile;
    if (v < p.dims.V) p.out.store(p.out.offset(batch, first + idx / kValueTile, head, v), 0.0f);
  }
}

// Whether row n is one of zeros: row N, the tokens outside all sequences, or one whose slot is padding.
__device__ __forceinline__ bool is_padding(const RuleParams& p, int64_t n) {
  return n == p.dims.N || (p.slots.given() && slot_to_read(p, n) < 0);
}

// Zeros in such a row, of which span_of() are the tokens if it is a sequence.
template <class SpanOf>
__device__ __forceinline__ void write_padding(const RuleParams& p, int64_t n, int64_t head, int64_t column,
                                              const Writers& writers, const SpanOf& span_of) {
  const bool is_outside = n == p.dims.N;
#pragma unroll 1
  for (int part = 0; part < (is_outside ? 2 : 1); ++part) {   // before all sequences and behind them
    Span span;
    if (is_outside) {
      const int64_t bound = p.cu_seqlens.at(part == 0 ? 0 : n), inside = bound < 0 ? 0 : min(bound, p.dims.T);
      span = part == 0 ? Span{0, 0, inside} : Span{0, inside, p.dims.T - inside};
    } else {
      span = span_of();
    }
    write_zeros(p, span.batch, span.first, span.first + span.length, head, column, writers);
  }
}

}  // namespace gdn::cuda::chunk_sm90
