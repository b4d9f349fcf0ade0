// SPDX-License-Identifier: Apache-2.0
// Which calls the Hopper chunk kernel takes, and its launch.
#include "../launch.cuh"
#include "../rule_kernels.h"
#include "plan.h"
#include "relay.cuh"

namespace gdn::cuda {
namespace {

using namespace chunk_sm90;

Machine this_machine() { return {num_multiprocessors(), overlaps_launches()}; }

int64_t num_tiles(const RuleParams& params) {
  // Beside their preparation rows are not sorted: the last ones may be those that are long enough.
  const int64_t rows = is_relayed(params) ? num_rows(params) : rows_to_launch(params);
  return rows * tiles_of_row(params.dims);
}

int64_t num_segment_blocks(const RuleParams& params) {
  return num_earlier_segments(params) * params.dims.Hv * segment_blocks(params.dims);
}

template <class io_t, int kKeyDim>
const char* launch_prepare(const RuleParams& params, void* stream) {
  const int64_t blocks = std::min<int64_t>(num_items(params), Hopper::kBlocks * num_multiprocessors());
  constexpr size_t kBytes = sizeof(PrepareMemory<kKeyDim>);
  // Early behind the clearing only: launched early behind the caller's kernel, calls that are cut took 4 us longer.
  if (!is_relayed(params)) return launch(prepare_kernel<io_t, kKeyDim>, blocks, kPrepareThreads, kBytes, stream, params);
  uint32_t* const words = reinterpret_cast<uint32_t*>(relay_of<kKeyDim>(params));
  const int64_t count = relay_words(params);
  if (const char* error = launch_early(clear_kernel<kClearThreads>, ceil_div(count, kClearThreads), kClearThreads, 0, stream,
                                       words, count)) {
    return error;
  }
  return launch_early(prepare_kernel<io_t, kKeyDim>, blocks, kPrepareThreads, kBytes, stream, params);
}

// Both passes of a call whose rows are cut.
template <class io_t, class out_t, int kKeyDim>
const char* launch_scan(const RuleParams& params, void* stream) {
  const int64_t tiles = num_later_segments(params) * tiles_of_row(params.dims);
  if (tiles > kMaxBlocks) return "more than 2^31 - 1 blocks";
  if (const char* error = launch_early(segment_kernel<io_t, out_t, kKeyDim>, num_segment_blocks(params), kThreads,
                                       segment_bytes<kKeyDim>(), stream, params)) {
    return error;
  }
  return launch_early(later_kernel<io_t, out_t, kKeyDim>, tiles, kOneTileThreads, kOneTileBytes<kKeyDim>, stream, params);
}

// The state through all chunks of whole rows. Of a ragged call only the device knows whether there are pairs.
template <class io_t, class out_t, int kKeyDim>
const char* launch_carry(const RuleParams& params, const Pairs& pairs, void* stream) {
  const int64_t tiles = num_tiles(params), most = params.cu_seqlens.given() ? tiles : tiles - pairs.count;
  if (tiles > kMaxBlocks) return "more than 2^31 - 1 blocks";
  const bool has_pairs = pairs.count > 0, walks = has_queue(params) && num_items(params) > 0;   // the preparation has run
  const int64_t blocks = walks ? std::min<int64_t>(most, num_multiprocessors()) : most;
  // Without pairs a block has room beside one of the preparation, and so it is there when that ends.
  return launch_early(chunk_kernel<io_t, out_t, kKeyDim, NoObserver>, blocks, has_pairs ? kThreads : kOneTileThreads,
                      has_pairs ? sizeof(SharedMemory<kKeyDim>) : kOneTileBytes<kKeyDim>, stream, params,
                      Tasks{pairs, walks ? tiles : 0}, NoObserver{});
}

template <class io_t, class out_t, int kKeyDim>
const char* launch_chunk(const RuleParams& params, void* stream) {
  if (const char* error = launch_prepare<io_t, kKeyDim>(params, stream)) return error;
  if (is_scanned(params)) return launch_scan<io_t, out_t, kKeyDim>(params, stream);
  return launch_carry<io_t, out_t, kKeyDim>(params, choose_pairs(params, this_machine()), stream);
}

template <class io_t, int kKeyDim>
const char* launch_key_dim(const RuleParams& params, void* stream) {
  if (params.out.dtype == DType::kFloat32) return launch_chunk<io_t, float, kKeyDim>(params, stream);
  return launch_chunk<io_t, io_t, kKeyDim>(params, stream);
}

template <class io_t>
const char* launch_dtype(const RuleParams& params, void* stream) {
  return params.dims.K == 64 ? launch_key_dim<io_t, 64>(params, stream) : launch_key_dim<io_t, 128>(params, stream);
}

}  // namespace

static_assert(kTokensAhead >= (kChunkCycle + kStages + 1) * kChunk, "chunks of tasks before, and one that is looked ahead to");

bool chunk_sm90_supports(const RuleParams& params) { return takes_call(params) && params.dims.V % kValueTile == 0; }

int64_t chunk_sm90_workspace_bytes(const RuleParams& call) {
  const RuleParams params = with_plan(call, this_machine());
  return params.dims.K == 64 ? workspace_bytes<64>(params) : workspace_bytes<128>(params);
}

const char* chunk_sm90_gated_delta_rule(const RuleParams& call, void* stream) {
  if (!chunk_sm90_supports(call)) return "the Hopper chunk kernel does not take these dtypes, dims or strides";
  const RuleParams params = with_plan(call, this_machine());
  return params.q.dtype == DType::kBFloat16 ? launch_dtype<bf16_t>(params, stream) : launch_dtype<fp16_t>(params, stream);
}

}  // namespace gdn::cuda
