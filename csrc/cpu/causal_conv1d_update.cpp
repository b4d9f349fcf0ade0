// SPDX-License-Identifier: Apache-2.0
// The decode step of the convolution: dense rows of 1..8 tokens after a window that is always there and always moves on.
// The same kernel as the whole convolution, so that token by token equals all at once.
#include "ops.h"

namespace gdn::cpu {

void causal_conv1d_update(const ConvParams& params, ParallelFor parallel_for) {
  ConvParams update = params;
  update.cu_seqlens = {};
  update.seq_idx = {};
  update.has_initial_state = {};
  update.write_state = true;
  causal_conv1d(update, parallel_for);
}

}  // namespace gdn::cpu
