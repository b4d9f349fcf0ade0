// SPDX-License-Identifier: Apache-2.0
// The scalar functions around the rule, one of each for both backends: log1p, softplus, sigmoid, silu, log decay, rotation.
// Written without branches and without library calls, so that host loops vectorise and every op sees the same bits.
#pragma once

#include <cstdint>

#include "dtypes.h"
#include "rule.h"

namespace gdn {

// log(1 + y) for 0 <= y <= 1: 2 atanh(s) with s = y/(2 + y) <= 1/3, as a series in s^2. Keeps the relative error of a tiny y.
GDN_INLINE float log1p_unit(float y) {
  const float s = div(y, add(2.0f, y));
  const float t = mul(s, s);
  float p = 1.0f / 15.0f;
  p = fma(p, t, 1.0f / 13.0f);
  p = fma(p, t, 1.0f / 11.0f);
  p = fma(p, t, 1.0f / 9.0f);
  p = fma(p, t, 1.0f / 7.0f);
  p = fma(p, t, 1.0f / 5.0f);
  p = fma(p, t, 1.0f / 3.0f);
  p = fma(p, t, 1.0f);
  return mul(add(s, s), p);
}

// log(1 + e^x), linear above 20 as torch has it.
GDN_INLINE float softplus(float x) {
  const float magnitude = x < 0.0f ? -x : x;
  const float positive = x < 0.0f ? 0.0f : x;   // NaN stays
  const float curved = add(positive, log1p_unit(exp(-magnitude)));
  return x > 20.0f ? x : curved;
}

GDN_INLINE float sigmoid(float x) { return div(1.0f, add(1.0f, exp(-x))); }

// An activation, not part of the rule's arithmetic. On a GPU the exact exp and division would cost the convolution more
// than its memory traffic, so it takes the fast ones: still one function for all its ops, within 1e-6 of the host's.
GDN_INLINE float silu(float x) {
#if defined(__CUDA_ARCH__)
  return __fdividef(x, add(1.0f, __expf(-x)));
#else
  return div(x, add(1.0f, exp(-x)));
#endif
}

// g = -exp(A_log) * softplus(a + dt_bias), rate times opening. Both factors are cut to the largest finite number, so that a
// head with an overflowing rate and a closed gate (inf * 0) decays by nothing instead of turning into NaN.
GDN_INLINE float finite(float x) {
  constexpr float kLargest = 3.40282347e38f;
  return x > kLargest ? kLargest : x;
}
GDN_INLINE float decay_rate(float A_log) { return finite(exp(A_log)); }
GDN_INLINE float log_decay_at(float rate, float a, float dt_bias) { return -mul(rate, finite(softplus(add(a, dt_bias)))); }
GDN_INLINE float log_decay(float a, float A_log, float dt_bias) { return log_decay_at(decay_rate(A_log), a, dt_bias); }

GDN_INLINE float write_strength(float b, bool allow_neg_eigval) {
  const float beta = sigmoid(b);
  return allow_neg_eigval ? add(beta, beta) : beta;
}

// What a call's g holds: the log decay, the decay itself, or a of log_decay. The numbers are those of the schema.
enum class GateDomain : int { kLog = 0, kLinear = 1, kRaw = 2 };

// alpha of the rule from the log decay, or from the decay itself.
GDN_INLINE float decay_of(float g, bool gate_is_linear) { return gate_is_linear ? g : exp(g); }

// x * sigmoid(gate), fast on a GPU as silu is.
GDN_INLINE float open_output(float x, float gate) {
#if defined(__CUDA_ARCH__)
  return __fdividef(x, add(1.0f, __expf(-gate)));
#else
  return div(x, add(1.0f, exp(-gate)));
#endif
}

// An element of a normed head, y, after the rotation. `turned` is the other element of its pair: minus the one R/2 further
// on for the first half of the R that are rotated, the one R/2 before for the second.
GDN_INLINE float rotate(float y, float turned, float cos, float sin) { return fma(turned, sin, mul(y, cos)); }

// Factor of the norm over `size` elements, and what becomes of one of them: x is the element that the sum of squares took.
GDN_INLINE float rms_factor(float sum_of_squares, float size, float eps) {
  return div(1.0f, sqrt(add(div(sum_of_squares, size), eps)));
}
GDN_INLINE float normed(float x, float factor, float weight) { return mul(mul(x, factor), weight); }

GDN_INLINE float activate_gate(float z, bool use_silu) { return use_silu ? silu(z) : sigmoid(z); }

}  // namespace gdn
