// SPDX-License-Identifier: Apache-2.0
// Shared memory addresses.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// The address that instructions of the .shared space take.
__device__ __forceinline__ uint32_t shared_address(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// The same object, by an address that a register of the warp keeps: ptxas makes the address of dynamic shared memory anew in
// each turn of a loop, which takes as long as a load.
template <class T>
__device__ __forceinline__ T& kept(T& smem) {
  return *static_cast<T*>(__cvta_shared_to_generic(__shfl_sync(0xffffffffu, shared_address(&smem), 0)));
}

}  // namespace gdn::cuda::ptx
