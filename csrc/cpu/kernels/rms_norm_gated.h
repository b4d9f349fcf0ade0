// SPDX-License-Identifier: Apache-2.0
// Gated RMS norm over groups of a vector, fp32 throughout, one rounding at the end.
//     norm first:  y = x * factor * weight * act(z)         factor = 1/sqrt(mean(x^2) + eps)
//     gate first:  y = x * act(z);  y * factor * weight     factor = 1/sqrt(mean(y^2) + eps)
// A unit is one group. The sum over a group runs by 32 residues, as the rule's sums over K do. A group longer than the
// buffer is computed twice, chunk by chunk.
#pragma once

#include "../../common/gates.h"
#include "rows.h"

namespace gdn::cpu::GDN_ISA {

constexpr int kNormChunk = 256;

struct NormChunk {
  alignas(64) float y[kNormChunk];      // x, or x * act(z) when the gate comes first; then zeros to a multiple of 32
  alignas(64) float gate[kNormChunk];   // act(z)
};

inline void load_norm_chunk(const NormParams& p, int64_t x_offset, int64_t z_offset, int64_t count, NormChunk& chunk) {
  load_row(p.x, x_offset, p.x.stride[3], count, chunk.y);
  load_row(p.z, z_offset, p.z.stride[3], count, chunk.gate);
  fill_row(chunk.y + count, ceil_div(count, kResidues) * kResidues - count, 0.0f);
  if (p.use_silu) {
    for (int64_t i = 0; i < count; ++i) chunk.gate[i] = silu(chunk.gate[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) chunk.gate[i] = sigmoid(chunk.gate[i]);
  }
  if (!p.norm_before_gate) {
    for (int64_t i = 0; i < count; ++i) chunk.y[i] = mul(chunk.y[i], chunk.gate[i]);
  }
}

inline void norm_group(const NormParams& p, int64_t b, int64_t t, int64_t h, int64_t first) {
  const int64_t x_offset = p.x.offset(b, t, h, first), z_offset = p.z.offset(b, t, h, first);
  NormChunk chunk;
  ResidueSum squares;
  squares.clear();
  for (int64_t i = 0; i < p.group_size; i += kNormChunk) {
    const int64_t count = smaller(kNormChunk, p.group_size - i);
    load_norm_chunk(p, x_offset + i * p.x.stride[3], z_offset + i * p.z.stride[3], count, chunk);
    for (int j = 0; j < count; j += kResidues) squares.add_products(chunk.y + j, chunk.y + j);
  }
  const float factor = rms_factor(squares.total(), static_cast<float>(p.group_size), p.eps);
  alignas(64) float weight[kNormChunk];
  for (int64_t i = 0; i < p.group_size; i += kNormChunk) {
    const int64_t count = smaller(kNormChunk, p.group_size - i);
    if (p.group_size > kNormChunk) {
      load_norm_chunk(p, x_offset + i * p.x.stride[3], z_offset + i * p.z.stride[3], count, chunk);
    }
    load_row(p.weight, p.weight.offset(first + i), p.weight.stride[0], count, weight);
    for (int64_t j = 0; j < count; ++j) chunk.y[j] = normed(chunk.y[j], factor, weight[j]);
    if (p.norm_before_gate) {
      for (int64_t j = 0; j < count; ++j) chunk.y[j] = mul(chunk.y[j], chunk.gate[j]);
    }
    store_row(p.out, p.out.offset(b, t, h, first + i), p.out.stride[3], count, chunk.y);
  }
}

inline void rms_norm_gated_range(const NormParams& p, int64_t begin, int64_t end) {
  const int64_t groups = p.V / p.group_size;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t vector = unit / groups, token = vector / p.H;
    norm_group(p, token / p.T, token % p.T, vector % p.H, unit % groups * p.group_size);
  }
}

}  // namespace gdn::cpu::GDN_ISA
