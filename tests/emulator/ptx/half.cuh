// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/half.cuh: a NaN gives way to a number.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../common/dtypes.h"

namespace gdn::cuda::ptx {

inline uint32_t max_abs_fp16x2(uint32_t largest, uint32_t x) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const uint32_t before = largest >> shift & 0xffffu, magnitude = x >> shift & 0x7fffu;
    result |= (magnitude > 0x7c00u ? before : std::max(before, magnitude)) << shift;
  }
  return result;
}

inline uint32_t round_pair_fp16_finite(float low, float high) {
  const auto bits = [](float x) -> uint32_t {
    return from_float<fp16_t>(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x).bits;
  };
  return bits(low) | bits(high) << 16;
}

}  // namespace gdn::cuda::ptx
