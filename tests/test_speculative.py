# SPDX-License-Identifier: Apache-2.0
"""Section G: verify, fold, and the two other contracts for the states of tokens that may be taken back."""

import pytest
import torch

from . import oracle
from .helpers import (
    DTYPES,
    SENTINEL,
    SMALL,
    Inputs,
    Shape,
    assert_close,
    assert_same,
    assert_zero,
    normal,
    rule_inputs,
    rule_state,
    short,
)

NORM = {"use_qk_l2norm": True}
WIDE = Shape(2, 6, 128, 128)
ODD = Shape(1, 3, 24, 72)
each_shape = pytest.mark.parametrize("shape", (SMALL, WIDE, ODD), ids=str)
ring_lengths = pytest.mark.parametrize("length", (2, 4, 8))
layouts = pytest.mark.parametrize("layout", ("K-first", "V-first"))


def make_ring(
    kernel, rows, length, shape=SMALL, *, device="cpu", dtype=torch.float32, record_stride=None, fill=SENTINEL
):
    """A ring that holds a sentinel wherever nothing is recorded."""
    Hk, Hv, K, V = shape
    ring = kernel.new_ring(rows, Hk, length, K, V, Hv // Hk, dtype=dtype, record_stride=record_stride, device=device)
    return ring.fill_(fill)


def index(device, *values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=device)


def decodes(kernel, x, state, count):
    """Outputs and state after `count` single decodes."""
    outputs = [kernel.gated_delta_rule(*x.tokens(t, t + 1), state, **NORM) for t in range(count)]
    return torch.cat(outputs, 1) if outputs else x.v[:, :0]


@pytest.mark.kernels_ci
@ring_lengths
@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_verify_writes_no_state(kernel, device, dtype, state_dtype, length):
    """pool and window bitwise as before, outputs those of the writing calls"""
    x, pool = rule_inputs(3, length, dtype=dtype, device=device), rule_state(5, dtype=state_dtype, device=device)
    before, written, ring = pool.clone(), pool.clone(), make_ring(kernel, 3, length, device=device)
    slots, rows = index(device, 4, -1, 0), index(device, 2, 0, 1)
    out = kernel.gated_delta_verify(*x, pool, ring, slots=slots, ring_slots=rows, **NORM)
    assert_same(pool, before, "pool")
    assert_same(out, kernel.gated_delta_rule(*x, written, slots=slots, mode="recurrent", **NORM), "output")
    assert_zero(out[1], "padding row")
    assert not torch.equal(written, before), "control: the writing call writes"
    assert bool((ring[0] == SENTINEL).all()), "the ring row of the padding row"
    assert bool((ring[[1, 2]] != SENTINEL).any()), "control: records are written"


@each_shape
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=short)
def test_verify_and_fold_are_decodes(kernel, device, shape, dtype):
    """T = 1..8, every accepted count, three layers in one fold, torch.equal; a wrong count differs"""
    layers, T_most, length = 3, 8, 8
    x = rule_inputs(layers, T_most, shape, dtype=dtype, device=device)
    for T in range(1, T_most + 1):
        batch, piece = T + 1, x.tokens(0, T)  # row a of each layer accepts a tokens
        pool = rule_state(layers * batch, shape, device=device)
        ring = make_ring(kernel, layers * batch, length, shape, device=device)
        tables = torch.arange(layers * batch, device=device).view(layers, batch)
        fresh, expected = pool.clone(), pool.clone()
        for layer in range(layers):
            rows = piece.map(lambda part: part[layer : layer + 1].expand(batch, *part.shape[1:]))
            out = kernel.gated_delta_verify(*rows, pool, ring, slots=tables[layer], ring_slots=tables[layer], **NORM)
            for count in range(batch):
                state = expected[layer * batch + count][None]
                single = decodes(kernel, rows.rows(slice(count, count + 1)), state, count)
                assert_same(out[count : count + 1, :count], single, f"T={T} outputs of {count} decodes")
        assert_same(pool, fresh, "pool after verify")
        kernel.fold_ring(pool, ring, slots=tables, ring_slots=tables, num_accepted=torch.arange(batch, device=device))
        assert_same(pool, expected, f"T={T} states")
        wrong = fresh.clone()
        counts = torch.arange(batch, device=device).roll(1)
        kernel.fold_ring(wrong, ring, slots=tables, ring_slots=tables, num_accepted=counts)
        differs = (wrong != expected).flatten(1).any(1).view(layers, batch)
        assert bool(differs.all()), "control: a fold with a wrong count gives another state"


