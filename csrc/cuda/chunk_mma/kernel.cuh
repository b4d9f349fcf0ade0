// SPDX-License-Identifier: Apache-2.0
//
// Gated delta rule, chunk by chunk, by mma.sync: every arch from sm_80 on, and precision="high" on all of them. Per (sequence,
// value head) and chunk of 64 tokens, with T, P, T'', M and the decays of chunk_sm90/kernel.cuh:
//     X = V - diag(e^sum) K S;   O = scale (diag(e^sum) Q S + M X);   S <- e^(sum_64) S + K^T (T'' X)
// and at high precision, where products of matrices of tokens would cost more than they save:
//     U = T diag(beta) X;        O = scale (diag(e^sum) Q S + P U);   S <- e^(sum_64) S + K^T diag(e^(sum_64 - sum)) U
// Grid    x: sequence (slowest, in the call's order), value head, tile of 64 columns of V (fastest).
// Block   four warps share the chunk in shared memory. A warp keeps S^T [16 v, K] in fp32 sums from the first to the last
//         chunk; everything is transposed, so that a product's sums, rounded, are the next one's left operand.
// Reads   Keys, Solved or HighSolved, v [T, 64]; S [K, 64] once.   Writes   o [T, 64], S once; checkpoints of S.
// Barrier two a chunk. First: k, T'', V and the factors are here, and nobody reads q, M and the other k any more. Second: q
//         and M are here, and nobody reads T'' and V any more. (At high precision T for T'', P for M.)
// Numbers As chunk_sm90 (range.cuh); at high precision operands are split in two, and rows of X and U that unnormalised keys
//         make too large for fp16 are scaled too. A chunk depends on its tokens and on S at its start only.
// Needs   K 64 or 128, V a multiple of 16; strides and dtypes as chunk_sm90/takes.h says.
#pragma once

#include <type_traits>

#include "../chunk_sm90/factors.cuh"
#include "../ptx/arch.cuh"
#include "copy.cuh"
#include "products.cuh"

namespace gdn::cuda::chunk_mma {

constexpr int kLowestShift = -100;   // of a row of sums; smaller ones stay small

// Exponents of the largest |v| of this thread's two rows of V^T, over all tokens.
template <class io_t>
__device__ __forceinline__ void value_exponents(const uint32_t (&v)[4][4], int (&e)[2]) {
  uint32_t largest[2] = {};   // magnitudes order as integers
#pragma unroll
  for (int i = 0; i < 16; ++i) largest[i % 2] = __vmaxu2(largest[i % 2], v[i / 4][i % 4] & 0x7fff7fffu);
  uint32_t both = max(largest[0] & 0xffffu, largest[0] >> 16) | max(largest[1] & 0xffffu, largest[1] >> 16) << 16;
  both = __vmaxu2(both, __shfl_xor_sync(0xffffffffu, both, 1));
  both = __vmaxu2(both, __shfl_xor_sync(0xffffffffu, both, 2));
  e[0] = chunk_sm90::exponent_of(to_float(io_t{static_cast<uint16_t>(both & 0xffffu)}));
  e[1] = chunk_sm90::exponent_of(to_float(io_t{static_cast<uint16_t>(both >> 16)}));
}

// S at the chunk's start as state.operand, at exponents that S and V ask for. The first chunk's are not known to be such.
template <int kKeyDim>
__device__ __forceinline__ void make_operand(const int (&of_v)[2], bool is_first, State<kKeyDim>& state) {
  uint32_t largest[2] = {};
#pragma unroll
  for (int panel = 0; panel < state.kPanels; ++panel) chunk_sm90::round_panel(panel, state, largest);
  if (is_first || !chunk_sm90::is_in_range(largest, of_v, state)) {
    chunk_sm90::rescale_state(of_v, state);
#pragma unroll
    for (int panel = 0; panel < state.kPanels; ++panel) chunk_sm90::round_panel(panel, state, largest);
  }
}

// Brings rows of sums to where two fp16 parts have all their digits: x times 2^-shift, a multiple of four, 0 where the largest
// is in [1, 2^15) as it is.
__device__ __forceinline__ void fit_rows(float (&x)[32], int (&shift)[2]) {
  float largest[2] = {};
#pragma unroll
  for (int i = 0; i < 32; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], fabsf(x[i]));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 1));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 2));
    const int e = chunk_sm90::exponent_of(largest[r]);
    shift[r] = (e >= 0 && e < 15) || largest[r] == 0.0f ? 0 : max((e - 14 + 3) & ~3, kLowestShift);
  }
  if (__all_sync(0xffffffffu, shift[0] == 0 && shift[1] == 0)) return;
  const float factor[2] = {power_of_two(-shift[0]), power_of_two(-shift[1])};
