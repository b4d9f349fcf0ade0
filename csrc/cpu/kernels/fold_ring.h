// SPDX-License-Identifier: Apache-2.0
// Fold over a range of units, a unit being one value head of one row of one layer:
//
//     for each accepted record:  S = fma(k, f, alpha*S)
//
// Who      packs run along the contiguous dim of S. k and f change places with the layout; their product does not.
// Moves    S once in, once out, row by row; a row goes through all records in registers.
#pragma once

#include "../../common/ring.h"
#include "rows.h"

namespace gdn::cpu::GDN_ISA {

// Records of one value head, in fp32, rows padded with zeros to whole packs.
struct HeadRecords {
  int count;
  float alpha[kMaxRingLength];
  alignas(64) float key[kMaxRingLength][kMaxHeadDim];
  alignas(64) float factor[kMaxRingLength][kMaxHeadDim];
};

inline void load_records(const FoldParams& p, const FoldParams::Row& row, int64_t h, HeadRecords& records) {
  const int64_t group = p.Hv / p.Hk, hk = h / group, member = h % group;
  records.count = row.count;
  for (int j = 0; j < row.count; ++j) {
    const int64_t record = p.ring.offset(row.ring_row, hk, j);
    fill_row(records.key[j], kMaxHeadDim, 0.0f);
    fill_row(records.factor[j], kMaxHeadDim, 0.0f);
    load_row(p.ring, record, 1, p.K, records.key[j]);
    load_row(p.ring, record + record_factor(p.K, p.V, member), 1, p.V, records.factor[j]);
    records.alpha[j] = p.ring.load(record + record_alpha(p.K, p.V, group, member));
  }
}

inline void fold_head(const FoldParams& p, const FoldParams::Row& row, int64_t h, const HeadRecords& records) {
  const bool v_first = p.state.stride[3] != 1;
  const int64_t outer = v_first ? p.V : p.K, inner = v_first ? p.K : p.V;
  const int64_t outer_stride = p.state.stride[v_first ? 3 : 2], inner_stride = p.state.stride[v_first ? 2 : 3];
  const auto& along = v_first ? records.key : records.factor;    // changes along a row
  const auto& of_row = v_first ? records.factor : records.key;
  alignas(64) float line[kMaxHeadDim] = {};
  for (int64_t i = 0; i < outer; ++i) {
    const int64_t offset = p.state.offset(row.slot, h) + i * outer_stride;
    load_row(p.state, offset, inner_stride, inner, line);
    for (int64_t c = 0; c < inner; c += kWidth) {
      Pack s = load(line + c);
      for (int j = 0; j < records.count; ++j) {
        s = write_state(broadcast(records.alpha[j]), load(along[j] + c), broadcast(of_row[j][i]), s);
      }
      store(line + c, s);
    }
    store_row(p.state, offset, inner_stride, inner, line);
  }
}

inline void fold_ring_range(const FoldParams& p, int64_t begin, int64_t end) {
  HeadRecords records;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t item = unit / p.Hv, h = unit % p.Hv;
    const FoldParams::Row row = p.row(item / p.batch, item % p.batch);
    if (row.slot < 0) continue;
    load_records(p, row, h, records);
    fold_head(p, row, h, records);
  }
}

}  // namespace gdn::cpu::GDN_ISA
