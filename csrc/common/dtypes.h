// SPDX-License-Identifier: Apache-2.0
// The storage dtypes, their exact widening to fp32 and their rounding from it (to nearest even), host and device.
#pragma once

#include <cstdint>
#include <cstring>

#include "rule.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace gdn {

enum class DType : int { kFloat32, kBFloat16, kFloat16 };

// 16-bit floats as plain bits, so that host code needs no CUDA header and both sides see one type.
struct bf16_t {
  uint16_t bits;
};
struct fp16_t {
  uint16_t bits;
};

GDN_INLINE float to_float(float x) { return x; }
GDN_INLINE float to_float(bf16_t x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }
GDN_INLINE float to_float(fp16_t x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  // Shift the exponent by arithmetic: 2^-14 subnormals come out right because the multiply is exact.
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const float scaled = bits_float(magnitude) * 0x1p112f;
  const uint32_t special = (x.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;  // inf and NaN keep an all-ones exponent
  return bits_float(sign | special | float_bits(scaled));
#endif
}

template <class T>
GDN_INLINE T from_float(float x);

template <>
GDN_INLINE float from_float<float>(float x) {
  return x;
}
template <>
GDN_INLINE bf16_t from_float<bf16_t>(float x) {
#if defined(__CUDA_ARCH__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
#endif
}
template <>
GDN_INLINE fp16_t from_float<fp16_t>(float x) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(x))};
#else
  const uint32_t sign = (float_bits(x) >> 16) & 0x8000u;
  const uint32_t magnitude = float_bits(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};   // NaN
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds past 65504: inf
  if (magnitude < 0x38800000u) {                                                 // below 2^-14: fixed point of 2^-24
    const uint32_t fixed = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
    return {static_cast<uint16_t>(sign | fixed)};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
#endif
}

GDN_INLINE int dtype_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// One element of a tensor whose dtype is known only at run time: for inputs that are small beside the state.
GDN_INLINE float load_float(const void* data, DType dtype, int64_t idx) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[idx];
  if (dtype == DType::kBFloat16) return to_float(static_cast<const bf16_t*>(data)[idx]);
  return to_float(static_cast<const fp16_t*>(data)[idx]);
}
GDN_INLINE void store_float(void* data, DType dtype, int64_t idx, float x) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[idx] = x;
  } else if (dtype == DType::kBFloat16) {
    static_cast<bf16_t*>(data)[idx] = from_float<bf16_t>(x);
  } else {
    static_cast<fp16_t*>(data)[idx] = from_float<fp16_t>(x);
  }
}

// What is left of x where a tensor of this dtype passes it on.
GDN_INLINE float rounded_to(float x, DType dtype) {
  if (dtype == DType::kFloat32) return x;
  return dtype == DType::kBFloat16 ? to_float(from_float<bf16_t>(x)) : to_float(from_float<fp16_t>(x));
}

// The stored bits of an element that load_float would widen, and the widening: apart, so that a kernel can have many loads
// in flight before it touches the first value.
GDN_INLINE uint32_t load_bits(const void* data, DType dtype, int64_t idx) {
  return dtype == DType::kFloat32 ? static_cast<const uint32_t*>(data)[idx]
                                  : static_cast<uint32_t>(static_cast<const uint16_t*>(data)[idx]);
}
GDN_INLINE float widen_bits(uint32_t bits, DType dtype) {   // selects, not branches
  const float half = to_float(fp16_t{static_cast<uint16_t>(bits)});
  const float other = bits_float(dtype == DType::kBFloat16 ? bits << 16 : bits);
  return dtype == DType::kFloat16 ? half : other;
}

// Calls f with a value of the storage type, so that a generic lambda can take it from its argument.
template <class Function>
void dispatch_dtype(DType dtype, Function&& f) {
  if (dtype == DType::kFloat32) {
    f(float{});
  } else if (dtype == DType::kBFloat16) {
    f(bf16_t{});
  } else {
    f(fp16_t{});
  }
}

}  // namespace gdn
