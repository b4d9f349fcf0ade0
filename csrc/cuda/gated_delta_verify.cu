// SPDX-License-Identifier: Apache-2.0
// gated_delta_verify on a GPU: the rule over tokens that may be taken back.
//     S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q
// What is kept of the states is one of: a record a token (raw key, f, alpha), the state after each token in a slot of its
// own, the same in a buffer. Rows longer than the ring write their last state to their slot and record nothing.

#include "../common/gates.h"
#include "../common/ring.h"
#include "launch.cuh"
#include "ops.h"
#include "rule_kernels.h"

namespace gdn::cuda {
namespace {

constexpr int kWarps = 4, kColumnLanes = 4, kOwned = 4;   // a lane owns 4 adjacent residues of one column
constexpr int kTile = kWarps * kColumnLanes;              // columns of a block
constexpr unsigned kAllLanes = 0xffffffffu;

// What a block works on: sequence, value head and its key head, first column.
struct Work {
  int64_t n, head, key_head, column;
};

__device__ __forceinline__ Work work_of_block(const Dims& d, int64_t block) {
  const int64_t tiles = ceil_div(d.V, kTile), rest = block / tiles, head = rest % d.Hv;
  return {rest / d.Hv, head, key_head(head, d.Hk, d.Hv), block % tiles * kTile};
}

// One token in shared memory: k and q in fp32, zeros past K, and its scalars.
template <int kSteps>
struct Token {
  float k[kResidues * kSteps], q[kResidues * kSteps];
  StepScalars scalars;
};

// rule.h's tree over 32 partial sums, one a lane.
__device__ __forceinline__ float sum_of_lanes(float partial) {
#pragma unroll
  for (int mask = 1; mask < 32; mask <<= 1) partial = add(partial, __shfl_xor_sync(kAllLanes, partial, mask));
  return partial;
}

// By one warp; lane = residue.
template <int kSteps>
__device__ __forceinline__ void stage_token(const RuleParams& p, const Work& work, int64_t batch, int64_t time, int lane,
                                            Token<kSteps>& smem) {
  float kk = 0.0f, qq = 0.0f, kq = 0.0f;
  const int64_t gmem_k = p.k.offset(batch, time, work.key_head), gmem_q = p.q.offset(batch, time, work.key_head);
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const int row = kResidues * j + lane;
    const float k = row < p.dims.K ? p.k.load(gmem_k + row * p.k.stride[3]) : 0.0f;
    const float q = row < p.dims.K ? p.q.load(gmem_q + row * p.q.stride[3]) : 0.0f;
    smem.k[row] = k;
    smem.q[row] = q;
    kk = accumulate(k, k, kk);
    qq = accumulate(q, q, qq);
    kq = accumulate(k, q, kq);
  }
  kk = sum_of_lanes(kk);
  qq = sum_of_lanes(qq);
  kq = sum_of_lanes(kq);
  if (lane != 0) return;
  const bool is_linear = p.gate_domain == GateDomain::kLinear;
  const float alpha = p.g.given() ? decay_of(p.g.load(p.g.offset(batch, time, work.head)), is_linear) : 1.0f;
  const float beta = p.beta.given() ? p.beta.load(p.beta.offset(batch, time, work.head)) : 1.0f;
  smem.scalars = step_scalars(alpha, beta, p.scale, p.use_qk_l2norm ? l2norm_factor(kk) : 1.0f,
                              p.use_qk_l2norm ? l2norm_factor(qq) : 1.0f, kq);
}

// One column of S: the rows 32 j + 4 group + i that this lane owns.
template <int kSteps>
struct Column {
  int64_t index;            // of V; past V the lane computes on zeros and stores nothing
  int group;
  float s[kSteps][kOwned];

  template <class Visit>
  __device__ __forceinline__ void visit(const View& view, int64_t base, const Dims& d, Visit&& visit_element) {
    if (index >= d.V) return;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        const int row = kResidues * j + kOwned * group + i;
        if (row < d.K) visit_element(base + row * view.stride[2] + index * view.stride[3], s[j][i]);
      }
    }
  }
  __device__ __forceinline__ void load(const View& view, int64_t base, const Dims& d) {
    visit(view, base, d, [&](int64_t at, float& x) { x = view.load(at); });
  }
  __device__ __forceinline__ void store(const View& view, int64_t base, const Dims& d) {
    visit(view, base, d, [&](int64_t at, float& x) { view.store(at, x); });
  }
};

