# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule, and the state it carries."""

import torch

from . import _values, reference
from ._dispatch import (
    check_choice,
    check_inputs,
    count_writes,
    default_device,
    has_kernel,
    register_fakes,
    rule_scale,
)
from ._ops import ops

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = {"recurrent": 0, "chunk": 1, "auto": 2}  # the numbers of the op, as those below
GATE_DOMAINS = {"log": 0, "linear": 1, "raw": 2}


register_fakes("gated_delta_rule")


def new_state(batch, heads, key_dim, value_dim, *, dtype=torch.float32, device=None):
    """A state that remembers nothing: zeros of shape [batch, heads, key_dim, value_dim].

    Args:
        batch: int, number of sequences, or of slots of a pool.
        heads: int, number of value heads Hv.
        key_dim: int, K.
        value_dim: int, V.
        dtype: float32 (default), bfloat16 or float16. Arithmetic on the state is float32 whatever it is stored in.
        device: torch device; None: the current CUDA device where this build and this machine have one, else the CPU.

    Returns:
        A contiguous tensor of zeros, batch * heads * key_dim * value_dim * dtype.itemsize bytes.

    Raises:
        ValueError: dtype is none of those named.

    Source: the name is that of phanerozoic/gated-deltanet.
    """
    check_choice("new_state", "dtype", dtype, STATE_DTYPES)
    device = default_device() if device is None else device
    return torch.zeros(batch, heads, key_dim, value_dim, dtype=dtype, device=device)


def gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    state,
    *,
    scale=None,
    use_qk_l2norm=False,
    cu_seqlens=None,
    slots=None,
    out_slots=None,
    has_initial_state=None,
    mode="auto",
    precision="fp16",
    scan="auto",
    gate_domain="log",
    A_log=None,
    dt_bias=None,
    allow_neg_eigval=False,
    checkpoint_every=None,
    checkpoints=None,
    checkpoint_starts=None,
    out=None,
):
    """The gated delta rule over T tokens, the state updated in place. One entry for prefill and decode.

        S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q

    Args:
        q: [B, T, Hk, K] float32, bfloat16 or float16, any strides (views of one packed projection are fine).
        k: [B, T, Hk, K] dtype of q, any strides.
        v: [B, T, Hv, V] dtype of q, any strides. Hv is a multiple of Hk; value head h reads key head h // (Hv // Hk).
            K and V are at most 256.
        g: [B, T, Hv] float32, or a 16-bit float that is widened; natural-log decay, <= 0, or what gate_domain says.
            None: no decay.
        beta: [B, T, Hv] any of those dtypes, write strength after its sigmoid, in (0, 1) or (0, 2), or what gate_domain
            says. None: ones.
        state: [N, Hv, K, V], or a pool [slots, Hv, K, V], float32, bfloat16 or float16; K or V contiguous, so that a
            V-first pool [slots, Hv, V, K] is passed as pool.transpose(-1, -2). Any stride between slots. Updated in
            place; the states of slots that are not named stay as they are.
        scale: float that multiplies the output; None: K ** -0.5.
        use_qk_l2norm: x * rsqrt(sum(x^2) + 1e-6) on q and k first; a sum that overflows float32 gives a zero vector.
        cu_seqlens: int32 or int64 [N + 1], first token of each sequence and the end; B is then 1. Empty sequences are
            fine. Tokens outside every sequence get zero. None: N = B sequences of T tokens.
        slots: int32 or int64 [N], any stride: sequence n reads and writes slot slots[n]. A slot outside [0, pool) is
            padding: its output is zero and nothing is read or written, so -1 marks an unused row of a captured
            graph. Slot 0 is a slot like any other: where block 0 means "none", map it to -1. Live slots of a call are
            distinct. None: sequence n uses slot n, and the pool must have N slots.
        out_slots: int32 or int64 [N], slots to write to instead; outside the pool: nothing is written. None: slots. No
            sequence may write a slot that another one reads.
        has_initial_state: bool [N], False: start from zero without reading the slot. None: all True.
        mode: "recurrent" is the exact form, token by token. "chunk" takes 64 tokens at a time on the tensor cores where
            there is a kernel for it: 16-bit q, k, v, K 64 or 128, V a multiple of 16, and rows of q, k, v and a 16-bit
            out that start at multiples of 16 bytes (head dim contiguous). Compute capability 9.0 has a kernel of its
            own for V a multiple of 64. Any other call, and every call on the CPU, is the recurrence's, and as exact.
            The kernels allocate, for the time of the call, 33 KB a key head (K = 128) and 10.5 KB a value head for
            every 64 tokens, rounded up for each sequence (16 KB a token at 16 and 48 heads), with precision "high" 34
            KB a value head; besides, on compute capability 9.0, 4 bytes and, where more than 31 sequences are packed, 4
            bytes for each, or, where rows are long, 4 bytes a key head for every 64 tokens. The same under "auto".
            "auto" chooses for each sequence by its own length, on the device: "chunk" for sequences of 32 tokens or
            more (256 with precision "high"), "recurrent" for shorter ones. So a row's bits do not depend on its batch
            in any mode, but for scan="auto".
        precision: of "chunk": "fp16", what the tensor cores multiply is rounded to float16, scaled so that no magnitude
            of v or of the state overflows. "high", it is split into two float16 numbers instead, of any magnitude of k
            too: about float32's digits, at a sixth of the speed of compute capability 9.0's kernel.
        scan: of "chunk" at precision "fp16" on compute capability 9.0: whether a long sequence may be split over the
            device. "off": never. "auto": it is where sequences x value heads x V / 64 are few, at most half of the
            device's multiprocessors, and a model of the kernels' costs says that it pays: on an H200, K = V = 128, one
            sequence of 2 key and 8 value heads from about 1,500 tokens on, of 4 and 16 from 3,000, of 8 and 24 from
            8,000 (with cu_seqlens, whose sequences count as equally long: 1,500, 6,000, never). What a segment does to
            the state that comes to it is made as a [K, K] matrix, and the states at the start of all segments from
            those matrices, by products of 22-bit precision (two float16 each, scaled by powers of two) with float32
            sums; nothing is left out. Repeated calls are promised the same bits, and no more: the number of segments
            depends on the device and the batch. Allocates (K + V + 1) K 4 bytes a value head and segment beside the
            above (about 13 MB at most on an H200 where K = V = 128).
        gate_domain: "log"; "linear" where g holds the decay exp(g) itself, in [0, 1]; "raw" where g and beta hold a and
            b of gated_delta_gates, any values, and the kernels make the gates of them, bit for bit those of that op. A
            CUDA call with rows that the recurrence takes, of 8 tokens or fewer on average, makes them first, if beta
            and dt_bias are given: 8 bytes a token and value head are allocated for the time of the call. (Otherwise
            such a call is slower.)
        A_log: [Hv] float32, bfloat16 or float16, required with "raw" and only there: the log decay is -exp(A_log)
            softplus(a + dt_bias).
        dt_bias: [Hv] float32, bfloat16 or float16, only with "raw". None: zeros.
        allow_neg_eigval: only with "raw": beta is 2 sigmoid(b) instead of sigmoid(b); without beta it stays 1.
        checkpoint_every: int, a multiple of 64: keep the state after every so many tokens of each sequence, counted
            from the start of this call, the last token included. None: keep none.
        checkpoints: [total, Hv, K, V] float32, bfloat16 or float16, K or V contiguous; takes those states, each rounded
            once from the float32 accumulator. Required with checkpoint_every. Padding rows write none.
        checkpoint_starts: int32 or int64 [N], row of `checkpoints` for the first checkpoint of each sequence, which has
            length // checkpoint_every of them; one outside [0, total) is dropped. None: sequence n of a dense call
            starts at row n * (T // checkpoint_every); required with cu_seqlens.
        out: [B, T, Hv, V] of any of those dtypes to write to, apart from every other argument's memory; None: a new
            contiguous tensor of q's dtype.

    Updated in place:
        state, and checkpoints. An empty sequence leaves its slot unchanged (zero with has_initial_state False).

    Returns:
        out, [B, T, Hv, V].

    Raises:
        ValueError: mode, precision, scan or gate_domain is none of those named, checkpoint_every is no multiple of 64,
            or one of checkpoint_every and checkpoints is given without the other.
        TypeError: a tensor argument is no tensor, or scale no number.
        RuntimeError: a shape, dtype, device or stride is not the one above, Hv is no multiple of Hk, an argument of raw
            gates is missing or comes without them, or an input requires grad under grad mode. Raised before anything is
            written. Bad values inside CUDA index tensors cannot raise without waiting for the device; they are memory-
            safe.

    In the recurrence all arithmetic on the state is float32 in a fixed order: T tokens at once give the same bits as
    any split of them (with a float32 state), and a row's bits do not depend on the rest of the batch. Rounded: the
    output, once, and the state, once per call and slot, to their dtypes. float32 output and state lie within 5.5e-7
    relative RMS of transformers' torch_recurrent_gated_delta_rule. Outside the contraction region (no l2norm and beta
    |k|^2 > 2) the rule itself diverges, and so does the result.

    The chunk kernels keep the state and all sums in float32 too, but multiply float16 operands: relative RMS error
    2.0e-3 of a bfloat16 output (1.66e-3 is its rounding), 8e-4 of a float16 or float32 one, 1e-3 of a float32 state,
    with beta at most 1. Where keys are strongly correlated 2.2e-3 and 1.3e-3 of an output (2.3e-3 and 1.5e-3 where
    queries point the same way, too), and 1.2e-3 of the state where they decay by about 1 % a token. The state loses
    digits where the last tokens of a 64-token piece decay it and have beta near 0: behind 32 such tokens with g = -0.3
    its error is 4e-3 instead of 4e-4, with g = -0.5 (a tiny state then) 0.5. Outside the contraction region the result
    may be wrong, finite, without a sign of it, also where decays keep the rule itself in bounds. In both cases
    mode="recurrent" is right, and so is precision="high", whose error is everywhere at most 2e-5 of the output before
    its rounding and of the state, 3e-7 as a rule. With scan="off" the bits are those of any split at a multiple of 64
    tokens, and a checkpoint's those of the state of a call that ends there. A NaN in a token reaches the whole of its
    64-token piece, of the heads that use it, and what follows.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464).
    """
    check_choice("gated_delta_rule", "mode", mode, tuple(MODES))
    check_choice("gated_delta_rule", "precision", precision, ("fp16", "high"))
    check_choice("gated_delta_rule", "scan", scan, ("off", "auto"))
    check_choice("gated_delta_rule", "gate_domain", gate_domain, tuple(GATE_DOMAINS))
    check_inputs(
        "gated_delta_rule",
        {"q": q, "k": k, "v": v, "state": state},
        {
            "g": g,
            "beta": beta,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "cu_seqlens": cu_seqlens,
            "slots": slots,
            "out_slots": out_slots,
            "has_initial_state": has_initial_state,
            "checkpoints": checkpoints,
            "checkpoint_starts": checkpoint_starts,
            "out": out,
        },
    )
    _check_checkpoints(checkpoint_every, checkpoints)
    scale = rule_scale("gated_delta_rule", scale, q)
    if _values.ENABLED:
        _values.check_rule(
            q, state, g, cu_seqlens, slots, out_slots, checkpoints, checkpoint_every, checkpoint_starts, gate_domain
        )
    if not has_kernel("gated_delta_rule", q):
        gates = {"gate_domain": gate_domain, "A_log": A_log, "dt_bias": dt_bias, "allow_neg_eigval": allow_neg_eigval}
        return reference.gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            state,
            scale=scale,
            use_qk_l2norm=use_qk_l2norm,
            cu_seqlens=cu_seqlens,
            slots=slots,
            out_slots=out_slots,
            has_initial_state=has_initial_state,
            **gates,
            checkpoint_every=checkpoint_every,
            checkpoints=checkpoints,
            checkpoint_starts=checkpoint_starts,
            out=out,
        )
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)  # the op refuses a v of another dtype than q's
    ops.gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        None,
        state,
        True,
        out,
        scale,
        bool(use_qk_l2norm),
        GATE_DOMAINS[gate_domain],
        A_log,
        dt_bias,
        gate_domain == "raw",
        bool(allow_neg_eigval),
        MODES[mode],
        precision == "high",
        scan == "auto",
        cu_seqlens,
        slots,
        out_slots,
        has_initial_state,
        checkpoints,
        checkpoint_every or 0,
        checkpoint_starts,
    )
    count_writes(state, checkpoints, out)
    return out


