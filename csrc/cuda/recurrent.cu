// SPDX-License-Identifier: Apache-2.0
//
// Gated delta rule, token by token, exact: rule.h's step and nothing else.
//     S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q
// Grid    x: sequence (slowest), group of value heads that share a key head, tile of V (fastest).
// Block   Computing warps: heads x tile_warps. One holds 4 * kColumns columns of one head's S for the whole sequence, in
//         registers: lane = 8 residue groups x 4 column groups (fastest: four lanes that read the same k and q make one
//         shared-memory access of what would be four). A lane owns rows 32 j + 4 r .. + 3 of kColumns columns, so the
//         residue sums of rule.h are a chain of kSteps fma in the lane, two levels of the tree in it, three by shuffles.
//         Columns do not depend on one another.
//         Staging warps, behind them: a token at a time to shared memory as fp32, with its scalars (lane = residue for the
//         sums k k, q q and k q), and o from shared memory to global.
// Reads   q k [T, Hk, K], v [T, Hv, V], g beta [T, Hv]; S [K, V] once.   Writes   o [T, Hv, V], S once.
// Chunks  Two halves of shared memory take turns: chunk c is computed in one while the staging warps write out chunk c - 1
//         from the other and fill it with chunk c + 1. One __syncthreads a chunk, joined by all warps.
// Needs   K <= 32 kSteps (rows past K are zeros), any V, any strides; any arch.
#include <algorithm>

#include "../common/gates.h"
#include "launch.cuh"
#include "ops.h"

namespace gdn::cuda {
namespace {

constexpr int kColumnGroups = 4, kRowsPerGroup = 4;
constexpr int kMaxValuesPerLane = 4;                            // of v, staged by one lane: heads * tile <= 128
constexpr int kMaxComputing = 12, kMaxStaging = 4;              // warps of a block with one column a lane
constexpr int kTokensPerStager = 4;                             // of a chunk

struct Tiling {
  int heads;        // value heads of a block, all of one key head
  int tile_warps;   // computing warps of a head: tile = tile_warps * 4 * kColumns columns
  int columns;      // kColumns
  int stagers;      // staging warps
  int chunk;        // tokens of a chunk
  int64_t head_groups, tiles;
};

// One token on its way to shared memory, as stored bits: widened only when staged, so that the loads do not wait for
// one another.
struct Token {
  uint32_t k[8], q[8];                // element lane + 32 i
  uint32_t v[kMaxValuesPerLane];      // element lane + 32 i of the block's heads x tile
  uint32_t g, beta;                   // of head `lane`
};

// One head's columns of this lane, rows 32 j + 4 r + i.
template <int kSteps, int kColumns>
struct Fragment {
  float s[kColumns][kSteps][kRowsPerGroup];
};

// Adds over the eight lanes of a column: adjacent residue groups first, the upper levels of rule.h's tree.
__device__ __forceinline__ float sum_over_row_groups(float x) {
#pragma unroll
  for (int mask = kColumnGroups; mask < 32; mask <<= 1) x = add(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

template <class state_t>
struct alignas(4 * sizeof(state_t)) Quad {
  state_t x[4];
};

// Moves a fragment between registers and the state of one head at `head` (element offset of its [K, V]). kIsLoad fills the
// registers (rows and columns outside with zero), else stores. Four elements an access along the contiguous dim.
template <class state_t, bool kIsLoad, int kSteps, int kColumns>
__device__ __forceinline__ void move_quads(const View& view, int64_t head, int64_t K, int64_t V, int row_group,
                                           int64_t column, Fragment<kSteps, kColumns>& fragment) {
  const bool k_contiguous = view.stride[2] == 1;
  state_t* const data = static_cast<state_t*>(view.data) + head;
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const int64_t row = 32 * j + kRowsPerGroup * row_group;
    if (k_contiguous) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const bool inside = row < K && column + c < V;
        auto* const quad = reinterpret_cast<Quad<state_t>*>(data + row + (column + c) * view.stride[3]);
        Quad<state_t> values{};
        if (kIsLoad && inside) values = *quad;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (kIsLoad) fragment.s[c][j][i] = to_float(values.x[i]);
          else values.x[i] = from_float<state_t>(fragment.s[c][j][i]);
        }
        if (!kIsLoad && inside) *quad = values;
      }
    } else if constexpr (kColumns == 4) {
#pragma unroll
      for (int i = 0; i < kRowsPerGroup; ++i) {
        const bool inside = row + i < K && column < V;
        auto* const quad = reinterpret_cast<Quad<state_t>*>(data + (row + i) * view.stride[2] + column);
        Quad<state_t> values{};
        if (kIsLoad && inside) values = *quad;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (kIsLoad) fragment.s[c][j][i] = to_float(values.x[c]);
          else values.x[c] = from_float<state_t>(fragment.s[c][j][i]);
        }
        if (!kIsLoad && inside) *quad = values;
      }
    }
  }
}

