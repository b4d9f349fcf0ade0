# SPDX-License-Identifier: Apache-2.0
"""From a layer's projections to the two gates of the rule."""

import torch

from . import reference
from ._dispatch import check_inputs, has_kernel, register_fakes
from ._ops import ops

register_fakes("gated_delta_gates")


def gated_delta_gates(a, b, A_log, dt_bias, *, allow_neg_eigval=False):
    """Both gates of the gated delta rule in one launch, kept in float32.

        g = -exp(A_log) * softplus(a + dt_bias)          beta = sigmoid(b), or 2 sigmoid(b)

    Args:
        a: [B, T, Hv] float32, bfloat16 or float16, any strides; decay logit of the layer's projection.
        b: [B, T, Hv] float32, bfloat16 or float16, any strides; write strength logit.
        A_log: [Hv] any float dtype, natural log of the decay rate; widened before exp. -inf means no decay.
        dt_bias: [Hv] any float dtype, added to `a`.
        allow_neg_eigval: doubles beta, exactly, so that 1 - beta may become negative.

    Returns:
        (g, beta): two new contiguous [B, T, Hv] float32 tensors; g the natural-log decay, <= 0, and beta in (0, 1), or
        in (0, 2) with allow_neg_eigval. A 16-bit beta is never formed.

    Raises:
        RuntimeError: a shape, dtype or device is not the one above, or an input requires grad under grad mode.
        TypeError: an argument is no tensor.

    Everything is computed in float32: softplus is linear above 20 as in torch, and both factors of g are cut to the
    largest finite number, so that a head whose rate overflows and whose gate is closed (inf * 0) decays by nothing
    instead of turning into NaN. A NaN stays in its own row and head.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464); the doubled beta is from Grazzi et al.,
    "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues" (arXiv 2411.12537).
    """
    check_inputs("gated_delta_gates", {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}, {})
    if not has_kernel("gated_delta_gates", a):
        return reference.gated_delta_gates(a, b, A_log, dt_bias, allow_neg_eigval=allow_neg_eigval)
    g = torch.empty_like(a, dtype=torch.float32, memory_format=torch.contiguous_format)
    beta = torch.empty_like(g)
    ops.gated_delta_gates(a, b, A_log, dt_bias, g, beta, bool(allow_neg_eigval))
    return g, beta
