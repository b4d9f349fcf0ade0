# SPDX-License-Identifier: Apache-2.0
"""A whole gated delta net layer between its projections, one to eight tokens a sequence, in one launch."""

from . import _values, reference
from ._dispatch import check_choice, check_inputs, count_writes, has_kernel, number, register_fakes
from ._ops import ops

LAYOUTS = ("qkv", "interleaved")

register_fakes("gated_delta_step")


def gated_delta_step(
    mixed_qkv,
    z,
    a,
    b,
    conv_state,
    state,
    *,
    conv_weight,
    conv_bias=None,
    A_log,
    dt_bias,
    norm_weight,
    eps,
    num_key_heads,
    layout="qkv",
    activation="silu",
    norm_before_gate=True,
    allow_neg_eigval=False,
    slots=None,
    out=None,
):
    """What a gated delta net layer does between its projections, for decode: one launch, both memories in place.

        q, k, v = split(silu(conv(mixed_qkv)))                  causal_conv1d_update, the window moved on
        g, beta = -exp(A_log) softplus(a + dt_bias), sigmoid(b)
        o       = gated_delta_rule(l2norm(q), l2norm(k), v, g, beta) with scale K ** -0.5, the state moved on
        out     = norm(o) * act(z)      (norm_before_gate), or norm(o * act(z))

    Args:
        mixed_qkv: [B, T, C] float32, bfloat16 or float16, T in 0..8, any strides; the input of the convolution, C =
            2 * Hk * K + Hv * V, as q | k | v. With layout="interleaved" [B, T, C + Hv * V]: Qwen3-Next's in_proj_qkvz,
            for each key head q [K], k [K], its value heads' v [Hv / Hk, V] and their z [Hv / Hk, V].
        z: [B, T, Hv, V] any of those dtypes, any strides; the gate before its activation. None with "interleaved".
        a: [B, T, Hv] any of those dtypes, any strides; decay logit. None with "interleaved".
        b: [B, T, Hv] any of those dtypes, any strides; write strength logit. With "interleaved" [B, T, 2 * Hv]:
            Qwen3-Next's in_proj_ba, for each key head its value heads' b and their a.
        conv_state: [slots, C, W - 1] or [slots, C, W] any of those dtypes and any strides; the convolution's inputs
            before the first token, oldest first, channels q | k | v in either layout. Updated in place.
        state: [slots, Hv, K, V] any of those dtypes; K or V contiguous, so that a V-first pool is passed transposed.
            Updated in place. K and V are at most 256.
        conv_weight: [C, W] any of those dtypes, W in 2..4, oldest tap first, channels q | k | v.
        conv_bias: [C] any of those dtypes; None means 0.
        A_log: [Hv] any of those dtypes, natural log of the decay rate.
        dt_bias: [Hv] any of those dtypes.
        norm_weight: [V] any of those dtypes.
        eps: float, added to the norm's mean of squares.
        num_key_heads: int, Hk; divides Hv. Value head h reads key head h // (Hv // Hk).
        layout: "qkv" (Qwen3.5 and others), or "interleaved" (Qwen3-Next).
        activation: of the gate, "silu" (or "swish"), or "sigmoid".
        norm_before_gate: True: Qwen's order; False: the gate first, as in LOGOS and Mamba-2.
        allow_neg_eigval: doubles beta, exactly.
        slots: int32 or int64 [B], any stride: row n uses slot slots[n] of both pools. A slot that either of them does
            not have is padding: zero output, nothing read or written. Live slots of a call are distinct. None: row n
            uses slot n, and both pools must have B slots.
        out: [B, T, Hv, V] of any of those dtypes to write to, apart from every other argument's memory; None: a new
            contiguous tensor of mixed_qkv's dtype. The input of the output projection.

    Updated in place:
        conv_state and state.

    Returns:
        out, [B, T, Hv, V].

    Raises:
        ValueError: layout or activation is none of those named.
        TypeError: a tensor argument is no tensor, eps no number, or num_key_heads no int.
        RuntimeError: a shape, dtype, device or stride is not the one above, or an input requires grad under grad mode.
            Raised before anything is written.

    Rounded: the convolution's output to mixed_qkv's dtype, as causal_conv1d_update has it; both memories once a call;
    the output once. Gates and o stay float32. So window and state have the bits of causal_conv1d_update,
    gated_delta_gates and gated_delta_rule(mode="recurrent"), and the output those of rms_norm_gated on a float32 o.
    No scratch memory; one kernel launch on CUDA.

    Source: the chain is that of Qwen3-Next and Qwen3.5 in transformers; serving engines fuse parts of it.
    """
    op = "gated_delta_step"
    check_choice(op, "layout", layout, LAYOUTS)
    check_choice(op, "activation", activation, ("silu", "swish", "sigmoid"))
    check_inputs(
        op,
        {
            "mixed_qkv": mixed_qkv,
            "b": b,
            "conv_state": conv_state,
            "state": state,
            "conv_weight": conv_weight,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "norm_weight": norm_weight,
        },
        {"z": z, "a": a, "conv_bias": conv_bias, "slots": slots, "out": out},
    )
    eps = number(op, "eps", eps)
    if isinstance(num_key_heads, bool) or not isinstance(num_key_heads, int):
        raise TypeError(f"{op}: num_key_heads must be an int, got {type(num_key_heads).__name__}")
    if _values.ENABLED:
        _values.check_step(mixed_qkv, conv_state, state, slots)
    if not has_kernel(op, mixed_qkv):
        return reference.gated_delta_step(
            mixed_qkv,
            z,
            a,
            b,
            conv_state,
            state,
            conv_weight=conv_weight,
            conv_bias=conv_bias,
            A_log=A_log,
            dt_bias=dt_bias,
            norm_weight=norm_weight,
            eps=eps,
            num_key_heads=num_key_heads,
            layout=layout,
            activation=activation,
            norm_before_gate=norm_before_gate,
            allow_neg_eigval=allow_neg_eigval,
            slots=slots,
            out=out,
        )
    fits = mixed_qkv.dim() == 3 and state.dim() == 4  # the op refuses others itself, before it looks at out
    if out is None:
        shape = (*mixed_qkv.shape[:2], state.shape[1], state.shape[3]) if fits else (0,)
        out = mixed_qkv.new_empty(shape)
    ops.gated_delta_step(
        mixed_qkv,
        z,
        a,
        b,
        conv_state,
        state,
        conv_weight,
        conv_bias,
        A_log,
        dt_bias,
        norm_weight,
        out,
        eps,
        state.shape[2] ** -0.5 if fits and state.shape[2] > 0 else 1.0,
        num_key_heads,
        layout == "interleaved",
        activation != "sigmoid",
        bool(norm_before_gate),
        bool(allow_neg_eigval),
        slots,
    )
    count_writes(conv_state, state, out)
    return out
