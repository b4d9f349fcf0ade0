// SPDX-License-Identifier: Apache-2.0
// What a block of tokens brings to every column of S: q and k in fp32, padded with zero rows to a multiple of 32, and the
// sums over K that are the same for all value heads of the key head.
#pragma once

#include "../../common/params.h"
#include "rows.h"

namespace gdn::cpu::GDN_ISA {

// Floats of k and q that one block holds: 32 tokens at K = 128. They stream from the second-level cache, 1 KB a sweep.
constexpr int kBlockFloats = 8192;
constexpr int kMaxBlockTokens = 32;

struct TokenBlock {
  int padded_dim;                // K rounded up to a multiple of 32
  int tokens;                    // slots: tokens it can hold
  alignas(64) float rows[kBlockFloats];
  float sk[kMaxBlockTokens], sq[kMaxBlockTokens], kq[kMaxBlockTokens];

  GDN_INLINE const float* k(int i) const { return rows + 2 * i * padded_dim; }
  GDN_INLINE const float* q(int i) const { return rows + (2 * i + 1) * padded_dim; }

  void shape(int64_t head_dim) {
    padded_dim = static_cast<int>(ceil_div(head_dim, kResidues)) * kResidues;
    tokens = static_cast<int>(smaller(kBlockFloats / (2 * padded_dim), kMaxBlockTokens));
  }
  void copy_slot(int from, int to) {
    std::memcpy(rows + 2 * to * padded_dim, rows + 2 * from * padded_dim, 2 * padded_dim * sizeof(float));
    sk[to] = sk[from];
    sq[to] = sq[from];
    kq[to] = kq[from];
  }
};

inline void load_token(const RuleParams& p, int64_t batch, int64_t token, int64_t hk, TokenBlock& block, int i) {
  float* k = block.rows + 2 * i * block.padded_dim;
  float* q = k + block.padded_dim;
  load_row(p.k, p.k.offset(batch, token, hk), p.k.stride[3], p.dims.K, k);
  load_row(p.q, p.q.offset(batch, token, hk), p.q.stride[3], p.dims.K, q);
  fill_row(k + p.dims.K, block.padded_dim - p.dims.K, 0.0f);
  fill_row(q + p.dims.K, block.padded_dim - p.dims.K, 0.0f);
  ResidueSum kk, qq, kq;
  kk.clear();
  qq.clear();
  kq.clear();
  for (int j = 0; j < block.padded_dim; j += kResidues) {
    kk.add_products(k + j, k + j);
    qq.add_products(q + j, q + j);
    kq.add_products(k + j, q + j);
  }
  block.sk[i] = p.use_qk_l2norm ? l2norm_factor(kk.total()) : 1.0f;
  block.sq[i] = p.use_qk_l2norm ? l2norm_factor(qq.total()) : 1.0f;
  block.kq[i] = kq.total();
}

// Asks for the rows of q and k that load_token will read.
inline void prefetch_token(const RuleParams& p, int64_t batch, int64_t token, int64_t hk) {
  if (p.k.stride[3] == 1) prefetch_row(p.k, p.k.offset(batch, token, hk), p.dims.K);
  if (p.q.stride[3] == 1) prefetch_row(p.q, p.q.offset(batch, token, hk), p.dims.K);
}

inline StepScalars token_scalars(const RuleParams& p, int64_t batch, int64_t token, int64_t h, const TokenBlock& block,
                                 int i) {
  const bool is_linear = p.gate_domain == GateDomain::kLinear;
  const float alpha = p.g.given() ? decay_of(gate_of(p, p.g.load(p.g.offset(batch, token, h)), h), is_linear) : 1.0f;
  const float beta = p.beta.given() ? beta_of(p, p.beta.load(p.beta.offset(batch, token, h))) : 1.0f;
  return step_scalars(alpha, beta, p.scale, block.sk[i], block.sq[i], block.kq[i]);
}

// The scalars of a token beside every column of a pack.
struct StepPacks {
  Pack alpha, neg_alpha_sk, beta, sk, scale_sq, kq;

  GDN_INLINE explicit StepPacks(const StepScalars& s)
      : alpha(broadcast(s.alpha)), neg_alpha_sk(broadcast(s.neg_alpha_sk)), beta(broadcast(s.beta)), sk(broadcast(s.sk)),
        scale_sq(broadcast(s.scale_sq)), kq(broadcast(s.kq)) {}

  GDN_INLINE Pack factor(Pack u, Pack v) const { return write_factor(neg_alpha_sk, beta, sk, u, v); }
  GDN_INLINE Pack output(Pack f, Pack w) const { return read_output(scale_sq, kq, alpha, f, w); }
};

}  // namespace gdn::cpu::GDN_ISA
