// SPDX-License-Identifier: Apache-2.0
//
// one.cuh's step on a K-first state, a column's rows spread over the warps of a block: exact, one token a sequence.
//     S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q
// Bound by the bytes of S. A warp that holds whole columns reads 64 or 128 bytes of a row; here a block's tile of columns
// is as wide as a warp reads a row, 128 to 256 bytes side by side, and the sums u and w meet in shared memory. Each warp
// stages k and q for itself, while the state flies; one barrier of the block, before its warps' sums are added.
// Grid    a block a piece: sequence (slowest), value head, tile of V (fastest).   Block: tile/share.cuh's Share.
// Reads   q k [Hk, K], v [Hv, V], g beta [Hv]; S [K, V] once.   Writes   o [Hv, V]; S once.
// Order   the sums of rule.h: same bits as the recurrence, whatever the tile.
// Needs   dense rows of one token; K = 32 kSteps; a K-first state, vectors of 16 bytes along V; the elements of a row of
//         q, k, v side by side; sm_80 on.
#pragma once

#include "../ptx/pdl.cuh"
#include "../tile/share.cuh"
#include "arrive.cuh"
#include "keep.cuh"

namespace gdn::cuda {
namespace {

// Shared memory, in floats: a token for each warp; v [kTile]; the sums [warp of a column][u, w][kTile].
template <class Share>
struct SmemOfAcross {
  static constexpr int kV = TokenSmem<Share>::kFloats * Share::kWarps, kSums = kV + Share::kTile;
  static constexpr size_t kBytes = sizeof(float) * (kSums + Share::kWarpsOfColumn * 2 * Share::kTile);

  static_assert(Share::kTile <= Share::kThreads, "a thread stages at most one v");
};

// The sums of S k and S q over the warp's rows, to smem_sums [u, w][kTile]; k and q by residue. One residue after the other,
// so that few partial sums wait.
template <class Share>
__device__ __forceinline__ void sums_of_warp(const float* smem_k, const float* smem_q, const SharePlace<Share>& place,
                                             const Packs<Share>& packs, float* smem_sums) {
  constexpr int kOwned = Share::kOwned, kColumns = Share::kColumns;
  float u[kOwned][kColumns] = {}, w[kOwned][kColumns] = {};
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    float k[Share::kSteps], q[Share::kSteps];
    load_floats<Share::kSteps>(smem_k + Share::kSteps * (kOwned * place.group + i), k);
    load_floats<Share::kSteps>(smem_q + Share::kSteps * (kOwned * place.group + i), q);
#pragma unroll
    for (int j = 0; j < Share::kSteps; ++j) {
      float s[Share::kVector];
      widen_vector<Share>(packs, j * kOwned + i, s);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        u[i][c] = accumulate(s[c], k[j], u[i][c]);
        w[i][c] = accumulate(s[c], q[j], w[i][c]);
      }
    }
    // The levels of the tree that end here.
#pragma unroll
    for (int width = 1; (i + 1) % (2 * width) == 0; width *= 2) {
      const int first = i + 1 - 2 * width;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        u[first][c] = add(u[first][c], u[first + width][c]);
        w[first][c] = add(w[first][c], w[first + width][c]);
      }
    }
  }
#pragma unroll
  for (int width = 1; width < Share::kGroupLanes; width *= 2) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      u[0][c] = add(u[0][c], __shfl_xor_sync(kAllLanes, u[0][c], width * Share::kNeighbour));
      w[0][c] = add(w[0][c], __shfl_xor_sync(kAllLanes, w[0][c], width * Share::kNeighbour));
    }
  }
  if (place.group_lane == 0) {
    store_floats<kColumns>(smem_sums, u[0]);
    store_floats<kColumns>(smem_sums + Share::kTile, w[0]);
  }
}

// The state after the token; k by residue.
template <class Share>
__device__ __forceinline__ void write_rows(char* gmem, int line, const float* smem_k, int group, const Packs<Share>& packs,
                                           float alpha, const float (&f)[Share::kColumns]) {
#pragma unroll
  for (int i = 0; i < Share::kOwned; ++i) {
    float k[Share::kSteps];
    load_floats<Share::kSteps>(smem_k + Share::kSteps * (Share::kOwned * group + i), k);
#pragma unroll
    for (int j = 0; j < Share::kSteps; ++j) {
      float s[Share::kVector];
      uint32_t word[4];
      widen_vector<Share>(packs, j * Share::kOwned + i, s);
#pragma unroll
      for (int c = 0; c < Share::kColumns; ++c) s[c] = write_state(alpha, k[j], f[c], s[c]);
      round_vector<Share>(s, word);
      ptx::st_global_v4(gmem + (kResidues * j + i) * line, word);
    }
  }
}

