// SPDX-License-Identifier: Apache-2.0
// Constants, shared memory and barriers of the Hopper chunk kernel.
#pragma once

#include <cstdint>

#include "../../common/dtypes.h"
#include "../tile/solve.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kChunk = 64;          // tokens of a chunk
constexpr int kValueTile = 64;      // columns of S (rows of S^T) of a block: the M of wgmma
constexpr int kCluster = 2;         // blocks that share a head's auxiliary work: block r of a pair makes chunks r, r + 2, ...
constexpr int kSolvers = 2;         // auxiliary warpgroups of a block
constexpr int kStages = kCluster * kSolvers;   // chunks in shared memory; a solver fills the same stage every time
constexpr int kValueStages = 3;     // chunks of V: one read, the next, one on its way in
constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kThreads = kGroupThreads * (1 + kSolvers);
constexpr int kStateRegisters = 240, kSolverRegisters = 128;   // 240 + 2 * 128 <= 504 = 3 * 168, what the block starts with

// Named barriers (bar.sync): one for each auxiliary warpgroup, 128 threads; 0 is __syncthreads.
constexpr int kSolverBarrier = 1;

// Per token of a chunk, fp32. Padding tokens have log decay 0, beta 0.
struct Gates {
  float sum[kChunk];       // running sum of log2 decay, inclusive; only the solver reads it
  float beta[kChunk];      // only the solver reads it
  float decay[kChunk];     // 2^sum: from the chunk's start to the token; the last one is the whole chunk's
  float to_end[kChunk];    // 2^(sum of the last - sum): from the token to the chunk's end
};

// All that the state group needs of a chunk but V. k and q arrive raw and become fp16, normalised, in place.
template <int kKeyDim>
struct alignas(1024) Stage {
  fp16_t k[kChunk * kKeyDim];    // [64 t][kKeyDim] in panels of 64 columns, swizzled; 16 KB at 128
  fp16_t q[kChunk * kKeyDim];    // the same
  fp16_t t[kChunk * kChunk];     // T diag(beta) [64 out][64 in], swizzled; 8 KB
  fp16_t p[kChunk * kChunk];     // P, the same
  Gates gates;                   // 1 KB
};

// What goes to the other block: k and q as soon as they are normalised, the rest when it is there.
template <int kKeyDim>
constexpr uint32_t kOperandBytes = 2 * kChunk * kKeyDim * sizeof(fp16_t);
constexpr uint32_t kSolvedBytes = 2 * kChunk * kChunk * sizeof(fp16_t) + sizeof(Gates);

template <int kKeyDim>
struct alignas(1024) SharedMemory {
  Stage<kKeyDim> stage[kStages];                          // 4 x 49 KB; chunk c in stage c % 4
  // Columns 16 w .. 16 w + 15 of V of a chunk, [64 t][16 v] in the io dtype, only for warp w of the state group, which also
  // takes o of the chunk through it on the way out. 3 x 8 KB; chunk c in c % 3.
  uint16_t v[kValueStages][4][kChunk * 16];
  SolveScratch scratch[kSolvers][4];                      // 8 x 768 bytes
  // full[s]: one arrival when stage s is written: by its solver, or, if that is in the other block, by the state group when
  //     it has seen the phase before, with the bytes that come from there. The state group waits.
  // done[s]: eight arrivals, a warp of the two state groups each, when they have read stage s. Used in the block whose
  //     solver fills the stage; it waits before it does so again.
  uint64_t full[kStages], done[kStages];
};

static_assert(sizeof(SharedMemory<128>) <= 227 * 1024, "shared memory of a block");
static_assert(sizeof(Stage<128>) == kOperandBytes<128> + kSolvedBytes, "what is copied is all of it");

// What a block works on: one value head's columns column .. column + 63 of sequence n.
struct Work {
  int64_t n, key_head, head, column;
};

// Places of the phase clock, in the order a group passes them.
enum class Phase {
  kStart, kFree, kLoaded, kNormalised, kGram, kDecays, kSplit, kP, kDiagonal, kSolved,   // auxiliary group
  kReady, kRead, kX, kU, kUpdated,   // state group, with kStart and kFree
};

}  // namespace gdn::cuda::chunk_sm90
