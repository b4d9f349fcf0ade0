# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution in front of the rule."""

import torch

from . import _values, reference
from ._dispatch import check_inputs, count_writes, has_kernel, register_fakes, use_silu
from ._ops import ops

register_fakes("causal_conv1d", "causal_conv1d_update", "conv_state_write")


def causal_conv1d(
    x,
    weight,
    bias=None,
    activation=None,
    *,
    conv_state=None,
    slots=None,
    cu_seqlens=None,
    seq_idx=None,
    has_initial_state=None,
    write_state=True,
    out=None,
):
    """Depthwise causal convolution over the tokens, with a carried window, for prefill.

        y[c, t] = act(bias[c] + sum_j weight[c, j] * x[c, t - (W - 1) + j])       x before the first token: the window

    Args:
        x: [B, C, T] with any strides (the transposed view of a [B, T, C] projection is as good as a contiguous
            tensor), or [total, C] together with cu_seqlens. float32, bfloat16 or float16.
        weight: [C, W] any of those dtypes, W in 2..4, oldest tap first.
        bias: [C] any of those dtypes; None means 0.
        activation: None, "silu" or "swish".
        conv_state: [pool, C, W - 1] or [pool, C, W] any of those dtypes and any strides: the inputs before the first
            token, oldest first. Updated in place when write_state is set. None: zeros, and nothing is kept.
        slots: int32 or int64 [N], pool slot of each sequence; outside [0, pool) is padding: zero output, nothing read
            or written. None: sequence n uses slot n, and pool must be N. Live slots of a call are distinct.
        cu_seqlens: int32 or int64 [N + 1], first token of each sequence and the end; N is B without it. Tokens outside
            every sequence get zero.
        seq_idx: int32 [B, T], document of each token: taps of another document count as zero; tokens with a
            negative index are padding and get zero. Goes with neither conv_state nor cu_seqlens.
        has_initial_state: bool [N], False: start from zeros without reading the window. None: all True. Needs
            conv_state.
        write_state: False leaves conv_state as it was, for tokens that may be taken back: see conv_state_write.
        out: tensor of x's shape, of any of those dtypes, to write to, apart from every other argument's memory; None: a
            new one with x's dtype and layout.

    Updated in place:
        conv_state, with the last W - 1 (or W) inputs of each sequence; a sequence shorter than the window keeps the
        newest part of the old one. An empty sequence keeps its window.

    Returns:
        out, of x's shape.

    Raises:
        ValueError: activation is none of those named, or x is 2-D and cu_seqlens is not given or out is not 2-D.
        RuntimeError: a shape, dtype, device or stride is not the one above, or an input requires grad under grad mode.
        TypeError: a tensor argument is no tensor.

    Sums start at the bias and take the oldest tap first, in float32, and are rounded once, to out's dtype. A sequence's
    bits do not depend on how its tokens are split over calls (with a window in x's dtype or wider) or packed.

    Source: the argument names follow causal-conv1d (Dao-AILab); the carried window is that of Mamba's decode.
    """
    silu = use_silu("causal_conv1d", activation)
    check_inputs(
        "causal_conv1d",
        {"x": x, "weight": weight},
        {
            "bias": bias,
            "conv_state": conv_state,
            "slots": slots,
            "cu_seqlens": cu_seqlens,
            "seq_idx": seq_idx,
            "has_initial_state": has_initial_state,
            "out": out,
        },
    )
    if _values.ENABLED:
        _values.check_windows("causal_conv1d", x, conv_state if write_state else None, slots, cu_seqlens)
    if not has_kernel("causal_conv1d", x):
        return reference.causal_conv1d(
            x,
            weight,
            bias,
            activation,
            conv_state=conv_state,
            slots=slots,
            cu_seqlens=cu_seqlens,
            seq_idx=seq_idx,
            has_initial_state=has_initial_state,
            write_state=write_state,
            out=out,
        )
    if out is None:
        out = torch.empty_like(x)
    op_x, op_out = x, out
    if x.dim() == 2:
        if cu_seqlens is None:
            raise ValueError(f"causal_conv1d: x must be [B, C, T], or [total, C] with cu_seqlens, got {list(x.shape)}")
        if out.dim() != 2:
            raise ValueError(f"causal_conv1d: out must be [total, C] like x, got {list(out.shape)}")
        op_x, op_out = x.t().unsqueeze(0), out.t().unsqueeze(0)
    ops.causal_conv1d(
        op_x, weight, bias, conv_state, op_out, silu, bool(write_state), cu_seqlens, seq_idx, slots, has_initial_state
    )
    count_writes(conv_state if write_state else None, out)
    return out


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, *, slots=None, out=None):
    """The causal convolution for decode: one to eight new tokens a row, the window updated in place.

        y[c, t] = act(bias[c] + sum_j weight[c, j] * x[c, t - (W - 1) + j])       x before the first token: the window

    Args:
        x: [B, C, T], T in 0..8, any strides; float32, bfloat16 or float16.
        conv_state: [pool, C, W - 1] or [pool, C, W] any of those dtypes and any strides, the inputs before the first
            token, oldest first. Updated in place.
        weight: [C, W] any of those dtypes, W in 2..4, oldest tap first.
        bias: [C] any of those dtypes; None means 0.
        activation: None, "silu" or "swish".
        slots: int32 or int64 [B], pool slot of each row; outside [0, pool) is padding: zero output, nothing read or
            written. None: row n uses slot n, and pool must be B. Live slots of a call are distinct.
        out: tensor of x's shape, of any of those dtypes, to write to, apart from every other argument's memory; None: a
            new one with x's dtype and layout.

    Updated in place:
        conv_state, with the last W - 1 (or W) inputs of each row.

    Returns:
        out, of x's shape.

    Raises:
        ValueError: activation is none of those named.
        RuntimeError: a shape, dtype, device or stride is not the one above, or an input requires grad under grad mode.
        TypeError: a tensor argument is no tensor.

    The same arithmetic, and so the same bits, as causal_conv1d over the same tokens.

    Source: the argument names follow causal-conv1d (Dao-AILab).
    """
    silu = use_silu("causal_conv1d_update", activation)
    check_inputs(
        "causal_conv1d_update",
        {"x": x, "conv_state": conv_state, "weight": weight},
        {"bias": bias, "slots": slots, "out": out},
    )
    if _values.ENABLED:
        _values.check_windows("causal_conv1d_update", x, conv_state, slots, None)
    if not has_kernel("causal_conv1d_update", x):
        return reference.causal_conv1d_update(x, conv_state, weight, bias, activation, slots=slots, out=out)
    if out is None:
        out = torch.empty_like(x)
    ops.causal_conv1d_update(x, conv_state, weight, bias, out, silu, slots)
    count_writes(conv_state, out)
    return out


