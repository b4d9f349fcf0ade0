// SPDX-License-Identifier: Apache-2.0
// What the kernel shows of block (0, 0, 0) at one chunk, its reference, and the comparison. Shared by harness and emulator.
#pragma once
#include "cases.h"

using namespace gdn;
using namespace gdn::cuda;
using cases::Case;
using cases::Problem;

// Dumps the first tile of block 0 (sequence 0, head 0, columns 0..63) at chunk `chunk`.
struct Watch {
  int chunk;
  float *k, *q, *t, *m, *decay, *sk, *x, *u;   // [64][128] twice, [64][64] twice, [64], [64 v][64 t] three times; u: T'' X
  __device__ bool here(const chunk_sm90::Work& w, int c) const { return w.segment.n == 0 && w.head == 0 && w.column == 0 && c == chunk; }
  template <class Stage>
  __device__ void operands(const chunk_sm90::Work& w, int c, int warp, int lane, const Stage& stage) const {
    if (!here(w, c)) return;
    auto read = [&](const fp16_t* tile, int row, int col) {
      return to_float(*reinterpret_cast<const fp16_t*>(reinterpret_cast<const char*>(tile) + swizzled_offset<64>(row, col / 8) + 2 * (col % 8)));
    };
    for (int i = warp * 32 + lane; i < 64 * 128; i += 128) { k[i] = read(stage.keys.k, i / 128, i % 128); q[i] = read(stage.keys.q, i / 128, i % 128) / chunk_sm90::kQueryFactor; }
    auto element = [&](int panel_start, int row, int col) {   // row: as they lie in the panel
      const char* const panel = reinterpret_cast<const char*>(&stage.solved) + panel_start;
      return to_float(*reinterpret_cast<const fp16_t*>(panel + row / 16 * kBlockBytes + small_tile_offset(row % 16, col % 16 / 8) + 2 * (col % 8)));
    };
    for (int i = warp * 32 + lane; i < 64 * 64; i += 128) {
      const int row = i / 64, col = i % 64;
      t[i] = element(chunk_sm90::panel_start<chunk_sm90::PlacesOfT>(col / 16), row ^ 48, col);
      m[i] = element(chunk_sm90::panel_start<chunk_sm90::PlacesOfM>(col / 16), row, col) / chunk_sm90::kQueryFactor;
    }
    for (int i = warp * 32 + lane; i < 64; i += 128) decay[i] = stage.solved.first.gates.read[chunk_sm90::token_place(i)];
  }
  __device__ void start(int, int) const {}
  __device__ void phase(chunk_sm90::Phase) const {}
  template <class State>
  __device__ void sums(float* to, int warp, int lane, const float (&s)[32], const State& state, int flip = 0) const {
    for (int i = 0; i < 32; ++i) {
      to[(16 * warp + sum_row(lane, i)) * 64 + (sum_column(lane, i) ^ flip)] = s[i] * exp2f(static_cast<float>(state.exponent[i / 2 % 2]));
    }
  }
  template <class State>
  __device__ void prediction(const chunk_sm90::Work& w, int c, int warp, int lane, const float (&s)[32], const State& state) const { if (here(w, c)) sums(sk, warp, lane, s, state); }
  template <class State>
  __device__ void difference(const chunk_sm90::Work& w, int c, int warp, int lane, const uint32_t (&a)[4][4], const State& state) const {
    if (!here(w, c)) return;
    float s[32];
    for (int i = 0; i < 16; ++i) widen_pair<fp16_t>(a[i / 4][i % 4], s[2 * i], s[2 * i + 1]);
    sums(x, warp, lane, s, state);
  }
  template <class State>
  __device__ void write(const chunk_sm90::Work& w, int c, int warp, int lane, const float (&s)[32], const State& state) const { if (here(w, c)) sums(u, warp, lane, s, state, 48); }
};

static double rel(const std::vector<float>& x, const std::vector<double>& r, const char* name, int cols) {
  double num = 0, den = 0, worst = 0;
  size_t at = 0;
  for (size_t i = 0; i < r.size(); ++i) {
    const double d = std::isfinite(x[i]) ? x[i] - r[i] : 1e30;
    num += d * d;
    den += r[i] * r[i];
    if (std::fabs(d) > worst) { worst = std::fabs(d); at = i; }
  }
  const double e = std::sqrt(num / std::max(den, 1e-300));
  printf("  %-6s rel rms %.2e, worst at [%zu][%zu]: got %g want %g\n", name, e, at / cols, at % cols, x[at], r[at]);
  if (e > 3e-3) {   // which 16 x 16 blocks are off
    const int rows = static_cast<int>(r.size()) / cols;
    for (int rb = 0; rb < (rows + 15) / 16; ++rb) {
      printf("    ");
      for (int cb = 0; cb < cols / 16; ++cb) {
        double n = 0, d = 0;
        for (int i = 16 * rb; i < std::min(rows, 16 * rb + 16); ++i) for (int j = 16 * cb; j < 16 * cb + 16; ++j) { const double dd = x[i * cols + j] - r[i * cols + j]; n += dd * dd; d += r[i * cols + j] * r[i * cols + j]; }
        printf(" %8.1e", std::sqrt(n / std::max(d, 1e-30)));
      }
      printf("\n");
    }
  }
  return e;
}

