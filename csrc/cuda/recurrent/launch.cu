// SPDX-License-Identifier: Apache-2.0
// The exact recurrence on a GPU: how the work is cut, and the launch.
#include <algorithm>

#include "../launch.cuh"
#include "../rule_kernels.h"
#include "kernel.cuh"

namespace gdn::cuda {
namespace {

// Four elements of the contiguous dim at once: the dim and all offsets are multiples of four, the base is aligned.
bool moves_in_quads(const View& view, int contiguous, int64_t size) {
  bool aligned = view.given() && view.stride[contiguous] == 1 && size % 4 == 0;
  for (int i = 0; i < 4; ++i) aligned = aligned && (i == contiguous || view.stride[i] % 4 == 0);
  return aligned && reinterpret_cast<uintptr_t>(view.data) % (4 * dtype_size(view.dtype)) == 0;
}

// A state whose contiguous dim is V moves so only where the lane owns four columns of a head.
bool state_moves_in_quads(const View& state, const Dims& dims, const Tiling& tiling) {
  return state.stride[2] == 1 ? moves_in_quads(state, 2, dims.K) : tiling.columns == 4 && moves_in_quads(state, 3, dims.V);
}

InQuads what_moves_in_quads(const RuleParams& p, const Tiling& tiling) {
  return {moves_in_quads(p.q, 3, p.dims.K),   moves_in_quads(p.k, 3, p.dims.K),
          moves_in_quads(p.v, 3, p.dims.V),   moves_in_quads(p.out, 3, p.dims.V),
          state_moves_in_quads(p.initial_state, p.dims, tiling), state_moves_in_quads(p.state, p.dims, tiling),
          state_moves_in_quads(p.checkpoints, p.dims, tiling)};
}

// Columns of two or three value heads in a lane are compiled for K = 64 and 128 only.
constexpr bool shares_heads(int64_t steps) { return steps == 2 || steps == 4; }

// How to cut the work. Short sequences read and write the state and little else: four columns a lane, so that K-first rows
// move 64 bytes a warp; 16 columns a block at one row, 32 at four, 64 beyond (bytes in flight against blocks). Long ones:
// blocks of 16 columns of as many value heads of a key head as leave a block for every multiprocessor (k and q are read
// from shared memory once for all of them), compiled to have a multiprocessor alone if there are no more than that, else to
// share it with a second one. Four columns of a head a lane when there is work for several rounds and no head to share with.
// A call with checkpoints has one cut, of one column a lane: few calls, not worth as many kernels again.
Tiling pick(const Dims& dims, bool keeps, int num_sms) {
  const int64_t group = dims.Hv / dims.Hk, columns = dims.N * dims.Hv * dims.V;
  const bool is_short = dims.B * dims.T <= 8 * dims.N;
  Tiling tiling{};
  tiling.columns = is_short && !keeps ? 4 : 1;
  const int64_t blocks = dims.N * dims.Hv * ceil_div(dims.V, kMaxComputing * kColumnGroups);
  for (int heads = 2; heads <= 3 && !is_short && !keeps; ++heads) {
    const bool fills_chip = blocks / heads * 10 >= num_sms * 9;
    if (group % heads == 0 && fills_chip && shares_heads(ceil_div(dims.K, 32))) {
      tiling.columns = heads;
    }
  }
  if (!is_short && !keeps && tiling.columns == 1 && blocks >= 4 * num_sms) tiling.columns = 4;
  tiling.heads = tiling.columns < 4 ? tiling.columns : 1;
  tiling.blocks_of_sm = blocks / tiling.heads <= num_sms ? 1 : 2;
  const int columns_of_warp = kColumnGroups * (tiling.columns < 4 ? 1 : 4);
  const int wanted = is_short && columns <= 8192 ? 1 : (is_short && columns <= 32768 ? 2 : kMaxComputing);
  tiling.tile_warps = static_cast<int>(std::min<int64_t>(wanted, ceil_div(dims.V, columns_of_warp)));
  tiling.tile = tiling.tile_warps * columns_of_warp;
  tiling.stagers = is_short ? 1 : (dims.K <= 128 ? kMaxStaging : kMaxStaging / 2);   // 80 KiB at most
  tiling.chunk = tiling.stagers * kTokensOfPass;
  tiling.head_groups = dims.Hv / tiling.heads;
  tiling.tiles = ceil_div(dims.V, tiling.tile);
  return tiling;
}

template <class Cut>
const char* launch_recurrent(const RuleParams& params, const Tiling& tiling, void* stream) {
  const int64_t rows = params.dims.N + (params.cu_seqlens.given() ? 1 : 0);
  const int64_t blocks = rows * tiling.head_groups * tiling.tiles;
  if (blocks > kMaxBlocks) return "more than 2^31 - 1 blocks";
  const size_t smem_bytes = (kRing * tiling.chunk + 1) * TokenLayout<Cut::kSteps>::kFloats * sizeof(float);
  return launch(recurrent_kernel<Cut>, blocks, 32 * (tiling.tile_warps + tiling.stagers), smem_bytes, stream, params,
                tiling, what_moves_in_quads(params, tiling));
}

template <int kSteps>
const char* launch_columns(const RuleParams& params, const Tiling& tiling, void* stream) {
  if (params.checkpoints.given()) return launch_recurrent<Cut<kSteps, 1, 2, true>>(params, tiling, stream);
  if constexpr (shares_heads(kSteps)) {
    const bool alone = tiling.blocks_of_sm == 1;
    if (tiling.columns == 2 && alone) return launch_recurrent<Cut<kSteps, 2, 1>>(params, tiling, stream);
    if (tiling.columns == 3 && alone) return launch_recurrent<Cut<kSteps, 3, 1>>(params, tiling, stream);
    if (tiling.columns == 2) return launch_recurrent<Cut<kSteps, 2, 2>>(params, tiling, stream);
    if (tiling.columns == 3) return launch_recurrent<Cut<kSteps, 3, 2>>(params, tiling, stream);
  }
  return tiling.columns == 4 ? launch_recurrent<Cut<kSteps, 4, kSteps <= 3 ? 2 : 1>>(params, tiling, stream)
                             : launch_recurrent<Cut<kSteps, 1, 2>>(params, tiling, stream);
}

}  // namespace

const char* recurrent_gated_delta_rule(const RuleParams& params, void* stream) {
  const Tiling tiling = pick(params.dims, params.checkpoints.given(), num_multiprocessors());
  const int64_t steps = ceil_div(params.dims.K, 32);
  if (steps <= 1) return launch_columns<1>(params, tiling, stream);
  if (steps <= 2) return launch_columns<2>(params, tiling, stream);
  if (steps <= 3) return launch_columns<3>(params, tiling, stream);
  if (steps <= 4) return launch_columns<4>(params, tiling, stream);
  if (steps <= 6) return launch_columns<6>(params, tiling, stream);
  return launch_columns<8>(params, tiling, stream);
}

}  // namespace gdn::cuda
