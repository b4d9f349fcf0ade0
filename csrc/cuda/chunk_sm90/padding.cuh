// SPDX-License-Identifier: Apache-2.0
// Zeros where no sequence is.
#pragma once

#include "prepared.h"

namespace gdn::cuda::chunk_sm90 {

// Writes zero for tokens [first, last) of batch row `batch`, a head's 64 columns from `column` on, as far as there are so many.
__device__ __forceinline__ void write_zeros(const RuleParams& p, int64_t batch, int64_t first, int64_t last, int64_t head,
                                            int64_t column) {
  for (int64_t idx = threadIdx.x; idx < (last - first) * kValueTile; idx += blockDim.x) {
    const int64_t v = column + idx % kValueTile;
    if (v < p.dims.V) p.out.store(p.out.offset(batch, first + idx / kValueTile, head, v), 0.0f);
  }
}

// Zeros in row N, the tokens outside all sequences, and in rows whose slot is padding, of which span_of() are the block's
// tokens. Whether row n is such.
template <class SpanOf>
__device__ __forceinline__ bool write_padding(const RuleParams& p, int64_t n, int64_t head, int64_t column,
                                              const SpanOf& span_of) {
  if (n == p.dims.N) {
    const int64_t begin = p.cu_seqlens.at(0), end = p.cu_seqlens.at(p.dims.N);
    write_zeros(p, 0, 0, begin < p.dims.T ? begin : p.dims.T, head, column);
    write_zeros(p, 0, end < 0 ? 0 : end, p.dims.T, head, column);
    return true;
  }
  if (!p.slots.given() || slot_to_read(p, n) >= 0) return false;
  const Span span = span_of();
  write_zeros(p, span.batch, span.first, span.first + span.length, head, column);
  return true;
}

}  // namespace gdn::cuda::chunk_sm90
