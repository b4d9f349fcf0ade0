// SPDX-License-Identifier: Apache-2.0
// What gated attention needs around it: the norm and rotation of query and key heads, the gate on the output.
//
//     y = (x * factor) * weight                      factor = 1 / sqrt(mean(x^2) + eps), weight or 1 + weight
//     out_i = y_i cos_i - y_(i + R/2) sin_i,   out_(i + R/2) = y_(i + R/2) cos_(i + R/2) + y_i sin_(i + R/2)      i < R/2
//     out = x * sigmoid(gate)
//
// fp32 throughout, rounded once. Order of a head's sum of squares: partial l takes elements 8 l .. 8 l + 7 by fma from +0,
// then adjacent partials in pairs, as far up as there are any. All kernels of an op keep it, so its bits do not depend on
// how the tensors lie.

#include "../common/gates.h"
#include "launch.cuh"
#include "ops.h"
#include "tile/pack.cuh"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kOwned = 8;            // adjacent elements of a lane: 16 bytes of a 16-bit dtype, twice that in fp32
constexpr int kHeadsTogether = 4;    // heads of a lane that share weights and angles, where there are many tokens
constexpr int kWarpsToShare = 32;    // warps per multiprocessor that must be left for that

static_assert(kWarp * kOwned >= kMaxHeadDim, "a warp holds a head");

__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {   // both >= 0; mostly a 32-bit division
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// kOwned elements as they are stored, of a dtype known at run time or at compile time: loads and widening are apart, so that
// all loads of a thread are in flight before it waits for one.
struct Stored {
  Words<16> part[2];   // the second for fp32 alone
};
template <class io_t>
struct StoredAs {
  Words<16> part[sizeof(io_t) / 2];
};

__device__ __forceinline__ void load_stored(const View& view, int64_t offset, Stored& stored) {
  const bool is_wide = view.dtype == DType::kFloat32;
  const auto* gmem = reinterpret_cast<const Words<16>*>(static_cast<const char*>(view.data) + offset * (is_wide ? 4 : 2));
  stored.part[0] = gmem[0];
  if (is_wide) stored.part[1] = gmem[1];
}
template <class io_t>
__device__ __forceinline__ StoredAs<io_t> load_stored(const io_t* gmem) {
  StoredAs<io_t> stored;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(io_t) / 2); ++i) stored.part[i] = reinterpret_cast<const Words<16>*>(gmem)[i];
  return stored;
}

template <class io_t>
__device__ __forceinline__ void widen(const Words<16>* part, float (&x)[kOwned]) {
#pragma unroll
  for (int i = 0; i < kOwned / kVector<io_t>; ++i) unpack<io_t, kVector<io_t>>(part[i], x + i * kVector<io_t>);
}
__device__ __forceinline__ void widen(const Stored& stored, DType dtype, float (&x)[kOwned]) {
  if (dtype == DType::kFloat32) {
    widen<float>(stored.part, x);
  } else if (dtype == DType::kBFloat16) {
    widen<bf16_t>(stored.part, x);
  } else {
    widen<fp16_t>(stored.part, x);
  }
}

template <class io_t>
__device__ __forceinline__ void store_owned(io_t* gmem, const float (&x)[kOwned]) {
#pragma unroll
  for (int i = 0; i < kOwned; i += kVector<io_t>) store_pack<io_t, kVector<io_t>>(gmem + i, x + i);
}

__device__ __forceinline__ float norm_factor(float sum_of_squares, float inverse_dim, float eps) {
  return rsqrtf(fma(sum_of_squares, inverse_dim, eps));
}
__device__ __forceinline__ float norm_weight(float weight, bool zero_centered) {
  return zero_centered ? add(1.0f, weight) : weight;
}

