# SPDX-License-Identifier: Apache-2.0
"""The gated RMS norm that follows the rule."""

import torch

from . import reference
from ._dispatch import check_choice, check_inputs, has_kernel, number, register_fakes
from ._ops import ops

register_fakes("rms_norm_gated")


def rms_norm_gated(x, z, weight, eps, *, activation="silu", norm_before_gate=True, group_size=None):
    """RMS norm over the last dim, with a gate after it (Qwen3.5) or before it (Mamba-2).

        norm(u) = u / sqrt(mean(u^2) + eps) * weight          mean over each group of group_size elements
        out = norm(x) * act(z)        norm_before_gate=True
        out = norm(x * act(z))        norm_before_gate=False

    Args:
        x: [..., V] with one to three leading dims, float32, bfloat16 or float16, any strides.
        z: the shape of x, any of those dtypes and any strides; the gate before its activation.
        weight: [V] any of those dtypes.
        eps: float, added to the mean of squares.
        activation: "silu" (or "swish"), or "sigmoid".
        norm_before_gate: which of the two orders above.
        group_size: int that divides V, elements that share one mean; None means V.

    Returns:
        A new tensor of x's shape and dtype.

    Raises:
        ValueError: activation is none of those named, x does not have 2 to 4 dims, or z not as many.
        RuntimeError: a shape, dtype or device is not the one above, group_size does not divide V, or an input requires
            grad under grad mode.
        TypeError: x, z or weight is no tensor, or eps no number.

    Everything is computed in float32 and rounded once, to x's dtype. transformers rounds to x's dtype a second time,
    between the norm and the weight, so 16-bit results differ from it by that rounding.

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467); the gated orders are those of
    Qwen3-Next and of Mamba-2.
    """
    check_choice("rms_norm_gated", "activation", activation, ("silu", "swish", "sigmoid"))
    check_inputs("rms_norm_gated", {"x": x, "z": z, "weight": weight}, {})
    eps = number("rms_norm_gated", "eps", eps)
    if not has_kernel("rms_norm_gated", x):
        return reference.rms_norm_gated(
            x, z, weight, eps, activation=activation, norm_before_gate=norm_before_gate, group_size=group_size
        )
    if not 2 <= x.dim() <= 4:
        raise ValueError(f"rms_norm_gated: x must have 2 to 4 dims, got {list(x.shape)}")
    if z.dim() != x.dim():
        raise ValueError(f"rms_norm_gated: z must be {list(x.shape)} like x, got {list(z.shape)}")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    group_size = x.shape[-1] if group_size is None else group_size
    op_x, op_z, op_out = x, z, out
    if x.dim() < 4:  # the op takes [B, T, H, V]
        missing = (None,) * (4 - x.dim())
        op_x, op_z, op_out = x[missing], z[missing], out[missing]
    ops.rms_norm_gated(op_x, op_z, weight, op_out, eps, activation != "sigmoid", bool(norm_before_gate), group_size)
    return out
