// SPDX-License-Identifier: Apache-2.0
// copy_slots, zero_slots, cast_state: slots of a pool moved, cleared, turned into another dtype or layout.
#include <algorithm>
#include <type_traits>

#include "launch.cuh"
#include "ops.h"
#include "tile/pack.cuh"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 4;   // 16 bytes each, in flight at once
template <class from_t, class to_t>
constexpr int kUnitOf = kVector<from_t> < kVector<to_t> ? kVector<from_t> : kVector<to_t>;   // elements of a cast
constexpr int kTurnSide = 64;          // of a tile that turns
constexpr int kSide = 32;              // of a tile of anything else
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

// ---- between dtypes, the layout kept ----

// Slots that lie in one piece in both pools, in the same order, and change their dtype.
// Grid    x: item (slowest), kThreads * kVectorsPerThread units of kUnit elements.
// Moves   16 bytes of the wider dtype at once. Needs slots of whole units, aligned.
template <class from_t, class to_t>
__global__ void __launch_bounds__(kThreads) cast_pieces(const __grid_constant__ PoolParams p, int64_t units,
                                                        int64_t parts, int64_t num_blocks) {
  constexpr int kUnit = kUnitOf<from_t, to_t>;
  for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
    const int64_t i = block / parts, first = (block - i * parts) * kThreads * kVectorsPerThread + threadIdx.x;
    const Item item = item_at(p, i);
    if (item.is_skipped) continue;
    const from_t* const source = static_cast<const from_t*>(p.from.data) + p.from.offset(item.from) + first * kUnit;
    to_t* const target = static_cast<to_t*>(p.to.data) + p.to.offset(item.to) + first * kUnit;
    PackOf<from_t, kUnit> pack[kVectorsPerThread];
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      if (first + v * kThreads < units) pack[v] = load_pack<from_t, kUnit>(source + v * kThreads * kUnit);
    }
#pragma unroll
    for (int v = 0; v < kVectorsPerThread; ++v) {
      if (first + v * kThreads >= units) break;
      float x[kUnit];
      unpack<from_t, kUnit>(pack[v], x);
      store_pack<to_t, kUnit>(target + v * kThreads * kUnit, x);
    }
  }
}

// ---- between layouts ----

// The last two dims of a slot, as the source has them: `fast` contiguous, lines of it `slow`. In the target it is the other
// way round.
struct Turn {
  int fast, slow;               // elements
  int fast_dim, slow_dim;       // which dim of the slot each one is
  int fast_tiles, slow_tiles;   // of kTurnSide x kTurnSide
  uint32_t num_blocks;
};

// Element of a tile as it waits in shared memory: its bits, or a float where the dtype changes.
template <class from_t, class to_t, int kCount>
__device__ __forceinline__ void to_words(const PackOf<from_t, kCount>& pack, uint32_t (&word)[kCount]) {
  constexpr bool kKeepsBits = sizeof(from_t) == 2 && std::is_same_v<from_t, to_t>;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kKeepsBits) {
      word[i] = pack.word[i / 2] >> (16 * (i % 2)) & 0xffffu;
    } else {
      float x[kCount];
      unpack<from_t, kCount>(pack, x);
      word[i] = float_bits(x[i]);
    }
  }
}

template <class from_t, class to_t, int kCount>
__device__ __forceinline__ PackOf<to_t, kCount> from_words(const uint32_t (&word)[kCount]) {
  if constexpr (sizeof(from_t) == 2 && std::is_same_v<from_t, to_t>) {
    PackOf<to_t, kCount> pack;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) pack.word[i] = word[2 * i] | word[2 * i + 1] << 16;
    return pack;
  } else {
    float x[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = bits_float(word[i]);
    return round_to_pack<to_t, kCount>(x);
  }
}

