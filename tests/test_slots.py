# SPDX-License-Identifier: Apache-2.0
"""Section A: slots, padding rows, the state pool. Every op of SLOT_OPS takes every case."""

import pytest
import torch

from .helpers import (
    DTYPES,
    MODES,
    SLOT_OPS,
    SMALL,
    ConvOp,
    RuleOp,
    assert_close,
    assert_same,
    assert_zero,
    move,
    name_of,
    normal,
    poison_allocator,
    rule_inputs,
    rule_state,
    short,
)

INDEX_DTYPES = (torch.int32, torch.int64)
each_op = pytest.mark.parametrize("op", SLOT_OPS, ids=name_of)
NAN = float("nan")


def check_rows(op, kernel, device, slots, num_slots, *, pool_dtype=torch.float32, tokens=1, dtype=torch.float32):
    """Runs rows on `slots`; live rows match the oracle, padding rows are zero, other slots are bitwise unchanged."""
    inputs = op.inputs(len(slots), tokens, dtype)
    pool = op.pool(num_slots, pool_dtype)
    expected = op.expect(inputs, pool, slots)
    mine = pool.to(device, copy=True)
    out = op.call(kernel, move(inputs, device), mine, slots.to(device))
    live = [n for n, slot in enumerate(slots.tolist()) if 0 <= slot < num_slots]
    named = [slots[n].item() for n in live]
    padding = [n for n in range(len(slots)) if n not in live]
    others = [slot for slot in range(num_slots) if slot not in named]
    bounds = op.bounds(dtype, pool_dtype)
    assert_close(out[live], expected[0][live], bounds[0], "live rows")
    assert_close(mine[named], expected[1][named], bounds[1], "live slots")
    assert_zero(out[padding], "padding rows")
    assert_same(mine[others].cpu(), pool[others], "unnamed slots")
    return out, mine


@pytest.mark.kernels_ci
@pytest.mark.parametrize("padding", (-1, 8, 1000))
@pytest.mark.parametrize("pool_dtype", DTYPES, ids=short)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=short)
@each_op
def test_padding_rows_read_and_write_nothing(kernel, device, op, index_dtype, pool_dtype, padding):
    slots = torch.tensor([3, padding, 0, padding, 7, padding], dtype=index_dtype)
    check_rows(op, kernel, device, slots, 8, pool_dtype=pool_dtype)


@pytest.mark.parametrize("tokens", (2, 5))
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@each_op
def test_padding_rows_of_several_tokens(kernel, device, op, dtype, tokens):
    """with 16-bit inputs and more than one token a row"""
    check_rows(op, kernel, device, torch.tensor([3, -1, 0, 8, 7, -5]), 8, tokens=tokens, dtype=dtype)


@each_op
def test_pool_of_no_slots_makes_every_row_padding(kernel, device, op):
    """An empty tensor has no address, but it is given"""
    inputs, slots = move(op.inputs(3), device), torch.arange(3, device=device)
    assert_zero(op.call(kernel, inputs, op.pool(4)[:0].to(device), slots))


@each_op
def test_padding_row_leaves_slot_zero_alone(kernel, device, op):
    """100 repetitions, the live row is bitwise what it is alone"""
    inputs = move(op.inputs(3), device)
    fresh = op.pool(4).to(device, copy=True)
    alone = fresh.clone()
    out_alone = op.call(kernel, tuple(x[:1] for x in inputs), alone, torch.tensor([0], device=device))
    slots = torch.tensor([0, -1, -1], dtype=torch.int32, device=device)
    for _ in range(100):
        pool = fresh.clone()
        out = op.call(kernel, inputs, pool, slots)
        assert_same(pool, alone, "pool")
        assert_same(out[:1], out_alone, "live row")
        assert_zero(out[1:], "padding rows")


@each_op
def test_int64_slots_are_not_cut_to_32_bits(kernel, device, op):
    """the low halves of the last three are -1, 1 and 0"""
    check_rows(op, kernel, device, torch.tensor([1, 2**32 - 1, 2**32 + 1, -(2**32)]), 4)


@each_op
def test_slot_zero_is_an_ordinary_slot(kernel, device, op):
    check_rows(op, kernel, device, torch.tensor([0, 2]), 4)
    check_rows(op, kernel, device, torch.tensor([-1, 2]), 4)


