// SPDX-License-Identifier: Apache-2.0
// The state in registers, and its way to fp16 operands whatever its size.
//
// A row of S^T and V^T is kept times 2^-exponent, a multiple of four plus one that puts the larger of both maxima in
// [2^3, 2^7): with unit keys and beta <= 2, |u| <= 2 (|v| + |S|) stays below 2^16 whatever the chunk holds, and what is 2^17
// below the largest still has full precision. The exponent depends on S at the chunk's start and on the chunk's V only, so
// that a split between chunks keeps the bits. Inf and NaN pass through.
#pragma once

#include "../../common/params.h"
#include "../ptx/half.cuh"
#include "../tile/fragment.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kLowestExponent = -99;   // of a row, one that others have too; smaller ones stay small

// 2^e for e <= 127; below the normal numbers 0.
__device__ __forceinline__ float power_of_two(int e) {
  return e < -126 ? 0.0f : bits_float(static_cast<uint32_t>(e + 127) << 23);
}

// floor(log2 x) for x >= 0, -127 for 0 and subnormals, 128 for inf and NaN.
__device__ __forceinline__ int exponent_of(float x) { return static_cast<int>(float_bits(x) >> 23) - 127; }

// The same of x rounded to the 11 digits of fp16.
__device__ __forceinline__ int exponent_of_rounded(float x) {
  const uint32_t bits = float_bits(x);
  return static_cast<int>((bits + 0xfff + (bits >> 13 & 1)) >> 23) - 127;
}

// The exponent to keep a row at whose largest element is in [2^e, 2^(e + 1)).
__device__ __forceinline__ int row_exponent(int e) { return max(((e + 1024) & ~3) - 1024 - 3, kLowestExponent); }

// What a thread keeps of S^T: rows lane / 4 and lane / 4 + 8 of its warp, true value s 2^exponent.
template <int kKeyDim>
struct State {
  static constexpr int kPanels = kKeyDim / 64;   // of 64 columns, each the sums of products of its own
  float s[kPanels][32];
  int exponent[2];                               // of the rows
  uint32_t operand[kKeyDim / 16][4];             // s at the chunk's start as the left operand of K S and Q S
};

// s -> operand, of one panel; `largest` takes up the largest |element| of both rows, of this thread, as pairs.
template <int kKeyDim>
__device__ __forceinline__ void round_panel(int panel, State<kKeyDim>& state, uint32_t (&largest)[2]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    uint32_t& pair = state.operand[4 * panel + i / 4][i % 4];   // row i % 2
    pair = round_pair_fp16(state.s[panel][2 * i], state.s[panel][2 * i + 1]);
    largest[i % 2] = ptx::max_abs_fp16x2(largest[i % 2], pair);
  }
}

// Whether the largest element of every row of the warp, of S^T as rounded and of V^T, is in [2^3, 2^7) at the rows' exponents;
// largest and of_v, the exponent of the largest |v|, speak of what this thread holds of its two rows. Votes, not shuffles:
// those queue behind everybody's accesses to shared memory.
template <int kKeyDim>
__device__ __forceinline__ bool is_in_range(const uint32_t (&largest)[2], const int (&of_v)[2], const State<kKeyDim>& state) {
  constexpr uint32_t kTooLarge = (7 + 15) << 10, kLargeEnough = (3 + 15) << 10;   // 2^7 and 2^3 as fp16
  bool is_small = true;
  uint32_t reached = 0x11111111u;   // a bit for each row's four lanes
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t largest_of_s = max(largest[r] & 0xffffu, largest[r] >> 16);
    const int largest_of_v = of_v[r] - state.exponent[r];
    is_small = is_small && largest_of_s < kTooLarge && largest_of_v < 7;
    uint32_t lanes = __ballot_sync(
        0xffffffffu, largest_of_s >= kLargeEnough || largest_of_v >= 3 || state.exponent[r] == kLowestExponent);
    lanes |= lanes >> 1;
    reached &= lanes | lanes >> 2;
  }
  return __all_sync(0xffffffffu, is_small) && reached == 0x11111111u;
}

// Brings s to the exponents that S and V ask for. By whole warps.
template <int kKeyDim>
__device__ __forceinline__ void rescale_state(const int (&of_v)[2], State<kKeyDim>& state) {
  bool is_done;
#pragma unroll 1
  do {   // once, unless a row has lost 2^-127 of itself or more: 2^127 is the largest factor
    is_done = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kKeyDim / 4; ++i) {
        const float x = state.s[i / 16][4 * (i / 2 % 8) + 2 * r + i % 2];
        largest = fmaxf(largest, fabsf(x));
      }
      int e = max(exponent_of_rounded(largest) + state.exponent[r], of_v[r]);
      e = max(e, __shfl_xor_sync(0xffffffffu, e, 1));
      e = max(e, __shfl_xor_sync(0xffffffffu, e, 2));
      const int wanted = row_exponent(e), next = max(wanted, state.exponent[r] - 127);
      is_done = is_done && next == wanted;
      const float factor = power_of_two(state.exponent[r] - next);
      state.exponent[r] = next;
#pragma unroll
      for (int i = 0; i < kKeyDim / 4; ++i) state.s[i / 16][4 * (i / 2 % 8) + 2 * r + i % 2] *= factor;
    }
  } while (!__all_sync(0xffffffffu, is_done));
}

// Makes the operand of a chunk, of_v as in is_in_range, the last panel of it (the others are rounded already, `largest` is
// theirs). The exponents of the chunk before are tried first: most chunks keep them, and the largest element of the operand
// that is made anyway shows whether they are the right ones.
template <int kKeyDim>
__device__ __forceinline__ void finish_operand(const int (&of_v)[2], State<kKeyDim>& state, uint32_t (&largest)[2]) {
  constexpr int kPanels = State<kKeyDim>::kPanels;
  round_panel(kPanels - 1, state, largest);
  if (__builtin_expect(!is_in_range(largest, of_v, state), 0)) {
    rescale_state(of_v, state);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) round_panel(panel, state, largest);
  }
}

// Takes s through the decay of a whole chunk: what the chunk's write adds to.
template <int kKeyDim>
__device__ __forceinline__ void decay_state(float decay, State<kKeyDim>& state) {
#pragma unroll
  for (int i = 0; i < kKeyDim / 2; ++i) state.s[i / 32][i % 32] *= decay;
}

// Makes the operand of the first of a run of chunks, from exponents that may not be those that the chunks have.
template <int kKeyDim>
__device__ __forceinline__ void start_operand(const int (&of_v)[2], State<kKeyDim>& state) {
  uint32_t largest[2] = {};   // not asked for
  rescale_state(of_v, state);
#pragma unroll
  for (int panel = 0; panel < State<kKeyDim>::kPanels; ++panel) round_panel(panel, state, largest);
}

}  // namespace gdn::cuda::chunk_sm90
