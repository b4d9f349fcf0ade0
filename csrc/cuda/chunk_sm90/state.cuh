// SPDX-License-Identifier: Apache-2.0
// The state warpgroup: the chain over the chunks of a sequence, and o.
//     X = V - decay_t (K S);  U = T' X;  O = scale (decay_t (Q S) + P U);  S <- decay_end S + K^T diag(to_end_t) U
// with T' = T diag(beta), everything transposed so that S^T [64 v, K] stays in the accumulators and every left operand
// comes from registers: K S is S^T k^T, and so on. Warp w owns rows (columns of S) 16 w .. 16 w + 15.
//
// Range    Operands are fp16. A row of S^T and V^T is kept times 2^-exponent, which puts the larger of both maxima in
//          [2^6, 2^7): with unit keys and beta <= 2, |u| <= 2 (|v| + |S|) stays below 2^16 whatever the chunk holds, and what
//          is 2^20 below the largest still has full precision. The exponent depends on S at the chunk's start and on the
//          chunk's V only, so that a split between chunks keeps the bits. Inf and NaN pass through.
// Order    K S(c), O(c-1) out, Q S(c), V of c + 2 on its way, X, U, S update, P U, largest |s| for c + 1 while P U runs.
#pragma once

#include "../ptx/wgmma.cuh"
#include "../tile/pipeline.cuh"
#include "gram.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kOperandExponent = 6;     // of the largest element of a scaled row
constexpr int kLowestExponent = -100;   // of a row; smaller ones stay small

template <int kCount>
__device__ __forceinline__ void hold(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) ptx::wgmma_hold(x[i]);
}
template <int kCount>
__device__ __forceinline__ void hold(uint32_t (&x)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) ptx::wgmma_hold(x[i][j]);
  }
}

// 2^e for e <= 127; below the normal numbers 0.
__device__ __forceinline__ float power_of_two(int e) {
  return e < -126 ? 0.0f : bits_float(static_cast<uint32_t>(e + 127) << 23);
}

// floor(log2 x) for x >= 0, -127 for 0 and subnormals, 128 for inf and NaN.
__device__ __forceinline__ int exponent_of(float x) { return static_cast<int>(float_bits(x) >> 23) - 127; }

// What a thread keeps of S^T: rows lane / 4 and lane / 4 + 8 of its warp, true value s 2^exponent.
template <int kKeyDim>
struct State {
  float s[kKeyDim / 2];              // accumulators
  int exponent[2];                   // of s
  uint32_t operand[kKeyDim / 16][4]; // s as the left operand of K S and Q S, of the chunk
};

// Bytes from a warp's 16 columns of V or o of a chunk, [64 t][16 v], to columns 8 half .. of token t: 8 tokens of a half hit
// 8 different bank groups.
__device__ __forceinline__ uint32_t column_offset(int t, int half) { return t * 32 + ((half ^ (t / 4 % 2)) * 16); }

// The address that a lane gives to ldmatrix or stmatrix, transposed, of tokens 16 b .. 16 b + 15 of it: an operand's block.
__device__ __forceinline__ uint32_t column_block(const uint16_t* smem, int b, int lane) {
  return ptx::shared_address(smem) + column_offset(16 * b + 8 * (lane / 16) + lane % 8, lane / 8 % 2);
}

// V on its way in, each warp its own 16 columns.
struct Values {
  const uint16_t* gmem;   // token 0 of the sequence, the lane's half of the warp's columns
  int64_t token_stride;
  int lane;

  // Issues the copies of the chunk from token `first` on, of a sequence of `length`, as one cp.async group, empty behind the
  // end; missing tokens become zeros.
  __device__ __forceinline__ void load(int first, int length, uint16_t* smem) const {
    if (first < length) {
      const uint32_t to = ptx::shared_address(smem) + column_offset(lane / 2, lane % 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = first + 16 * i + lane / 2;
        ptx::cp_async_16(to + 16 * 32 * i, gmem + (t < length ? t : first) * token_stride, t < length ? 16 : 0);
      }
    }
    ptx::cp_async_commit_group();
  }
};

// V^T as pairs of tokens in the order of operands.
__device__ __forceinline__ void read_values(const uint16_t* smem, int lane, uint32_t (&v)[4][4]) {
#pragma unroll
  for (int b = 0; b < 4; ++b) ptx::ldmatrix_x4_trans(column_block(smem, b, lane), v[b]);
}