// Any strides, dtypes, dims.
// Grid    x: heads / 4.   Block: a warp per head of a token, query heads first.
// Reads   a head up to three times (from the L1 after the first), element by element, weight, cos, sin.   Writes it once.
__global__ void __launch_bounds__(kThreads) norm_rope_any(const __grid_constant__ RopeParams p, float inverse_dim,
                                                          int64_t num_heads, int64_t num_blocks) {
  const int lane = threadIdx.x % kWarp;
  const int dim = static_cast<int>(p.D), rotated = static_cast<int>(p.R), half = rotated / 2;
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const int64_t unit = block * (kThreads / kWarp) + threadIdx.x / kWarp;
    if (unit >= num_heads) return;   // a whole warp
    const int64_t token = quotient(unit, p.Hq + p.Hk), head = unit - token * (p.Hq + p.Hk);
    const int64_t b = quotient(token, p.T), t = token - b * p.T;
    const bool is_q = head < p.Hq;
    const View x = is_q ? p.q : p.k, out = is_q ? p.q_out : p.k_out, weight = is_q ? p.q_weight : p.k_weight;
    const int64_t h = is_q ? head : head - p.Hq, x_at = x.offset(b, t, h), out_at = out.offset(b, t, h);
    float sum = 0.0f;
    for (int e = 0; e < kOwned; ++e) {
      const int i = lane * kOwned + e;
      const float value = i < dim ? x.load(x_at + i * x.stride[3]) : 0.0f;
      sum = fma(value, value, sum);
    }
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) sum = add(sum, __shfl_xor_sync(kAllLanes, sum, distance));
    const float factor = norm_factor(sum, inverse_dim, p.eps);
    const auto normed = [&](int i) {
      const float w = norm_weight(weight.load(i * weight.stride[0]), p.zero_centered);
      return mul(mul(x.load(x_at + i * x.stride[3]), factor), w);
    };
    for (int i = lane; i < dim; i += kWarp) {
      float y = normed(i);
      if (i < rotated) {
        const float turned = i < half ? -normed(i + half) : normed(i - half);
        const float cos = p.cos.load(p.cos.offset(b, t, i)), sin = p.sin.load(p.sin.offset(b, t, i));
        y = rotate(y, turned, cos, sin);
      }
      out.store(out_at + i * out.stride[3], y);
    }
  }
}

// Elements contiguous, one dtype for q, k and what is written, D a multiple of 8 and R of 16.
// Grid    x: pieces of a token's heads.   Block: 2^lane_bits >= D / 8 lanes per piece; a lane owns 8 adjacent elements of
//         each of its kHeads heads, all query or all key heads, so weights and angles are loaded and widened once.
// Reads   everything once, all loads of a lane in flight at once, by 16 bytes.   Writes likewise. A lane's other element of
//         a pair comes from the lane R / 16 away.
// Needs   strides in multiples of 8 elements, addresses of 16 bytes; any arch.
template <class io_t, int kHeads>
__global__ void __launch_bounds__(kThreads)
norm_rope_vectors(const __grid_constant__ RopeParams p, float inverse_dim, int lane_bits, int64_t q_pieces,
                  int64_t k_pieces, int64_t num_pieces, int64_t num_blocks) {
  const int lanes = 1 << lane_bits, lane = threadIdx.x & (lanes - 1), first = lane * kOwned;
  const int dim = static_cast<int>(p.D), half_lanes = static_cast<int>(p.R) / (2 * kOwned);
  const bool in_head = first < dim, is_first_half = lane < half_lanes, is_rotated = lane < 2 * half_lanes;
  const int partner = threadIdx.x % kWarp + (is_rotated ? (is_first_half ? half_lanes : -half_lanes) : 0);
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const int64_t wanted = block * (kThreads >> lane_bits) + (threadIdx.x >> lane_bits);
    const bool exists = wanted < num_pieces;   // lanes past the last piece redo it for the shuffles, and store nothing
    const int64_t piece = exists ? wanted : num_pieces - 1;
    const int64_t token = quotient(piece, q_pieces + k_pieces), part = piece - token * (q_pieces + k_pieces);
    const int64_t b = p.B == 1 ? 0 : quotient(token, p.T), t = token - b * p.T;
    const bool is_q = part < q_pieces;
    const View x = is_q ? p.q : p.k, out = is_q ? p.q_out : p.k_out, weight = is_q ? p.q_weight : p.k_weight;
    const int64_t h = (is_q ? part : part - q_pieces) * kHeads, heads = (is_q ? p.Hq : p.Hk) - h;
    const io_t* gmem_x = static_cast<const io_t*>(x.data) + x.offset(b, t, h, first);
    io_t* gmem_out = static_cast<io_t*>(out.data) + out.offset(b, t, h, first);
    StoredAs<io_t> stored_x[kHeads] = {};
    Stored stored_weight = {}, stored_cos = {}, stored_sin = {};
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      if (in_head && j < heads) stored_x[j] = load_stored(gmem_x + j * x.stride[2]);
    }
    if (in_head) load_stored(weight, first, stored_weight);
    if (is_rotated) {
      load_stored(p.cos, p.cos.offset(b, t, first), stored_cos);
      load_stored(p.sin, p.sin.offset(b, t, first), stored_sin);
    }
    float w[kOwned], cos[kOwned], sin[kOwned];
    widen(stored_weight, weight.dtype, w);
    widen(stored_cos, p.cos.dtype, cos);
    widen(stored_sin, p.sin.dtype, sin);