#pragma unroll
  for (int i = 0; i < 32; ++i) x[i] *= factor[i / 2 % 2];
}

// x times the factors of its tokens.
__device__ __forceinline__ void scale_tokens(const float* smem_factors, int lane, float (&x)[32]) {
  float2 token[8];
  chunk_sm90::read_factors(smem_factors, lane, token);
#pragma unroll
  for (int i = 0; i < 32; ++i) x[i] *= i % 2 == 0 ? token[i / 4].x : token[i / 4].y;
}

// What the first half of a chunk leaves for the second: X^T and (T'' X)^T as operands, or U^T.
struct Written {
  Operand<1> x, end;
};
struct HighWritten {
  float u[32];
};
template <class Solved>
using WrittenOf = std::conditional_t<kParts<Solved> == 2, HighWritten, Written>;

// A chunk's X^T, from S^T.
template <class io_t, int kKeyDim, class Solved>
__device__ __forceinline__ void subtract_prediction(const State<kKeyDim>& state, const uint32_t (&v)[4][4], int chunk, int lane,
                                                    const LaneRows& rows, const SharedMemory<kKeyDim, Solved>& smem,
                                                    float (&x)[32]) {
  const float factor[2] = {power_of_two(-state.exponent[0]), power_of_two(-state.exponent[1])};
  read_state<kKeyDim, kParts<Solved>>(state, ptx::shared_address(smem.k[chunk % 2]), rows, x);   // S^T k^T
  float2 token[8];
  chunk_sm90::read_factors(read_k_of(smem.gates[chunk % 2]), lane, token);
#pragma unroll
  for (int i = 0; i < 16; ++i) {   // pairs of tokens
    float low, high;
    widen_pair<io_t>(v[i / 4][i % 4], low, high);
    x[2 * i] = fmaf(-token[i / 2].x, x[2 * i], low * factor[i % 2]);
    x[2 * i + 1] = fmaf(-token[i / 2].y, x[2 * i + 1], high * factor[i % 2]);
  }
}

// From X^T on.
template <class Smem>
__device__ __forceinline__ void solve_chunk(float (&x)[32], int, int, const LaneRows& rows, const Smem& smem,
                                            Written& written) {
  round_tokens(x, written.x);
  float sums[32] = {};
  multiply_lower(written.x, OfLowerBlocks<PlacesOfT>(smem.t, rows), sums);
  round_tokens(sums, written.end);
}
template <class Smem>
__device__ __forceinline__ void solve_chunk(float (&x)[32], int chunk, int lane, const LaneRows& rows, const Smem& smem,
                                            HighWritten& written) {
  int shift[2];
  fit_rows(x, shift);
  Operand<2> operand;
  round_tokens(x, operand);
#pragma unroll
  for (int i = 0; i < 32; ++i) written.u[i] = 0.0f;
  multiply_lower(operand, OfHighTiles(smem.t, rows), written.u);
  scale_tokens(smem.gates[chunk % 2].solve, lane, written.u);
  const float back[2] = {power_of_two(shift[0]), power_of_two(shift[1])};
#pragma unroll
  for (int i = 0; i < 32; ++i) written.u[i] *= back[i / 2 % 2];
}

// S at the chunk's end.
template <int kKeyDim, class Solved>
__device__ __forceinline__ void write_chunk(const Written& written, const int (&)[2], int chunk, int, const LaneRows& rows,
                                            const SharedMemory<kKeyDim, Solved>& smem, State<kKeyDim>& state) {
  const float scale[2] = {1.0f, 1.0f};
  write_state(written.end, ptx::shared_address(smem.k[chunk % 2]), chunk_decay_of(smem.gates[chunk % 2]), scale, rows, state);
}
// From U^T times 2^-of_u.
template <int kKeyDim, class Solved>
__device__ __forceinline__ void write_chunk(HighWritten& written, const int (&of_u)[2], int chunk, int lane,
                                            const LaneRows& rows, const SharedMemory<kKeyDim, Solved>& smem,
                                            State<kKeyDim>& state) {
  float (&u)[32] = written.u;
  scale_tokens(smem.gates[chunk % 2].write, lane, u);
  const float back[2] = {power_of_two(of_u[0]), power_of_two(of_u[1])};
#pragma unroll
  for (int i = 0; i < 32; ++i) u[i] *= back[i / 2 % 2];
  int shift[2];
  fit_rows(u, shift);
  const float scale[2] = {power_of_two(shift[0]), power_of_two(shift[1])};
  Operand<2> operand;
  round_tokens(u, operand);
  write_state(operand, ptx::shared_address(smem.k[chunk % 2]), chunk_decay_of(smem.gates[chunk % 2]), scale, rows, state);
}

