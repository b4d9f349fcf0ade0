# SPDX-License-Identifier: Apache-2.0
"""The chunk and auto modes in shapes that tensor cores take: errors, bits, and which kernel computes which row.

Where there is no chunk kernel, both modes are the recurrence, and everything here holds for it too.
"""

import math
import re

import pytest
import torch

from . import oracle
from .helpers import (
    DTYPES,
    TENSOR_CORES,
    Guarded,
    Inputs,
    Shape,
    assert_close,
    assert_rule,
    assert_same,
    assert_zero,
    has_chunk_kernel,
    normal,
    rule_inputs,
    rule_state,
    short,
)

NORM = {"use_qk_l2norm": True}
NAN = float("nan")
HALVES = (torch.bfloat16, torch.float16)
each_half = pytest.mark.parametrize("dtype", HALVES, ids=short)
ALL_MODES = ("recurrent", "chunk", "auto")


def run(kernel, x, state, mode, **options):
    """The output; `state` is updated in place."""
    return kernel.gated_delta_rule(*x, state, mode=mode, **{**NORM, **options})


def correlated(x, size=1.0, aligned=False):
    """Keys of `size` that share most of their direction, and queries that share another, or theirs if aligned."""
    q, k = (part.float() for part in x[:2])
    common = k[:, :1] if aligned else q[:, :1]
    return x._replace(q=(common + 0.2 * q).to(x.q.dtype), k=(size * (k[:, :1] + 0.2 * k)).to(x.k.dtype))


def crossover(kernel):
    """The number of tokens from which auto is chunk, as the docstring tells it."""
    return int(re.search(r"sequences\s+of\s+(\d+)\s+tokens or\s+more", kernel.gated_delta_rule.__doc__)[1])


# Errors


@pytest.mark.kernels_ci
@pytest.mark.parametrize("out_dtype", (None, torch.float32), ids=("own", "fp32"))
@pytest.mark.parametrize(
    "keys, slower",
    (("random", 16), ("correlated", 1), ("correlated", 1000), ("shorter", 1000), ("longer", 1000), ("aligned", 1000)),
)
@pytest.mark.parametrize("T", (1024, 4096))
@each_half
def test_error_over_many_tokens(kernel, device, dtype, T, keys, slower, out_dtype):
    """Against float64, output and state; the keys under the usual decay, a slower one, hardly any. Rounding may depend
    on where a key's length lies between powers of two"""
    x = rule_inputs(1, T, TENSOR_CORES, dtype=dtype)
    x = x._replace(g=x.g / slower)
    if keys != "random":
        x = correlated(x, {"shorter": 0.8, "longer": 1.36}.get(keys, 1.0), keys == "aligned")
    state = rule_state(1, TENSOR_CORES)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine, out = state.to(device, copy=True), None
    if out_dtype is not None:
        out = torch.empty(x.v.shape, dtype=out_dtype, device=device)
    out = run(kernel, x.to(device), mine, "chunk", out=out)
    bounds = oracle.rule_bounds(dtype, "chunk", out_dtype=out_dtype)
    correlated_bounds = oracle.ALIGNED_BOUNDS if keys == "aligned" else oracle.CORRELATED_BOUNDS
    bound = bounds[0] if keys == "random" else correlated_bounds[out_dtype and torch.float16 or dtype]
    assert_close(out, expected[0], bound, "output")
    assert_close(mine, expected[1], bounds[1], "state")


@pytest.mark.parametrize("first", (1, 65, 129))
@each_half
def test_every_length(kernel, device, dtype, first):
    """T = 1..200, output and final state for each T"""
    x, state = rule_inputs(1, 200, TENSOR_CORES, dtype=dtype), rule_state(1, TENSOR_CORES)
    mine, fresh = x.to(device), state.to(device, copy=True)
    bounds = oracle.rule_bounds(dtype, "chunk")
    outputs = []
    for T, (o, S) in enumerate(oracle.rule_steps(*x.tokens(0, first + 63 if first < 129 else 200), state, **NORM), 1):
        outputs.append(o)
        if T < first:
            continue
        carried = fresh.clone()
        out = run(kernel, mine.tokens(0, T), carried, "chunk")
        assert_close(out, torch.stack(outputs, 1), bounds[0], f"output of {T} tokens")
        assert_close(carried, S, bounds[1], f"state after {T} tokens")


