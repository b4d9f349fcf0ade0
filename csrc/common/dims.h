// SPDX-License-Identifier: Apache-2.0
// Sizes of one call, in the words of the docs, and the integer helpers everybody needs.
#pragma once

#include <cstdint>

#include "rule.h"

namespace gdn {

constexpr int kMaxHeadDim = 256;

struct Dims {
  int64_t B, T;   // batch rows and tokens of q, k, v as they lie ([1, total] when ragged)
  int64_t N;      // sequences: len(cu_seqlens) - 1 when ragged, else B
  int64_t Hk, Hv; // key/query heads, value heads
  int64_t K, V;   // head dims
};

// Value head h reads key head h // (Hv // Hk): grouped, not interleaved.
template <class Head>
GDN_INLINE Head key_head(Head h, Head Hk, Head Hv) {
  return h / (Hv / Hk);
}

GDN_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace gdn