// The same one element an access: any strides.
template <bool kIsLoad, int kSteps, int kColumns>
__device__ __forceinline__ void move_elements(const View& view, int64_t head, int64_t K, int64_t V, int row_group,
                                              int64_t column, Fragment<kSteps, kColumns>& fragment) {
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
#pragma unroll
    for (int i = 0; i < kRowsPerGroup; ++i) {
      const int64_t row = 32 * j + kRowsPerGroup * row_group + i;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const bool inside = row < K && column + c < V;
        const int64_t element = head + row * view.stride[2] + (column + c) * view.stride[3];
        if (kIsLoad) fragment.s[c][j][i] = inside ? view.load(element) : 0.0f;
        else if (inside) view.store(element, fragment.s[c][j][i]);
      }
    }
  }
}

template <bool kIsLoad, int kSteps, int kColumns>
__device__ __forceinline__ void move_state(const View& view, int64_t head, bool in_quads, int64_t K, int64_t V,
                                           int row_group, int64_t column, Fragment<kSteps, kColumns>& fragment) {
  if (!in_quads) {
    move_elements<kIsLoad>(view, head, K, V, row_group, column, fragment);
  } else if (view.dtype == DType::kFloat32) {
    move_quads<float, kIsLoad>(view, head, K, V, row_group, column, fragment);
  } else if (view.dtype == DType::kBFloat16) {
    move_quads<bf16_t, kIsLoad>(view, head, K, V, row_group, column, fragment);
  } else {
    move_quads<fp16_t, kIsLoad>(view, head, K, V, row_group, column, fragment);
  }
}

// What a block works on.
struct Work {
  int64_t n, key_head, head, column;   // sequence; first value head and first column of the block
};

__device__ __forceinline__ Work work_of_block(const RuleParams& p, const Tiling& tiling) {
  const int64_t tile_columns = tiling.tile_warps * kColumnGroups * tiling.columns;
  const int64_t tile = blockIdx.x % tiling.tiles, rest = blockIdx.x / tiling.tiles;
  const int64_t head = (rest % tiling.head_groups) * tiling.heads;
  return {rest / tiling.head_groups, key_head(head, p.dims.Hk, p.dims.Hv), head, tile * tile_columns};
}

// Where a lane of a staging warp finds its elements of the span's first token.
struct TokenSource {
  const char *k, *q;                        // element lane of the block's key head
  const char* v[kMaxValuesPerLane];         // nullptr: outside the tile
  const char *g, *beta;                     // nullptr: not given, or no head of this lane
};

__device__ __forceinline__ const char* element(const View& view, int64_t offset) {
  return static_cast<const char*>(view.data) + offset * dtype_size(view.dtype);
}