GATES = {
    "none": lambda g: torch.zeros_like(g),
    "tiny": lambda g: g * 1e-4,
    "-20": lambda g: torch.full_like(g, -20.0),
    "-1e4": lambda g: torch.full_like(g, -1e4),
    "alternating": lambda g: torch.where(torch.arange(g.shape[1])[None, :, None] % 2 == 0, 0.0, -50.0).expand_as(g),
    "-inf": lambda g: torch.where(torch.arange(g.shape[1])[None, :, None] % 100 == 99, -math.inf, g),
}


@pytest.mark.parametrize("regime", GATES)
@pytest.mark.parametrize("domain", ("log", "linear"))
def test_gate_regimes(kernel, device, regime, domain):
    """T = 200 with an initial state"""
    x = rule_inputs(1, 200, TENSOR_CORES, dtype=torch.float16)
    x = x._replace(g=GATES[regime](x.g))
    x = x._replace(g=x.g.exp()) if domain == "linear" else x
    state = rule_state(1, TENSOR_CORES)
    expected = oracle.gated_delta_rule(*x, state, gate_domain=domain, **NORM)
    mine = state.to(device, copy=True)
    out = run(kernel, x.to(device), mine, "chunk", gate_domain=domain)
    assert bool(out.isfinite().all()) and bool(mine.isfinite().all())
    assert_rule(out, mine, expected, torch.float16, "chunk")


@pytest.mark.parametrize("given", ("neither", "g", "beta"))
def test_missing_gates_are_no_decay_and_ones(kernel, device, given):
    x = rule_inputs(1, 130, TENSOR_CORES, dtype=torch.bfloat16, device=device)
    missing = x._replace(g=x.g if given == "g" else None, beta=x.beta if given == "beta" else None)
    full = x._replace(
        g=x.g if given == "g" else torch.zeros_like(x.g), beta=x.beta if given == "beta" else torch.ones_like(x.beta)
    )
    states = [rule_state(1, TENSOR_CORES, device=device) for _ in range(2)]
    assert_same(run(kernel, missing, states[0], "chunk"), run(kernel, full, states[1], "chunk"), "output")
    assert_same(states[0], states[1], "state")


@pytest.mark.parametrize("v_size, state_size", ((1e6, 1.0), (1e30, 1e30), (1e-6, 1e6), (1.0, 1e20), (1e-30, 0.0)))
def test_any_magnitude(kernel, device, v_size, state_size):
    """Operands are float16, yet nothing overflows and nothing small is lost: bfloat16 tokens, fp32 output"""
    x = rule_inputs(1, 150, TENSOR_CORES, dtype=torch.bfloat16)
    x = x._replace(v=(x.v.float() * v_size).bfloat16())
    state = rule_state(1, TENSOR_CORES) * state_size
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine, out = state.to(device, copy=True), torch.empty(x.v.shape, device=device)
    run(kernel, x.to(device), mine, "chunk", out=out)
    assert bool(out.isfinite().all()) and bool(mine.isfinite().all())
    assert_rule(out, mine, expected, torch.bfloat16, "chunk")


@pytest.mark.parametrize("precision", ("fp16", "high"))
@pytest.mark.parametrize("exponent", (29, 40, 60, 110))
def test_a_large_state_that_all_but_vanishes(kernel, device, exponent, precision):
    """A row of 2^exponent that one piece decays by 2^-125.5, and to which nothing is written: more than one factor of
    fp32 lies between what it is kept at before and behind. Whole and split behind that piece"""
    x = rule_inputs(1, 192, TENSOR_CORES, dtype=torch.bfloat16, device=device)
    x = x._replace(k=torch.zeros_like(x.k), v=torch.zeros_like(x.v), g=torch.zeros_like(x.g))
    x.g[:, 3] = -125.5 * math.log(2)
    fresh = 1.5 * 2.0**exponent * torch.ones_like(rule_state(1, TENSOR_CORES, device=device))
    states = [fresh.clone(), fresh.clone()]
    run(kernel, x, states[0], "chunk", scan="off", precision=precision)
    for part in ((0, 64), (64, 192)):
        run(kernel, x.tokens(*part), states[1], "chunk", scan="off", precision=precision)
    assert_close(states[0], fresh.double() * 2.0**-125.5, 1e-4, "state")
    assert_same(states[1], states[0], "state of the split call")