// Slots whose last two dims change places in memory, between any two dtypes.
// Grid    x: item (slowest), first dim, tiles of the slow dim, tiles of the fast one (fastest). A tile a block.
// Block   eight lanes follow a line, 16 bytes each, in the source and again in the target: 128 bytes; a warp takes four lines.
// Shared  tile [fast][slow + 1] of words, 16.3 KB: a lane writes the elements of its vector one under the other and reads
//         those of its target's side by side; the odd row length keeps both free of bank conflicts for fp32, two ways for 16
//         bits. One barrier between, one before the next tile.
// Moves   16 bytes at once on both sides, all loads of a thread in flight before it writes. Same dtype: bits.
// Needs   both dims in whole vectors of either dtype, strides and addresses likewise. Any arch.
template <class from_t, class to_t>
__global__ void __launch_bounds__(kThreads, 5) turn_tiles(const __grid_constant__ PoolParams p,
                                                          const __grid_constant__ Turn turn) {
  constexpr int kFrom = kVector<from_t>, kTo = kVector<to_t>, kLanes = 8;
  __shared__ uint32_t tile[kTurnSide][kTurnSide + 1];
  const int lane = static_cast<int>(threadIdx.x) % kLanes, line = static_cast<int>(threadIdx.x) / kLanes;
  constexpr int kLines = kThreads / kLanes;
  for (uint32_t block = blockIdx.x; block < turn.num_blocks; block += gridDim.x) {
    const uint32_t rest = block / turn.fast_tiles, outer = rest / turn.slow_tiles;
    const int fast0 = static_cast<int>(block - rest * turn.fast_tiles) * kTurnSide;
    const int slow0 = static_cast<int>(rest - outer * turn.slow_tiles) * kTurnSide;
    const uint32_t heads = static_cast<uint32_t>(p.sizes[0]), i = outer / heads, head = outer - i * heads;
    const Item item = item_at(p, i);
    if (item.is_skipped) continue;   // the same for the whole block
    const int64_t from_line = p.from.stride[1 + turn.slow_dim], to_line = p.to.stride[1 + turn.fast_dim];
    const from_t* const source = static_cast<const from_t*>(p.from.data) + p.from.offset(item.from, head) +
                                 slow0 * from_line + fast0;
    to_t* const target = static_cast<to_t*>(p.to.data) + p.to.offset(item.to, head) + fast0 * to_line + slow0;
    const int fasts = turn.fast - fast0, slows = turn.slow - slow0;   // elements of this tile, or more
    constexpr int kReads = kTurnSide / kLines * (kTurnSide / (kLanes * kFrom));
    PackOf<from_t, kFrom> pack[kReads];
#pragma unroll
    for (int r = 0; r < kReads; ++r) {
      constexpr int kAlong = kTurnSide / (kLanes * kFrom);
      const int slow = line + r / kAlong * kLines, fast = (lane + r % kAlong * kLanes) * kFrom;
      if (slow < slows && fast < fasts) pack[r] = load_pack<from_t, kFrom>(source + slow * from_line + fast);
    }
#pragma unroll
    for (int r = 0; r < kReads; ++r) {
      constexpr int kAlong = kTurnSide / (kLanes * kFrom);
      const int slow = line + r / kAlong * kLines, fast = (lane + r % kAlong * kLanes) * kFrom;
      if (slow >= slows || fast >= fasts) continue;
      uint32_t word[kFrom];
      to_words<from_t, to_t, kFrom>(pack[r], word);
#pragma unroll
      for (int e = 0; e < kFrom; ++e) tile[fast + e][slow] = word[e];
    }
    __syncthreads();   // the tile is filled
    constexpr int kWrites = kTurnSide / kLines * (kTurnSide / (kLanes * kTo));
#pragma unroll
    for (int w = 0; w < kWrites; ++w) {
      constexpr int kAlong = kTurnSide / (kLanes * kTo);
      const int fast = line + w / kAlong * kLines, slow = (lane + w % kAlong * kLanes) * kTo;
      if (slow >= slows || fast >= fasts) continue;
      uint32_t word[kTo];
#pragma unroll
      for (int e = 0; e < kTo; ++e) word[e] = tile[fast][slow + e];
      *reinterpret_cast<PackOf<to_t, kTo>*>(target + fast * to_line + slow) = from_words<from_t, to_t, kTo>(word);
    }
    __syncthreads();   // before the next tile overwrites it
  }
}

// ---- anything else ----

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

bool is_aligned(const View& view, int64_t elements) {
  return view.stride[0] % elements == 0 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
}

// Slots of whole vectors of `unit` elements, in one piece, in the same order on both sides.
bool lies_in_pieces(const PoolParams& p, int64_t unit) {
  if (p.slot_elements() % unit != 0 || !is_dense(p.to, p.sizes) || !is_aligned(p.to, unit)) return false;
  if (!p.from.given()) return true;
  bool same = is_aligned(p.from, unit);
  for (int i = 0; i < 3; ++i) same = same && (p.sizes[i] == 1 || p.from.stride[i + 1] == p.to.stride[i + 1]);
  return same;
}

