// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/bar.cuh: barriers of a block.
#pragma once

#include "../machine.h"

namespace gdn::cuda::ptx {

inline void bar_sync(int id, int threads) { emulated::meet(id, threads); }

inline void bar_arrive(int id, int threads) { emulated::arrive(id, threads); }

}  // namespace gdn::cuda::ptx