def _check_checkpoints(every, checkpoints):
    if every is None and checkpoints is None:
        return
    if every is None or checkpoints is None:
        raise ValueError("gated_delta_rule: checkpoint_every and checkpoints go together, one of them is None")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1 or every % 64 != 0:
        raise ValueError(f"gated_delta_rule: checkpoint_every must be a multiple of 64, got {every!r}")


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g=None,
    gk=None,
    gv=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
):
    """The gated delta rule under flash-linear-attention's name for prefill, functional.

        S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q

    Args:
        q: [B, T, Hk, K] float32, bfloat16 or float16, any strides.
        k: [B, T, Hk, K] dtype of q, any strides.
        v: [B, T, Hv, V] dtype of q, any strides. Hv is a multiple of Hk; value head h reads key head h // (Hv // Hk).
        g: [B, T, Hv] float32 (or 16-bit, widened), natural-log decay, <= 0. None: no decay.
        gk: not supported, must be None: a decay for each key element is another rule.
        gv: not supported, must be None.
        beta: [B, T, Hv] any float dtype, write strength after its sigmoid. None: ones.
        scale: float that multiplies the output; None: K ** -0.5.
        initial_state: [N, Hv, K, V] float32, bfloat16 or float16, only read. None: zeros.
        output_final_state: whether the final state is returned.
        use_qk_l2norm_in_kernel: x * rsqrt(sum(x^2) + 1e-6) on q and k first.
        use_gate_in_kernel: g is a, the decay is made of it: -exp(A_log) softplus(a + dt_bias) takes the place of g.
        A_log: [Hv] float32, bfloat16 or float16, required with use_gate_in_kernel and only there.
        dt_bias: [Hv] float32, bfloat16 or float16, only with use_gate_in_kernel. None: zeros.
        use_beta_sigmoid_in_kernel: beta is b, its sigmoid is taken first.
        allow_neg_eigval: only with use_beta_sigmoid_in_kernel: 2 sigmoid(b).
        state_v_first: both states are [N, Hv, V, K].
        cu_seqlens: int32 or int64 [N + 1], first token of each sequence and the end; B is then 1. Tokens outside every
            sequence get zero. None: N = B.

    Returns:
        (o, final_state): o [B, T, Hv, V] of q's dtype; final_state [N, Hv, K, V] (or V-first) of initial_state's dtype,
        float32 without one, or None unless output_final_state. Both are new tensors; no input is written.

    Raises:
        ValueError: gk or gv is given, or q or v does not have four dims.
        TypeError: a tensor argument is no tensor, scale no number, or a keyword is unknown.
        RuntimeError: as gated_delta_rule; also when an input requires grad under grad mode.

    Exactness, and what a call allocates beside its results, are those of gated_delta_rule with mode="auto" and
    scan="auto": below 32 tokens a sequence, the recurrence.

    Source: as gated_delta_rule; names and keywords are those of flash-linear-attention.
    """
    return _functional(
        "chunk_gated_delta_rule",
        q,
        k,
        v,
        g,
        gk,
        gv,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        A_log,
        dt_bias,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        cu_seqlens,
    )


