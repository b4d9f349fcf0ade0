// SPDX-License-Identifier: Apache-2.0
// Fold of accepted records into the states of all layers, in one launch.
//
//     for each accepted record:  S = fma(k, f, alpha*S)             rule.h's write, token by token
//
// Bound by the bytes of S. k f^T is symmetric in what its two vectors are: the one along the contiguous dim of S is called
// `along`, the other `across`, and one kernel serves both layouts.

#include <algorithm>

#include "../common/ring.h"
#include "launch.cuh"
#include "ops.h"
#include "ptx/cp_async.cuh"
#include "ptx/ld_st.cuh"
#include "ptx/shared.cuh"
#include "tile/pack.cuh"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 256;
template <class state_t>
constexpr int kLines = 2 * static_cast<int>(sizeof(state_t));   // lines of S (along the contiguous dim) that a thread holds
constexpr int kRecordsAtOnce = 8;    // records in shared memory
constexpr int kLoadsAtOnce = 4;      // of a thread, while it holds its part of the state
constexpr int64_t kFarthestLine = 1 << 20;   // elements from a line to the next, so that 32 bits count those of a thread

// How the work is cut. A block holds `lines` lines of one value head's S.
struct Cut {
  bool k_contiguous;
  int along, across;       // length of a line, number of lines
  int lanes;               // threads side by side on a line, 16 bytes each
  int lines;
  uint32_t parts;          // blocks of a head
  uint32_t num_blocks;
};

// Part of a head of a row of a layer.
struct Place {
  uint32_t layer, n;
  int head, key_head, member, part;
};

__device__ __forceinline__ Place place_of_block(const FoldParams& p, const Cut& cut, uint32_t block) {
  const uint32_t heads = static_cast<uint32_t>(p.Hv), batch = static_cast<uint32_t>(p.batch);
  const uint32_t rest = block / cut.parts, item = rest / heads, layer = item / batch;
  const int head = static_cast<int>(rest - item * heads), group = static_cast<int>(p.Hv / p.Hk), hk = head / group;
  return {layer, item - layer * batch, head, hk, head - hk * group, static_cast<int>(block - rest * cut.parts)};
}

struct Work : Place {
  FoldParams::Row row;
};

__device__ __forceinline__ Work work_of_block(const FoldParams& p, const Cut& cut, uint32_t block) {
  const Place place = place_of_block(p, cut, block);
  return {place, p.row(place.layer, place.n)};
}

// A record in shared memory, in fp32: along [kMaxHeadDim], across from the block's first line on [kMaxHeadDim], alpha.
constexpr int kSmemAcross = kMaxHeadDim, kSmemAlpha = 2 * kMaxHeadDim, kSmemRecord = kSmemAlpha + 4;

// Records from `first` on, a thread an element of each of them.
__device__ __forceinline__ void stage_records(const FoldParams& p, const Cut& cut, const Work& work, int first, float* smem) {
  const int count = work.row.count - first;   // or more
  const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), group = static_cast<int>(p.Hv / p.Hk);
  const int factor = static_cast<int>(record_factor(K, V, work.member)), line0 = work.part * cut.lines;
  const int lines = cut.lines < cut.across - line0 ? cut.lines : cut.across - line0;
  const int64_t records = p.ring.offset(work.row.ring_row, work.key_head, first);
#pragma unroll 1
  for (int i = threadIdx.x; i <= cut.along + lines; i += kThreads) {
    int source = (cut.k_contiguous ? 0 : factor) + i, target = i;
    if (i >= cut.along) {
      source = (cut.k_contiguous ? factor : 0) + line0 + i - cut.along;
      target = kSmemAcross + i - cut.along;
    }
    if (i == cut.along + lines) {
      source = static_cast<int>(record_alpha(K, V, group, work.member));
      target = kSmemAlpha;
    }
#pragma unroll 1
    for (int j0 = 0; j0 < kRecordsAtOnce && j0 < count; j0 += kLoadsAtOnce) {
      uint32_t bits[kLoadsAtOnce];
#pragma unroll
      for (int j = 0; j < kLoadsAtOnce; ++j) {
        if (j0 + j < count) bits[j] = load_bits(p.ring.data, p.ring.dtype, records + (j0 + j) * p.ring.stride[2] + source);
      }
#pragma unroll
      for (int j = 0; j < kLoadsAtOnce; ++j) {
        if (j0 + j < count) smem[(j0 + j) * kSmemRecord + target] = widen_bits(bits[j], p.ring.dtype);
      }
    }
  }
}