// The largest exponent of V^T in this thread's rows.
template <class io_t>
__device__ __forceinline__ void value_exponents(const uint16_t* smem_v, int lane, int (&e)[2]) {
  uint32_t v[4][4], pair[2] = {0, 0};   // of magnitudes, which order as integers
  read_values(smem_v, lane, v);
#pragma unroll
  for (int i = 0; i < 16; ++i) pair[i % 2] = __vmaxu2(pair[i % 2], v[i / 4][i % 4] & 0x7fff7fffu);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float low, high;
    widen_pair<io_t>(pair[r], low, high);
    e[r] = max(exponent_of(low), exponent_of(high));
  }
}

// Exponents for the chunk from the largest |s| and |v| of each row, over the four lanes of the row.
template <int kKeyDim>
__device__ __forceinline__ void pick_exponents(const int (&of_v)[2], const State<kKeyDim>& state, int (&next)[2]) {
  int e[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kKeyDim / 8; ++i) {
      largest[0] = fmaxf(largest[0], fabsf(state.s[4 * i + 2 * r]));
      largest[1] = fmaxf(largest[1], fabsf(state.s[4 * i + 2 * r + 1]));
    }
    const int of_s = max(exponent_of(fmaxf(largest[0], largest[1])), kLowestExponent) + state.exponent[r];
    e[r] = max(of_s, of_v[r]);
  }
  // Both rows in one word, both positive: -227 .. 250 plus 1024.
  uint32_t word = static_cast<uint32_t>(e[0] + 1024) << 16 | static_cast<uint32_t>(e[1] + 1024);
  word = __vmaxu2(word, __shfl_xor_sync(0xffffffffu, word, 1));
  word = __vmaxu2(word, __shfl_xor_sync(0xffffffffu, word, 2));
  next[0] = max(static_cast<int>(word >> 16) - 1024 - kOperandExponent, kLowestExponent);
  next[1] = max(static_cast<int>(word & 0xffffu) - 1024 - kOperandExponent, kLowestExponent);
}

// Picks the exponents of the next chunk, rounds S to the operand and takes S itself to the chunk's scale and through its
// decay: what the update adds to. Behind the last chunk S stays as it is.
template <int kKeyDim>
__device__ __forceinline__ void convert_state(const int (&of_v)[2], float decay, bool is_last, State<kKeyDim>& state) {
  int next[2];
  pick_exponents(of_v, state, next);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = power_of_two(min(state.exponent[r] - next[r], 127));   // at most 106 upwards
    const float factor_s = is_last ? 1.0f : decay * factor;
    state.exponent[r] = is_last ? state.exponent[r] : next[r];
#pragma unroll
    for (int i = 0; i < kKeyDim / 8; ++i) {
      float& low = state.s[4 * i + 2 * r];
      float& high = state.s[4 * i + 2 * r + 1];
      state.operand[i / 2][2 * (i % 2) + r] = round_pair_fp16(low * factor, high * factor);
      low *= factor_s;
      high *= factor_s;
    }
  }
}

// Issues sums = S^T tile^T [64 v, 64 t] as one group.
template <int kKeyDim>
__device__ __forceinline__ void issue_read(const State<kKeyDim>& state, const fp16_t* tile, float (&sums)[32]) {
  const uint64_t b = k_major_descriptor(tile);
  ptx::wgmma_m64n64k16<false>(sums, state.operand[0], b);
#pragma unroll
  for (int s = 1; s < kKeyDim / 16; ++s) ptx::wgmma_m64n64k16<true>(sums, state.operand[s], b + k_major_step(s));
  ptx::wgmma_commit_group();
}

// Issues sums = or += operand tile^T [64 v, 64 t] with a tile [64 t out][64 t in] as one group.
template <bool kAccumulate>
__device__ __forceinline__ void issue_tokens(const uint32_t (&operand)[4][4], const fp16_t* tile, float (&sums)[32]) {
  const uint64_t b = k_major_descriptor(tile);
  ptx::wgmma_m64n64k16<kAccumulate>(sums, operand[0], b);
#pragma unroll
  for (int s = 1; s < 4; ++s) ptx::wgmma_m64n64k16<true>(sums, operand[s], b + k_major_step(s));
  ptx::wgmma_commit_group();
}

