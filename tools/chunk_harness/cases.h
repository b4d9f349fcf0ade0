// SPDX-License-Identifier: Apache-2.0
// Test problems of the gated delta rule, a float64 reference, and the error measures. Shared by harness and emulator.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace cases {
using gdn::DType;

struct Case {
  std::string name;
  int N = 2, T = 64, Hk = 1, Hv = 2;
  DType io = DType::kBFloat16;
  bool l2norm = true;
  int keys = 0;        // 0 random, 1 strongly correlated
  int gates = 0;       // 0 typical, 1 none decaying, 2 strong, 3 with tokens that forget everything, 4 tiny, 5 mixed scales
  float v_scale = 1;
  float s_scale = 1;   // 0: no initial state
  bool ragged = false, slots = false, v_first = false, linear = false, no_gates = false, out_fp32 = false;
  DType state = DType::kFloat32;
};

struct Problem {
  Case c;
  int B, T, N, total_channels;   // tokens as they lie
  static constexpr int K = 128, V = 128;
  std::vector<uint16_t> qkv;     // [B, T, Hk K | Hk K | Hv V]
  std::vector<float> g, beta;    // [B, T, Hv]
  std::vector<int32_t> cu;       // [N + 1]
  std::vector<int32_t> slots, out_slots;
  std::vector<uint8_t> has_initial;
  int pool;
  std::vector<char> state_in;    // pool, as stored
  float scale;
};

inline float load16(uint16_t b, DType t) {
  return t == DType::kBFloat16 ? gdn::to_float(gdn::bf16_t{b}) : gdn::to_float(gdn::fp16_t{b});
}
inline uint16_t store16(float x, DType t) {
  return t == DType::kBFloat16 ? gdn::from_float<gdn::bf16_t>(x).bits : gdn::from_float<gdn::fp16_t>(x).bits;
}

inline size_t state_index(const Problem& p, int64_t slot, int h, int k, int v) {
  const size_t head = (static_cast<size_t>(slot) * p.c.Hv + h) * Problem::K * Problem::V;
  return head + (p.c.v_first ? static_cast<size_t>(v) * Problem::K + k : static_cast<size_t>(k) * Problem::V + v);
}

inline Problem make(const Case& c, unsigned seed = 1) {
  Problem p;
  p.c = c;
  p.scale = 1.0f / std::sqrt(128.0f);
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0, 1);
  p.N = c.N;
  p.B = c.ragged ? 1 : c.N;
  p.T = c.T;
  if (c.ragged) {   // c.T is the total; lengths uneven, one sequence empty, the last tokens in none
    p.cu.push_back(0);
    const int used = c.T - c.T / 10;
    for (int n = 1; n < c.N; ++n) {
      int cut = static_cast<int>(uniform(rng) * used);
      p.cu.push_back(cut);
    }
    std::sort(p.cu.begin(), p.cu.end());
    if (c.N > 2) p.cu[2] = p.cu[1];
    p.cu.push_back(used);
  }
  const int K = Problem::K, V = Problem::V;
  p.total_channels = 2 * c.Hk * K + c.Hv * V;
  p.qkv.resize(static_cast<size_t>(p.B) * p.T * p.total_channels);
  std::vector<float> base(2 * c.Hk * K);
  for (auto& x : base) x = normal(rng);
  for (size_t row = 0; row < static_cast<size_t>(p.B) * p.T; ++row) {
    uint16_t* const x = p.qkv.data() + row * p.total_channels;
    for (int h = 0; h < 2 * c.Hk; ++h) {
      std::vector<float> y(K);
      double sum = 0;
      for (int i = 0; i < K; ++i) {
        y[i] = c.keys == 0 ? normal(rng) : base[h * K + i] + 0.2f * normal(rng);
        sum += y[i] * y[i];
      }
      const float factor = c.l2norm ? 1.0f : static_cast<float>(1 / std::sqrt(sum));
      for (int i = 0; i < K; ++i) x[h * K + i] = store16(y[i] * factor, c.io);
    }
    const float row_scale = c.gates == 5 ? std::exp2(std::floor(uniform(rng) * 24 - 12)) : 1.0f;
    for (int i = 0; i < c.Hv * V; ++i) x[2 * c.Hk * K + i] = store16(c.v_scale * row_scale * normal(rng), c.io);
  }
  p.g.resize(static_cast<size_t>(p.B) * p.T * c.Hv);
  p.beta.resize(p.g.size());
  std::vector<float> rate(c.Hv);
  for (auto& r : rate) r = std::exp(-4 + 4.5f * uniform(rng));
  for (size_t i = 0; i < p.g.size(); ++i) {
    float g = -rate[i % c.Hv] * std::log1p(std::exp(normal(rng)));
    if (c.gates == 1) g = 0;
    if (c.gates == 2) g = -3 - 5 * uniform(rng);
    if (c.gates == 3 && uniform(rng) < 0.08f) {
      const float u = uniform(rng);
      g = u < 0.3f ? -std::numeric_limits<float>::infinity() : (u < 0.6f ? -1e4f : -60 * u);
    }
    if (c.gates == 4) g *= 1e-3f;
    if (c.linear) g = std::exp(g);
    p.g[i] = g;
    p.beta[i] = 1 / (1 + std::exp(-normal(rng)));
  }
  p.pool = c.slots ? 2 * c.N + 3 : c.N;
  if (c.slots) {
    for (int n = 0; n < c.N; ++n) {
      p.slots.push_back(n == 1 ? -1 : 2 * n + 1);
      p.out_slots.push_back(n == 2 ? -1 : 2 * n);
      p.has_initial.push_back(n != 3);
    }
  }
  const size_t elements = static_cast<size_t>(p.pool) * c.Hv * K * V;
  const int size = gdn::dtype_size(c.state);
  p.state_in.resize(elements * size);
  for (size_t i = 0; i < elements; ++i) gdn::store_float(p.state_in.data(), c.state, i, c.s_scale * 0.3f * normal(rng));
  return p;
}