// Grid    x: layer (slowest), row, value head, part of the head's lines (fastest).   Block: kThreads threads, `lanes` of them
//         side by side on a line, kLines neighbouring lines a thread: 128 bytes in fp32, 64 in 16 bits.
// Reads   S once, all 16-byte loads of a thread before the records arrive; the records of the head.   Writes S once.
// Shared  kRecordsAtOnce records, 16 KB: filled by all, read after the barrier; once more for every kRecordsAtOnce records.
// Needs   a line of whole 16-byte vectors, strides and address likewise. Any arch.
template <class state_t>
__device__ __forceinline__ void fold_block(const FoldParams& p, const Cut& cut, const Work& work, float* smem) {
  constexpr int kCount = kVector<state_t>, kHeld = kLines<state_t>;
  const int lane = static_cast<int>(threadIdx.x) % cut.lanes, element = lane * kCount;
  const int first_line = static_cast<int>(threadIdx.x) / cut.lanes * kHeld, line0 = work.part * cut.lines;
  const int lines = first_line >= cut.lines ? 0 : cut.across - line0 - first_line;   // that this thread has, if below kHeld
  const int stride = static_cast<int>(p.state.stride[cut.k_contiguous ? 3 : 2]);
  state_t* const gmem = static_cast<state_t*>(p.state.data) + p.state.offset(work.row.slot, work.head) +
                        int64_t{line0 + first_line} * stride + element;
  const float* const smem_across = smem + kSmemAcross + (lines > 0 ? first_line : 0);
  PackOf<state_t, kCount> pack[kHeld];
  float s[kHeld][kCount];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (i < lines) ptx::ld_global_streaming_v4(gmem + i * stride, pack[i].word);
  }
  stage_records(p, cut, work, 0, smem);
  __syncthreads();   // the records are there
#pragma unroll
  for (int i = 0; i < kHeld; ++i) unpack<state_t, kCount>(pack[i], s[i]);
  for (int first = 0;;) {
    const int count = work.row.count - first < kRecordsAtOnce ? work.row.count - first : kRecordsAtOnce;
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      const float* const record = smem + j * kSmemRecord;
      float along[kCount], across[kHeld];
#pragma unroll
      for (int e = 0; e < kCount; e += 4) unpack<float, 4>(load_pack<float, 4>(record + element + e), along + e);
#pragma unroll
      for (int i = 0; i < kHeld; i += 4) unpack<float, 4>(load_pack<float, 4>(smem_across + j * kSmemRecord + i), across + i);
      const float alpha = record[kSmemAlpha];
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) s[i][e] = write_state(alpha, along[e], across[i], s[i][e]);
      }
    }
    first += kRecordsAtOnce;
    if (first >= work.row.count) break;
    __syncthreads();   // all have read the records that the next ones overwrite
    stage_records(p, cut, work, first, smem);
    __syncthreads();   // the next records are there
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (i < lines) ptx::st_global_streaming_v4(gmem + i * stride, round_to_pack<state_t, kCount>(s[i]).word);
  }
}

template <class state_t>
__global__ void __launch_bounds__(kThreads, 3) fold_vectors(const __grid_constant__ FoldParams p,
                                                            const __grid_constant__ Cut cut) {
  __shared__ Words<16> smem[kRecordsAtOnce * kSmemRecord / 4];
  for (uint32_t block = blockIdx.x; block < cut.num_blocks; block += gridDim.x) {
    const Work work = work_of_block(p, cut, block);
    if (work.row.slot < 0) continue;   // the same for the whole block
    fold_block<state_t>(p, cut, work, reinterpret_cast<float*>(smem));
    __syncthreads();   // before the next block's records
  }
}

// The same one element at a time: any strides, head dims and alignment.
// Grid    x: layer, row, value head.   Block: neighbouring threads follow the contiguous dim. Records come through the L1.
__global__ void __launch_bounds__(kThreads) fold_elements(const __grid_constant__ FoldParams p,
                                                          const __grid_constant__ Cut cut) {
  for (uint32_t block = blockIdx.x; block < cut.num_blocks; block += gridDim.x) {
    const Work work = work_of_block(p, cut, block);
    if (work.row.slot < 0) continue;
    const int64_t group = p.Hv / p.Hk, factor = record_factor(p.K, p.V, work.member);
    const int64_t alpha = record_alpha(p.K, p.V, group, work.member);
    for (int i = threadIdx.x; i < cut.along * cut.across; i += kThreads) {
      const int line = i / cut.along, element = i - line * cut.along;
      const int k = cut.k_contiguous ? element : line, v = cut.k_contiguous ? line : element;
      const int64_t at = p.state.offset(work.row.slot, work.head, k, v);
      float s = p.state.load(at);
      for (int j = 0; j < work.row.count; ++j) {
        const int64_t record = p.ring.offset(work.row.ring_row, work.key_head, j);
        s = write_state(p.ring.load(record + alpha), p.ring.load(record + k), p.ring.load(record + factor + v), s);
      }
      p.state.store(at, s);
    }
  }
}