@layouts
@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
@each_shape
def test_fold_is_one_recurrent_call(kernel, device, shape, state_dtype, layout):
    """every state dtype and layout: rounded once, padded slots, a padded and poisoned record"""
    Hk, Hv, K, V = shape
    stride = kernel.ring_record_elements(K, V, Hv // Hk) + 13
    x = rule_inputs(4, 5, shape, device=device)
    pool = rule_state(7, shape, dtype=state_dtype, layout=layout, slot_padding=16, device=device)
    expected, before = pool.clone(), pool.clone()
    ring = make_ring(kernel, 6, 8, shape, device=device, record_stride=stride, fill=float("nan"))
    slots, rows, counts = index(device, 6, 0, 3, 2), index(device, 1, 5, 0, 3), (5, 0, 2, 3)
    kernel.gated_delta_verify(*x, pool, ring, slots=slots, ring_slots=rows, **NORM)
    kernel.fold_ring(pool, ring, slots=slots, ring_slots=rows, num_accepted=index(device, *counts))
    for n, count in enumerate(counts):
        slot = int(slots[n])
        state = expected[slot : slot + 1]
        kernel.gated_delta_rule(*x.rows(slice(n, n + 1)).tokens(0, count), state, mode="recurrent", **NORM)
        assert_same(pool[slot], state[0], f"{count} tokens")
    assert_same(pool[[1, 4, 5, 0]], before[[1, 4, 5, 0]], "slots not named, and the one that accepts nothing")
    assert bool(ring[..., -13:].isnan().all()), "what lies past the record"
    assert bool(ring[[2, 4]].isnan().all()) and bool(ring[:, :, 5:].isnan().all()), "other rows and records"
    assert not bool(ring[rows][:, :, :5, :-13].isnan().any()), "control: the records are written"


@ring_lengths
def test_row_longer_than_the_ring_commits_itself(kernel, device, length):
    """ragged [1, 40, 2, 0, length] in one call; the long row records nothing, the fold skips it"""
    lengths = (1, 40, 2, 0, length)
    offsets = index(device, *[sum(lengths[:n]) for n in range(len(lengths) + 1)])
    x, pool = rule_inputs(1, sum(lengths) + 3, device=device), rule_state(6, device=device)
    x.v[:, sum(lengths) :] = float("nan")
    before, expected = pool.clone(), pool.clone()
    ring = make_ring(kernel, 5, length, device=device)
    slots, rows = index(device, 5, 0, 2, 1, 3), index(device, 0, 4, 2, 3, 1)
    out = kernel.gated_delta_verify(*x, pool, ring, slots=slots, ring_slots=rows, cu_seqlens=offsets, **NORM)
    whole = kernel.gated_delta_rule(*x, expected, slots=slots, cu_seqlens=offsets, mode="recurrent", **NORM)
    assert_same(out, whole, "output")
    assert_zero(out[:, sum(lengths) :], "tokens of no sequence")
    others = [slot for slot in range(6) if slot != 0]
    assert_same(pool[others], before[others], "slots of short rows")
    assert_same(pool[0], expected[0], "slot of the long row")
    assert bool((ring[[3, 4]] == SENTINEL).all()), "the long row and the empty one record nothing"
    counts = index(device, *lengths)
    kernel.fold_ring(pool, ring, slots=slots, ring_slots=rows, num_accepted=counts)
    assert_same(pool, expected, "all accepted")


@pytest.mark.parametrize("ring_dtype", (torch.bfloat16, torch.float16), ids=short)
@pytest.mark.parametrize("shape", (SMALL, ODD), ids=str)
def test_16_bit_rings_round_the_records(kernel, device, shape, ring_dtype):
    x, pool = rule_inputs(2, 4, shape, device=device), rule_state(2, shape, device=device)
    ring = make_ring(kernel, 2, 4, shape, device=device, dtype=ring_dtype)
    expected = oracle.gated_delta_rule(*x, pool, **NORM)[1]
    exact = make_ring(kernel, 2, 4, shape, device=device)
    for each in (ring, exact):
        kernel.gated_delta_verify(*x, pool, each, **NORM)
    Hk, Hv, K, V = shape
    record = kernel.ring_record_elements(K, V, Hv // Hk)
    assert_same(ring[..., :record], exact[..., :record].to(ring_dtype), "records")
    slots = index(device, 0, 1)
    kernel.fold_ring(pool, ring, slots=slots, ring_slots=slots, num_accepted=index(device, 4, 4))
    assert_close(pool, expected, oracle.STATE_BOUNDS[ring_dtype], "state")


def test_record_layout(kernel, device):
    """Raw key, the factors of the group, its decays: against the equations"""
    Hk, Hv, K, V = shape = Shape(2, 6, 16, 8)
    x, pool = rule_inputs(1, 3, shape, device=device), rule_state(1, shape, device=device)
    ring = make_ring(kernel, 1, 4, shape, device=device)
    kernel.gated_delta_verify(*x, pool, ring, **NORM)
    records = ring[0, :, :3].transpose(0, 1)  # [token, Hk, stride]
    assert_same(records[..., :K], x.k[0], "raw keys")
    factors = oracle.wide(records[..., K : K + 3 * V]).reshape(3, Hv, V)
    decay = oracle.wide(records[..., K + 3 * V : K + 3 * V + 3]).reshape(3, Hv)
    assert_close(decay, x.g[0].double().exp(), 1e-6, "decays")
    key = oracle.wide(x.k[0]).repeat_interleave(3, 1)
    S = oracle.wide(pool[0])
    for t, (_, after) in enumerate(oracle.rule_steps(*x, pool, **NORM)):
        S = decay[t, :, None, None] * S + key[t, :, :, None] * factors[t, :, None, :]
        assert_close(S, after[0], 1e-6, f"state after token {t}")


@pytest.mark.parametrize("count", (-1, 0, 1, 3, 4, 5, 2**30))
def test_accepted_counts_out_of_range_skip_the_row(kernel, device, count):
    """ring of 4, 3 recorded; 4 is the caller's error and may change its own slot only"""
    x, pool = rule_inputs(2, 3, device=device), rule_state(4, device=device)
    ring = make_ring(kernel, 3, 4, device=device)
    slots, rows = index(device, 2, 0), index(device, 1, 0)
    kernel.gated_delta_verify(*x, pool, ring, slots=slots, ring_slots=rows, **NORM)
    before = pool.clone()
    kernel.fold_ring(pool, ring, slots=slots, ring_slots=rows, num_accepted=index(device, count, 0))
    assert_same(pool[[0, 1, 3]], before[[0, 1, 3]], "other slots")
    assert torch.equal(pool[2], before[2]) == (count not in (1, 3, 4))


@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64), ids=short)
def test_tables_of_odd_form(kernel, device, index_dtype):
    """tables cut out of wider ones, strided counts, a table of one row, padding in each of the three"""
    layers, batch = 2, 3
    x, pool = rule_inputs(layers * batch, 2, device=device), rule_state(8, device=device)
    ring = make_ring(kernel, 9, 2, device=device)
    slots = torch.tensor([[4, 0, 7], [2, -1, 99]], dtype=index_dtype, device=device)
    rows = torch.tensor([[8, 1, 3], [0, 2, 5]], dtype=index_dtype, device=device)
    counts = torch.tensor([2, 1, 2], dtype=index_dtype, device=device)
    kernel.gated_delta_verify(*x, pool, ring, slots=slots.flatten(), ring_slots=rows.flatten(), **NORM)
    fresh = pool.clone()
    kernel.fold_ring(pool, ring, slots=slots, ring_slots=rows, num_accepted=counts)
    changed = [n for n in range(8) if not torch.equal(pool[n], fresh[n])]
    assert changed == [0, 2, 4, 7]
    wide = torch.full((layers, 2, 2 * batch), 6, dtype=index_dtype, device=device)
    wide[:, 0, ::2], wide[:, 1, ::2] = slots, rows
    strided = torch.full((2 * batch,), 1, dtype=index_dtype, device=device)
    strided[::2] = counts
    again = fresh.clone()
    tables = {"slots": wide[:, 0, ::2], "ring_slots": wide[:, 1, ::2], "num_accepted": strided[::2]}
    kernel.fold_ring(again, ring, **tables)
    assert_same(again, pool, "strided tables")
    one = fresh.clone()
    kernel.fold_ring(one, ring, slots=slots[0], ring_slots=rows[0], num_accepted=counts)
    kernel.fold_ring(one, ring, slots=slots[1:], ring_slots=rows[1:], num_accepted=counts)
    assert_same(one, pool, "a layer at a time")
    rows[0, 0] = 9
    outside = fresh.clone()
    kernel.fold_ring(outside, ring, slots=slots, ring_slots=rows, num_accepted=counts)
    assert_same(outside[4], fresh[4], "ring row outside the ring")


