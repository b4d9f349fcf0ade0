// SPDX-License-Identifier: Apache-2.0
// Producer and consumer of a ring of buffers, by mbarriers.
#pragma once

#include "../ptx/mbarrier.cuh"
#include "../ptx/shared.cuh"

namespace gdn::cuda {

// Blocks until the phase of this parity of `barrier` has ended.
__device__ __forceinline__ void wait_phase(const uint64_t& barrier, int parity) {
  ptx::mbarrier_wait_parity(ptx::shared_address(&barrier), static_cast<uint32_t>(parity));
}

}  // namespace gdn::cuda
