// SPDX-License-Identifier: Apache-2.0
// The L2's lines that make room before others do: of what nobody reads again soon.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// What accesses with .L2::cache_hint take: the value that ptxas 13.0 makes of "createpolicy.fractional.L2::evict_first.b64" for
// all accesses, for compute capabilities 8.0 to 12.0, and that CUTLASS has (TMA::CacheHintSm90::EVICT_FIRST). From createpolicy
// it would lie in registers of the thread, from where each access fetches it by two instructions. Only a hint: results do not
// depend on it.
constexpr uint64_t kEvictFirstPolicy = 0x12f0000000000000;

}  // namespace gdn::cuda::ptx