def test_speculative_and_plain_steps_in_turn(kernel, device):
    """verify 4, accept 3, fold; decode 1; verify 4, accept 1, fold; decode 1; the window likewise"""
    x = rule_inputs(2, 8, device=device)
    signal = normal(2, 24, 8, seed=7, device=device)
    weight, window = normal(24, 4, seed=8, device=device), normal(2, 24, 3, seed=9, device=device)
    state, ring = rule_state(2, device=device), make_ring(kernel, 2, 4, device=device)
    plain_state, plain_window = state.clone(), window.clone()
    rows = torch.arange(2, device=device)
    position = 0
    for accepted in (3, None, 1, None):
        count = accepted or 1
        expected = decodes(kernel, x.tokens(position, position + count), plain_state, count)
        piece = signal[..., position : position + count].contiguous()
        expected_y = kernel.causal_conv1d_update(piece, plain_window, weight, activation="silu")
        if accepted is None:
            out = kernel.gated_delta_rule(*x.tokens(position, position + 1), state, **NORM)
            y = kernel.causal_conv1d_update(piece, window, weight, activation="silu")
        else:
            draft, draft_signal = x.tokens(position, position + 4), signal[..., position : position + 4]
            out = kernel.gated_delta_verify(*draft, state, ring, **NORM)
            y = kernel.causal_conv1d(draft_signal, weight, None, "silu", conv_state=window, write_state=False)
            counts = torch.full((2,), accepted, device=device)
            kernel.fold_ring(state, ring, slots=rows, ring_slots=rows, num_accepted=counts)
            kernel.conv_state_write(draft_signal, window, num_accepted=counts)
        assert_same(out[:, :count], expected, "output")
        assert_same(y[..., :count], expected_y, "convolution")
        assert_same(state, plain_state, "state")
        assert_same(window, plain_window, "window")
        position += count


