// SPDX-License-Identifier: Apache-2.0
// Constants, shared memory and barriers of the Hopper chunk kernel.
#pragma once

#include "prepared.h"

namespace gdn::cuda::chunk_sm90 {

constexpr int kStages = 3;          // chunks in shared memory
constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kThreads = 3 * kGroupThreads;   // state, output, transfer
// Registers a thread; the block starts with 168 each.
constexpr int kStateRegisters = 240, kOutputRegisters = 160, kTransferRegisters = 96;
static_assert(kStateRegisters + kOutputRegisters + kTransferRegisters <= 3 * 168, "registers of the block");

// A chunk as prepare left it in the workspace.
template <int kKeyDim>
struct alignas(1024) Stage {
  Keys<kKeyDim> keys;
  Solved solved;
};

// Tiles [64 rows][64 columns] are panels as in tile/swizzle.cuh.
template <int kKeyDim>
struct alignas(1024) SharedMemory {
  Stage<kKeyDim> stage[kStages];          // 3 x 49 KB; chunk c in stage c % 3
  fp16_t s[kValueTile * kKeyDim];         // S^T at the chunk's start, [64 v][kKeyDim], for the output group; 16 KB
  fp16_t x[kValueTile * kChunk];          // X^T [64 v][64 t], the same; 8 KB
  uint16_t v[2][kChunk * kValueTile];     // V of chunk c in v[c % 2], [64 t][64 v] in the io dtype; 2 x 8 KB
  uint16_t o[kChunk * kValueTile];        // 16-bit o, [64 t][64 v], from the output group to the transfer group; 8 KB
  float out_factor[kValueTile];           // scale 2^exponent of each row of s
  uint64_t full[kStages];                 // the stage is copied; one arrival and its bytes. All who read wait
  uint64_t v_ready[2];                    // V is copied, an arrival of each thread that did; one phase in two chunks
  // Between groups, an arrival from each thread, one phase a chunk (v: one in two): written; read.
  uint64_t v_free[2], s_ready, s_free, o_ready, o_free;   // s: and x, out_factor
};

static_assert(sizeof(SharedMemory<128>) <= 227 * 1024, "shared memory of a block");

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

// Places of the phase clock, in the order a group passes them.
enum class Phase {
  kStart, kRead, kX, kNext, kU, kUpdate, kHanded, kUpdated,   // state group; transfer group: up to kNext
  kReady, kOut, kStored,                                      // output group, behind kStart
};

}  // namespace gdn::cuda::chunk_sm90
