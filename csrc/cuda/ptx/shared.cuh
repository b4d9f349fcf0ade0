// SPDX-License-Identifier: Apache-2.0
// Shared memory addresses.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// The address that instructions of the .shared space take.
__device__ __forceinline__ uint32_t shared_address(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

}  // namespace gdn::cuda::ptx
