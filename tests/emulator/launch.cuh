// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/launch.cuh where there is no GPU: CUDA's words for C++, and launches that run on the machine of
// machine.h. The instructions of csrc/cuda/ptx have their stand-ins in ptx/.
#pragma once

#include <cmath>

#include "../common/dims.h"
#include "../common/dtypes.h"
#include "machine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static   // one block runs at a time

#define threadIdx (emulated::Dim{emulated::machine().current->id})
#define blockIdx (emulated::Dim{static_cast<unsigned>(emulated::machine().first_block) + emulated::machine().current->block})
#define blockDim (emulated::machine().block_dim)
#define gridDim (emulated::machine().grid_dim)

using std::max;
using std::min;

namespace emulated {

template <class T>
T shuffle(T x, int source) {
  struct Argument {
    T sent, received;
    int source;
  } argument{x, x, source};
  with_warp(&argument, [](void** lanes) {
    for (int lane = 0; lane < kWarp; ++lane) {
      Argument& self = *static_cast<Argument*>(lanes[lane]);
      self.received = static_cast<Argument*>(lanes[self.source])->sent;
    }
  });
  return argument.received;
}

}  // namespace emulated

template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulated::shuffle(x, emulated::lane() ^ mask);
}
template <class T>
T __shfl_sync(unsigned, T x, int source) {
  return emulated::shuffle(x, source);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int distance) {
  return emulated::shuffle(x, emulated::lane() >= distance ? emulated::lane() - distance : emulated::lane());
}
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned bits = 0;
  for (int lane = 0; lane < emulated::kWarp; ++lane) bits |= static_cast<unsigned>(emulated::shuffle(x, lane)) << lane;
  return bits;
}
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == 0xffffffffu; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline void __syncwarp() { emulated::shuffle(0, 0); }
inline void __syncthreads() { emulated::suspend(emulated::Waits::kForBlock); }
inline int __syncthreads_count(bool x) {
  static int sum;   // one block runs at a time
  sum += x;
  __syncthreads();
  const int count = sum;
  __syncthreads();
  sum = 0;
  __syncthreads();
  return count;
}

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a & 0xffffu, b & 0xffffu) | std::max(a >> 16, b >> 16) << 16;
}

struct __nv_bfloat162_raw {
  unsigned short x, y;
};
struct __half2_raw {
  unsigned short x, y;
};
inline __nv_bfloat162_raw __floats2bfloat162_rn(float a, float b) {
  return {gdn::from_float<gdn::bf16_t>(a).bits, gdn::from_float<gdn::bf16_t>(b).bits};
}
inline __half2_raw __floats2half2_rn(float a, float b) {
  return {gdn::from_float<gdn::fp16_t>(a).bits, gdn::from_float<gdn::fp16_t>(b).bits};
}

namespace gdn::cuda {

constexpr int64_t kMaxBlocks = 2147483647;

// As many as an H200 has, so that the choices made by size are those of that card; EMULATED_SMS names another number.
inline int num_multiprocessors() {
  const char* wanted = std::getenv("EMULATED_SMS");
  return wanted ? std::atoi(wanted) : 132;
}

inline bool overlaps_launches() { return true; }

inline size_t shared_bytes_for(int blocks) { return static_cast<size_t>(233472 / blocks - 1024); }

// EMULATED_HOPPER=0: a GPU of another arch, for which kernels are chosen.
inline bool is_hopper() {
  const char* wanted = std::getenv("EMULATED_HOPPER");
  return wanted == nullptr || std::atoi(wanted) != 0;
}
inline bool has_clusters() { return true; }

template <class... Params, class... Args>
const char* launch_clusters(void (*kernel)(Params...), int cluster_blocks, int64_t num_blocks, int threads,
                            size_t shared_bytes, void*, Args&&... args) {
  emulated::Machine& m = emulated::machine();
  // Most kernels without dynamic shared memory walk on past their grid: a small one puts that to use.
  const int64_t blocks = std::max<int64_t>(0, shared_bytes > 0 ? num_blocks : std::min<int64_t>(num_blocks, 64));
  m.body = [&] { kernel(args...); };
  m.block_dim.x = static_cast<unsigned>(threads);
  m.grid_dim.x = static_cast<unsigned>(blocks);
  m.cluster_blocks = cluster_blocks;
  m.shared_bytes = shared_bytes;
  std::vector<int64_t> order(blocks / cluster_blocks);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i) * cluster_blocks;
  std::shuffle(order.begin(), order.end(), m.random);
  for (int64_t first : order) {
    m.first_block = first;
    emulated::run_cluster(m, threads);
  }
  return nullptr;
}

template <class... Params, class... Args>
const char* launch_clusters_early(void (*kernel)(Params...), int cluster_blocks, int64_t num_blocks, int threads,
                                  size_t shared_bytes, void* stream, Args&&... args) {
  return launch_clusters(kernel, cluster_blocks, num_blocks, threads, shared_bytes, stream, args...);
}

template <class... Params, class... Args>
const char* launch(void (*kernel)(Params...), int64_t num_blocks, int threads, size_t shared_bytes, void* stream,
                   Args&&... args) {
  return launch_clusters(kernel, 1, num_blocks, threads, shared_bytes, stream, args...);
}

template <class... Params, class... Args>
const char* launch_early(void (*kernel)(Params...), int64_t num_blocks, int threads, size_t shared_bytes, void* stream,
                         Args&&... args) {
  return launch(kernel, num_blocks, threads, shared_bytes, stream, std::forward<Args>(args)...);
}

}  // namespace gdn::cuda