inline gdn::View view(void* data, DType t, int64_t a, int64_t b, int64_t c, int64_t d) { return {data, t, {a, b, c, d}}; }

struct Pointers {
  void *qkv, *g, *beta, *cu, *slots, *out_slots, *has_initial, *state_in, *state_out, *out;
};

inline gdn::RuleParams params(const Problem& p, const Pointers& x) {
  const Case& c = p.c;
  const int K = Problem::K, V = Problem::V, ch = p.total_channels;
  gdn::RuleParams r = {};
  r.dims = {p.B, p.T, p.N, c.Hk, c.Hv, K, V};
  uint16_t* const qkv = static_cast<uint16_t*>(x.qkv);
  const int64_t row = static_cast<int64_t>(p.T) * ch;
  r.q = view(qkv, c.io, row, ch, K, 1);
  r.k = view(qkv + c.Hk * K, c.io, row, ch, K, 1);
  r.v = view(qkv + 2 * c.Hk * K, c.io, row, ch, V, 1);
  if (!c.no_gates) {
    r.g = view(x.g, DType::kFloat32, static_cast<int64_t>(p.T) * c.Hv, c.Hv, 1, 0);
    r.beta = view(x.beta, DType::kFloat32, static_cast<int64_t>(p.T) * c.Hv, c.Hv, 1, 0);
  }
  r.out = view(x.out, c.out_fp32 ? DType::kFloat32 : c.io, static_cast<int64_t>(p.T) * c.Hv * V, c.Hv * V, V, 1);
  const int64_t slot = static_cast<int64_t>(c.Hv) * K * V;
  const gdn::View state = view(x.state_in, c.state, slot, K * V, c.v_first ? 1 : V, c.v_first ? K : 1);
  if (c.s_scale != 0) r.initial_state = state;
  r.state = state;
  r.state.data = x.state_out;
  r.pool_in = r.pool_out = p.pool;
  if (c.slots) {
    r.slots = {x.slots, 1, false};
    r.out_slots = {x.out_slots, 1, false};
    r.has_initial_state = {static_cast<const uint8_t*>(x.has_initial), 1};
  }
  if (c.ragged) r.cu_seqlens = {x.cu, 1, false};
  r.scale = p.scale;
  r.use_qk_l2norm = c.l2norm;
  r.gate_domain = c.linear ? gdn::GateDomain::kLinear : gdn::GateDomain::kLog;
  return r;
}

struct Reference {
  std::vector<double> out, state;   // [B, T, Hv, V], [N, Hv, K, V]
};

