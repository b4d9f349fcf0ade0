// SPDX-License-Identifier: Apache-2.0
// Constants, shared memory and barriers of the Hopper chunk kernel.
#pragma once

#include "prepared.h"

namespace gdn::cuda::chunk_sm90 {

constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kValueStages = 3;     // chunks of V on their way in

// Of blocks that carry one or two tiles: chunks in shared memory, threads, registers a thread of a tile group, the values group
// and the transfer group.
template <int kTiles>
struct Shape;
template <>
struct Shape<1> {
  static constexpr int kStages = 3, kThreads = 3 * kGroupThreads;
  static constexpr int kTileRegisters = 240, kValuesRegisters = 136, kTransferRegisters = 128, kStartRegisters = 168;
};
template <>
struct Shape<2> {
  static constexpr int kStages = 2, kThreads = 4 * kGroupThreads;
  static constexpr int kTileRegisters = 208, kValuesRegisters = 56, kTransferRegisters = 40, kStartRegisters = 128;
};

// A chunk as prepare left it in the workspace.
template <int kKeyDim>
struct alignas(1024) Stage {
  Keys<kKeyDim> keys;
  Solved solved;
};

// Exponents of a row of V^T: of the largest |v|; that it is scaled by.
struct alignas(8) RowScale {
  int largest, exponent;
};

// V^T of a chunk for a tile group, fp32 times 2^-exponent of its row (values.cuh).
struct ScaledValues {
  float4 piece[8 * kGroupThreads];   // 16 KB
  RowScale row[2][kValueTile];       // of chunk c in row[c % 2]
  float factor[kValueTile];          // 2^-exponent, for the writers
};

// Of a tile of 64 columns of V. Tiles [64 rows][64 columns] are panels as in tile/swizzle.cuh.
struct alignas(1024) Tile {
  uint16_t v[kValueStages][kChunk * kValueTile];   // V of chunk c in v[c % 3], [64 t][64 v] in the io dtype; 3 x 8 KB
  uint16_t o[2][kChunk * kValueTile];              // 16-bit o of chunk c in o[c % 2], [64 t][64 v]; 2 x 8 KB
  ScaledValues values;                             // 17 KB
  int exponent[2][kValueTile];                     // of the rows of S^T; of chunk c in exponent[c % 2]
  // Written, read; an arrival from each thread of the group. One phase a chunk; o: one in two.
  uint64_t v_ready, v_free, o_ready[2], o_free[2];
};

template <int kKeyDim, int kTiles>
struct alignas(1024) SharedMemory {
  static constexpr int kStages = Shape<kTiles>::kStages;
  Stage<kKeyDim> stage[kStages];   // 49 KB each; chunk c in stage c % kStages
  Tile tile[kTiles];               // 58 KB each
  uint64_t full[kStages];          // the stage is copied; one arrival and its bytes
  uint64_t empty[kStages];         // read; an arrival from each thread of the tile groups
};

static_assert(sizeof(SharedMemory<128, 1>) <= 227 * 1024 && sizeof(SharedMemory<128, 2>) <= 227 * 1024,
              "shared memory of a block");

// A segment of a row; a row that is not cut is one segment (segments.h).
struct Segment {
  int64_t n;           // sequence; N: the tokens outside all of them; N + 1: none
  int64_t idx, count;  // which of its segments, and of how many
  int64_t row;         // segment row
};

// What a block works on: one value head's columns column .. column + 63 of a segment.
struct Work {
  Segment segment;
  int64_t key_head, head, column;
};

// Places of the phase clock in a tile group, in the order it passes them.
enum class Phase { kStart, kRead, kX, kU, kUpdate, kHanded, kOut, kUpdated };

}  // namespace gdn::cuda::chunk_sm90
