// SPDX-License-Identifier: Apache-2.0
// Rows of a tensor between its storage dtype and fp32 buffers, and the sum over 32 residues of such a row.
#pragma once

#include "../isa.h"
#include "../simd.h"

namespace gdn::cpu::GDN_ISA {

GDN_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
inline void widen(const T* from, int64_t stride, int64_t count, float* to) {
  int64_t i = 0;
  if (stride == 1) {
    for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
  }
  for (; i < count; ++i) to[i] = to_float(from[i * stride]);
}

template <class T>
inline void round_to(const float* from, int64_t stride, int64_t count, T* to) {
  int64_t i = 0;
  if (stride == 1) {
    for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
  }
  for (; i < count; ++i) to[i * stride] = from_float<T>(from[i]);
}

inline void load_row(const View& view, int64_t offset, int64_t stride, int64_t count, float* to) {
  dispatch_dtype(view.dtype, [&](auto tag) {
    widen(static_cast<const decltype(tag)*>(view.data) + offset, stride, count, to);
  });
}

inline void store_row(const View& view, int64_t offset, int64_t stride, int64_t count, const float* from) {
  dispatch_dtype(view.dtype, [&](auto tag) {
    round_to(from, stride, count, static_cast<decltype(tag)*>(view.data) + offset);
  });
}

// The columns of a matrix [count, 3 or 4], its rows side by side, to rows of their own and back. One loop for all columns:
// the compiler then shuffles whole registers.
inline void split_columns(const float* __restrict__ matrix, int64_t count, float* __restrict__ a, float* __restrict__ b,
                          float* __restrict__ c, float* __restrict__ d) {
  for (int64_t i = 0; i < count; ++i) {
    a[i] = matrix[4 * i];
    b[i] = matrix[4 * i + 1];
    c[i] = matrix[4 * i + 2];
    d[i] = matrix[4 * i + 3];
  }
}
inline void split_columns(const float* __restrict__ matrix, int64_t count, float* __restrict__ a, float* __restrict__ b,
                          float* __restrict__ c) {
  for (int64_t i = 0; i < count; ++i) {
    a[i] = matrix[3 * i];
    b[i] = matrix[3 * i + 1];
    c[i] = matrix[3 * i + 2];
  }
}
inline void join_columns(float* __restrict__ matrix, int64_t count, const float* __restrict__ a, const float* __restrict__ b,
                         const float* __restrict__ c, const float* __restrict__ d) {
  for (int64_t i = 0; i < count; ++i) {
    matrix[4 * i] = a[i];
    matrix[4 * i + 1] = b[i];
    matrix[4 * i + 2] = c[i];
    matrix[4 * i + 3] = d[i];
  }
}
inline void join_columns(float* __restrict__ matrix, int64_t count, const float* __restrict__ a, const float* __restrict__ b,
                         const float* __restrict__ c) {
  for (int64_t i = 0; i < count; ++i) {
    matrix[3 * i] = a[i];
    matrix[3 * i + 1] = b[i];
    matrix[3 * i + 2] = c[i];
  }
}

inline const char* address_of(const View& view, int64_t offset) {
  return static_cast<const char*>(view.data) + offset * dtype_size(view.dtype);
}

inline void prefetch_row(const View& view, int64_t offset, int64_t count) {
  const char* row = address_of(view, offset);
  for (int64_t byte = 0; byte < count * dtype_size(view.dtype); byte += 64) prefetch(row + byte);
}

inline void fill_row(float* row, int64_t count, float x) {
  for (int64_t i = 0; i < count; ++i) row[i] = x;
}

// The pair tree over n packs, whose lanes are one row of n * kWidth numbers: levels until one pack is left, or, for a
// single sum, until one number is.
template <int n>
GDN_INLINE Pack tree_to_pack(const Pack (&row)[n]) {
  if constexpr (n == 1) {
    return row[0];
  } else {
    Pack half[n / 2];
    for (int i = 0; i < n / 2; ++i) half[i] = pair_sums(row[2 * i], row[2 * i + 1]);
    return tree_to_pack(half);
  }
}
GDN_INLINE float tree_to_number(Pack row) {
  float lanes[kWidth];
  store(lanes, row);
  for (int n = kWidth / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) lanes[i] = add(lanes[2 * i], lanes[2 * i + 1]);
  }
  return lanes[0];
}

constexpr int kResiduePacks = kResidues / kWidth;

// Partials of sum x*y by residue, carried over calls: lane l of pack m is residue m * kWidth + l.
struct ResidueSum {
  Pack partial[kResiduePacks];

  GDN_INLINE void clear() {
    for (Pack& p : partial) p = broadcast(0.0f);
  }
  GDN_INLINE void add_products(const float* x, const float* y) {   // the next 32 indices
    for (int m = 0; m < kResiduePacks; ++m) {
      partial[m] = accumulate(load(x + m * kWidth), load(y + m * kWidth), partial[m]);
    }
  }
  GDN_INLINE float total() const { return tree_to_number(tree_to_pack(partial)); }
};

}  // namespace gdn::cpu::GDN_ISA