__device__ __forceinline__ TokenSource source_of_span(const RuleParams& p, const Tiling& tiling, const Work& work,
                                                      const Span& span, int lane) {
  TokenSource source;
  source.k = element(p.k, p.k.offset(span.batch, span.first, work.key_head, lane));
  source.q = element(p.q, p.q.offset(span.batch, span.first, work.key_head, lane));
  const int tile_columns = tiling.tile_warps * kColumnGroups * tiling.columns;
#pragma unroll
  for (int i = 0; i < kMaxValuesPerLane; ++i) {
    const int idx = lane + 32 * i, head = idx / tile_columns;
    const int64_t column = work.column + idx % tile_columns;
    const bool inside = head < tiling.heads && column < p.dims.V;
    source.v[i] = inside ? element(p.v, p.v.offset(span.batch, span.first, work.head + head, column)) : nullptr;
  }
  const bool has_head = lane < tiling.heads;
  const int64_t head = work.head + lane;
  source.g = has_head && p.g.given() ? element(p.g, p.g.offset(span.batch, span.first, head)) : nullptr;
  source.beta = has_head && p.beta.given() ? element(p.beta, p.beta.offset(span.batch, span.first, head)) : nullptr;
  return source;
}

// Issues the loads of token t. bits_t: uint32_t or uint16_t, the size of an element of q, k and v.
template <int kSteps, class bits_t>
__device__ __forceinline__ void load_vectors(const RuleParams& p, const TokenSource& source, int64_t t, int lane,
                                             Token& token) {
  const bits_t* k = reinterpret_cast<const bits_t*>(source.k) + t * p.k.stride[1];
  const bits_t* q = reinterpret_cast<const bits_t*>(source.q) + t * p.q.stride[1];
  const int64_t v = t * p.v.stride[1], step_k = 32 * p.k.stride[3], step_q = 32 * p.q.stride[3];
  const int key_dim = static_cast<int>(p.dims.K);
#pragma unroll
  for (int i = 0; i < kSteps; ++i, k += step_k, q += step_q) {
    token.k[i] = lane + 32 * i < key_dim ? *k : 0u;
    token.q[i] = lane + 32 * i < key_dim ? *q : 0u;
  }
#pragma unroll
  for (int i = 0; i < kMaxValuesPerLane; ++i) {
    token.v[i] = source.v[i] != nullptr ? reinterpret_cast<const bits_t*>(source.v[i])[v] : 0u;
  }
}

template <int kSteps>
__device__ __forceinline__ void load_token(const RuleParams& p, const TokenSource& source, int64_t t, int lane,
                                           Token& token) {
  if (p.q.dtype == DType::kFloat32) {
    load_vectors<kSteps, uint32_t>(p, source, t, lane, token);
  } else {
    load_vectors<kSteps, uint16_t>(p, source, t, lane, token);
  }
  if (source.g != nullptr) token.g = load_bits(source.g, p.g.dtype, t * p.g.stride[1]);
  if (source.beta != nullptr) token.beta = load_bits(source.beta, p.beta.dtype, t * p.beta.stride[1]);
}

// Shared memory of one token, in floats: k [32 kSteps], q [32 kSteps], v [heads x tile], scalars [heads] of 8. What comes
// out, o [heads x tile], takes the place of v.
struct TokenLayout {
  int q, v, scalars, floats;
};

__host__ __device__ __forceinline__ TokenLayout token_layout(const Tiling& tiling, int padded_key_dim) {
  const int values = tiling.heads * tiling.tile_warps * kColumnGroups * tiling.columns;
  const int v = 2 * padded_key_dim, scalars = v + values;
  return {padded_key_dim, v, scalars, scalars + 8 * tiling.heads};
}

static_assert(sizeof(StepScalars) == 8 * sizeof(float), "a head's scalars are one record of 8 floats");

template <int kSteps>
__device__ __forceinline__ void stage_token(const RuleParams& p, const Tiling& tiling, const TokenLayout& layout,
                                            const Token& token, int lane, float* smem_token) {
  float kk = 0.0f, qq = 0.0f, kq = 0.0f;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const float k = widen_bits(token.k[i], p.q.dtype), q = widen_bits(token.q[i], p.q.dtype);
    smem_token[lane + 32 * i] = k;
    smem_token[layout.q + lane + 32 * i] = q;
    kk = accumulate(k, k, kk);
    qq = accumulate(q, q, qq);
    kq = accumulate(k, q, kq);
  }