// rule.h's step; gives o and f of the column to all its lanes.
template <int kSteps>
__device__ __forceinline__ void step(const Token<kSteps>& smem, float v, Column<kSteps>& column, float& o, float& f) {
  float u_part[kOwned] = {}, w_part[kOwned] = {};
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const int row = kResidues * j + kOwned * column.group + i;
      u_part[i] = accumulate(column.s[j][i], smem.k[row], u_part[i]);
      w_part[i] = accumulate(column.s[j][i], smem.q[row], w_part[i]);
    }
  }
  float u = add(add(u_part[0], u_part[1]), add(u_part[2], u_part[3]));
  float w = add(add(w_part[0], w_part[1]), add(w_part[2], w_part[3]));
#pragma unroll
  for (int mask = kColumnLanes; mask < 32; mask <<= 1) {
    u = add(u, __shfl_xor_sync(kAllLanes, u, mask));
    w = add(w, __shfl_xor_sync(kAllLanes, w, mask));
  }
  const StepScalars x = smem.scalars;
  f = write_factor(x.neg_alpha_sk, x.beta, x.sk, u, v);
  o = read_output(x.scale_sq, x.kq, x.alpha, f, w);
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const int row = kResidues * j + kOwned * column.group + i;
      column.s[j][i] = write_state(x.alpha, smem.k[row], f, column.s[j][i]);
    }
  }
}

// The parts of a record that no column has: the key by the first tile of the group's first head, alpha by each head's.
template <int kSteps>
__device__ __forceinline__ void record_token(const VerifyParams& p, const Work& work, int64_t record,
                                             const Token<kSteps>& smem) {
  const Dims& d = p.rule.dims;
  const int64_t group = d.Hv / d.Hk, member = work.head - work.key_head * group;
  if (work.column != 0) return;
  if (threadIdx.x == 0) p.ring.store(record + record_alpha(d.K, d.V, group, member), smem.scalars.alpha);
  for (int i = threadIdx.x; i < d.K && member == 0; i += 32 * kWarps) p.ring.store(record + i, smem.k[i]);
}

__device__ __forceinline__ void write_zeros(const RuleParams& p, const Work& work, int64_t batch, int64_t first,
                                            int64_t last) {
  for (int64_t idx = threadIdx.x; idx < (last - first) * kTile; idx += 32 * kWarps) {
    const int64_t column = work.column + idx % kTile;
    if (column < p.dims.V) p.out.store(p.out.offset(batch, first + idx / kTile, work.head, column), 0.0f);
  }
}

// The state after token t, where the call keeps it.
template <int kSteps>
__device__ __forceinline__ void keep_state(const VerifyParams& p, const Work& work, int64_t t, Column<kSteps>& column) {
  const RuleParams& rule = p.rule;
  if (p.states_out.given()) {
    const int64_t base = work.n * p.states_row_stride + p.states_out.offset(t, work.head);
    if (t < p.states_length) column.store(p.states_out, base, rule.dims);
  } else if (p.state_table.given()) {
    const int64_t slot = p.token_slot(work.n, t);
    if (slot >= 0) column.store(rule.state, rule.state.offset(slot, work.head), rule.dims);
  }
}

