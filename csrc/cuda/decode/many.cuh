// SPDX-License-Identifier: Apache-2.0
//
// Gated delta rule on a few tokens a sequence, exact: rule.h's step, token by token, on a state that is read once.
//     S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q
// Bound by the bytes of S and by issue slots: a token costs four instructions an element of S, and a third more.
// Grid    a block a piece: sequence (slowest), value head, tile of V (fastest); ragged: one more row of pieces for tokens of
//         no sequence.   Block: config.cuh's Shape; all its lanes stage a chunk of tokens, tokens.cuh.
// Reads   q k [T, Hk, K], v [T, Hv, V], g beta [T, Hv]; S [K, V] once.   Writes   o [T, Hv, V]; what Keeps says.
// Shared  cut.chunk tokens of SmemToken. Barriers: when they are staged, and before the next ones overwrite them. A warp leaves
//         o and f of its columns beside them and writes them out when it is done with the chunk.
// L2      the blocks that start at once ask for their state while the grid before this one drains.
// Order   the sums of rule.h: same bits as the recurrence, whatever the tile and the layout.
// Needs   K = 32 kSteps; vectors of 16 bytes along the state's contiguous dim; q, k, v and out by quads; sm_80 on.
#pragma once

#include "../ptx/pdl.cuh"
#include "compute.cuh"
#include "tokens.cuh"

namespace gdn::cuda {
namespace {

template <class Shape>
constexpr size_t smem_bytes(const Cut& cut) {
  return sizeof(float) * cut.chunk * SmemToken<Shape>::kFloats;
}

// Writes zero to `tokens` tokens of out, from `out` on: a token's `columns` columns each. Rarely called.
template <class Shape>
__device__ __forceinline__ void write_zeros(char* out, int tokens, int columns, int token_stride, int column_stride,
                                            DType dtype) {
#pragma unroll 1
  for (int idx = threadIdx.x; idx < tokens * Shape::kTile; idx += Shape::kThreads) {
    const int column = idx % Shape::kTile, t = idx / Shape::kTile;
    if (column < columns) store_float(out + static_cast<int64_t>(t) * token_stride + column * column_stride, dtype, 0, 0.0f);
  }
}

__device__ __forceinline__ int clamped(int64_t t, int T) { return t < 0 ? 0 : (t > T ? T : static_cast<int>(t)); }

// Fills in the row of sequence work.n. Whether there is something to compute; where not, and the outputs are this launch's,
// writes zeros.
template <class Shape, class Keeps>
__device__ __forceinline__ bool open_row(const Call& call, const Keeps& keeps, const Work& work, Row& row) {
  const int n = work.n;
  const bool is_rest = n == call.N;   // the row behind the last sequence: tokens outside all of them
  const Span span = is_rest ? Span{} : sequence_span(call.cu_seqlens, n, call.T);
  row.origin = call.cu_seqlens.given() ? static_cast<int>(span.first) : n;
  row.length = static_cast<int>(span.length);
  if (row.length < call.rows.min_length || row.length > call.rows.max_length) return false;
  if (!is_rest && keeps.find_slots(call, n, row)) return true;
  int first = 0, last = row.length;   // counted from the row's first token
#pragma unroll 1
  for (int part = 0; part < (is_rest ? 2 : 1); ++part) {
    if (is_rest) {   // before the first sequence, behind the last
      first = part == 0 ? 0 : clamped(call.cu_seqlens.at(n), call.T);
      last = part == 0 ? clamped(call.cu_seqlens.at(0), call.T) : call.T;
    }
    write_zeros<Shape>(token_address(call.out, row.origin, first, work.head) + work.column * call.out_dim, last - first,
                       call.V - work.column, call.out.token, call.out_dim, call.out_dtype);
  }
  return false;
}

// The sums of S * x over the lane's rows, of its columns; x [kKeyDim] in shared memory.
template <class Shape>
__device__ __forceinline__ void sum_fragment(const float* smem_x, const Place<Shape>& place, const Fragment<Shape>& fragment,
                                             float (&sum)[Shape::kColumns]) {
  constexpr int kOwned = Shape::kOwned, kColumns = Shape::kColumns;
  float part[kOwned][kColumns] = {};
#pragma unroll
  for (int j = 0; j < Shape::kSteps; ++j) {
    float x[kOwned];
    load_floats<kOwned>(smem_x + kResidues * j + kOwned * place.group, x);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) part[i][c] = accumulate(fragment.s[j][i][c], x[i], part[i][c]);
    }
  }
  sum_over_owned<Shape, kColumns>(part);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sum[c] = part[0][c];
}

