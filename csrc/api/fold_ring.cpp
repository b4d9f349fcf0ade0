// SPDX-License-Identifier: Apache-2.0
#include "../../torch-ext/torch_binding.h"
#include "../cuda/ops.h"
#include "ring_inputs.h"
#include "rule_inputs.h"

namespace gdn::api {

void fold_ring(Tensor state, Tensor ring, Tensor slots, Tensor ring_slots, Tensor num_accepted) {
  const Checker check("fold_ring", "state", state);
  check.require_dim("state", state, 4, "[slots, Hv, K, V]");
  check.require_dim("ring", ring, 4, "[rows, Hk, length, stride]");
  FoldParams params{};
  params.Hv = state.size(1);
  params.K = state.size(2);
  params.V = state.size(3);
  params.Hk = ring.size(1);
  check.require(params.Hk >= 1 && params.Hv >= 1 && params.Hv % params.Hk == 0, "ring",
                "[rows, Hk, length, stride] with Hk a divisor of state's heads, " + std::to_string(params.Hv), ring);
  check.require(params.K >= 1 && params.K <= kMaxHeadDim && params.V >= 1 && params.V <= kMaxHeadDim, "state",
                "of head dims 1 to 256", state);
  params.state = state_view(check, "state", state, true, {0, 0, 0, params.Hk, params.Hv, params.K, params.V});
  params.pool = state.size(0);
  params.ring = ring_view(check, ring, false, params.Hk, params.Hv, params.K, params.V);
  params.ring_rows = ring.size(0);
  params.ring_length = ring.size(2);
  params.slots = check.table("slots", slots, -1);
  params.layers = slots.size(0);
  params.batch = slots.size(1);
  params.ring_slots = check.table("ring_slots", ring_slots, params.layers, params.batch);
  params.num_accepted = check.index("num_accepted", num_accepted, params.batch);
  run<FoldParams, cpu::fold_ring, cuda::fold_ring>(check, params);
}

}  // namespace gdn::api
