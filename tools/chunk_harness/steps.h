// SPDX-License-Identifier: Apache-2.0
// Of harness and emulator: what the steps of the two-level scan (steps.cuh) add to the error of the chunks. A row is cut at
// every chunk, the last one leaves the state as it is; A and B of the others are what calls of a chunk each make of the
// identity without V and of zero with it, put together in float64.
#pragma once
#include "cases.h"

namespace cases {

inline Problem chunk_of(const Problem& p, int chunk, bool has_values) {
  Problem part = p;
  part.T = part.c.T = 64;
  const auto cut = [&](auto& all, int of_token) {
    const auto first = all.begin() + static_cast<int64_t>(chunk) * 64 * of_token;
    all = std::decay_t<decltype(all)>(first, first + 64 * of_token);
  };
  cut(part.qkv, p.total_channels);
  cut(part.g, 1);
  cut(part.beta, 1);
  for (int i = 0; i < 64 * Problem::V && !has_values; ++i) {
    part.qkv[static_cast<size_t>(i / Problem::V) * p.total_channels + 2 * Problem::K + i % Problem::V] = 0;
  }
  return part;
}

// The relative error of the state `steps` steps behind a row's second segment. `state_of(problem, tokens of a segment or 0)` is
// its state as stored.
template <class StateOf>
double step_error(Case c, int steps, const StateOf& state_of) {
  constexpr int K = Problem::K, V = Problem::V;
  c.N = c.Hk = c.Hv = 1;
  c.T = 64 * (steps + 2);
  Problem p = make(c);
  std::fill(p.g.end() - 64, p.g.end(), 0.0f);
  std::fill(p.beta.end() - 64, p.beta.end(), 0.0f);
  const auto end_of = [&](const Problem& problem, int64_t cut) {
    const std::vector<char> bytes = state_of(problem, cut);
    std::vector<double> state(K * V);
    for (int i = 0; i < K * V; ++i) state[i] = gdn::load_float(bytes.data(), DType::kFloat32, i);
    return state;
  };
  std::vector<double> s = end_of(chunk_of(p, 0, true), 0);
  for (int step = 1; step <= steps; ++step) {
    Problem of_a = chunk_of(p, step, false), of_b = chunk_of(p, step, true);
    for (int i = 0; i < K * V; ++i) {
      gdn::store_float(of_a.state_in.data(), DType::kFloat32, i, i / V == i % V ? 1.0f : 0.0f);
      gdn::store_float(of_b.state_in.data(), DType::kFloat32, i, 0.0f);
    }
    const std::vector<double> a = end_of(of_a, 0);
    std::vector<double> next = end_of(of_b, 0);
    for (int i = 0; i < K * K; ++i) {
      for (int v = 0; v < V; ++v) next[i / K * V + v] += a[i / K * V + i % K] * s[i % K * V + v];
    }
    s = next;
  }
  const std::vector<double> got = end_of(p, 64);
  double num = 0, den = 0;
  for (int i = 0; i < K * V; ++i) {
    num += (got[i] - s[i]) * (got[i] - s[i]);
    den += s[i] * s[i];
  }
  return std::sqrt(num / den);
}

// Errors after one step and after ten. Emulated they are 1e-7 and 3e-7; the tensor cores cut off sums' last digits. Two bf16
// instead of two fp16 left 4e-6 and 1.3e-5.
template <class StateOf>
int check_steps(const StateOf& state_of) {
  constexpr double kOfOne = 1e-6, kOfTen = 4e-6;
  int bad = 0;
  const auto check = [&](const char* name, auto&& change) {
    Case c;
    change(c);
    const double one = step_error(c, 1, state_of), ten = step_error(c, 10, state_of);
    const bool ok = one <= kOfOne && ten <= kOfTen;
    printf("steps, %-20s one %.1e (%.0e)  ten %.1e (%.0e)  %s\n", name, one, kOfOne, ten, kOfTen, ok ? "ok" : "FAIL");
    fflush(stdout);
    bad += !ok;
  };
  check("tiny decay", [](Case& c) { c.gates = 4; });
  check("no decay, no V", [](Case& c) { c.gates = 1; c.v_scale = 0; });
  check("correlated keys", [](Case& c) { c.gates = 4; c.keys = 1; });
  check("S 1e20, v 1e18", [](Case& c) { c.gates = 4; c.s_scale = 1e20f; c.v_scale = 1e18f; });
  check("S 1e-20, v 1e-22", [](Case& c) { c.gates = 4; c.s_scale = 1e-20f; c.v_scale = 1e-22f; });
  check("A of zeros", [](Case& c) { c.gates = 2; });
  return bad;
}

}  // namespace cases
