// SPDX-License-Identifier: Apache-2.0
// x / divisor for x < 2^31 without a division: multiply, add, shift.
#pragma once

#include <cstdint>

#include "../../common/rule.h"

namespace gdn::cuda {

struct Divider {
  uint32_t divisor, factor, shift;

  GDN_INLINE uint32_t quotient(uint32_t x) const {
    return (static_cast<uint32_t>((static_cast<uint64_t>(x) * factor) >> 32) + x) >> shift;
  }
};

inline Divider divider(uint32_t divisor) {
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < divisor) ++shift;
  const uint64_t rest = (uint64_t{1} << shift) - divisor;
  return {divisor, static_cast<uint32_t>((rest << 32) / divisor + 1), shift};
}

}  // namespace gdn::cuda