inline void sequence(const Problem& p, int n, int64_t batch, int64_t first, int64_t length, Reference& ref) {
  const Case& c = p.c;
  const int K = Problem::K, V = Problem::V;
  for (int h = 0; h < c.Hv; ++h) {
    std::vector<double> S(K * V, 0.0);
    const bool has = c.s_scale != 0 && (!c.slots || p.has_initial[n]);
    const int slot = c.slots ? p.slots[n] : n;
    if (has) {
      for (int k = 0; k < K; ++k) {
        for (int v = 0; v < V; ++v) {
          S[k * V + v] = gdn::load_float(p.state_in.data(), c.state, state_index(p, slot, h, k, v));
        }
      }
    }
    std::vector<double> m(V), o(V), key(K), query(K);
    for (int64_t t = first; t < first + length; ++t) {
      const uint16_t* const x = p.qkv.data() + (batch * p.T + t) * p.total_channels;
      const int hk = h / (c.Hv / c.Hk);
      double kk = 0, qq = 0;
      for (int i = 0; i < K; ++i) {
        query[i] = load16(x[hk * K + i], c.io);
        key[i] = load16(x[(c.Hk + hk) * K + i], c.io);
        kk += key[i] * key[i];
        qq += query[i] * query[i];
      }
      if (c.l2norm) for (int i = 0; i < K; ++i) { key[i] /= std::sqrt(kk + 1e-6); query[i] /= std::sqrt(qq + 1e-6); }
      const size_t gi = (batch * p.T + t) * c.Hv + h;
      const double decay =
          c.no_gates ? 1.0 : (c.linear ? static_cast<double>(p.g[gi]) : std::exp(static_cast<double>(p.g[gi])));
      const double beta = c.no_gates ? 1.0 : p.beta[gi];
      std::fill(m.begin(), m.end(), 0.0);
      std::fill(o.begin(), o.end(), 0.0);
      for (int k = 0; k < K; ++k) {
        double* const s = &S[k * V];
        for (int v = 0; v < V; ++v) {
          s[v] *= decay;
          m[v] += s[v] * key[k];
        }
      }
      for (int v = 0; v < V; ++v) m[v] = beta * (load16(x[2 * c.Hk * K + h * V + v], c.io) - m[v]);
      for (int k = 0; k < K; ++k) {
        double* const s = &S[k * V];
        for (int v = 0; v < V; ++v) {
          s[v] += key[k] * m[v];
          o[v] += s[v] * query[k];
        }
      }
      for (int v = 0; v < V; ++v) ref.out[((batch * p.T + t) * c.Hv + h) * V + v] = p.scale * o[v];
    }
    for (int i = 0; i < K * V; ++i) ref.state[(static_cast<size_t>(n) * c.Hv + h) * K * V + i] = S[i];
  }
}

inline Reference reference(const Problem& p) {
  Reference ref;
  ref.out.assign(static_cast<size_t>(p.B) * p.T * p.c.Hv * Problem::V, 0.0);
  ref.state.assign(static_cast<size_t>(p.N) * p.c.Hv * Problem::K * Problem::V, 0.0);
  for (int n = 0; n < p.N; ++n) {
    if (p.c.slots && p.slots[n] < 0) continue;   // padding: zero rows
    if (p.c.ragged) sequence(p, n, 0, p.cu[n], p.cu[n + 1] - p.cu[n], ref);
    else sequence(p, n, n, 0, p.T, ref);
  }
  return ref;
}

struct Errors {
  double out, state;
  bool nan, untouched_ok;
};

// out and state as the kernel left them; state_out started as a copy of `sentinel` bytes.
inline Errors compare(const Problem& p, const Reference& ref, const std::vector<char>& out, const std::vector<char>& state,
                      const std::vector<char>& state_before) {
  Errors e = {0, 0, false, true};
  const DType ot = p.c.out_fp32 ? DType::kFloat32 : p.c.io;
  double num = 0, den = 0;
  for (size_t i = 0; i < ref.out.size(); ++i) {
    const double x = gdn::load_float(out.data(), ot, i), d = x - ref.out[i];
    if (!std::isfinite(x)) e.nan = true;
    num += d * d;
    den += ref.out[i] * ref.out[i];
  }
  e.out = den > 0 ? std::sqrt(num / den) : std::sqrt(num);
  num = den = 0;
  std::vector<char> named(p.pool, 0);
  for (int n = 0; n < p.N; ++n) {
    const int slot = p.c.slots ? p.out_slots[n] : n;
    if (p.c.slots && (p.slots[n] < 0 || slot < 0)) continue;
    named[slot] = 1;
    for (int h = 0; h < p.c.Hv; ++h) for (int k = 0; k < Problem::K; ++k) for (int v = 0; v < Problem::V; ++v) {
      const double x = gdn::load_float(state.data(), p.c.state, state_index(p, slot, h, k, v));
      const double r = ref.state[((static_cast<size_t>(n) * p.c.Hv + h) * Problem::K + k) * Problem::V + v];
      if (!std::isfinite(x)) e.nan = true;
      num += (x - r) * (x - r);
      den += r * r;
    }
  }
  e.state = den > 0 ? std::sqrt(num / den) : std::sqrt(num);
  const size_t slot_bytes = state.size() / p.pool;
  for (int s = 0; s < p.pool; ++s) {
    if (!named[s] && memcmp(&state[s * slot_bytes], &state_before[s * slot_bytes], slot_bytes)) {
      e.untouched_ok = false;
    }
  }
  return e;
}

