// SPDX-License-Identifier: Apache-2.0
//
// Gated delta rule on short sequences, exact: rule.h's step on a state that is read once and written once.
//     S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q
// Bound by the bytes of S, so a piece's loads are issued before anything else: they fly while its tokens are staged and
// while the block still computes the piece before.
// Grid    walks the pieces: sequence (slowest), value head, tile of V (fastest); ragged: one more row of pieces for tokens
//         of no sequence. 16-bit states: as many blocks as fit on the chip at once, which walk; fp32: a block a piece.
// Block   config.cuh's Shape: which rows and columns a thread holds. Columns do not depend on one another.
// Reads   q k [T, Hk, K], v [T, Hv, V], g beta [T, Hv]; S [K, V] once.   Writes   o [T, Hv, V]; S once; what Keeps says.
// Order   the sums of rule.h: same bits as the recurrence, whatever the tile and the layout.
// Needs   K = 32 kSteps; vectors of 16 bytes along the state's contiguous dim; q, k, v with neighbouring elements; any T
//         (a warp's each at a time); sm_80 on.
// Code    one copy of each step, in one loop: a kernel of more than 32 KB runs at a third of the speed.
// Files   config (shapes, pieces), state (memory <-> registers), stage (tokens -> shared memory), compute (the step).
#pragma once

#include "../ptx/pdl.cuh"
#include "compute.cuh"
#include "stage.cuh"

