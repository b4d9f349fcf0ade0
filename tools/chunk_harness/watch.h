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
  __device__ bool here(const chunk_sm90::Work& w, int c) const {
    return w.segment.n == 0 && w.head == 0 && w.column == 0 && c == chunk;
  }
  template <class Stage>
  __device__ void operands(const chunk_sm90::Work& w, int c, int warp, int lane, const Stage& stage) const {
    if (!here(w, c)) return;
    auto read = [&](const fp16_t* tile, int row, int col) {
      return to_float(*reinterpret_cast<const fp16_t*>(reinterpret_cast<const char*>(tile) + swizzled_offset<64>(row, col / 8) +
                                                       2 * (col % 8)));
    };
    for (int i = warp * 32 + lane; i < 64 * 128; i += 128) {
      k[i] = read(stage.keys.k, i / 128, i % 128);
      q[i] = read(stage.keys.q, i / 128, i % 128) / chunk_sm90::kQueryFactor;
    }
    auto element = [&](int panel_start, int row, int col) {   // row: as they lie in the panel
      const char* const panel = reinterpret_cast<const char*>(&stage.solved) + panel_start;
      return to_float(*reinterpret_cast<const fp16_t*>(panel + row / 16 * kBlockBytes +
                                                       small_tile_offset(row % 16, col % 16 / 8) + 2 * (col % 8)));
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
      to[(16 * warp + sum_row(lane, i)) * 64 + (sum_column(lane, i) ^ flip)] =
          s[i] * exp2f(static_cast<float>(state.exponent[i / 2 % 2]));
    }
  }
  template <class State>
  __device__ void prediction(const chunk_sm90::Work& w, int c, int warp, int lane, const float (&s)[32],
                             const State& state) const {
    if (here(w, c)) sums(sk, warp, lane, s, state);
  }
  template <class State>
  __device__ void difference(const chunk_sm90::Work& w, int c, int warp, int lane, const uint32_t (&a)[4][4],
                             const State& state) const {
    if (!here(w, c)) return;
    float s[32];
    for (int i = 0; i < 16; ++i) widen_pair<fp16_t>(a[i / 4][i % 4], s[2 * i], s[2 * i + 1]);
    sums(x, warp, lane, s, state);
  }
  template <class State>
  __device__ void write(const chunk_sm90::Work& w, int c, int warp, int lane, const float (&s)[32], const State& state) const {
    if (here(w, c)) sums(u, warp, lane, s, state, 48);
  }
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
        for (int i = 16 * rb; i < std::min(rows, 16 * rb + 16); ++i) {
          for (int j = 16 * cb; j < 16 * cb + 16; ++j) {
            const double dd = x[i * cols + j] - r[i * cols + j];
            n += dd * dd;
            d += r[i * cols + j] * r[i * cols + j];
          }
        }
        printf(" %8.1e", std::sqrt(n / std::max(d, 1e-30)));
      }
      printf("\n");
    }
  }
  return e;
}

// What the kernel shows of a chunk of block (0, 0, 0), by the equations of kernel.cuh in double.
struct WatchedChunk {
  static constexpr int K = 128;
  int first, count;   // its tokens
  std::vector<double> S = zeros(K * 128), key = zeros(64 * K), query = zeros(64 * K), V = zeros(64 * 64), beta = zeros(64);
  std::vector<double> sum = zeros(64), decay = zeros(64);   // of the log decay; e to it
  std::vector<double> T = zeros(64 * 64), M = zeros(64 * 64), SK = zeros(64 * 64), X = zeros(64 * 64), U = zeros(64 * 64);
  static std::vector<double> zeros(int count) { return std::vector<double>(count, 0.0); }
};

// Tokens before the chunk change S; those of the chunk are kept.
static void walk_to_chunk(const Problem& p, DType io, WatchedChunk& ref) {
  const Case& c = p.c;
  constexpr int K = WatchedChunk::K;
  for (int k = 0; k < K; ++k) {
    for (int v = 0; v < 128; ++v) {
      ref.S[k * 128 + v] = load_float(p.state_in.data(), c.state, cases::state_index(p, 0, 0, k, v));
    }
  }
  double sum = 0;
  for (int t = 0; t < ref.first + ref.count; ++t) {
    const uint16_t* const x = p.qkv.data() + static_cast<size_t>(t) * p.total_channels;
    double kk = 1e-6, qq = 1e-6;
    std::vector<double> key(K), query(K);
    for (int i = 0; i < K; ++i) {
      query[i] = cases::load16(x[i], io);
      key[i] = cases::load16(x[K + i], io);
      qq += query[i] * query[i];
      kk += key[i] * key[i];
    }
    for (int i = 0; i < K; ++i) key[i] /= std::sqrt(kk), query[i] /= std::sqrt(qq);
    const double g = p.g[static_cast<size_t>(t) * c.Hv], beta = p.beta[static_cast<size_t>(t) * c.Hv];
    if (t >= ref.first) {
      const int i = t - ref.first;
      sum += g;
      ref.sum[i] = sum;
      ref.beta[i] = beta;
      for (int j = 0; j < K; ++j) ref.key[i * K + j] = key[j], ref.query[i * K + j] = query[j];
      for (int v = 0; v < 64; ++v) ref.V[i * 64 + v] = cases::load16(x[2 * K + v], io);
      continue;
    }
    for (int v = 0; v < 128; ++v) {
      double m = 0;
      for (int k = 0; k < K; ++k) {
        ref.S[k * 128 + v] *= std::exp(g);
        m += ref.S[k * 128 + v] * key[k];
      }
      const double write = beta * (cases::load16(x[2 * K + v], io) - m);
      for (int k = 0; k < K; ++k) ref.S[k * 128 + v] += key[k] * write;
    }
  }
  for (int i = ref.count; i < 64; ++i) ref.sum[i] = sum;
}

