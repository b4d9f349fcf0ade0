// SPDX-License-Identifier: Apache-2.0
// What the preparation of chunks leaves in the workspace for the kernels that carry the state: images of shared memory, so
// that these copy and do nothing else.
//     [chunk rows][Hk] Keys, then [chunk rows][Hv] Solved
// A chunk row is the place of a chunk of a sequence; ragged sequences start at rows that leave room for those before,
// whatever their lengths are, so that nobody has to count chunks: row = first token / 64 + sequence + chunk.
#pragma once

#include "../../common/dtypes.h"
#include "../../common/params.h"
#include "../tile/swizzle.cuh"

#include <cstddef>

namespace gdn::cuda::chunk_sm90 {

constexpr int kChunk = 64;       // tokens of a chunk
constexpr int kValueTile = 64;   // columns of V of a tile, what a group (Hopper) or a block carries S for

// Of a key head: rows of k and q, fp16, [64 t][kKeyDim] in panels of 64 columns, swizzled (tile/swizzle.cuh); 0 for missing
// tokens. Where there is l2norm k is normalised but for a factor of the token, k_scale (load.cuh), and q times kQueryFactor /
// k_scale, so that one factor serves what both read. In shared memory it starts at a multiple of 1024 bytes.
template <int kKeyDim>
struct alignas(16) Keys {
  fp16_t k[kChunk * kKeyDim];
  fp16_t q[kChunk * kKeyDim];
};

// What a normalised q is kept times. M has beta in it and grows with q: it stays in fp16's normal range where beta is small.
constexpr float kQueryFactor = 256.0f;

// What o is to be multiplied by.
GDN_INLINE float output_scale(const RuleParams& p) { return p.use_qk_l2norm ? p.scale / kQueryFactor : p.scale; }

// Per token of a chunk, at the token's place, fp32; missing tokens have log decay 0.
struct Gates {
  float read[kChunk];   // of k S and q S: the decay from the chunk's start to the token times k_scale; the last is the chunk's
};

// Where a token's factor lies: the tokens of a lane's columns of sums (tile/fragment.cuh), 8 b + 2 j and 8 b + 2 j + 1 of lane
// j mod 4, in four pieces of 16 bytes, and piece i of the four lanes side by side. The last token's place is the last.
GDN_INLINE constexpr int token_place(int token) {
  return token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
}

using Block16 = fp16_t[16 * 16];   // a block of rows of a panel of 16 columns (tile/swizzle.cuh)

// Of a value head, in the symbols of kernel.cuh: what takes X to the write and to o, fp16,
//     T'' = diag(k_scale e^(sum_64 - sum)) (I + A)^-1 diag(beta),   M = P (I + A)^-1 diag(beta),   [64 out][64 in]
// in panels of 16 columns, of which only the blocks on and below the diagonal are here: four of panel 0, one of panel 3. In
// shared memory zeros stand for the others (config.h). M's rows of blocks rise in a panel, those of T'' fall, so that the zeros
// lie before a panel of M and behind one of T'': one chunk is three pieces with zeros between, and they serve both sides.
//     [M_1 M_0 gates T_0 T_3]   [M_3 T_2]   [M_2 T_1]      (T_j, M_j: panel j)
struct alignas(16) Solved {
  struct First {
    Block16 m[7];
    Gates gates;
    Block16 t[5];
  } first;
  struct Second {
    Block16 m[1], t[2];
  } second;
  struct Third {
    Block16 m[2], t[3];
  } third;
};
constexpr int kSecondPiece = sizeof(Solved::First), kThirdPiece = kSecondPiece + sizeof(Solved::Second);
static_assert(sizeof(Solved) == kThirdPiece + sizeof(Solved::Third) && sizeof(Solved) == 20 * kBlockBytes + sizeof(Gates),
              "nothing but blocks and gates");

// Where block (i, j), j <= i, of T'' or M lies: which one it is of the matrix's own, piece after piece; bytes from the start
// of Solved.
struct PlacesOfT {
  static constexpr bool kRises = false;
  GDN_INLINE static constexpr int index(int i, int j) { return (j == 0 ? 0 : j == 3 ? 4 : j == 2 ? 5 : 7) + 3 - i; }
  GDN_INLINE static constexpr int offset(int i, int j) {
    return kBlockBytes * index(i, j) + (j == 1   ? kThirdPiece - 5 * kBlockBytes
                                        : j == 2 ? kSecondPiece - 4 * kBlockBytes
                                                 : static_cast<int>(offsetof(Solved::First, t)));
  }
};
struct PlacesOfM {
  static constexpr bool kRises = true;
  GDN_INLINE static constexpr int index(int i, int j) { return (j == 1 ? 0 : j == 0 ? 3 : j == 3 ? 7 : 8) + i - j; }
  GDN_INLINE static constexpr int offset(int i, int j) {
    return kBlockBytes * index(i, j) + (j == 2 ? kThirdPiece - 8 * kBlockBytes : j == 3 ? kSecondPiece - 7 * kBlockBytes : 0);
  }
};

// Chunk rows of a call, known from its shapes.
GDN_INLINE int64_t num_chunk_rows(const RuleParams& p) {
  return p.cu_seqlens.given() ? p.dims.T / kChunk + p.dims.N : p.dims.N * ceil_div(p.dims.T, kChunk);
}

// The row of sequence n's first chunk; later ones follow. With a later first token: of the chunk that starts there.
GDN_INLINE int64_t first_chunk_row(const RuleParams& p, int64_t n, int64_t first_token) {
  return first_token / kChunk + (p.cu_seqlens.given() ? n : n * ceil_div(p.dims.T, kChunk));
}

template <int kKeyDim>
GDN_INLINE Keys<kKeyDim>* keys_of(const RuleParams& p, int64_t chunk_row, int64_t key_head) {
  return static_cast<Keys<kKeyDim>*>(p.workspace) + chunk_row * p.dims.Hk + key_head;
}

// SolvedOf: Solved, or that of another precision (chunk_mma/prepared.h).
template <int kKeyDim, class SolvedOf = Solved>
GDN_INLINE SolvedOf* solved_of(const RuleParams& p, int64_t chunk_row, int64_t head) {
  return reinterpret_cast<SolvedOf*>(keys_of<kKeyDim>(p, num_chunk_rows(p), 0)) + chunk_row * p.dims.Hv + head;
}

template <int kKeyDim, class SolvedOf = Solved>
GDN_INLINE int64_t prepared_bytes(const RuleParams& p) {
  return num_chunk_rows(p) * (p.dims.Hk * static_cast<int64_t>(sizeof(Keys<kKeyDim>)) +
                              p.dims.Hv * static_cast<int64_t>(sizeof(SolvedOf)));
}

}  // namespace gdn::cuda::chunk_sm90
