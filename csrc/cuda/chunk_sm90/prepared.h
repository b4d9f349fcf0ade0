// SPDX-License-Identifier: Apache-2.0
// What the preparation of chunks leaves in the workspace for the kernels that carry the state: images of shared memory, so
// that these copy and do nothing else.
//     [chunk rows][Hk] Keys, then [chunk rows][Hv] Solved
// A chunk row is the place of a chunk of a sequence; ragged sequences start at rows that leave room for those before,
// whatever their lengths are, so that nobody has to count chunks: row = first token / 64 + sequence + chunk.
#pragma once

#include "../../common/dtypes.h"
#include "../../common/params.h"

namespace gdn::cuda::chunk_sm90 {

constexpr int kChunk = 64;       // tokens of a chunk
constexpr int kValueTile = 64;   // columns of V of a tile, what a group (Hopper) or a block carries S for

// Of a key head: normalised rows (q's times kQueryFactor where there is l2norm), fp16, [64 t][kKeyDim] in panels of 64 columns,
// swizzled (tile/swizzle.cuh); 0 for missing tokens. In shared memory it starts at a multiple of 1024 bytes.
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
  float decay[kChunk];   // from the chunk's start to the token; the last one is the whole chunk's
};

// Where a token's factor lies: the tokens of a lane's columns of sums (tile/fragment.cuh), 8 b + 2 j and 8 b + 2 j + 1 of lane
// j mod 4, in four pieces of 16 bytes, and piece i of the four lanes side by side. The last token's place is the last.
GDN_INLINE constexpr int token_place(int token) {
  return token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
}

// Of a value head, in the symbols of kernel.cuh: what takes X to the write and to o. Both are [64 out][64 in], fp16, swizzled,
// zeros right of the diagonal.
struct alignas(16) Solved {
  fp16_t t[kChunk * kChunk];   // diag(e^(sum_64 - sum)) (I + A)^-1 diag(beta)
  fp16_t m[kChunk * kChunk];   // P (I + A)^-1 diag(beta)
  Gates gates;
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