static int compare_watch(const Problem& p, DType io, int chunk, const std::vector<std::vector<float>>& got) {
  const Case& c = p.c;
  // Reference of block (0, 0, 0): walk the tokens before the chunk, then the chunk's algebra.
  const int K = 128, first = 64 * chunk, n = std::min(64, c.T - first);
  std::vector<double> S(K * 128, 0.0), key(64 * K, 0.0), query(64 * K, 0.0), V(64 * 64, 0.0), G(64, 0.0), beta(64, 0.0), decay(64, 0.0);
  for (int k = 0; k < K; ++k) for (int v = 0; v < 128; ++v) S[k * 128 + v] = load_float(p.state_in.data(), c.state, cases::state_index(p, 0, 0, k, v));
  double sum = 0;
  for (int t = 0; t < first + n; ++t) {
    const uint16_t* const x = p.qkv.data() + static_cast<size_t>(t) * p.total_channels;
    double kk = 1e-6, qq = 1e-6;
    std::vector<double> kt(K), qt(K);
    for (int i = 0; i < K; ++i) { qt[i] = cases::load16(x[i], io); kt[i] = cases::load16(x[K + i], io); qq += qt[i] * qt[i]; kk += kt[i] * kt[i]; }
    for (int i = 0; i < K; ++i) { kt[i] /= std::sqrt(kk); qt[i] /= std::sqrt(qq); }
    const double g = p.g[static_cast<size_t>(t) * c.Hv], bt = p.beta[static_cast<size_t>(t) * c.Hv];
    if (t >= first) {
      const int i = t - first;
      sum += g;
      G[i] = sum;
      beta[i] = bt;
      for (int j = 0; j < K; ++j) { key[i * K + j] = kt[j]; query[i * K + j] = qt[j]; }
      for (int v = 0; v < 64; ++v) V[i * 64 + v] = cases::load16(x[2 * K + v], io);
      continue;
    }
    for (int v = 0; v < 128; ++v) {
      double m = 0;
      for (int k = 0; k < K; ++k) { S[k * 128 + v] *= std::exp(g); m += S[k * 128 + v] * kt[k]; }
      const double dv = bt * (cases::load16(x[2 * K + v], io) - m);
      for (int k = 0; k < K; ++k) S[k * 128 + v] += kt[k] * dv;
    }
  }
  for (int i = n; i < 64; ++i) G[i] = sum;
  std::vector<double> A(64 * 64, 0.0), T(64 * 64, 0.0), P(64 * 64, 0.0), M(64 * 64, 0.0), SK(64 * 64), X(64 * 64), U(64 * 64, 0.0);
  for (int i = 0; i < 64; ++i) {
    decay[i] = std::exp(G[i]);
    for (int j = 0; j <= i; ++j) {
      double kk = 0, qk = 0;
      for (int k = 0; k < K; ++k) { kk += key[i * K + k] * key[j * K + k]; qk += query[i * K + k] * key[j * K + k]; }
      if (j < i) A[i * 64 + j] = beta[i] * std::exp(G[i] - G[j]) * kk;
      P[i * 64 + j] = std::exp(G[i] - G[j]) * qk;
    }
    for (int j = 0; j <= i; ++j) { double s = i == j; for (int m = 0; m < i; ++m) s -= A[i * 64 + m] * T[m * 64 + j]; T[i * 64 + j] = s; }
  }
  for (int i = 0; i < 64; ++i) for (int j = 0; j < 64; ++j) T[i * 64 + j] *= beta[j];
  for (int i = 0; i < 64; ++i) for (int j = 0; j <= i; ++j) for (int m = j; m <= i; ++m) M[i * 64 + j] += P[i * 64 + m] * T[m * 64 + j];
  for (int i = 0; i < 64; ++i) for (int j = 0; j < 64; ++j) T[i * 64 + j] *= std::exp(sum - G[i]);
  for (int v = 0; v < 64; ++v) for (int t = 0; t < 64; ++t) {
    double s = 0;
    for (int k = 0; k < K; ++k) s += S[k * 128 + v] * key[t * K + k];
    SK[v * 64 + t] = s;
    X[v * 64 + t] = V[t * 64 + v] - std::exp(G[t]) * s;
  }
  for (int v = 0; v < 64; ++v) for (int i = 0; i < 64; ++i) for (int j = 0; j <= i; ++j) U[v * 64 + i] += T[i * 64 + j] * X[v * 64 + j];
  for (int i = 0; i < n && c.l2norm; ++i) {   // as the kernel keeps them (load.cuh)
    const uint16_t* const x = p.qkv.data() + static_cast<size_t>(first + i) * p.total_channels;
    float kk = 0;
    for (int j = 0; j < K; ++j) kk += cases::load16(x[K + j], io) * cases::load16(x[K + j], io);
    const double k_scale = chunk_sm90::key_factors(kk, 1 / std::sqrt(kk + 1e-6f), i).k_scale;
    for (int j = 0; j < K; ++j) key[i * K + j] /= k_scale, query[i * K + j] /= k_scale;
    for (int j = 0; j < 64; ++j) T[i * 64 + j] *= k_scale;
    for (int v = 0; v < 64; ++v) SK[v * 64 + i] /= k_scale, U[v * 64 + i] *= k_scale;
    decay[i] *= k_scale;
  }
  printf("%s\n", c.name.c_str());
  double worst = 0;
  worst = std::max(worst, rel(got[4], decay, "decay", 64));
  worst = std::max(worst, rel(got[0], key, "k", 128));
  worst = std::max(worst, rel(got[1], query, "q", 128));
  worst = std::max(worst, rel(got[3], M, "M", 64));
  worst = std::max(worst, rel(got[2], T, "T''", 64));
  worst = std::max(worst, rel(got[5], SK, "SK", 64));
  worst = std::max(worst, rel(got[6], X, "X", 64));
  worst = std::max(worst, rel(got[7], U, "T'' X", 64));
  fflush(stdout);
  return worst > 3e-3;
}
