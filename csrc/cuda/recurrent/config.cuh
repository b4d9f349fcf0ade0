// SPDX-License-Identifier: Apache-2.0
// What the files of the recurrence share: how the work is cut, what a lane holds, how a token lies in shared memory.
#pragma once

#include "../../common/gates.h"
#include "../../common/params.h"

namespace gdn::cuda {
namespace {

constexpr int kColumnGroups = 4, kRowsPerGroup = 4;
constexpr int kMaxComputing = 4, kMaxStaging = 4;               // warps of a block
constexpr int kTokensPerStager = 4;                             // of a chunk
constexpr int kValuesPerLane = 2;                               // of v, staged by one lane: a block has at most 64

struct Tiling {
  int heads;        // value heads of a block, all of one key head
  int tile_warps;   // computing warps
  int tile;         // columns of V
  int columns;      // kColumns
  int stagers;      // staging warps
  int chunk;        // tokens of a chunk
  int64_t head_groups, tiles;
};

// This lane's columns of S, rows 32 j + 4 r + i.
template <int kSteps, int kColumns>
struct Fragment {
  float s[kColumns][kSteps][kRowsPerGroup];
};

template <class state_t>
struct alignas(4 * sizeof(state_t)) Quad {
  state_t x[4];
};

// What a block works on: sequence; key head; first value head and first column.
struct Work {
  int64_t n, key_head, head, column;
};

__device__ __forceinline__ Work work_of_block(const RuleParams& p, const Tiling& tiling) {
  const int64_t tile = blockIdx.x % tiling.tiles, rest = blockIdx.x / tiling.tiles;
  const int64_t head = (rest % tiling.head_groups) * tiling.heads;
  return {rest / tiling.head_groups, key_head(head, p.dims.Hk, p.dims.Hv), head, tile * tiling.tile};
}

// Shared memory of one token, in floats: k [32 kSteps], q [32 kSteps], v [heads x tile], scalars [heads] of 8. What comes
// out, o [heads x tile], takes the place of v.
struct TokenLayout {
  int v, scalars, floats;
};

__host__ __device__ __forceinline__ TokenLayout token_layout(const Tiling& tiling, int padded_key_dim) {
  const int v = 2 * padded_key_dim, scalars = v + tiling.heads * tiling.tile;
  return {v, scalars, scalars + 8 * tiling.heads};
}

static_assert(sizeof(StepScalars) == 8 * sizeof(float), "a head's scalars are one record of 8 floats");

}  // namespace
}  // namespace gdn::cuda
