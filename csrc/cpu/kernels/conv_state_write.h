// SPDX-License-Identifier: Apache-2.0
// The deferred window write over a range of units, a unit being one sequence and a block of channels: the window moves over
// the accepted tokens, new column j holds input number accepted - window + j, below 0 an old column.
#pragma once

#include "../../common/conv.h"
#include "rows.h"

namespace gdn::cpu::GDN_ISA {

inline void conv_state_write_range(const ConvWriteParams& p, int64_t begin, int64_t end) {
  alignas(64) float columns[kMaxTaps][kChannelBlock];
  const int64_t blocks = ceil_div(p.C, kChannelBlock);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t n = unit / blocks, channel = unit % blocks * kChannelBlock;
    const int64_t channels = smaller(kChannelBlock, p.C - channel);
    const Span span = sequence_span(p.cu_seqlens, n, p.T);
    const int64_t slot = p.slot_of(n, span.length);
    if (slot < 0) continue;
    const int64_t first = p.num_accepted.at(n) - p.window;
    for (int64_t j = 0; j < p.window; ++j) {
      const int64_t token = first + j;
      if (token >= 0) {
        load_row(p.x, p.x.offset(span.batch, channel, span.first + token), p.x.stride[1], channels, columns[j]);
      } else if (p.has_initial_state.at(n)) {
        load_row(p.conv_state, p.conv_state.offset(slot, channel, p.window + token), p.conv_state.stride[1], channels,
                 columns[j]);
      } else {
        fill_row(columns[j], channels, 0.0f);
      }
    }
    for (int64_t j = 0; j < p.window; ++j) {
      store_row(p.conv_state, p.conv_state.offset(slot, channel, j), p.conv_state.stride[1], channels, columns[j]);
    }
  }
}

}  // namespace gdn::cpu::GDN_ISA