def test_without_l2norm(kernel, device):
    x = rule_inputs(2, 150, TENSOR_CORES, dtype=torch.float16)
    x = x._replace(q=oracle.l2norm(x.q.float()).half(), k=oracle.l2norm(x.k.float()).half())
    state = rule_state(2, TENSOR_CORES)
    expected = oracle.gated_delta_rule(*x, state, scale=-0.25)
    mine = state.to(device, copy=True)
    out = run(kernel, x.to(device), mine, "chunk", scale=-0.25, use_qk_l2norm=False)
    assert_rule(out, mine, expected, torch.float16, "chunk")


TAKEN = (
    Shape(2, 2, 128, 128),
    Shape(2, 6, 128, 128),
    Shape(1, 1, 128, 256),
    Shape(1, 5, 128, 64),
    Shape(1, 2, 128, 192),
    Shape(2, 4, 64, 64),
    Shape(1, 2, 64, 128),
)


@pytest.mark.parametrize("shape", TAKEN, ids=str)
def test_heads_and_values(kernel, device, shape):
    x, state = rule_inputs(2, 100, shape, dtype=torch.float16), rule_state(2, shape)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to(device, copy=True)
    assert_rule(run(kernel, x.to(device), mine, "chunk"), mine, expected, torch.float16, "chunk")


# Slots, sequences, flags: one contract in every mode


@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
@pytest.mark.parametrize("layout", ("K-first", "V-first"))
@pytest.mark.parametrize("mode", ALL_MODES)
def test_rows_of_every_kind_in_one_call(kernel, device, mode, layout, state_dtype):
    """Short and long rows; empty, padding, new ones; slots to read and to write; NaN outside all sequences"""
    lengths = (0, 70, 5, 130, 64, 63, 66, 0)
    offsets = torch.tensor([3] + [3 + sum(lengths[: n + 1]) for n in range(len(lengths))])
    total = int(offsets[-1]) + 7
    x = rule_inputs(1, total, TENSOR_CORES, dtype=torch.float16)
    for part in x:
        part[:, :3] = part[:, int(offsets[-1]) :] = NAN
    pool = rule_state(12, TENSOR_CORES, dtype=state_dtype, layout=layout)
    options = {
        "cu_seqlens": offsets,
        "slots": torch.tensor([4, 9, -1, 0, 11, 2, 12, 7]),
        "out_slots": torch.tensor([4, 8, 3, 0, -1, 2, 5, 6]),
        "has_initial_state": torch.tensor([True, True, True, False, True, False, True, False]),
    }
    expected = oracle.gated_delta_rule_pooled(*x, pool, **options, **NORM)
    mine = rule_state(12, TENSOR_CORES, dtype=state_dtype, layout=layout, device=device)
    out = torch.full(x.v.shape, NAN, dtype=torch.float16, device=device)
    run(kernel, x.to(device), mine, mode, out=out, **{name: value.to(device) for name, value in options.items()})
    assert_rule(out, mine, expected, torch.float16, mode)
    assert_zero(out[:, :3], "tokens before the first sequence")
    assert_zero(out[:, int(offsets[-1]) :], "tokens after the last sequence")
    for n in (2, 6):
        assert_zero(out[:, offsets[n] : offsets[n + 1]], f"padding row {n}")
    untouched = [1, 3, 5, 7, 9, 10, 11]
    assert_same(mine[untouched].cpu(), pool[untouched], "other slots")
    assert_zero(mine[6], "state of an empty new sequence")