// o from Q S; times 2^-shift, and so is U^T then.
template <class Smem>
__device__ __forceinline__ void mix_chunk(Written& written, int chunk, int lane, const LaneRows& rows, const Smem& smem,
                                          float (&o)[32], int (&shift)[2]) {
  shift[0] = shift[1] = 0;
  scale_tokens(read_q_of(smem.gates[chunk % 2]), lane, o);
  multiply_lower(written.x, OfLowerBlocks<PlacesOfM>(smem.mix, rows), o);
}
template <class Smem>
__device__ __forceinline__ void mix_chunk(HighWritten& written, int chunk, int lane, const LaneRows& rows, const Smem& smem,
                                          float (&o)[32], int (&shift)[2]) {
  fit_rows(written.u, shift);
  const float factor[2] = {power_of_two(-shift[0]), power_of_two(-shift[1])};
  scale_tokens(read_q_of(smem.gates[chunk % 2]), lane, o);
#pragma unroll
  for (int i = 0; i < 32; ++i) o[i] *= factor[i / 2 % 2];
  Operand<2> operand;
  round_tokens(written.u, operand);
  multiply_lower(operand, OfHighTiles(smem.mix, rows), o);
  scale_tokens(smem.gates[chunk % 2].mix, lane, o);
}

// o^T [16 v, 64 t] times the rows' factors -> tokens [0, count) at gmem, the warp's first column.
template <class out_t>
__device__ __forceinline__ void write_output(const float (&o)[32], const float (&factor)[2], out_t* gmem, int64_t token_stride,
                                             int count, int lane) {
  if constexpr (sizeof(out_t) == 2) {
    out_t* to = gmem + lane / 4 * token_stride + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 16; ++i) {   // 8 columns of 8 tokens
      const uint32_t pair = ptx::movmatrix_trans(
          round_pair(o[2 * i] * factor[i % 2], o[2 * i + 1] * factor[i % 2], out_t{}));
      if (8 * (i / 2) + lane / 4 < count) *reinterpret_cast<uint32_t*>(to + 8 * (i % 2)) = pair;
      if (i % 2 == 1) to += 8 * token_stride;
    }
  } else {
    out_t* to = gmem + 2 * (lane % 4) * token_stride + lane / 4;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (sum_column(lane, i) < count) to[i % 2 * token_stride + 8 * (i / 2 % 2)] = o[i] * factor[i / 2 % 2];
      if (i % 4 == 3) to += 8 * token_stride;
    }
  }
}

// All chunks of a sequence of at least one token; `state` holds S at the start and at the end.
template <class io_t, class out_t, int kKeyDim, class Solved>
__device__ __forceinline__ void run_chunks(const RuleParams& p, const Source<kKeyDim, Solved>& source, out_t* gmem_out,
                                           int warp, int first_lane, SharedMemory<kKeyDim, Solved>& smem,
                                           State<kKeyDim>& state) {
  const int num_chunks = (source.length + kChunk - 1) / kChunk;   // at least one: a loop that may be skipped spills
  source.copy_k(0, smem);
  source.copy_early(0, warp, first_lane, smem);
  ptx::cp_async_commit_group();
  int chunk = 0;
#pragma unroll 1
  do {
    const bool is_last = chunk + 1 == num_chunks;
    const int lane = ptx::opaque(first_lane);   // addresses are made anew in each turn: kept over the loop they spill
    const LaneRows rows(lane);
    WrittenOf<Solved> written;
    ptx::cp_async_wait_group<0>();
    __syncthreads();   // k, T'', V, factors of this chunk are here; q, M and k of the chunk before are read
    source.copy_late(chunk, smem);
    ptx::cp_async_commit_group();
    if (!is_last) source.copy_k(chunk + 1, smem);
    ptx::cp_async_commit_group();
    if (source.has_columns) {
      uint32_t v[4][4];
      int of_v[2];
      read_values(smem.v[warp], lane, v);
      value_exponents<io_t>(v, of_v);
      make_operand(of_v, chunk == 0, state);
      float x[32];
      subtract_prediction<io_t>(state, v, chunk, lane, rows, smem, x);
      solve_chunk(x, chunk, lane, rows, smem, written);
    }
    ptx::cp_async_wait_group<1>();
    __syncthreads();   // q and M are here; T'' is read
    if (!is_last) source.copy_early(chunk + 1, warp, lane, smem);
    ptx::cp_async_commit_group();
    if (!source.has_columns) continue;
    float o[32];
    int shift[2];
    const float scale = kParts<Solved> == 2 ? p.scale : chunk_sm90::output_scale(p);
    float factor[2] = {scale * power_of_two(state.exponent[0]), scale * power_of_two(state.exponent[1])};
    forget_operand(state);
    read_state<kKeyDim, kParts<Solved>>(state, ptx::shared_address(smem.q), rows, o);
    mix_chunk(written, chunk, lane, rows, smem, o, shift);
    if constexpr (kParts<Solved> == 2) {
      factor[0] *= power_of_two(shift[0]);
      factor[1] *= power_of_two(shift[1]);
    }
    const int first = chunk * kChunk, done = first + kChunk;
    write_output(o, factor, gmem_out + first * p.out.stride[1], p.out.stride[1], source.length - first, lane);
    write_chunk(written, shift, chunk, lane, rows, smem, state);
    if (p.checkpoints.given() && done <= source.length && done % p.checkpoint_every == 0) {
      const int64_t row = p.checkpoint_row(smem.work.n, done);
      if (row >= 0) {
        move_state<false>(p.checkpoints, p.checkpoints.offset(row, smem.work.head), smem.work.column + 16 * warp + lane / 4,
                          ptx::opaque(lane), state);
      }
    }
  } while (++chunk < num_chunks);
}