// Issues s += operand k [64 v, K] as one group: the same k tile, read along its rows.
template <int kKeyDim>
__device__ __forceinline__ void issue_write(const uint32_t (&operand)[4][4], const fp16_t* smem_k, float (&s)[kKeyDim / 2]) {
  constexpr uint64_t kStep = 16 * kPanelRowBytes / 16;
  const uint64_t b =
      ptx::wgmma_descriptor_128b(ptx::shared_address(smem_k), kChunk * kPanelRowBytes, 8 * kPanelRowBytes);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    if constexpr (kKeyDim == 128) {
      ptx::wgmma_m64n128k16_trans<true>(s, operand[step], b + step * kStep);
    } else {
      ptx::wgmma_m64n64k16_trans<true>(s, operand[step], b + step * kStep);
    }
  }
  ptx::wgmma_commit_group();
}

// factors[t] of the tokens of this thread's columns of sums.
__device__ __forceinline__ void read_factors(const float* factors, int lane, float2 (&x)[8]) {
#pragma unroll
  for (int block = 0; block < 8; ++block) {
    x[block] = *reinterpret_cast<const float2*>(factors + sum_column(lane, 4 * block));
  }
}

// X^T = V^T - decay_t (S^T k^T), rounded to the operand of U.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void subtract_prediction(const State<kKeyDim>& state, const float2 (&decay)[8],
                                                    const uint32_t (&v)[4][4], const float (&sums)[32],
                                                    uint32_t (&operand)[4][4]) {
  const float factor[2] = {power_of_two(-state.exponent[0]), power_of_two(-state.exponent[1])};
#pragma unroll
  for (int i = 0; i < 16; ++i) {   // pairs of tokens
    float low, high;
    widen_pair<io_t>(v[i / 4][i % 4], low, high);
    operand[i / 4][i % 4] = round_pair_fp16(low * factor[i % 2] - decay[i / 2].x * sums[2 * i],
                                            high * factor[i % 2] - decay[i / 2].y * sums[2 * i + 1]);
  }
}

// Columns times the factors of their tokens.
__device__ __forceinline__ void scale_tokens(const float2 (&factors)[8], float (&x)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[2 * i] *= factors[i / 2].x;
    x[2 * i + 1] *= factors[i / 2].y;
  }
}

__device__ __forceinline__ void round_to_operands(const float (&x)[32], uint32_t (&operand)[4][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) round_to_operand(x + 8 * step, operand[step]);
}

// o of a chunk on its way out. 16-bit o goes through the warp's part of shared memory, where V of the chunk was, so that
// tokens become rows of 32 bytes; fp32 o is stored from the accumulators, 32 bytes a row already.
template <class out_t>
struct Writer {
  out_t* gmem;          // token 0 of the sequence, the warp's first column
  int64_t token_stride;
  int lane;

  // Called with the accumulators; leaves in pairs what store() needs of them.
  __device__ __forceinline__ void round(const float (&o)[32], const float (&factor)[2], uint32_t (&pairs)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      pairs[i / 4][i % 4] = round_pair(o[2 * i] * factor[i % 2], o[2 * i + 1] * factor[i % 2], out_t{});
    }
  }

  __device__ __forceinline__ void store(const uint32_t (&pairs)[4][4], uint16_t* smem, int first, int count) const {
    __syncwarp();   // V of the chunk is read
#pragma unroll
    for (int b = 0; b < 4; ++b) ptx::stmatrix_x4_trans(column_block(smem, b, lane), pairs[b]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {   // each lane the 16 bytes that it copies V to, so the next copy needs no barrier
      const int t = 16 * i + lane / 2, half = lane % 2;
      if (t < count) {
        *reinterpret_cast<Words<16>*>(gmem + static_cast<int64_t>(first + t) * token_stride + 8 * half) =
            *reinterpret_cast<const Words<16>*>(reinterpret_cast<const char*>(smem) + column_offset(t, half));
      }
    }
  }

  __device__ __forceinline__ void store_sums(const float (&o)[32], const float (&factor)[2], int first, int count) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int t = sum_column(lane, i);
      if (t < count) gmem[static_cast<int64_t>(first + t) * token_stride + sum_row(lane, i)] = o[i] * factor[i / 2 % 2];
    }
  }

  // All of it, when nothing is to run in between.
  __device__ __forceinline__ void write(const float (&o)[32], const float (&factor)[2], uint16_t* smem, int first,
                                        int count) const {
    if constexpr (sizeof(out_t) == 2) {
      uint32_t pairs[4][4];
      round(o, factor, pairs);
      store(pairs, smem, first, count);
    } else {
      store_sums(o, factor, first, count);
    }
  }
};