// Any head dims, strides and lengths, all three contracts: one column a lane, one token at a time. The fast way is
// decode's.
// Grid    x: sequence (slowest), value head, tile of kTile columns (fastest); ragged: one more row for tokens of none.
// Block   kWarps warps; lanes = 8 residue groups x 4 columns (fastest), so that the tree of rule.h ends in three shuffles.
// Shared  one Token, staged by the first warp: a barrier before it is read and one before it is overwritten.
template <int kSteps>
__global__ void __launch_bounds__(32 * kWarps, 3) verify_any(const __grid_constant__ VerifyParams p, int64_t num_blocks) {
  __shared__ Token<kSteps> smem;
  const RuleParams& rule = p.rule;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const Work work = work_of_block(rule.dims, block);
    if (!takes_row(rule, work.n)) continue;
    if (work.n == rule.dims.N) {
      write_zeros(rule, work, 0, 0, sequence_span(rule.cu_seqlens, 0, rule.dims.T).first);
      const int64_t end = rule.cu_seqlens.at(rule.dims.N);
      write_zeros(rule, work, 0, end < 0 ? 0 : end, rule.dims.T);
      continue;
    }
    const Span span = sequence_span(rule.cu_seqlens, work.n, rule.dims.T);
    const int64_t slot = p.start_slot(work.n);
    if (slot < 0) {
      write_zeros(rule, work, span.batch, span.first, span.first + span.length);
      continue;
    }
    const bool commits = p.commits(span.length);
    const int64_t ring_row = p.ring.given() && !commits ? p.ring_row(work.n) : -1;
    Column<kSteps> column{work.column + warp * kColumnLanes + lane % kColumnLanes, lane / kColumnLanes, {}};
    column.load(rule.initial_state, rule.initial_state.offset(slot, work.head), rule.dims);
    const bool is_first_lane = column.group == 0 && column.index < rule.dims.V;
    const int64_t member = work.head - work.key_head * (rule.dims.Hv / rule.dims.Hk);
    for (int64_t t = 0; t < span.length; ++t) {
      const int64_t time = span.first + t;
      if (warp == 0) stage_token<kSteps>(rule, work, span.batch, time, lane, smem);
      float v = 0.0f, o, f;
      if (column.index < rule.dims.V) v = rule.v.load(rule.v.offset(span.batch, time, work.head, column.index));
      __syncthreads();   // the token is there
      const int64_t record = ring_row < 0 ? 0 : p.ring.offset(ring_row, work.key_head, t);
      if (ring_row >= 0) record_token<kSteps>(p, work, record, smem);
      step<kSteps>(smem, v, column, o, f);
      if (is_first_lane) {
        rule.out.store(rule.out.offset(span.batch, time, work.head, column.index), o);
        if (ring_row >= 0) p.ring.store(record + record_factor(rule.dims.K, rule.dims.V, member) + column.index, f);
      }
      keep_state<kSteps>(p, work, t, column);
      __syncthreads();   // all have read the token that the next one overwrites
    }
    if (commits) column.store(rule.state, rule.state.offset(slot, work.head), rule.dims);
  }
}

const char* launch_any(const VerifyParams& params, void* stream) {
  const Dims& dims = params.rule.dims;
  const int64_t rows = dims.N + (params.rule.cu_seqlens.given() ? 1 : 0);
  const int64_t num_blocks = rows * dims.Hv * ceil_div(dims.V, kTile);
  const int64_t steps = ceil_div(dims.K, kResidues);
  auto* const kernel = steps <= 1 ? verify_any<1> : (steps <= 2 ? verify_any<2> : (steps <= 4 ? verify_any<4> : verify_any<8>));
  return launch(kernel, num_blocks, 32 * kWarps, 0, stream, params, num_blocks);
}

}  // namespace

// With a ring: the recurrence for rows longer than it, where there can be any, and one of the two verify kernels for the
// others, each leaving the other's rows alone. Without: one of the two for all.
const char* gated_delta_verify(const VerifyParams& params, void* stream) {
  if (!params.ring.given()) {
    return decode_supports(params) ? decode_gated_delta_verify(params, stream) : launch_any(params, stream);
  }
  const bool has_long_rows = params.rule.dims.T > params.ring_length, has_ragged_rows = params.rule.cu_seqlens.given();
  if (has_long_rows) {
    RuleParams rule = params.rule;
    rule.rows = {params.ring_length + 1, INT64_MAX};
    const char* error = recurrent_gated_delta_rule(rule, stream);
    if (error != nullptr || !has_ragged_rows) return error;
  }
  VerifyParams verify = params;
  verify.rule.rows = {0, has_long_rows ? params.ring_length : INT64_MAX};
  return decode_supports(verify) ? decode_gated_delta_verify(verify, stream) : launch_any(verify, stream);
}

}  // namespace gdn::cuda
