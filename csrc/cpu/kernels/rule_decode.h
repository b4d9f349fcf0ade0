// SPDX-License-Identifier: Apache-2.0
// The rule for one token, straight on the pool: no copy of the state, no conversion beyond its storage dtype.
//
//     u = sum_K S*k,  w = sum_K S*q;   f, o from them;   S = fma(k, f, alpha*S)
//
// Moves    S once from memory and once back: the second sweep finds it in the caches. While one head is computed the next
//          head's lines are asked for, evenly over both sweeps, so that memory never waits for arithmetic: 88 % of the speed
//          of an in-place scale on one Zen 3 core, against 73 % with all of them asked for in the second sweep.
// Order    K-first: packs over columns, four residues (rows 4p..4p+3, + 32j) at a time, all columns, then the next four.
//          V-first: packs over residues, kWidth columns at a time; both sweeps of those columns run in the L1 cache.
// Needs    K a multiple of 32, V of 16. Everything else takes the tile.
#pragma once

#include "rule_tile.h"

namespace gdn::cpu::GDN_ISA {

// One head's part of the step. Columns are relative to the first one that this unit of work holds. Passed by value: a store
// into the state could change it otherwise, and every loop would read it again.
template <class T>
struct DecodeHead {
  const T* read;
  T* write;                       // nullptr: the new state is dropped
  const T* next;                  // the state that comes after this one, or nullptr: nothing to ask for
  int64_t read_stride, write_stride;   // between rows (K-first) or columns (V-first)
  int columns;
  const float* k;
  const float* q;
  StepScalars step;
  const float* v;                 // [columns]
  float* o;                       // [columns]
};

template <class T>
constexpr int kLineElements = 64 / static_cast<int>(sizeof(T));

// Walks over the next state's lines in the order of memory (a strided walk costs a fifth of the speed).
template <class T>
struct Ahead {
  const T* row;                   // nullptr: nothing to ask for
  int64_t stride;
  int columns, column;

