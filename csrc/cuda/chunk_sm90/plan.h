// SPDX-License-Identifier: Apache-2.0
// How a call is done soonest, from its shapes alone: rows after their preparation, blocks of one tile or of two; rows beside
// their preparation (relay.cuh); rows cut into segments (segments.cuh). Of ragged rows nobody here knows the lengths, so they
// are taken to be equal. All costs in tenths of what a chunk of one tile takes (1.05 us on an H200), as measured there.
#pragma once

#include <algorithm>

#include "config.h"
#include "prepare.cuh"
#include "segments.cuh"
#include "takes.h"

namespace gdn::cuda::chunk_sm90 {

// What of the device matters.
struct Machine {
  int64_t multiprocessors;
  bool overlaps_launches;   // launch.cuh
};

constexpr int64_t kTenthsOfChunk = 10, kTenthsOfPair = 17;   // a chunk of one tile, of two
constexpr int64_t kTenthsOfEnds = 40;                        // what a task takes before and behind its chunks

// The scan: a chunk in both passes; a step of the second pass; what else the passes take, and more where the preparation has
// more items than multiprocessors, so that it leaves none for their blocks to start on.
constexpr int64_t kTenthsOfBoth = 19, kTenthsOfStep = 9, kTenthsOfScan = 120, kTenthsOfLateStart = 120;

// Beside the preparation: a row's chunk is slower by a twentieth; the first chunks are waited for, one more kernel.
constexpr int64_t kTenthsOfRelay = 85;
inline int64_t beside(int64_t tenths) { return tenths * 21 / 20; }

// What an item of the preparation costs one multiprocessor; beside the carrying, which leaves it the memory, less.
inline int64_t tenths_of_item(const Dims& dims) { return 24 + 4 * (dims.Hv / dims.Hk); }
inline int64_t tenths_of_late_item(const Dims& dims) { return 16 + 4 * (dims.Hv / dims.Hk); }

inline int64_t tiles_of_row(const Dims& dims) { return dims.Hv * (dims.V / kValueTile); }
inline int64_t num_items(const RuleParams& params) { return num_chunk_rows(params) * params.dims.Hk; }
inline int64_t chunks_of_row(const RuleParams& params) {
  return ceil_div(params.cu_seqlens.given() ? params.dims.T / params.dims.N : params.dims.T, kChunk);
}
inline int64_t tenths_of_preparation(const RuleParams& params, int64_t items, const Machine& machine) {
  return ceil_div(items * tenths_of_item(params.dims), machine.multiprocessors);
}

// Whole rows of which `pairs` tasks are two tiles and the others one.
inline int64_t tenths_of_rows(const RuleParams& params, int64_t pairs, const Machine& machine) {
  const int64_t at_once = machine.multiprocessors, chunks = chunks_of_row(params);
  const int64_t tiles = std::min(params.dims.N, rows_to_launch(params)) * tiles_of_row(params.dims);
  return ceil_div(pairs, at_once) * (chunks * kTenthsOfPair + kTenthsOfEnds) +
         ceil_div(tiles - 2 * pairs, at_once) * (chunks * kTenthsOfChunk + kTenthsOfEnds);
}

// How many of the first tasks are pairs: none, as many as fill whole rounds, or all. But a call takes no less than its longest
// row, and in pairs that one is to be done before the rounds without pairs are. The row of tokens outside all sequences has no
// chunks.
inline Pairs choose_pairs(const RuleParams& params, const Machine& machine) {
  const Dims& dims = params.dims;
  if (dims.V % (kMostTiles * kValueTile) != 0 || is_scanned(params) || is_relayed(params) || dims.N < 1) return {0, 0};
  const int64_t most = std::min(dims.N, rows_to_launch(params)) * tiles_of_row(dims) / 2;
  const int64_t none = tenths_of_rows(params, 0, machine);
  int64_t best = 0, least = none;
  for (const int64_t pairs : {most - most % machine.multiprocessors, most}) {
    const int64_t tenths = tenths_of_rows(params, pairs, machine);
    if (tenths < least) {
      least = tenths;
      best = pairs;
    }
  }
  return {best, (none - kTenthsOfEnds - 1) / kTenthsOfPair * kChunk};
}

// Preparation and carrying of whole rows, one after the other or side by side.
inline int64_t tenths_of_call(const RuleParams& params, const Machine& machine) {
  if (!is_relayed(params)) {
    return tenths_of_preparation(params, num_items(params), machine) +
           tenths_of_rows(params, choose_pairs(params, machine).count, machine);
  }
  const int64_t row = beside(chunks_of_row(params) * kTenthsOfChunk) + kTenthsOfEnds;
  return tenths_of_preparation(params, params.items_ahead, machine) + params.dims.N * row + kTenthsOfRelay;
}

// Rows beside their preparation, one row at a time: its tiles have a multiprocessor each, others go on preparing. As many as
// keep ahead of the carrying, by an eighth: what is prepared long before it is carried leaves the L2. If all are too few, as
// much is prepared before as lets both end together.
inline RuleParams with_relay(RuleParams params, const Machine& machine) {
  const Dims& dims = params.dims;
  const int64_t all = machine.multiprocessors, idle = all - tiles_of_row(dims), items = num_items(params);
  const int64_t rows = dims.N * beside(chunks_of_row(params) * kTenthsOfChunk), late_item = tenths_of_late_item(dims);
  params.items_ahead = 0;
  if (idle < 1 || rows < 1 || !machine.overlaps_launches || items <= 2 * all) return params;   // few items are made in a round
  const int64_t staying = std::min(idle, ceil_div(items * late_item * 9, rows * 8));
  params.items_ahead = std::clamp(items - staying * rows / late_item, all, items);
  params.released_multiprocessors = all - staying;
  params.staying_blocks = staying * Hopper::kBlocks;
  return params;
}

// Tokens of a segment with which a call is done soonest; 0 where that saves less than a tenth of `whole`, what whole rows take
// behind the preparation.
inline int64_t choose_segment_tokens(const RuleParams& params, int64_t whole, const Machine& machine) {
  const Dims& dims = params.dims;
  const bool is_ragged = params.cu_seqlens.given();
  const int64_t side_by_side = machine.multiprocessors / (dims.Hv * segment_blocks(dims));   // segments of a pass
  // Segments of T tokens: of each row a pass leaves one out.
  const int64_t most = is_ragged ? side_by_side - dims.N : side_by_side / dims.N + 1;
  const int64_t chunks = ceil_div(dims.T, kChunk), row_chunks = is_ragged ? chunks / dims.N : chunks;
  const int64_t around = kTenthsOfScan + (num_items(params) > machine.multiprocessors ? kTenthsOfLateStart : 0);
  int64_t best = 0, least = whole * 9 / 10;
  for (int64_t segments = 3; segments <= std::min(most, chunks); ++segments) {
    // Odd: lengths of a power of two took a chunk longer with an earlier carry; now 8 and 9 chunks are level.
    const int64_t length = ceil_div(chunks, segments) | 1;
    const int64_t tenths = length * kTenthsOfBoth + around + ceil_div(row_chunks, length) * kTenthsOfStep;
    if (tenths < least) {
      least = tenths;
      best = length * kChunk;
    }
  }
  return best;
}

// The call with what a launcher adds to it.
inline RuleParams with_plan(const RuleParams& call, const Machine& machine) {
  RuleParams plain = call;
  plain.segment_tokens = plain.items_ahead = plain.released_multiprocessors = plain.staying_blocks = 0;
  if (call.dims.N < 1 || call.dims.T < 1) return plain;
  const RuleParams relayed = with_relay(plain, machine);
  const bool pays = is_relayed(relayed) && tenths_of_call(relayed, machine) < tenths_of_call(plain, machine);
  const RuleParams whole = pays ? relayed : plain;
  if (!call.may_scan) return whole;
  const int64_t prepared = tenths_of_preparation(plain, num_items(plain), machine);
  plain.segment_tokens = choose_segment_tokens(plain, tenths_of_call(whole, machine) - prepared, machine);
  return is_scanned(plain) ? plain : whole;
}

}  // namespace gdn::cuda::chunk_sm90
