// SPDX-License-Identifier: Apache-2.0
// Strided views of tensors, device or host memory. Strides are in elements and every offset is 64-bit.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace gdn {

// 1-D index tensor, int32 or int64, any stride. data == nullptr: not given.
struct IndexView {
  const void* data;
  int64_t stride;
  bool is_int64;

  GDN_INLINE bool given() const { return data != nullptr; }
  GDN_INLINE int64_t at(int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i * stride]
                    : static_cast<int64_t>(static_cast<const int32_t*>(data)[i * stride]);
  }
  // The same from memory itself, while somebody may still be writing it: a hint.
  GDN_INLINE int64_t peek(int64_t i) const {
    return is_int64 ? static_cast<const volatile int64_t*>(data)[i * stride]
                    : static_cast<int64_t>(static_cast<const volatile int32_t*>(data)[i * stride]);
  }
};

// A slot as it came, or -1 for padding: any value outside [0, pool_size).
GDN_INLINE int64_t slot_or_padding(int64_t slot, int64_t pool_size) { return slot >= 0 && slot < pool_size ? slot : -1; }

// Pool slot of row n, or -1 for padding. Without slots row n uses slot n.
GDN_INLINE int64_t slot_of_row(const IndexView& slots, int64_t n, int64_t pool_size) {
  return slot_or_padding(slots.given() ? slots.at(n) : n, pool_size);
}

// The same while somebody may still be writing the slots: may be an old one, never one outside the pool.
GDN_INLINE int64_t hinted_slot_of_row(const IndexView& slots, int64_t n, int64_t pool_size) {
  return slot_or_padding(slots.given() ? slots.peek(n) : n, pool_size);
}

// 2-D index tensor, any strides: entry (i, j).
struct TableView {
  IndexView index;
  int64_t row_stride;

  GDN_INLINE bool given() const { return index.given(); }
  GDN_INLINE int64_t at(int64_t i, int64_t j) const {
    const int64_t element = i * row_stride + j * index.stride;
    return index.is_int64 ? static_cast<const int64_t*>(index.data)[element]
                          : static_cast<int64_t>(static_cast<const int32_t*>(index.data)[element]);
  }
};

// bool [N], any stride. Not given: all true.
struct FlagView {
  const uint8_t* data;
  int64_t stride;

  GDN_INLINE bool at(int64_t n) const { return data == nullptr || data[n * stride] != 0; }
};

// A tensor of up to four dims: [B, T, H, D] for tokens, [slot, H, K, V] for states. Missing dims have stride 0.
struct View {
  void* data;
  DType dtype;
  int64_t stride[4];

  GDN_INLINE bool given() const { return data != nullptr; }
  GDN_INLINE int64_t offset(int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) const {
    return i0 * stride[0] + i1 * stride[1] + i2 * stride[2] + i3 * stride[3];
  }
  GDN_INLINE float load(int64_t element_offset) const { return load_float(data, dtype, element_offset); }
  GDN_INLINE void store(int64_t element_offset, float x) const { store_float(data, dtype, element_offset, x); }
  // The same strides from another element on.
  GDN_INLINE View from(int64_t element_offset) const {
    View view = *this;
    if (given()) view.data = static_cast<char*>(data) + element_offset * dtype_size(dtype);
    return view;
  }
};

// Value heads by key head and their number in its group, where the two need not follow one stride: [B, T, Hk, group, D].
struct GroupedView {
  View view;          // strides of B, T, Hk, D
  int64_t member;     // of the group

  GDN_INLINE int64_t offset(int64_t b, int64_t t, int64_t hk, int64_t m, int64_t d = 0) const {
    return view.offset(b, t, hk, d) + m * member;
  }
};

// Where sequence n lies in [B, T]: batch row, first token, number of tokens.
struct Span {
  int64_t batch, first, length;
};

// Dense: row n, all T tokens. Ragged: tokens cu_seqlens[n] .. cu_seqlens[n+1] of row 0, cut to [0, T]; a negative length
// counts as empty, so bad offsets on a device never lead outside the tensors.
GDN_INLINE Span sequence_span(const IndexView& cu_seqlens, int64_t n, int64_t T) {
  if (!cu_seqlens.given()) return {n, 0, T};
  int64_t first = cu_seqlens.at(n), last = cu_seqlens.at(n + 1);
  first = first < 0 ? 0 : (first > T ? T : first);
  last = last > T ? T : last;
  return {0, first, last > first ? last - first : 0};
}

}  // namespace gdn
