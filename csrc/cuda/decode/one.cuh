// SPDX-License-Identifier: Apache-2.0
//
// Gated delta rule on one token a sequence, exact: rule.h's step on a V-first state (K-first: across.cuh) that is read once and
// written once.
//     S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q
// Bound by the bytes of S. Its loads come first; each warp stages k and q for itself and all sums stay in a warp, so that
// there is no barrier of the block.
// Grid    a block a piece: sequence (slowest), value head, tile of V (fastest).   Block: config.cuh's Shape.
// Reads   q k [Hk, K], v [Hv, V], g beta [Hv]; S [K, V] once.   Writes   o [Hv, V]; S once.
// Order   the sums of rule.h: same bits as the recurrence, whatever the tile.
// Needs   dense rows of one token; K = 32 kSteps; vectors of 16 bytes along the state's contiguous dim; the elements of a
//         row of q, k, v side by side; sm_80 on.
#pragma once

#include "../ptx/pdl.cuh"
#include "keep.cuh"
#include "stage.cuh"

namespace gdn::cuda {
namespace {

// o of a lane's own columns, from `column` on.
template <class Shape>
__device__ __forceinline__ void write_own(const Call& call, const Work& work, int column, bool answers,
                                          const float (&o)[Shape::kLeft]) {
  char* const out = token_address(call.out, work.n, 0, work.head) + column * call.out_dim;
#pragma unroll
  for (int i = 0; i < Shape::kLeft; ++i) {
    const int step = i * Place<Shape>::kColumnStep;
    if (answers && column + step < call.V) store_float(out + step * call.out_dim, call.out_dtype, 0, o[i]);
  }
}

template <class Shape>
constexpr size_t kBytesOfOne = sizeof(float) * Shape::kWarps * 2 * Shape::kKeyDim;

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    decode_one(const __grid_constant__ Call call, const __grid_constant__ Cut cut, const __grid_constant__ Overlap overlap) {
  extern __shared__ float4 smem_tokens[];   // k, q [kKeyDim]: a copy for each warp, 4 KB for four
  constexpr int kLeft = Shape::kLeft;
  const Work work = work_of_piece(cut, blockIdx.x, Shape::kTile);
  const Place<Shape> place(threadIdx.x);
  float* const smem_k = reinterpret_cast<float*>(smem_tokens) + threadIdx.x / 32 * (2 * Shape::kKeyDim);
  float* const smem_q = smem_k + Shape::kKeyDim;
  const int own = work.column + place.own_column();
  const bool answers = place.has_w() && place.is_first_copy();
  const int columns = call.V - work.column - place.first;
  // Before the wait no memory is read but slots, and they only as a hint.
  int slot = call.in.data != nullptr ? work.n : -1, out_slot = call.state.data != nullptr ? work.n : -1;
  if (overlap.prefetches && !call.is_plain && slot >= 0) {
    slot = static_cast<int>(hinted_slot_of_row(call.slots, work.n, call.pool_in));
  }
  char* gmem_in = share_address<Shape>(call.in, slot, work, place);
  if (overlap.prefetches && slot >= 0) prefetch_share<Shape>(call.in, gmem_in, columns);
  ptx::griddepcontrol_wait();
  if (overlap.opens_early) ptx::griddepcontrol_launch_dependents();
  if (!call.is_plain) {
    if (!find_slots(call, work.n, slot, out_slot)) {
      const float zeros[kLeft] = {};
      write_own<Shape>(call, work, own, answers, zeros);
      return;
    }
    gmem_in = share_address<Shape>(call.in, slot, work, place);
  }

  Packs<Shape> packs;
  TokenBits<Shape> token = {};
  load_share<Shape, false>(gmem_in, call.in.line, slot >= 0 ? columns : 0, packs);
  load_token<Shape>(call, work, work.n, 0, threadIdx.x % 32, token);
  const char* const gmem_v = token_address(call.v, work.n, 0, work.head);
  uint32_t v_bits[kLeft];
#pragma unroll
  for (int i = 0; i < kLeft; ++i) {
    const int column = own + i * place.kColumnStep;
    v_bits[i] = load_bits(gmem_v, call.dtype, column < call.V ? column : 0);
  }

  const StepScalars scalars = stage_token<Shape>(call, token, threadIdx.x % 32, smem_k, smem_q);
  float v[kLeft];
#pragma unroll
  for (int i = 0; i < kLeft; ++i) v[i] = widen_bits(v_bits[i], call.dtype);
  __syncwarp();   // k and q are there
  float u[Shape::kColumns], w[Shape::kColumns], f[Shape::kColumns], left[kLeft], own_o[kLeft], own_f[kLeft];
  sum_packs<Shape>(smem_k, place.group, packs, u);
  sum_packs<Shape>(smem_q, place.group, packs, w);
  // On a full chip not before: the next grid's blocks would take the places of this one's.
  if (!overlap.opens_early) ptx::griddepcontrol_launch_dependents();
  deal_sums<Shape>(place, u, w, left);
  finish_sums<Shape>(place, scalars, left, v, f, own_o, own_f);
  if (out_slot >= 0) {
    write_packs<Shape>(share_address<Shape>(call.state, out_slot, work, place), call.state.line, columns, smem_k,
                       place.group, packs, scalars.alpha, f);
  }
  write_own<Shape>(call, work, own, answers, own_o);
}

}  // namespace
}  // namespace gdn::cuda