int64_t vector_of(const View& view) { return 16 / dtype_size(view.dtype); }

// The last two dims, one contiguous in the source and the other in the target, in whole vectors. Whole: fast > 0.
Turn turn_of(const PoolParams& p) {
  Turn turn = {};
  if (!p.from.given()) return turn;
  const int fast_dim = p.from.stride[2] == 1 ? 1 : 2, slow_dim = 3 - fast_dim;
  const int64_t fast = p.sizes[fast_dim], slow = p.sizes[slow_dim], wide = std::max(vector_of(p.from), vector_of(p.to));
  const auto fits = [&](const View& view, int contiguous, int line) {
    const int64_t vector = vector_of(view);
    return view.stride[1 + contiguous] == 1 && view.stride[1 + line] % vector == 0 && view.stride[1] % vector == 0 &&
           is_aligned(view, vector);
  };
  if (!fits(p.from, fast_dim, slow_dim) || !fits(p.to, slow_dim, fast_dim)) return turn;
  if (fast % wide != 0 || slow % wide != 0) return turn;
  const int64_t fast_tiles = ceil_div(fast, kTurnSide), slow_tiles = ceil_div(slow, kTurnSide);
  const int64_t num_blocks = p.items * p.sizes[0] * fast_tiles * slow_tiles;
  if (num_blocks > kMaxBlocks) return turn;
  return {static_cast<int>(fast), static_cast<int>(slow), fast_dim, slow_dim, static_cast<int>(fast_tiles),
          static_cast<int>(slow_tiles), static_cast<uint32_t>(num_blocks)};
}

template <class from_t, class to_t>
const char* launch_cast(const PoolParams& p, void* stream) {
  const int64_t units = p.slot_elements() / kUnitOf<from_t, to_t>;
  const int64_t parts = ceil_div(units, kThreads * kVectorsPerThread), num_blocks = p.items * parts;
  return launch(cast_pieces<from_t, to_t>, num_blocks, kThreads, 0, stream, p, units, parts, num_blocks);
}

template <class from_t, class to_t>
const char* launch_turn(const PoolParams& p, const Turn& turn, void* stream) {
  return launch(turn_tiles<from_t, to_t>, turn.num_blocks, kThreads, 0, stream, p, turn);
}

const char* launch_tiles(const PoolParams& p, void* stream) {
  const auto follows_rows = [&](const View& view) {
    return p.sizes[2] == 1 || (p.sizes[1] > 1 && view.stride[2] < view.stride[3]);
  };
  Tiling tiling{ceil_div(p.sizes[1], kSide), ceil_div(p.sizes[2], kSide), 0, follows_rows(p.from), follows_rows(p.to)};
  tiling.num_blocks = p.items * p.sizes[0] * tiling.rows * tiling.columns;
  return launch(move_tiles, tiling.num_blocks, kThreads, 0, stream, p, tiling);
}

}  // namespace

const char* move_slots(const PoolParams& params, void* stream) {
  if (params.slot_elements() == 0) return nullptr;
  const bool same_dtype = !params.from.given() || params.from.dtype == params.to.dtype;
  if (same_dtype && lies_in_pieces(params, vector_of(params.to))) {
    const int64_t vectors = params.slot_elements() / vector_of(params.to);
    const int64_t parts = ceil_div(vectors, kThreads * kVectorsPerThread), num_blocks = params.items * parts;
    return launch(move_pieces, num_blocks, kThreads, 0, stream, params, vectors, parts, num_blocks);
  }
  const Turn turn = turn_of(params);
  const bool casts = !same_dtype && lies_in_pieces(params, std::max(vector_of(params.from), vector_of(params.to)));
  if (turn.fast == 0 && !casts) return launch_tiles(params, stream);
  const char* error = nullptr;
  dispatch_dtype(params.from.dtype, [&](auto from) {
    dispatch_dtype(params.to.dtype, [&](auto to) {
      using from_t = decltype(from);
      using to_t = decltype(to);
      if constexpr (!std::is_same_v<from_t, to_t>) {
        if (casts) error = launch_cast<from_t, to_t>(params, stream);
      }
      if (!casts) error = launch_turn<from_t, to_t>(params, turn, stream);
    });
  });
  return error;
}

}  // namespace gdn::cuda
