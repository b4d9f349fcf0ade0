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

// Compute capability 9.0, the one that runs code for sm_90a.
inline bool is_hopper() {
  return device_attribute<cudaDevAttrComputeCapabilityMajor>(0) == 9 &&
         device_attribute<cudaDevAttrComputeCapabilityMinor>(0) == 0;
}

// Launches kernel(args...) on min(num_blocks, kMaxBlocks) blocks; nothing when there are none. The kernel walks on:
//     for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x)
// With cluster_blocks > 1 (sm_90 on), that many neighbouring blocks are a cluster; num_blocks is a multiple.
template <class... Params, class... Args>
const char* launch_clusters(void (*kernel)(Params...), int cluster_blocks, int64_t num_blocks, int threads,
                            size_t shared_bytes, void* stream, Args&&... args) {
  if (num_blocks <= 0) return nullptr;
  if (shared_bytes > kSharedWithoutOptIn) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error_text(error);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks < kMaxBlocks ? num_blocks : kMaxBlocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster_blocks), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = cluster_blocks > 1 ? 1 : 0;
  return error_text(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

template <class... Params, class... Args>
const char* launch(void (*kernel)(Params...), int64_t num_blocks, int threads, size_t shared_bytes, void* stream,
                   Args&&... args) {
  return launch_clusters(kernel, 1, num_blocks, threads, shared_bytes, stream, std::forward<Args>(args)...);
}

}  // namespace gdn::cuda