template <class Share, int kBlocks>
__global__ void __launch_bounds__(Share::kThreads, kBlocks)
    decode_across(const __grid_constant__ Call call, const __grid_constant__ Cut cut, const __grid_constant__ Overlap overlap) {
  extern __shared__ float4 smem_tokens[];   // SmemOfAcross
  constexpr int kColumns = Share::kColumns;
  const Work work = work_of_piece(cut, blockIdx.x, Share::kTile);
  const SharePlace<Share> place(threadIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* const smem = reinterpret_cast<float*>(smem_tokens);
  float* const smem_token = smem + threadIdx.x / 32 * TokenSmem<Share>::kFloats;
  float* const smem_k = smem_token + TokenSmem<Share>::kK;
  float* const smem_q = smem_token + TokenSmem<Share>::kQ;
  float* const smem_v = smem + SmemOfAcross<Share>::kV;
  float* const smem_sums = smem + SmemOfAcross<Share>::kSums;
  const int own = work.column + place.own_column(), columns = call.V - work.column - place.first;
  const bool answers = place.answers() && own < call.V;
  // Before the wait no memory is read but slots, and they only as a hint.
  int slot = call.in.data != nullptr ? work.n : -1, out_slot = call.state.data != nullptr ? work.n : -1;
  if (overlap.prefetches && !call.is_plain && slot >= 0) {
    slot = static_cast<int>(hinted_slot_of_row(call.slots, work.n, call.pool_in));
  }
  char* gmem_in = share_address<Share>(call.in, slot, work, place);
  if (overlap.prefetches && slot >= 0) prefetch_share<Share>(call.in, gmem_in, columns);
  ptx::griddepcontrol_wait();
  if (overlap.opens_early) ptx::griddepcontrol_launch_dependents();
  if (!call.is_plain) {
    if (!find_slots(call, work.n, slot, out_slot)) {   // the whole block
      if (answers) store_float(token_address(call.out, work.n, 0, work.head) + own * call.out_dim, call.out_dtype, 0, 0.0f);
      return;
    }
    gmem_in = share_address<Share>(call.in, slot, work, place);
  }

  // The copies first: the loads of the state then wait for nothing.
  copy_token<Share>(call, work, lane, smem_token);
  const int staged = static_cast<int>(threadIdx.x);
  const bool stages = staged < Share::kTile && work.column + staged < call.V;
  const char* const gmem_v = token_address(call.v, work.n, 0, work.head) + (work.column + staged) * dtype_size(call.dtype);
  if (stages) copy_word(smem_v + staged, gmem_v);
  ptx::cp_async_commit_group();
  Packs<Share> packs = {};
  if (slot >= 0 && columns > 0) load_share<Share, false>(gmem_in, call.in.line, columns, packs);

  ptx::cp_async_wait_group<0>();
  __syncwarp();   // the warp's copies are there
  TokenBits<Share> token = {};
  read_token<Share>(call, work, lane, smem_token, token);
  const StepScalars of_token = stage_token<Share, true>(call, token, lane, smem_k, smem_q);
  if (lane == 0) *reinterpret_cast<StepScalars*>(smem_token + TokenSmem<Share>::kScalars) = of_token;
  if (stages) smem_v[staged] = widen_bits(bits_of_word(smem_v[staged], gmem_v), call.dtype);
  __syncwarp();   // k and q are there
  float* const mine = smem_sums + place.warp_of_column * 2 * Share::kTile + place.first;
  sums_of_warp<Share>(smem_k, smem_q, place, packs, mine);
  // On a full chip not before: the next grid's blocks would take the places of this one's.
  if (!overlap.opens_early) ptx::griddepcontrol_launch_dependents();
  __syncthreads();   // v and all warps' sums are there
  const StepScalars scalars = *reinterpret_cast<const StepScalars*>(smem_token + TokenSmem<Share>::kScalars);
  float u[kColumns], v[kColumns], f[kColumns], own_f = 0.0f;
  sum_of_warps<Share>(smem_sums + place.first, u);
  load_floats<kColumns>(smem_v + place.first, v);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    f[c] = write_factor(scalars.neg_alpha_sk, scalars.beta, scalars.sk, u[c], v[c]);
    own_f = place.group == c ? f[c] : own_f;
  }
  if (out_slot >= 0 && columns > 0) {
    write_rows<Share>(share_address<Share>(call.state, out_slot, work, place), call.state.line, smem_k, place.group, packs,
                      scalars.alpha, f);
  }
  if (answers) {
    float w[1];
    sum_of_warps<Share>(smem_sums + Share::kTile + place.own_column(), w);
    const float o = read_output(scalars.scale_sq, scalars.kq, scalars.alpha, own_f, w[0]);
    store_float(token_address(call.out, work.n, 0, work.head) + own * call.out_dim, call.out_dtype, 0, o);
  }
}

}  // namespace
}  // namespace gdn::cuda
