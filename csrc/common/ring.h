// SPDX-License-Identifier: Apache-2.0
// A record of the verify ring: what one token does to the states of one key head's value heads, so that a fold can redo it.
//
//     raw k [K], then per value head of the group its f [V], then the group's alpha           S = fma(k, f, alpha*S)
//
// The records of a token stand at [ring row, key head, token]; elements past a record are never written.
#pragma once

#include "dims.h"

namespace gdn {

constexpr int64_t kMaxRingLength = 64;

GDN_INLINE int64_t ring_record_elements(int64_t K, int64_t V, int64_t group) { return K + group * (V + 1); }

// Element offsets inside a record; `member` counts the value heads of the key head.
GDN_INLINE int64_t record_factor(int64_t K, int64_t V, int64_t member) { return K + member * V; }
GDN_INLINE int64_t record_alpha(int64_t K, int64_t V, int64_t group, int64_t member) { return K + group * V + member; }

}  // namespace gdn