#pragma unroll
  for (int i = 0; i < kMaxValuesPerLane; ++i) {
    const int idx = layout.v + lane + 32 * i;
    if (idx < layout.scalars) smem_token[idx] = widen_bits(token.v[i], p.q.dtype);
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask <<= 1) {   // the three side by side: one latency
    kk = add(kk, __shfl_xor_sync(0xffffffffu, kk, mask));
    qq = add(qq, __shfl_xor_sync(0xffffffffu, qq, mask));
    kq = add(kq, __shfl_xor_sync(0xffffffffu, kq, mask));
  }
  const float sk = p.use_qk_l2norm ? l2norm_factor(kk) : 1.0f, sq = p.use_qk_l2norm ? l2norm_factor(qq) : 1.0f;
  if (lane < tiling.heads) {
    const float alpha = p.g.given() ? decay_of(widen_bits(token.g, p.g.dtype), p.gate_is_linear) : 1.0f;
    const float beta = p.beta.given() ? widen_bits(token.beta, p.beta.dtype) : 1.0f;
    *reinterpret_cast<StepScalars*>(smem_token + layout.scalars + 8 * lane) =
        step_scalars(alpha, beta, p.scale, sk, sq, kq);
  }
}

// What a lane needs of one token.
template <int kSteps>
struct Operands {
  Quad<float> k[kSteps], q[kSteps];
  StepScalars scalars;
};

template <int kSteps>
__device__ __forceinline__ Operands<kSteps> read_operands(const float* smem_token, const TokenLayout& layout,
                                                          int head_in_block, int row_group) {
  Operands<kSteps> operands;
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const int row = 32 * j + kRowsPerGroup * row_group;
    operands.k[j] = *reinterpret_cast<const Quad<float>*>(smem_token + row);
    operands.q[j] = *reinterpret_cast<const Quad<float>*>(smem_token + layout.q + row);
  }
  operands.scalars = *reinterpret_cast<const StepScalars*>(smem_token + layout.scalars + 8 * head_in_block);
  return operands;
}

// One token of one head on this lane's columns; o replaces v in shared memory.
template <int kSteps, int kColumns>
__device__ __forceinline__ void step(const Operands<kSteps>& x, float* smem_v, int row_group,
                                     Fragment<kSteps, kColumns>& fragment) {
  float v[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) v[c] = smem_v[c];
  float u[kColumns][kRowsPerGroup] = {}, w[kColumns][kRowsPerGroup] = {};
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < kRowsPerGroup; ++i) {
        u[c][i] = accumulate(fragment.s[c][j][i], x.k[j].x[i], u[c][i]);
        w[c][i] = accumulate(fragment.s[c][j][i], x.q[j].x[i], w[c][i]);
      }
    }
  }
  const StepScalars& scalars = x.scalars;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const float sum_u = sum_over_row_groups(add(add(u[c][0], u[c][1]), add(u[c][2], u[c][3])));
    const float sum_w = sum_over_row_groups(add(add(w[c][0], w[c][1]), add(w[c][2], w[c][3])));
    const float f = write_factor(scalars.neg_alpha_sk, scalars.beta, scalars.sk, sum_u, v[c]);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
#pragma unroll
      for (int i = 0; i < kRowsPerGroup; ++i) {
        fragment.s[c][j][i] = write_state(scalars.alpha, x.k[j].x[i], f, fragment.s[c][j][i]);
      }
    }
    const float o = read_output(scalars.scale_sq, scalars.kq, scalars.alpha, f, sum_w);
    if (row_group == c) smem_v[c] = o;   // the lanes of a column all hold o; every lane of it has read v above
  }
}

// The tokens of one chunk. With one column a lane the operands are read a token ahead, into two sets that take turns: that
// hides the shared-memory latency which so few independent sums cannot; more columns have the registers for one set only.
template <int kSteps, int kColumns>
__device__ __forceinline__ void run_chunk(float* smem_token, const TokenLayout& layout, int count, int head_in_block,
                                          int row_group, int values, Fragment<kSteps, kColumns>& fragment) {
  const auto read = [&](int i) {
    return read_operands<kSteps>(smem_token + (i < count ? i : 0) * layout.floats, layout, head_in_block, row_group);
  };
  if constexpr (kColumns == 1 && kSteps <= 4) {
    Operands<kSteps> even = read(0);
    for (int i = 0; i < count; i += 2) {
      const Operands<kSteps> odd = read(i + 1);
      step<kSteps, kColumns>(even, smem_token + i * layout.floats + values, row_group, fragment);
      if (i + 1 >= count) break;
      even = read(i + 2);
      step<kSteps, kColumns>(odd, smem_token + (i + 1) * layout.floats + values, row_group, fragment);
    }
  } else {
    for (int i = 0; i < count; ++i) {
      step<kSteps, kColumns>(read(i), smem_token + i * layout.floats + values, row_group, fragment);
    }
  }
}