@pytest.mark.parametrize("long_rows", ([], [0], [37], [3, 64, 69]), ids=str)
def test_few_long_rows_among_many_short_ones(kernel, device, long_rows):
    """70 packed rows of one token, some of 65 instead: each the bits of the row alone, in auto"""
    lengths = [65 if n in long_rows else 1 for n in range(70)]
    x = rule_inputs(1, sum(lengths) + 2, TENSOR_CORES, dtype=torch.bfloat16, device=device)
    offsets = torch.tensor([sum(lengths[:n]) for n in range(71)], device=device)
    fresh = rule_state(70, TENSOR_CORES, device=device)
    state, out = fresh.clone(), torch.full_like(x.v, NAN)
    run(kernel, x, state, "auto", cu_seqlens=offsets, out=out)
    assert_zero(out[:, -2:], "tokens after the last sequence")
    for n in (0, 1, *long_rows, 69):
        first, alone = int(offsets[n]), fresh[n : n + 1].clone()
        expected = run(kernel, x.tokens(first, first + lengths[n]), alone, "auto")
        assert_same(out[:, first : first + lengths[n]], expected, f"output of row {n}")
        assert_same(state[n : n + 1], alone, f"state of row {n}")
    assert not bool(out.isnan().any())


@pytest.mark.parametrize("mode", ALL_MODES)
def test_no_sequences(kernel, device, mode):
    """cu_seqlens [0]: all tokens are outside, and zero"""
    x = rule_inputs(1, 100, TENSOR_CORES, dtype=torch.bfloat16, device=device)
    out = torch.full_like(x.v, NAN)
    state, offsets = rule_state(0, TENSOR_CORES, device=device), torch.tensor([0], device=device)
    run(kernel, x, state, mode, out=out, cu_seqlens=offsets)
    assert_zero(out)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=short)
def test_writes_only_its_buffers(kernel, device, out_dtype):
    """out and state between guards, at any alignment; a row that ends inside a chunk"""
    x, fresh = rule_inputs(1, 70, TENSOR_CORES, dtype=torch.bfloat16), rule_state(1, TENSOR_CORES)
    expected = oracle.gated_delta_rule(*x, fresh, **NORM)
    for margin in (64, 65):
        out = Guarded(1, 70, 2, 128, dtype=out_dtype, device=device, margin=margin)
        state = Guarded(1, 2, 128, 128, device=device, fill=fresh, margin=margin)
        run(kernel, x.to(device), state.tensor, "chunk", out=out.tensor)
        bounds = oracle.rule_bounds(torch.bfloat16, "chunk", out_dtype=out_dtype)
        assert_close(out.tensor, expected[0], bounds[0], "output")
        assert_close(state.tensor, expected[1], bounds[1], "state")
        out.check()
        state.check()


# Bits


@pytest.mark.parametrize("layout", ("K-first", "V-first"))
@each_half
def test_split_between_pieces(kernel, device, dtype, layout):
    """Whole == split at multiples of 64 (fp32 state); elsewhere a split changes bits where there is a chunk kernel"""
    x = rule_inputs(2, 333, TENSOR_CORES, dtype=dtype, device=device)
    sizes = torch.exp2(torch.floor(normal(2, 333, 1, 1, seed=9) * 4)).to(device)
    x = x._replace(v=(x.v.float() * sizes).to(dtype))  # so that the range guard's exponents differ from piece to piece
    fresh = rule_state(2, TENSOR_CORES, layout=layout, device=device)

    def pieces(*cuts):
        state, bounds = fresh.clone(), (0, *cuts, 333)
        outputs = [run(kernel, x.tokens(*part), state, "chunk", scan="off") for part in zip(bounds[:-1], bounds[1:])]
        return torch.cat(outputs, 1), state

    whole, whole_state = pieces()
    for cuts in ((64,), (128,), (320,), (64, 128, 192, 256, 320)):
        out, state = pieces(*cuts)
        assert_same(out, whole, f"output split at {cuts}")
        assert_same(state, whole_state, f"state split at {cuts}")
    same = torch.equal(pieces(50)[1], whole_state)
    assert same != has_chunk_kernel(kernel, device), "control: 50 is inside a piece"


