// SPDX-License-Identifier: Apache-2.0
// Constants, shared memory and barriers of the Hopper chunk kernel.
#pragma once

#include "prepared.h"

namespace gdn::cuda::chunk_sm90 {

constexpr int kValueTile = 64;      // columns of S (rows of S^T) of a block: the M of wgmma
constexpr int kStages = 3;          // chunks in shared memory
constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kThreads = 2 * kGroupThreads;   // state, output
// Registers a thread: a block of kBoundThreads threads would start with 168 each, and so does this one; what the two groups
// make of it. The rest of the multiprocessor is for blocks of the preparation.
constexpr int kBoundThreads = 384, kStateRegisters = 216, kOutputRegisters = 120;
static_assert(kStateRegisters + kOutputRegisters <= 2 * 168, "registers of the block");

// A chunk as prepare left it in the workspace.
template <int kKeyDim>
struct alignas(1024) Stage {
  Keys<kKeyDim> keys;
  Solved solved;
};

template <int kKeyDim>
struct alignas(1024) SharedMemory {
  Stage<kKeyDim> stage[kStages];          // 3 x 49 KB; chunk c in stage c % 3
  fp16_t s[kValueTile * kKeyDim];         // S^T at the chunk's start, [64 v][kKeyDim], swizzled: the output group's operand; 16 KB
  fp16_t u[kValueTile * kChunk];          // U^T [64 v][64 t], swizzled: the same; 8 KB
  uint16_t o[4][kChunk * 16];             // 16-bit o on its way out, [64 t][16 v], of each warp of the output group; 8 KB
  // Columns 16 w .. 16 w + 15 of V of chunk c in v[c % 2], [64 t][16 v] in the io dtype, from warp w of the output group to
  // warp w of the state group. 2 x 8 KB.
  uint16_t v[2][4][kChunk * 16];
  uint16_t largest_v[2][kValueTile];      // the largest |v| of each column, as stored bits
  float out_factor[kValueTile];           // scale 2^exponent of each row of s
  uint64_t full[kStages];                 // the stage is copied; one arrival and its bytes. Both groups wait
  // Between the two groups, one phase a chunk (v: one in two chunks), an arrival from each warp: written; read.
  uint64_t s_ready, s_free, u_ready, u_free, v_ready[2], v_free[2];
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
  kStart, kRead, kX, kU, kReady, kFree, kUpdated,   // state group
  kSq, kWritten, kOut,                              // output group, with kStart and kReady
};

}  // namespace gdn::cuda::chunk_sm90
