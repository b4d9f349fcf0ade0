// SPDX-License-Identifier: Apache-2.0
// What decode_many leaves beside o, a policy each: the state after the row; a record a token; the state after every token.
#pragma once

#include "../../common/ring.h"
#include "state.cuh"

namespace gdn::cuda {
namespace {

// A sequence of a call: its sequence or, ragged, its first token; its tokens; the slot it starts from (-1: zeros) and the
// one that takes its last state (-1: none).
struct Row {
  int origin, length, slot, out_slot;
};

// The slots that row n reads and writes. False: padding, nothing is computed.
__device__ __forceinline__ bool find_slots(const Call& call, int n, int& slot, int& out_slot) {
  const bool reads = call.in.data != nullptr, writes = call.state.data != nullptr;
  slot = static_cast<int>(slot_of_row(call.slots, n, reads ? call.pool_in : call.pool_out));
  out_slot = -1;
  if (call.slots.given() && slot < 0) return false;
  if (writes) out_slot = static_cast<int>(slot_of_row(call.out_slots.given() ? call.out_slots : call.slots, n, call.pool_out));
  if (!reads || !call.has_initial_state.at(n)) slot = -1;
  return true;
}

struct KeepState {
  static constexpr bool kKeepsFactors = false;
  struct Target {};   // where the block's parts of the records go
  static bool starts_at_slots() { return true; }   // call.slots says what a row starts from
  __device__ __forceinline__ bool find_slots(const Call& call, int n, Row& row) const {
    return cuda::find_slots(call, n, row.slot, row.out_slot);
  }
  __device__ __forceinline__ Target target_of(const Work&, const Row&) const { return {}; }
  // Whether anybody reads the state after token t.
  __device__ __forceinline__ bool needs_state_after(const Row&, int /*t*/) const { return true; }
  // Key (fp32 bits) and decay of token t; by the lanes that stage it, lane r with the key's rows 32 j + kOwned r + i.
  template <int kSteps, int kOwned>
  __device__ __forceinline__ void keep_token(const Target&, const Work&, int /*t*/, int /*r*/,
                                             const uint32_t (&/*k*/)[kSteps][kOwned], float /*alpha*/) const {}
  template <class Shape>
  __device__ __forceinline__ void keep_state(const Target&, const Work&, int /*t*/, const Place<Shape>&, int /*columns*/,
                                             const Fragment<Shape>&) const {}
};

// Records of ring.h for rows within the ring; longer ones write their state and record nothing.
struct KeepRecords {
  static constexpr bool kKeepsFactors = true;
  View ring;                // [rows, Hk, length, stride]
  IndexView ring_slots;
  int64_t ring_rows, ring_length;
  int32_t record, item;     // bytes from a record to the next, of an element
  int key_dim, value_dim, group;