// Moves S between the accumulators and one head's state at element `head`, rows `row` and row + 8 of S^T. Any strides:
// lanes of a row and of a column are neighbours, so both layouts move whole 32-byte sectors.
template <class state_t, bool kIsLoad, int kKeyDim>
__device__ __forceinline__ void move_state(const View& view, int64_t head, int64_t row, int lane, State<kKeyDim>& state) {
  state_t* const data = static_cast<state_t*>(view.data) + head + row * view.stride[3];
  const float factor[2] = {power_of_two(state.exponent[0]), power_of_two(state.exponent[1])};
#pragma unroll
  for (int i = 0; i < kKeyDim / 2; ++i) {
    const int r = i / 2 % 2;
    state_t& element = data[sum_column(lane, i) * view.stride[2] + 8 * r * view.stride[3]];
    if constexpr (kIsLoad) {
      state.s[i] = to_float(element);
    } else {
      element = from_float<state_t>(state.s[i] * factor[r]);
    }
  }
}

template <bool kIsLoad, int kKeyDim>
__device__ __forceinline__ void move_state(const View& view, int64_t head, int64_t row, int lane, State<kKeyDim>& state) {
  if (view.dtype == DType::kFloat32) {
    move_state<float, kIsLoad>(view, head, row, lane, state);
  } else if (view.dtype == DType::kBFloat16) {
    move_state<bf16_t, kIsLoad>(view, head, row, lane, state);
  } else {
    move_state<fp16_t, kIsLoad>(view, head, row, lane, state);
  }
}

// The next phase of full[slot], of a stage that the other block's solver fills, waits for that block's copies.
template <int kKeyDim>
__device__ __forceinline__ void expect_push(SharedMemory<kKeyDim>& smem, int slot) {
  ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&smem.full[slot]), sizeof(Stage<kKeyDim>));
}

// Waits for stage and V of `chunk`.
template <int kKeyDim>
__device__ __forceinline__ void wait_chunk(int chunk, int rank, SharedMemory<kKeyDim>& smem) {
  const int slot = chunk % kStages;
  wait_phase(smem.full[slot], chunk / kStages % 2);
  if (threadIdx.x == 0 && slot % kCluster != rank) expect_push(smem, slot);   // the copies come after done[slot]
  ptx::cp_async_wait_group<1>();
  __syncwarp();
}

// One arrival of the warp at done[slot] of the block that fills the stage, after all its lanes are done.
template <int kKeyDim>
__device__ __forceinline__ void release_chunk(int slot, int lane, SharedMemory<kKeyDim>& smem) {
  __syncwarp();
  if (lane == 0) {
    ptx::mbarrier_arrive_cluster(
        ptx::map_shared(ptx::shared_address(&smem.done[slot]), static_cast<uint32_t>(slot % kCluster)));
  }
}

__device__ __forceinline__ void rotate(uint16_t*& before, uint16_t*& now, uint16_t*& next) {
  uint16_t* const done = before;
  before = now;
  now = next;
  next = done;
}

// V of the first two chunks on its way, S ready for the first.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void start_state(int length, int rank, int warp, const Values& values,
                                            SharedMemory<kKeyDim>& smem, State<kKeyDim>& state) {
  values.load(0, length, smem.v[0][warp]);
  values.load(kChunk, length, smem.v[1][warp]);
  wait_chunk(0, rank, smem);
  int of_v[2];
  value_exponents<io_t>(smem.v[0][warp], values.lane, of_v);
  convert_state(of_v, smem.stage[0].gates.decay[kChunk - 1], false, state);
}

// U^T -> the operand of O, and that of the update, which carries each token to the chunk's end.
__device__ __forceinline__ void split_write(const float2 (&to_end)[8], float (&sums)[32], uint32_t (&u)[4][4],
                                            uint32_t (&u_end)[4][4]) {
  round_to_operands(sums, u);
  scale_tokens(to_end, sums);
  round_to_operands(sums, u_end);
}