def fused_recurrent_gated_delta_rule(
    q,
    k,
    v,
    g=None,
    gk=None,
    gv=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
):
    """The gated delta rule under flash-linear-attention's name for decode, functional and exact.

        S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q

    Args:
        q: [B, T, Hk, K] float32, bfloat16 or float16, any strides.
        k: [B, T, Hk, K] dtype of q, any strides.
        v: [B, T, Hv, V] dtype of q, any strides. Hv is a multiple of Hk; value head h reads key head h // (Hv // Hk).
        g: [B, T, Hv] float32 (or 16-bit, widened), natural-log decay, <= 0. None: no decay.
        gk: not supported, must be None: a decay for each key element is another rule.
        gv: not supported, must be None.
        beta: [B, T, Hv] any float dtype, write strength after its sigmoid. None: ones.
        scale: float that multiplies the output; None: K ** -0.5.
        initial_state: [N, Hv, K, V] float32, bfloat16 or float16, only read. None: zeros.
        output_final_state: whether the final state is returned.
        use_qk_l2norm_in_kernel: x * rsqrt(sum(x^2) + 1e-6) on q and k first.
        use_gate_in_kernel: g is a, the decay is made of it: -exp(A_log) softplus(a + dt_bias) takes the place of g.
        A_log: [Hv] float32, bfloat16 or float16, required with use_gate_in_kernel and only there.
        dt_bias: [Hv] float32, bfloat16 or float16, only with use_gate_in_kernel. None: zeros.
        use_beta_sigmoid_in_kernel: beta is b, its sigmoid is taken first.
        allow_neg_eigval: only with use_beta_sigmoid_in_kernel: 2 sigmoid(b).
        state_v_first: both states are [N, Hv, V, K].
        cu_seqlens: int32 or int64 [N + 1], first token of each sequence and the end; B is then 1. Tokens outside every
            sequence get zero. None: N = B.

    Returns:
        (o, final_state): o [B, T, Hv, V] of q's dtype; final_state [N, Hv, K, V] (or V-first) of initial_state's dtype,
        float32 without one, or None unless output_final_state. Both are new tensors; no input is written.

    Raises:
        ValueError: gk or gv is given, or q or v does not have four dims.
        TypeError: a tensor argument is no tensor, scale no number, or a keyword is unknown.
        RuntimeError: as gated_delta_rule; also when an input requires grad under grad mode.

    Exactness, and what a call allocates beside its results, are those of gated_delta_rule with mode="recurrent".

    Source: as gated_delta_rule; names and keywords are those of flash-linear-attention.
    """
    return _functional(
        "fused_recurrent_gated_delta_rule",
        q,
        k,
        v,
        g,
        gk,
        gv,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        A_log,
        dt_bias,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        cu_seqlens,
    )