def test_draft_verify_accept_loop(kernel, device):
    """3 layers with one pool, 4 rows, 200 steps, random counts, one fold a step"""
    layers, batch, draft, steps = 3, 4, 3, 200
    shape = Shape(1, 2, 16, 16)
    pool, windows = rule_state(layers * batch, shape, device=device), normal(layers * batch, 12, 3, device=device)
    plain_pool, plain_windows = pool.clone(), windows.clone()
    weight = normal(12, 4, seed=3, device=device)
    ring = make_ring(kernel, layers * batch, 4, shape, device=device)
    tables = torch.randperm(layers * batch, generator=torch.Generator().manual_seed(5)).view(layers, batch).to(device)
    flat = tables.flatten()
    random = torch.Generator().manual_seed(4)
    for step in range(steps):
        x = rule_inputs(layers * batch, draft, shape, seed=100 + step, device=device)
        signal = normal(layers * batch, 12, draft, seed=1000 + step, device=device)
        counts = torch.randint(0, draft + 1, (batch,), generator=random)
        kernel.gated_delta_verify(*x, pool, ring, slots=flat, ring_slots=flat, **NORM)
        kernel.causal_conv1d(signal, weight, conv_state=windows, slots=flat, write_state=False)
        kernel.fold_ring(pool, ring, slots=tables, ring_slots=tables, num_accepted=counts.to(device))
        repeated = counts.repeat(layers).to(device)
        kernel.conv_state_write(signal, windows, slots=flat, num_accepted=repeated)
        for t in range(int(counts.max())):
            slots = torch.where(repeated > t, flat, -1)
            kernel.gated_delta_rule(*x.tokens(t, t + 1), plain_pool, slots=slots, **NORM)
            kernel.causal_conv1d_update(signal[..., t : t + 1], plain_windows, weight, slots=slots)
        assert_same(pool, plain_pool, f"states after step {step}")
        assert_same(windows, plain_windows, f"windows after step {step}")


