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
#include "ptx/ld_st.cuh"
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

// A head of a row of a layer.
struct Work {
  FoldParams::Row row;
  int head, key_head, member, part;
};

__device__ __forceinline__ Work work_of_block(const FoldParams& p, const Cut& cut, uint32_t block) {
  const uint32_t heads = static_cast<uint32_t>(p.Hv), batch = static_cast<uint32_t>(p.batch);
  const uint32_t rest = block / cut.parts, item = rest / heads, layer = item / batch;
  const int head = static_cast<int>(rest - item * heads), group = static_cast<int>(p.Hv / p.Hk), hk = head / group;
  return {p.row(layer, item - layer * batch), head, hk, head - hk * group, static_cast<int>(block - rest * cut.parts)};
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

// 16 bytes of the contiguous dim at once: a line, all other strides and the address are whole vectors.
bool moves_in_vectors(const FoldParams& p, const Cut& cut) {
  const int64_t vector = 16 / dtype_size(p.state.dtype), inner = p.state.stride[cut.k_contiguous ? 2 : 3];
  const bool strides = inner == 1 && p.state.stride[0] % vector == 0 && p.state.stride[1] % vector == 0 &&
                       p.state.stride[cut.k_contiguous ? 3 : 2] % vector == 0;
  const bool is_near = p.state.stride[cut.k_contiguous ? 3 : 2] < kFarthestLine;
  return strides && is_near && cut.along % vector == 0 && reinterpret_cast<uintptr_t>(p.state.data) % 16 == 0;
}

}  // namespace

const char* fold_ring(const FoldParams& params, void* stream) {
  Cut cut{};
  cut.k_contiguous = params.state.stride[3] != 1;
  cut.along = static_cast<int>(cut.k_contiguous ? params.K : params.V);
  cut.across = static_cast<int>(cut.k_contiguous ? params.V : params.K);
  const int64_t heads = params.layers * params.batch * params.Hv;
  cut.parts = 1;
  const bool in_vectors = moves_in_vectors(params, cut);
  if (in_vectors) {
    cut.lanes = cut.along * dtype_size(params.state.dtype) / 16;
    const int held = 2 * dtype_size(params.state.dtype);   // kLines
    cut.lines = std::min(kThreads / cut.lanes * held, kMaxHeadDim);
    cut.parts = static_cast<uint32_t>(ceil_div(cut.across, cut.lines));
  }
  const int64_t num_blocks = heads * cut.parts;
  cut.num_blocks = static_cast<uint32_t>(num_blocks);
  if (num_blocks > kMaxBlocks) return "more than 2^31 - 1 blocks";
  if (!in_vectors) return launch(fold_elements, num_blocks, kThreads, 0, stream, params, cut);
  const char* error = nullptr;
  dispatch_dtype(params.state.dtype, [&](auto state) {
    error = launch(fold_vectors<decltype(state)>, num_blocks, kThreads, 0, stream, params, cut);
  });
  return error;
}

}  // namespace gdn::cuda
