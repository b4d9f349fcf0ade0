// SPDX-License-Identifier: Apache-2.0
// What the files of the recurrence share: how the work is cut, what a lane holds, how a token lies in shared memory.
#pragma once

#include "../../common/gates.h"
#include "../../common/params.h"
#include "../ptx/bar.cuh"

namespace gdn::cuda {
namespace {

constexpr int kRowGroups = 8;                                   // lanes of a computing warp that share a column
constexpr int kColumnGroups = 32 / kRowGroups;
constexpr int kRows = kResidues / kRowGroups;                   // adjacent residues that a lane owns
constexpr int kMaxComputing = 16 / kColumnGroups;               // warps of a block
constexpr int kMaxStaging = 4;
constexpr int kTokenLanes = 8;                                  // lanes that stage one token
constexpr int kTokensOfPass = 32 / kTokenLanes;                 // so a staging warp has four tokens in its hands
constexpr int kRing = 3;                                        // chunks in shared memory
constexpr int kMaxValues = 64;                                  // of v and o of one token: heads x tile
constexpr int kQuadsOfLane = kMaxValues / (4 * kTokenLanes);    // of v, staged by one lane

// What is compiled apart. A lane holds kColumns columns: the same column of kColumns value heads (1 to 3), or four neighbours
// of one head (4). kBlocksOfSm blocks are to fit into a multiprocessor. kKeeps: the call has checkpoints.
template <int kSteps_, int kColumns_, int kBlocksOfSm_, bool kKeeps_ = false>
struct Cut {
  static constexpr int kSteps = kSteps_, kColumns = kColumns_, kBlocksOfSm = kBlocksOfSm_;
  static constexpr bool kKeeps = kKeeps_;
  static constexpr bool kOfHeads = kColumns < 4;
  static constexpr int kHeads = kOfHeads ? kColumns : 1, kColumnsOfHead = kOfHeads ? 1 : kColumns;
  // Tokens overlap where there are registers for it: operands are read a token ahead, o ends under the next token.
  static constexpr bool kOverlaps = !kKeeps && kSteps * kColumns * kRows <= (kBlocksOfSm == 1 ? 48 : 16);
};

// A chunk is a few passes of them: it ends at every multiple of 64 tokens, where checkpoints are.
static_assert(64 % (kMaxStaging * kTokensOfPass) == 0 && (kMaxStaging & (kMaxStaging - 1)) == 0, "chunks divide 64");

struct Tiling {
  int heads;        // value heads of a block, all of one key head
  int tile_warps;   // computing warps
  int tile;         // columns of V, a multiple of four
  int columns;      // Cut::kColumns
  int blocks_of_sm; // Cut::kBlocksOfSm
  int stagers;      // staging warps
  int chunk;        // tokens of a chunk, an even number
  int64_t head_groups, tiles;
};

// Where the two roles meet, all warps of the block, each role at its own place in the program: not for one barrier, which is
// for threads that wait at the same one. The computing warps wait until a chunk is staged and say so when they have begun it;
// nobody comes to a barrier twice before all have passed it. (Both in one place, the reads ahead of compute.cuh's step end up
// behind the write: 5 % slower.)
constexpr int kStagedBarrier = 1, kBegunBarrier = 2;

__device__ __forceinline__ int threads_of(const Tiling& tiling) { return 32 * (tiling.tile_warps + tiling.stagers); }

__device__ __forceinline__ void wait_for_chunk(const Tiling& tiling) { ptx::bar_sync(kStagedBarrier, threads_of(tiling)); }
__device__ __forceinline__ void say_begun(const Tiling& tiling) { ptx::bar_arrive(kBegunBarrier, threads_of(tiling)); }

// The staging warps: the chunk is staged, and the computing warps have begun it.
__device__ __forceinline__ void meet_computing(const Tiling& tiling) {
  ptx::bar_arrive(kStagedBarrier, threads_of(tiling));
  ptx::bar_sync(kBegunBarrier, threads_of(tiling));
}

// Several adjacent elements, moved at once.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Pack {
  T x[kCount];
};

// This lane's columns of S, rows 32 j + kRows r + i.
template <class Cut>
struct Fragment {
  float s[Cut::kColumns][Cut::kSteps][kRows];
};

// Which inputs and outputs move four adjacent elements at a time.
struct InQuads {
  bool q, k, v, out, initial_state, state, checkpoints;
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

// Shared memory of one token, in floats: k and q, v and o [heads, tile], StepScalars [heads], and once more alpha [heads], for
// the write.
template <int kSteps>
struct TokenLayout {
  static constexpr int kKeys = 0, kQueries = kResidues * kSteps, kV = 2 * kQueries, kOut = kV + kMaxValues;
  static constexpr int kScalars = kOut + kMaxValues, kAlpha = kScalars + 3 * 8, kFloats = kAlpha + 4;
};

static_assert(sizeof(StepScalars) == 8 * sizeof(float), "a head's scalars are one record of 8 floats");

}  // namespace
}  // namespace gdn::cuda
