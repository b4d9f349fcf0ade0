// SPDX-License-Identifier: Apache-2.0
// The gate on the output of attention, fp32 throughout, one rounding at the end.
//     out = x * sigmoid(gate)
#pragma once

#include "../../common/gates.h"
#include "rows.h"

namespace gdn::cpu::GDN_ISA {

inline void output_gate_range(const OutputGateParams& p, int64_t begin, int64_t end) {
  const int64_t chunks = ceil_div(p.D, kOutputGateChunk);
  alignas(64) float x[kOutputGateChunk], gate[kOutputGateChunk];
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t vector = unit / chunks, first = unit % chunks * kOutputGateChunk, token = vector / p.H;
    const int64_t b = token / p.T, t = token % p.T, h = vector % p.H;
    const int64_t count = smaller(kOutputGateChunk, p.D - first);
    load_row(p.x, p.x.offset(b, t, h, first), p.x.stride[3], count, x);
    load_row(p.gate, p.gate.offset(b, t, h, first), p.gate.stride[3], count, gate);
    for (int64_t i = 0; i < count; ++i) x[i] = open_output(x[i], gate[i]);
    store_row(p.out, p.out.offset(b, t, h, first), p.out.stride[3], count, x);
  }
}

}  // namespace gdn::cpu::GDN_ISA