// A staging warp writes the o that was left in shared memory for one token.
__device__ __forceinline__ void store_out(const RuleParams& p, const Tiling& tiling, const Work& work, const Span& span,
                                          int64_t t, int lane, const float* smem_v) {
  const int tile_columns = tiling.tile_warps * kColumnGroups * tiling.columns;
#pragma unroll
  for (int i = 0; i < kMaxValuesPerLane; ++i) {
    const int idx = lane + 32 * i, head = idx / tile_columns;
    const int64_t column = work.column + idx % tile_columns;
    if (head < tiling.heads && column < p.dims.V) {
      p.out.store(p.out.offset(span.batch, span.first + t, work.head + head, column), smem_v[idx]);
    }
  }
}

// The role of staging warp `stager`: tokens stager, stager + stagers, ... of every chunk, the next one's loads in flight
// while one is staged. Joins num_chunks + 1 barriers, as run_computing does.
template <int kSteps>
__device__ __forceinline__ void run_staging(const RuleParams& p, const Tiling& tiling, const Work& work, const Span& span,
                                            const TokenLayout& layout, int stager, int lane, float* smem_tokens) {
  const TokenSource source = source_of_span(p, tiling, work, span, lane);
  const int64_t num_chunks = ceil_div(span.length, tiling.chunk);
  for (int64_t c = -1; c < num_chunks; ++c) {
    if (c >= 0) __syncthreads();   // chunk c is staged, chunk c - 1 is computed
    float* const smem_half = smem_tokens + ((c + 1) & 1) * tiling.chunk * layout.floats;
    for (int i = stager; i < tiling.chunk && c >= 1; i += tiling.stagers) {
      store_out(p, tiling, work, span, (c - 1) * tiling.chunk + i, lane, smem_half + i * layout.floats + layout.v);
    }
    const int64_t first = (c + 1) * tiling.chunk;
    const int count = static_cast<int>(span.length - first < tiling.chunk ? span.length - first : tiling.chunk);
    Token token;
    if (stager < count) load_token<kSteps>(p, source, first + stager, lane, token);
    for (int i = stager; i < count; i += tiling.stagers) {
      Token ahead;
      if (i + tiling.stagers < count) load_token<kSteps>(p, source, first + i + tiling.stagers, lane, ahead);
      stage_token<kSteps>(p, tiling, layout, token, lane, smem_half + i * layout.floats);
      token = ahead;
    }
  }
  __syncthreads();                 // the last chunk is computed
  const int64_t first = num_chunks > 0 ? (num_chunks - 1) * tiling.chunk : 0;
  for (int64_t i = stager; first + i < span.length; i += tiling.stagers) {
    store_out(p, tiling, work, span, first + i, lane,
              smem_tokens + (((num_chunks - 1) & 1) * tiling.chunk + i) * layout.floats + layout.v);
  }
}

// The role of a computing warp: every token of every chunk on its columns.
template <int kSteps, int kColumns>
__device__ __forceinline__ void run_computing(const Tiling& tiling, const TokenLayout& layout, int64_t length,
                                              int head_in_block, int row_group, int values, float* smem_tokens,
                                              Fragment<kSteps, kColumns>& fragment) {
  for (int64_t first = 0, half = 0; first < length; first += tiling.chunk, half ^= 1) {
    __syncthreads();
    const int count = static_cast<int>(length - first < tiling.chunk ? length - first : tiling.chunk);
    run_chunk<kSteps, kColumns>(smem_tokens + half * tiling.chunk * layout.floats, layout, count, head_in_block,
                                row_group, values, fragment);
  }
  __syncthreads();
}

