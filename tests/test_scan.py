# SPDX-License-Identifier: Apache-2.0
"""The two-level scan of the chunk kernel, scan="auto": long sequences of few heads, cut into segments. And the order in
which ragged rows are taken.

Where there is no chunk kernel nothing is cut, and everything here holds for the recurrence too.
"""

import pytest
import torch

from . import oracle
from .helpers import (
    TENSOR_CORES,
    Inputs,
    Shape,
    assert_close,
    assert_rule,
    assert_same,
    assert_zero,
    cuts_rows,
    rule_inputs,
    rule_state,
    short,
)

NORM = {"use_qk_l2norm": True}
NAN = float("nan")
LONG = 3072  # tokens of two heads that are cut
each_half = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=short)


def run(kernel, x, state, scan="auto", **options):
    """The output; `state` is updated in place."""
    return kernel.gated_delta_rule(*x, state, **{"mode": "chunk", "scan": scan, **NORM, **options})


# What comes to a segment from those before: all of it but what the segment's own tokens write over, or little.
MEMORY = {
    "long": lambda x: x._replace(g=x.g / 256, beta=x.beta / 16),
    "delta": lambda x: x._replace(g=torch.zeros_like(x.g)),
    "short": lambda x: x,
}


@pytest.mark.parametrize("memory", MEMORY)
@each_half
def test_error_of_a_scan(kernel, device, dtype, memory):
    """Against float64, within chunk mode's bounds; and the bits are not those of scan="off" where rows are cut, unless
    nothing is left of what comes to the last segment"""
    x, state = MEMORY[memory](rule_inputs(1, LONG, TENSOR_CORES, dtype=dtype)), rule_state(1, TENSOR_CORES)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine, whole = state.to(device, copy=True), state.to(device, copy=True)
    assert_rule(run(kernel, x.to(device), mine), mine, expected, dtype, "chunk")
    run(kernel, x.to(device), whole, "off")
    if memory != "short":
        assert torch.equal(mine, whole) != cuts_rows(kernel, device), "control: the row was cut"


def test_error_of_a_scan_with_correlated_keys(kernel, device):
    x, state = rule_inputs(1, LONG, TENSOR_CORES, dtype=torch.float16), rule_state(1, TENSOR_CORES)
    q, k = ((part[:, :1] + 0.2 * part.float()).half() for part in x[:2])
    x = x._replace(q=q, k=k)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to(device, copy=True)
    out = run(kernel, x.to(device), mine)
    assert_close(out, expected[0], oracle.CORRELATED_BOUNDS[torch.float16], "output")
    assert_close(mine, expected[1], oracle.rule_bounds(torch.float16, "chunk")[1], "state")


