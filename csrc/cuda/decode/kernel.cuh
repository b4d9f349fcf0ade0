// SPDX-License-Identifier: Apache-2.0
//
// Gated delta rule on short sequences, exact: rule.h's step on a state that is read once and written once.
//     S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q
// Bound by the bytes of S, so all loads of a block's tile are issued before anything else and stay in flight while the
// tokens are staged; enough blocks share a multiprocessor that one's loads hide another's arithmetic.
// Grid    x: sequence (slowest), value head, tile of V (fastest); ragged: one more row of blocks for tokens of no sequence.
// Block   config.cuh's Shape: which rows and columns a thread holds. Columns do not depend on one another.
// Reads   q k [T, Hk, K], v [T, Hv, V], g beta [T, Hv]; S [K, V] once.   Writes   o [T, Hv, V]; S once; what Keeps says.
// Order   the sums of rule.h: same bits as the recurrence, whatever the tile and the layout.
// Needs   K = 32 kSteps; vectors of 16 bytes along the state's contiguous dim; any T (kMostTokens at a time); any arch.
// Files   config (shapes), state (memory <-> registers), stage (tokens -> shared memory), compute (the step).
#pragma once

#include "../ptx/pdl.cuh"
#include "compute.cuh"
#include "stage.cuh"

namespace gdn::cuda {
namespace {

// What leaves the kernel beside o: the state, and nothing of the tokens. Another policy may keep each token's key, decay
// and f, and leave the state alone.
struct KeepState {
  // Where a row's tokens go, looked up once.
  struct Target {};
  __device__ __forceinline__ Target target_of(const Work&, const Span&) const { return {}; }
  // Whether the row's state is written, and whether anybody reads the state after token t.
  __device__ __forceinline__ bool writes_state(const Span&) const { return true; }
  __device__ __forceinline__ bool needs_state_after(const Span&, int64_t /*t*/) const { return true; }
  // Token t of the row is in shared memory: k, q, v [kTile], scalars, as Shape lays them out. Called by all threads.
  template <class Shape>
  __device__ __forceinline__ void keep_token(const Target&, const Work&, int64_t /*t*/, const float* /*smem_token*/) const {}
  // f of a column of the head. Called by one thread a column.
  __device__ __forceinline__ void keep_factor(const Target&, const Work&, int64_t /*t*/, int /*column*/, float /*f*/) const {}
};

// Writes zero for tokens [first, last) of batch row `batch`, the block's head and columns.
template <class Shape>
__device__ void write_zeros(const RuleParams& p, const Work& work, int64_t batch, int64_t first, int64_t last) {
  for (int64_t idx = threadIdx.x; idx < (last - first) * Shape::kTile; idx += Shape::kThreads) {
    const int64_t column = work.column + idx % Shape::kTile;
    if (column < p.dims.V) p.out.store(p.out.offset(batch, first + idx / Shape::kTile, work.head, column), 0.0f);
  }
}

// The row's tokens from `first` on, as many as are in shared memory.
template <class Shape, class Keeps>
__device__ __forceinline__ void run_tokens(const RuleParams& p, const Cut& cut, const Keeps& keeps,
                                           const typename Keeps::Target& target, const Work& work, int64_t first,
                                           const Place<Shape>& place, const float* smem_tokens, float* smem_sums,
                                           Fragment<Shape>& fragment) {
  const Span span = span_of(p, work);
  const int column = work.column + place.first + place.group * place.kColumnStep, count = tokens_from(span, first, cut);
  const bool answers = place.group < Shape::kColumns && column < p.dims.V;
  int64_t out = p.out.offset(span.batch, span.first + first, work.head, column);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const float* const smem_token = smem_tokens + i * Shape::kSmemToken;
    float o, f;
    keeps.template keep_token<Shape>(target, work, first + i, smem_token);
    step<Shape>(smem_token, smem_sums + (i % 2) * (Shape::kSmemSums / 2), place, keeps.needs_state_after(span, first + i),
                fragment, o, f);
    if (answers) {
      p.out.store(out, o);
      keeps.keep_factor(target, work, first + i, column, f);
    }
    out += p.out.stride[1];
  }
}

template <class Shape, class Keeps>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    decode_kernel(const __grid_constant__ RuleParams p, const __grid_constant__ Cut cut,
                  const __grid_constant__ Keeps keeps) {
  extern __shared__ float4 smem[];   // sums [2][kWarpsOfColumn][u, w][kTile], tokens [chunk] of kSmemToken floats
  float* const smem_sums = reinterpret_cast<float*>(smem);
  float* const smem_tokens = smem_sums + Shape::kSmemSums;
  const Work work = work_of_block(cut, blockIdx.x, Shape::kTile);
  const Place<Shape> place(threadIdx.x);
  const int V = static_cast<int>(p.dims.V);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (!takes_row(p, work.n)) return;
  if (work.n == p.dims.N) {   // the row behind the last sequence: tokens outside all of them
    write_zeros<Shape>(p, work, 0, 0, sequence_span(p.cu_seqlens, 0, p.dims.T).first);
    const int64_t end = p.cu_seqlens.at(p.dims.N);
    write_zeros<Shape>(p, work, 0, end < 0 ? 0 : end, p.dims.T);
    return;
  }

  const int64_t slot = slot_of_row(p.slots, work.n, p.initial_state.given() ? p.pool_in : p.pool_out);
  const bool is_padding = p.slots.given() && slot < 0;
  const bool has_state = p.initial_state.given() && !is_padding && p.has_initial_state.at(work.n);
  Packs<Shape> packs;
  load_share<Shape>(p.initial_state, slot, has_state, work, place, V, packs);
  if (is_padding) {
    const Span span = span_of(p, work);
    write_zeros<Shape>(p, work, span.batch, span.first, span.first + span.length);
    return;
  }

  const typename Keeps::Target target = keeps.target_of(work, span_of(p, work));
  // The span is read where it is needed, not kept: the state fills the registers.
  stage_tokens<Shape>(p, cut, work, 0, smem_tokens);
  __syncthreads();   // the tokens are staged
  Fragment<Shape> fragment;
  widen<Shape>(packs, fragment);
  for (int64_t first = 0;;) {
    run_tokens<Shape>(p, cut, keeps, target, work, first, place, smem_tokens, smem_sums, fragment);
    first += cut.chunk;
    if (first >= span_of(p, work).length) break;
    __syncthreads();   // all have read the tokens that the next ones overwrite
    stage_tokens<Shape>(p, cut, work, first, smem_tokens);
    __syncthreads();   // the tokens are staged
  }

  const int64_t out_slot = slot_of_row(p.out_slots.given() ? p.out_slots : p.slots, work.n, p.pool_out);
  if (p.state.given() && out_slot >= 0 && keeps.writes_state(span_of(p, work))) {
    store_share<Shape>(p.state, out_slot, work, place, V, fragment);
  }
}

}  // namespace
}  // namespace gdn::cuda