// ---- a stream of tiles ----

constexpr int kStages = 4;           // tiles of a block in shared memory, all but one on their way
constexpr int kStreamHeld = 4;       // lines of a tile that a thread holds
constexpr int kBlocksOfSm = 2;
constexpr int kPlans = 8;            // at least kStages + 2
constexpr int kStreamRecord = kThreads + 4;   // floats of a record: along, across, alpha

// A tile of S: where it lies, and the records of its head.
struct Plan {
  int64_t state, records;   // element offsets of its first line, of the head's first record
  int count;                // 0: nothing to do
  int member, line0;
};

constexpr size_t kStreamBytes = 2 * kRecordsAtOnce * kStreamRecord * sizeof(float) + kPlans * sizeof(Plan) +
                                size_t{16} * kStages * kStreamHeld * kThreads;   // 64.5 KiB

// What the tables say of a tile.
struct Asked {
  Place place;
  FoldParams::Entry entry;   // count 0: there is no such tile
};

__device__ __forceinline__ Asked ask_for_tile(const FoldParams& p, const Cut& cut, uint32_t tile) {
  if (tile >= cut.num_blocks) return {};
  const Place place = place_of_block(p, cut, tile);
  return {place, p.entry(place.layer, place.n)};
}

__device__ __forceinline__ Plan plan_of_tile(const FoldParams& p, const Cut& cut, const Asked& asked) {
  const FoldParams::Row row = p.row(asked.entry);
  if (row.slot < 0) return {};
  const Place& place = asked.place;
  const int line0 = place.part * cut.lines;
  return {p.state.offset(row.slot, place.head) + line0 * p.state.stride[cut.k_contiguous ? 3 : 2],
          p.ring.offset(row.ring_row, place.key_head), row.count, place.member, line0};
}

// The element of a record that a thread stages, and what of a plan moves it: source + member * of_member + line0 * of_line.
struct RecordElement {
  int source, of_member, of_line, target;
  int limit;   // line0 has to be below
};

__device__ __forceinline__ RecordElement element_of_thread(const FoldParams& p, const Cut& cut) {
  const int i = static_cast<int>(threadIdx.x), K = static_cast<int>(p.K), V = static_cast<int>(p.V);
  const int group = static_cast<int>(p.Hv / p.Hk), lines = cut.lines < cut.across ? cut.lines : cut.across;
  const bool k = (i < cut.along) == cut.k_contiguous;   // of the raw key, else of f
  if (i < cut.along) return {k ? i : K + i, k ? 0 : V, 0, i, cut.across};
  const int line = i - cut.along;
  if (line < lines) return {k ? line : K + line, k ? 0 : V, 1, i, cut.across - line};
  return {static_cast<int>(record_alpha(K, V, group, 0)), 1, 0, kThreads, line == lines ? cut.across : 0};
}

// The dtype of the ring is tested once, not per record.
__device__ __forceinline__ void load_records(const FoldParams& p, const RecordElement& element, const Plan& plan,
                                             uint32_t (&bits)[kRecordsAtOnce]) {
  const int64_t at = plan.records + element.source + plan.member * element.of_member + plan.line0 * element.of_line;
  const int count = plan.line0 < element.limit ? plan.count : 0;
  if (p.ring.dtype == DType::kFloat32) {
    const uint32_t* const gmem = static_cast<const uint32_t*>(p.ring.data) + at;
#pragma unroll
    for (int j = 0; j < kRecordsAtOnce; ++j) {
      if (j < count) bits[j] = gmem[j * p.ring.stride[2]];
    }
  } else {
    const uint16_t* const gmem = static_cast<const uint16_t*>(p.ring.data) + at;
#pragma unroll
    for (int j = 0; j < kRecordsAtOnce; ++j) {
      if (j < count) bits[j] = gmem[j * p.ring.stride[2]];
    }
  }
}