def test_split_of_rows_at_the_lowest_exponent(kernel, device):
    """Tiny elements of a tiny row, which lose digits in fp16, lose the same ones in a call that starts there"""
    x = rule_inputs(1, 128, TENSOR_CORES, dtype=torch.bfloat16, device=device)
    x = x._replace(**{name: torch.zeros_like(getattr(x, name)) for name in ("q", "k", "v", "g")})
    x.k[:, 0, :, 0], x.v[:, 0], x.beta[:, 0] = 1, 1.5 * 2.0**-97, 2  # S[0] is twice that
    x.k[:, 1, :, 1], x.v[:, 1], x.beta[:, 1] = 1, 87 * 2.0**-124, 1
    x.q[..., 1] = 1
    outs = [torch.empty(x.v.shape, device=device) for _ in range(2)]
    states = [torch.zeros_like(rule_state(1, TENSOR_CORES, device=device)) for _ in range(2)]
    run(kernel, x, states[0], "chunk", scan="off", out=outs[0])
    for first in (0, 64):
        run(kernel, x.tokens(first, first + 64), states[1], "chunk", scan="off", out=outs[1][:, first : first + 64])
    assert bool((outs[0][:, 64:] > 0).all()), "control: q reads the tiny elements"
    assert_same(outs[0], outs[1], "output")
    assert_same(states[0], states[1], "state")


@pytest.mark.parametrize("mode", ("chunk", "auto"))
@each_half
def test_batch_row_is_the_row_alone(kernel, device, dtype, mode):
    """Dense rows of a batch, packed sequences and slots in any order: each the bits of the row alone"""
    lengths = (10, 130, 64, 0, 63, 65)
    rows = len(lengths)
    x = rule_inputs(1, sum(lengths), TENSOR_CORES, dtype=dtype, device=device)
    offsets = torch.tensor([sum(lengths[:n]) for n in range(rows + 1)], device=device)
    fresh = rule_state(rows, TENSOR_CORES, device=device)
    slots = torch.tensor([3, 0, 5, 1, 2, 4], device=device)
    pool = torch.empty_like(fresh)
    pool[slots] = fresh
    out = run(kernel, x, pool, mode, cu_seqlens=offsets, slots=slots)
    for n, length in enumerate(lengths):
        first, alone = int(offsets[n]), fresh[n : n + 1].clone()
        expected = run(kernel, x.tokens(first, first + length), alone, mode)
        assert_same(out[:, first : first + length], expected, f"output of {length} tokens")
        assert_same(pool[slots[n]], alone[0], f"state of {length} tokens")
    dense = rule_inputs(3, 100, TENSOR_CORES, dtype=dtype, device=device)
    states = rule_state(3, TENSOR_CORES, device=device)
    alone = states[1:2].clone()
    out = run(kernel, dense, states, mode)
    assert_same(run(kernel, dense.rows(slice(1, 2)), alone, mode), out[1:2], "output of row 1")
    assert_same(alone, states[1:2], "state of row 1")


@each_half
def test_repeated_runs(kernel, device, dtype):
    shape = Shape(2, 6, 128, 128)
    x, fresh = rule_inputs(3, 150, shape, dtype=dtype, device=device), rule_state(3, shape, device=device)
    state = fresh.clone()
    out = run(kernel, x, state, "chunk")
    for _ in range(20 if device == "cuda" else 2):
        again = fresh.clone()
        assert_same(run(kernel, x, again, "chunk"), out, "output")
        assert_same(again, state, "state")


@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
def test_layouts_hold_the_same_bits(kernel, device, state_dtype):
    """K-first, V-first, padded slots: one result"""
    x = rule_inputs(2, 70, TENSOR_CORES, dtype=torch.bfloat16, device=device)
    plain = rule_state(2, TENSOR_CORES, dtype=state_dtype, device=device)
    layouts = [
        rule_state(2, TENSOR_CORES, dtype=state_dtype, device=device, layout=layout, slot_padding=padding)
        for layout in ("K-first", "V-first")
        for padding in (0, 1, 64)
    ]
    expected = run(kernel, x, plain, "chunk")
    for state in layouts:
        assert_same(run(kernel, x, state, "chunk"), expected, f"output, strides {state.stride()}")
        assert_same(state, plain, f"state, strides {state.stride()}")


