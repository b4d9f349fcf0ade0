// SPDX-License-Identifier: Apache-2.0
// Single elements of any dtype by cp.async: as the aligned word around each, so that one instruction serves 2 and 4 bytes. A
// load of either width is two instructions for one register, and a kernel with many of them waits where it meant to go on.
#pragma once

#include <cstdint>

#include "../../common/rule.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/shared.cuh"

namespace gdn::cuda {

// Issues the copy of the 4 aligned bytes around an element of 2 or 4 bytes.
__device__ __forceinline__ void copy_word(float* smem, const char* element) {
  const uintptr_t word = reinterpret_cast<uintptr_t>(element) & ~uintptr_t{3};
  ptx::cp_async_ca<4>(ptx::shared_address(smem), reinterpret_cast<const void*>(word));
}
// The element's bits, lowest.
__device__ __forceinline__ uint32_t bits_of_word(float word, const char* element) {
  return float_bits(word) >> (reinterpret_cast<uintptr_t>(element) & 2) * 8;
}

}  // namespace gdn::cuda
