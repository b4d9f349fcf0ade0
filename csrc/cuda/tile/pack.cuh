// SPDX-License-Identifier: Apache-2.0
// Neighbouring elements of a tensor moved by one 8- or 16-byte access, and their widening to fp32 and rounding from it.
#pragma once

#include <cstdint>

#include "../../common/view.h"
#include "../ptx/ld_st.cuh"

namespace gdn::cuda {

template <int kBytes>
struct alignas(kBytes) Words {
  uint32_t word[kBytes / 4];
};

template <class io_t>
constexpr int kVector = 16 / static_cast<int>(sizeof(io_t));   // elements of a 16-byte access

template <class io_t, int kCount>
using PackOf = Words<static_cast<int>(sizeof(io_t)) * kCount>;

template <class io_t, int kCount>
GDN_INLINE PackOf<io_t, kCount> load_pack(const io_t* gmem) {
  return *reinterpret_cast<const PackOf<io_t, kCount>*>(gmem);
}

// The same past the L1, in a place of the program that the compiler keeps, where the access has 16 bytes.
template <class io_t, int kCount>
__device__ __forceinline__ PackOf<io_t, kCount> load_pack_streaming(const io_t* gmem) {
  PackOf<io_t, kCount> pack;
  if constexpr (sizeof(pack) == 16) {
    ptx::ld_global_streaming_v4(gmem, pack.word);
  } else {
    pack = load_pack<io_t, kCount>(gmem);
  }
  return pack;
}

template <class io_t, int kCount>
GDN_INLINE void unpack(const PackOf<io_t, kCount>& pack, float* x) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(io_t) == 4) {
      x[i] = bits_float(pack.word[i]);
    } else {
      x[i] = to_float(io_t{static_cast<uint16_t>(pack.word[i / 2] >> (16 * (i % 2)))});
    }
  }
}

// Two 16-bit floats by one conversion instruction, rounded as from_float does; a NaN becomes the canonical one.
__device__ __forceinline__ uint32_t round_pair(float low, float high, bf16_t) {
  const __nv_bfloat162_raw pair = __floats2bfloat162_rn(low, high);
  return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16;
}
__device__ __forceinline__ uint32_t round_pair(float low, float high, fp16_t) {
  const __half2_raw pair = __floats2half2_rn(low, high);
  return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16;
}

template <class io_t, int kCount>
__device__ __forceinline__ PackOf<io_t, kCount> round_to_pack(const float* x) {
  PackOf<io_t, kCount> pack;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(pack) / 4); ++i) {
    if constexpr (sizeof(io_t) == 4) {
      pack.word[i] = float_bits(x[i]);
    } else {
      pack.word[i] = round_pair(x[2 * i], x[2 * i + 1], io_t{});
    }
  }
  return pack;
}

template <class io_t, int kCount>
__device__ __forceinline__ void store_pack(io_t* gmem, const float* x) {
  *reinterpret_cast<PackOf<io_t, kCount>*>(gmem) = round_to_pack<io_t, kCount>(x);
}

// kCount neighbours, by accesses of 16 bytes or, if they are fewer, of one.
template <class io_t, int kCount>
__device__ __forceinline__ void load_dense(const io_t* gmem, float* x) {
  constexpr int kUnit = kCount < kVector<io_t> ? kCount : kVector<io_t>;
#pragma unroll
  for (int i = 0; i < kCount; i += kUnit) unpack<io_t, kUnit>(load_pack<io_t, kUnit>(gmem + i), x + i);
}

// Rows row .. row + kRows of a [rows, kCols] matrix of any dtype and strides, to x [kRows][kCols]. The dtype is
// tested once, not per element.
template <class weight_t, int kRows, int kCols>
__device__ __forceinline__ void load_rows_as(const View& matrix, int64_t row, float* x) {
  constexpr int kBytes = kRows * kCols * static_cast<int>(sizeof(weight_t));
  constexpr int kUnit = kBytes % 16 == 0 ? 16 : 8;
  const weight_t* gmem = static_cast<const weight_t*>(matrix.data) + row * matrix.stride[0];
  if constexpr (kBytes % kUnit == 0) {
    constexpr int kPerUnit = kUnit / static_cast<int>(sizeof(weight_t));
    const bool is_dense = matrix.stride[0] == kCols && (kCols == 1 || matrix.stride[1] == 1);
    if (is_dense && reinterpret_cast<uintptr_t>(gmem) % kUnit == 0) {
#pragma unroll
      for (int i = 0; i < kBytes / kUnit; ++i) {
        unpack<weight_t, kPerUnit>(load_pack<weight_t, kPerUnit>(gmem + i * kPerUnit), x + i * kPerUnit);
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kRows * kCols; ++i) {
    x[i] = to_float(gmem[(i / kCols) * matrix.stride[0] + (i % kCols) * matrix.stride[1]]);
  }
}

template <int kRows, int kCols>
__device__ __forceinline__ void load_rows(const View& matrix, int64_t row, float* x) {
  if (matrix.dtype == DType::kFloat32) {
    load_rows_as<float, kRows, kCols>(matrix, row, x);
  } else if (matrix.dtype == DType::kBFloat16) {
    load_rows_as<bf16_t, kRows, kCols>(matrix, row, x);
  } else {
    load_rows_as<fp16_t, kRows, kCols>(matrix, row, x);
  }
}

// kCount floats of shared memory by the widest accesses. Aligned to as much.
template <int kCount>
__device__ __forceinline__ void load_floats(const float* smem, float* x) {
  constexpr int kWide = kCount % 4 == 0 ? 4 : (kCount % 2 == 0 ? 2 : 1);
#pragma unroll
  for (int i = 0; i < kCount; i += kWide) {
    const Words<4 * kWide> words = *reinterpret_cast<const Words<4 * kWide>*>(smem + i);
#pragma unroll
    for (int e = 0; e < kWide; ++e) x[i + e] = bits_float(words.word[e]);
  }
}
template <int kCount>
__device__ __forceinline__ void store_floats(float* smem, const float* x) {
  constexpr int kWide = kCount % 4 == 0 ? 4 : (kCount % 2 == 0 ? 2 : 1);
#pragma unroll
  for (int i = 0; i < kCount; i += kWide) {
    Words<4 * kWide> words;
#pragma unroll
    for (int e = 0; e < kWide; ++e) words.word[e] = float_bits(x[i + e]);
    *reinterpret_cast<Words<4 * kWide>*>(smem + i) = words;
  }
}

// The same of floats that are kept as bits.
template <int kCount>
__device__ __forceinline__ void store_floats(float* smem, const uint32_t (&word)[kCount]) {
  float x[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = bits_float(word[i]);
  store_floats<kCount>(smem, x);
}

}  // namespace gdn::cuda
