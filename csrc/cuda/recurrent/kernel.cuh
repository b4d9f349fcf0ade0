// SPDX-License-Identifier: Apache-2.0
//
// Gated delta rule, token by token, exact: rule.h's step and nothing else.
//     S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q
// Grid    x: sequence (slowest), group of value heads that share a key head, tile of V (fastest).
// Block   Computing warps first. A lane holds kColumns columns of S for the whole sequence, in registers: the same column of
//         kColumns value heads where they share a key head (kColumns 1 to 3), or four neighbouring columns of one head (4).
//         Lanes = 8 row groups x 4 column groups (fastest). A lane owns four adjacent residues, rows 32 j + 4 r + i, so the
//         residue sums of rule.h are a chain of kSteps fma in the lane, two levels of the tree are in it and three are
//         exchanges between lanes. Columns do not depend on one another.
//         Staging warps behind them: tokens to shared memory as fp32, with their scalars, and o from shared memory to
//         global.
// Reads   q k [T, Hk, K], v [T, Hv, V], g beta [T, Hv]; S [K, V] once.   Writes   o [T, Hv, V], S once; checkpoints of S where
//         the cut keeps them.
// Chunks  Three lie in shared memory: while chunk c is computed and the last o of chunk c - 1 still under way, the staging
//         warps write out chunk c - 2 and put chunk c + 1 in its place. One meeting of all warps a chunk; a computing warp
//         comes to it in the middle of its stream of instructions.
// Needs   K <= 32 kSteps (rows past K are zeros), any V, any strides; any arch.
// Files   config (shapes), state (memory <-> registers), stage and compute (the two roles); here they are wired.
#pragma once

#include "compute.cuh"
#include "stage.cuh"

namespace gdn::cuda {
namespace {

// x, which all lanes have, in a form that the compiler sees is the same for all: loops and branches on it keep the warp
// together, and the shuffles in them need no second version for a warp that has come apart.
__device__ __forceinline__ int64_t same_in_warp(int64_t x) {
  const int low = __shfl_sync(0xffffffffu, static_cast<int>(x), 0);
  const int high = __shfl_sync(0xffffffffu, static_cast<int>(x >> 32), 0);
  return static_cast<int64_t>(high) << 32 | static_cast<uint32_t>(low);
}

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

// Writes the state after `done` tokens to its row of checkpoints.
template <class Cut>
__device__ __forceinline__ void keep_checkpoint(const RuleParams& p, const Work& work, bool in_quads, int row_group,
                                                int64_t column, int64_t done, Fragment<Cut>& fragment) {
  const int64_t row = p.checkpoint_row(work.n, done);
  if (row < 0) return;
  const Columns columns = columns_of_lane<Cut>(p.checkpoints, row, work.head, column, p.dims.V);
  move_state<false>(p.checkpoints, columns, in_quads, static_cast<int>(p.dims.K), row_group, fragment);
}

template <class Cut>
__global__ void __launch_bounds__(32 * (kMaxComputing + kMaxStaging), Cut::kBlocksOfSm)
    recurrent_kernel(const __grid_constant__ RuleParams p, const __grid_constant__ Tiling tiling,
                     const __grid_constant__ InQuads in_quads) {
  extern __shared__ float4 smem[];   // [kRing][chunk] tokens of TokenLayout and an unused one
  const Work work = work_of_block(p, tiling);
  if (!takes_row(p, work.n)) return;
  if (work.n == p.dims.N) {   // the row behind the last sequence: tokens outside all of them
    write_zeros(p, tiling, work, 0, 0, sequence_span(p.cu_seqlens, 0, p.dims.T).first);
    const int64_t end = p.cu_seqlens.at(p.dims.N);
    write_zeros(p, tiling, work, 0, end < 0 ? 0 : end, p.dims.T);
    return;
  }
  Span span = sequence_span(p.cu_seqlens, work.n, p.dims.T);
  span.length = same_in_warp(span.length);
  const int64_t slot = same_in_warp(slot_of_row(p.slots, work.n, p.initial_state.given() ? p.pool_in : p.pool_out));
  if (p.slots.given() && slot < 0) {
    write_zeros(p, tiling, work, span.batch, span.first, span.first + span.length);
    return;
  }

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, K = static_cast<int>(p.dims.K);
  float* const smem_tokens = reinterpret_cast<float*>(smem);
  if (warp >= tiling.tile_warps) {
    const int stager = warp - tiling.tile_warps;
    if (p.q.dtype == DType::kFloat32) {
      run_staging<float, Cut::kSteps>(p, tiling, in_quads, work, span, stager, lane, smem_tokens);
    } else if (p.q.dtype == DType::kBFloat16) {
      run_staging<bf16_t, Cut::kSteps>(p, tiling, in_quads, work, span, stager, lane, smem_tokens);
    } else {
      run_staging<fp16_t, Cut::kSteps>(p, tiling, in_quads, work, span, stager, lane, smem_tokens);
    }
    return;
  }
  const LaneRole<Cut> role = role_of_lane<Cut>(lane);
  const int row_group = lane / kColumnGroups;
  const int column_in_tile = (warp * kColumnGroups + lane % kColumnGroups) * Cut::kColumnsOfHead;
  const int64_t column = work.column + column_in_tile;

  Fragment<Cut> fragment = {};
  if (p.initial_state.given() && p.has_initial_state.at(work.n)) {
    const Columns columns = columns_of_lane<Cut>(p.initial_state, slot, work.head, column, p.dims.V);
    move_state<true>(p.initial_state, columns, in_quads.initial_state, K, row_group, fragment);
  }
  if (span.length > 0) {
    const LaneSource source = source_of_lane(role, tiling, row_group, column_in_tile, smem_tokens);
    run_computing(tiling, span.length, source, role, fragment, [&](int64_t done) {
      if (done % p.checkpoint_every == 0) {
        keep_checkpoint(p, work, in_quads.checkpoints, row_group, column, done, fragment);
      }
    });
  }

  const int64_t out_slot = slot_of_row(p.out_slots.given() ? p.out_slots : p.slots, work.n, p.pool_out);
  if (p.state.given() && out_slot >= 0) {
    const Columns columns = columns_of_lane<Cut>(p.state, out_slot, work.head, column, p.dims.V);
    move_state<false>(p.state, columns, in_quads.state, K, row_group, fragment);
  }
}

}  // namespace
}  // namespace gdn::cuda
