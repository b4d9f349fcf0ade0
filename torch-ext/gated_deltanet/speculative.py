# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: run tokens without committing them, then fold the accepted ones into the states."""

import torch

from . import _values, reference
from ._dispatch import check_choice, check_inputs, count_writes, default_device, has_kernel, register_fakes, rule_scale
from ._ops import ops

RING_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RECORD_ALIGNMENT = 32  # elements, so that records start on lines of memory

register_fakes("gated_delta_verify", "fold_ring")


def ring_record_elements(key_dim, value_dim, group):
    """Elements of one record of a verify ring: K + group * (V + 1).

    Args:
        key_dim: int, K.
        value_dim: int, V.
        group: int, value heads of a key head, Hv // Hk.

    Returns:
        int: the raw key, then for each value head its factor [V], then the decay of each value head.

    Source: the ring of Modular MAX's gated_delta.
    """
    return key_dim + group * (value_dim + 1)


def new_ring(
    rows, num_key_heads, length, key_dim, value_dim, group, *, dtype=torch.float32, record_stride=None, device=None
):
    """A ring for gated_delta_verify: [rows, num_key_heads, length, record_stride], zeros.

    Args:
        rows: int, ring rows: one for each sequence and layer that is verified at a time.
        num_key_heads: int, Hk.
        length: int, records of a row: the most tokens that a verified row may have, 1 to 64.
        key_dim: int, K.
        value_dim: int, V.
        group: int, value heads of a key head, Hv // Hk.
        dtype: float32 (the fold is exact), bfloat16 or float16 (records are rounded).
        record_stride: int, elements from a record to the next; what lies past the record is never written. None: the
            record rounded up to a multiple of 32.
        device: torch device; None: the current CUDA device where there is one, else the CPU.

    Returns:
        A contiguous tensor of zeros.

    Raises:
        ValueError: dtype is none of those named, length is not in 1..64, or record_stride is less than a record.

    Source: the ring of Modular MAX's gated_delta.
    """
    check_choice("new_ring", "dtype", dtype, RING_DTYPES)
    record = ring_record_elements(key_dim, value_dim, group)
    if record_stride is None:
        record_stride = -(-record // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
    if record_stride < record:
        raise ValueError(f"new_ring: record_stride must be at least a record, {record}, got {record_stride}")
    if not 1 <= length <= 64:
        raise ValueError(f"new_ring: length must be 1 to 64, got {length}")
    device = default_device() if device is None else device
    return torch.zeros(rows, num_key_heads, length, record_stride, dtype=dtype, device=device)


def gated_delta_verify(
    q,
    k,
    v,
    g,
    beta,
    state,
    ring=None,
    *,
    slots=None,
    ring_slots=None,
    cu_seqlens=None,
    state_table=None,
    num_accepted=None,
    states_out=None,
    scale=None,
    use_qk_l2norm=False,
    gate_domain="log",
    out=None,
):
    """The gated delta rule over tokens that may be taken back: the outputs now, the states as one of three contracts.

        S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q

    With `ring`, the state is read and not written: each token leaves one small record, and fold_ring later applies the
    records of the accepted tokens. A sequence longer than the ring commits its own state and records nothing, so that
    prefill rows share the call with drafts. With `state_table`, the state after each token goes to a slot of its own;
    with `states_out`, to a buffer. Exactly one of the three is given.

    Args:
        q: [B, T, Hk, K] float32, bfloat16 or float16, any strides.
        k: [B, T, Hk, K] dtype of q, any strides.
        v: [B, T, Hv, V] dtype of q, any strides. Hv is a multiple of Hk; value head h reads key head h // (Hv // Hk).
        g: [B, T, Hv] float32 (or 16-bit, widened), natural-log decay, <= 0. None: no decay.
        beta: [B, T, Hv] any float dtype, write strength after its sigmoid. None: ones.
        state: [pool, Hv, K, V] float32, bfloat16 or float16, K or V contiguous: the states that sequences start from.
        ring: [rows, Hk, length, stride] of new_ring, float32, bfloat16 or float16; last dim contiguous and at least
            ring_record_elements(K, V, Hv // Hk). None: one of the other two contracts.
        slots: int32 or int64 [N], slot that each sequence starts from; outside [0, pool) is padding: zero output,
            nothing read or written, its ring slot not followed. Rows within the ring may share a slot (branches of one
            prefix). None: num_accepted says it, or sequence n starts from slot n and the pool has N slots.
        ring_slots: int32 or int64 [N], ring row of each sequence, distinct; outside the ring: nothing is recorded.
            None: sequence n uses ring row n, and the ring has N rows.
        cu_seqlens: int32 or int64 [N + 1], first token of each sequence and the end; B is then 1. Tokens outside every
            sequence get zero. None: N = B.
        state_table: int32 or int64 [N, columns], slot that takes the state after token t of sequence n: [n, t]. A slot
            outside the pool, or a token past the columns: that state is not kept. Live entries are distinct.
        num_accepted: int32 or int64 [N], with state_table: sequence n starts from the slot in column num_accepted[n] -
            1 of its row, which the previous call wrote. Outside [1, columns]: padding.
        states_out: [N, columns, Hv, K, V] any state dtype, K or V contiguous: takes the state after token t at [n, t].
            Rows of padding and tokens that are not there stay as they are.
        scale: float that multiplies the output; None: K ** -0.5.
        use_qk_l2norm: x * rsqrt(sum(x^2) + 1e-6) on q and k first.
        gate_domain: "log", or "linear" where g holds the decay exp(g) itself.
        out: [B, T, Hv, V] float32, bfloat16 or float16 to write to, apart from every other argument's memory; None: a
            new contiguous tensor of q's dtype.

    Updated in place:
        ring and, for sequences longer than it, state; or state at the slots of state_table; or states_out. A sequence
        that begins has to start from a zero slot: see zero_slots.

    Returns:
        out, [B, T, Hv, V].

    Raises:
        ValueError: gate_domain is none of those named.
        TypeError: a tensor argument is no tensor, or scale no number.
        RuntimeError: a shape, dtype, device, stride or combination is not the one above, or an input requires grad
            under grad mode. Raised before anything is written.

    The same arithmetic as gated_delta_rule in mode "recurrent": outputs are torch.equal to its, and so are the states
    after fold_ring with a float32 ring.

    Source: the ring is that of Modular MAX's gated_delta; the slot table that of vLLM; the buffer that of SGLang.
    """
    check_choice("gated_delta_verify", "gate_domain", gate_domain, ("log", "linear"))
    required = {"q": q, "k": k, "v": v, "state": state}
    optional = {
        "g": g,
        "beta": beta,
        "ring": ring,
        "slots": slots,
        "ring_slots": ring_slots,
        "cu_seqlens": cu_seqlens,
        "state_table": state_table,
        "num_accepted": num_accepted,
        "states_out": states_out,
        "out": out,
    }
    check_inputs("gated_delta_verify", required, optional)
    scale = rule_scale("gated_delta_verify", scale, q)
    if _values.ENABLED:
        _values.check_verify(**required, **optional, gate_domain=gate_domain)
    if not has_kernel("gated_delta_verify", q):
        numbers = {"scale": scale, "use_qk_l2norm": use_qk_l2norm, "gate_domain": gate_domain}
        return reference.gated_delta_verify(**required, **optional, **numbers)
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    ops.gated_delta_verify(
        q,
        k,
        v,
        g,
        beta,
        state,
        ring,
        states_out,
        out,
        scale,
        bool(use_qk_l2norm),
        gate_domain == "linear",
        cu_seqlens,
        slots,
        ring_slots,
        state_table,
        num_accepted,
    )
    count_writes(state if states_out is None else None, ring, states_out, out)
    return out


def fold_ring(state, ring, *, slots, ring_slots, num_accepted):
    """Applies the accepted records of every layer and row to their states, in one launch.

        for each of the first num_accepted records:  S = exp(g) S + k f^T

    Args:
        state: [pool, Hv, K, V] float32, bfloat16 or float16, K or V contiguous; the pool of all layers. Updated in
            place.
        ring: [rows, Hk, length, stride] that gated_delta_verify has filled.
        slots: int32 or int64 [layers, batch], slot of each row in each layer, absolute in `state`; any strides. Live
            slots are distinct. [batch] is one layer.
        ring_slots: int32 or int64 [layers, batch], absolute rows of `ring`. [batch] is one layer.
        num_accepted: int32 or int64 [batch], leading records to apply, the same in every layer. At most 0 or more than
            the ring's length: the row is skipped, as are rows whose slot or ring slot is outside its pool. A count
            above what was recorded, within the length, applies what the ring held before: the caller's error.

    Updated in place:
        state, at the slots that are not skipped. All other slots stay as they are.

    Returns:
        state.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: a shape, dtype, device or stride is not the one above, or an input requires grad under grad mode.

    With a float32 ring the states are torch.equal to those of one recurrent call over the accepted tokens. Arithmetic
    is float32; each state is rounded once, to its dtype.

    Source: Modular MAX's gated_delta_state_fold.
    """
    tensors = {"state": state, "ring": ring, "slots": slots, "ring_slots": ring_slots, "num_accepted": num_accepted}
    check_inputs("fold_ring", tensors, {})
    slots = slots.unsqueeze(0) if slots.dim() == 1 else slots
    ring_slots = ring_slots.unsqueeze(0) if ring_slots.dim() == 1 else ring_slots
    if _values.ENABLED:
        _values.check_fold(state, ring, slots, ring_slots, num_accepted)
    if not has_kernel("fold_ring", state):
        return reference.fold_ring(state, ring, slots=slots, ring_slots=ring_slots, num_accepted=num_accepted)
    ops.fold_ring(state, ring, slots, ring_slots, num_accepted)
    count_writes(state)
    return state
