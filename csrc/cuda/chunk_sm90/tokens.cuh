// SPDX-License-Identifier: Apache-2.0
// Tiles of V and o, 64 tokens of 64 columns in 16 bits, between global and shared memory. Eight lanes move the 128 bytes of a
// token.
#pragma once

#include "../ptx/cp_async.cuh"
#include "../tile/pack.cuh"
#include "exchange.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kLanesOfToken = 8, kTokensAtOnce = kGroupThreads / kLanesOfToken;

// Tokens of 64 columns of V or o, 16 bytes a thread.
struct Tokens {
  uint16_t* gmem;   // token 0 of the sequence, the thread's columns
  int64_t stride;   // from token to token
  int thread;       // of the group

  // The same columns of a later tile.
  __device__ __forceinline__ Tokens of_tile(int tile) const { return {gmem + tile * kValueTile, stride, thread}; }

  __device__ __forceinline__ int token(int i) const { return i * kTokensAtOnce + thread / kLanesOfToken; }
  __device__ __forceinline__ uint32_t smem_offset(int i) const {
    return swizzled_offset<kChunk>(token(i), thread % kLanesOfToken);
  }

  // Starts to copy tokens first .. first + 63 to a tile; those from `length` on are zeros.
  __device__ __forceinline__ void copy_in(int first, int length, uint16_t* smem_tile) const {
#pragma unroll
    for (int i = 0; i < kChunk / kTokensAtOnce; ++i) {
      const int t = first + token(i);
      ptx::cp_async_16(ptx::shared_address(smem_tile) + smem_offset(i), gmem + min(t, length - 1) * stride,
                       t < length ? 16 : 0);
    }
  }
  __device__ __forceinline__ void read(const uint16_t* smem_tile, Words<16> (&x)[kChunk / kTokensAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kChunk / kTokensAtOnce; ++i) {
      x[i] = *reinterpret_cast<const Words<16>*>(reinterpret_cast<const char*>(smem_tile) + smem_offset(i));
    }
  }
  // Tokens from `length` on are left out.
  __device__ __forceinline__ void write(int first, int length, const Words<16> (&x)[kChunk / kTokensAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kChunk / kTokensAtOnce; ++i) {
      const int t = first + token(i);
      if (t < length) *reinterpret_cast<Words<16>*>(gmem + t * stride) = x[i];
    }
  }
};

}  // namespace gdn::cuda::chunk_sm90
