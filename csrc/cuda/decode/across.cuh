// SPDX-License-Identifier: Apache-2.0
//
// one.cuh's step on a K-first state, a column's rows spread over the warps of a block: exact, one token a sequence.
//     S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q
// Bound by the bytes of S. A warp that holds whole columns reads 64 or 128 bytes of a row; here a block's tile of columns
// is as wide as a warp reads a row, 128 to 256 bytes side by side, and the sums u and w meet in shared memory. Each warp
// stages k and q for itself; one barrier of the block, before its warps' sums are added.
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

#ifdef GDN_JOINT
#define GDN_BY_RESIDUE true
#else
#define GDN_BY_RESIDUE false
#endif
namespace gdn::cuda {
namespace {

// Shared memory, in floats: the token; v [kTile]; the sums [warp of a column][u, w][kTile].
template <class Share>
struct SmemOfAcross {
#ifdef GDN_WARP
  static constexpr int kV = TokenSmem<Share>::kFloats * Share::kWarps,
#else
  static constexpr int kV = TokenSmem<Share>::kFloats,
#endif
       kSums = kV + Share::kTile;
  static constexpr size_t kBytes = sizeof(float) * (kSums + Share::kWarpsOfColumn * 2 * Share::kTile);

  static_assert(Share::kTile <= Share::kThreads, "a thread stages at most one v");
};

// The sums of S * x over the warp's rows, to smem_sums: the lane's columns of [kTile].
template <class Share>
__device__ __forceinline__ void sum_of_warp(const float* smem_x, const SharePlace<Share>& place, const Packs<Share>& packs,
                                            float* smem_sums) {
  float sum[Share::kColumns];
  sum_packs<Share>(smem_x, place.group, packs, sum);
#pragma unroll
  for (int width = 1; width < Share::kGroupLanes; width *= 2) {
#pragma unroll
    for (int c = 0; c < Share::kColumns; ++c) {
      sum[c] = add(sum[c], __shfl_xor_sync(kAllLanes, sum[c], width * Share::kNeighbour));
    }
  }
  if (place.group_lane == 0) store_floats<Share::kColumns>(smem_sums, sum);
}

#ifdef GDN_JOINT
// The sums of S k and S q over the warp's rows, to smem_sums [u, w][kTile]. One residue after the other, so that few partial
// sums wait.
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

// The state after the token, residue by residue.
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
#endif

template <class Share, int kBlocks>
__global__ void __launch_bounds__(Share::kThreads, kBlocks)
    decode_across(const __grid_constant__ Call call, const __grid_constant__ Cut cut, const __grid_constant__ Overlap overlap) {
  extern __shared__ float4 smem_tokens[];   // SmemOfAcross
  constexpr int kColumns = Share::kColumns;
  const Work work = work_of_piece(cut, blockIdx.x, Share::kTile);
  const SharePlace<Share> place(threadIdx.x);
  float* const smem = reinterpret_cast<float*>(smem_tokens);
#ifdef GDN_WARP
  float* const token = smem + threadIdx.x / 32 * TokenSmem<Share>::kFloats;
#else
  float* const token = smem;
#endif
  const float* const smem_k = token + TokenSmem<Share>::kK;
  float* const smem_v = smem + SmemOfAcross<Share>::kV;
  float* const smem_sums = smem + SmemOfAcross<Share>::kSums;
  const int own = work.column + place.own_column(), columns = call.V - work.column - place.first;
  const bool answers = place.answers() && own < call.V;
#ifdef GDN_SMID
  if (threadIdx.x == 0) note_sm(cut.first_wave);
#endif
  // Before the wait no memory is read but slots, and they only as a hint.
  int slot = call.in.data != nullptr ? work.n : -1, out_slot = call.state.data != nullptr ? work.n : -1;
  if (overlap.prefetches && !call.is_plain && slot >= 0) {
    slot = static_cast<int>(hinted_slot_of_row(call.slots, work.n, call.pool_in));
  }
  char* gmem_in = share_address<Share>(call.in, slot, work, place);
  if (overlap.prefetches && slot >= 0) prefetch_share<Share>(call.in, gmem_in, columns);
  ptx::griddepcontrol_wait();
  if (overlap.opens == Opens::kAtOnce) ptx::griddepcontrol_launch_dependents();
  if (!call.is_plain) {
    if (!find_slots(call, work.n, slot, out_slot)) {   // the whole block
      if (answers) store_float(token_address(call.out, work.n, 0, work.head) + own * call.out_dim, call.out_dtype, 0, 0.0f);
      return;
    }
    gmem_in = share_address<Share>(call.in, slot, work, place);
  }

  // The first warp copies k, q and the gates, the last threads a v each.
  const int staged = static_cast<int>(threadIdx.x) - (Share::kThreads - Share::kTile);
  const char* const gmem_v = token_address(call.v, work.n, 0, work.head) + (work.column + staged) * dtype_size(call.dtype);
#ifdef GDN_WARP
  copy_token<Share>(call, work, token);
#else
  if (threadIdx.x < 32) copy_token<Share>(call, work, smem);
#endif
  if (staged >= 0 && work.column + staged < call.V) copy_word(smem_v + staged, gmem_v);
  ptx::cp_async_commit_group();
  Packs<Share> packs;
  load_share<Share, false>(gmem_in, call.in.line, slot >= 0 ? columns : 0, packs);

  ptx::cp_async_wait_group<0>();
  __syncwarp();
  if (staged >= 0) smem_v[staged] = widen_bits(bits_of_word(smem_v[staged], gmem_v), call.dtype);
#ifdef GDN_WARP
  stage_token<Share, GDN_BY_RESIDUE>(call, work, token);
  __syncwarp();
#else
  if (threadIdx.x < 32) stage_token<Share, GDN_BY_RESIDUE>(call, work, smem);
  __syncthreads();   // k, q, v and the scalars are there
#endif
  float u[kColumns], w[kColumns], f[kColumns], own_f = 0.0f;
  float* const mine = smem_sums + place.warp_of_column * 2 * Share::kTile + place.first;
#ifdef GDN_JOINT
  sums_of_warp<Share>(smem_k, token + TokenSmem<Share>::kQ, place, packs, mine);
#else
  sum_of_warp<Share>(smem_k, place, packs, mine);
  sum_of_warp<Share>(token + TokenSmem<Share>::kQ, place, packs, mine + Share::kTile);
#endif
  // On a full chip not before: the next grid's blocks would take the places of this one's.
  if (overlap.opens == Opens::kAfterSums) ptx::griddepcontrol_launch_dependents();
  __syncthreads();   // v and all warps' sums are there
  const StepScalars scalars = *reinterpret_cast<const StepScalars*>(token + TokenSmem<Share>::kScalars);
  float v[kColumns];
  sum_of_warps<Share>(smem_sums + place.first, u);
  load_floats<kColumns>(smem_v + place.first, v);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    f[c] = write_factor(scalars.neg_alpha_sk, scalars.beta, scalars.sk, u[c], v[c]);
    own_f = place.group == c ? f[c] : own_f;
  }
  if (out_slot >= 0) {
#ifdef GDN_JOINT
    if (columns > 0) write_rows<Share>(share_address<Share>(call.state, out_slot, work, place), call.state.line, smem_k, place.group, packs, scalars.alpha, f);
#else
    write_packs<Share>(share_address<Share>(call.state, out_slot, work, place), call.state.line, columns, smem_k, place.group,
                       packs, scalars.alpha, f);
#endif
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
