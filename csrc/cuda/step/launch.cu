// SPDX-License-Identifier: Apache-2.0
// gated_delta_step on a GPU: which kernel takes a call, how it is cut, and the launch.
#include <algorithm>

#include "../launch.cuh"
#include "../ops.h"
#include "any.cuh"
#include "kernel.cuh"

namespace gdn::cuda {
namespace {

constexpr int kMostBlocks = 8;     // of a cluster, on every card that has them
constexpr int kThreads = 128;      // of a block
constexpr int kSpreadBlocks = 4;   // of a multiprocessor, where a grid that small is to spread

// Columns of a block of the clustered kernel, 0: it does not take the call. Narrow tiles put more blocks on the chip; a
// cluster holds all tiles of a key head, and its threads one channel each.
int pick_tile(const StepParams& p) {
  const Dims& d = p.dims;
  if (!has_clusters() || (d.K != 64 && d.K != 128) || !has_call(p)) return 0;
  for (int tile : {32, 64}) {
    const int64_t blocks = p.group() * (d.V / tile);
    if (d.V % tile == 0 && blocks <= kMostBlocks && ceil_div(2 * d.K, blocks) <= kThreads - tile) return tile;
  }
  return 0;
}

// How the grid overlaps its neighbours in the stream: the fastest measured (NOTES.md).
template <class Share, int kBlocksOfSm>
const char* launch_share(const StepParams& p, void* stream) {
  const Dims& d = p.dims;
  StepCut cut = {};
  cut.tiles = static_cast<int>(d.V / Share::kTile);
  cut.blocks = static_cast<int>(p.group()) * cut.tiles;
  cut.key_heads = divider(static_cast<uint32_t>(d.Hk));
  cut.tiles_of_head = divider(static_cast<uint32_t>(cut.tiles));
  cut.per_block = static_cast<int>(ceil_div(ceil_div(2 * d.K, cut.blocks), 4) * 4);
  const int64_t blocks = d.N * d.Hk * cut.blocks, num_sms = num_multiprocessors();
  const bool are_few = blocks <= kSpreadBlocks * num_sms;
  cut.opens_early = are_few || Share::kBytes == 2;
  cut.prefetches = are_few || Share::kBytes == 4 || !Share::kVFirst;
  const StepCall call = call_of(p);
  size_t bytes = StepSmem<Share>::bytes(call);
  // All of a small grid is resident whatever the limit; with it the clusters spread, instead of crowding some multiprocessors
  // and leaving others idle. Up to a quarter of the chip the next grid takes the free places.
  if (are_few && 4 * blocks > kBlocksOfSm * num_sms) bytes = std::max(bytes, shared_bytes_for(kSpreadBlocks));
  return launch_clusters_early(step_kernel<Share, kBlocksOfSm>, cut.blocks, blocks, Share::kThreads, bytes, stream, call, cut);
}

template <class state_t, bool kVFirst, int kSteps>
const char* launch_tile(const StepParams& p, int tile, void* stream) {
  // Blocks of a multiprocessor: as many as registers hold without a spill.
  if (tile == 32) return launch_share<Share<state_t, kVFirst, kSteps, 32, kThreads>, 5>(p, stream);
  return launch_share<Share<state_t, kVFirst, kSteps, 64, kThreads>, 6>(p, stream);
}

}  // namespace

const char* gated_delta_step(const StepParams& params, void* stream) {
  const Dims& dims = params.dims;
  if (dims.T == 0) return nullptr;
  const int tile = pick_tile(params);
  if (tile == 0) {
    const int64_t num_blocks = dims.N * dims.Hk;
    const size_t bytes = sizeof(float) * AnySmem(dims).floats;
    return launch_early(step_any, num_blocks, kAnyThreads, bytes, stream, params, num_blocks);
  }
  const bool v_first = is_v_first(params.state), is_wide = dims.K == 128;
  const char* error = nullptr;
  dispatch_dtype(params.state.dtype, [&](auto state) {
    using state_t = decltype(state);
    if (v_first) {
      error = is_wide ? launch_tile<state_t, true, 4>(params, tile, stream)
                      : launch_tile<state_t, true, 2>(params, tile, stream);
    } else {
      error = is_wide ? launch_tile<state_t, false, 4>(params, tile, stream)
                      : launch_tile<state_t, false, 2>(params, tile, stream);
    }
  });
  return error;
}

}  // namespace gdn::cuda
