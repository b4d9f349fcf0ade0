// SPDX-License-Identifier: Apache-2.0
// Gates of every token and value head.
//     g = -exp(A_log) * softplus(a + dt_bias),   beta = sigmoid(b), twice that if allow_neg_eigval
// A unit is a token; heads are taken in blocks that fit small fp32 buffers.
#pragma once

#include "../../common/gates.h"
#include "rows.h"

namespace gdn::cpu::GDN_ISA {

constexpr int kHeadBlock = 64;

inline void gated_delta_gates_range(const GatesParams& p, int64_t begin, int64_t end) {
  float A_log[kHeadBlock], dt_bias[kHeadBlock], a[kHeadBlock], b[kHeadBlock], g[kHeadBlock], beta[kHeadBlock];
  for (int64_t first = 0; first < p.H; first += kHeadBlock) {
    const int64_t heads = smaller(kHeadBlock, p.H - first);
    load_row(p.A_log, p.A_log.offset(first), p.A_log.stride[0], heads, A_log);
    load_row(p.dt_bias, p.dt_bias.offset(first), p.dt_bias.stride[0], heads, dt_bias);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / p.T, t = unit % p.T;
      load_row(p.a, p.a.offset(row, t, first), p.a.stride[2], heads, a);
      load_row(p.b, p.b.offset(row, t, first), p.b.stride[2], heads, b);
      for (int64_t h = 0; h < heads; ++h) g[h] = log_decay(a[h], A_log[h], dt_bias[h]);
      for (int64_t h = 0; h < heads; ++h) beta[h] = write_strength(b[h], p.allow_neg_eigval);
      store_row(p.g, p.g.offset(row, t, first), p.g.stride[2], heads, g);
      store_row(p.beta, p.beta.offset(row, t, first), p.beta.stride[2], heads, beta);
    }
  }
}

}  // namespace gdn::cpu::GDN_ISA
