// SPDX-License-Identifier: Apache-2.0
// gated_delta_rule on short sequences: which calls the decode kernel takes, how wide a tile is, and the launch.
#include <algorithm>
#include <limits>

#include "../launch.cuh"
#include "../rule_kernels.h"
#include "kernel.cuh"
#include "record.cuh"

namespace gdn::cuda {
namespace {

constexpr int64_t kBlocksToFill = 4;   // of a multiprocessor: a wider tile only where that many are left

const View& any_state(const RuleParams& params) {
  return params.initial_state.given() ? params.initial_state : params.state;
}

// Columns of a block. Narrow while they are few: a column's K rows then spread over more threads and the blocks over the
// whole chip.
int pick_tile(const Dims& dims, DType state_dtype, int num_sms) {
  const int narrowest = state_dtype == DType::kFloat32 ? 16 : 32;
  int tile = 64;
  while (tile > narrowest && (tile > dims.V || dims.N * dims.Hv * ceil_div(dims.V, tile) < kBlocksToFill * num_sms)) {
    tile /= 2;
  }
  return tile;
}

template <class Shape, class Keeps>
const char* launch_shape(const RuleParams& params, const Keeps& keeps, void* stream) {
  const Dims& dims = params.dims;
  const int64_t tiles = ceil_div(dims.V, Shape::kTile), pieces = num_rows(params) * dims.Hv * tiles;
  const int64_t tokens = dims.N > 0 ? ceil_div(dims.B * dims.T, dims.N) : 0;   // of a row, on average
  const int64_t blocks = std::min<int64_t>(pieces, Shape::kWalks ? Shape::kBlocks * num_multiprocessors() : kMaxBlocks);
  const Cut cut{static_cast<uint32_t>(pieces), divider(static_cast<uint32_t>(dims.Hv * tiles)),
                divider(static_cast<uint32_t>(tiles)), divider(static_cast<uint32_t>(dims.Hv / dims.Hk)),
                static_cast<int>(std::clamp<int64_t>(tokens, 1, Shape::kWarps)), blocks < pieces ? 2 : 1};
  return launch_early(decode_kernel<Shape, Keeps>, blocks, Shape::kThreads, smem_bytes<Shape>(cut), stream, call_of(params),
                      cut, keeps);
}

template <class state_t, bool kVFirst, int kSteps, class Keeps>
const char* launch_tile(const RuleParams& params, const Keeps& keeps, void* stream) {
  const int tile = pick_tile(params.dims, any_state(params).dtype, num_multiprocessors());
  // Threads, blocks of a multiprocessor: what the registers hold without spilling.
  if constexpr (sizeof(state_t) == 4) {
    if (tile == 16) return launch_shape<Shape<state_t, kVFirst, kSteps, 16, 128, 7, true>>(params, keeps, stream);
    if (tile == 32) return launch_shape<Shape<state_t, kVFirst, kSteps, 32, 128, 6, true>>(params, keeps, stream);
    return launch_shape<Shape<state_t, kVFirst, kSteps, 64, 128, 3, true>>(params, keeps, stream);
  } else {
    if (tile == 32) return launch_shape<Shape<state_t, kVFirst, kSteps, 32, 64, 6, true>>(params, keeps, stream);
    return launch_shape<Shape<state_t, kVFirst, kSteps, 64, 128, 3, true>>(params, keeps, stream);
  }
}

template <class Keeps>
const char* launch_keeping(const RuleParams& params, const Keeps& keeps, void* stream) {
  const bool v_first = is_v_first(any_state(params)), is_wide = params.dims.K == 128;
  const char* error = nullptr;
  dispatch_dtype(any_state(params).dtype, [&](auto state) {
    using state_t = decltype(state);
    if (is_wide) {
      error = v_first ? launch_tile<state_t, true, 4>(params, keeps, stream)
                      : launch_tile<state_t, false, 4>(params, keeps, stream);
    } else {
      error = v_first ? launch_tile<state_t, true, 2>(params, keeps, stream)
                      : launch_tile<state_t, false, 2>(params, keeps, stream);
    }
  });
  return error;
}

// Whether the kernel's shapes hold this state, whatever the number of tokens.
bool has_shape(const RuleParams& params) {
  const Dims& dims = params.dims;
  if ((dims.K != 64 && dims.K != 128) || (dims.N + 1) * dims.Hv * ceil_div(dims.V, 16) > kMaxBlocks) return false;
  return (params.initial_state.given() || params.state.given()) && has_call(params);
}

}  // namespace

bool decode_supports(const RuleParams& params) {
  const Dims& dims = params.dims;
  return dims.B * dims.T <= kMostTokens * dims.N && !params.checkpoints.given() && has_shape(params);
}

const char* decode_gated_delta_rule(const RuleParams& params, void* stream) {
  return launch_keeping(params, KeepState{}, stream);
}

bool decode_supports_ring(const VerifyParams& params) {
  return params.ring.given() && params.ring_rows <= std::numeric_limits<int>::max() && has_shape(params.rule);
}

const char* decode_gated_delta_verify(const VerifyParams& params, void* stream) {
  const Dims& dims = params.rule.dims;
  const KeepRecords keeps{params.ring, params.ring_slots, params.ring_rows, params.ring_length, static_cast<int>(dims.K),
                          static_cast<int>(dims.V), static_cast<int>(dims.Hv / dims.Hk)};
  return launch_keeping(params.rule, keeps, stream);
}

}  // namespace gdn::cuda
