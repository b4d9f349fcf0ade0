// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: PTX ISA 9.7.13, griddepcontrol. Nothing before compute capability 9.0, where no launch
// asks for it. A grid launched so may start while the one before it in the stream still runs.
#pragma once

namespace gdn::cuda::ptx {

// Waits until the grids before this one are done and what they wrote can be seen. Every thread, before it touches memory.
__device__ __forceinline__ void griddepcontrol_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next grid may start, if it is one that waits.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gdn::cuda::ptx
