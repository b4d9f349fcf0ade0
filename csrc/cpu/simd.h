// SPDX-License-Identifier: Apache-2.0
// A pack of kWidth floats for the instruction set that is being compiled, and the only intrinsics of the backend.
//
// Included once per isa_*.cpp, which sets GDN_ISA (the namespace) and GDN_ISA_LEVEL: 0 portable, 1 AVX2 + FMA + F16C,
// 2 AVX-512. Every operation rounds as its scalar twin in common/ does, so that the bits do not depend on the level. Written
// in the compiler's vector extension; intrinsics only where that has no word for the instruction.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/dtypes.h"
#include "../common/rule.h"

#if GDN_ISA_LEVEL > 0
#include <immintrin.h>
#endif

namespace gdn::cpu::GDN_ISA {

#if GDN_ISA_LEVEL == 2
constexpr int kWidth = 16;
#elif GDN_ISA_LEVEL == 1
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

// Blocks of 32 rows that the sweeps unroll. The portable level calls functions there: unrolled, it only compiles longer.
constexpr int kUnroll = GDN_ISA_LEVEL > 0 ? 8 : 1;

typedef float floats_t __attribute__((vector_size(4 * kWidth)));
typedef int32_t ints_t __attribute__((vector_size(4 * kWidth)));
typedef uint32_t uints_t __attribute__((vector_size(4 * kWidth)));
typedef uint16_t halves_t __attribute__((vector_size(2 * kWidth)));

struct Pack {
  floats_t lanes;
};

// The scalar functions of the rule stay visible beside their overloads for packs.
using gdn::add;
using gdn::fma;
using gdn::mul;

GDN_INLINE Pack broadcast(float x) {
#if GDN_ISA_LEVEL == 2
  return {_mm512_set1_ps(x)};
#elif GDN_ISA_LEVEL == 1
  return {_mm256_set1_ps(x)};
#else
  return {floats_t{x, x, x, x}};
#endif
}

#if GDN_ISA_LEVEL == 0 && !defined(__FP_FAST_FMAF)
// A call of the C library per lane: kept out of line, or the unrolled kernels grow past reason.
__attribute__((noinline)) inline Pack fma(Pack a, Pack b, Pack c) {
#else
GDN_INLINE Pack fma(Pack a, Pack b, Pack c) {
#endif
#if GDN_ISA_LEVEL == 2
  return {_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)};
#elif GDN_ISA_LEVEL == 1
  return {_mm256_fmadd_ps(a.lanes, b.lanes, c.lanes)};
#else
  Pack sum;
  for (int i = 0; i < kWidth; ++i) sum.lanes[i] = __builtin_fmaf(a.lanes[i], b.lanes[i], c.lanes[i]);
  return sum;
#endif
}
GDN_INLINE Pack mul(Pack a, Pack b) { return {a.lanes * b.lanes}; }
GDN_INLINE Pack add(Pack a, Pack b) { return {a.lanes + b.lanes}; }

// (a0+a1, a2+a3, ..., b0+b1, b2+b3, ...): one level of the pair tree over the concatenation of a and b.
GDN_INLINE Pack pair_sums(Pack a, Pack b) {
#if GDN_ISA_LEVEL == 2
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return add({_mm512_permutex2var_ps(a.lanes, even, b.lanes)}, {_mm512_permutex2var_ps(a.lanes, odd, b.lanes)});
#elif GDN_ISA_LEVEL == 1
  const __m256d sums = _mm256_castps_pd(_mm256_hadd_ps(a.lanes, b.lanes));   // a01 a23 b01 b23 a45 a67 b45 b67
  return {_mm256_castpd_ps(_mm256_permute4x64_pd(sums, 0xd8))};
#else
  return {floats_t{a.lanes[0] + a.lanes[1], a.lanes[2] + a.lanes[3], b.lanes[0] + b.lanes[1], b.lanes[2] + b.lanes[3]}};
#endif
}

// Loads and stores of kWidth adjacent elements of a storage type, unaligned, widened exactly and rounded to nearest even.
GDN_INLINE Pack load(const float* from) {
  Pack pack;
  std::memcpy(&pack.lanes, from, sizeof(pack.lanes));
  return pack;
}
GDN_INLINE void store(float* to, Pack pack) { std::memcpy(to, &pack.lanes, sizeof(pack.lanes)); }

GDN_INLINE Pack load(const bf16_t* from) {
#if GDN_ISA_LEVEL == 1   // the compiler widens and narrows 16-bit lanes in halves or one by one
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const uints_t wide = reinterpret_cast<uints_t>(bits) << 16;
#else
  halves_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  const uints_t wide = __builtin_convertvector(bits, uints_t) << 16;
#endif
  Pack pack;
  std::memcpy(&pack.lanes, &wide, sizeof(wide));
  return pack;
}
GDN_INLINE void store(bf16_t* to, Pack pack) {
  uints_t bits;
  std::memcpy(&bits, &pack.lanes, sizeof(bits));
  const uints_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uints_t quiet_nan = (bits >> 16) | 0x40u;
  const ints_t is_nan = reinterpret_cast<ints_t>(bits & 0x7fffffffu) > 0x7f800000;
  const uints_t kept = is_nan ? quiet_nan : rounded;
#if GDN_ISA_LEVEL == 1
  const __m256i lanes = reinterpret_cast<__m256i>(kept);
  const __m256i narrow = _mm256_permute4x64_epi64(_mm256_packus_epi32(lanes, lanes), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(narrow));
#else
  const halves_t narrow = __builtin_convertvector(kept, halves_t);
  std::memcpy(to, &narrow, sizeof(narrow));
#endif
}

GDN_INLINE Pack load(const fp16_t* from) {
#if GDN_ISA_LEVEL == 2
  // The masked form: the plain one warns of an uninitialised register in g++ 12.
  return {_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
#elif GDN_ISA_LEVEL == 1
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
#else
  Pack pack;
  for (int i = 0; i < kWidth; ++i) pack.lanes[i] = to_float(from[i]);
  return pack;
#endif
}
GDN_INLINE void store(fp16_t* to, Pack pack) {
#if GDN_ISA_LEVEL == 2
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_maskz_cvtps_ph(0xffff, pack.lanes, _MM_FROUND_TO_NEAREST_INT));
#elif GDN_ISA_LEVEL == 1
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(pack.lanes, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kWidth; ++i) to[i] = from_float<fp16_t>(pack.lanes[i]);
#endif
}

// Asks for the line of an address ahead of its use, into the second-level cache.
GDN_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

}  // namespace gdn::cpu::GDN_ISA
