// SPDX-License-Identifier: Apache-2.0
// Where a block's state comes from, and where it goes: pools, checkpoints, the workspace.
#pragma once

#include "rows.cuh"

namespace gdn::cuda::chunk_sm90 {

// One head's state, from element `element` of a view on.
struct Place {
  View view;
  int64_t element;
  bool is_given;

  // The element at row 0 of K and column `column` of V.
  __device__ __forceinline__ int64_t first(int64_t column) const { return element + column * view.stride[3]; }
};

// S^T [V][kKeyDim] in the workspace.
template <int kKeyDim>
__device__ __forceinline__ View workspace_view(float* gmem) {
  return {gmem, DType::kFloat32, {0, 0, 1, kKeyDim}};
}

// What the first segment of a row starts from: a slot, or zero.
__device__ __forceinline__ Place initial_place(const RuleParams& p, const Task& task) {
  return {p.initial_state, task.start, task.start >= 0};
}

// The start of a row's second segment, in the workspace, from which a later one steps to its own (steps.cuh).
template <int kKeyDim>
__device__ __forceinline__ Place second_start(const RuleParams& p, const Segment& segment, int64_t head) {
  ptx::griddepcontrol_wait();   // for the kernel that made it
  return {workspace_view<kKeyDim>(start_of<kKeyDim>(p, segment.row - segment.idx + 1, head)), 0, true};
}

// Where the state goes at the end: of the last segment to its slot, of the first of several to the start of the second. Those
// between have told what they do to it before they run. kIsWhole: no row is cut.
template <int kKeyDim, bool kIsWhole>
__device__ __forceinline__ Place end_of_segment(const RuleParams& p, const Task& task, const Work& work, bool is_done) {
  const Segment& segment = work.segment;
  if (!kIsWhole && segment.idx + 1 < segment.count) {
    float* const start = start_of<kKeyDim>(p, segment.row + 1, work.head);
    return {workspace_view<kKeyDim>(start), 0, is_done && segment.idx == 0};
  }
  return {p.state, task.end, is_done && task.end >= 0};
}

// Chunks of a segment before its next stop: a checkpoint behind chunk `chunk`, or the end.
__device__ __forceinline__ int next_stop(const RuleParams& p, const Segment& segment, int chunk, int num_chunks) {
  if (!p.checkpoints.given()) return num_chunks;
  const int64_t every = p.checkpoint_every / kChunk, before = segment.idx * (p.segment_tokens / kChunk) + chunk;
  const int64_t stop = chunk + every - before % every;
  return stop < num_chunks ? static_cast<int>(stop) : num_chunks;
}

// Where the state after `chunks` chunks of a segment of `length` tokens is kept.
__device__ __forceinline__ Place checkpoint_after(const RuleParams& p, const Segment& segment, int64_t head, int64_t chunks,
                                                  int64_t length) {
  const int64_t tokens = segment.idx * p.segment_tokens + chunks * kChunk;
  const bool is_due = p.checkpoints.given() && chunks > 0 && chunks * kChunk <= length && tokens % p.checkpoint_every == 0;
  const int64_t row = is_due ? p.checkpoint_row(segment.n, tokens) : -1;
  return {p.checkpoints, row < 0 ? 0 : p.checkpoints.offset(row, head), row >= 0};
}

}  // namespace gdn::cuda::chunk_sm90
