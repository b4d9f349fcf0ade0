// SPDX-License-Identifier: Apache-2.0
//
// The kernel of kernel.cuh for calls with more tiles than the device has multiprocessors: blocks that carry two tiles of a
// head, 128 columns of V, through the same chunks in shared memory. The same equations, numbers, reads, writes and needs,
// but V a multiple of 128 and no segments.
// Grid    x: tiles in the order of kernel.cuh; the first `pairs` blocks take two each, the others one.
// Block   three warpgroups. Groups 0 and 1 (pair.cuh) each do all of a tile; in a block of one tile group 1 ends at once.
//         Group 2 (transfer.cuh) brings chunks and V in, o out.
#pragma once

#include "kernel.cuh"
#include "pair.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kTilesOfPair = 2;

// What the state groups ask about between chunks is kept in shared memory, not in registers.
template <int kKeyDim>
struct alignas(1024) PairMemory : Feed<kKeyDim, kTilesOfPair> {
  Work work[kTilesOfPair];
  Span span;
};

static_assert(sizeof(PairMemory<128>) <= 227 * 1024, "shared memory of a block");

#ifndef TILE_REGISTERS
#define TILE_REGISTERS 224
#endif
constexpr int kTileRegisters = TILE_REGISTERS, kFeederRegisters = 504 - 2 * TILE_REGISTERS;
static_assert(kTilesOfPair * kTileRegisters + kFeederRegisters <= 3 * 168, "registers of the block");

template <class io_t, class out_t, int kKeyDim, class Observer>
__global__ void __launch_bounds__(kThreads, 1)
    pair_kernel(const __grid_constant__ RuleParams p, const int32_t pairs, const __grid_constant__ Observer observer) {
  if constexpr (!ptx::kHasWgmma) {
    ptx::trap();   // the launcher does not choose this kernel for other targets
  } else {
    extern __shared__ __align__(1024) char smem_bytes[];
    PairMemory<kKeyDim>& smem = *reinterpret_cast<PairMemory<kKeyDim>*>(smem_bytes);
    const uint32_t block = blockIdx.x, both = static_cast<uint32_t>(pairs);
    const int tiles = block < both ? kTilesOfPair : 1;
    Work work = work_of_tile<kKeyDim>(p, block + min(block, both));
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
    bool is_done = work.segment.n > p.dims.N || !takes_row(p, work.segment.n);
    if (!is_done) {
      is_done = is_padding(p, work);
      if (is_done && tiles == kTilesOfPair) {
        work.column += kValueTile;
        is_padding(p, work);
      }
    }
    if (is_done) {
      ptx::griddepcontrol_wait();   // the grid does not end before the one that it overlaps
      return;
    }
    const Span span = segment_span(p, work.segment);
    if (threadIdx.x == 0) {
      smem.span = span;
      for (int i = 0; i < kTilesOfPair; ++i) {
        smem.work[i] = work;
        smem.work[i].column += i * kValueTile;
      }
      init_feed_barriers(smem);
      for (uint64_t& barrier : smem.empty) init_barrier(barrier, tiles * kGroupThreads);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (group < kTilesOfPair) {
      ptx::setmaxnreg_inc<kTileRegisters>();
      if (group >= tiles) return;
      Tile& tile = smem.tile[group];
#if defined(STAGGER)
      if (group == 1) __nanosleep(STAGGER);
#endif
      const Work& own = smem.work[group];
      const Writer<out_t> writer = writer_of<out_t>(p, own, smem.span);
      const auto run = [&](int first, int end, State<kKeyDim>& state) {
        run_tile<io_t>(own, first, end, static_cast<int>(smem.span.length), p.scale, writer, smem, tile, state, observer);
        for (int chunk = max(end - 2, 0); chunk < end; ++chunk) wait_phase(tile.o_free[chunk % 2], chunk / 2 % 2);
      };
      float* const panel = reinterpret_cast<float*>(tile.o);   // while no chunk is under way
      carry_state<kKeyDim>(p, own, smem.span, slot_to_read(p, own.segment.n), kStateBarrier + group, panel, run);
    } else {
      ptx::setmaxnreg_dec<kFeederRegisters>();
      carry_transfer<out_t>(p, work, span, tiles, smem, observer);
    }
  }
}

}  // namespace gdn::cuda::chunk_sm90