// Writes zero for tokens [first, last) of batch row `batch`, the block's heads and columns.
__device__ void write_zeros(const RuleParams& p, const Tiling& tiling, const Work& work, int64_t batch, int64_t first,
                            int64_t last) {
  const int tile_columns = tiling.tile_warps * kColumnGroups * tiling.columns;
  const int values = tiling.heads * tile_columns;
  for (int64_t idx = threadIdx.x; idx < (last - first) * values; idx += blockDim.x) {
    const int64_t time = first + idx / values, head = work.head + idx % values / tile_columns;
    const int64_t column = work.column + idx % tile_columns;
    if (column < p.dims.V) p.out.store(p.out.offset(batch, time, head, column), 0.0f);
  }
}

template <int kSteps, int kColumns>
__global__ void __launch_bounds__(32 * (kColumns == 4 ? 8 : kMaxComputing + kMaxStaging))
    recurrent_kernel(const __grid_constant__ RuleParams p, const __grid_constant__ Tiling tiling,
                     const __grid_constant__ int quads) {
  extern __shared__ float4 smem[];   // [2][chunk] tokens of token_layout
  const Work work = work_of_block(p, tiling);
  if (work.n == p.dims.N) {   // the row behind the last sequence: tokens outside all of them
    write_zeros(p, tiling, work, 0, 0, sequence_span(p.cu_seqlens, 0, p.dims.T).first);
    const int64_t end = p.cu_seqlens.at(p.dims.N);
    write_zeros(p, tiling, work, 0, end < 0 ? 0 : end, p.dims.T);
    return;
  }
  const Span span = sequence_span(p.cu_seqlens, work.n, p.dims.T);
  const int64_t pool = p.initial_state.given() ? p.pool_in : p.pool_out;
  const int64_t slot = slot_of_row(p.slots, work.n, pool);
  if (p.slots.given() && slot < 0) {
    write_zeros(p, tiling, work, span.batch, span.first, span.first + span.length);
    return;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_computing = tiling.heads * tiling.tile_warps;
  const TokenLayout layout = token_layout(tiling, 32 * kSteps);
  float* const smem_tokens = reinterpret_cast<float*>(smem);
  if (warp >= num_computing) {
    run_staging<kSteps>(p, tiling, work, span, layout, warp - num_computing, lane, smem_tokens);
    return;
  }
  const int row_group = lane / kColumnGroups, head_in_block = warp / tiling.tile_warps;
  const int column_in_tile = ((warp % tiling.tile_warps) * kColumnGroups + lane % kColumnGroups) * kColumns;
  const int64_t head = work.head + head_in_block, column = work.column + column_in_tile;
  const int values = layout.v + head_in_block * tiling.tile_warps * kColumnGroups * kColumns + column_in_tile;

  Fragment<kSteps, kColumns> fragment = {};
  if (p.initial_state.given() && p.has_initial_state.at(work.n)) {
    move_state<true>(p.initial_state, p.initial_state.offset(slot, head), quads & 1, p.dims.K, p.dims.V, row_group,
                     column, fragment);
  }
  run_computing<kSteps, kColumns>(tiling, layout, span.length, head_in_block, row_group, values, smem_tokens, fragment);
  const int64_t out_slot =
      p.out_slots.given() ? slot_of_row(p.out_slots, work.n, p.pool_out) : slot_of_row(p.slots, work.n, p.pool_out);
  if (p.state.given() && out_slot >= 0) {
    move_state<false>(p.state, p.state.offset(out_slot, head), quads & 2, p.dims.K, p.dims.V, row_group, column,
                      fragment);
  }
}

// Four elements of the contiguous dim at once: all offsets and the dim itself are multiples of four, the base is aligned,
// and where V is that dim the lane owns four columns.
bool moves_in_quads(const View& state, const Dims& dims, const Tiling& tiling) {
  const bool k_contiguous = state.stride[2] == 1;
  if (!k_contiguous && tiling.columns != 4) return false;
  const int64_t contiguous_dim = k_contiguous ? dims.K : dims.V, other_stride = state.stride[k_contiguous ? 3 : 2];
  const bool strides = state.stride[0] % 4 == 0 && state.stride[1] % 4 == 0 && other_stride % 4 == 0;
  const auto address = reinterpret_cast<uintptr_t>(state.data);
  return state.given() && strides && contiguous_dim % 4 == 0 && address % (4 * dtype_size(state.dtype)) == 0;
}

// How to cut the work. Long sequences: one column a lane while that leaves at most three computing warps a scheduler, so
// that the chain of one token hides behind other warps; four columns a lane when there is more than enough. Short ones read
// and write the state and little else: four columns, so that K-first rows move 64 bytes a warp.
Tiling pick(const Dims& dims, int num_sms) {
  const int64_t group = dims.Hv / dims.Hk, columns = dims.N * dims.Hv * dims.V;
  const int64_t room = static_cast<int64_t>(num_sms) * kMaxComputing * kColumnGroups;   // columns at one a lane
  const bool is_short = dims.B * dims.T <= 8 * dims.N;
  const int per_lane = is_short || columns > room ? 4 : 1;
  int tile_warps = static_cast<int>(std::min<int64_t>(4, ceil_div(dims.V, kColumnGroups * per_lane)));
  if (is_short) {   // 16 columns a block at one row, 32 at four, 64 beyond: bytes in flight against blocks
    tile_warps = std::min(tile_warps, columns * 8 <= room ? 1 : (columns * 2 <= room ? 2 : 4));
  }
  const int tile_columns = tile_warps * kColumnGroups * per_lane;
  int heads = 1;   // share a key head's staging among as many value heads as fit
  for (int64_t h = 2; h <= group && per_lane == 1; ++h) {
    if (group % h == 0 && h * tile_warps <= kMaxComputing && h * tile_columns <= 32 * kMaxValuesPerLane) {
      heads = static_cast<int>(h);
    }
  }
  const int stagers = is_short ? 1 : kMaxStaging;
  return {heads, tile_warps, per_lane, stagers, stagers * kTokensPerStager, dims.Hv / heads, ceil_div(dims.V, tile_columns)};
}

template <int kSteps, int kColumns>
const char* launch_recurrent(const RuleParams& params, const Tiling& tiling, void* stream) {
  const int64_t rows = params.dims.N + (params.cu_seqlens.given() ? 1 : 0);
  const int64_t blocks = rows * tiling.head_groups * tiling.tiles;
  if (blocks > kMaxBlocks) return "more than 2^31 - 1 blocks";
  const int num_warps = tiling.heads * tiling.tile_warps + tiling.stagers;
  const int quads = (moves_in_quads(params.initial_state, params.dims, tiling) ? 1 : 0) |
                    (moves_in_quads(params.state, params.dims, tiling) ? 2 : 0);
  const size_t smem_bytes = 2 * tiling.chunk * token_layout(tiling, 32 * kSteps).floats * sizeof(float);
  return launch(recurrent_kernel<kSteps, kColumns>, blocks, 32 * num_warps, smem_bytes, stream, params, tiling, quads);
}

template <int kSteps>
const char* launch_columns(const RuleParams& params, const Tiling& tiling, void* stream) {
  return tiling.columns == 4 ? launch_recurrent<kSteps, 4>(params, tiling, stream)
                             : launch_recurrent<kSteps, 1>(params, tiling, stream);
}

}  // namespace

const char* gated_delta_rule(const RuleParams& params, void* stream) {
  const Tiling tiling = pick(params.dims, num_multiprocessors());
  const int64_t steps = ceil_div(params.dims.K, 32);
  if (steps <= 1) return launch_columns<1>(params, tiling, stream);
  if (steps <= 2) return launch_columns<2>(params, tiling, stream);
  if (steps <= 3) return launch_columns<3>(params, tiling, stream);
  if (steps <= 4) return launch_columns<4>(params, tiling, stream);
  if (steps <= 6) return launch_columns<6>(params, tiling, stream);
  return launch_columns<8>(params, tiling, stream);
}

}  // namespace gdn::cuda