  static bool starts_at_slots() { return true; }
  struct Target {
    char* data;   // of the row's and key head's first record; nullptr: nothing is recorded
    int factor;   // bytes from there to the f of the tile's first column
  };
  __device__ __forceinline__ bool find_slots(const Call& call, int n, Row& row) const {
    const bool computes = cuda::find_slots(call, n, row.slot, row.out_slot);
    if (row.length <= ring_length) row.out_slot = -1;
    return computes;
  }
  __device__ __forceinline__ int member(const Work& work) const { return work.head - work.key_head * group; }
  __device__ __forceinline__ Target target_of(const Work& work, const Row& row) const {
    const int64_t ring_row = row.length > ring_length ? -1 : slot_of_row(ring_slots, work.n, ring_rows);
    char* const data = ring_row < 0 ? nullptr : static_cast<char*>(ring.data) + ring.offset(ring_row, work.key_head) * item;
    return {data, static_cast<int>(record_factor(key_dim, value_dim, member(work)) + work.column) * item};
  }
  __device__ __forceinline__ bool needs_state_after(const Row& row, int t) const {
    return t + 1 < row.length || row.out_slot >= 0;
  }
  // The first tile of every value head keeps its alpha, that of the group's first head the key.
  template <int kSteps, int kOwned>
  __device__ __forceinline__ void keep_token(const Target& target, const Work& work, int t, int r,
                                             const uint32_t (&k)[kSteps][kOwned], float alpha) const {
    if (work.column != 0 || target.data == nullptr) return;
    char* const at = target.data + wide(t, record);
    if (r == 0) store_float(at, ring.dtype, record_alpha(key_dim, value_dim, group, member(work)), alpha);
    if (member(work) != 0) return;
    const auto store_as = [&](auto io) {
      using io_t = decltype(io);
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
          reinterpret_cast<io_t*>(at)[kResidues * j + kOwned * r + i] = from_float<io_t>(bits_float(k[j][i]));
        }
      }
    };
    if (ring.dtype == DType::kFloat32) store_as(float{});
    else if (ring.dtype == DType::kBFloat16) store_as(bf16_t{});
    else store_as(fp16_t{});
  }
  // f of token t and a column of the tile.
  __device__ __forceinline__ void keep_factor(const Target& target, int t, int column, float f) const {
    if (target.data != nullptr) store_float(target.data + (wide(t, record) + target.factor), ring.dtype, column, f);
  }
  template <class Shape>
  __device__ __forceinline__ void keep_state(const Target&, const Work&, int, const Place<Shape>&, int,
                                             const Fragment<Shape>&) const {}
};

// The state after each token, in slots that a table names or in a buffer of its own.
struct KeepStates {
  static constexpr bool kKeepsFactors = false;
  StateRows states;             // slot: of the pool, or from a token to the next in the buffer
  int64_t sequence;             // bytes from a sequence's states to the next one's; 0: a pool
  TableView table;              // [N, length] slots; not given: token t of the buffer
  int64_t length, pool;
  IndexView num_accepted;       // [N] the row starts from slot table[n, num_accepted[n] - 1]; not given: from call.slots

  bool starts_at_slots() const { return !num_accepted.given(); }
  struct Target {
    char* data;
    int slot;   // lane t: of token t, -1: not kept
  };
  __device__ __forceinline__ int slot_of(int n, int t) const {
    if (t >= length) return -1;
    return table.given() ? static_cast<int>(slot_or_padding(table.at(n, t), pool)) : t;
  }
  __device__ __forceinline__ bool find_slots(const Call& call, int n, Row& row) const {
    row.out_slot = -1;
    if (num_accepted.given()) {
      const int64_t accepted = num_accepted.at(n);
      const bool is_accepted = accepted >= 1 && accepted <= length;
      row.slot = is_accepted ? static_cast<int>(slot_or_padding(table.at(n, accepted - 1), call.pool_in)) : -1;
    } else {
      row.slot = static_cast<int>(slot_of_row(call.slots, n, call.pool_in));
    }
    return row.slot >= 0;
  }
  __device__ __forceinline__ Target target_of(const Work& work, const Row&) const {
    return {states.data + work.n * sequence, slot_of(work.n, threadIdx.x % 32)};
  }
  __device__ __forceinline__ bool needs_state_after(const Row&, int) const { return true; }
  template <int kSteps, int kOwned>
  __device__ __forceinline__ void keep_token(const Target&, const Work&, int, int, const uint32_t (&)[kSteps][kOwned],
                                             float) const {}
  // Called by all lanes of a warp.
  template <class Shape>
  __device__ __forceinline__ void keep_state(const Target& target, const Work& work, int t, const Place<Shape>& place,
                                             int columns, const Fragment<Shape>& fragment) const {
    const int slot = t < 32 ? __shfl_sync(kAllLanes, target.slot, t) : slot_of(work.n, t);
    if (slot < 0) return;
    StateRows rows = states;
    rows.data = target.data;
    store_share<Shape>(share_address<Shape>(rows, slot, work, place), rows.line, columns, fragment);
  }
};

}  // namespace
}  // namespace gdn::cuda
