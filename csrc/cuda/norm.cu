// SPDX-License-Identifier: Apache-2.0
// Gated RMSNorm of vectors (or of groups inside them), both orders of norm and gate.
//
//     norm first:  out = ((x * factor) * weight) * act(z)                  factor = 1 / sqrt(mean(x^2) + eps)
//     gate first:  y = x * act(z),   out = (y * factor) * weight           factor = 1 / sqrt(mean(y^2) + eps)
//
// fp32 throughout, rounded once. The sum of squares has the order of rule.h's sums: 32 partials, partial r takes the
// elements r, r + 32, ... of the group by fma from +0, then adjacent pairs in five levels. Both kernels keep it.

#include "../common/gates.h"
#include "launch.cuh"
#include "ops.h"
#include "tile/pack.cuh"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kOwned = 4;   // adjacent residues per lane of the vectorised kernel: few registers, so many warps

// Where a group lies: element offsets of its first element, and the row of `weight` it begins with.
struct GroupAt {
  int64_t x, z, out, weight;
};

// Groups are numbered [B, T, H, V / group_size], last dim fastest. A usual call skips most of the divisions.
__device__ __forceinline__ GroupAt locate(const NormParams& p, int64_t num_parts, int64_t group) {
  const int64_t per_token = p.H * num_parts;
  const int64_t token = group / per_token, rest = group - token * per_token;
  const int64_t b = p.B == 1 ? 0 : token / p.T, t = token - b * p.T;
  const int64_t h = num_parts == 1 ? rest : rest / num_parts, first = (rest - h * num_parts) * p.group_size;
  return {p.x.offset(b, t, h, first), p.z.offset(b, t, h, first), p.out.offset(b, t, h, first), first};
}

// The last levels of the tree: lanes with adjacent partials, adjacent pairs of those, ... All lanes get the sum.
template <int kLanes>
__device__ __forceinline__ float sum_over_lanes(float partial) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    partial = add(partial, __shfl_xor_sync(kAllLanes, partial, distance));
  }
  return partial;
}

__device__ __forceinline__ float norm_factor(const NormParams& p, float sum_of_squares) {
  return rms_factor(sum_of_squares, static_cast<float>(p.group_size), p.eps);
}

// Any strides, dtypes and group size.
// Grid    x: groups / 4.   Block: a warp per group; lane r holds partial r.
// Reads   x and z twice (the second time from the L1), element by element, weight.   Writes out.
__global__ void __launch_bounds__(kThreads) norm_any(const __grid_constant__ NormParams p, int64_t num_groups,
                                                     int64_t num_blocks) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const int64_t group = block * (kThreads / kWarp) + threadIdx.x / kWarp;
    if (group >= num_groups) return;   // a whole warp
    const GroupAt at = locate(p, p.V / p.group_size, group);
    float sum = 0.0f;
    for (int64_t i = lane; i < p.group_size; i += kWarp) {
      float x = p.x.load(at.x + i * p.x.stride[3]);
      if (!p.norm_before_gate) x = mul(x, activate_gate(p.z.load(at.z + i * p.z.stride[3]), p.use_silu));
      sum = fma(x, x, sum);
    }
    const float factor = norm_factor(p, sum_over_lanes<kWarp>(sum));
    for (int64_t i = lane; i < p.group_size; i += kWarp) {
      const float x = p.x.load(at.x + i * p.x.stride[3]);
      const float gate = activate_gate(p.z.load(at.z + i * p.z.stride[3]), p.use_silu);
      const float weight = p.weight.load(p.weight.offset(at.weight + i));
      const float out = normed(p.norm_before_gate ? x : mul(x, gate), factor, weight);
      p.out.store(at.out + i * p.out.stride[3], p.norm_before_gate ? mul(out, gate) : out);
    }
  }
}

// Weights of the kOwned elements from each first + 32 j that lies in the group, [kSteps][kOwned].
template <class weight_t, int kSteps>
__device__ __forceinline__ void load_weights(const weight_t* gmem_weight, int first, int group_size,
                                             float (&weight)[kSteps][kOwned]) {
  PackOf<weight_t, kOwned> pack[kSteps] = {};
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const int i = j * kResidues + first;
    if (i < group_size) pack[j] = load_pack<weight_t, kOwned>(gmem_weight + i);
  }
#pragma unroll
  for (int j = 0; j < kSteps; ++j) unpack<weight_t, kOwned>(pack[j], weight[j]);
}