// A sequence of no tokens: S as it comes. By the whole block.
template <int kKeyDim>
__device__ __forceinline__ void copy_state(const RuleParams& p, const Work& work, int64_t slot) {
  const int64_t out_slot = slot_to_write(p, work.n);
  if (out_slot < 0) return;
  const bool has_state = p.initial_state.given() && p.has_initial_state.at(work.n);
  for (int idx = threadIdx.x; idx < kKeyDim * kValueTile; idx += kThreads) {
    const int64_t row = idx / kValueTile, column = work.column + idx % kValueTile;
    if (column >= p.dims.V) continue;
    p.state.store(p.state.offset(out_slot, work.head, row, column),
                  has_state ? p.initial_state.load(p.initial_state.offset(slot, work.head, row, column)) : 0.0f);
  }
}

// A sequence that is computed: S in, all chunks, S out.
template <class io_t, class out_t, int kKeyDim, class Solved>
__device__ __forceinline__ void carry(const RuleParams& p, const Work& work, SharedMemory<kKeyDim, Solved>& smem) {
  const Span span = sequence_span(p.cu_seqlens, work.n, p.dims.T);
  const int64_t slot = slot_to_read(p, work.n);
  if (span.length == 0) return copy_state<kKeyDim>(p, work, slot);
  const int lane = ptx::opaque(static_cast<int>(threadIdx.x % 32));   // kept, not read anew
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int64_t column = work.column + 16 * warp;
  const bool has_columns = column < p.dims.V;
  State<kKeyDim> state = {};
  if (has_columns && p.initial_state.given() && p.has_initial_state.at(work.n)) {
    move_state<true>(p.initial_state, p.initial_state.offset(slot, work.head), column + lane / 4, lane, state);
  }
  const int64_t chunk_row = first_chunk_row(p, work.n, span.first);
  const Source<kKeyDim, Solved> source = {
      chunk_sm90::keys_of<kKeyDim>(p, chunk_row, work.key_head),
      solved_of<kKeyDim, Solved>(p, chunk_row, work.head),
      p.dims.Hk,
      p.dims.Hv,
      static_cast<const uint16_t*>(p.v.data) + p.v.offset(span.batch, span.first, work.head, column + 8 * (lane % 2)),
      p.v.stride[1],
      has_columns,
      static_cast<int>(span.length)};
  out_t* const gmem_out = static_cast<out_t*>(p.out.data) + p.out.offset(span.batch, span.first, work.head, column);
  if (threadIdx.x == 0) smem.work = work;   // the first chunk's barrier comes before anybody reads it
  run_chunks<io_t>(p, source, gmem_out, warp, lane, smem, state);
  const int64_t out_slot = slot_to_write(p, smem.work.n), out_column = smem.work.column + 16 * warp;
  if (out_slot < 0 || out_column >= p.dims.V) return;
  move_state<false>(p.state, p.state.offset(out_slot, smem.work.head), out_column + lane / 4, ptx::opaque(lane), state);
}

template <class io_t, class out_t, int kKeyDim, class Solved>
__global__ void __launch_bounds__(kThreads, 2) carry_kernel(const __grid_constant__ RuleParams p) {
  extern __shared__ __align__(1024) char smem_bytes[];
  const Work work = work_of_block(p);
  const auto span_of = [&] { return sequence_span(p.cu_seqlens, work.n, p.dims.T); };
  if (work.n > p.dims.N || !takes_row(p, work.n)) return;
  if (chunk_sm90::is_padding(p, work.n)) {
    const chunk_sm90::Writers writers = {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
    chunk_sm90::write_padding(p, work.n, work.head, work.column, writers, span_of);
    return;
  }
  carry<io_t, out_t>(p, work, *reinterpret_cast<SharedMemory<kKeyDim, Solved>*>(smem_bytes));
}

}  // namespace gdn::cuda::chunk_mma