#pragma unroll
    for (int e = 0; e < kOwned; ++e) w[e] = norm_weight(w[e], p.zero_centered);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      float y[kOwned], sum = 0.0f;
      widen<io_t>(stored_x[j].part, y);
#pragma unroll
      for (int e = 0; e < kOwned; ++e) sum = fma(y[e], y[e], sum);
      for (int distance = 1; distance < lanes; distance *= 2) sum = add(sum, __shfl_xor_sync(kAllLanes, sum, distance));
      const float factor = norm_factor(sum, inverse_dim, p.eps);
#pragma unroll
      for (int e = 0; e < kOwned; ++e) {
        y[e] = mul(mul(y[e], factor), w[e]);
        const float other = __shfl_sync(kAllLanes, y[e], partner);
        if (is_rotated) y[e] = rotate(y[e], is_first_half ? -other : other, cos[e], sin[e]);
      }
      if (exists && in_head && j < heads) store_owned<io_t>(gmem_out + j * out.stride[2], y);
    }
  }
}

// Any strides and dtypes.
// Grid    x: elements / kThreads.   Block: a thread an element.
__global__ void __launch_bounds__(kThreads) output_gate_any(const __grid_constant__ OutputGateParams p,
                                                            int64_t num_elements, int64_t num_blocks) {
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const int64_t element = block * kThreads + threadIdx.x;
    if (element >= num_elements) return;
    const int64_t vector = quotient(element, p.D), i = element - vector * p.D;
    const int64_t token = quotient(vector, p.H), h = vector - token * p.H;
    const int64_t b = quotient(token, p.T), t = token - b * p.T;
    const float x = p.x.load(p.x.offset(b, t, h, i)), gate = p.gate.load(p.gate.offset(b, t, h, i));
    p.out.store(p.out.offset(b, t, h, i), open_output(x, gate));
  }
}

// Elements contiguous, one dtype.
// Grid    x: packs of 8 elements / kThreads.   Block: a thread a pack.
// Reads   x and gate once, by 16 bytes.   Writes out likewise.
// Needs   D and strides in multiples of 8 elements, addresses of 16 bytes; any arch.
template <class io_t>
__global__ void __launch_bounds__(kThreads)
output_gate_vectors(const __grid_constant__ OutputGateParams p, int64_t row_packs, int64_t num_packs, int64_t num_blocks) {
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const int64_t pack = block * kThreads + threadIdx.x;
    if (pack >= num_packs) return;
    const int64_t vector = quotient(pack, row_packs), i = (pack - vector * row_packs) * kOwned;
    const int64_t token = p.H == 1 ? vector : quotient(vector, p.H), h = vector - token * p.H;
    const int64_t b = p.T == 1 ? token : quotient(token, p.T), t = token - b * p.T;
    const auto stored_x = load_stored(static_cast<const io_t*>(p.x.data) + p.x.offset(b, t, h, i));
    const auto stored_gate = load_stored(static_cast<const io_t*>(p.gate.data) + p.gate.offset(b, t, h, i));
    float x[kOwned], gate[kOwned];
    widen<io_t>(stored_x.part, x);
    widen<io_t>(stored_gate.part, gate);
#pragma unroll
    for (int e = 0; e < kOwned; ++e) x[e] = open_output(x[e], gate[e]);
    store_owned<io_t>(static_cast<io_t*>(p.out.data) + p.out.offset(b, t, h, i), x);
  }
}

// Whether the last of `dims` dims is contiguous and each row of it begins at a multiple of 16 bytes.
bool is_vector_view(const View& view, const int64_t* sizes, int dims) {
  bool fits = view.stride[dims - 1] == 1 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (int i = 0; i + 1 < dims; ++i) fits = fits && (sizes[i] == 1 || view.stride[i] % kOwned == 0);
  return fits;
}

