// SPDX-License-Identifier: Apache-2.0
// A warp's 16 columns of V, o and S (rows of S^T): between memory and the fragments of the tensor cores.
#pragma once

#include "../chunk_sm90/range.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/shared.cuh"
#include "../tile/fragment.cuh"

namespace gdn::cuda::chunk_mma {

using chunk_sm90::power_of_two;
using chunk_sm90::State;

// Bytes from a warp's 16 columns of V or o of a chunk, [64 t][16 v], to columns 8 half .. of token t: 8 tokens of a half hit
// 8 different bank groups.
__device__ __forceinline__ uint32_t column_offset(int t, int half) { return t * 32 + ((half ^ (t / 4 % 2)) * 16); }

// The address that a lane gives to ldmatrix or stmatrix, transposed, of tokens 16 b .. 16 b + 15 of it: an operand's block.
__device__ __forceinline__ uint32_t column_block(const uint16_t* smem, int b, int lane) {
  return ptx::shared_address(smem) + column_offset(16 * b + 8 * (lane / 16) + lane % 8, lane / 8 % 2);
}

// V^T as pairs of tokens in the order of operands.
__device__ __forceinline__ void read_values(const uint16_t* smem, int lane, uint32_t (&v)[4][4]) {
#pragma unroll
  for (int b = 0; b < 4; ++b) ptx::ldmatrix_x4_trans(column_block(smem, b, lane), v[b]);
}

// Moves S between the accumulators and one head's state at element `head`, rows `row` and row + 8 of S^T. Any strides:
// lanes of a row and of a column are neighbours, so both layouts move whole 32-byte sectors.
template <class state_t, bool kIsLoad, int kKeyDim>
__device__ __forceinline__ void move_state(const View& view, int64_t head, int64_t row, int lane, State<kKeyDim>& state) {
  // Addresses one after the other: all at once take registers that the state leaves none of.
  state_t* data = static_cast<state_t*>(view.data) + head + row * view.stride[3] + 2 * (lane % 4) * view.stride[2];
  const float factor[2] = {power_of_two(state.exponent[0]), power_of_two(state.exponent[1])};
#pragma unroll
  for (int i = 0; i < kKeyDim / 2; ++i) {
    const int r = i / 2 % 2;
    state_t& element = data[i % 2 * view.stride[2] + 8 * r * view.stride[3]];
    if constexpr (kIsLoad) {
      state.s[i / 32][i % 32] = to_float(element);
    } else {
      element = from_float<state_t>(state.s[i / 32][i % 32] * factor[r]);
    }
    if (i % 4 == 3) data += 8 * view.stride[2];
  }
}

template <bool kIsLoad, int kKeyDim>
__device__ __forceinline__ void move_state(const View& view, int64_t head, int64_t row, int lane, State<kKeyDim>& state) {
  if (view.dtype == DType::kFloat32) {
    move_state<float, kIsLoad>(view, head, row, lane, state);
  } else if (view.dtype == DType::kBFloat16) {
    move_state<bf16_t, kIsLoad>(view, head, row, lane, state);
  } else {
    move_state<fp16_t, kIsLoad>(view, head, row, lane, state);
  }
}

}  // namespace gdn::cuda::chunk_mma
