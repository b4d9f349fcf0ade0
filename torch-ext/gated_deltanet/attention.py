# SPDX-License-Identifier: Apache-2.0
"""What the gated attention layers of a hybrid model need around attention itself."""

import torch

from . import reference
from ._dispatch import check_inputs, has_kernel, number, register_fakes
from ._ops import ops

register_fakes("qk_norm_rope", "output_gate")


def qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, *, zero_centered=True):
    """RMS norm of every query and key head, then the rotation of its first R elements, in one launch and one pass.

        y = x / sqrt(mean(x^2) + eps) * (1 + weight)          weight alone with zero_centered=False
        out[i]       = y[i] * cos[i] - y[i + R/2] * sin[i]                           i < R/2
        out[i + R/2] = y[i + R/2] * cos[i + R/2] + y[i] * sin[i + R/2]
        out[i]       = y[i]                                                          i >= R

    Args:
        q: [B, T, Hq, D] float32, bfloat16 or float16, any strides: the query half of a projection that interleaves
            queries and gates is taken as it lies. D at most 256.
        k: [B, T, Hk, D] any of those dtypes, any strides.
        q_weight, k_weight: [D] any of those dtypes.
        cos, sin: [B, T, R], [1, T, R] or [T, R], any of those dtypes, any strides: cosine and sine of the angles, both
            halves of R, as the rotary embeddings of transformers give them. R even, at most D.
        eps: float, added to the mean of squares.
        zero_centered: the factor is 1 + weight (Qwen3-Next, Qwen3.5); False: weight.

    Returns:
        (q, k): two new contiguous tensors of the shapes and dtypes of q and k. What attention takes, [B, H, T, D], is
        their transpose(1, 2).

    Raises:
        RuntimeError: a shape, dtype or device is not the one above, or an input requires grad under grad mode.
        TypeError: an argument is no tensor, or eps no number.

    Everything is computed in float32 and rounded once. transformers rounds to q's dtype between norm and rotation and
    rotates in that dtype, so 16-bit results differ from it by those roundings.

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467); Su et al., "RoFormer" (arXiv
    2104.09864), on the first elements of a head as GPT-NeoX and Qwen3-Next have it.
    """
    tensors = {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
    check_inputs("qk_norm_rope", tensors, {})
    eps = number("qk_norm_rope", "eps", eps)
    if not has_kernel("qk_norm_rope", q):
        return reference.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, zero_centered=zero_centered)
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    cos, sin = _per_row(cos, q), _per_row(sin, q)
    ops.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, q_out, k_out, eps, bool(zero_centered))
    return q_out, k_out


# Angles as the op takes them, [B, T, R]; other shapes go through, the op refuses them.
def _per_row(angles, q):
    if angles.dim() == 2:
        angles = angles[None]
    if angles.dim() == 3 and angles.shape[0] == 1 and q.dim() == 4:
        angles = angles.expand(q.shape[0], -1, -1)
    return angles


def output_gate(x, gate):
    """The gate on what attention gives, before the output projection.

        out = x * sigmoid(gate)

    Args:
        x: one to four dims, float32, bfloat16 or float16, any strides.
        gate: the shape of x, any of those dtypes and any strides: the gate half of a projection that interleaves
            queries and gates is taken as it lies.

    Returns:
        A new contiguous tensor of x's shape and dtype.

    Raises:
        ValueError: x does not have 1 to 4 dims, or gate not as many.
        RuntimeError: a shape, dtype or device is not the one above, or an input requires grad under grad mode.
        TypeError: x or gate is no tensor.

    Computed in float32 and rounded once.

    Source: Qiu et al., "Gated Attention for Large Language Models" (arXiv 2505.06708), as in Qwen3-Next.
    """
    check_inputs("output_gate", {"x": x, "gate": gate}, {})
    if not has_kernel("output_gate", x):
        return reference.output_gate(x, gate)
    if not 1 <= x.dim() <= 4:
        raise ValueError(f"output_gate: x must have 1 to 4 dims, got {list(x.shape)}")
    if gate.dim() != x.dim():
        raise ValueError(f"output_gate: gate must be {list(x.shape)} like x, got {list(gate.shape)}")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    missing = (None,) * (4 - x.dim())  # the op takes [B, T, H, D]
    ops.output_gate(x[missing], gate[missing], out[missing])
    return out