  GDN_INLINE explicit Ahead(const DecodeHead<T>& head)
      : row(head.next), stride(head.read_stride), columns(head.columns), column(0) {}
  GDN_INLINE void ask(int lines) {
    if (row == nullptr) return;
    for (; lines > 0; --lines) {
      prefetch(row + column);
      column += kLineElements<T>;
      if (column >= columns) {
        column = 0;
        row += stride;
      }
    }
  }
};

constexpr int kQuads = kResidues / 4;

// Rows 32j of 16 columns: one residue.
template <class T, int kBlocks>
GDN_INLINE TileSums read_residue(const T* rows, int64_t stride, const float* k, const float* q) {
  TileSums sums;
  for (int c = 0; c < kTilePacks; ++c) sums.u[c] = sums.w[c] = broadcast(0.0f);
#pragma GCC unroll kUnroll
  for (int i = 0; i < kBlocks * kResidues; i += kResidues) {
    const Pack key = broadcast(k[i]), query = broadcast(q[i]);
    for (int c = 0; c < kTilePacks; ++c) {
      const Pack s = load(rows + i * stride + c * kWidth);
      sums.u[c] = accumulate(s, key, sums.u[c]);
      sums.w[c] = accumulate(s, query, sums.w[c]);
    }
  }
  return sums;
}

// Four adjacent residues: one node of the tree.
template <class T, int kBlocks>
GDN_INLINE TileSums read_quad(const T* rows, int64_t stride, const float* k, const float* q) {
  TileSums residues[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) residues[r] = read_residue<T, kBlocks>(rows + r * stride, stride, k + r, q + r);
  return add_nodes<4>(residues);
}

template <class T, int kBlocks>
void decode_k_first(DecodeHead<T> head) {
  constexpr int kRows = kBlocks * kResidues, kLinesPerTile = kRows / 2 / kQuads * kTileColumns / kLineElements<T>;
  Ahead<T> ahead(head);           // half of the lines in each sweep
  TileSums quads[kMaxHeadDim / kTileColumns][kQuads];
  for (int quad = 0; quad < kQuads; ++quad) {
    const int r = 4 * quad;
    for (int c = 0; c < head.columns; c += kTileColumns) {
      ahead.ask(kLinesPerTile);
      quads[c / kTileColumns][quad] =
          read_quad<T, kBlocks>(head.read + r * head.read_stride + c, head.read_stride, head.k + r, head.q + r);
    }
  }
  alignas(64) float f[kMaxHeadDim];
  const StepPacks packs(head.step);
  for (int c = 0; c < head.columns; c += kTileColumns) {
    const TileSums sums = add_nodes<kQuads>(quads[c / kTileColumns]);
    for (int pack = 0; pack < kTilePacks; ++pack) {
      const int column = c + pack * kWidth;
      const Pack factor = packs.factor(sums.u[pack], load(head.v + column));
      store(f + column, factor);
      store(head.o + column, packs.output(factor, sums.w[pack]));
    }
  }
  if (head.write == nullptr) return;
  for (int i = 0; i < kRows; ++i) {
    const T* from = head.read + i * head.read_stride;
    T* to = head.write + i * head.write_stride;
    const Pack key = broadcast(head.k[i]);
    if (i % 2 == 0) ahead.ask(static_cast<int>(ceil_div(head.columns, kLineElements<T>)));
    for (int c = 0; c < head.columns; c += kTileColumns) {
#pragma GCC unroll 4
      for (int pack = 0; pack < kTilePacks; ++pack) {
        const int column = c + pack * kWidth;
        store(to + column, write_state(packs.alpha, key, load(f + column), load(from + column)));
      }
    }
  }
}

template <class T, int kBlocks>
void decode_v_first(DecodeHead<T> head) {
  const StepPacks packs(head.step);
  for (int c = 0; c < head.columns; c += kWidth) {
    Pack u_columns[kWidth], w_columns[kWidth];   // kWidth residue sums of each column, the tree's inner levels done
    for (int i = 0; i < kWidth; ++i) {
      const T* column = head.read + (c + i) * head.read_stride;
      Pack u[kResiduePacks], w[kResiduePacks];
      for (int m = 0; m < kResiduePacks; ++m) u[m] = w[m] = broadcast(0.0f);
      for (int j = 0; j < kBlocks * kResidues; j += kResidues) {
        for (int m = 0; m < kResiduePacks; ++m) {
          const Pack s = load(column + j + m * kWidth);
          u[m] = accumulate(s, load(head.k + j + m * kWidth), u[m]);
          w[m] = accumulate(s, load(head.q + j + m * kWidth), w[m]);
        }
      }
      u_columns[i] = tree_to_pack(u);
      w_columns[i] = tree_to_pack(w);
      if (head.next != nullptr) {
        const T* next_column = head.next + (c + i) * head.read_stride;
        for (int j = 0; j < kBlocks * kResidues; j += kLineElements<T>) prefetch(next_column + j);
      }
    }
    alignas(64) float f[kWidth];
    const Pack factor = packs.factor(tree_to_pack(u_columns), load(head.v + c));
    store(f, factor);
    store(head.o + c, packs.output(factor, tree_to_pack(w_columns)));
    if (head.write == nullptr) continue;
    for (int i = 0; i < kWidth; ++i) {
      const T* from = head.read + (c + i) * head.read_stride;
      T* to = head.write + (c + i) * head.write_stride;
      const Pack column_factor = broadcast(f[i]);
      for (int j = 0; j < kBlocks * kResidues; j += kWidth) {
        store(to + j, write_state(packs.alpha, load(head.k + j), column_factor, load(from + j)));
      }
    }
  }
}

template <class T>
inline void decode_head(const DecodeHead<T>& head, bool v_first, int64_t K) {
  using Decode = void (*)(DecodeHead<T>);
  static constexpr Decode kKFirst[] = {
      decode_k_first<T, 1>, decode_k_first<T, 2>, decode_k_first<T, 3>, decode_k_first<T, 4>,
      decode_k_first<T, 5>, decode_k_first<T, 6>, decode_k_first<T, 7>, decode_k_first<T, 8>};
  static constexpr Decode kVFirst[] = {
      decode_v_first<T, 1>, decode_v_first<T, 2>, decode_v_first<T, 3>, decode_v_first<T, 4>,
      decode_v_first<T, 5>, decode_v_first<T, 6>, decode_v_first<T, 7>, decode_v_first<T, 8>};
  (v_first ? kVFirst : kKFirst)[K / kResidues - 1](head);
}

}  // namespace gdn::cpu::GDN_ISA
