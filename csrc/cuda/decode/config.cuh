// SPDX-License-Identifier: Apache-2.0
// What the files of the decode kernel share: how a tile of the state lies over the threads, how a token lies in shared
// memory, what a block works on.
#pragma once

#include "../../common/gates.h"
#include "../tile/divide.cuh"
#include "call.cuh"

namespace gdn::cuda {
namespace {

constexpr int kMostTokens = 8;   // of a sequence, on average: longer ones are the recurrence's

// A block holds kTile columns of one head's S, kThreads threads wide. A thread's share is what 16-byte accesses give it:
//     K-first   kColumns = 16 bytes of neighbouring columns, of as many neighbouring residues as it takes (kOwned)
//     V-first   kOwned = 16 bytes of neighbouring residues, of as many columns as it takes (kColumns)
// and of those residues all rows, 32 apart (kSteps of them): the partial sums of rule.h are the thread's own.
// kBlocks of them share a multiprocessor. What is loaded waits in shared memory (kThroughShared) or in registers.
template <class StateT, bool kIsVFirst, int kStepsOfK, int kTileColumns, int kBlockThreads, int kBlocksOfSm, bool kShared>
struct Shape {
  using state_t = StateT;
  static constexpr bool kVFirst = kIsVFirst, kThroughShared = kShared;
  static constexpr int kSteps = kStepsOfK, kKeyDim = kResidues * kSteps, kTile = kTileColumns;
  static constexpr int kThreads = kBlockThreads, kWarps = kThreads / 32, kBlocks = kBlocksOfSm;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(state_t));
  static constexpr int kShare = kResidues * kTile / kThreads;                     // residues x columns of a thread
  static constexpr int kColumns = kVFirst ? kShare / kVector : kVector;
  static constexpr int kOwned = kVFirst ? kVector : kShare / kVector;
  static constexpr int kGroups = kResidues / kOwned;                              // threads that share a column
  static constexpr int kColumnLanes = kVFirst || kTile / kColumns > 32 ? 32 / (kVFirst ? kGroups : 1) : kTile / kColumns;
  static constexpr int kGroupLanes = 32 / kColumnLanes;
  static constexpr int kWarpsOfColumn = kGroups / kGroupLanes;                    // warps whose sums have to meet
  static constexpr int kLoads = kSteps * kShare / kVector;                        // 16-byte accesses of a thread
  // Measured: walking from piece to piece helps 16-bit states; fp32 ones are better left to the hardware's queue of blocks.
  static constexpr bool kWalks = sizeof(state_t) < 4;

  // Shared memory in floats. A token: k, q, v, StepScalars.
  static constexpr int kSmemQ = kKeyDim, kSmemV = 2 * kKeyDim, kSmemScalars = kSmemV + kTile;
  static constexpr int kSmemToken = kSmemScalars + 8;
  static constexpr int kSmemSums = kWarpsOfColumn > 1 ? 2 * kWarpsOfColumn * 2 * kTile : 0;   // [parity][warp][u, w][kTile]
  static constexpr int kSmemState = kThroughShared ? kLoads * kThreads * 4 : 0;               // [load][thread] of 16 bytes

  static_assert(kShare % kVector == 0 && kColumns * kOwned == kShare, "the share is whole vectors");
  static_assert(kWarpsOfColumn >= 1 && kWarps % kWarpsOfColumn == 0, "a column's threads are whole warps or part of one");
  static_assert(kGroups >= kColumns, "a thread answers for at most one column");
  static_assert(kWarps / kWarpsOfColumn * kColumnLanes * kColumns == kTile, "the warps cover the tile");
};

static_assert(sizeof(StepScalars) == 8 * sizeof(float), "a token's scalars are one record of 8 floats");

// Where a thread's share lies in the tile: its group of kOwned residues; its columns are first + c * kColumnStep.
template <class Shape>
struct Place {
  static constexpr int kColumnStep = Shape::kVFirst ? Shape::kColumnLanes : 1;
  int group, first, warp_of_column, group_lane;

  __device__ __forceinline__ explicit Place(int thread) {
    const int warp = thread / 32, lane = thread % 32;
    // Neighbouring lanes follow the contiguous dim.
    group_lane = Shape::kVFirst ? lane % Shape::kGroupLanes : lane / Shape::kColumnLanes;
    const int column_lane = Shape::kVFirst ? lane / Shape::kGroupLanes : lane % Shape::kColumnLanes;
    warp_of_column = warp % Shape::kWarpsOfColumn;
    group = warp_of_column * Shape::kGroupLanes + group_lane;
    first = warp / Shape::kWarpsOfColumn * Shape::kColumnLanes * Shape::kColumns +
            column_lane * (Shape::kVFirst ? 1 : Shape::kColumns);
  }
};

// How the call is cut: into pieces of work, one head's tile of columns of one sequence each, that the blocks share out.
struct Cut {
  uint32_t pieces;
  Divider pieces_of_row, tiles, group;   // Hv x tiles; tiles of a head; value heads of a key head
  int chunk;                             // tokens staged together, at most one a warp
  int stages;                            // of the state in shared memory: 2 where a block has several pieces
};

template <class Shape>
constexpr size_t smem_bytes(const Cut& cut) {
  return sizeof(float) * (cut.stages * Shape::kSmemState + Shape::kSmemSums +
                          2 * cut.chunk * Shape::kSmemToken);
}

struct Work {
  int n, head, key_head, column;   // n: sequence
};

__device__ __forceinline__ Work work_of_piece(const Cut& cut, uint32_t piece, int tile_columns) {
  const uint32_t n = cut.pieces_of_row.quotient(piece), rest = piece - n * cut.pieces_of_row.divisor;
  const uint32_t head = cut.tiles.quotient(rest), tile = rest - head * cut.tiles.divisor;
  return {static_cast<int>(n), static_cast<int>(head), static_cast<int>(cut.group.quotient(head)),
          static_cast<int>(tile) * tile_columns};
}

// A piece, at tokens [first, first + count) of its row.
struct Piece {
  Work work;
  int origin, length;        // of the row: its sequence or, ragged, its first token; its tokens
  int first, count;
  int out_slot;              // -1: its state is not written

  __device__ __forceinline__ void take_tokens(int from, int chunk) {
    first = from;
    count = length - from < chunk ? length - from : chunk;
  }
  __device__ __forceinline__ Span span(const Call& call) const {
    return call.cu_seqlens.given() ? Span{0, origin, length} : Span{work.n, 0, length};
  }
};

// Token t of the piece's row, head `head`.
__device__ __forceinline__ char* token_address(const TokenRows& rows, const Piece& piece, int t, int head) {
  return rows.data + wide(piece.origin, rows.origin) + wide(t, rows.token) + wide(head, rows.head);
}

}  // namespace
}  // namespace gdn::cuda