@pytest.mark.parametrize(
    "shape", (Shape(1, 1, 64, 64), Shape(1, 1, 64, 192), Shape(1, 1, 128, 64), Shape(1, 2, 128, 192)), ids=str
)
def test_heads_and_values_of_a_scan(kernel, device, shape):
    """Chains of V and of transitions in any proportion; sizes of v from piece to piece"""
    x, state = MEMORY["long"](rule_inputs(1, LONG, shape, dtype=torch.bfloat16)), rule_state(1, shape)
    sizes = torch.exp2(torch.arange(LONG) // 100 % 7 * 3.0 - 9)[None, :, None, None]
    x = x._replace(v=(x.v.float() * sizes).bfloat16())
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to(device, copy=True)
    assert_rule(run(kernel, x.to(device), mine), mine, expected, torch.bfloat16, "chunk")


@each_half
def test_scan_off_and_short_rows_are_whole(kernel, device, dtype):
    """scan="off": any split at a multiple of 64 has the same bits. "auto" with few tokens: the bits of "off" """
    x, fresh = (
        rule_inputs(1, LONG, TENSOR_CORES, dtype=dtype, device=device),
        rule_state(1, TENSOR_CORES, device=device),
    )
    whole, halves = fresh.clone(), fresh.clone()
    out = run(kernel, x, whole, "off")
    parts = [run(kernel, x.tokens(*part), halves, "off") for part in ((0, 1088), (1088, LONG))]
    assert_same(torch.cat(parts, 1), out, "output of halves")
    assert_same(halves, whole, "state of halves")
    off, auto = fresh.clone(), fresh.clone()
    few = x.tokens(0, 700)
    assert_same(run(kernel, few, auto), run(kernel, few, off, "off"), "output of few tokens")
    assert_same(auto, off, "state of few tokens")


@pytest.mark.parametrize("layout", ("K-first", "V-first"))
def test_repeated_scans(kernel, device, layout):
    """Equal bits, in place: the last segment writes the state that the first one starts from"""
    x = MEMORY["long"](rule_inputs(1, LONG, TENSOR_CORES, dtype=torch.bfloat16, device=device))
    fresh = rule_state(1, TENSOR_CORES, layout=layout, device=device)
    state = fresh.clone()
    out = run(kernel, x, state)
    for _ in range(20 if device == "cuda" else 2):
        again = fresh.clone()
        assert_same(run(kernel, x, again), out, "output")
        assert_same(again, state, "state")


@pytest.mark.parametrize("state_dtype", (torch.float32, torch.bfloat16), ids=short)
@pytest.mark.parametrize("mode", ("chunk", "auto"))
def test_ragged_scan(kernel, device, mode, state_dtype):
    """Rows of one segment and of many, empty, padding, new; slots to read and to write; NaN outside all sequences"""
    lengths = (5000, 0, 20, 3100, 1700, 200)
    offsets = torch.tensor([7 + sum(lengths[:n]) for n in range(len(lengths) + 1)])
    total = int(offsets[-1]) + 70
    shape = Shape(1, 1, 128, 64)
    x = MEMORY["long"](rule_inputs(1, total, shape, dtype=torch.float16))
    for part in x:
        part[:, :7] = part[:, int(offsets[-1]) :] = NAN
    pool = rule_state(9, shape, dtype=state_dtype)
    options = {
        "slots": torch.tensor([3, 1, 0, 8, -1, 2]),
        "out_slots": torch.tensor([4, 1, 0, 9, 5, 2]),
        "has_initial_state": torch.tensor([True, True, True, True, True, False]),
        "cu_seqlens": offsets,
    }
    clean = Inputs(*(part.nan_to_num() for part in x))
    expected = oracle.gated_delta_rule_pooled(*clean, pool, **options, **NORM)
    mine = pool.to(device, copy=True)
    moved = {name: tensor.to(device) for name, tensor in options.items()}
    out = run(kernel, x.to(device), mine, mode=mode, **moved)
    bounds = oracle.rule_bounds(torch.float16, "chunk", state_dtype)
    assert_close(out, expected[0], bounds[0], "output")
    assert_close(mine, expected[1], bounds[1], "state")
    for slot in (3, 5, 6, 7, 8):
        assert_same(mine[slot].cpu(), pool[slot], f"slot {slot}, which nobody writes")


def test_padding_row_that_would_be_cut(kernel, device):
    """Zeros, the pool stays as it is, and nobody waits for what a padding row never makes"""
    shape = Shape(1, 1, 128, 64)
    x = rule_inputs(1, 4096, shape, dtype=torch.bfloat16, device=device)
    fresh = rule_state(2, shape, device=device)
    state = fresh.clone()
    assert_zero(run(kernel, x, state, slots=torch.tensor([-1], device=device)), "output")
    assert_same(state, fresh, "pool")


@pytest.mark.parametrize("every", (64, 640))
def test_checkpoints_of_a_scan(kernel, device, every):
    """Each close to that of scan="off", which has the bits of a call that ends there"""
    x = MEMORY["long"](rule_inputs(1, LONG, TENSOR_CORES, dtype=torch.bfloat16, device=device))
    fresh = rule_state(1, TENSOR_CORES, device=device)
    kept = {}
    for scan in ("off", "auto"):
        kept[scan] = torch.full((LONG // every, *fresh.shape[1:]), NAN, device=device)
        run(kernel, x, fresh.clone(), scan, checkpoint_every=every, checkpoints=kept[scan])
    for i in range(LONG // every):
        assert_close(kept["auto"][i], kept["off"][i], 1e-3, f"checkpoint {i}")
    stopped = fresh.clone()
    run(kernel, x.tokens(0, 1280), stopped, "off")
    assert_same(kept["off"][1280 // every - 1], stopped[0], "checkpoint after 1280 tokens")


@pytest.mark.parametrize("rows", (2, 31, 32, 70))
def test_rows_in_any_order(kernel, device, rows):
    """Ragged rows are taken longest first; each has the bits of the row alone"""
    lengths = [(37 * n * n + 11 * n) % 150 for n in range(rows)]
    x = rule_inputs(1, sum(lengths) + 3, Shape(1, 1, 128, 64), dtype=torch.bfloat16, device=device)
    offsets = torch.tensor([sum(lengths[:n]) for n in range(rows + 1)], device=device)
    fresh = rule_state(rows, Shape(1, 1, 128, 64), device=device)
    for mode in ("chunk", "auto"):
        state = fresh.clone()
        out = run(kernel, x, state, "off", mode=mode, cu_seqlens=offsets)
        assert bool((out[:, sum(lengths) :] == 0).all()), "tokens outside"
        for n, length in enumerate(lengths):
            first, alone = int(offsets[n]), fresh[n : n + 1].clone()
            expected = run(kernel, x.tokens(first, first + length), alone, "off", mode=mode)
            assert_same(out[:, first : first + length], expected, f"output of row {n}, {mode}")
            assert_same(state[n : n + 1], alone, f"state of row {n}, {mode}")
