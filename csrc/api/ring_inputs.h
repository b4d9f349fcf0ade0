// SPDX-License-Identifier: Apache-2.0
// The ring of gated_delta_verify and fold_ring, checked alike.
#pragma once

#include "../common/ring.h"
#include "checks.h"

namespace gdn::api {

// [rows, Hk, length, stride] with room for the records of these heads, a record's elements adjacent.
inline View ring_view(const Checker& check, const Tensor& ring, bool is_written, int64_t Hk, int64_t Hv, int64_t K,
                      int64_t V) {
  check.require_dim("ring", ring, 4, "[rows, Hk, length, stride]");
  const auto sizes = {ring.size(0), Hk, ring.size(2), ring.size(3)};
  const View view = is_written ? check.written("ring", ring, sizes, "[rows, Hk, length, stride]")
                               : check.view("ring", ring, sizes, "[rows, Hk, length, stride]");
  const int64_t record = ring_record_elements(K, V, Hv / Hk);
  if (ring.size(3) < record) {
    check.require(false, "ring", "[rows, Hk, length, stride] with stride at least a record, " + std::to_string(record), ring);
  }
  check.require(view.stride[3] == 1, "ring", "contiguous in its last dim", ring);
  check.require(ring.size(2) >= 1 && ring.size(2) <= kMaxRingLength, "ring", "of length 1 to 64", ring);
  return view;
}

}  // namespace gdn::api
