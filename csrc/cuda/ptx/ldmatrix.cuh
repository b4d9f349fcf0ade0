// SPDX-License-Identifier: Apache-2.0
// 8x8 matrices of 16-bit elements between shared memory and registers. A matrix in registers: lane l holds row l / 4,
// columns 2 (l % 4) (low half) and 2 (l % 4) + 1. Lane 8 m + r of an x4 gives the address of row r of matrix m.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// PTX ISA, "ldmatrix".
__device__ __forceinline__ void ldmatrix_x4(uint32_t smem, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(smem)
               : "memory");
}

// The same, each matrix transposed on the way.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t smem, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(smem)
               : "memory");
}

// A word of shared memory, at the address that lane `source` has.
__device__ __forceinline__ void st_shared_at(uint32_t smem, int source, uint32_t bytes, uint32_t word) {
  const uint32_t to = __shfl_sync(0xffffffffu, smem, source) + bytes;
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// PTX ISA, "stmatrix" (sm_90 on); before that each lane stores its words itself.
__device__ __forceinline__ void stmatrix_x4(uint32_t smem, const uint32_t (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  const int row = threadIdx.x % 32 / 4, bytes = threadIdx.x % 4 * 4;
  st_shared_at(smem, row, bytes, x[0]);
  st_shared_at(smem, row + 8, bytes, x[1]);
  st_shared_at(smem, row + 16, bytes, x[2]);
  st_shared_at(smem, row + 24, bytes, x[3]);
#else
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
#endif
}

// PTX ISA, "movmatrix": the transpose of a matrix in registers.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// stmatrix, each matrix transposed on the way.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t smem, const uint32_t (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  const uint32_t transposed[4] = {movmatrix_trans(x[0]), movmatrix_trans(x[1]), movmatrix_trans(x[2]), movmatrix_trans(x[3])};
  stmatrix_x4(smem, transposed);
#else
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
#endif
}

}  // namespace gdn::cuda::ptx
