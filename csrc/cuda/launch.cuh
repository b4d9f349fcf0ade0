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

// Multiprocessors of the current device, asked once per device.
inline int num_multiprocessors() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (device < kDevices && known[device].load(std::memory_order_relaxed) > 0) {
    return known[device].load(std::memory_order_relaxed);
  }
  int count = 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess || count < 1) return 1;
  if (device < kDevices) known[device].store(count, std::memory_order_relaxed);
  return count;
}

// Launches kernel(args...) on min(num_blocks, kMaxBlocks) blocks; nothing when there are none. The kernel walks on:
//     for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x)
template <class... Params, class... Args>
const char* launch(void (*kernel)(Params...), int64_t num_blocks, int threads, size_t shared_bytes, void* stream,
                   Args&&... args) {
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
  return error_text(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

}  // namespace gdn::cuda
