// SPDX-License-Identifier: Apache-2.0
// Which calls the Hopper chunk kernel takes, and its launch.
#include "../launch.cuh"
#include "../rule_kernels.h"
#include "combine.cuh"
#include "prepare.cuh"
#include "relay.cuh"
#include "segments.cuh"
#include "takes.h"

#include <algorithm>

namespace gdn::cuda {
namespace {

using namespace chunk_sm90;

// What the two-level scan costs, in tenths of what a chunk of a chain takes (1.2 us on an H200): a chunk in both passes; two
// more kernels, states and transitions written and read; a step of combine_kernel.
constexpr int64_t kTenthsOfChunk = 10, kTenthsOfBoth = 21, kTenthsOfScan = 80, kTenthsOfStep = 12;

// Tokens of a segment with which a call is done soonest, or 0: rows as they are. From shapes alone: of ragged rows nobody here
// knows the lengths, so they are taken to be equal where that speaks against the scan.
int64_t choose_segment_tokens(const RuleParams& params) {
  const Dims& dims = params.dims;
  if (!params.may_scan || dims.N < 1 || dims.T < 1) return 0;
  const bool is_ragged = params.cu_seqlens.given();
  const int64_t side_by_side = num_multiprocessors() / (dims.Hv * segment_blocks(dims));   // segments of a pass
  // Segments of T tokens: of each row a pass leaves one out.
  const int64_t most = is_ragged ? side_by_side - dims.N : side_by_side / dims.N + 1;
  const int64_t chunks = ceil_div(dims.T, kChunk), row_chunks = is_ragged ? chunks / dims.N : chunks;
  int64_t best = 0, least = row_chunks * kTenthsOfChunk * 9 / 10;   // nothing for a tenth less
  for (int64_t segments = 3; segments <= std::min(most, chunks); ++segments) {
    // Odd: with the carry before this one, lengths of a power of two took a chunk longer; now 8 and 9 chunks are level.
    const int64_t length = ceil_div(chunks, segments) | 1;
    const int64_t tenths = length * kTenthsOfBoth + kTenthsOfScan + ceil_div(row_chunks, length) * kTenthsOfStep;
    if (tenths < least) {
      least = tenths;
      best = length * kChunk;
    }
  }
  return best;
}

int64_t num_items(const RuleParams& params) { return num_chunk_rows(params) * params.dims.Hk; }

// Items to prepare before the carrying starts (relay.cuh), or 0: all.
int64_t choose_items_ahead(const RuleParams& params) {
  const char* const given = getenv("AHEAD");
  return given ? atoi(given) * num_items(params) / 100 : 0;
}

RuleParams with_segments(RuleParams params) {
  params.segment_tokens = choose_segment_tokens(params);
  params.items_ahead = params.carrying_multiprocessors = params.staying_blocks = 0;
  const int64_t tiles = params.dims.N * params.dims.Hv * (params.dims.V / kValueTile);
  if (!is_scanned(params) && tiles < num_multiprocessors()) {
    params.items_ahead = choose_items_ahead(params);
    params.carrying_multiprocessors = tiles;
    params.staying_blocks = (num_multiprocessors() - tiles) * Hopper::kBlocks;
  }
  return params;
}

int64_t tiles_of_row(const RuleParams& params) { return params.dims.Hv * (params.dims.V / kValueTile); }

int64_t num_tiles(const RuleParams& params) {
  return (is_scanned(params) ? num_later_segments(params) : rows_to_launch(params)) * tiles_of_row(params);
}

// What the blocks that carry the state cost, in tenths of a chunk of one tile (1.2 us on an H200): a chunk of two tiles; what
// a block does before and behind its chunks.
constexpr int64_t kTenthsOfPair = 17, kTenthsOfEnds = 40;

// How many blocks carry two tiles, so that the call is done soonest: none, as many as fill whole rounds, or all. From shapes
// alone, as if rows were equally long; but a call takes no less than its longest row, and in pairs that one is to be done
// before the rounds without pairs are. The row of tokens outside all sequences has no chunks.
Pairs choose_pairs(const RuleParams& params) {
  const Dims& dims = params.dims;
  if (dims.V % (kMostTiles * kValueTile) != 0 || is_scanned(params) || dims.N < 1) return {0, 0};
  const int64_t tiles = std::min(dims.N, rows_to_launch(params)) * tiles_of_row(params), most = tiles / 2;
  const int64_t at_once = num_multiprocessors();
  const int64_t chunks = ceil_div(params.cu_seqlens.given() ? dims.T / dims.N : dims.T, kChunk);
  const auto tenths = [&](int64_t pairs) {
    return ceil_div(pairs, at_once) * (chunks * kTenthsOfPair + kTenthsOfEnds) +
           ceil_div(tiles - 2 * pairs, at_once) * (chunks * kTenthsOfChunk + kTenthsOfEnds);
  };
  int64_t best = 0;
  for (const int64_t pairs : {most - most % at_once, most}) {
    if (tenths(pairs) < tenths(best)) best = pairs;
  }
  return {best, (tenths(0) - kTenthsOfEnds - 1) / kTenthsOfPair * kChunk};
}

int64_t num_segment_blocks(const RuleParams& params) {
  return num_earlier_segments(params) * params.dims.Hv * segment_blocks(params.dims);
}

// Groups of a block of combine_kernel: as few as give all columns of S a place side by side.
int combine_groups(const RuleParams& params) {
  int groups = 1;
  while (groups < kMostCombineGroups && params.dims.V % (2 * groups * kCombineColumns) == 0 &&
         params.dims.N * params.dims.Hv * params.dims.V > num_multiprocessors() * kCombineColumns * groups) {
    groups *= 2;
  }
  return groups;
}

template <class io_t, int kKeyDim>
const char* launch_prepare(const RuleParams& params, void* stream) {
  const int64_t items = num_items(params);
  if (is_relayed(params)) {
    const int64_t words = relay_words(params);
    if (const char* error = launch_early(clear_kernel, ceil_div(words, kClearThreads), kClearThreads, 0, stream,
                                   reinterpret_cast<uint32_t*>(relay_of<kKeyDim>(params)), words)) {
      return error;
    }
  }
  const int64_t blocks = std::min<int64_t>(items, Hopper::kBlocks * num_multiprocessors());
  return launch_early(prepare_kernel<io_t, kKeyDim>, blocks, kPrepareThreads, sizeof(PrepareMemory<kKeyDim>),
                stream, params);
}

// The passes that give each segment its start, and o of the first ones.
template <class io_t, class out_t, int kKeyDim>
const char* launch_scan(const RuleParams& params, void* stream) {
  const int groups = combine_groups(params);
  if (const char* error = launch_early(segment_kernel<io_t, out_t, kKeyDim>, num_segment_blocks(params), kThreads,
                                       segment_bytes<kKeyDim>(), stream, params)) {
    return error;
  }
  return launch_early(combine_kernel<kKeyDim>, params.dims.N * params.dims.Hv * (params.dims.V / (kCombineColumns * groups)),
                      groups * kCombineThreads, combine_bytes<kKeyDim>(groups), stream, params);
}

// The state through all chunks. Of a ragged call only the device knows whether there are pairs: blocks for the case of none.
template <class io_t, class out_t, int kKeyDim>
const char* launch_carry(const RuleParams& params, const Pairs& pairs, void* stream) {
  const int64_t tiles = num_tiles(params), blocks = params.cu_seqlens.given() ? tiles : tiles - pairs.count;
  if (tiles > kMaxBlocks) return "more than 2^31 - 1 blocks";
  const bool has_pairs = pairs.count > 0;
  // Without pairs a block has room beside one of the preparation, and so it is there when that ends.
  return launch_early(chunk_kernel<io_t, out_t, kKeyDim, NoObserver>, blocks, has_pairs ? kThreads : kOneTileThreads,
                      has_pairs ? sizeof(SharedMemory<kKeyDim>) : kOneTileBytes<kKeyDim>, stream, params, pairs, NoObserver{});
}

template <class io_t, class out_t, int kKeyDim>
const char* launch_chunk(const RuleParams& params, void* stream) {
  if (const char* error = launch_prepare<io_t, kKeyDim>(params, stream)) return error;
  if (is_scanned(params)) {
    if (const char* error = launch_scan<io_t, out_t, kKeyDim>(params, stream)) return error;
  }
  return launch_carry<io_t, out_t, kKeyDim>(params, choose_pairs(params), stream);
}

template <class io_t, int kKeyDim>
const char* launch_key_dim(const RuleParams& params, void* stream) {
  if (params.out.dtype == DType::kFloat32) return launch_chunk<io_t, float, kKeyDim>(params, stream);
  return launch_chunk<io_t, io_t, kKeyDim>(params, stream);
}

template <class io_t>
const char* launch_dtype(const RuleParams& params, void* stream) {
  return params.dims.K == 64 ? launch_key_dim<io_t, 64>(params, stream) : launch_key_dim<io_t, 128>(params, stream);
}

}  // namespace

bool chunk_sm90_supports(const RuleParams& params) { return takes_call(params) && params.dims.V % kValueTile == 0; }

int64_t chunk_sm90_workspace_bytes(const RuleParams& call) {
  const RuleParams params = with_segments(call);
  return params.dims.K == 64 ? workspace_bytes<64>(params) : workspace_bytes<128>(params);
}

const char* chunk_sm90_gated_delta_rule(const RuleParams& call, void* stream) {
  if (!chunk_sm90_supports(call)) return "the Hopper chunk kernel does not take these dtypes, dims or strides";
  const RuleParams params = with_segments(call);
  return params.q.dtype == DType::kBFloat16 ? launch_dtype<bf16_t>(params, stream) : launch_dtype<fp16_t>(params, stream);
}

}  // namespace gdn::cuda