def _functional(
    op,
    q,
    k,
    v,
    g,
    gk,
    gv,
    beta,
    scale,
    initial_state,
    output_final_state,
    use_qk_l2norm_in_kernel,
    use_gate_in_kernel,
    A_log,
    dt_bias,
    use_beta_sigmoid_in_kernel,
    allow_neg_eigval,
    state_v_first,
    cu_seqlens,
):
    for name, gate in (("gk", gk), ("gv", gv)):
        if gate is not None:
            raise ValueError(f"{op}: {name} is not supported, the decay of this rule is one number g per head")
    check_inputs(
        op,
        {"q": q, "k": k, "v": v},
        {
            "g": g,
            "beta": beta,
            "A_log": A_log,
            "dt_bias": dt_bias,
            "initial_state": initial_state,
            "cu_seqlens": cu_seqlens,
        },
    )
    scale = rule_scale(op, scale, q)
    if not has_kernel(op, q):
        return getattr(reference, op)(
            q,
            k,
            v,
            g=g,
            beta=beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
        )
    for name, tensor, dims in (("q", q, "[B, T, Hk, K]"), ("v", v, "[B, T, Hv, V]")):
        if tensor.dim() != 4:
            raise ValueError(f"{op}: {name} must be {dims}, got {list(tensor.shape)}")
    read = initial_state
    final_state = written = None
    if output_final_state:
        sequences = q.shape[0] if cu_seqlens is None else max(cu_seqlens.numel() - 1, 0)
        heads, key_dim, value_dim = v.shape[2], q.shape[3], v.shape[3]
        dims = (value_dim, key_dim) if state_v_first else (key_dim, value_dim)
        has_dtype = initial_state is not None and initial_state.dtype in STATE_DTYPES  # the op says what it refuses
        dtype = initial_state.dtype if has_dtype else torch.float32
        final_state = written = torch.empty(sequences, heads, *dims, dtype=dtype, device=q.device)
    if state_v_first:
        read = None if read is None else read.transpose(-1, -2)
        written = None if written is None else written.transpose(-1, -2)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    ops.gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        read,
        written,
        False,
        out,
        scale,
        bool(use_qk_l2norm_in_kernel),
        GATE_DOMAINS["raw" if use_gate_in_kernel else "log"],
        A_log,
        dt_bias,
        bool(use_beta_sigmoid_in_kernel),
        bool(allow_neg_eigval),
        MODES["auto" if op == "chunk_gated_delta_rule" else "recurrent"],
        False,
        True,
        cu_seqlens,
        None,
        None,
        None,
        None,
        0,
        None,
    )
    return out, final_state
