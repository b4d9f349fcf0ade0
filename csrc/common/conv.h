// SPDX-License-Identifier: Apache-2.0
// One channel of the causal convolution, token by token.
//
//     out[t] = act(bias + sum_k weight[k] * x[t - (W-1) + k])        acc = bias, then fma, oldest tap first
#pragma once

#include "rule.h"

namespace gdn {

constexpr int kMinTaps = 2, kMaxTaps = 4;   // of a convolution; a window has at most as many columns as taps

// Both right-aligned: past[j] is the input kMaxTaps - j tokens before the next one.
struct ConvTaps {
  float past[kMaxTaps], weight[kMaxTaps], bias;

  // The sum at the next token x, before the activation. The window moves on.
  GDN_INLINE float push(float x, int width) {
    for (int j = 0; j + 1 < kMaxTaps; ++j) past[j] = past[j + 1];
    past[kMaxTaps - 1] = x;
    float acc = bias;
    for (int j = 0; j < kMaxTaps; ++j) {
      if (j >= kMaxTaps - width) acc = fma(weight[j], past[j], acc);
    }
    return acc;
  }
};

}  // namespace gdn
