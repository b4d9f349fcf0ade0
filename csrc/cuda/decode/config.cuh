// SPDX-License-Identifier: Apache-2.0
// What the files of the decode kernels share: how a tile of the state lies over the threads, what a block works on.
#pragma once

#include "../../common/gates.h"
#include "../tile/divide.cuh"
#include "call.cuh"

namespace gdn::cuda {
namespace {

constexpr int kMostTokens = 8;            // of a sequence, on average: longer ones are the recurrence's
constexpr unsigned kAllLanes = 0xffffffffu;

// A warp holds whole columns of one head's S, all K rows of them, so that no sum leaves it; kWarpsOfBlock of them side by
// side are a block's tile. A lane's share is what 16-byte accesses give it:
//     K-first   kColumns = 16 bytes of neighbouring columns, kColumnLanes lanes side by side on a row, kOwned residues
//     V-first   kOwned = 16 bytes of neighbouring residues, kWidth columns
// and of its residues all rows, 32 apart (kSteps of them): the partial sums of rule.h are the lane's own.
template <class StateT, bool kIsVFirst, int kStepsOfK, int kWidth, int kWarpsOfBlock, int kBlocksOfSm>
struct Shape {
  using state_t = StateT;
  static constexpr bool kVFirst = kIsVFirst;
  static constexpr int kSteps = kStepsOfK, kKeyDim = kResidues * kSteps;
  static constexpr int kWarps = kWarpsOfBlock, kThreads = 32 * kWarps, kBlocks = kBlocksOfSm;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(state_t));
  // kWidth: K-first lanes on a row, V-first columns of a lane.
  static constexpr int kOwned = kVFirst ? kVector : kWidth, kColumns = kVFirst ? kWidth : kVector;
  static constexpr int kGroups = kResidues / kOwned;            // lanes that share a column
  static constexpr int kColumnLanes = 32 / kGroups;
  static constexpr int kWarpColumns = kColumnLanes * kColumns, kTile = kWarps * kWarpColumns;
  static constexpr int kLoads = kSteps * kOwned * kColumns / kVector;   // 16-byte accesses of a lane
  // Sums u and w of a lane's columns, 2 kColumns of them, dealt out over the lanes of the column: kLeft each end up with.
  static constexpr int kDealt = kGroups < 2 * kColumns ? kGroups : 2 * kColumns;   // lanes that get different ones
  static constexpr int kLeft = 2 * kColumns / kDealt;

  static_assert(kKeyDim % kVector == 0 && kGroups >= 2, "whole vectors, and u and w go to different lanes");
};

// Where a lane's share lies in the tile: its group of kOwned residues; its columns are first + c * kColumnStep.
template <class Shape>
struct Place {
  static constexpr int kColumnStep = Shape::kVFirst ? Shape::kColumnLanes : 1;
  static constexpr int kGroupStep = Shape::kVFirst ? 1 : Shape::kColumnLanes;   // lanes from a group to the next
  int group, first;

  __device__ __forceinline__ explicit Place(int thread) {
    const int warp = thread / 32, lane = thread % 32;
    // Neighbouring lanes follow the contiguous dim.
    group = Shape::kVFirst ? lane % Shape::kGroups : lane / Shape::kColumnLanes;
    const int column_lane = Shape::kVFirst ? lane / Shape::kGroups : lane % Shape::kColumnLanes;
    first = warp * Shape::kWarpColumns + column_lane * (Shape::kVFirst ? 1 : Shape::kColumns);
  }
  // What deal_sums leaves with this lane: the u or the w of columns own_column() + i * kColumnStep, i < kLeft.
  __device__ __forceinline__ bool has_w() const { return group % 2 != 0; }
  __device__ __forceinline__ bool is_first_copy() const { return group < Shape::kDealt; }
  __device__ __forceinline__ int own_column() const {
    int column = 0;
#pragma unroll
    for (int bit = 1; (2 << bit) <= Shape::kDealt; ++bit) {
      column += (group >> bit) % 2 * (Shape::kColumns >> bit);
    }
    return first + column * kColumnStep;
  }
  // The group that ends up with u of column c of the share.
  static __device__ __forceinline__ constexpr int group_of(int c) {
    int group = 0;
    for (int bit = 1; (2 << bit) <= Shape::kDealt; ++bit) group += c / (Shape::kColumns >> bit) % 2 << bit;
    return group;
  }
};

// How the call is cut: into pieces of work, one head's tile of columns of one sequence each, a block a piece.
struct Cut {
  Divider pieces_of_row, tiles, group;   // Hv x tiles; tiles of a head; value heads of a key head
  int chunk;                             // tokens staged together
  uint32_t first_wave;                   // blocks that start at once and know their slots before the grid before them is done
};

struct Work {
  int n, head, key_head, column;   // n: sequence
};

__device__ __forceinline__ Work work_of_piece(const Cut& cut, uint32_t piece, int tile_columns) {
  const uint32_t n = cut.pieces_of_row.quotient(piece), rest = piece - n * cut.pieces_of_row.divisor;
  const uint32_t head = cut.tiles.quotient(rest), tile = rest - head * cut.tiles.divisor;
  return {static_cast<int>(n), static_cast<int>(head), static_cast<int>(cut.group.quotient(head)),
          static_cast<int>(tile) * tile_columns};
}

// What a grid and its neighbours in the stream do at the same time: whether it asks for its state while the one before it
// still runs, whether the next one may start as soon as this one reads memory or only once its state is there.
struct Overlap {
  bool prefetches, opens_early;
};

// Token t of a row whose tokens start at `origin` (its sequence or, ragged, its first token), head `head`.
__device__ __forceinline__ char* token_address(const TokenRows& rows, int origin, int t, int head) {
  return rows.data + wide(origin, rows.origin) + wide(t, rows.token) + wide(head, rows.head);
}

}  // namespace
}  // namespace gdn::cuda
