// SPDX-License-Identifier: Apache-2.0
//
// THE gated delta rule, one step, in fp32. Every exact op of the package computes exactly this, on either backend:
//
//     alpha = exp(g);   sk = 1/sqrt(sum k^2 + 1e-6),  sq likewise          (both 1 without l2norm)
//     u = sum_K S*k;    w = sum_K S*q;    c = sum_K k*q                    raw q and k, the OLD state
//     f = (beta * fma(-(alpha*sk), u, v)) * sk                             the delta, ready for the raw key
//     o = (scale*sq) * fma(c, f, alpha*w)                                  the read of the UPDATED state
//     S = fma(k, f, alpha*S)                                               the write
//
// Reading S once gives both the prediction u and the read w, so a token costs one pass over the state.
//
// Order of every sum over K: kResidues partials; partial r takes the indices r, r + 32, r + 64, ... in ascending order by
// fma from +0; then adjacent partials combine, five levels: ((p0+p1)+(p2+p3))+... A thread that owns whole residues can
// therefore split K any way it likes: any tiling, batch or split of the tokens gives the same bits. Rows past K count as
// zeros; they change no value.
//
// Round to nearest everywhere, no contraction, no flush to zero. F is float, or a pack of columns that supplies
// fma(F, F, F), mul(F, F) and add(F, F) with those roundings. This file includes nothing of ours: the emitted one-step
// program carries it as it is. The package ships a copy for that, torch-ext/gated_deltanet/rule.h; the build compares.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define GDN_INLINE __host__ __device__ __forceinline__
#else
#define GDN_INLINE inline __attribute__((always_inline))
#endif

namespace gdn {

constexpr int kResidues = 32;           // partial sums per sum over K
constexpr float kNormEpsilon = 1e-6f;   // inside the root, on the sum of squares

GDN_INLINE float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
GDN_INLINE float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
GDN_INLINE float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
GDN_INLINE float div(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
GDN_INLINE float sqrt(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}

GDN_INLINE uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}
GDN_INLINE float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

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

// 1/sqrt(sum of squares + eps): the factor that l2norm puts on a raw key or query. A sum that overflows gives 0.
GDN_INLINE float l2norm_factor(float sum_of_squares) {
  return div(1.0f, sqrt(add(sum_of_squares, kNormEpsilon)));
}

// What a token brings besides its vectors. Computed once per (token, value head), the same for every column of S. Two
// 16-byte words, so that a thread reads it in two loads.
struct alignas(16) StepScalars {
  float alpha;           // exp(g)
  float neg_alpha_sk;    // -(alpha * sk)
  float beta;
  float sk;              // l2norm factor of the key, 1 without
  float scale_sq;        // scale * l2norm factor of the query
  float kq;              // c = sum_K k*q
};

GDN_INLINE StepScalars step_scalars(float alpha, float beta, float scale, float sk, float sq, float kq) {
  return {alpha, -mul(alpha, sk), beta, sk, mul(scale, sq), kq};
}

// One more term of u or w (S*k, S*q) for a column, or of a plain dot product.
template <class F>
GDN_INLINE F accumulate(F state, F x, F sum) {
  return fma(state, x, sum);
}

// f: what the rank-one write puts beside the raw key. A record of the verify ring keeps it, the raw key and alpha.
template <class F>
GDN_INLINE F write_factor(F neg_alpha_sk, F beta, F sk, F u, F v) {
  return mul(mul(beta, fma(neg_alpha_sk, u, v)), sk);
}

// o: the read of the updated state from what one pass over the old one gave.
template <class F>
GDN_INLINE F read_output(F scale_sq, F kq, F alpha, F f, F w) {
  return mul(scale_sq, fma(kq, f, mul(alpha, w)));
}

// S after the token.
template <class F>
GDN_INLINE F write_state(F alpha, F k, F f, F state) {
  return fma(k, f, mul(alpha, state));
}

}  // namespace gdn