@pytest.mark.parametrize("accepted_branch", (0, 1))
def test_branches_from_one_state(kernel, device, accepted_branch):
    """two rows on one slot; a padding row whose ring slot, counts and tokens hold junk"""
    x, pool = rule_inputs(3, 4, device=device), rule_state(3, device=device)
    for part in x:
        part[1] = float("nan")
    ring = make_ring(kernel, 3, 4, device=device)
    slots, rows = index(device, 2, -1, 2), index(device, 0, 2**40, 1)
    before = pool.clone()
    out = kernel.gated_delta_verify(*x, pool, ring, slots=slots, ring_slots=rows, **NORM)
    assert_same(pool, before, "pool")
    assert_zero(out[1], "padding row")
    assert bool((ring[2] == SENTINEL).all()), "ring row of nobody"
    kept = 2 * accepted_branch
    branch = x.rows(slice(kept, kept + 1))
    expected = before[2:3].clone()
    single = decodes(kernel, branch, expected, 4)
    assert_same(out[kept : kept + 1], single, "output of the branch")
    counts = index(device, 0, 77, 0)
    counts[kept] = 4
    kernel.fold_ring(pool, ring, slots=slots, ring_slots=rows, num_accepted=counts)
    assert_same(pool[2:3], expected, "state of the branch")
    assert_same(pool[:2], before[:2], "other slots")


@layouts
@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
@pytest.mark.parametrize("ragged", (False, True), ids=("dense", "ragged"))
def test_state_table_takes_every_state(kernel, device, ragged, state_dtype, layout):
    """Slots for each token's state, a start chosen by num_accepted, entries and counts outside: dropped or padding"""
    x = rule_inputs(1 if ragged else 4, 12 if ragged else 3, device=device)
    offsets = index(device, 0, 3, 6, 9, 12) if ragged else None
    table = index(device, 1, 2, 3, 4, -1, 5, 6, 7, 8, 9, 10, 11).view(4, 3)
    pool = rule_state(13, dtype=state_dtype, layout=layout, device=device)
    before = pool.clone()
    counts = index(device, 2, 1, 0, 4)  # the last two are padding
    options = {"cu_seqlens": offsets, "state_table": table, "num_accepted": counts, **NORM}
    out = kernel.gated_delta_verify(*x, pool, **options)
    rows = Inputs(*(part.view(4, 3, *part.shape[2:]) for part in x))
    expected = before.clone()
    for n, start in ((0, 2), (1, 4)):
        for t in range(3):
            state = before[start : start + 1].clone()
            single = kernel.gated_delta_rule(*rows.rows(slice(n, n + 1)).tokens(0, t + 1), state, **NORM)
            if int(table[n, t]) >= 0:
                expected[int(table[n, t])] = state[0]
        assert_same(out.view(4, 3, *out.shape[2:])[n], single[0], f"output {n}")
    assert_same(pool, expected, "pool")
    assert_zero(out.view(4, 3, *out.shape[2:])[2:], "padding rows")
    fewer, narrow = before.clone(), table[:, :2]
    kernel.gated_delta_verify(
        *x, fewer, cu_seqlens=offsets, state_table=narrow, slots=index(device, 0, 0, -1, 0), **NORM
    )
    changed = [n for n in range(13) if not torch.equal(fewer[n], before[n])]
    assert changed == [1, 2, 4, 9, 10], "two columns, a start given by slots, row 2 is padding"


