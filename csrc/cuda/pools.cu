// SPDX-License-Identifier: Apache-2.0
// copy_slots, zero_slots, cast_state: slots of a pool moved, cleared, turned into another dtype or layout.
#include "launch.cuh"
#include "ops.h"
#include "tile/pack.cuh"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 4;   // 16 bytes each, in flight at once
constexpr int kSide = 32;              // of a tile
constexpr int kTileRows = kThreads / kSide;

// Slots of item: from < 0 without a source.
struct Item {
  int64_t from, to;
  bool is_skipped;
};

__device__ __forceinline__ Item item_at(const PoolParams& p, int64_t i) {
  const int64_t to = slot_of_row(p.to_slots, i, p.to_pool);
  const int64_t from = p.from.given() ? slot_of_row(p.from_slots, i, p.from_pool) : -1;
  return {from, to, to < 0 || (p.from.given() && from < 0)};
}

// Slots that lie in one piece, the same in both pools: bytes, whatever they mean.
// Grid    x: item (slowest), kThreads * kVectorsPerThread vectors.   Needs a slot of whole 16-byte vectors, aligned.
__global__ void __launch_bounds__(kThreads) move_pieces(const __grid_constant__ PoolParams p, int64_t vectors,
                                                        int64_t parts, int64_t num_blocks) {
  const int size = dtype_size(p.to.dtype);
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const int64_t i = block / parts, first = (block - i * parts) * kThreads * kVectorsPerThread + threadIdx.x;
    const Item item = item_at(p, i);
    if (item.is_skipped) continue;
    auto* const to = reinterpret_cast<Words<16>*>(static_cast<char*>(p.to.data) + p.to.offset(item.to) * size);
    Words<16> words[kVectorsPerThread] = {};
    if (item.from >= 0) {
      const char* const source = static_cast<const char*>(p.from.data) + p.from.offset(item.from) * size;
#pragma unroll
      for (int v = 0; v < kVectorsPerThread; ++v) {
        const int64_t at = first + v * kThreads;
        if (at < vectors) words[v] = reinterpret_cast<const Words<16>*>(source)[at];
      }
    }
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      const int64_t at = first + v * kThreads;
      if (at < vectors) to[at] = words[v];
    }
  }
}

// Any strides and dtypes: tiles of kSide x kSide of a slot's last two dims, read along the source's contiguous one and
// written along the target's. Same dtype: bits, so that a NaN keeps its payload.
// Grid    x: item (slowest), first dim, tiles of the second, tiles of the third (fastest).
// Shared  tile [kSide][kSide + 1] of stored bits or, between dtypes, of floats; 4 KB. One barrier between writing and
//         reading it, one before the next tile.
struct Tiling {
  int64_t rows, columns;      // tiles along the second and third dim
  int64_t num_blocks;
  bool reads_rows, writes_rows;   // neighbouring threads follow the second dim instead of the third
};

__global__ void __launch_bounds__(kThreads) move_tiles(const __grid_constant__ PoolParams p,
                                                       const __grid_constant__ Tiling tiling) {
  __shared__ uint32_t tile[kSide][kSide + 1];
  const int fast = threadIdx.x % kSide, slow = threadIdx.x / kSide;
  const bool same_dtype = p.from.dtype == p.to.dtype;
  for (int64_t block = blockIdx.x; block < tiling.num_blocks; block += gridDim.x) {
    const int64_t rest = block / tiling.columns, column0 = (block - rest * tiling.columns) * kSide;
    const int64_t outer = rest / tiling.rows, row0 = (rest - outer * tiling.rows) * kSide;
    const int64_t i = outer / p.sizes[0], first = outer - i * p.sizes[0];
    const Item item = item_at(p, i);
    if (item.is_skipped) continue;   // the same for the whole block
    for (int k = slow; k < kSide; k += kTileRows) {
      const int r = tiling.reads_rows ? fast : k, c = tiling.reads_rows ? k : fast;
      uint32_t bits = 0;
      if (item.from >= 0 && row0 + r < p.sizes[1] && column0 + c < p.sizes[2]) {
        const int64_t at = p.from.offset(item.from, first, row0 + r, column0 + c);
        bits = same_dtype ? load_bits(p.from.data, p.from.dtype, at) : float_bits(p.from.load(at));
      }
      tile[r][c] = bits;
    }
    __syncthreads();   // the tile is filled
    for (int k = slow; k < kSide; k += kTileRows) {
      const int r = tiling.writes_rows ? fast : k, c = tiling.writes_rows ? k : fast;
      if (row0 + r >= p.sizes[1] || column0 + c >= p.sizes[2]) continue;
      const int64_t at = p.to.offset(item.to, first, row0 + r, column0 + c);
      if (!same_dtype && item.from >= 0) p.to.store(at, bits_float(tile[r][c]));
      else if (p.to.dtype == DType::kFloat32) static_cast<uint32_t*>(p.to.data)[at] = tile[r][c];
      else static_cast<uint16_t*>(p.to.data)[at] = static_cast<uint16_t>(tile[r][c]);
    }
    __syncthreads();   // before the next tile overwrites it
  }
}

// Elements of a slot in one piece: whatever the order of its dims, their strides are those of a dense tensor.
bool is_dense(const View& view, const int64_t (&sizes)[3]) {
  bool used[3] = {};
  int64_t expected = 1;
  for (int round = 0; round < 3; ++round) {
    int next = -1;
    for (int i = 0; i < 3; ++i) {
      if (!used[i] && (sizes[i] == 1 || view.stride[i + 1] == expected) && (next < 0 || sizes[i] == 1)) next = i;
    }
    if (next < 0) return false;
    used[next] = true;
    expected *= sizes[next];
  }
  return true;
}

bool moves_in_pieces(const PoolParams& p) {
  const int64_t size = dtype_size(p.to.dtype);
  const auto fits = [&](const View& view) {
    return view.stride[0] * size % 16 == 0 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  };
  if (p.slot_elements() * size % 16 != 0 || !is_dense(p.to, p.sizes) || !fits(p.to)) return false;
  if (!p.from.given()) return true;
  bool same = p.from.dtype == p.to.dtype && fits(p.from);
  for (int i = 0; i < 3; ++i) same = same && (p.sizes[i] == 1 || p.from.stride[i + 1] == p.to.stride[i + 1]);
  return same;
}

}  // namespace

const char* move_slots(const PoolParams& params, void* stream) {
  if (params.slot_elements() == 0) return nullptr;
  if (moves_in_pieces(params)) {
    const int64_t vectors = params.slot_elements() * dtype_size(params.to.dtype) / 16;
    const int64_t parts = ceil_div(vectors, kThreads * kVectorsPerThread), num_blocks = params.items * parts;
    return launch(move_pieces, num_blocks, kThreads, 0, stream, params, vectors, parts, num_blocks);
  }
  const auto follows_rows = [&](const View& view) {
    return params.sizes[2] == 1 || (params.sizes[1] > 1 && view.stride[2] < view.stride[3]);
  };
  Tiling tiling{ceil_div(params.sizes[1], kSide), ceil_div(params.sizes[2], kSide), 0, follows_rows(params.from),
                follows_rows(params.to)};
  tiling.num_blocks = params.items * params.sizes[0] * tiling.rows * tiling.columns;
  return launch(move_tiles, tiling.num_blocks, kThreads, 0, stream, params, tiling);
}

}  // namespace gdn::cuda
