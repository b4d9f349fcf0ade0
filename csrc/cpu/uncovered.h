// SPDX-License-Identifier: Apache-2.0
// Tokens of a ragged call that no sequence covers: before the first offset and after the last.
#pragma once

#include "../common/params.h"

namespace gdn::cpu {

// Calls f(token) for each of them. Offsets outside [0, T] are cut, as sequence_span cuts them.
template <class Function>
void for_uncovered_tokens(const IndexView& cu_seqlens, int64_t N, int64_t T, Function&& f) {
  if (!cu_seqlens.given()) return;
  const int64_t first = cu_seqlens.at(0), last = cu_seqlens.at(N);
  for (int64_t t = 0; t < (first < T ? first : T); ++t) f(t);
  for (int64_t t = last > 0 ? last : 0; t < T; ++t) f(t);
}

// out of a rule's call is zero there.
inline void zero_uncovered_tokens(const RuleParams& p) {
  for_uncovered_tokens(p.cu_seqlens, p.dims.N, p.dims.T, [&](int64_t t) {
    for (int64_t h = 0; h < p.dims.Hv; ++h) {
      for (int64_t c = 0; c < p.dims.V; ++c) p.out.store(p.out.offset(0, t, h, c), 0.0f);
    }
  });
}

}  // namespace gdn::cpu
