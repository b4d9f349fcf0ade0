// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/arch.cuh: the host has what it emulates.
#pragma once

#include "../machine.h"

namespace gdn::cuda::ptx {

constexpr bool kHasWgmma = true;
constexpr bool kHasClusters = true;

inline int opaque(int x) { return x; }
inline float opaque(float x) {
  volatile float kept = x;
  return kept;
}
inline int64_t opaque(int64_t x) { return x; }
template <class T>
T* opaque(T* x) {
  return x;
}
inline void trap() { emulated::fail("trap"); }

}  // namespace gdn::cuda::ptx
