// SPDX-License-Identifier: Apache-2.0
// The rule over many tokens: one tile of S, 16 columns, walked by one fused sweep per token.
//
//     S = fma(k_t, f_t, alpha_t*S)             token t's write, and from the same registers
//     u = sum_K S*k_t+1,  w = sum_K S*q_t+1    what token t+1 needs before its own sweep
//
// Who      a thread owns the tile for the whole sequence; packs run over columns, so a residue's partial sum is a pack.
// Moves    per row and sweep: load, mul, fma, store, fma, fma. The tile (8 KB at K = 128) stays in the first-level cache.
// Order    one residue at a time (rows r + 32j: four live accumulators, nothing spills); two residues make a pair in
//          registers, and the sixteen pairs wait in a small buffer for the other four levels.
#pragma once

#include "rule_tokens.h"

namespace gdn::cpu::GDN_ISA {

constexpr int kTilePacks = kTileColumns / kWidth;   // packs side by side in a row of the tile
constexpr int kPairs = kResidues / 2;

// Sums u and w of one residue or one node of the tree.
struct TileSums {
  Pack u[kTilePacks], w[kTilePacks];
};
GDN_INLINE TileSums add(const TileSums& a, const TileSums& b) {
  TileSums sum;
  for (int c = 0; c < kTilePacks; ++c) sum.u[c] = add(a.u[c], b.u[c]);
  for (int c = 0; c < kTilePacks; ++c) sum.w[c] = add(a.w[c], b.w[c]);
  return sum;
}
// The tree over n nodes in order.
template <int n>
GDN_INLINE TileSums add_nodes(const TileSums* nodes) {
  if constexpr (n == 1) {
    return nodes[0];
  } else {
    return add(add_nodes<n / 2>(nodes), add_nodes<n / 2>(nodes + n / 2));
  }
}

// One tile's place in the call and what it carries from token to token.
struct Tile {
  float* rows;                    // [padded K, 16]
  float* values;                  // [slots, 16] v of the block's tokens, then o in its place
  float* factors;                 // [slots, 16] keeps every token's f; nullptr: nobody asks for them
  const StepScalars* steps;       // of its value head, by slot of the token block
  int64_t h;
  int column, columns;            // first column of V, and how many are real
  const char* next_v;             // v and out of the next block's first token, or nullptr; token strides in bytes
  const char* next_out;
  int64_t v_step, out_step;
  alignas(64) float u[kTileColumns];
  alignas(64) float w[kTileColumns];
};

// One residue, rows 32j of the pointers given: the write with k, f, alpha; the reads with next_k, next_q.
template <bool kWrite, bool kRead, int kBlocks>
GDN_INLINE TileSums sweep_residue(float* rows, const float* k, const float* next_k, const float* next_q, Pack alpha,
                                  const Pack (&f)[kTilePacks]) {
  TileSums sums;
  for (int c = 0; c < kTilePacks; ++c) sums.u[c] = sums.w[c] = broadcast(0.0f);
#pragma GCC unroll kUnroll
  for (int i = 0; i < kBlocks * kResidues; i += kResidues) {
    // Before the column loop: after a store the compiler would load them again for every pack.
    const Pack key = broadcast(k[i]), next_key = broadcast(next_k[i]), next_query = broadcast(next_q[i]);
#pragma GCC unroll 4
    for (int c = 0; c < kTilePacks; ++c) {
      float* at = rows + i * kTileColumns + c * kWidth;
      Pack s = load(at);
      if constexpr (kWrite) {
        s = write_state(alpha, key, f[c], s);
        store(at, s);
      }
      if constexpr (kRead) {
        sums.u[c] = accumulate(s, next_key, sums.u[c]);
        sums.w[c] = accumulate(s, next_query, sums.w[c]);
      }
    }
  }
  return sums;
}

template <bool kWrite, bool kRead, int kBlocks>
inline void sweep(Tile& tile, const float* k, const float* next_k, const float* next_q, float alpha, const float* factors) {
  Pack f[kTilePacks];
  for (int c = 0; c < kTilePacks; ++c) f[c] = kWrite ? load(factors + c * kWidth) : broadcast(0.0f);
  const Pack decay = broadcast(alpha);
  TileSums pairs[kPairs];
  for (int r = 0; r < kResidues; r += 2) {
    float* rows = tile.rows + r * kTileColumns;
    const TileSums even = sweep_residue<kWrite, kRead, kBlocks>(rows, k + r, next_k + r, next_q + r, decay, f);
    const TileSums odd = sweep_residue<kWrite, kRead, kBlocks>(rows + kTileColumns, k + r + 1, next_k + r + 1,
                                                               next_q + r + 1, decay, f);
    if constexpr (kRead) pairs[r / 2] = add(even, odd);
  }
  if constexpr (kRead) {
    const TileSums sums = add_nodes<kPairs>(pairs);
    for (int c = 0; c < kTilePacks; ++c) {
      store(tile.u + c * kWidth, sums.u[c]);
      store(tile.w + c * kWidth, sums.w[c]);
    }
  }
}

// f and o of one token from the tile's sums; o takes the place of v.
GDN_INLINE void finish_token(const Tile& tile, const StepScalars& step, float* value, float* factors) {
  const StepPacks packs(step);
  for (int c = 0; c < kTileColumns; c += kWidth) {
    const Pack f = packs.factor(load(tile.u + c), load(value + c));
    store(factors + c, f);
    store(value + c, packs.output(f, load(tile.w + c)));
  }
}

// Tokens of one block for one tile.
//     count      tokens in the block's slots
//     steps      how many of them to take: count where the sequence ends, else count - 1 and the last slot is only looked at
template <int kBlocks>
void run_block(const TokenBlock& block, int count, int steps, bool is_first, Tile& tile) {
  alignas(64) float factors_of_token[kTileColumns];
  if (is_first) sweep<false, true, kBlocks>(tile, block.k(0), block.k(0), block.q(0), 0.0f, factors_of_token);
  for (int slot = 0; slot < steps; ++slot) {
    const StepScalars& step = tile.steps[slot];
    if (tile.next_v != nullptr) {
      prefetch(tile.next_v + slot * tile.v_step);
      prefetch(tile.next_out + slot * tile.out_step);
    }
    float* const factors = tile.factors == nullptr ? factors_of_token : tile.factors + slot * kTileColumns;
    finish_token(tile, step, tile.values + slot * kTileColumns, factors);
    if (slot + 1 < count) {
      sweep<true, true, kBlocks>(tile, block.k(slot), block.k(slot + 1), block.q(slot + 1), step.alpha, factors);
    } else {
      sweep<true, false, kBlocks>(tile, block.k(slot), block.k(slot), block.q(slot), step.alpha, factors);
    }
  }
}

using RunBlock = void (*)(const TokenBlock&, int, int, bool, Tile&);

inline RunBlock pick_run_block(int padded_dim) {
  static constexpr RunBlock kByBlocks[] = {run_block<1>, run_block<2>, run_block<3>, run_block<4>,
                                           run_block<5>, run_block<6>, run_block<7>, run_block<8>};
  return kByBlocks[padded_dim / kResidues - 1];
}

// A tile between its slot and the scratch. from / to == nullptr: start from zero / drop. Padding rows and columns are zero.
template <class T>
void load_tile_of(const T* from, int64_t k_stride, int64_t v_stride, int64_t K, int padded_dim, Tile& tile) {
  fill_row(tile.rows + K * kTileColumns, (padded_dim - K) * kTileColumns, 0.0f);
  if (v_stride == 1 && tile.columns == kTileColumns) {
    for (int64_t i = 0; i < K; ++i) {
      for (int c = 0; c < kTileColumns; c += kWidth) store(tile.rows + i * kTileColumns + c, load(from + i * k_stride + c));
    }
    return;
  }
  for (int64_t i = 0; i < K; ++i) {
    float* row = tile.rows + i * kTileColumns;
    for (int c = 0; c < tile.columns; ++c) row[c] = to_float(from[i * k_stride + c * v_stride]);
    for (int c = tile.columns; c < kTileColumns; ++c) row[c] = 0.0f;
  }
}
template <class T>
void store_tile_to(T* to, int64_t k_stride, int64_t v_stride, int64_t K, const Tile& tile) {
  if (v_stride == 1 && tile.columns == kTileColumns) {
    for (int64_t i = 0; i < K; ++i) {
      for (int c = 0; c < kTileColumns; c += kWidth) store(to + i * k_stride + c, load(tile.rows + i * kTileColumns + c));
    }
    return;
  }
  for (int64_t i = 0; i < K; ++i) {
    const float* row = tile.rows + i * kTileColumns;
    for (int c = 0; c < tile.columns; ++c) to[i * k_stride + c * v_stride] = from_float<T>(row[c]);
  }
}

}  // namespace gdn::cpu::GDN_ISA
