// SPDX-License-Identifier: Apache-2.0
// A layer between its projections over a range of units, a unit being one sequence and one key head with its value heads:
// the pieces of the other ops, one after the other on buffers that stay in the first-level cache.
//
//     q, k, v   the convolution, rounded to the projection's dtype      (causal_conv1d.h; the unit's channels are its own,
//     g, beta   the gates                                                so it alone reads and rewrites their windows)
//     o         the rule, in fp32                                       (gated_delta_rule.h: asks for the next unit's state)
//     out       the gated norm
#pragma once

#include <utility>

#include "causal_conv1d.h"
#include "gated_delta_gates.h"
#include "gated_delta_rule.h"
#include "rms_norm_gated.h"

namespace gdn::cpu::GDN_ISA {

constexpr int kStepElements = 8192;     // of v that are in hand at once: 64 value heads of one token at V = 128
constexpr int kStepHeads = 64;
constexpr int kStepKeyElements = kMaxStepTokens * kMaxHeadDim;

struct StepBuffers {
  alignas(64) float q[kStepKeyElements], k[kStepKeyElements], v[kStepElements];   // of the projection's dtype, not all used
  alignas(64) float o[kStepElements];
  float g[kMaxStepTokens * kStepHeads], beta[kMaxStepTokens * kStepHeads];
};

// Where unit `unit` is, and what it works on: value heads [first, first + heads) of the group.
struct StepUnit {
  int64_t n, hk, slot, first, heads;
};

inline View buffer_view(void* data, DType dtype, int64_t token, int64_t head) { return {data, dtype, {0, token, head, 1}}; }

// T tokens of `count` channels from `channel` on; x: the first of them, in x's strides. To `to` [T][row] in x's dtype.
inline void step_conv(const StepParams& p, const StepUnit& u, const View& x, int64_t channel, int64_t count, void* to,
                      int64_t row) {
  ConvParams conv{};
  conv.width = p.width;
  conv.window = p.window;
  conv.x = {x.data, x.dtype, {0, x.stride[3], x.stride[1], 0}};
  conv.out = {to, x.dtype, {0, 1, row, 0}};
  conv.weight = p.conv_weight.from(p.conv_weight.offset(channel));
  conv.bias = p.conv_bias.from(p.conv_bias.offset(channel));
  conv.conv_state = p.conv_state.from(p.conv_state.offset(0, channel));
  conv.use_silu = true;
  conv.write_state = true;
  conv_by_channel(conv, {{0, 0, p.dims.T}, 0, count, u.slot, false, true});
}

inline void step_gates(const StepParams& p, const StepUnit& u, StepBuffers& buffers) {
  const int64_t h = u.hk * p.group() + u.first;
  GatesParams gates{1, p.dims.T, u.heads, {}, {}, {}, {}, {}, {}, p.allow_neg_eigval};
  for (auto [from, to] : {std::pair{&p.a, &gates.a}, std::pair{&p.b, &gates.b}}) {
    *to = from->view.from(from->offset(u.n, 0, u.hk, u.first));
    to->stride[2] = from->member;
  }
  gates.A_log = p.A_log.from(p.A_log.offset(h));
  gates.dt_bias = p.dt_bias.from(p.dt_bias.offset(h));
  gates.g = {buffers.g, DType::kFloat32, {0, u.heads, 1, 0}};
  gates.beta = {buffers.beta, DType::kFloat32, {0, u.heads, 1, 0}};
  gated_delta_gates_range(gates, 0, p.dims.T);
}

// next: the unit after this one, or with heads = 0: none.
inline void step_rule(const StepParams& p, const StepUnit& u, const StepUnit& next, StepBuffers& buffers) {
  const Dims& d = p.dims;
  const int64_t h = u.hk * p.group() + u.first, row = u.heads * d.V, per_head = tiles_per_head(d);
  RuleParams rule{};
  rule.dims = {d.B, d.T, d.N, 1, u.heads, d.K, d.V};
  rule.q = buffer_view(buffers.q, p.q.dtype, d.K, 0);
  rule.k = buffer_view(buffers.k, p.q.dtype, d.K, 0);
  rule.v = buffer_view(buffers.v, p.q.dtype, row, d.V);
  rule.out = buffer_view(buffers.o, DType::kFloat32, row, d.V);
  rule.g = buffer_view(buffers.g, DType::kFloat32, u.heads, 1);
  rule.beta = buffer_view(buffers.beta, DType::kFloat32, u.heads, 1);
  rule.initial_state = rule.state = p.state.from(h * p.state.stride[1]);
  rule.pool_in = rule.pool_out = p.pool;
  rule.slots = p.slots;
  rule.scale = p.scale;
  rule.use_qk_l2norm = true;
  const int64_t ahead = (next.hk * p.group() + next.first - h) * per_head;   // of this unit's first tile
  run_segment(rule, {0, u.n, 0, u.heads * per_head}, {0, next.n, ahead, ahead + next.heads * per_head});
}

inline void step_norm(const StepParams& p, const StepUnit& u, StepBuffers& buffers) {
  const Dims& d = p.dims;
  NormParams norm{1, d.T, u.heads, d.V, d.V, {}, {}, {}, p.norm_weight, p.eps, p.use_silu, p.norm_before_gate};
  norm.x = buffer_view(buffers.o, DType::kFloat32, u.heads * d.V, d.V);
  for (auto [from, to] : {std::pair{&p.z, &norm.z}, std::pair{&p.out, &norm.out}}) {
    *to = from->view.from(from->offset(u.n, 0, u.hk, u.first));
    to->stride[2] = from->member;
  }
  for (int64_t t = 0; t < d.T; ++t) {
    for (int64_t m = 0; m < u.heads; ++m) norm_group(norm, 0, t, m, 0);
  }
}

inline void zero_step_outputs(const StepParams& p, const StepUnit& u) {
  const float zeros[kMaxHeadDim] = {};
  for (int64_t t = 0; t < p.dims.T; ++t) {
    for (int64_t m = u.first; m < u.first + u.heads; ++m) {
      store_row(p.out.view, p.out.offset(u.n, t, u.hk, m), p.out.view.stride[3], p.dims.V, zeros);
    }
  }
}

// Units are numbered [N, Hk], the way the states lie.
inline StepUnit step_unit(const StepParams& p, int64_t unit) {
  const int64_t n = unit / p.dims.Hk;
  return {n, unit % p.dims.Hk, slot_of_row(p.slots, n, p.pool), 0, p.group()};
}

inline void gated_delta_step_range(const StepParams& p, int64_t begin, int64_t end) {
  const Dims& d = p.dims;
  StepBuffers buffers;
  for (int64_t unit = begin; unit < end; ++unit) {
    StepUnit u = step_unit(p, unit);
    if (u.slot < 0) {
      zero_step_outputs(p, u);
      continue;
    }
    step_conv(p, u, p.q.from(p.q.offset(u.n, 0, u.hk)), p.q_channel(u.hk), d.K, buffers.q, d.K);
    step_conv(p, u, p.k.from(p.k.offset(u.n, 0, u.hk)), p.k_channel(u.hk), d.K, buffers.k, d.K);
    const int64_t at_once = smaller(kStepHeads, kStepElements / (d.T * d.V));
    for (u.first = 0; u.first < p.group(); u.first += at_once) {
      u.heads = smaller(at_once, p.group() - u.first);
      for (int64_t m = 0; m < u.heads; ++m) {
        const View v = p.v.view.from(p.v.offset(u.n, 0, u.hk, u.first + m));
        char* const to = reinterpret_cast<char*>(buffers.v) + m * d.V * dtype_size(v.dtype);
        step_conv(p, u, v, p.v_channel(u.hk * p.group() + u.first + m), d.V, to, u.heads * d.V);
      }
      StepUnit next = u;
      next.first += u.heads;
      if (next.first == p.group()) next = unit + 1 < end ? step_unit(p, unit + 1) : StepUnit{u.n, u.hk, -1, u.first, 0};
      step_gates(p, u, buffers);
      step_rule(p, u, next, buffers);
      step_norm(p, u, buffers);
    }
  }
}

}  // namespace gdn::cpu::GDN_ISA