@pytest.mark.parametrize("buffer_dtype", DTYPES, ids=short)
def test_states_out_takes_every_state(kernel, device, buffer_dtype):
    """The buffer of intermediate states, both layouts; pool, padding rows and tokens that are not there untouched"""
    x, pool = rule_inputs(1, 9, device=device), rule_state(4, device=device)
    offsets, slots = index(device, 0, 3, 5, 9), index(device, 3, -1, 0)
    before = pool.clone()
    for layout in ("K-first", "V-first"):
        buffer = torch.full((3, 3, 4, 32, 32), SENTINEL, dtype=buffer_dtype, device=device)
        view = buffer if layout == "K-first" else buffer.transpose(-1, -2)
        out = kernel.gated_delta_verify(*x, pool, states_out=view, cu_seqlens=offsets, slots=slots, **NORM)
        assert_same(pool, before, "pool")
        for n, (first, slot) in enumerate(((0, 3), (3, -1), (5, 0))):
            for t in range(3):
                if slot < 0:
                    continue
                state = before[slot : slot + 1].clone()
                kernel.gated_delta_rule(*x.tokens(first, first + t + 1), state, **NORM)
                assert_same(view[n, t], state[0].to(buffer_dtype), f"{layout} sequence {n} token {t}")
        assert bool((buffer[1] == SENTINEL).all()), "padding row"
        assert_same(out, kernel.gated_delta_rule(*x, before.clone(), cu_seqlens=offsets, slots=slots, **NORM), "output")


def test_one_contract_a_call(kernel, device):
    x, pool = rule_inputs(2, 2, device=device), rule_state(2, device=device)
    ring, table = make_ring(kernel, 2, 2, device=device), index(device, 0, 1, 1, 0).view(2, 2)
    with pytest.raises(RuntimeError, match="one of ring, state_table and states_out"):
        kernel.gated_delta_verify(*x, pool)
    with pytest.raises(RuntimeError, match="one of ring, state_table and states_out"):
        kernel.gated_delta_verify(*x, pool, ring, state_table=table)
    with pytest.raises(RuntimeError, match="num_accepted needs state_table"):
        kernel.gated_delta_verify(*x, pool, ring, num_accepted=table[0])
    with pytest.raises(RuntimeError, match="slots and num_accepted"):
        kernel.gated_delta_verify(*x, pool, state_table=table, num_accepted=table[0], slots=table[0])


@pytest.mark.parametrize(
    "K, V", [(1, 1), (8, 16), (16, 8), (64, 96), (96, 192), (80, 96), (192, 96), (256, 256), (128, 100)]
)
def test_head_dims(kernel, device, K, V):
    shape = Shape(1, 2, K, V)
    x, pool = rule_inputs(2, 3, shape, device=device), rule_state(3, shape, device=device)
    ring, expected = make_ring(kernel, 2, 3, shape, device=device), rule_state(3, shape, device=device)
    slots, rows = index(device, 2, 0), index(device, 1, 0)
    out = kernel.gated_delta_verify(*x, pool, ring, slots=slots, ring_slots=rows, **NORM)
    assert_same(out, kernel.gated_delta_rule(*x, expected, slots=slots, **NORM), "output")
    kernel.fold_ring(pool, ring, slots=slots, ring_slots=rows, num_accepted=index(device, 3, 3))
    assert_same(pool, expected, "state")


def test_strided_ring_and_inputs(kernel, device):
    """q, k, v as views of one projection; a ring whose rows, heads and records are far apart"""
    Hk, Hv, K, V = SMALL
    packed = normal(2, 4, 2 * Hk * K + Hv * V, device=device)
    q, k, v = packed.split([Hk * K, Hk * K, Hv * V], -1)
    q, k, v = q.unflatten(-1, (Hk, K)), k.unflatten(-1, (Hk, K)), v.unflatten(-1, (Hv, V))
    g, beta = -normal(2, 4, Hv, 2, device=device)[..., 0].abs(), torch.sigmoid(normal(2, 4, Hv, device=device))
    pool, plain = rule_state(2, device=device), rule_state(2, device=device)
    wide = torch.full((4, 5, 2 * Hk, 200), SENTINEL, device=device)
    ring = wide[::2, :4, ::2].transpose(1, 2)
    ring_plain = make_ring(kernel, 2, 4, device=device, record_stride=200)
    out = kernel.gated_delta_verify(q, k, v, g, beta, pool, ring, **NORM)
    copies = [x.contiguous() for x in (q, k, v, g, beta)]
    assert_same(out, kernel.gated_delta_verify(*copies, plain, ring_plain, **NORM), "output")
    assert_same(ring, ring_plain, "ring")
    assert bool(
        (wide[1::2] == SENTINEL).all() and (wide[:, 4] == SENTINEL).all() and (wide[:, :, 1::2] == SENTINEL).all()
    )
    slots = index(device, 0, 1)
    for each, records in ((pool, ring), (plain, ring_plain)):
        kernel.fold_ring(each, records, slots=slots, ring_slots=slots, num_accepted=index(device, 4, 1))
    assert_same(pool, plain, "state")