# Which kernel


@each_half
def test_auto_changes_over_where_the_docstring_says(kernel, device, dtype):
    """One token fewer: the recurrence's bits; from there on: chunk's. Dense and packed"""
    few = crossover(kernel)
    x = rule_inputs(1, few + 1, TENSOR_CORES, dtype=dtype, device=device)
    fresh = rule_state(1, TENSOR_CORES, device=device)
    for tokens, expected_mode in ((1, "recurrent"), (few - 1, "recurrent"), (few, "chunk"), (few + 1, "chunk")):
        part, results = x.tokens(0, tokens), {}
        for mode in ALL_MODES:
            state = fresh.clone()
            results[mode] = run(kernel, part, state, mode), state
        other_mode = "chunk" if expected_mode == "recurrent" else "recurrent"
        assert_same(results["auto"][0], results[expected_mode][0], f"output of {tokens} tokens")
        assert_same(results["auto"][1], results[expected_mode][1], f"state of {tokens} tokens")
        if has_chunk_kernel(kernel, device):
            assert not torch.equal(results["auto"][1], results[other_mode][1]), "control: the kernels differ"
        state, offsets = fresh.clone(), torch.tensor([0, tokens], device=device)
        packed = run(kernel, x, state, "auto", cu_seqlens=offsets)  # a longer tensor: the host cannot tell
        assert_same(packed[:, :tokens], results["auto"][0], f"packed output of {tokens} tokens")
        assert_same(state, results["auto"][1], f"packed state of {tokens} tokens")


