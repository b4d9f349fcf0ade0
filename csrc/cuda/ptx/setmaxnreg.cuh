// SPDX-License-Identifier: Apache-2.0
// Registers handed from one warpgroup of a block to another (sm_90a).
#pragma once

namespace gdn::cuda::ptx {

// PTX ISA, "setmaxnreg": all warps of a warpgroup; kRegisters is a multiple of 8 from 24 to 256. inc waits until others
// have given enough back.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace gdn::cuda::ptx
