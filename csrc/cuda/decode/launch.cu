// SPDX-License-Identifier: Apache-2.0
// gated_delta_rule and gated_delta_verify on short sequences: which calls the decode kernels take, how wide a tile is, and
// the launch.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "../launch.cuh"
#include "../rule_kernels.h"
#include "across.cuh"
#include "many.cuh"
#include "one.cuh"

namespace gdn::cuda {
namespace {

constexpr int64_t kBlocksToFill = 4;   // of a multiprocessor: a wider tile only where that many are left

const View& any_state(const RuleParams& params) {
  return params.initial_state.given() ? params.initial_state : params.state;
}

// Columns of a block, narrow while blocks are few: they then spread over the whole chip.
int pick_tile(const Dims& dims, int num_sms) {
  const bool fills = dims.N * dims.Hv * ceil_div(dims.V, 64) >= kBlocksToFill * num_sms;
  return dims.V > 32 && fills ? 64 : 32;
}

template <class Shape>
Cut cut_of(const RuleParams& params) {
  const Dims& dims = params.dims;
  const int64_t tiles = ceil_div(dims.V, Shape::kTile);
  const int64_t tokens = dims.N > 0 ? ceil_div(dims.B * dims.T, dims.N) : 0;   // of a row, on average
  return {divider(static_cast<uint32_t>(dims.Hv * tiles)), divider(static_cast<uint32_t>(tiles)),
          divider(static_cast<uint32_t>(dims.Hv / dims.Hk)), static_cast<int>(std::clamp<int64_t>(tokens, 1, kMostTokens)),
          0};
}

// What decode_many moves by quads.
bool tokens_move_in_quads(const RuleParams& params) {
  return moves_in_quads(params.q) && moves_in_quads(params.k) && moves_in_quads(params.v) && moves_in_quads(params.out);
}

// Dense rows of one token, all of them this launch's.
bool is_one_token(const RuleParams& params) {
  return params.dims.T == 1 && !params.cu_seqlens.given() && params.rows.min_length <= 1 && params.rows.max_length >= 1;
}

constexpr Overlap kNot = {false, false}, kAsks = {true, false}, kAsksAndOpens = {true, true};

// How one token's grid of narrow tiles overlaps its neighbours in the stream; wide ones: where they are launched. The fastest
// measured (NOTES.md).
Overlap pick_overlap(int64_t blocks, int blocks_of_sm) {
  return 2 * blocks <= int64_t{blocks_of_sm} * num_multiprocessors() ? kAsksAndOpens : kNot;   // side by side
}

template <class Shape>
int64_t num_pieces(const RuleParams& params) {
  return num_rows(params) * params.dims.Hv * ceil_div(params.dims.V, Shape::kTile);
}

template <class Shape>
const char* launch_shape_of_one(const RuleParams& params, bool is_narrow, void* stream) {
  const int64_t blocks = num_pieces<Shape>(params);
  const Overlap of_wide = sizeof(typename Shape::state_t) == 4 ? kAsks : kNot;
  return launch_early(decode_one<Shape>, blocks, Shape::kThreads, kBytesOfOne<Shape>, stream, call_of(params),
                      cut_of<Shape>(params), is_narrow ? pick_overlap(blocks, Shape::kBlocks) : of_wide);
}

template <class Share, int kBlocks>
const char* launch_share_across(const RuleParams& params, const Overlap& overlap, void* stream) {
  return launch_early(decode_across<Share, kBlocks>, num_pieces<Share>(params), Share::kThreads, SmemOfAcross<Share>::kBytes,
                      stream, call_of(params), cut_of<Share>(params), overlap);
}

template <class Shape, class Keeps>
const char* launch_shape_of_many(const RuleParams& params, const Keeps& keeps, void* stream) {
  Cut cut = cut_of<Shape>(params);
  const bool knows_slots = params.initial_state.given() && keeps.starts_at_slots();
  if (knows_slots) cut.first_wave = static_cast<uint32_t>(Shape::kBlocks * num_multiprocessors());
  return launch_early(decode_many<Shape, Keeps>, num_pieces<Shape>(params), Shape::kThreads, smem_bytes<Shape>(cut), stream,
                      call_of(params), cut, keeps);
}

// One token, a K-first state. Tile and threads, blocks of a multiprocessor: the fastest measured (NOTES.md) that does not
// spill.
template <class state_t, int kSteps>
const char* launch_across(const RuleParams& params, bool is_narrow, void* stream) {
  if constexpr (sizeof(state_t) == 4) {
    using Narrow = Share<state_t, false, kSteps, 32, 64>;
    using Wide = Share<state_t, false, kSteps, 64, 128>;
    constexpr int kOfNarrow = 8, kOfWide = 4, kManyRounds = 6;
    if (is_narrow) {
      return launch_share_across<Narrow, kOfNarrow>(params, pick_overlap(num_pieces<Narrow>(params), kOfNarrow), stream);
    }
    const bool are_many = num_pieces<Wide>(params) >= int64_t{kManyRounds} * kOfWide * num_multiprocessors();
    return launch_share_across<Wide, kOfWide>(params, are_many ? kAsks : kNot, stream);
  } else {
    using Narrow = Share<state_t, false, kSteps, 64, 64>;
    using Wide = Share<state_t, false, kSteps, 128, 128>;
    constexpr int kOfNarrow = 6, kOfWide = 3;
    const bool is_one_round = num_pieces<Wide>(params) <= int64_t{kOfWide} * num_multiprocessors();
    if (is_one_round || params.dims.V % Wide::kTile != 0) {
      return launch_share_across<Narrow, kOfNarrow>(params, kAsksAndOpens, stream);
    }
    return launch_share_across<Wide, kOfWide>(params, kNot, stream);
  }
}

// Width, warps of a block, blocks of a multiprocessor: the fastest measured (NOTES.md) that does not spill.
template <class state_t, bool kVFirst, int kSteps>
const char* launch_one(const RuleParams& params, bool is_narrow, void* stream) {
  if constexpr (!kVFirst) {
    return launch_across<state_t, kSteps>(params, is_narrow, stream);
  } else if constexpr (sizeof(state_t) == 4) {
    if (is_narrow) return launch_shape_of_one<Shape<state_t, kVFirst, kSteps, 2, 4, 6>>(params, is_narrow, stream);
    return launch_shape_of_one<Shape<state_t, kVFirst, kSteps, 4, 4, 4>>(params, is_narrow, stream);
  } else {
    if (is_narrow) return launch_shape_of_one<Shape<state_t, kVFirst, kSteps, 2, 2, 6>>(params, is_narrow, stream);
    return launch_shape_of_one<Shape<state_t, kVFirst, kSteps, 2, 4, 4>>(params, is_narrow, stream);
  }
}

template <class state_t, bool kVFirst, int kSteps, class Keeps>
const char* launch_many(const RuleParams& params, const Keeps& keeps, bool is_narrow, void* stream) {
  if constexpr (sizeof(state_t) == 4 && kVFirst) {
    if (is_narrow) return launch_shape_of_many<Shape<state_t, kVFirst, kSteps, 2, 4, 6>>(params, keeps, stream);
    return launch_shape_of_many<Shape<state_t, kVFirst, kSteps, 4, 4, 4>>(params, keeps, stream);
  } else if constexpr (sizeof(state_t) == 4) {
    if (is_narrow) return launch_shape_of_many<Shape<state_t, kVFirst, kSteps, 4, 2, 8>>(params, keeps, stream);
    return launch_shape_of_many<Shape<state_t, kVFirst, kSteps, 4, 4, 4>>(params, keeps, stream);
  } else {
    if (is_narrow) return launch_shape_of_many<Shape<state_t, kVFirst, kSteps, 2, 2, 6>>(params, keeps, stream);
    return launch_shape_of_many<Shape<state_t, kVFirst, kSteps, 2, 4, kVFirst ? 3 : 4>>(params, keeps, stream);
  }
}

template <class state_t, bool kVFirst, int kSteps, class Keeps>
const char* launch_tile(const RuleParams& params, const Keeps& keeps, void* stream) {
  const bool is_narrow = pick_tile(params.dims, num_multiprocessors()) == 32;
  if constexpr (std::is_same_v<Keeps, KeepState>) {
    if (is_one_token(params)) return launch_one<state_t, kVFirst, kSteps>(params, is_narrow, stream);
  }
  return launch_many<state_t, kVFirst, kSteps>(params, keeps, is_narrow, stream);
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

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

// Whether the kernel's shapes hold this state, whatever the number of tokens.
bool has_shape(const RuleParams& params) {
  const Dims& dims = params.dims;
  if ((dims.K != 64 && dims.K != 128) || (dims.N + 1) * dims.Hv * ceil_div(dims.V, 16) > kMaxBlocks) return false;
  return (params.initial_state.given() || params.state.given()) && has_call(params);
}

// Whether 32 bits hold the bytes from a record of a row to its last.
bool records_fit(const VerifyParams& params) {
  const int64_t row = params.ring_length * params.ring.stride[2];
  return row < kMost / 8 && row > -kMost / 8;
}

}  // namespace

bool decode_supports(const RuleParams& params) {
  const Dims& dims = params.dims;
  return dims.B * dims.T <= kMostTokens * dims.N && !params.checkpoints.given() && has_shape(params) &&
         (is_one_token(params) || tokens_move_in_quads(params));
}

const char* decode_gated_delta_rule(const RuleParams& params, void* stream) {
  return launch_keeping(params, KeepState{}, stream);
}

bool decode_supports(const VerifyParams& params) {
  if (!tokens_move_in_quads(params.rule)) return false;
  if (params.ring.given()) return params.ring_rows <= kMost && records_fit(params) && has_shape(params.rule);
  if (params.states_out.given() && (params.states_out.dtype != params.rule.initial_state.dtype ||
                                    is_v_first(params.states_out) != is_v_first(params.rule.initial_state) ||
                                    !moves_in_vectors(params.states_out, params.rule.dims))) {
    return false;
  }
  return params.states_length <= kMost && params.table_length <= kMost && has_shape(params.rule);
}

const char* decode_gated_delta_verify(const VerifyParams& params, void* stream) {
  const Dims& dims = params.rule.dims;
  if (params.ring.given()) {
    const int item = dtype_size(params.ring.dtype);
    const KeepRecords keeps{params.ring,
                            params.ring_slots,
                            params.ring_rows,
                            params.ring_length,
                            static_cast<int32_t>(params.ring.stride[2]) * item,
                            item,
                            static_cast<int>(dims.K),
                            static_cast<int>(dims.V),
                            static_cast<int>(dims.Hv / dims.Hk)};
    return launch_keeping(params.rule, keeps, stream);
  }
  const bool v_first = is_v_first(params.rule.initial_state), has_buffer = params.states_out.given();
  const View& states = has_buffer ? params.states_out : params.rule.state;
  const KeepStates keeps{state_rows(states, v_first), params.states_row_stride * dtype_size(states.dtype),
                         params.state_table, has_buffer ? params.states_length : params.table_length,
                         params.rule.pool_out, params.num_accepted};
  return launch_keeping(params.rule, keeps, stream);
}

}  // namespace gdn::cuda