namespace gdn::cuda {
namespace {

// What leaves the kernel beside o: the state, and nothing of the tokens. Another policy may keep each token's key, decay
// and f, and leave the state alone.
struct KeepState {
  // Where a row's tokens go, looked up once a piece.
  struct Target {};
  __device__ __forceinline__ Target target_of(const Work&, const Span&) const { return {}; }
  // Whether the row's state is written, and whether anybody reads the state after token t.
  __device__ __forceinline__ bool writes_state(const Span&) const { return true; }
  __device__ __forceinline__ bool needs_state_after(const Span&, int /*t*/) const { return true; }
  // Token t of the row is in shared memory: k, q, v [kTile], scalars, as Shape lays them out. Called by all threads.
  template <class Shape>
  __device__ __forceinline__ void keep_token(const Target&, const Work&, int /*t*/, const float* /*smem_token*/) const {}
  // f of a column of the head. Called by one thread a column.
  __device__ __forceinline__ void keep_factor(const Target&, const Work&, int /*t*/, int /*column*/, float /*f*/) const {}
};

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

// Fills in piece `idx` and the slot it reads (-1: it starts from zero). Whether there is something to compute; where not,
// and the outputs are this launch's, writes zeros.
template <class Shape, class Keeps>
__device__ __forceinline__ bool open_piece(const Call& call, const Cut& cut, const Keeps& keeps, uint32_t idx, Piece& piece,
                                           int& slot) {
  piece.work = work_of_piece(cut, idx, Shape::kTile);
  const int n = piece.work.n;
  if (call.is_plain) {
    piece.origin = n;
    piece.length = call.T;
    piece.take_tokens(0, cut.chunk);
    slot = call.in.data != nullptr ? n : -1;
    piece.out_slot = call.state.data != nullptr && keeps.writes_state(piece.span(call)) ? n : -1;
    return true;
  }
  const bool is_rest = n == call.N;   // the row behind the last sequence: tokens outside all of them
  const Span span = is_rest ? Span{} : sequence_span(call.cu_seqlens, n, call.T);
  piece.origin = call.cu_seqlens.given() ? static_cast<int>(span.first) : n;
  piece.length = static_cast<int>(span.length);
  if (piece.length < call.rows.min_length || piece.length > call.rows.max_length) return false;
  piece.take_tokens(0, cut.chunk);
  const bool reads = call.in.data != nullptr;
  slot = is_rest ? -1 : static_cast<int>(slot_of_row(call.slots, n, reads ? call.pool_in : call.pool_out));
  if (is_rest || (call.slots.given() && slot < 0)) {
    int first = 0, last = piece.length;   // counted from the row's first token
#pragma unroll 1
    for (int part = 0; part < (is_rest ? 2 : 1); ++part) {
      if (is_rest) {   // before the first sequence, behind the last
        first = part == 0 ? 0 : clamped(call.cu_seqlens.at(n), call.T);
        last = part == 0 ? clamped(call.cu_seqlens.at(0), call.T) : call.T;
      }
      write_zeros<Shape>(token_address(call.out, piece, first, piece.work.head) + piece.work.column * call.out_dim,
                         last - first, call.V - piece.work.column, call.out.token, call.out_dim, call.out_dtype);
    }
    return false;
  }
  if (!reads || !call.has_initial_state.at(n)) slot = -1;
  piece.out_slot = -1;
  if (call.state.data != nullptr && keeps.writes_state(span)) {
    piece.out_slot = static_cast<int>(slot_of_row(call.out_slots.given() ? call.out_slots : call.slots, n, call.pool_out));
  }
  return true;
}

// The tokens of a piece that are in shared memory.
template <class Shape, class Keeps>
__device__ __forceinline__ void run_tokens(const Call& call, const Keeps& keeps, const typename Keeps::Target& target,
                                           const Piece& piece, const Place<Shape>& place, const float* smem_tokens,
                                           float* smem_sums, int& parity, Fragment<Shape>& fragment) {
  const int column = piece.work.column + place.first + place.group * place.kColumnStep;
  const bool answers = place.group < Shape::kColumns && column < call.V;
  char* out = token_address(call.out, piece, piece.first, piece.work.head) + column * call.out_dim;
#pragma unroll 1
  for (int i = 0; i < piece.count; ++i) {
    float o, f;
    keeps.template keep_token<Shape>(target, piece.work, piece.first + i, smem_tokens);
    step<Shape>(smem_tokens, smem_sums + parity * (Shape::kSmemSums / 2), place,
                keeps.needs_state_after(piece.span(call), piece.first + i), fragment, o, f);
    if (answers) {
      store_float(out, call.out_dtype, 0, o);
      keeps.keep_factor(target, piece.work, piece.first + i, column, f);
    }
    smem_tokens += Shape::kSmemToken;
    out += call.out.token;
    parity ^= 1;
  }
}

template <class Shape, class Keeps>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    decode_kernel(const __grid_constant__ Call call, const __grid_constant__ Cut cut, const __grid_constant__ Keeps keeps) {
  extern __shared__ float4 smem[];   // state [stages][load][thread], sums [2][warp][u, w][kTile], tokens [2][chunk]
  float* const smem_state = reinterpret_cast<float*>(smem);
  float* const smem_sums = smem_state + cut.stages * Shape::kSmemState;
  float* const smem_first = smem_sums + Shape::kSmemSums;
  const Place<Shape> place(threadIdx.x);
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);   // known to be the same for all lanes
  Fragment<Shape> fragment;
  Packs<Shape> packs;
  Piece piece = {}, next = {};
  typename Keeps::Target target = {};   // of `piece`
  float *smem_tokens = smem_first, *smem_other = smem_first;
  int parity = 0, stage = 0, slot = -1;
  uint32_t idx = blockIdx.x;
  if (!call.is_plain) ptx::griddepcontrol_wait();   // before any memory is read; else the first addresses come first
  // A turn opens the next piece and computes this one; the first turn has none to compute.
#pragma unroll 1
  for (bool has_piece = false;; has_piece = true) {
    bool has_next = has_piece && piece.first + piece.count < piece.length;   // the rest of the row: on the same state
    const bool is_new = !has_next;
    if (has_next) {
      next = piece;
      next.take_tokens(piece.first + piece.count, cut.chunk);
    }
#pragma unroll 1
    for (; !has_next && idx < cut.pieces; idx += gridDim.x) {
      has_next = open_piece<Shape>(call, cut, keeps, idx, next, slot);
    }
    const bool loads = has_next && is_new;
    float* const smem_next = smem_state + (stage ^ (cut.stages - 1)) * Shape::kSmemState;
    char* const gmem_next = share_address<Shape>(call.in, slot, next.work, place);
    const int columns_next = slot >= 0 ? call.V - next.work.column - place.first : 0;
    if (!has_piece) {
      ptx::griddepcontrol_wait();
      ptx::griddepcontrol_launch_dependents();
    }
    if constexpr (Shape::kThroughShared) {
      if (loads) load_share<Shape>(gmem_next, call.in.line, columns_next, packs, smem_next);
      ptx::cp_async_commit_group();
    }
    if (has_piece && piece.first == 0) {
      if constexpr (Shape::kThroughShared) {
        ptx::cp_async_wait_group<1>();
        read_share<Shape>(smem_state + stage * Shape::kSmemState, packs);
      }
      widen<Shape>(packs, fragment);
    }
    if constexpr (!Shape::kThroughShared) {
      if (loads) load_share<Shape>(gmem_next, call.in.line, columns_next, packs, nullptr);
    }
    TokenBits<Shape> token = {};
    if (has_next && warp < next.count) load_token<Shape>(call, next, next.first + warp, lane, token);

    if (has_piece) {
      run_tokens<Shape>(call, keeps, target, piece, place, smem_tokens, smem_sums, parity, fragment);
      const bool is_last = piece.first + piece.count >= piece.length;
      if (is_last && piece.out_slot >= 0) {
        store_share<Shape>(share_address<Shape>(call.state, piece.out_slot, piece.work, place), call.state.line,
                           call.V - piece.work.column - place.first, fragment);
      }
    }
    if (!has_next) break;
    target = keeps.target_of(next.work, next.span(call));   // its load flies while the tokens are staged
    if (loads) stage ^= cut.stages - 1;
    smem_tokens = smem_other;
    smem_other = smem_first + (smem_tokens == smem_first ? cut.chunk * Shape::kSmemToken : 0);
    if (warp < next.count) stage_token<Shape>(call, token, lane, smem_tokens + warp * Shape::kSmemToken);
    __syncthreads();   // the tokens are staged, and nobody reads those before them any more
    piece = next;
  }
}

}  // namespace
}  // namespace gdn::cuda