// Elements contiguous, one dtype for x, z and out, dense weights, groups of up to 32 * kSteps elements.
// Grid    x: groups / (kThreads / kLanes).   Block: kLanes lanes per group; lane l owns the kOwned adjacent residues
//         from l * kOwned on, so the first levels of the tree are its own and the rest are shuffles.
// Reads   x, z and weight once, all loads of a group in flight at once, by 8 or 16 bytes.   Writes out likewise.
// Needs   group_size, strides and addresses in multiples of 16 bytes; any arch. The activation and the order are
//         constants: with both of each in one kernel its code leaves the instruction cache.
template <class io_t, int kSteps, bool kUseSilu, bool kNormBeforeGate>
__global__ void __launch_bounds__(kThreads, kSteps == 4 ? 6 : 4)
norm_vectors(const __grid_constant__ NormParams p, int64_t num_groups, int64_t num_blocks) {
  constexpr int kLanes = kResidues / kOwned;
  const int first = threadIdx.x % kLanes * kOwned, group_size = static_cast<int>(p.group_size);
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const int64_t wanted = block * (kThreads / kLanes) + threadIdx.x / kLanes;
    const bool exists = wanted < num_groups;   // lanes past the last group redo it for the shuffles, and store nothing
    const GroupAt at = locate(p, p.V == p.group_size ? 1 : p.V / p.group_size, exists ? wanted : num_groups - 1);
    const io_t* gmem_x = static_cast<const io_t*>(p.x.data) + at.x;
    const io_t* gmem_z = static_cast<const io_t*>(p.z.data) + at.z;
    io_t* gmem_out = static_cast<io_t*>(p.out.data) + at.out;
    PackOf<io_t, kOwned> pack_x[kSteps] = {}, pack_z[kSteps] = {};
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const int i = j * kResidues + first;
      if (i < group_size) {
        pack_x[j] = load_pack<io_t, kOwned>(gmem_x + i);
        pack_z[j] = load_pack<io_t, kOwned>(gmem_z + i);
      }
    }
    float weight[kSteps][kOwned];
    if (p.weight.dtype == DType::kFloat32) {
      load_weights(static_cast<const float*>(p.weight.data) + at.weight, first, group_size, weight);
    } else if (p.weight.dtype == DType::kBFloat16) {
      load_weights(static_cast<const bf16_t*>(p.weight.data) + at.weight, first, group_size, weight);
    } else {
      load_weights(static_cast<const fp16_t*>(p.weight.data) + at.weight, first, group_size, weight);
    }
    float x[kSteps][kOwned], gate[kSteps][kOwned], partial[kOwned] = {};
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      unpack<io_t, kOwned>(pack_x[j], x[j]);
      unpack<io_t, kOwned>(pack_z[j], gate[j]);
#pragma unroll
      for (int e = 0; e < kOwned; ++e) {
        gate[j][e] = activate_gate(gate[j][e], kUseSilu);
        if (!kNormBeforeGate) x[j][e] = mul(x[j][e], gate[j][e]);
        partial[e] = fma(x[j][e], x[j][e], partial[e]);   // past the group: zeros
      }
    }
#pragma unroll
    for (int width = 1; width < kOwned; width *= 2) {
#pragma unroll
      for (int e = 0; e < kOwned; e += 2 * width) partial[e] = add(partial[e], partial[e + width]);
    }
    const float factor = norm_factor(p, sum_over_lanes<kLanes>(partial[0]));
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const int i = j * kResidues + first;
      if (i >= group_size || !exists) continue;
      float out[kOwned];
#pragma unroll
      for (int e = 0; e < kOwned; ++e) {
        out[e] = normed(x[j][e], factor, weight[j][e]);
        if (kNormBeforeGate) out[e] = mul(out[e], gate[j][e]);
      }
      store_pack<io_t, kOwned>(gmem_out + i, out);
    }
  }
}

bool is_vector_view(const View& view, const NormParams& p) {
  const int64_t size[3] = {p.B, p.T, p.H}, elements = 16 / dtype_size(view.dtype);
  bool fits = (view.stride[3] == 1 || p.V == 1) && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (int i = 0; i < 3; ++i) fits = fits && (size[i] == 1 || view.stride[i] % elements == 0);
  return fits;
}

// Steps of 32 elements that the vectorised kernel needs for a group; 0: it cannot.
int pick(const NormParams& p) {
  const bool is_uniform = p.x.dtype == p.z.dtype && p.x.dtype == p.out.dtype;
  if (!is_uniform || p.group_size % (16 / dtype_size(p.x.dtype)) != 0) return 0;
  if (!is_vector_view(p.x, p) || !is_vector_view(p.z, p) || !is_vector_view(p.out, p)) return 0;
  if (p.weight.stride[0] != 1 || reinterpret_cast<uintptr_t>(p.weight.data) % 16 != 0) return 0;
  return p.group_size <= 128 ? 4 : (p.group_size <= 256 ? 8 : 0);
}

template <class io_t, int kSteps>
const char* launch_vectors(const NormParams& p, int64_t num_groups, void* stream) {
  const int64_t num_blocks = ceil_div(num_groups, kThreads / (kResidues / kOwned));
  auto* kernel = p.use_silu ? (p.norm_before_gate ? norm_vectors<io_t, kSteps, true, true>
                                                  : norm_vectors<io_t, kSteps, true, false>)
                            : (p.norm_before_gate ? norm_vectors<io_t, kSteps, false, true>
                                                  : norm_vectors<io_t, kSteps, false, false>);
  return launch(kernel, num_blocks, kThreads, 0, stream, p, num_groups, num_blocks);
}

}  // namespace

const char* rms_norm_gated(const NormParams& params, void* stream) {
  const int64_t num_groups = params.B * params.T * params.H * (params.V / params.group_size);
  const int num_steps = pick(params);
  if (num_steps == 0) {
    const int64_t num_blocks = ceil_div(num_groups, kThreads / kWarp);
    return launch(norm_any, num_blocks, kThreads, 0, stream, params, num_groups, num_blocks);
  }
  const char* error = nullptr;
  dispatch_dtype(params.x.dtype, [&](auto io) {
    using io_t = decltype(io);
    error = num_steps == 4 ? launch_vectors<io_t, 4>(params, num_groups, stream)
                           : launch_vectors<io_t, 8>(params, num_groups, stream);
  });
  return error;
}

}  // namespace gdn::cuda