// T'' and M.
static void solve_chunk(WatchedChunk& ref) {
  constexpr int K = WatchedChunk::K;
  std::vector<double>& T = ref.T;
  std::vector<double> A(64 * 64, 0.0), P(64 * 64, 0.0);
  for (int i = 0; i < 64; ++i) {
    ref.decay[i] = std::exp(ref.sum[i]);
    for (int j = 0; j <= i; ++j) {
      double kk = 0, qk = 0;
      for (int k = 0; k < K; ++k) {
        kk += ref.key[i * K + k] * ref.key[j * K + k];
        qk += ref.query[i * K + k] * ref.key[j * K + k];
      }
      if (j < i) A[i * 64 + j] = ref.beta[i] * std::exp(ref.sum[i] - ref.sum[j]) * kk;
      P[i * 64 + j] = std::exp(ref.sum[i] - ref.sum[j]) * qk;
    }
    for (int j = 0; j <= i; ++j) {
      double s = i == j;
      for (int m = 0; m < i; ++m) s -= A[i * 64 + m] * T[m * 64 + j];
      T[i * 64 + j] = s;
    }
  }
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 64; ++j) T[i * 64 + j] *= ref.beta[j];
  }
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j <= i; ++j) {
      for (int m = j; m <= i; ++m) ref.M[i * 64 + j] += P[i * 64 + m] * T[m * 64 + j];
    }
  }
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 64; ++j) T[i * 64 + j] *= std::exp(ref.sum[63] - ref.sum[i]);
  }
}

// K S, X and T'' X, transposed.
static void carry_chunk(WatchedChunk& ref) {
  constexpr int K = WatchedChunk::K;
  for (int v = 0; v < 64; ++v) {
    for (int t = 0; t < 64; ++t) {
      double s = 0;
      for (int k = 0; k < K; ++k) s += ref.S[k * 128 + v] * ref.key[t * K + k];
      ref.SK[v * 64 + t] = s;
      ref.X[v * 64 + t] = ref.V[t * 64 + v] - std::exp(ref.sum[t]) * s;
    }
    for (int i = 0; i < 64; ++i) {
      for (int j = 0; j <= i; ++j) ref.U[v * 64 + i] += ref.T[i * 64 + j] * ref.X[v * 64 + j];
    }
  }
}

// Keys and what is multiplied with them as the kernel keeps them (load.cuh).
static void scale_as_kept(const Problem& p, DType io, WatchedChunk& ref) {
  constexpr int K = WatchedChunk::K;
  for (int i = 0; i < ref.count; ++i) {
    const uint16_t* const x = p.qkv.data() + static_cast<size_t>(ref.first + i) * p.total_channels;
    float kk = 0;
    for (int j = 0; j < K; ++j) kk += cases::load16(x[K + j], io) * cases::load16(x[K + j], io);
    const double k_scale = chunk_sm90::key_factors(kk, 1 / std::sqrt(kk + 1e-6f), i).k_scale;
    for (int j = 0; j < K; ++j) ref.key[i * K + j] /= k_scale, ref.query[i * K + j] /= k_scale;
    for (int j = 0; j < 64; ++j) ref.T[i * 64 + j] *= k_scale;
    for (int v = 0; v < 64; ++v) ref.SK[v * 64 + i] /= k_scale, ref.U[v * 64 + i] *= k_scale;
    ref.decay[i] *= k_scale;
  }
}

static int compare_watch(const Problem& p, DType io, int chunk, const std::vector<std::vector<float>>& got) {
  WatchedChunk ref = {64 * chunk, std::min(64, p.c.T - 64 * chunk)};
  walk_to_chunk(p, io, ref);
  solve_chunk(ref);
  carry_chunk(ref);
  if (p.c.l2norm) scale_as_kept(p, io, ref);
  printf("%s\n", p.c.name.c_str());
  double worst = 0;
  worst = std::max(worst, rel(got[4], ref.decay, "decay", 64));
  worst = std::max(worst, rel(got[0], ref.key, "k", 128));
  worst = std::max(worst, rel(got[1], ref.query, "q", 128));
  worst = std::max(worst, rel(got[3], ref.M, "M", 64));
  worst = std::max(worst, rel(got[2], ref.T, "T''", 64));
  worst = std::max(worst, rel(got[5], ref.SK, "SK", 64));
  worst = std::max(worst, rel(got[6], ref.X, "X", 64));
  worst = std::max(worst, rel(got[7], ref.U, "T'' X", 64));
  fflush(stdout);
  return worst > 3e-3;
}
