// SPDX-License-Identifier: Apache-2.0
// The scalar functions around the rule, one of each for both backends: exp, log1p, softplus, sigmoid, silu, log decay.
// Written without branches and without library calls, so that host loops vectorise and every op sees the same bits.
#pragma once

#include <cstdint>

#include "dtypes.h"
#include "rule.h"

namespace gdn {

// Nearest integer to x, |x| < 2^22: adding 1.5 * 2^23 leaves it in the low bits of the sum.
constexpr float kRoundMagic = 12582912.0f;

// e^x: x = n ln 2 + r with |r| <= ln(2)/2, a polynomial in r, then 2^n by exponent bits in two halves so that subnormal
// results round once. Right to about 1 ulp; inf above 88.73, 0 below -104, NaN stays NaN.
GDN_INLINE float exp(float x) {
  const float clamped = x > 89.0f ? 89.0f : (x < -105.0f ? -105.0f : x);   // NaN passes both tests
  const float shifted = fma(clamped, 1.44269504f, kRoundMagic);
  const float n = add(shifted, -kRoundMagic);
  float r = fma(n, -0.693359375f, clamped);           // ln 2 in two parts; the first has few bits, n times it is exact
  r = fma(n, 2.12194440e-4f, r);
  float p = 1.0f / 5040.0f;
  p = fma(p, r, 1.0f / 720.0f);
  p = fma(p, r, 1.0f / 120.0f);
  p = fma(p, r, 1.0f / 24.0f);
  p = fma(p, r, 1.0f / 6.0f);
  p = fma(p, r, 0.5f);
  p = fma(p, r, 1.0f);
  p = fma(p, r, 1.0f);
  const int32_t exponent = static_cast<int32_t>(float_bits(shifted)) - static_cast<int32_t>(0x4b400000);
  const int32_t half = exponent >> 1;
  const float low = bits_float(static_cast<uint32_t>((half + 127) << 23));
  const float high = bits_float(static_cast<uint32_t>((exponent - half + 127) << 23));
  return mul(mul(p, low), high);
}

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

// g = -exp(A_log) * softplus(a + dt_bias). Both factors are cut to the largest finite number, so that a head with an
// overflowing rate and a closed gate (inf * 0) decays by nothing instead of turning into NaN.
GDN_INLINE float log_decay(float a, float A_log, float dt_bias) {
  constexpr float kLargest = 3.40282347e38f;
  const float rate = exp(A_log), opening = softplus(add(a, dt_bias));
  const float finite_rate = rate > kLargest ? kLargest : rate;
  const float finite_opening = opening > kLargest ? kLargest : opening;
  return -mul(finite_rate, finite_opening);
}

GDN_INLINE float write_strength(float b, bool allow_neg_eigval) {
  const float beta = sigmoid(b);
  return allow_neg_eigval ? add(beta, beta) : beta;
}

// alpha of the rule from what the caller gave: the log decay, or the decay itself.
GDN_INLINE float decay_of(float g, bool gate_is_linear) { return gate_is_linear ? g : exp(g); }

// Factor of the norm over `size` elements, and what becomes of one of them: x is the element that the sum of squares took.
GDN_INLINE float rms_factor(float sum_of_squares, float size, float eps) {
  return div(1.0f, sqrt(add(div(sum_of_squares, size), eps)));
}
GDN_INLINE float normed(float x, float factor, float weight) { return mul(mul(x, factor), weight); }

GDN_INLINE float activate_gate(float z, bool use_silu) { return use_silu ? silu(z) : sigmoid(z); }

}  // namespace gdn
