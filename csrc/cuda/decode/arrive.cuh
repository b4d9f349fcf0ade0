// SPDX-License-Identifier: Apache-2.0
// stage.cuh's token by asynchronous copies. A wait for loads to registers is a wait for the state's as well, which are in
// flight beside them; a wait for copies is not, so k, q and the scalars are ready before the state is.
#pragma once

#include "../tile/word.cuh"
#include "stage.cuh"

namespace gdn::cuda {
namespace {

// A warp's own shared memory, in floats: k, q [kKeyDim] by residue; StepScalars; k and q as they are stored, one behind the
// other; g and beta, a word each.
template <class Share>
struct TokenSmem {
  static constexpr int kK = 0, kQ = kK + Share::kKeyDim, kScalars = kQ + Share::kKeyDim, kStored = kScalars + 8;
  static constexpr int kGates = kStored + 2 * Share::kKeyDim, kFloats = kGates + 4;
};

// Issues the copies.
template <class Share>
__device__ __forceinline__ void copy_token(const Call& call, const Work& work, int lane, float* smem) {
  using Smem = TokenSmem<Share>;
  const int size = dtype_size(call.dtype);
  const char* const k = token_address(call.k, work.n, 0, work.key_head);
  const char* const q = token_address(call.q, work.n, 0, work.key_head);
  if (call.moves_keys) {
    const int chunks = Share::kKeyDim * size / 16;
    const uint32_t stored = ptx::shared_address(smem + Smem::kStored);
#pragma unroll
    for (int first = 0; first < 2 * Share::kKeyDim * 4 / 16; first += 32) {
      const int chunk = first + lane;
      const char* const gmem = chunk < chunks ? k + 16 * chunk : q + 16 * (chunk - chunks);
      if (chunk < 2 * chunks) ptx::cp_async_16(stored + 16 * chunk, gmem, 16);
    }
  } else {
    uint32_t* const words = reinterpret_cast<uint32_t*>(smem + Smem::kStored);
#pragma unroll 1
    for (int i = lane; i < 2 * Share::kKeyDim; i += 32) {
      const bool is_q = i >= Share::kKeyDim;
      const uint32_t bits = load_bits(is_q ? q : k, call.dtype, is_q ? i - Share::kKeyDim : i);
      if (size == 4) words[i] = bits;
      else reinterpret_cast<uint16_t*>(words)[i] = static_cast<uint16_t>(bits);
    }
  }
  if (lane < 2 && (lane == 0 ? call.g : call.beta).data != nullptr) {
    copy_word(smem + Smem::kGates + lane, token_address(lane == 0 ? call.g : call.beta, work.n, 0, work.head));
  }
}

// What the copies brought, once they are there for all lanes.
template <class Share>
__device__ __forceinline__ void read_token(const Call& call, const Work& work, int lane, const float* smem,
                                           TokenBits<Share>& token) {
  using Smem = TokenSmem<Share>;
  const int size = dtype_size(call.dtype), shift = (lane * size & 2) * 8;   // the word around the lane's element
  const char* const k = reinterpret_cast<const char*>(smem + Smem::kStored) + (lane * size & ~3);
  const char* const q = k + Share::kKeyDim * size;
#pragma unroll
  for (int j = 0; j < Share::kSteps; ++j) {
    token.k[j] = *reinterpret_cast<const uint32_t*>(k + 32 * j * size) >> shift;
    token.q[j] = *reinterpret_cast<const uint32_t*>(q + 32 * j * size) >> shift;
  }
  const float* const gates = smem + Smem::kGates;
  if (call.g.data != nullptr) token.g = bits_of_word(gates[0], token_address(call.g, work.n, 0, work.head));
  if (call.beta.data != nullptr) token.beta = bits_of_word(gates[1], token_address(call.beta, work.n, 0, work.head));
}

}  // namespace
}  // namespace gdn::cuda