// The whole life of the state warpgroup; `state` holds S at the start and at the end. The observer is shown
// what a test wants to look at; NoObserver costs nothing.
template <class io_t, class out_t, int kKeyDim, class Observer>
__device__ __forceinline__ void run_state(const Work& work, int length, float scale, int rank, const Writer<out_t>& writer,
                                          const Values& values, SharedMemory<kKeyDim>& smem, State<kKeyDim>& state,
                                          const Observer& observer) {
  const int lane = writer.lane, warp = __shfl_sync(0xffffffffu, threadIdx.x % kGroupThreads / 32, 0);
  const int num_chunks = (length + kChunk - 1) / kChunk;
  if (num_chunks == 0) return;
  start_state<io_t>(length, rank, warp, values, smem, state);
  float o[32] = {}, factor[2] = {0.0f, 0.0f};   // of the chunk before
  uint16_t *v_before = smem.v[2][warp], *v_now = smem.v[0][warp], *v_next = smem.v[1][warp];
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const Stage<kKeyDim>& stage = smem.stage[chunk % kStages];
    observer.start(chunk, 0);
    observer.operands(work, chunk, warp, lane, stage);
    float sums[32];   // S^T k^T, then U^T
    observer.phase(Phase::kStart);
    ptx::wgmma_fence();
    issue_read(state, stage.k, sums);
    const int first_before = (chunk - 1) * kChunk;
    uint32_t pairs[4][4], v[4][4], x[4][4], u[4][4], u_end[4][4];
    if constexpr (sizeof(out_t) == 2) {
      writer.round(o, factor, pairs);
    } else if (chunk > 0) {
      writer.store_sums(o, factor, first_before, kChunk);
    }
    ptx::wgmma_fence();
    issue_read(state, stage.q, o);
    if constexpr (sizeof(out_t) == 2) {
      if (chunk > 0) writer.store(pairs, v_before, first_before, kChunk);
    }
    values.load((chunk + 2) * kChunk, length, v_before);
    factor[0] = scale * power_of_two(state.exponent[0]);
    factor[1] = scale * power_of_two(state.exponent[1]);
    float2 decay[8], to_end[8];
    read_values(v_now, lane, v);
    read_factors(stage.gates.decay, lane, decay);
    observer.phase(Phase::kReady);
    ptx::wgmma_wait_group<1>();   // S^T k^T
    hold(sums);
    observer.phase(Phase::kRead);
    observer.prediction(work, chunk, warp, lane, sums, state);
    subtract_prediction<io_t>(state, decay, v, sums, x);
    observer.difference(work, chunk, warp, lane, x, state);
    ptx::wgmma_fence();
    issue_tokens<false>(x, stage.t, sums);
    observer.phase(Phase::kX);
    ptx::wgmma_wait_group<1>();   // S^T q^T
    hold(o);
    hold(state.operand);
    scale_tokens(decay, o);
    read_factors(stage.gates.to_end, lane, to_end);
    ptx::wgmma_wait_group<0>();   // U^T
    hold(sums);
    hold(x);
    observer.phase(Phase::kU);
    observer.write(work, chunk, warp, lane, sums, state);
    split_write(to_end, sums, u, u_end);
    ptx::wgmma_fence();
    issue_write<kKeyDim>(u_end, stage.k, state.s);
    issue_tokens<true>(u, stage.p, o);

    const int next = chunk + 1;   // past the last chunk the operand is made from old values and not used
    if (next < num_chunks) wait_chunk(next, rank, smem);
    observer.phase(Phase::kFree);
    int of_v[2];
    value_exponents<io_t>(v_next, lane, of_v);
    ptx::wgmma_wait_group<1>();   // S
    hold(state.s);
    hold(u_end);
    observer.phase(Phase::kUpdated);
    convert_state(of_v, smem.stage[next % kStages].gates.decay[kChunk - 1], next == num_chunks, state);
    ptx::wgmma_wait_group<0>();   // O; across the loop's end ptxas would serialise
    hold(o);
    hold(u);
    release_chunk(chunk % kStages, lane, smem);
    rotate(v_before, v_now, v_next);
  }
  writer.write(o, factor, v_before, (num_chunks - 1) * kChunk, length - (num_chunks - 1) * kChunk);
}

}  // namespace gdn::cuda::chunk_sm90
