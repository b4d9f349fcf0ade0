# SPDX-License-Identifier: Apache-2.0
"""GATED_DELTANET_CHECK=1: the values inside index tensors and gates, checked before each call.

Reads tensors back, so every op then waits for its device: a mode for finding a caller's error, off otherwise. The
variable is read at import. Nothing is checked while torch.compile traces or a CUDA graph is captured. Every check
raises ValueError.
"""

import os

import torch

ENABLED = os.environ.get("GATED_DELTANET_CHECK", "0") not in ("", "0")


def _skips(tensor):
    if torch.compiler.is_compiling() or tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _require(ok, message):
    if not ok:
        raise ValueError(message)


def _live(values, pool):
    return [value for value in values if 0 <= value < pool]


def _distinct(op, name, values):
    seen = set()
    for value in values:
        _require(value not in seen, f"{op}: {name} must be distinct where they are live, {value} is named twice")
        seen.add(value)


# (first, end) of every sequence, from offsets that are checked here.
def _spans(op, cu_seqlens, batch, tokens):
    if cu_seqlens is None:
        return [(0, tokens)] * batch
    offsets, previous = cu_seqlens.tolist(), 0
    for n, offset in enumerate(offsets):
        ascends = previous <= offset <= tokens
        _require(ascends, f"{op}: cu_seqlens must ascend within [0, {tokens}], got {offset} at index {n}")
        previous = offset
    return list(zip(offsets[:-1], offsets[1:]))


def _slot_list(slots, rows):
    return list(range(rows)) if slots is None else slots.reshape(-1).tolist()


# g of the tokens of live rows: what padding rows hold is never looked at.
def _gates(op, g, gate_domain, spans, live, ragged):
    if g is None or gate_domain == "raw":
        return
    limit = 0 if gate_domain == "log" else 1
    what = "a log decay, at most 0" if gate_domain == "log" else "a decay, in [0, 1]"
    for n, ((first, end), is_live) in enumerate(zip(spans, live)):
        row = g[0 if ragged else n, first:end]
        is_bad = (row > limit) if gate_domain == "log" else (row > limit) | (row < 0)
        _require(not is_live or not bool(is_bad.any()), f"{op}: g must be {what}; sequence {n} has another value")


def check_rule(
    q, state, g, cu_seqlens, slots, out_slots, checkpoints, checkpoint_every, checkpoint_starts, gate_domain
):
    """gated_delta_rule: offsets, slots read and written, checkpoint rows, gates."""
    if _skips(q):
        return
    op = "gated_delta_rule"
    spans = _spans(op, cu_seqlens, *q.shape[:2])
    reads, pool = _slot_list(slots, len(spans)), state.shape[0]
    live = [0 <= slot < pool for slot in reads]
    if out_slots is None:
        _distinct(op, "slots", _live(reads, pool))
    else:
        writes = [slot if is_live else -1 for slot, is_live in zip(_slot_list(out_slots, len(spans)), live)]
        _distinct(op, "out_slots", _live(writes, pool))
        for n, slot in enumerate(writes):
            others = reads[:n] + reads[n + 1 :]
            _require(slot < 0 or slot not in others, f"{op}: out_slots must not name slot {slot}, which is read")
    _gates(op, g, gate_domain, spans, live, cu_seqlens is not None)
    if checkpoints is not None:
        step = q.shape[1] // checkpoint_every
        starts = checkpoint_starts.tolist() if checkpoint_starts is not None else [n * step for n in range(len(spans))]
        rows = []
        for (first, end), start, is_live in zip(spans, starts, live):
            rows += range(start, start + (end - first) // checkpoint_every) if is_live else ()
        inside = all(0 <= row < checkpoints.shape[0] for row in rows)
        _require(
            inside, f"{op}: checkpoint_starts must leave room for every checkpoint, of {checkpoints.shape[0]} rows"
        )
        _distinct(op, "rows of checkpoint_starts", rows)


def check_verify(
    *,
    q,
    k,
    v,
    state,
    g,
    beta,
    ring,
    slots,
    ring_slots,
    cu_seqlens,
    state_table,
    num_accepted,
    states_out,
    out,
    gate_domain,
):
    """gated_delta_verify: offsets, gates, ring rows, slots that rows commit to, the slot table."""
    if _skips(q):
        return
    op = "gated_delta_verify"
    spans = _spans(op, cu_seqlens, *q.shape[:2])
    pool, table = state.shape[0], None if state_table is None else state_table.tolist()
    starts = _slot_list(slots, len(spans))
    if num_accepted is not None and table is not None:
        counts = num_accepted.tolist()
        starts = [row[count - 1] if 1 <= count <= len(row) else -1 for row, count in zip(table, counts)]
    live = [0 <= slot < pool for slot in starts]
    _gates(op, g, gate_domain, spans, live, cu_seqlens is not None)
    if table is not None:
        _distinct(op, "slots of state_table", [slot for row, ok in zip(table, live) if ok for slot in _live(row, pool)])
    if ring is not None:
        rows = _slot_list(ring_slots, len(spans))
        is_short = [end - first <= ring.shape[2] for first, end in spans]
        records = [row for row, ok, short in zip(rows, live, is_short) if ok and short]
        _distinct(op, "ring_slots", _live(records, ring.shape[0]))
        for slot, ok, short in zip(starts, live, is_short):
            alone = not ok or short or starts.count(slot) == 1
            _require(alone, f"{op}: slots must be distinct where a row is longer than the ring, {slot} is named twice")


def check_step(mixed_qkv, conv_state, state, slots):
    """gated_delta_step: the slots that are written."""
    if _skips(mixed_qkv):
        return
    pool = min(conv_state.shape[0], state.shape[0])
    _distinct("gated_delta_step", "slots", _live(_slot_list(slots, mixed_qkv.shape[0]), pool))


def check_fold(state, ring, slots, ring_slots, num_accepted):
    """fold_ring: the slots that are written."""
    if _skips(state):
        return
    applies = [1 <= count <= ring.shape[2] for count in num_accepted.tolist()]
    written = []
    for row, ring_row in zip(slots.tolist(), ring_slots.tolist()):
        written += [s for s, r, ok in zip(row, ring_row, applies) if ok and 0 <= r < ring.shape[0]]
    _distinct("fold_ring", "slots", _live(written, state.shape[0]))


def check_copy(pool, src, dst):
    """copy_slots: the slots written, and that none of them is read for another item."""
    if _skips(pool):
        return
    size = pool.shape[0]
    items = [(s, d) for s, d in zip(src.tolist(), dst.tolist()) if 0 <= s < size and 0 <= d < size]
    _distinct("copy_slots", "dst", [d for _, d in items])
    for _, d in items:
        is_read = any(s == d and other != d for s, other in items)
        _require(not is_read, f"copy_slots: dst must not name slot {d}, which is the src of another item")


def check_windows(op, x, conv_state, slots, cu_seqlens):
    """The convolution's ops: offsets, and the slots that are written."""
    if _skips(x):
        return
    tokens = x.shape[0] if x.dim() == 2 else x.shape[-1]
    spans = _spans(op, cu_seqlens, x.shape[0], tokens)
    if conv_state is not None:
        _distinct(op, "slots", _live(_slot_list(slots, len(spans)), conv_state.shape[0]))