bool takes_vectors(const RopeParams& p) {
  const int64_t q_sizes[3] = {p.B, p.T, p.Hq}, k_sizes[3] = {p.B, p.T, p.Hk};
  const DType io = p.q.dtype;
  if (p.k.dtype != io || p.q_out.dtype != io || p.k_out.dtype != io) return false;
  if (p.D % kOwned != 0 || p.R % (2 * kOwned) != 0) return false;
  const bool angles = p.R == 0 || (is_vector_view(p.cos, q_sizes, 3) && is_vector_view(p.sin, q_sizes, 3));
  return angles && is_vector_view(p.q, q_sizes, 4) && is_vector_view(p.q_out, q_sizes, 4) &&
         is_vector_view(p.k, k_sizes, 4) && is_vector_view(p.k_out, k_sizes, 4) &&
         is_vector_view(p.q_weight, nullptr, 1) && is_vector_view(p.k_weight, nullptr, 1);
}

template <class io_t, int kHeads>
const char* launch_norm_rope(const RopeParams& p, float inverse_dim, int lane_bits, void* stream) {
  const int64_t q_pieces = ceil_div(p.Hq, kHeads), k_pieces = ceil_div(p.Hk, kHeads);
  const int64_t num_pieces = p.B * p.T * (q_pieces + k_pieces), num_blocks = ceil_div(num_pieces, kThreads >> lane_bits);
  return launch(norm_rope_vectors<io_t, kHeads>, num_blocks, kThreads, 0, stream, p, inverse_dim, lane_bits, q_pieces,
                k_pieces, num_pieces, num_blocks);
}

// Dims that lie one after the other in all three tensors as one: the usual call has one or two left.
OutputGateParams folded(const OutputGateParams& p) {
  OutputGateParams result = p;
  View* const views[3] = {&result.x, &result.gate, &result.out};
  int64_t size[4] = {p.B, p.T, p.H, p.D};
  int last = 3;   // the dim that grows
  for (int i = 2; i >= 0; --i) {
    bool joins = true;
    for (const View* v : views) joins = joins && (size[i] == 1 || v->stride[i] == v->stride[last] * size[last]);
    if (joins) {
      size[last] *= size[i];
      continue;
    }
    --last;
    size[last] = size[i];
    for (View* v : views) v->stride[last] = v->stride[i];
  }
  while (last > 0) {
    size[--last] = 1;
    for (View* v : views) v->stride[last] = 0;
  }
  result.B = size[0], result.T = size[1], result.H = size[2], result.D = size[3];
  return result;
}

}  // namespace

const char* qk_norm_rope(const RopeParams& params, void* stream) {
  const float inverse_dim = 1.0f / static_cast<float>(params.D);
  const int64_t num_heads = params.B * params.T * (params.Hq + params.Hk);
  if (!takes_vectors(params)) {
    const int64_t num_blocks = ceil_div(num_heads, kThreads / kWarp);
    return launch(norm_rope_any, num_blocks, kThreads, 0, stream, params, inverse_dim, num_heads, num_blocks);
  }
  int lane_bits = 0;
  while ((kOwned << lane_bits) < params.D) ++lane_bits;
  const int64_t num_warps = (num_heads << lane_bits) / kWarp;
  const bool is_shared = num_warps >= static_cast<int64_t>(kHeadsTogether) * kWarpsToShare * num_multiprocessors();
  const char* error = nullptr;
  dispatch_dtype(params.q.dtype, [&](auto io) {
    using io_t = decltype(io);
    error = is_shared ? launch_norm_rope<io_t, kHeadsTogether>(params, inverse_dim, lane_bits, stream)
                      : launch_norm_rope<io_t, 1>(params, inverse_dim, lane_bits, stream);
  });
  return error;
}

const char* output_gate(const OutputGateParams& params, void* stream) {
  const OutputGateParams p = folded(params);
  const int64_t sizes[3] = {p.B, p.T, p.H}, num_elements = p.B * p.T * p.H * p.D;
  const bool is_uniform = p.gate.dtype == p.x.dtype && p.out.dtype == p.x.dtype && p.D % kOwned == 0;
  if (!is_uniform || !is_vector_view(p.x, sizes, 4) || !is_vector_view(p.gate, sizes, 4) ||
      !is_vector_view(p.out, sizes, 4)) {
    const int64_t num_blocks = ceil_div(num_elements, kThreads);
    return launch(output_gate_any, num_blocks, kThreads, 0, stream, p, num_elements, num_blocks);
  }
  const int64_t num_packs = num_elements / kOwned, num_blocks = ceil_div(num_packs, kThreads);
  const char* error = nullptr;
  dispatch_dtype(p.x.dtype, [&](auto io) {
    error = launch(output_gate_vectors<decltype(io)>, num_blocks, kThreads, 0, stream, p, p.D / kOwned, num_packs,
                   num_blocks);
  });
  return error;
}

}  // namespace gdn::cuda