template <class Shape>
__device__ __forceinline__ void write_fragment(const float* smem_k, const Place<Shape>& place, float alpha,
                                               const float (&f)[Shape::kColumns], Fragment<Shape>& fragment) {
#pragma unroll
  for (int j = 0; j < Shape::kSteps; ++j) {
    float k[Shape::kOwned];
    load_floats<Shape::kOwned>(smem_k + kResidues * j + Shape::kOwned * place.group, k);
#pragma unroll
    for (int i = 0; i < Shape::kOwned; ++i) {
#pragma unroll
      for (int c = 0; c < Shape::kColumns; ++c) {
        fragment.s[j][i][c] = write_state(alpha, k[i], f[c], fragment.s[j][i][c]);
      }
    }
  }
}

// One token; leaves each lane's o or f of its own columns in shared memory. kWrites: somebody reads the state behind it.
template <bool kWrites, class Shape>
__device__ __forceinline__ void step(float* smem_token, const Place<Shape>& place, Fragment<Shape>& fragment) {
  using Token = SmemToken<Shape>;
  constexpr int kLeft = Shape::kLeft;
  float u[Shape::kColumns], w[Shape::kColumns], f[Shape::kColumns], left[kLeft], v[kLeft], own_o[kLeft], own_f[kLeft];
  const StepScalars scalars = *reinterpret_cast<const StepScalars*>(smem_token + Token::kScalars);
#pragma unroll
  for (int i = 0; i < kLeft; ++i) v[i] = smem_token[Token::kV + place.own_column() + i * place.kColumnStep];
  sum_fragment<Shape>(smem_token, place, fragment, u);   // one after the other: half the partial sums in registers
  sum_fragment<Shape>(smem_token + Token::kQ, place, fragment, w);
  deal_sums<Shape>(place, u, w, left);
  finish_sums<Shape>(place, scalars, left, v, f, own_o, own_f);
  if constexpr (kWrites) write_fragment<Shape>(smem_token, place, scalars.alpha, f, fragment);
  if (!place.is_first_copy()) return;
  float* const smem_result = smem_token + (place.has_w() ? Token::kOut : Token::kF) + place.own_column();
#pragma unroll
  for (int i = 0; i < kLeft; ++i) smem_result[i * place.kColumnStep] = place.has_w() ? own_o[i] : own_f[i];
}

template <class Shape, class Keeps>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    decode_many(const __grid_constant__ Call call, const __grid_constant__ Cut cut, const __grid_constant__ Keeps keeps) {
  extern __shared__ float4 smem_tokens[];
  using Token = SmemToken<Shape>;
  float* const smem = reinterpret_cast<float*>(smem_tokens);
  const Work work = work_of_piece(cut, blockIdx.x, Shape::kTile);
  const Place<Shape> place(threadIdx.x);
  if (blockIdx.x < cut.first_wave) prefetch_piece<Shape>(call, cut, blockIdx.x);
  ptx::griddepcontrol_wait();   // before any memory is read
  Row row;
  if (!open_row<Shape>(call, keeps, work, row)) return;
  const int columns = call.V - work.column - place.first;
  Packs<Shape> packs;
  load_share<Shape, true>(share_address<Shape>(call.in, row.slot, work, place), call.in.line, row.slot >= 0 ? columns : 0,
                          packs);
  ptx::griddepcontrol_launch_dependents();
  const typename Keeps::Target target = keeps.target_of(work, row);
  int first = 0, count = row.length < cut.chunk ? row.length : cut.chunk;
  stage_tokens<Shape>(call, keeps, target, work, row, first, count, smem);
  __syncthreads();   // the tokens are there
  Fragment<Shape> fragment;
  widen<Shape>(packs, fragment);
#pragma unroll 1
  while (true) {
    float* smem_token = smem;
#pragma unroll 1
    for (int t = first; t < first + count; ++t) {
      if (keeps.needs_state_after(row, t)) step<true, Shape>(smem_token, place, fragment);
      else step<false, Shape>(smem_token, place, fragment);
      keeps.template keep_state<Shape>(target, work, t, place, columns, fragment);
      smem_token += Token::kFloats;
    }
    write_results<Shape>(call, keeps, target, work, row, first, count, smem);
    first += count;
    if (first >= row.length) break;
    count = row.length - first < cut.chunk ? row.length - first : cut.chunk;
    __syncthreads();   // all have read the tokens that the next ones overwrite
    stage_tokens<Shape>(call, keeps, target, work, row, first, count, smem);
    __syncthreads();   // the tokens are there
  }
  if (row.out_slot >= 0) {
    store_share<Shape>(share_address<Shape>(call.state, row.out_slot, work, place), call.state.line, columns, fragment);
  }
}

}  // namespace
}  // namespace gdn::cuda
