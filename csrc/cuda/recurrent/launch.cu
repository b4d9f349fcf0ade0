// SPDX-License-Identifier: Apache-2.0
// The exact recurrence on a GPU: how the work is cut, and the launch.
#include <algorithm>

#include "../launch.cuh"
#include "../rule_kernels.h"
#include "kernel.cuh"

namespace gdn::cuda {
namespace {

// Four elements of the contiguous dim at once: all offsets and the dim itself are multiples of four, the base is aligned,
// and where V is that dim the lane owns four columns of a head.
bool moves_in_quads(const View& state, const Dims& dims, const Tiling& tiling) {
  const bool k_contiguous = state.stride[2] == 1;
  if (!k_contiguous && tiling.columns != 4) return false;
  const int64_t contiguous_dim = k_contiguous ? dims.K : dims.V, other_stride = state.stride[k_contiguous ? 3 : 2];
  const bool strides = state.stride[0] % 4 == 0 && state.stride[1] % 4 == 0 && other_stride % 4 == 0;
  const auto address = reinterpret_cast<uintptr_t>(state.data);
  return state.given() && strides && contiguous_dim % 4 == 0 && address % (4 * dtype_size(state.dtype)) == 0;
}

// Columns of two or three value heads in a lane are compiled for K = 64 and 128 only.
constexpr bool shares_heads(int64_t steps) { return steps == 2 || steps == 4; }

// How to cut the work. Short sequences read and write the state and little else: four columns a lane, so that K-first rows
// move 64 bytes a warp; 16 columns a block at one row, 32 at four, 64 beyond (bytes in flight against blocks). Long ones:
// blocks of 16 columns of as many value heads of a key head as leave a block for every multiprocessor (k and q are read
// from shared memory once for all of them); four columns a lane when there is work for several rounds.
Tiling pick(const Dims& dims, int num_sms) {
  const int64_t group = dims.Hv / dims.Hk, columns = dims.N * dims.Hv * dims.V;
  const bool is_short = dims.B * dims.T <= 8 * dims.N;
  Tiling tiling{};
  tiling.columns = is_short ? 4 : 1;
  const int64_t blocks = dims.N * dims.Hv * ceil_div(dims.V, kMaxComputing * kColumnGroups);
  for (int heads = 2; heads <= 3 && !is_short; ++heads) {
    const bool fills_chip = blocks / heads * 10 >= num_sms * 9;
    if (group % heads == 0 && fills_chip && shares_heads(ceil_div(dims.K, 32))) {
      tiling.columns = heads;
    }
  }
  if (!is_short && tiling.columns == 1 && blocks >= 4 * num_sms) tiling.columns = 4;
  tiling.heads = tiling.columns < 4 ? tiling.columns : 1;
  const int columns_of_warp = kColumnGroups * (tiling.columns < 4 ? 1 : 4);
  const int wanted = is_short && columns <= 8192 ? 1 : (is_short && columns <= 32768 ? 2 : kMaxComputing);
  tiling.tile_warps = static_cast<int>(std::min<int64_t>(wanted, ceil_div(dims.V, columns_of_warp)));
  tiling.tile = tiling.tile_warps * columns_of_warp;
  tiling.stagers = is_short ? 1 : kMaxStaging;
  tiling.chunk = tiling.stagers * kTokensPerStager;
  tiling.head_groups = dims.Hv / tiling.heads;
  tiling.tiles = ceil_div(dims.V, tiling.tile);
  return tiling;
}

template <int kSteps, int kColumns>
const char* launch_recurrent(const RuleParams& params, const Tiling& tiling, void* stream) {
  const int64_t rows = params.dims.N + (params.cu_seqlens.given() ? 1 : 0);
  const int64_t blocks = rows * tiling.head_groups * tiling.tiles;
  if (blocks > kMaxBlocks) return "more than 2^31 - 1 blocks";
  const int quads = (moves_in_quads(params.initial_state, params.dims, tiling) ? 1 : 0) |
                    (moves_in_quads(params.state, params.dims, tiling) ? 2 : 0);
  const size_t smem_bytes = 2 * tiling.chunk * token_layout(tiling, 32 * kSteps).floats * sizeof(float);
  return launch(recurrent_kernel<kSteps, kColumns>, blocks, 32 * (tiling.tile_warps + tiling.stagers), smem_bytes, stream,
                params, tiling, quads);
}

template <int kSteps>
const char* launch_columns(const RuleParams& params, const Tiling& tiling, void* stream) {
  if constexpr (shares_heads(kSteps)) {
    if (tiling.columns == 2) return launch_recurrent<kSteps, 2>(params, tiling, stream);
    if (tiling.columns == 3) return launch_recurrent<kSteps, 3>(params, tiling, stream);
  }
  return tiling.columns == 4 ? launch_recurrent<kSteps, 4>(params, tiling, stream)
                             : launch_recurrent<kSteps, 1>(params, tiling, stream);
}

}  // namespace

const char* recurrent_gated_delta_rule(const RuleParams& params, void* stream) {
  const Tiling tiling = pick(params.dims, num_multiprocessors());
  const int64_t steps = ceil_div(params.dims.K, 32);
  if (steps <= 1) return launch_columns<1>(params, tiling, stream);
  if (steps <= 2) return launch_columns<2>(params, tiling, stream);
  if (steps <= 3) return launch_columns<3>(params, tiling, stream);
  if (steps <= 4) return launch_columns<4>(params, tiling, stream);
  if (steps <= 6) return launch_columns<6>(params, tiling, stream);
  return launch_columns<8>(params, tiling, stream);
}

}  // namespace gdn::cuda
