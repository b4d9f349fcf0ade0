// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/shared.cuh: addresses are offsets, checked.
#pragma once

#include "../machine.h"

namespace gdn::cuda::ptx {

inline uint32_t shared_address(const void* smem) {
  const ptrdiff_t offset = static_cast<const char*>(smem) - static_cast<char*>(emulated::shared_memory());
  if (offset < 0 || offset >= static_cast<ptrdiff_t>(emulated::machine().shared_bytes)) emulated::fail("not shared memory");
  return static_cast<uint32_t>(offset);
}

template <class T>
T& kept(T& smem) {
  return smem;
}

}  // namespace gdn::cuda::ptx
