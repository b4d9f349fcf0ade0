// SPDX-License-Identifier: Apache-2.0
// What decode_kernel keeps of a verified row: a record a token in the ring, and the state only of a row longer than that.
#pragma once

#include "../../common/ring.h"
#include "config.cuh"

namespace gdn::cuda {
namespace {

struct KeepRecords {
  View ring;                // [rows, Hk, length, stride]
  IndexView ring_slots;
  int64_t ring_rows, ring_length;
  int key_dim, value_dim, group;

  struct Target {
    int ring_row;   // -1: nothing is recorded. One register: the offset is made where it is used
  };
  __device__ __forceinline__ Target target_of(const Work& work, const Span& span) const {
    return {span.length > ring_length ? -1 : static_cast<int>(slot_of_row(ring_slots, work.n, ring_rows))};
  }
  __device__ __forceinline__ bool writes_state(const Span& span) const { return span.length > ring_length; }
  __device__ __forceinline__ bool needs_state_after(const Span& span, int t) const {
    return t + 1 < span.length || writes_state(span);
  }
  __device__ __forceinline__ int member(const Work& work) const { return work.head - work.key_head * group; }

  // The first tile of every value head keeps its alpha, that of the group's first head the key.
  template <class Shape>
  __device__ __forceinline__ void keep_token(const Target& target, const Work& work, int t, const float* smem_token) const {
    const bool keeps_key = member(work) == 0;
    const int thread = static_cast<int>(threadIdx.x);
    if (work.column != 0 || target.ring_row < 0 || (!keeps_key && thread > 0)) return;
    const int64_t at = ring.offset(target.ring_row, work.key_head, t);
    if (thread == 0) {
      const StepScalars& scalars = *reinterpret_cast<const StepScalars*>(smem_token + Shape::kSmemScalars);
      ring.store(at + record_alpha(key_dim, value_dim, group, member(work)), scalars.alpha);
    }
    if (!keeps_key) return;
#pragma unroll
    for (int i = 0; i < Shape::kKeyDim; i += Shape::kThreads) {
      if (i + thread < Shape::kKeyDim) ring.store(at + i + thread, smem_token[i + thread]);
    }
  }
  __device__ __forceinline__ void keep_factor(const Target& target, const Work& work, int t, int column, float f) const {
    if (target.ring_row < 0) return;
    ring.store(ring.offset(target.ring_row, work.key_head, t) + record_factor(key_dim, value_dim, member(work)) + column, f);
  }
};

}  // namespace
}  // namespace gdn::cuda
