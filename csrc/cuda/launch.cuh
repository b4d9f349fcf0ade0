// SPDX-License-Identifier: Apache-2.0
// How every kernel of this backend is launched: a one-dimensional grid of any number of blocks, errors as text.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "../common/dims.h"

namespace gdn::cuda {

constexpr int64_t kMaxBlocks = 2147483647;        // of a grid in x; y and z end at 65,535 and stay unused
constexpr size_t kSharedWithoutOptIn = 48 * 1024; // dynamic shared memory that needs no attribute, on every arch

// nullptr, or what went wrong. Clears the error, so that it is not reported a second time by somebody else's check.
inline const char* error_text(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  (void)cudaGetLastError();
  return cudaGetErrorString(error);
}

// An attribute of the current device, asked once per device; `otherwise` where it cannot be had.
template <cudaDeviceAttr kAttribute>
int device_attribute(int otherwise) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];   // the value plus one; zero: not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return otherwise;
  const int before = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (before > 0) return before - 1;
  int value = 0;
  if (cudaDeviceGetAttribute(&value, kAttribute, device) != cudaSuccess) return otherwise;
  if (device < kDevices) known[device].store(value + 1, std::memory_order_relaxed);
  return value;
}

inline int num_multiprocessors() {
  const int count = device_attribute<cudaDevAttrMultiProcessorCount>(1);
  return count < 1 ? 1 : count;
}

// Dynamic shared memory of a block with which `blocks` of them fit a multiprocessor and no more: a limit, where registers would
// let more in.
inline size_t shared_bytes_for(int blocks) {
  const int bytes = device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(0) / blocks -
                    device_attribute<cudaDevAttrReservedSharedMemoryPerBlock>(0);
  return bytes < 0 ? 0 : static_cast<size_t>(bytes / 128 * 128);
}

// Compute capability 9.0, the one that runs code for sm_90a.
inline bool is_hopper() {
  return device_attribute<cudaDevAttrComputeCapabilityMajor>(0) == 9 &&
         device_attribute<cudaDevAttrComputeCapabilityMinor>(0) == 0;
}

// Whether a kernel may be launched while the one before it drains, also inside a captured graph: Hopper, driver 12.4.
inline bool overlaps_launches() {
  static const bool has_driver = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12040;
  }();
  return has_driver && device_attribute<cudaDevAttrComputeCapabilityMajor>(0) >= 9;
}

// Whether blocks can be launched in clusters.
inline bool has_clusters() { return device_attribute<cudaDevAttrComputeCapabilityMajor>(0) >= 9; }

enum class Starts { kInOrder, kEarly };

template <class... Params, class... Args>
const char* launch_as(Starts starts, void (*kernel)(Params...), int cluster_blocks, int64_t num_blocks, int threads,
                      size_t shared_bytes, void* stream, Args&&... args) {
  if (num_blocks <= 0) return nullptr;
  if (shared_bytes > kSharedWithoutOptIn) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error_text(error);
    // All that memory for every kernel that asks for much: a multiprocessor is emptied before its split changes.
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks < kMaxBlocks ? num_blocks : kMaxBlocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (cluster_blocks > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(cluster_blocks), 1, 1};
  }
  if (starts == Starts::kEarly && overlaps_launches()) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  return error_text(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

// Launches kernel(args...) on min(num_blocks, kMaxBlocks) blocks; nothing when there are none. The kernel walks on:
//     for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x)
template <class... Params, class... Args>
const char* launch(void (*kernel)(Params...), int64_t num_blocks, int threads, size_t shared_bytes, void* stream,
                   Args&&... args) {
  return launch_as(Starts::kInOrder, kernel, 1, num_blocks, threads, shared_bytes, stream, std::forward<Args>(args)...);
}

// The same in clusters (sm_90 on), cluster_blocks neighbouring blocks each, num_blocks a multiple; early, as below.
template <class... Params, class... Args>
const char* launch_clusters_early(void (*kernel)(Params...), int cluster_blocks, int64_t num_blocks, int threads,
                                  size_t shared_bytes, void* stream, Args&&... args) {
  return launch_as(Starts::kEarly, kernel, cluster_blocks, num_blocks, threads, shared_bytes, stream,
                   std::forward<Args>(args)...);
}

// The same, but the grid may start while the kernel before it drains: what that one may still read or write is touched behind
// griddepcontrol_wait() alone, and every block comes to it.
template <class... Params, class... Args>
const char* launch_early(void (*kernel)(Params...), int64_t num_blocks, int threads, size_t shared_bytes, void* stream,
                         Args&&... args) {
  return launch_as(Starts::kEarly, kernel, 1, num_blocks, threads, shared_bytes, stream, std::forward<Args>(args)...);
}

}  // namespace gdn::cuda
