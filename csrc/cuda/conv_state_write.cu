// SPDX-License-Identifier: Apache-2.0
// The deferred window write: each window moves over the accepted tokens of its sequence.
//
//     new column j = input number accepted - window + j of the sequence; below 0 an old column
#include "../common/conv.h"
#include "launch.cuh"
#include "ops.h"
#include "tile/pack.cuh"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kChannels = 4;   // per thread of the vectorised kernel

// A sequence's row: which inputs become which columns.
struct Row {
  Span span;
  int64_t slot;          // -1: skipped
  int64_t first;         // input that becomes column 0; negative: old columns come first
  bool has_past;
};

__device__ __forceinline__ Row row_of(const ConvWriteParams& p, int64_t n) {
  const Span span = sequence_span(p.cu_seqlens, n, p.T);
  return {span, p.slot_of(n, span.length), p.num_accepted.at(n) - p.window, p.has_initial_state.at(n)};
}

// Any strides and dtypes.   Grid x: N * ceil(C / kThreads).   Block: a thread per channel, which reads its window before it
// writes it.
__global__ void __launch_bounds__(kThreads) write_any(const __grid_constant__ ConvWriteParams p, int64_t num_blocks) {
  const int64_t blocks = ceil_div(p.C, kThreads);
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const int64_t n = block / blocks, c = (block - n * blocks) * kThreads + threadIdx.x;
    const Row row = row_of(p, n);
    if (row.slot < 0 || c >= p.C) continue;
    float column[kMaxTaps];
#pragma unroll
    for (int j = 0; j < kMaxTaps; ++j) {
      const int64_t token = row.first + j;
      column[j] = 0.0f;
      if (j >= p.window) continue;
      if (token >= 0) column[j] = p.x.load(p.x.offset(row.span.batch, c, row.span.first + token));
      else if (row.has_past) column[j] = p.conv_state.load(p.conv_state.offset(row.slot, c, p.window + token));
    }
#pragma unroll
    for (int j = 0; j < kMaxTaps; ++j) {
      if (j < p.window) p.conv_state.store(p.conv_state.offset(row.slot, c, j), column[j]);
    }
  }
}

// Channels contiguous in x, a dense window, one dtype.   Grid x: N * ceil(C / (kChannels * kThreads)).   Block: a thread per
// kChannels channels, all its loads in flight at once.
// Needs   C a multiple of 4, strides and addresses likewise. Any arch.
template <class io_t, int kWindow>
__global__ void __launch_bounds__(kThreads) write_vectors(const __grid_constant__ ConvWriteParams p, int64_t num_blocks) {
  const int64_t blocks = ceil_div(p.C, kThreads * kChannels);
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const int64_t n = block / blocks, c = ((block - n * blocks) * kThreads + threadIdx.x) * kChannels;
    const Row row = row_of(p, n);
    if (row.slot < 0 || c >= p.C) continue;
    const io_t* gmem_x = static_cast<const io_t*>(p.x.data) + p.x.offset(row.span.batch, c, row.span.first);
    io_t* gmem_window = static_cast<io_t*>(p.conv_state.data) + p.conv_state.offset(row.slot, c);
    PackOf<io_t, kChannels> pack[kWindow];
    float past[kChannels * kWindow] = {}, window[kChannels * kWindow];   // [channel][column]
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      if (row.first + j >= 0) pack[j] = load_pack<io_t, kChannels>(gmem_x + (row.first + j) * p.x.stride[2]);
    }
    if (row.first < 0 && row.has_past) {
#pragma unroll
      for (int i = 0; i < kWindow; ++i) {
        unpack<io_t, kChannels>(load_pack<io_t, kChannels>(gmem_window + i * kChannels), past + i * kChannels);
      }
    }
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      float x[kChannels];
      const bool is_new = row.first + j >= 0;
      if (is_new) unpack<io_t, kChannels>(pack[j], x);
#pragma unroll
      for (int e = 0; e < kChannels; ++e) {
        float old = 0.0f;
#pragma unroll
        for (int i = 1; i < kWindow; ++i) {   // a register each: no index that is known only at run time
          if (row.first + j + kWindow == i) old = past[e * kWindow + i];
        }
        window[e * kWindow + j] = is_new ? x[e] : old;
      }
    }
#pragma unroll
    for (int i = 0; i < kWindow; ++i) store_pack<io_t, kChannels>(gmem_window + i * kChannels, window + i * kChannels);
  }
}

bool can_vectorise(const ConvWriteParams& p) {
  const int64_t bytes = kChannels * dtype_size(p.x.dtype);
  const auto is_aligned = [&](const View& view) { return reinterpret_cast<uintptr_t>(view.data) % bytes == 0; };
  return p.x.dtype == p.conv_state.dtype && p.window >= 3 && p.C % kChannels == 0 && p.x.stride[1] == 1 &&
         (p.B == 1 || p.x.stride[0] % kChannels == 0) && (p.T == 1 || p.x.stride[2] % kChannels == 0) &&
         is_aligned(p.x) && p.conv_state.stride[2] == 1 && p.conv_state.stride[1] == p.window &&
         p.conv_state.stride[0] % kChannels == 0 && is_aligned(p.conv_state);
}

}  // namespace

const char* conv_state_write(const ConvWriteParams& params, void* stream) {
  if (!can_vectorise(params)) {
    const int64_t num_blocks = params.N * ceil_div(params.C, kThreads);
    return launch(write_any, num_blocks, kThreads, 0, stream, params, num_blocks);
  }
  const int64_t num_blocks = params.N * ceil_div(params.C, kThreads * kChannels);
  const char* error = nullptr;
  dispatch_dtype(params.x.dtype, [&](auto io) {
    using io_t = decltype(io);
    auto* const kernel = params.window == 4 ? write_vectors<io_t, 4> : write_vectors<io_t, 3>;
    error = launch(kernel, num_blocks, kThreads, 0, stream, params, num_blocks);
  });
  return error;
}

}  // namespace gdn::cuda