__device__ __forceinline__ void stage_elements(const FoldParams& p, const RecordElement& element, const Plan& plan,
                                               const uint32_t (&bits)[kRecordsAtOnce], float* smem) {
  const int count = plan.line0 < element.limit ? plan.count : 0;
  if (p.ring.dtype == DType::kFloat32) {
#pragma unroll
    for (int j = 0; j < kRecordsAtOnce; ++j) {
      if (j < count) smem[j * kStreamRecord + element.target] = bits_float(bits[j]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kRecordsAtOnce; ++j) {
      if (j < count) smem[j * kStreamRecord + element.target] = widen_bits(bits[j], p.ring.dtype);
    }
  }
}

// A thread's pieces of a tile: its lines from shared memory, through all records, to memory.
template <class state_t>
__device__ __forceinline__ void fold_pieces(const Plan& plan, const float* across, const float* along, const float* alphas,
                                            int lines, const Words<16>* pieces, state_t* gmem, int64_t stride) {
  constexpr int kCount = kVector<state_t>, kHeld = kStreamHeld;
  float s[kHeld][kCount];
#pragma unroll
  for (int h = 0; h < kHeld; ++h) unpack<state_t, kCount>(pieces[h * kThreads], s[h]);
#pragma unroll 1
  for (int j = 0; j < plan.count; ++j) {
    float x[kCount], y[kHeld];
#pragma unroll
    for (int e = 0; e < kCount; e += 4) unpack<float, 4>(load_pack<float, 4>(along + j * kStreamRecord + e), x + e);
#pragma unroll
    for (int h = 0; h < kHeld; h += 4) unpack<float, 4>(load_pack<float, 4>(across + j * kStreamRecord + h), y + h);
    const float alpha = alphas[j * kStreamRecord];
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) s[h][e] = write_state(alpha, x[e], y[h], s[h][e]);
    }
  }
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    if (h < lines - plan.line0) ptx::st_global_streaming_v4(gmem + h * stride, round_to_pack<state_t, kCount>(s[h]).word);
  }
}

// Grid    as many blocks as stay on the chip at once; tiles of a head's lines (fastest), heads, rows, layers in turn.
// Block   kThreads threads, `lanes` of them side by side on a line, kStreamHeld neighbouring lines a thread.
// Stream  While a tile is computed the next kStages - 1 are on their way to shared memory, each thread's pieces to a place
//         that it alone reads, and the records of the next one to registers. Who they belong to, and where, one thread
//         plans kStages tiles ahead: it asks for the indices before its part of a tile and looks at them behind it.
// Shared  records [2][kRecordsAtOnce][kStreamRecord] fp32, 16.6 KB; plans; tiles [kStages][kStreamHeld][kThreads] of 16 bytes.
// Barrier one a tile: the records of this tile and the plans made under the last one are there, and all have read the records
//         before the last, which the next ones overwrite.
// Reads   S once, the records of each head.   Writes S once, past the L1.
// Needs   as fold_vectors; a ring of at most kRecordsAtOnce, along + lines < kThreads; sm_80 on.
template <class state_t>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm) fold_stream(const __grid_constant__ FoldParams p,
                                                                     const __grid_constant__ Cut cut) {
  constexpr int kCount = kVector<state_t>, kHeld = kStreamHeld;
  extern __shared__ float4 smem[];
  float* const smem_records = reinterpret_cast<float*>(smem);
  Plan* const smem_plans = reinterpret_cast<Plan*>(smem_records + 2 * kRecordsAtOnce * kStreamRecord);
  auto* const smem_pieces = reinterpret_cast<Words<16>*>(smem_plans + kPlans) + threadIdx.x;
  const int row = static_cast<int>(threadIdx.x) / cut.lanes, along = (static_cast<int>(threadIdx.x) - row * cut.lanes) * kCount;
  const int line = row * kHeld, lines = line < cut.lines ? cut.across - line : 0;   // that are this thread's in the first tile
  const int64_t stride = p.state.stride[cut.k_contiguous ? 3 : 2];
  state_t* const gmem = static_cast<state_t*>(p.state.data) + line * stride + along;
  const RecordElement element = element_of_thread(p, cut);

  const auto fetch = [&](int i) {   // tile i of this block
    const Plan plan = smem_plans[i % kPlans];
    const int left = plan.count > 0 ? lines - plan.line0 : 0;
    const state_t* const source = gmem + plan.state;
    Words<16>* const target = smem_pieces + i % kStages * (kHeld * kThreads);
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      if (h < left) ptx::cp_async_16(ptx::shared_address(target + h * kThreads), source + h * stride, 16);
    }
    ptx::cp_async_commit_group();
  };

  if (threadIdx.x < kStages) {
    smem_plans[threadIdx.x] = plan_of_tile(p, cut, ask_for_tile(p, cut, blockIdx.x + threadIdx.x * gridDim.x));
  }
  __syncthreads();   // the first plans
