// SPDX-License-Identifier: Apache-2.0
// copy_slots, zero_slots, cast_state: three questions to one pair of kernels.
#include "../../torch-ext/torch_binding.h"
#include "../cuda/ops.h"
#include "checks.h"

namespace gdn::api {
namespace {

constexpr const char* kPoolDims = "[slots, ...] of two to four dims";

// View of a pool; its sizes past the slots go to params, or have to be those that are there.
View pool_view(const Checker& check, const char* name, const Tensor& pool, bool is_written, bool is_first,
               PoolParams& params) {
  check.require(pool.dim() >= 2 && pool.dim() <= 4, name, kPoolDims, pool);
  for (int64_t i = 1; i < 4 && is_first; ++i) params.sizes[i - 1] = i < pool.dim() ? pool.size(i) : 1;
  bool fits = true;
  for (int64_t i = 1; i < 4; ++i) fits = fits && params.sizes[i - 1] == (i < pool.dim() ? pool.size(i) : 1);
  check.require(fits, name, "of the same shape as src", pool);
  return check.pool(name, pool, is_written);
}

}  // namespace

void copy_slots(Tensor pool, Tensor src, Tensor dst) {
  const Checker check("copy_slots", "pool", pool);
  PoolParams params{};
  params.to = params.from = pool_view(check, "pool", pool, true, true, params);
  params.to_pool = params.from_pool = pool.size(0);
  check.require(src.dim() == 1, "src", "[N]", src);
  params.items = src.size(0);
  params.from_slots = check.index("src", src, params.items);
  params.to_slots = check.index("dst", dst, params.items);
  run<PoolParams, cpu::move_slots, cuda::move_slots>(check, params);
}

void zero_slots(Tensor pool, Tensor slots) {
  const Checker check("zero_slots", "pool", pool);
  PoolParams params{};
  params.to = pool_view(check, "pool", pool, true, true, params);
  params.to_pool = pool.size(0);
  check.require(slots.dim() == 1, "slots", "[N]", slots);
  params.items = slots.size(0);
  params.to_slots = check.index("slots", slots, params.items);
  run<PoolParams, cpu::move_slots, cuda::move_slots>(check, params);
}

void cast_state(Tensor src, Tensor dst) {
  const Checker check("cast_state", "src", src);
  PoolParams params{};
  params.from = pool_view(check, "src", src, false, true, params);
  params.to = pool_view(check, "dst", dst, true, false, params);
  check.require(dst.size(0) == src.size(0), "dst", "of the same shape as src", dst);
  check.require_apart("dst", dst, "src", src);
  params.items = params.from_pool = params.to_pool = src.size(0);
  run<PoolParams, cpu::move_slots, cuda::move_slots>(check, params);
}

}  // namespace gdn::api
