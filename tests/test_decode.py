# SPDX-License-Identifier: Apache-2.0
"""A few tokens a sequence: whatever kernel takes the call, the bits of the recurrence over a long one."""

import pytest
import torch

from .helpers import DTYPES, Inputs, Shape, assert_same, assert_zero, rule_inputs, rule_state, short

SHAPES = (Shape(1, 2, 128, 128), Shape(2, 2, 64, 64), Shape(1, 3, 128, 96), Shape(1, 4, 64, 40))
# dtype, use_qk_l2norm, tokens of a row
CALLS = (
    (torch.bfloat16, True, 1),
    (torch.float32, False, 3),
    (torch.float16, True, 5),
    (torch.bfloat16, False, 8),
)
LAYOUTS = ("K-first", "V-first")


def run(kernel, x, state, **options):
    return kernel.gated_delta_rule(*x, state, mode="recurrent", **{"use_qk_l2norm": True, **options})


def offsets(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0)


def packed(x, lengths):
    """The first lengths[n] tokens of each row n, end to end."""
    return Inputs(*(torch.cat([part[n, :length] for n, length in enumerate(lengths)])[None] for part in x))


def as_recurrence(kernel, x, state, lengths, *, slots=None, has_initial_state=None, **options):
    """Output [1, total, ...] of the rows, run in one batch with a long row of its own slot; the state in place."""
    N, device = len(lengths), state.device
    long = 8 * (N + 1) + 1
    companion = x.map(lambda part: part[:1, :1].expand(1, long, *part.shape[2:]))
    both = Inputs(*(torch.cat([a, b], 1) for a, b in zip(packed(x, lengths), companion)))
    pool = torch.cat([state, state[:1]])
    if state.stride(-1) != 1:
        pool = torch.cat([state.transpose(-1, -2), state[:1].transpose(-1, -2)]).transpose(-1, -2)
    slots = torch.arange(N, device=device) if slots is None else slots
    all_slots = torch.cat([slots, torch.tensor([len(state)], device=device)])
    flags = None
    if has_initial_state is not None:
        flags = torch.cat([has_initial_state, torch.ones(1, dtype=torch.bool, device=device)])
    out = run(kernel, both, pool, slots=all_slots, has_initial_state=flags,
              cu_seqlens=offsets([*lengths, long], device), **options)  # fmt: skip
    state.copy_(pool[:-1])
    return out[:, :-long]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_tokens_are_the_recurrence(kernel, device, shape, state_dtype, layout):
    for dtype, use_qk_l2norm, tokens in CALLS:
        x = rule_inputs(2, tokens, shape, dtype=dtype, device=device)
        x = x if use_qk_l2norm else x._replace(k=x.k / 8)
        state = rule_state(2, shape, dtype=state_dtype, layout=layout, device=device, slot_padding=64)
        expected_state = state.clone()
        expected = as_recurrence(kernel, x, expected_state, [tokens] * 2, use_qk_l2norm=use_qk_l2norm)
        out = run(kernel, x, state, use_qk_l2norm=use_qk_l2norm)
        assert_same(out.flatten(0, 1), expected[0], f"output of {tokens} tokens")
        assert_same(state, expected_state, f"state after {tokens} tokens")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