def conv_state_write(x, conv_state, *, num_accepted, slots=None, cu_seqlens=None, has_initial_state=None):
    """Moves the windows over the accepted tokens, after a causal_conv1d with write_state=False over all of them.

        window <- last columns of (window, x[0 .. num_accepted])

    Args:
        x: [B, C, T] with any strides, or [total, C] together with cu_seqlens: the input of that causal_conv1d. float32,
            bfloat16 or float16.
        conv_state: [pool, C, W - 1] or [pool, C, W] any of those dtypes and any strides, oldest first. Updated in
            place.
        num_accepted: int32 or int64 [N], leading tokens of each sequence to keep. At most 0 or more than the sequence
            has: its window stays as it is.
        slots: int32 or int64 [N], pool slot of each sequence; outside [0, pool) is padding. None: sequence n uses slot
            n, and pool must be N. Live slots of a call are distinct.
        cu_seqlens: int32 or int64 [N + 1], first token of each sequence and the end; N is B without it.
        has_initial_state: bool [N], False: the old window counts as zeros and is not read. None: all True.

    Updated in place:
        conv_state: what causal_conv1d over the accepted tokens alone would have left. Fewer of them than the window has
        columns keep the newest part of the old one.

    Returns:
        conv_state.

    Raises:
        ValueError: x is 2-D and cu_seqlens is not given.
        RuntimeError: a shape, dtype, device or stride is not the one above, or an input requires grad under grad mode.
        TypeError: a tensor argument is no tensor.

    Source: the deferred window write of Modular MAX's gated_delta.
    """
    required = {"x": x, "conv_state": conv_state, "num_accepted": num_accepted}
    optional = {"slots": slots, "cu_seqlens": cu_seqlens, "has_initial_state": has_initial_state}
    check_inputs("conv_state_write", required, optional)
    if _values.ENABLED:
        _values.check_windows("conv_state_write", x, conv_state, slots, cu_seqlens)
    if not has_kernel("conv_state_write", x):
        return reference.conv_state_write(x, conv_state, num_accepted=num_accepted, **optional)
    op_x = x
    if x.dim() == 2:
        if cu_seqlens is None:
            raise ValueError(
                f"conv_state_write: x must be [B, C, T], or [total, C] with cu_seqlens, got {list(x.shape)}"
            )
        op_x = x.t().unsqueeze(0)
    ops.conv_state_write(op_x, conv_state, num_accepted, slots, cu_seqlens, has_initial_state)
    count_writes(conv_state)
    return conv_state