// High precision is judged before the output's rounding, which alone is 1.7e-3 (bf16) or 2.1e-4 (fp16).
inline bool judge(const Case& c, bool is_high, const Errors& e, double* out_limit, double* state_limit) {
  const double exact = is_high ? 2e-5 : (c.keys ? 1.3e-3 : 8e-4);
  const double of_bf16 = is_high ? 1.8e-3 : (c.keys ? 2.2e-3 : 2.0e-3), of_fp16 = is_high ? 3e-4 : exact;
  *out_limit = c.out_fp32 ? exact : (c.io == DType::kBFloat16 ? of_bf16 : of_fp16);
  *state_limit = c.state == DType::kFloat32 ? (is_high ? 2e-5 : 1e-3) : (c.state == DType::kBFloat16 ? 2.2e-3 : 1.1e-3);
  return !e.nan && e.untouched_ok && e.out <= *out_limit && e.state <= *state_limit;
}

inline std::vector<Case> all() {
  std::vector<Case> list;
  for (DType io : {DType::kBFloat16, DType::kFloat16}) {
    const std::string dt = io == DType::kBFloat16 ? "bf16" : "fp16";
    auto add = [&](const std::string& name, auto&& change) {
      for (int fp32 = 0; fp32 < 2; ++fp32) {
        Case c;
        c.io = io;
        change(c);
        c.out_fp32 = fp32;
        c.name = dt + " " + name + (fp32 ? " (fp32 out)" : "");
        list.push_back(c);
      }
    };
    for (int T : {1, 5, 63, 64, 65, 200, 1024, 4096}) add("T=" + std::to_string(T), [&](Case& c) { c.T = T; });
    add("no initial state", [&](Case& c) { c.T = 200; c.s_scale = 0; });
    add("no l2norm", [&](Case& c) { c.T = 200; c.l2norm = false; });
    for (int T : {1024, 4096}) add("correlated keys, " + std::to_string(T), [&](Case& c) { c.T = T; c.keys = 1; });
    add("correlated keys, tiny decay", [&](Case& c) { c.T = 1024; c.keys = 1; c.gates = 4; });
    add("v 1e4", [&](Case& c) { c.T = 200; c.v_scale = 1e4f; });
    if (io == DType::kBFloat16) add("v 1e6", [&](Case& c) { c.T = 200; c.v_scale = 1e6f; });
    if (io == DType::kBFloat16) add("v 1e30", [&](Case& c) { c.T = 200; c.v_scale = 1e30f; c.out_fp32 = true; });
    add("v 1e-6, S 1e6", [&](Case& c) { c.T = 200; c.v_scale = 1e-6f; c.s_scale = 1e6f; c.gates = 2; });
    add("S 1e20", [&](Case& c) { c.T = 65; c.s_scale = io == DType::kBFloat16 ? 1e20f : 1e4f; });
    for (int gates = 1; gates <= 5; ++gates) {
      add("gates " + std::to_string(gates), [&](Case& c) {
        c.T = 256;
        c.gates = gates;
      });
    }
    add("linear gates", [&](Case& c) { c.T = 130; c.linear = true; c.gates = 3; });
    add("no gates", [&](Case& c) { c.T = 130; c.no_gates = true; });
    add("ragged", [&](Case& c) { c.T = 700; c.N = 5; c.ragged = true; });
    add("slots", [&](Case& c) { c.T = 70; c.N = 5; c.slots = true; });
    add("slots, V-first, fp16 state", [&](Case& c) {
      c.T = 300;
      c.N = 4;
      c.slots = true;
      c.ragged = true;
      c.v_first = true;
      c.state = DType::kFloat16;
    });
    add("V-first, bf16 state", [&](Case& c) { c.T = 100; c.v_first = true; c.state = DType::kBFloat16; });
    add("heads 2/6", [&](Case& c) { c.T = 100; c.Hk = 2; c.Hv = 6; });
  }
  return list;
}

}  // namespace cases
