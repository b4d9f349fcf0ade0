// SPDX-License-Identifier: Apache-2.0
//
// Gated delta rule, token by token, exact: rule.h's step and nothing else.
//     S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q
// Grid    x: sequence (slowest), group of value heads that share a key head, tile of V (fastest).
// Block   Computing warps first. A lane holds kColumns columns of S for the whole sequence, in registers: the same column of
//         kColumns value heads where they share a key head (kColumns 1 to 3), or four neighbouring columns of one head (4).
//         Lanes = 8 residue groups x 4 column groups (fastest). A lane owns rows 32 j + 4 r .. + 3 of its columns, so the
//         residue sums of rule.h are a chain of kSteps fma in the lane, two levels of the tree in it, three by shuffles.
//         Columns do not depend on one another.
//         Staging warps behind them: a token at a time to shared memory as fp32, with its scalars (lane = residue for the
//         sums k k, q q and k q), and o from shared memory to global.
// Reads   q k [T, Hk, K], v [T, Hv, V], g beta [T, Hv]; S [K, V] once.   Writes   o [T, Hv, V], S once.
// Chunks  Two halves of shared memory take turns: chunk c is computed in one while the staging warps write out chunk c - 1
//         from the other and fill it with chunk c + 1. One __syncthreads a chunk, joined by all warps.
// Needs   K <= 32 kSteps (rows past K are zeros), any V, any strides; any arch.
// Files   config (shapes), state (memory <-> registers), stage and compute (the two roles); here they are wired.
#pragma once

#include "compute.cuh"
#include "stage.cuh"

namespace gdn::cuda {
namespace {

// Writes zero for tokens [first, last) of batch row `batch`, the block's heads and columns.
__device__ void write_zeros(const RuleParams& p, const Tiling& tiling, const Work& work, int64_t batch, int64_t first,
                            int64_t last) {
  const int values = tiling.heads * tiling.tile;
  for (int64_t idx = threadIdx.x; idx < (last - first) * values; idx += blockDim.x) {
    const int64_t time = first + idx / values, head = work.head + idx % values / tiling.tile;
    const int64_t column = work.column + idx % tiling.tile;
    if (column < p.dims.V) p.out.store(p.out.offset(batch, time, head, column), 0.0f);
  }
}

// quads: bit 0, the state read moves four elements at a time; bit 1, the state written.
template <int kSteps, int kColumns>
__global__ void __launch_bounds__(32 * (kMaxComputing + kMaxStaging))
    recurrent_kernel(const __grid_constant__ RuleParams p, const __grid_constant__ Tiling tiling,
                     const __grid_constant__ int quads) {
  extern __shared__ float4 smem[];   // [2][chunk] tokens of token_layout
  const Work work = work_of_block(p, tiling);
  if (!takes_row(p, work.n)) return;
  if (work.n == p.dims.N) {   // the row behind the last sequence: tokens outside all of them
    write_zeros(p, tiling, work, 0, 0, sequence_span(p.cu_seqlens, 0, p.dims.T).first);
    const int64_t end = p.cu_seqlens.at(p.dims.N);
    write_zeros(p, tiling, work, 0, end < 0 ? 0 : end, p.dims.T);
    return;
  }
  const Span span = sequence_span(p.cu_seqlens, work.n, p.dims.T);
  const int64_t slot = slot_of_row(p.slots, work.n, p.initial_state.given() ? p.pool_in : p.pool_out);
  if (p.slots.given() && slot < 0) {
    write_zeros(p, tiling, work, span.batch, span.first, span.first + span.length);
    return;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, K = static_cast<int>(p.dims.K);
  const TokenLayout layout = token_layout(tiling, 32 * kSteps);
  float* const smem_tokens = reinterpret_cast<float*>(smem);
  if (warp >= tiling.tile_warps) {
    run_staging<kSteps>(p, tiling, work, span, layout, warp - tiling.tile_warps, lane, smem_tokens);
    return;
  }
  constexpr int kColumnsOfHead = Columns<kColumns>::kOfHeads ? 1 : kColumns;
  const int row_group = lane / kColumnGroups;
  const int column_in_tile = (warp * kColumnGroups + lane % kColumnGroups) * kColumnsOfHead;
  const int64_t column = work.column + column_in_tile;

  Fragment<kSteps, kColumns> fragment = {};
  if (p.initial_state.given() && p.has_initial_state.at(work.n)) {
    const auto columns = columns_of_lane<kColumns>(p.initial_state, slot, work.head, column, p.dims.V);
    move_state<true>(p.initial_state, columns, quads & 1, K, row_group, fragment);
  }
  const LaneSource source{smem_tokens + kRowsPerGroup * row_group, smem_tokens + layout.scalars,
                          smem_tokens + layout.v + column_in_tile, kColumnsOfHead == 1 ? tiling.tile : 1};
  run_computing<kSteps, kColumns>(tiling, layout, span.length, source, row_group, fragment);

  const int64_t out_slot = slot_of_row(p.out_slots.given() ? p.out_slots : p.slots, work.n, p.pool_out);
  if (p.state.given() && out_slot >= 0) {
    const auto columns = columns_of_lane<kColumns>(p.state, out_slot, work.head, column, p.dims.V);
    move_state<false>(p.state, columns, quads & 2, K, row_group, fragment);
  }
}

}  // namespace
}  // namespace gdn::cuda
