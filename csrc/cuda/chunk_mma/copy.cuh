// SPDX-License-Identifier: Apache-2.0
// Chunks from the workspace and V to shared memory by cp.async, in three parts, each as soon as its place is free.
#pragma once

#include "../ptx/cp_async.cuh"
#include "columns.cuh"
#include "prepared.h"

namespace gdn::cuda::chunk_mma {

// kBytes from an image to its place, by the whole block.
template <int kBytes>
__device__ __forceinline__ void copy_image(void* smem, const void* gmem) {
  const uint32_t to = ptx::shared_address(smem) + 16 * threadIdx.x;
  const char* const from = static_cast<const char*>(gmem) + 16 * threadIdx.x;
#pragma unroll
  for (int first = 0; first < kBytes; first += 16 * kThreads) {
    if (kBytes - first >= 16 * kThreads || 16 * static_cast<int>(threadIdx.x) < kBytes - first) {
      ptx::cp_async_16(to + first, from + first, 16);
    }
  }
}

// T'' or T, and the gates.
__device__ __forceinline__ void copy_t(const Solved& gmem, LowerBlocks& smem, Gates& smem_gates) {
  copy_image<sizeof(gmem.first.t)>(smem.block[PlacesOfT::index(3, 0)], gmem.first.t);
  copy_image<sizeof(gmem.second.t)>(smem.block[PlacesOfT::index(3, 2)], gmem.second.t);
  copy_image<sizeof(gmem.third.t)>(smem.block[PlacesOfT::index(3, 1)], gmem.third.t);
  copy_image<sizeof(Gates)>(&smem_gates, &gmem.first.gates);
}
__device__ __forceinline__ void copy_t(const HighSolved& gmem, HighTiles& smem, HighGates& smem_gates) {
  copy_image<sizeof(smem)>(&smem, gmem.t);
  copy_image<sizeof(HighGates)>(&smem_gates, &gmem.gates);
}

// M or P.
__device__ __forceinline__ void copy_mix(const Solved& gmem, LowerBlocks& smem) {
  copy_image<sizeof(gmem.first.m)>(smem.block[PlacesOfM::index(1, 1)], gmem.first.m);
  copy_image<sizeof(gmem.second.m)>(smem.block[PlacesOfM::index(3, 3)], gmem.second.m);
  copy_image<sizeof(gmem.third.m)>(smem.block[PlacesOfM::index(2, 2)], gmem.third.m);
}
__device__ __forceinline__ void copy_mix(const HighSolved& gmem, HighTiles& smem) { copy_image<sizeof(smem)>(&smem, gmem.p); }

// Where a sequence's chunks lie, and a warp's columns of V.
template <int kKeyDim, class Solved>
struct Source {
  const Keys<kKeyDim>* keys;            // of the first chunk
  const Solved* solved;
  int64_t keys_stride, solved_stride;   // from chunk to chunk
  const uint16_t* v;                    // token 0, the lane's half of the warp's columns
  int64_t v_stride;
  bool has_columns;                     // the warp's columns are inside V
  int length;                           // tokens

  // k of a chunk, to the half that the chunk before the one before was in.
  __device__ __forceinline__ void copy_k(int chunk, SharedMemory<kKeyDim, Solved>& smem) const {
    copy_image<sizeof(Keys<kKeyDim>::k)>(smem.k[chunk % 2], keys[chunk * keys_stride].k);
  }
  // What comes behind the product with T'' (or T).
  __device__ __forceinline__ void copy_late(int chunk, SharedMemory<kKeyDim, Solved>& smem) const {
    copy_image<sizeof(Keys<kKeyDim>::q)>(smem.q, keys[chunk * keys_stride].q);
    copy_mix(solved[chunk * solved_stride], smem.mix);
  }
  // What comes before it but k. A warp's part of V is its own.
  __device__ __forceinline__ void copy_early(int chunk, int warp, int lane, SharedMemory<kKeyDim, Solved>& smem) const {
    copy_t(solved[chunk * solved_stride], smem.t, smem.gates[chunk % 2]);
    if (!has_columns) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {   // missing tokens are zeros
      const int t = 16 * i + lane / 2, token = chunk * kChunk + t;
      const uint32_t to = ptx::shared_address(smem.v[warp]) + column_offset(t, lane % 2);
      ptx::cp_async_16(to, v + static_cast<int64_t>(min(token, length - 1)) * v_stride, token < length ? 16 : 0);
    }
  }
};

}  // namespace gdn::cuda::chunk_mma