def test_fold_of_many_rows(kernel, device):
    """48 layers, 64 rows, 32 heads are more than 65535 row-heads"""
    layers, batch, shape = 48, 64, Shape(32, 32, 16, 16)
    slots = torch.arange(layers * batch, device=device)
    x = rule_inputs(8, 1, shape, device=device)
    pool = rule_state(8, shape, device=device).repeat(layers * batch // 8, 1, 1, 1)
    ring = make_ring(kernel, 8, 1, shape, device=device)
    kernel.gated_delta_verify(*x, pool, ring, slots=slots[:8], ring_slots=slots[:8], **NORM)
    ring = ring.repeat(layers * batch // 8, 1, 1, 1)
    expected = pool[:8].clone()
    kernel.gated_delta_rule(*x, expected, **NORM)
    tables = slots.view(layers, batch)
    counts = torch.ones(batch, dtype=torch.int32, device=device)
    kernel.fold_ring(pool, ring, slots=tables, ring_slots=tables, num_accepted=counts)
    assert_same(pool, expected.repeat(layers * batch // 8, 1, 1, 1), "all rows")


@pytest.mark.cuda_only
def test_fold_is_one_launch(kernel, device):
    """whatever the number of layers"""
    from torch.profiler import ProfilerActivity, profile

    shape = Shape(1, 2, 64, 64)
    pool, ring = rule_state(12, shape, device=device), make_ring(kernel, 12, 4, shape, device=device, fill=0.5)
    tables = torch.arange(12, device=device).view(3, 4)
    counts = torch.ones(4, dtype=torch.int64, device=device)
    kernel.fold_ring(pool, ring, slots=tables, ring_slots=tables, num_accepted=counts)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as run:
        kernel.fold_ring(pool, ring, slots=tables, ring_slots=tables, num_accepted=counts)
        torch.cuda.synchronize()
    launched = [event.name for event in run.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 1, launched


@pytest.mark.large(gib=40)
def test_offsets_past_2_32_elements(kernel, device):
    """verify and fold on a slot and a ring row that start past 2^32 elements; slot and ring row 0 unchanged"""
    shape, far = Shape(1, 1, 32, 32), 4096
    pool = torch.empty(far + 1, 2**20, dtype=torch.bfloat16, device=device)[:, :1024].unflatten(1, (1, 32, 32))
    ring = torch.empty(far + 1, 1, 1, 2**20, dtype=torch.bfloat16, device=device).view(far + 1, 1, 2, 2**19)
    pool[0], ring[0] = 0.75, 0.5
    x, state = rule_inputs(1, 2, shape, device=device), rule_state(1, shape, dtype=torch.bfloat16, device=device)
    pool[far], small_ring = state[0], ring[:1].clone()
    slots, first, counts = index(device, far), index(device, 0), index(device, 2)
    out = kernel.gated_delta_verify(*x, pool, ring, slots=slots, ring_slots=slots, **NORM)
    assert_same(out, kernel.gated_delta_verify(*x, state, small_ring, slots=first, ring_slots=first, **NORM), "output")
    kernel.fold_ring(pool, ring, slots=slots, ring_slots=slots, num_accepted=counts)
    kernel.fold_ring(state, small_ring, slots=first, ring_slots=first, num_accepted=counts)
    assert_same(pool[far], state[0], "state")
    assert bool((pool[0] == 0.75).all()) and bool((ring[0] == 0.5).all())