@each_op
def test_output_has_no_uninitialised_rows(kernel, device, op):
    """padding rows, every buffer recycled from freed NaN"""
    inputs = move(op.inputs(6, 3), device)
    pool = op.pool(8).to(device, copy=True)
    slots = torch.tensor([3, -1, 0, 9, 7, -1], device=device)
    size = max(x.nbytes for x in inputs)
    for factor in (1, 2, 4):
        poison_allocator(device, size, factor * size, size // factor)
        out = op.call(kernel, inputs, pool, slots)
        assert not bool(out.isnan().any())
        assert_zero(out[[1, 3, 5]], "padding rows")


@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_no_sequence_are_zero(kernel, device, mode):
    """empty sequences, a padding row, and tokens after cu_seqlens[-1], which hold NaN"""
    x = rule_inputs(1, 40, device=device)
    for part in x:
        part[:, 30:] = NAN
    offsets = torch.tensor([0, 0, 9, 9, 20, 30, 30], device=device)
    slots = torch.tensor([0, 1, 2, -1, 4, 5], device=device)
    poison_allocator(device, x.v.nbytes)
    out = kernel.gated_delta_rule(
        *x, rule_state(6, device=device), cu_seqlens=offsets, slots=slots, mode=mode, use_qk_l2norm=True
    )
    assert_zero(out[:, 9:20], "padding row")
    assert_zero(out[:, 30:], "tokens of no sequence")
    assert not bool(out.isnan().any()) and bool((out[:, :9] != 0).any())


def test_conv_tokens_of_no_sequence_are_zero(kernel, device):
    op = ConvOp("causal_conv1d")
    x = normal(40, op.C, device=device)
    x[30:] = NAN
    offsets = torch.tensor([0, 0, 9, 9, 20, 30, 30], device=device)
    slots = torch.tensor([0, 1, 2, -1, 4, 5], device=device)
    poison_allocator(device, x.nbytes)
    out = op.call(kernel, (x,), op.pool(6).to(device, copy=True), slots, cu_seqlens=offsets)
    assert_zero(out[9:20], "padding row")
    assert_zero(out[30:], "tokens of no sequence")
    assert not bool(out.isnan().any()) and bool((out[:9] != 0).any())


def test_elementwise_ops_fill_their_outputs(kernel, device):
    """of gates and norm"""
    a = normal(2, 5, 6, device=device)
    x = normal(2, 5, 6, 32, device=device)
    poison_allocator(device, a.nbytes, x.nbytes)
    g, beta = kernel.gated_delta_gates(a, a, a[0, 0], a[0, 0])
    out = kernel.rms_norm_gated(x, x, x[0, 0, 0], 1e-6)
    assert not bool(torch.cat([g.flatten(), beta.flatten(), out.flatten()]).isnan().any())


@each_op
def test_more_rows_than_slots(kernel, device, op):
    check_rows(op, kernel, device, torch.tensor([0, -1, -1, 2, 9, -1, 4, -1]), 5)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=short)
@each_op
def test_strided_slots(kernel, device, op, index_dtype):
    """every second element, and a column of a table; what lies between would be a live slot"""
    slots = torch.tensor([3, -1, 0, 7], dtype=index_dtype)
    dense_out, dense_pool = check_rows(op, kernel, device, slots, 8)
    big = torch.full((8,), 5, dtype=index_dtype, device=device)
    big[::2] = slots
    table = torch.full((4, 3), 6, dtype=index_dtype, device=device)
    table[:, 1] = slots
    for view in (big[::2], table[:, 1]):
        pool = op.pool(8).to(device, copy=True)
        out = op.call(kernel, move(op.inputs(4), device), pool, view)
        assert_same(out, dense_out, "output")
        assert_same(pool, dense_pool, "pool")


@each_op
def test_duplicate_live_slots_harm_no_other_slot(kernel, device, op):
    """a caller's error; what the slot holds is unspecified, the rest is not touched"""
    pool = op.pool(4).to(device, copy=True)
    before = pool.clone()
    out = op.call(kernel, move(op.inputs(2), device), pool, torch.tensor([2, 2], device=device))
    assert_same(pool[[0, 1, 3]], before[[0, 1, 3]], "other slots")
    assert out.shape[0] == 2


@each_op
def test_duplicate_padding_is_legal(kernel, device, op):
    pool = op.pool(4).to(device, copy=True)
    before = pool.clone()
    out = op.call(kernel, move(op.inputs(2), device), pool, torch.tensor([-1, -1], device=device))
    assert_same(pool, before, "pool")
    assert_zero(out)


