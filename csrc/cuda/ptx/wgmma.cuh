// SPDX-License-Identifier: Apache-2.0
// Matrix multiply of a warpgroup (sm_90a): d[64, n] = or += a[64, 16] b[16, n], fp16 in, fp32 sums, asynchronously.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
//
// Thread 32 w + l of the warpgroup, with r = 16 w + l / 4 and c = 2 (l % 4), holds
//     d[4 j + i]   row r + 8 (i / 2), column 8 j + c + i % 2
//     a[0..3]      rows r, r + 8, r, r + 8; columns c, c, c + 8, c + 8 (and the next one in the high half)
// so the sums of columns 16 s .. 16 s + 15, rounded and packed in pairs, are the A fragment of step s of the next product.
// Between issue and wait nobody touches d, nor writes what a and b name.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// "wgmma.fence": orders register accesses before it against the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// "wgmma.commit_group".
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// "wgmma.wait_group": at most kPending groups are still under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: keeps the compiler from moving accesses of an operand across this line, which it would do around a
// wait because it does not see the tensor cores read and write registers.
__device__ __forceinline__ void wgmma_hold(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ __forceinline__ void wgmma_hold(uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }

// "Matrix descriptor", rows of 128 bytes with the 128-byte swizzle: 16-byte chunk c of row r lies at chunk c ^ (r % 8).
// Tiles start at a multiple of 1024 bytes. K-major: sbo = bytes between groups of 8 rows (of M or N), lbo unused.
// MN-major: lbo = bytes between spans of 64 elements along M or N, sbo = between groups of 8 rows (of K).
__device__ __forceinline__ uint64_t wgmma_descriptor_128b(uint32_t smem, uint32_t lbo, uint32_t sbo) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) | static_cast<uint64_t>(lbo >> 4) << 16 |
         static_cast<uint64_t>(sbo >> 4) << 32 | static_cast<uint64_t>(1) << 62;
}

// The same of K-major rows of 32 bytes, one step's, with the 32-byte swizzle: the halves of row r are swapped where r / 4 is
// odd. Tiles start at a multiple of 256 bytes.
__device__ __forceinline__ uint64_t wgmma_descriptor_32b(uint32_t smem, uint32_t sbo) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) | static_cast<uint64_t>(1) << 16 | static_cast<uint64_t>(sbo >> 4) << 32 |
         static_cast<uint64_t>(3) << 62;
}

// "fence.proxy.async": what this thread has written to shared memory is there for wgmma, of others after a barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// a in registers, b in shared memory, K-major.
template <bool kAccumulate>
__device__ __forceinline__ void wgmma_m64n64k16(float* d, const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAccumulate ? 1 : 0));
}

// a in registers, b in shared memory, N-major.
template <bool kAccumulate>
__device__ __forceinline__ void wgmma_m64n64k16_trans(float* d, const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAccumulate ? 1 : 0));
}

// a in shared memory too, both K-major.
template <bool kAccumulate>
__device__ __forceinline__ void wgmma_m64n64k16(float* d, uint64_t a, uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "n"(kAccumulate ? 1 : 0));
}

}  // namespace gdn::cuda::ptx
