// SPDX-License-Identifier: Apache-2.0
// What the groups of a block share: where wgmma finds tiles, places in the ring of stages, arrivals at barriers.
#pragma once

#include "../ptx/ldmatrix.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/fragment.cuh"
#include "../tile/pipeline.cuh"
#include "../tile/swizzle.cuh"
#include "config.h"
#include "factors.cuh"

namespace gdn::cuda::chunk_sm90 {

// Step s of a K-major tile of 64 rows: 16 columns, 32 bytes on; the next panel after four. In units of 16 bytes.
__device__ __forceinline__ constexpr uint64_t k_major_step(int s) {
  return static_cast<uint64_t>((s / 4) * (kChunk * kPanelRowBytes) + (s % 4) * 32) >> 4;
}

__device__ __forceinline__ uint64_t k_major_descriptor(const fp16_t* tile) {
  return ptx::wgmma_descriptor_128b(ptx::shared_address(tile), 16, 8 * kPanelRowBytes);
}

// Of the panels of T'' or M, to which the start of one is added. In units of 16 bytes.
__device__ __forceinline__ uint64_t panels_descriptor(const SpreadSolved& solved) {
  return ptx::wgmma_descriptor_32b(ptx::shared_address(&solved), kBlockBytes / 2);
}
template <class Places>
__device__ __forceinline__ constexpr uint64_t panel_step(int j) {
  return static_cast<uint64_t>(panel_start<Places>(j)) >> 4;
}

// The zeros of all stages, for wgmma behind the next barrier of who issues it: 16 bytes a thread and stage. By the first seven
// warps.
template <class StageOf, int kCount>
__device__ __forceinline__ void write_zeros(StageOf (&smem_stages)[kCount]) {
  constexpr int kOfBlock = kBlockBytes / 16;
  static_assert(7 * kOfBlock <= kOneTileThreads - 32, "all of a stage's, and a warp for the barriers");
  const int thread = threadIdx.x, block = thread / kOfBlock;
  if (block >= 7) return;
  const int at = 16 * thread + (block >= 1 ? sizeof(Solved::First) : 0) + (block >= 4 ? sizeof(Solved::Second) : 0) +
                 (block >= 6 ? sizeof(Solved::Third) : 0);
#pragma unroll
  for (StageOf& stage : smem_stages) *reinterpret_cast<Words<16>*>(reinterpret_cast<char*>(&stage.solved) + at) = {};
  ptx::fence_proxy_async();
}

template <int kCount>
__device__ __forceinline__ void hold(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) ptx::wgmma_hold(x[i]);
}
template <int kCount>
__device__ __forceinline__ void hold(uint32_t (&x)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) ptx::wgmma_hold(x[i][j]);
  }
}

// Where a group is in a ring of stages: the stage of a chunk and the parity of its phase.
template <int kCount>
struct TurnOf {
  int slot = 0, parity = 0;

  __device__ __forceinline__ TurnOf next() const {
    return slot + 1 < kCount ? TurnOf{slot + 1, parity} : TurnOf{0, parity ^ 1};
  }
};
using Turn = TurnOf<kStages>;

// Tile groups of the block. Where a task has fewer tiles, those that serve it arrive for the others too.
__device__ __forceinline__ int tiles_of_block() { return static_cast<int>(blockDim.x) / kGroupThreads - 1; }
__device__ __forceinline__ int arrivals_of_thread(const Task& task) {
  return __shfl_sync(0xffffffffu, task.tiles == kMostTiles ? 1 : tiles_of_block(), 0);   // known to be uniform
}

// This thread is done with what the barrier speaks of; with `arrivals`, so are others that are not there. Every thread of a
// group arrives: compute-sanitizer does not understand one for all lanes behind a __syncwarp, and that is not faster.
__device__ __forceinline__ void arrive(uint64_t& barrier) { ptx::mbarrier_arrive(ptx::shared_address(&barrier)); }
__device__ __forceinline__ void arrive(uint64_t& barrier, int arrivals) {
  ptx::mbarrier_arrive(ptx::shared_address(&barrier), arrivals);
}

}  // namespace gdn::cuda::chunk_sm90
