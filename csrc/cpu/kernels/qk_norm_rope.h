// SPDX-License-Identifier: Apache-2.0
// RMS norm of each query and key head, then the rotation of its first R elements, fp32 throughout, one rounding at the end.
//     y = x * factor * weight                        factor = 1/sqrt(mean(x^2) + eps), weight or 1 + weight
//     out_i = y_i cos_i - y_(i + R/2) sin_i,   out_(i + R/2) = y_(i + R/2) cos_(i + R/2) + y_i sin_(i + R/2)      i < R/2
// A unit is one head of one token. The sum over a head runs by 32 residues, as the rule's sums over K do.
#pragma once

#include "../../common/gates.h"
#include "rows.h"

namespace gdn::cpu::GDN_ISA {

inline void load_rope_weight(const RopeParams& p, const View& view, float* weight) {
  load_row(view, 0, view.stride[0], p.D, weight);
  if (p.zero_centered) {
    for (int64_t i = 0; i < p.D; ++i) weight[i] = add(1.0f, weight[i]);
  }
}

inline void norm_rope_head(const RopeParams& p, const View& x, int64_t x_offset, const View& out, int64_t out_offset,
                           const float* weight, const float* cos, const float* sin) {
  alignas(64) float y[kMaxHeadDim];
  load_row(x, x_offset, x.stride[3], p.D, y);
  fill_row(y + p.D, ceil_div(p.D, kResidues) * kResidues - p.D, 0.0f);
  ResidueSum squares;
  squares.clear();
  for (int64_t i = 0; i < p.D; i += kResidues) squares.add_products(y + i, y + i);
  const float factor = rms_factor(squares.total(), static_cast<float>(p.D), p.eps);
  for (int64_t i = 0; i < p.D; ++i) y[i] = normed(y[i], factor, weight[i]);
  const int64_t half = p.R / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = y[i], second = y[i + half];
    y[i] = rotate(first, -second, cos[i], sin[i]);
    y[i + half] = rotate(second, first, cos[i + half], sin[i + half]);
  }
  store_row(out, out_offset, out.stride[3], p.D, y);
}

inline void qk_norm_rope_range(const RopeParams& p, int64_t begin, int64_t end) {
  const int64_t heads = p.Hq + p.Hk;
  alignas(64) float q_weight[kMaxHeadDim], k_weight[kMaxHeadDim], cos[kMaxHeadDim], sin[kMaxHeadDim];
  load_rope_weight(p, p.q_weight, q_weight);
  load_rope_weight(p, p.k_weight, k_weight);
  int64_t angles_of = -1;   // the token whose cos and sin are loaded
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t token = unit / heads, h = unit % heads, b = token / p.T, t = token % p.T;
    if (token != angles_of) {
      load_row(p.cos, p.cos.offset(b, t), p.cos.stride[2], p.R, cos);
      load_row(p.sin, p.sin.offset(b, t), p.sin.stride[2], p.R, sin);
      angles_of = token;
    }
    if (h < p.Hq) {
      norm_rope_head(p, p.q, p.q.offset(b, t, h), p.q_out, p.q_out.offset(b, t, h), q_weight, cos, sin);
    } else {
      norm_rope_head(p, p.k, p.k.offset(b, t, h - p.Hq), p.k_out, p.k_out.offset(b, t, h - p.Hq), k_weight, cos, sin);
    }
  }
}

}  // namespace gdn::cpu::GDN_ISA
