// SPDX-License-Identifier: Apache-2.0
// Tiles of V and o, 64 tokens of 64 columns in 16 bits, between global and shared memory. Eight lanes move the 128 bytes of a
// token.
#pragma once

#include "../ptx/cp_async.cuh"
#include "../ptx/ld_st.cuh"
#include "../tile/pack.cuh"
#include "exchange.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kLanesOfToken = 8;

// Tokens of 64 columns of V or o, by so many threads, 16 bytes a thread and token.
template <int kMoving>
struct Tokens {
  static constexpr int kAtOnce = kMoving / kLanesOfToken, kPieces = kChunk / kAtOnce;
  static_assert(kAtOnce % 8 == 0, "a thread's tokens have one swizzle");

  uint16_t* gmem;   // token 0 of the sequence, the thread's columns
  int64_t stride;   // from token to token
  int thread;       // of those that move

  // The thread's first token of those from `first` on; its others are kAtOnce apart.
  __device__ __forceinline__ uint16_t* at(int first) const { return gmem + (first + thread / kLanesOfToken) * stride; }
  // Of these tokens so many are in a sequence of this length, or fewer than one.
  __device__ __forceinline__ int left(int first, int length) const { return length - first - thread / kLanesOfToken; }
  __device__ __forceinline__ uint32_t smem_offset() const {
    return swizzled_offset<kChunk>(thread / kLanesOfToken, thread % kLanesOfToken);
  }
  static constexpr uint32_t kStep = kAtOnce * kPanelRowBytes;

  // Starts to copy tokens first .. first + 63 to a tile; those from `length` on are zeros, of which nothing is read.
  __device__ __forceinline__ void copy_in(int first, int length, uint16_t* smem_tile) const {
    const uint16_t* from = at(first);
    const int remaining = left(first, length);
    const uint32_t to = ptx::shared_address(smem_tile) + smem_offset();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      ptx::cp_async_16_evict_first(to + i * kStep, from, i * kAtOnce < remaining ? 16 : 0);
      from += kAtOnce * stride;
    }
  }
  // Copies them from a tile; tokens from `length` on are left out. Four at a time, for want of registers.
  __device__ __forceinline__ void copy_out(int first, int length, const uint16_t* smem_tile) const {
    uint16_t* to = at(first);
    const int remaining = left(first, length);
    const char* const from = reinterpret_cast<const char*>(smem_tile) + smem_offset();
#pragma unroll
    for (int i = 0; i < kPieces; i += 4) {
      Words<16> x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = *reinterpret_cast<const Words<16>*>(from + (i + j) * kStep);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if ((i + j) * kAtOnce < remaining) ptx::st_global_evict_first_v4(to, x[j].word);
        to += kAtOnce * stride;
      }
    }
  }
};

}  // namespace gdn::cuda::chunk_sm90