#pragma unroll
  for (int i = 0; i + 1 < kStages; ++i) fetch(i);
  uint32_t bits[kRecordsAtOnce];
  load_records(p, element, smem_plans[0], bits);
  int i = 0;
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < cut.num_blocks; tile += gridDim.x, ++i) {
    const Plan plan = smem_plans[i % kPlans];
    float* const records = smem_records + i % 2 * (kRecordsAtOnce * kStreamRecord);
    stage_elements(p, element, plan, bits, records);
    ptx::cp_async_wait_group<kStages - 2>();   // this tile's pieces are there
    __syncthreads();
    fetch(i + kStages - 1);
    const Plan next = smem_plans[(i + 1) % kPlans];
    load_records(p, element, next, bits);
    Asked asked;
    if (threadIdx.x == 0) asked = ask_for_tile(p, cut, tile + kStages * gridDim.x);
    if (plan.count > 0 && lines > plan.line0) {
      fold_pieces<state_t>(plan, records + cut.along + line, records + along, records + kThreads, lines,
                           smem_pieces + i % kStages * (kHeld * kThreads), gmem + plan.state, stride);
    }
    if (threadIdx.x == 0) smem_plans[(i + kStages) % kPlans] = plan_of_tile(p, cut, asked);
  }
  ptx::cp_async_wait_group<0>();
}

// ---- launcher ----

// 16 bytes of the contiguous dim at once: a line, all other strides and the address are whole vectors.
bool moves_in_vectors(const FoldParams& p, const Cut& cut) {
  const int64_t vector = 16 / dtype_size(p.state.dtype), inner = p.state.stride[cut.k_contiguous ? 2 : 3];
  const bool strides = inner == 1 && p.state.stride[0] % vector == 0 && p.state.stride[1] % vector == 0 &&
                       p.state.stride[cut.k_contiguous ? 3 : 2] % vector == 0;
  const bool is_near = p.state.stride[cut.k_contiguous ? 3 : 2] < kFarthestLine;
  return strides && is_near && cut.along % vector == 0 && reinterpret_cast<uintptr_t>(p.state.data) % 16 == 0;
}

// Lines of a block whose threads hold `held` each, and what follows.
void cut_lines(Cut& cut, int held) {
  cut.lines = std::min(kThreads / cut.lanes * held, kMaxHeadDim);
  cut.parts = static_cast<uint32_t>(ceil_div(cut.across, cut.lines));
}

bool streams(const FoldParams& p, const Cut& cut) {
  return p.ring_length <= kRecordsAtOnce && cut.along + std::min(cut.lines, cut.across) < kThreads;
}

}  // namespace

const char* fold_ring(const FoldParams& params, void* stream) {
  Cut cut{};
  cut.k_contiguous = params.state.stride[3] != 1;
  cut.along = static_cast<int>(cut.k_contiguous ? params.K : params.V);
  cut.across = static_cast<int>(cut.k_contiguous ? params.V : params.K);
  cut.parts = 1;
  const bool in_vectors = moves_in_vectors(params, cut);
  bool is_stream = false;
  if (in_vectors) {
    cut.lanes = cut.along * dtype_size(params.state.dtype) / 16;
    cut_lines(cut, kStreamHeld);
    is_stream = streams(params, cut);
    if (!is_stream) cut_lines(cut, 2 * dtype_size(params.state.dtype));   // kLines
  }
  const int64_t num_blocks = params.layers * params.batch * params.Hv * cut.parts;
  cut.num_blocks = static_cast<uint32_t>(num_blocks);
  if (num_blocks > kMaxBlocks) return "more than 2^31 - 1 blocks";
  if (!in_vectors) return launch(fold_elements, num_blocks, kThreads, 0, stream, params, cut);
  const char* error = nullptr;
  dispatch_dtype(params.state.dtype, [&](auto state) {
    using state_t = decltype(state);
    if (is_stream) {
      const int64_t resident = std::min<int64_t>(num_blocks, int64_t{kBlocksOfSm} * num_multiprocessors());
      error = launch(fold_stream<state_t>, resident, kThreads, kStreamBytes, stream, params, cut);
    } else {
      error = launch(fold_vectors<state_t>, num_blocks, kThreads, 0, stream, params, cut);
    }
  });
  return error;
}

}  // namespace gdn::cuda