@pytest.mark.parametrize("tokens", (1, 5, 64, 100))
@pytest.mark.parametrize("op", [op for op in SLOT_OPS if op.has_flags], ids=name_of)
def test_new_sequence_in_a_dirty_slot(kernel, device, op, tokens):
    """has_initial_state False does not read the slot, NaN or not"""
    inputs = move(op.inputs(3, tokens), device)
    zeroed = torch.zeros_like(op.pool(5), device=device)
    dirty = torch.full_like(zeroed, NAN)
    slots = torch.tensor([4, 0, 2], device=device)
    out = op.call(kernel, inputs, zeroed, slots)
    flags = torch.zeros(3, dtype=torch.bool, device=device)
    out_dirty = op.call(kernel, inputs, dirty, slots, has_initial_state=flags)
    assert_same(out_dirty, out, "output")
    assert_same(dirty[slots], zeroed[slots], "state")
    assert bool(dirty[[1, 3]].isnan().all()), "unnamed slots"
    control = torch.full_like(zeroed, NAN)
    assert bool(op.call(kernel, inputs, control, slots).isnan().any()), "control: the slot is read without the flag"


@pytest.mark.parametrize("op", [op for op in SLOT_OPS if op.has_flags], ids=name_of)
def test_initial_state_flag_is_per_row(kernel, device, op):
    inputs, pool = op.inputs(4, 3), op.pool(6)
    flags = torch.tensor([True, False, False, True])
    slots = torch.tensor([5, 1, -1, 2])
    expected = op.expect(inputs, pool, slots, has_initial_state=flags)
    mine = pool.to(device, copy=True)
    strided = torch.ones(8, dtype=torch.bool, device=device)
    strided[::2] = flags
    out = op.call(kernel, move(inputs, device), mine, slots.to(device), has_initial_state=strided[::2])
    bounds = op.bounds(torch.float32, torch.float32)
    assert_close(out, expected[0], bounds[0], "output")
    assert_close(mine, expected[1], bounds[1], "pool")


@pytest.mark.parametrize("mode", MODES)
def test_out_slots_name_where_the_state_goes(kernel, device, mode):
    """The slots read are unchanged, an out slot of -1 keeps the output and drops the state, a padding row stays one"""
    op = RuleOp(mode)
    inputs, pool = op.inputs(4, 3), op.pool(10)
    slots, out_slots = torch.tensor([0, 1, -1, 2]), torch.tensor([7, -1, 8, 2])
    expected = op.expect(inputs, pool, slots, out_slots=out_slots)
    mine = pool.to(device, copy=True)
    out = op.call(kernel, move(inputs, device), mine, slots.to(device), out_slots=out_slots.to(device))
    bounds = op.bounds(torch.float32, torch.float32)
    assert_close(out, expected[0], bounds[0], "output")
    assert_close(mine, expected[1], bounds[1], "pool")
    assert_zero(out[2], "padding row")
    untouched = [0, 1, 3, 4, 5, 6, 8, 9]
    assert_same(mine[untouched].cpu(), pool[untouched], "other slots")


@pytest.mark.parametrize("pool_dtype", DTYPES, ids=short)
def test_one_pool_for_prefill_and_decode(kernel, device, pool_dtype):
    """one tensor, both layouts, both modes, prefill then decode, other slots unchanged"""
    for layout in ("K-first", "V-first"):
        pool = rule_state(6, dtype=pool_dtype, layout=layout, device=device, slot_padding=16)
        expected = pool.cpu().clone()
        before = pool.clone()
        slots = torch.tensor([4, 1], device=device)
        for step, (mode, tokens) in enumerate((("recurrent", 9), ("chunk", 70), ("auto", 1), ("recurrent", 1))):
            op = RuleOp("recurrent" if mode == "auto" else mode)
            x = rule_inputs(2, tokens, SMALL, seed=10 + step)
            want, expected = op.expect(tuple(x), expected.to(pool_dtype), slots)
            out = kernel.gated_delta_rule(*x.to(device), pool, slots=slots, use_qk_l2norm=True, mode=mode)
            bounds = op.bounds(torch.float32, pool_dtype)
            assert_close(out, want, max(bounds), f"{layout} {mode} output")
            assert_close(pool[slots], expected[slots.cpu()], bounds[1], f"{layout} {mode} state")
        assert_same(pool[[0, 2, 3, 5]], before[[0, 2, 3, 5]], "other slots")