def test_ragged_rows_slots_and_fresh_states(kernel, device, state_dtype, layout):
    """Rows of 0 to 21 tokens, few on average; padding slots; dirty slots that are not read"""
    shape, lengths = Shape(2, 4, 128, 128), [3, 0, 21, 1, 8, 2, 9, 0]
    x = rule_inputs(8, 21, shape, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([6, 0, 3, -1, 9, 1, 99, 8], device=device)
    flags = torch.tensor([1, 0, 1, 1, 1, 0, 1, 1], dtype=torch.bool, device=device)
    state = rule_state(10, shape, dtype=state_dtype, layout=layout, device=device)
    state[1] = float("nan")
    expected_state = state.clone()
    expected = as_recurrence(kernel, x, expected_state, lengths, slots=slots, has_initial_state=flags)
    flat = packed(x, lengths)
    tail = flat.map(lambda part: torch.cat([part, torch.full_like(part[:, :2], float("nan"))], 1))
    out = run(kernel, tail, state, slots=slots, has_initial_state=flags, cu_seqlens=offsets(lengths, device))
    assert_same(out[:, :-2], expected, "output")
    assert_zero(out[:, -2:], "tokens of no sequence")
    assert_same(state, expected_state, "state")
    assert_zero(state[0], "a fresh state without tokens")


# the second: more blocks than a GPU holds at once, many times over
@pytest.mark.parametrize("shape, rows", ((Shape(1, 2, 128, 64), 300), (Shape(1, 8, 64, 128), 700)), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
def test_wide_tiles_hold_the_same_bits(kernel, device, state_dtype, layout, shape, rows):
    """Hundreds of rows are cut into wider tiles than one"""
    x = rule_inputs(rows, 1, shape, dtype=torch.bfloat16, device=device)
    state = rule_state(rows, shape, dtype=state_dtype, layout=layout, device=device)
    before = state.clone()
    out = run(kernel, x, state)
    for n in (0, 77, rows - 1):
        alone = before[n : n + 1].clone()
        assert_same(run(kernel, x.rows(slice(n, n + 1)), alone), out[n : n + 1], f"output of row {n}")
        assert_same(alone, state[n : n + 1], f"state of row {n}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_of_any_size_are_one_call(kernel, device, layout):
    shape = Shape(2, 6, 128, 128)
    x = rule_inputs(2, 20, shape, dtype=torch.bfloat16, device=device)
    fresh = rule_state(2, shape, layout=layout, device=device)
    whole_state, state = fresh.clone(), fresh.clone()
    whole = run(kernel, x, whole_state)
    first, pieces = 0, []
    for tokens in (1, 2, 8, 3, 1, 5):
        pieces.append(run(kernel, x.tokens(first, first + tokens), state))
        first += tokens
    assert_same(torch.cat(pieces, 1), whole, "output")
    assert_same(state, whole_state, "state")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
def test_padding_and_fresh_states_of_one_token(kernel, device, state_dtype, shape, layout):
    """A padding row is zeros and writes nothing; a dirty slot is not read"""
    slots, flags = [4, -1, 1, 9, 0], [1, 1, 0, 1, 1]
    x = rule_inputs(5, 1, shape, dtype=torch.bfloat16, device=device)
    pool = rule_state(6, shape, dtype=state_dtype, layout=layout, device=device)
    fresh = rule_state(5, shape, dtype=state_dtype, layout=layout, device=device)
    fresh.copy_(pool[[4, 0, 1, 0, 0]])
    fresh[2] = 0
    pool[1] = float("nan")
    before = pool.clone()
    expected = run(kernel, x, fresh)
    out = run(kernel, x, pool, slots=torch.tensor(slots, device=device),
              has_initial_state=torch.tensor(flags, dtype=torch.bool, device=device))  # fmt: skip
    assert_same(out[[0, 2, 4]], expected[[0, 2, 4]], "output")
    assert_zero(out[[1, 3]], "output of padding")
    assert_same(pool[[4, 1, 0]], fresh[[0, 2, 4]], "states")
    assert_same(pool[[2, 3, 5]], before[[2, 3, 5]], "other slots")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
def test_slot_written_is_not_the_slot_read(kernel, device, state_dtype, layout):
    shape, slots, out_slots = Shape(1, 2, 128, 128), [2, 0, 5], [1, 4, -1]
    x = rule_inputs(3, 1, shape, dtype=torch.bfloat16, device=device)
    pool = rule_state(6, shape, dtype=state_dtype, layout=layout, device=device)
    before, expected = pool.clone(), pool[slots].clone()
    indices = [torch.tensor(index, device=device) for index in (slots, out_slots)]
    out = run(kernel, x, pool, slots=indices[0], out_slots=indices[1])
    assert_same(out, run(kernel, x, expected), "output")
    assert_same(pool[[1, 4]], expected[:2], "slots written")
    assert_same(pool[[0, 2, 3, 5]], before[[0, 2, 3, 5]], "other slots")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_tokens_and_gates(kernel, device, layout):
    """q, k, v as parts of one packed row, gates as columns of one tensor, output strided"""
    Hk, Hv, K, V = shape = Shape(2, 4, 128, 128)
    x = rule_inputs(4, 2, shape, dtype=torch.bfloat16, device=device)
    row = torch.cat([part.flatten(2) for part in x[:3]], -1)
    q, k, v = row.split([Hk * K, Hk * K, Hv * V], -1)
    gates = torch.stack([x.g, x.beta], -1)
    heads = (q.unflatten(2, (Hk, K)), k.unflatten(2, (Hk, K)), v.unflatten(2, (Hv, V)))
    packed_x = Inputs(*heads, *gates.unbind(-1))
    state = rule_state(4, shape, layout=layout, device=device)
    expected_state = state.clone()
    expected = run(kernel, x, expected_state)
    out = torch.zeros(4, 2, Hv, 2 * V, device=device, dtype=torch.bfloat16)
    run(kernel, packed_x, state, out=out[..., ::2])
    assert_same(out[..., ::2], expected, "output")
    assert_zero(out[..., 1::2], "between the outputs")
    assert_same(state, expected_state, "state")
