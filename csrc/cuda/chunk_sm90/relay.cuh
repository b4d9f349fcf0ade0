// SPDX-License-Identifier: Apache-2.0
// Preparation and carrying side by side, where the carrying leaves multiprocessors idle (few rows and heads, long rows).
//     clear_kernel     sets the words below to zero
//     prepare_kernel   first its blocks make the first `items_ahead` items of the call, those beyond them none. Then the blocks
//                      of some multiprocessors end, those that the carrying needs, and more where fewer than the rest keep up
//                      with it; the others make what is left, each the next item that nobody has begun. An item that is done
//                      is published by its word.
//     chunk_kernel     starts where blocks have ended; waits for the word of each chunk instead of the grid before.
// Nobody waits for what does not run: blocks of chunk_kernel start when all of prepare_kernel have started (each comes to
// launch_dependents, or to its end, behind the words' clearing) and those never wait for chunk_kernel. Which blocks end and
// which go on decides how soon all is done and nothing else: with too few that go on, by whatever placement, more stay.
#pragma once

#include "../ptx/global_sync.cuh"
#include "../ptx/pdl.cuh"
#include "segments.h"

namespace gdn::cuda::chunk_sm90 {

constexpr int kClearThreads = 256;

template <int kThreads>   // a template, for objects of both chunk kernels include this file
__global__ void __launch_bounds__(kThreads) clear_kernel(uint32_t* words, int64_t count) {
  ptx::griddepcontrol_wait();   // for who may still read them
  ptx::griddepcontrol_launch_dependents();
  for (int64_t idx = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; idx < count;
       idx += static_cast<int64_t>(gridDim.x) * kThreads) {
    words[idx] = 0;
  }
}

// By one thread of a block that has made its share of the first items, which may be none: whether it goes on.
__device__ __forceinline__ bool goes_on(const RuleParams& p, Relay& gmem) {
  if (ptx::multiprocessor_id() >= static_cast<uint32_t>(p.released_multiprocessors)) return true;
  return ptx::atomic_add_relaxed_gpu(&gmem.ended, 1) + static_cast<uint32_t>(p.staying_blocks) >= gridDim.x;
}

// By one thread: the item that a block makes behind item `index`; beyond the last one: none.
template <int kKeyDim>
__device__ __forceinline__ uint32_t next_item(const RuleParams& p, uint32_t index) {
  const uint32_t next = index + gridDim.x;
  const uint32_t ahead = static_cast<uint32_t>(p.items_ahead);
  if (!is_relayed(p) || next < ahead) return next;
  Relay& gmem = *relay_of<kKeyDim>(p);
  return goes_on(p, gmem) ? ahead + ptx::atomic_add_relaxed_gpu(&gmem.next, 1) : ~0u;
}

// The chunks of a row that are known to be prepared, in order. By one warp.
struct Prepared {
  const uint32_t* words;   // of the first chunk that is not known
  int64_t stride;          // from chunk to chunk
  int known, count;        // chunks that are; all

  // Waits until `chunk` is prepared.
  __device__ __forceinline__ void wait_for(int chunk, int lane) {
    if (chunk < known) return;
    unsigned missing;
    do {
      const bool is_there = known + lane >= count || ptx::ld_acquire_gpu(words + lane * stride) != 0;
      missing = ~__ballot_sync(0xffffffffu, is_there);
    } while ((missing & 1) != 0);
    const int more = missing == 0 ? 32 : __ffs(static_cast<int>(missing)) - 1;
    known += more;
    words += more * stride;
    ptx::fence_proxy_async_global();
    __syncwarp();
  }
};

template <int kKeyDim>
__device__ __forceinline__ Prepared prepared_of(const RuleParams& p, int64_t chunk_row, int64_t key_head, int count) {
  if (!is_relayed(p)) return {nullptr, 0, count, count};
  return {relay_of<kKeyDim>(p)->ready + chunk_row * p.dims.Hk + key_head, p.dims.Hk, 0, count};
}

}  // namespace gdn::cuda::chunk_sm90
