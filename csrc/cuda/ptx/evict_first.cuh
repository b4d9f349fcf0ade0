// SPDX-License-Identifier: Apache-2.0
// The L2's lines for data that nobody reads again soon: they make room before others do.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// What accesses with .L2::cache_hint take: the value of "createpolicy.fractional.L2::evict_first.b64" of all accesses, as ptxas
// folds it and CUTLASS has it (TMA::CacheHintSm90::EVICT_FIRST). From createpolicy it would be in registers of the thread, from
// where each access fetches it by two instructions.
constexpr uint64_t kEvictFirst = 0x12f0000000000000;

}  // namespace gdn::cuda::ptx
