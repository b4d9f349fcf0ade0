// SPDX-License-Identifier: Apache-2.0
// What the preparation leaves in the workspace, at either precision; the shared memory of the kernel that carries the state.
//     [chunk rows][Hk] Keys, then [chunk rows][Hv] Solved; chunk rows as in chunk_sm90/prepared.h
// Normal precision is chunk_sm90's own format, Keys and Solved. High precision keeps k and q times powers of two, so that fp16
// holds them exactly, and T and P themselves, not T'' and M, as sums of two fp16 tiles, each row times a power of two; what is
// missing in these is in the fp32 factors of the tokens.
#pragma once

#include <type_traits>

#include "../chunk_sm90/prepared.h"
#include "rows.cuh"

namespace gdn::cuda::chunk_mma {

using chunk_sm90::Block16;
using chunk_sm90::first_chunk_row;
using chunk_sm90::Gates;
using chunk_sm90::kChunk;
using chunk_sm90::Keys;
using chunk_sm90::num_chunk_rows;
using chunk_sm90::PlacesOfM;
using chunk_sm90::PlacesOfT;
using chunk_sm90::prepared_bytes;
using chunk_sm90::Solved;
using chunk_sm90::solved_of;

constexpr int kWarps = 4;   // of a block of the carrying kernel, 16 columns of V each
constexpr int kThreads = 32 * kWarps;

// Factors of a token, fp32, at the token's place (token_place).
struct HighGates {
  float read_k[kChunk];   // of k S: the decay from the chunk's start, what k lacks
  float read_q[kChunk];   // of q S, over `mix`
  float solve[kChunk];    // of a row of T X: what T lacks
  float write[kChunk];    // of u where it is written with k: the decay to the chunk's end, what k lacks
  float mix[kChunk];      // of a row of P U: what P lacks
  float decay[4];         // the whole chunk's, four times
};

struct alignas(16) HighSolved {
  fp16_t t[2][kChunk * kChunk];   // (I + A)^-1 diag(beta), and what rounding left of it
  fp16_t p[2][kChunk * kChunk];
  HighGates gates;
};

// fp16 tiles that a matrix of tokens is the sum of.
template <class Solved>
constexpr int kParts = std::is_same_v<Solved, HighSolved> ? 2 : 1;

// A matrix of tokens in shared memory: of T'' or M the blocks on and below the diagonal, in the order of their indices; at high
// precision whole tiles.
struct LowerBlocks {
  Block16 block[10];
};
struct HighTiles {
  fp16_t part[2][kChunk * kChunk];
};
template <class Solved>
using TilesOf = std::conditional_t<kParts<Solved> == 2, HighTiles, LowerBlocks>;
template <class Solved>
using GatesOf = std::conditional_t<kParts<Solved> == 2, HighGates, Gates>;

GDN_INLINE const float* read_k_of(const Gates& gates) { return gates.read; }
GDN_INLINE const float* read_q_of(const Gates& gates) { return gates.read; }
GDN_INLINE float chunk_decay_of(const Gates& gates) { return gates.read[kChunk - 1]; }
GDN_INLINE const float* read_k_of(const HighGates& gates) { return gates.read_k; }
GDN_INLINE const float* read_q_of(const HighGates& gates) { return gates.read_q; }
GDN_INLINE float chunk_decay_of(const HighGates& gates) { return gates.decay[0]; }

// K = 128: 67 KB, at high precision 91 KB: 99 are what a block can have on compute capabilities 8.6, 8.9 and 12.0.
template <int kKeyDim, class Solved>
struct alignas(1024) SharedMemory {
  fp16_t k[2][kChunk * kKeyDim];   // of chunk c in k[c % 2]
  fp16_t q[kChunk * kKeyDim];
  TilesOf<Solved> t, mix;   // mix: the matrix that goes into o, M of X or P of U
  GatesOf<Solved> gates[2];
  uint16_t v[kWarps][kChunk * 16];   // [64 t][16 v] in the io dtype, of each warp
  Work work;                         // here, so that nobody keeps it in registers over the chunks
};

static_assert(sizeof(SharedMemory<128, HighSolved>) <= 99 * 1024, "shared memory of a block");

}  // namespace gdn::cuda::chunk_mma
