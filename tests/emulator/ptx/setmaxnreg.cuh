// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/setmaxnreg.cuh: the host counts no registers.
#pragma once

namespace gdn::cuda::ptx {

template <int kRegisters>
void setmaxnreg_inc() {}
template <int kRegisters>
void setmaxnreg_dec() {}

}  // namespace gdn::cuda::ptx