def test_functional_names_choose_the_mode(kernel, device):
    """chunk_gated_delta_rule is auto, fused_recurrent_gated_delta_rule is recurrent"""
    x = rule_inputs(2, 100, TENSOR_CORES, dtype=torch.bfloat16, device=device)
    fresh = rule_state(2, TENSOR_CORES, device=device)
    options = {"g": x.g, "beta": x.beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for name, mode in (("chunk_gated_delta_rule", "auto"), ("fused_recurrent_gated_delta_rule", "recurrent")):
        state = fresh.clone()
        expected = run(kernel, x, state, mode)
        out, final = getattr(kernel, name)(x.q, x.k, x.v, initial_state=fresh, **options)
        assert_same(out, expected, f"output of {name}")
        assert_same(final, state, f"state of {name}")


def shifted(part, elements):
    """A copy of a tensor that begins some elements into its storage."""
    storage = torch.empty(part.numel() + elements, dtype=part.dtype, device=part.device)
    return storage[elements:].view(part.shape).copy_(part)


def spread(part, extra):
    """A copy with `extra` elements behind each token."""
    wide = torch.empty(*part.shape[:2], part[0, 0].numel() + extra, dtype=part.dtype, device=part.device)
    view = wide[..., : part[0, 0].numel()].unflatten(-1, part.shape[2:])
    return view.copy_(part)


NOT_TAKEN = {
    "fp32": (TENSOR_CORES, lambda x: x.map(torch.Tensor.float)),
    "K=96": (Shape(1, 2, 96, 128), None),
    "V=24": (Shape(1, 2, 128, 24), None),
    "V=72": (Shape(1, 2, 128, 72), None),
    "q-address": (TENSOR_CORES, lambda x: x._replace(q=shifted(x.q, 1))),
    "k-stride": (TENSOR_CORES, lambda x: x._replace(k=spread(x.k, 4))),
    "v-dim": (TENSOR_CORES, lambda x: x._replace(v=x.v.transpose(2, 3).contiguous().transpose(2, 3))),
}


@pytest.mark.parametrize("mode", ("chunk", "auto"))
@pytest.mark.parametrize("why", (*NOT_TAKEN, "out-address"))
def test_what_tensor_cores_do_not_take_is_the_recurrences(kernel, device, why, mode):
    """Bit for bit, never an error and never wrong"""
    shape, change = NOT_TAKEN.get(why, (TENSOR_CORES, None))
    x = rule_inputs(2, 80, shape, dtype=torch.bfloat16, device=device)
    x = change(x) if change else x
    states = [rule_state(2, shape, device=device) for _ in range(2)]
    expected = run(kernel, x, states[0], "recurrent")
    out = shifted(torch.empty_like(expected), 1) if why == "out-address" else None
    assert_same(run(kernel, x, states[1], mode, out=out), expected, "output")
    assert_same(states[1], states[0], "state")


def test_aligned_views_are_taken(kernel, device):
    """q, k, v of one projection with 8 elements between its rows: chunk's bits, not the recurrence's"""
    x = rule_inputs(2, 80, TENSOR_CORES, dtype=torch.bfloat16, device=device)
    packed = spread(torch.cat([part.flatten(2) for part in x[:3]], -1)[:, :, None], 8)[:, :, 0]
    q, k, v = packed.split([128, 128, 256], -1)
    views = Inputs(q.unflatten(-1, (1, 128)), k.unflatten(-1, (1, 128)), v.unflatten(-1, (2, 128)), x.g, x.beta)
    assert not views.q.is_contiguous()
    states = [rule_state(2, TENSOR_CORES, device=device) for _ in range(3)]
    out = run(kernel, views, states[0], "chunk")
    assert_same(out, run(kernel, x, states[1], "chunk"), "output")
    assert_same(states[0], states[1], "state")
    run(kernel, x, states[2], "recurrent")
    assert torch.equal(states[0], states[2]) != has_chunk_kernel(kernel, device), "control: which kernel it was"


# NaN, graphs


@pytest.mark.parametrize("which", Inputs._fields)
def test_nan_stays_where_it_is(kernel, device, which):
    """NaN in token 100 of row 1 and value head 1 (or both heads of the key head): its piece and what follows"""
    rows, tokens, at = 3, 150, 100
    x = rule_inputs(1, rows * tokens, Shape(2, 4, 128, 128), dtype=torch.bfloat16, device=device)
    offsets = torch.arange(0, rows * tokens + 1, tokens, device=device)
    fresh = rule_state(rows, Shape(2, 4, 128, 128), device=device)
    clean_state, state = fresh.clone(), fresh.clone()
    clean = run(kernel, x, clean_state, "chunk", cu_seqlens=offsets)
    poisoned = getattr(x, which).clone()
    poisoned[0, tokens + at, 1 if which in "qk" else 3].view(-1)[0] = NAN
    out = run(kernel, x._replace(**{which: poisoned}), state, "chunk", cu_seqlens=offsets)
    heads = slice(2, 4) if which in "qk" else slice(3, 4)
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[0, tokens + at - at % 64 : 2 * tokens, heads] = True
    assert_same(out[~hit], clean[~hit], "everything outside the row's own heads and earlier pieces")
    assert bool(out[0, tokens + at, heads].isnan().any()), "control: the NaN is seen"
    hit_state = torch.zeros_like(state, dtype=torch.bool)
    hit_state[1, heads] = True
    assert_same(state[~hit_state], clean_state[~hit_state], "state")


@pytest.mark.cuda_only
def test_graph_whose_rows_cross_over(kernel, device):
    """Captured once; at replay the lengths on the device say which kernel takes which row"""
    x = rule_inputs(1, 300, TENSOR_CORES, dtype=torch.bfloat16, device=device)
    fresh = rule_state(3, TENSOR_CORES, device=device)
    state, out = fresh.clone(), torch.empty_like(x.v)
    offsets = torch.tensor([0, 100, 200, 300], device=device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(kernel, x, state, "auto", cu_seqlens=offsets, out=out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(kernel, x, state, "auto", cu_seqlens=offsets, out=out)
    for bounds in ([0, 100, 200, 300], [0, 1, 31, 300], [20, 20, 84, 147], [0, 300, 300, 300], [0, 3, 6, 9]):
        offsets.copy_(torch.tensor(bounds))
        state.copy_(fresh)
        out.fill_(NAN)
        graph.replay()
        expected_state = fresh.clone()
        expected = run(kernel, x, expected_state, "auto", cu_seqlens=offsets)
        assert_same(out, expected, f"output with {bounds}")
        assert_same(state, expected_state, f"state with {bounds}")
