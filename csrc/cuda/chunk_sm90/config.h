// SPDX-License-Identifier: Apache-2.0
// Constants, shared memory and barriers of the Hopper chunk kernel.
#pragma once

#include "prepared.h"

namespace gdn::cuda::chunk_sm90 {

constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kStages = 3;          // chunks in shared memory
constexpr int kMostTiles = 2;       // of a task
// A block: a tile group for each tile and the transfer group. A scheduler has 16,384 registers: a block of one tile, with two
// warps on each of the four, fits beside one of the preparation.
constexpr int kThreads = (kMostTiles + 1) * kGroupThreads, kOneTileThreads = 2 * kGroupThreads;
constexpr int kMovers = kGroupThreads / kMostTiles;   // threads of the transfer group that serve a tile
// Registers of a thread; the block starts with 168 for each.
constexpr int kTileRegisters = 224, kTransferRegisters = 56;
static_assert(kMostTiles * kTileRegisters + kTransferRegisters <= 3 * 168, "registers of the block");

// Solved with zeros for the blocks right of the diagonal, once written; 13.75 KB.
struct alignas(256) SpreadSolved {
  Block16 zeros_1[1];   // before M_1
  Solved::First first;
  Block16 zeros_3[3];   // behind T_3, before M_3
  Solved::Second second;
  Block16 zeros_2[2];   // behind T_2, before M_2
  Solved::Third third;
  Block16 zeros_last[1];   // behind T_1
};

// Bytes from the start of SpreadSolved to panel j, zeros and all, of T'' or M.
template <class Places>
GDN_INLINE constexpr int panel_start(int j) {
  const int kept = Places::offset(Places::kRises ? j : 3, j);   // its first block
  const int zeros = kept >= kThirdPiece ? 6 : kept >= kSecondPiece ? 4 : 1;
  return kept + kBlockBytes * (zeros - (Places::kRises ? j : 0));
}

// A chunk as prepare left it in the workspace.
template <int kKeyDim>
struct alignas(1024) Stage {
  Keys<kKeyDim> keys;
  SpreadSolved solved;
};

// A segment of a row; a row that is not cut is one segment (segments.h).
struct Segment {
  int64_t n;           // sequence; N: the tokens outside all of them; N + 1: none
  int64_t idx, count;  // which of its segments, and of how many
  int64_t row;         // segment row
};

// A tile: one value head's columns column .. column + 63 of a segment.
struct Work {
  Segment segment;
  int64_t key_head, head, column;
};

// How many of the first tasks are two tiles of a head each; none in a ragged call with a row of more tokens than `longest`.
struct Pairs {
  int64_t count, longest;
};

// The tasks of a grid, one or two tiles each, the first ones pairs; `tiles` of all tasks, which blocks take one after the other
// (tasks.cuh), or 0: each has a block of its own.
struct Tasks {
  Pairs pairs;
  int64_t tiles;
};

// What a block works on at a time, as one of its warps has found it (tasks.cuh).
struct Task {
  Work work[kMostTiles];   // a tile, or two side by side
  Span span;               // tokens of the segment
  int64_t start, end;      // first elements of the head in the pools: of what a row starts from, -1: zero; of where S goes, -1: none
  int tiles;               // 0: there is nothing more to do
  int first_chunk;         // chunks of the block's tasks before, modulo kChunkCycle: stages and phases go on from task to task
  int parity;              // of barriers that have a phase in each task with chunks
  bool is_padding;         // zeros for these tokens, or for those outside all sequences
  bool is_left;            // threads that serve a second tile have ended: the task before had none
};

// Chunks of a block, counted on from task to task: every so many have the same stage, the same one of two places of V and of o,
// and the same parities of their barriers.
constexpr int kChunkCycle = 12;
static_assert(kChunkCycle % (2 * kStages) == 0 && kChunkCycle % 4 == 0, "stages and halves, two phases each");

// The next chunk that is brought from the workspace.
template <int kKeyDim>
struct ChunkToCopy {
  const Keys<kKeyDim>* keys;
  const Solved* solved;
  int slot, parity;   // its stage
};

// Of a tile of 64 columns of V. Tiles [64 rows][64 columns] are panels as in tile/swizzle.cuh.
struct alignas(1024) Tile {
  uint16_t v[2][kChunk * kValueTile];   // V of chunk c in v[c % 2], [64 t][64 v] in the io dtype; 2 x 8 KB
  uint16_t o[2][kChunk * kValueTile];   // 16-bit o of chunk c in o[c % 2], [64 t][64 v]; 2 x 8 KB
  // Between a tile's threads, an arrival from each of the group that carries it; one phase in two chunks: v is read, o written.
  uint64_t v_free[2], o_ready[2];
  // One phase in each task with chunks, an arrival from each mover.
  uint64_t v_there;   // V of the first chunk, whose keys may come later
  uint64_t o_taken;   // o of the last chunk but two, if there is such a chunk
};

template <int kKeyDim>
struct alignas(1024) SharedMemory {
  Stage<kKeyDim> stage[kStages];   // 46 KB each; chunk c in stage c % 3
  uint64_t full[kStages];          // keys, T'', M and V are there: an arrival and its bytes, one for each thread that copies V
  uint64_t empty[kStages];         // read; an arrival for each thread of the tile groups
  uint64_t half_there[kStages];    // before a later segment's chunks (steps.cuh): half a transition is there; its bytes
  uint64_t half_read[kStages];     // read; an arrival from each thread of the tile group
  Task task[2];                    // task i in task[i % 2]; what is asked for between chunks is here and not in registers
  Task none;                       // before the first one: no chunks
  uint64_t task_there[2];          // it is known; an arrival from each thread of the warp that has found it
  uint64_t task_done[2];           // nobody reads it any more; an arrival for each thread of the block
  uint32_t pairs;                  // how many of the first tasks are pairs
  ChunkToCopy<kKeyDim> to_copy;    // of the thread that brings the chunks of a task of two tiles
  Tile tile[kMostTiles];           // 33 KB each; a grid of blocks of one tile has no second one
};

static_assert(sizeof(SharedMemory<128>) <= 227 * 1024, "shared memory of a block");

template <int kKeyDim>
constexpr size_t kOneTileBytes = sizeof(SharedMemory<kKeyDim>) - sizeof(Tile);

// Places of the phase clock in a tile group, in the order it passes them.
enum class Phase { kStart, kRead, kX, kU, kUpdate, kTaken, kUpdated };

}  // namespace gdn::cuda::chunk_sm90
