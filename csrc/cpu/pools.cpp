// SPDX-License-Identifier: Apache-2.0
// copy_slots, zero_slots and cast_state. A unit of work: one item and one index of the slot's first dim.
#include <cstring>

#include "isa.h"

namespace gdn::cpu {
namespace {

// A row of the last dim, same dtype: bits, so that a NaN keeps its payload.
template <class T>
void copy_bits(const PoolParams& p, int64_t from, int64_t to) {
  const T* source = static_cast<const T*>(p.from.data) + from;
  T* target = static_cast<T*>(p.to.data) + to;
  if (p.from.stride[3] == 1 && p.to.stride[3] == 1) {
    std::memmove(target, source, p.sizes[2] * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < p.sizes[2]; ++i) target[i * p.to.stride[3]] = source[i * p.from.stride[3]];
}

void move_row(const PoolParams& p, int64_t from, int64_t to) {
  if (!p.from.given()) {
    for (int64_t i = 0; i < p.sizes[2]; ++i) p.to.store(to + i * p.to.stride[3], 0.0f);
  } else if (p.from.dtype != p.to.dtype) {
    for (int64_t i = 0; i < p.sizes[2]; ++i) p.to.store(to + i * p.to.stride[3], p.from.load(from + i * p.from.stride[3]));
  } else if (dtype_size(p.to.dtype) == 4) {
    copy_bits<uint32_t>(p, from, to);
  } else {
    copy_bits<uint16_t>(p, from, to);
  }
}

void move_range(const PoolParams& p, int64_t begin, int64_t end) {
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t item = unit / p.sizes[0], i = unit % p.sizes[0];
    const int64_t to = slot_of_row(p.to_slots, item, p.to_pool);
    const int64_t from = p.from.given() ? slot_of_row(p.from_slots, item, p.from_pool) : 0;
    if (to < 0 || from < 0) continue;
    for (int64_t j = 0; j < p.sizes[1]; ++j) move_row(p, p.from.offset(from, i, j), p.to.offset(to, i, j));
  }
}

}  // namespace

void move_slots(const PoolParams& params, ParallelFor parallel_for) {
  constexpr int64_t kGrainElements = 64 * 1024;
  if (params.slot_elements() == 0) return;
  run_units(params, move_range, params.items * params.sizes[0], ceil_div(kGrainElements, params.sizes[1] * params.sizes[2]),
            parallel_for);
}

}  // namespace gdn::cpu
