# SPDX-License-Identifier: Apache-2.0
"""gated_delta_step: the bits of the separate ops, every layout of a layer's projections, memories where they lie."""

from typing import NamedTuple

import pytest
import torch

from . import oracle
from .helpers import (
    DTYPES,
    QWEN,
    SENTINEL,
    SMALL,
    Guarded,
    Shape,
    assert_close,
    assert_same,
    assert_zero,
    normal,
    rule_state,
    short,
    step_expectation,
    step_weights,
)

FLOAT, BFLOAT, HALF = DTYPES


class Case(NamedTuple):
    """One call; what is not named is usual: Qwen's conventions, one token, window W - 1, no bias, K-first."""

    shape: Shape = SMALL
    tokens: int = 1
    dtype: torch.dtype = BFLOAT
    state: torch.dtype = FLOAT
    window: torch.dtype = BFLOAT
    keeps_width: bool = False
    width: int = 4
    bias: bool = False
    v_first: bool = False
    interleaved: bool = False
    activation: str = "silu"
    norm_first: bool = True
    neg_eigval: bool = False
    slots: tuple = (3, -1, 0, 7, 9, 5)
    pool: int = 8
    weights: torch.dtype = FLOAT

    def __str__(self):
        defaults = Case()
        told = [f"{name}={short(x) or x}" for name, x in self._asdict().items() if x != getattr(defaults, name)]
        return ",".join(told).replace(" ", "") or "usual"


def projections(case, device, seed=0):
    """(mixed_qkv, z, a, b) in plain order, each a slice of a wider row with NaN around it."""
    Hk, Hv, K, V = case.shape
    rows, T = len(case.slots), case.tokens

    def cut(*size, seed):
        wide = torch.full((rows, T, size[-1] + 16), float("nan"), device=device, dtype=case.dtype)
        wide[..., 8:-8] = normal(rows, T, size[-1], seed=seed, dtype=case.dtype, device=device)
        return wide[..., 8:-8]

    mixed, z = cut(2 * Hk * K + Hv * V, seed=seed), cut(Hv * V, seed=seed + 1).unflatten(-1, (Hv, V))
    return mixed, z, cut(Hv, seed=seed + 2), cut(Hv, seed=seed + 3)


def interleave(case, mixed, z, a, b):
    """The same projections as Qwen3-Next emits them."""
    Hk, Hv, K, V = case.shape
    q, k, v = mixed.split([Hk * K, Hk * K, Hv * V], -1)
    parts = [x.unflatten(-1, (Hk, -1)) for x in (q, k, v, z.flatten(2))]
    gates = [x.unflatten(-1, (Hk, -1)) for x in (b, a)]
    return torch.cat(parts, -1).flatten(2), None, None, torch.cat(gates, -1).flatten(2)


def memories(case, device):
    Hk, Hv, K, V = case.shape
    window = normal(case.pool, 2 * Hk * K + Hv * V, case.width - (not case.keeps_width), seed=7, dtype=case.window)
    layout = "V-first" if case.v_first else "K-first"
    return window.to(device), rule_state(case.pool, case.shape, dtype=case.state, layout=layout, device=device,
                                         slot_padding=16)  # fmt: skip


def arguments(case, device):
    weights = step_weights(case.shape, device, case.width, case.bias, case.weights)
    index = torch.tensor(case.slots, dtype=torch.int64, device=device)
    options = {"activation": case.activation, "norm_before_gate": case.norm_first, "allow_neg_eigval": case.neg_eigval}
    return {**weights, **options, "num_key_heads": case.shape.Hk, "eps": 1e-6, "slots": index}


def separate_ops(kernel, case, mixed, z, a, b, window, state, options):
    """The chain that the step fuses; o stays float32 up to the norm."""
    Hk, Hv, K, V = case.shape
    weight, bias, slots = options["conv_weight"], options["conv_bias"], options["slots"]
    y = kernel.causal_conv1d_update(mixed.transpose(1, 2), window, weight, bias, "silu", slots=slots).transpose(1, 2)
    q, k, v = y.split([Hk * K, Hk * K, Hv * V], -1)
    q, k, v = q.unflatten(-1, (Hk, K)), k.unflatten(-1, (Hk, K)), v.unflatten(-1, (Hv, V))
    gates = {"allow_neg_eigval": case.neg_eigval}
    g, beta = kernel.gated_delta_gates(a, b, options["A_log"], options["dt_bias"], **gates)
    o = torch.empty(v.shape, device=v.device)
    kernel.gated_delta_rule(q, k, v, g, beta, state, use_qk_l2norm=True, mode="recurrent", slots=slots, out=o)
    norm = {"activation": case.activation, "norm_before_gate": case.norm_first}
    return kernel.rms_norm_gated(o, z, options["norm_weight"], options["eps"], **norm).to(case.dtype)


WIDE = Shape(1, 3, 128, 128)
CASES = [
    Case(),
    *(Case(dtype=dtype, state=state, window=dtype) for dtype in DTYPES for state in DTYPES),
    Case(window=FLOAT),
    Case(dtype=FLOAT, window=HALF),
    Case(keeps_width=True),
    Case(keeps_width=True, width=2),
    Case(width=2),
    Case(width=3, bias=True),
    Case(bias=True, weights=BFLOAT),
    Case(weights=HALF, dtype=HALF),
    Case(v_first=True),
    Case(v_first=True, state=BFLOAT),
    Case(interleaved=True),
    Case(activation="sigmoid"),
    Case(norm_first=False),
    Case(norm_first=False, activation="sigmoid", neg_eigval=True),
    *(Case(tokens=tokens, v_first=v_first, state=state) for tokens, v_first, state in
      ((2, False, FLOAT), (3, True, BFLOAT), (5, False, HALF), (8, True, FLOAT), (8, False, BFLOAT))),
    *(Case(shape=WIDE, v_first=v_first, state=state, keeps_width=keeps) for v_first in (False, True)
      for state, keeps in ((FLOAT, True), (BFLOAT, False), (HALF, True))),
    Case(shape=WIDE, interleaved=True, norm_first=False, bias=True),
    Case(shape=WIDE, dtype=FLOAT, window=FLOAT),
    Case(shape=WIDE, tokens=4, v_first=True),
    *(Case(shape=Shape(*shape)) for shape in
      ((2, 4, 64, 128), (2, 2, 128, 64), (1, 4, 128, 96), (2, 16, 64, 64), (1, 5, 128, 128), (3, 9, 48, 80),
       (2, 2, 16, 16), (1, 2, 8, 8), (1, 1, 1, 1), (1, 3, 100, 72), (1, 2, 256, 256), (1, 64, 32, 16),
       (2, 4, 96, 192))),
    Case(shape=Shape(1, 9, 200, 250), tokens=8, v_first=True),
    Case(slots=(1,)),
    Case(slots=(), tokens=2),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_the_separate_ops(kernel, device, case):
    """Output, window and state; slots that are not named stay as they are"""
    inputs, options = projections(case, device), arguments(case, device)
    chain, fused = memories(case, device), memories(case, device)
    before = [x.clone() for x in fused]
    expected = separate_ops(kernel, case, *inputs, *chain, options)
    if case.interleaved:
        inputs, options = interleave(case, *inputs), {**options, "layout": "interleaved"}
    out = kernel.gated_delta_step(*inputs, *fused, **options)
    assert out.shape == (len(case.slots), case.tokens, case.shape.Hv, case.shape.V) and out.is_contiguous()
    assert_same(out, expected, "output")
    assert_same(fused[0], chain[0], "window")
    assert_same(fused[1], chain[1], "state")
    live = [slot for slot in case.slots if 0 <= slot < case.pool]
    others = [slot for slot in range(case.pool) if slot not in live]
    for x, y in zip(fused, before):
        assert_same(x[others], y[others], "other slots")
    padding = [n for n, slot in enumerate(case.slots) if slot not in live]
    assert_zero(out[padding], "padding rows")
    if live:
        assert not torch.equal(fused[1][live], before[1][live]), "control: the live slots have moved"


@pytest.mark.kernels_ci
@pytest.mark.parametrize("interleaved", (False, True), ids=("qkv", "interleaved"))
@pytest.mark.parametrize("norm_first", (True, False), ids=("norm first", "gate first"))
def test_matches_the_oracle(kernel, device, norm_first, interleaved):
    case = Case(dtype=FLOAT, window=FLOAT, tokens=3, bias=True, norm_first=norm_first, keeps_width=True)
    inputs, options = projections(case, device), arguments(case, device)
    window, state = memories(case, device)
    expected = step_expectation(*inputs, window, state, **options)
    if interleaved:
        inputs, options = interleave(case, *inputs), {**options, "layout": "interleaved"}
    out = kernel.gated_delta_step(*inputs, window, state, **options)
    for mine, theirs, what in zip((out, window, state), expected, ("output", "window", "state")):
        assert_close(mine, theirs, 2e-6, what)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_tokens_at_once_equal_token_by_token(kernel, device, dtype):
    """A float32 state and a window of the input's dtype: any split, same bits"""
    case = Case(dtype=dtype, window=dtype, tokens=7)
    inputs, options = projections(case, device), arguments(case, device)
    whole, parts = memories(case, device), memories(case, device)
    out = kernel.gated_delta_step(*inputs, *whole, **options)
    pieces = []
    for first, last in ((0, 1), (1, 4), (4, 5), (5, 7)):
        pieces.append(kernel.gated_delta_step(*(x[:, first:last] for x in inputs), *parts, **options))
    assert_same(torch.cat(pieces, 1), out, "output")
    assert_same(parts[0], whole[0], "window")
    assert_same(parts[1], whole[1], "state")


@pytest.mark.parametrize("shape", (SMALL, WIDE), ids=str)
def test_views_equal_contiguous_inputs(kernel, device, shape):
    """slices of wider rows, reversed and strided tensors, a window whose channels are contiguous"""
    case = Case(shape=shape, keeps_width=True)
    inputs, options = projections(case, device), arguments(case, device)
    window, state = memories(case, device)
    expected = kernel.gated_delta_step(*(x.contiguous() for x in inputs), window, state, **options)
    turned, strided = memories(case, device)
    turned = turned.transpose(1, 2).contiguous().transpose(1, 2)
    spread = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    odd = {name: torch.stack([x, x], -1)[..., 0] if isinstance(x, torch.Tensor) and x.is_floating_point() else x
           for name, x in options.items()}  # fmt: skip
    index = torch.full((2 * len(case.slots),), 1, device=device)
    index[::2] = options["slots"]
    target = torch.full((*expected.shape, 2), SENTINEL, device=device)
    out = kernel.gated_delta_step(*spread, turned, strided, **{**odd, "slots": index[::2], "out": target[..., 0]})
    assert out.data_ptr() == target.data_ptr()
    assert_same(out.to(case.dtype), expected, "output")
    assert bool((target[..., 1] == SENTINEL).all()), "between the elements of out"
    assert_same(turned, window, "window")
    assert_same(strided, state, "state")


@pytest.mark.parametrize("shape", (SMALL, WIDE, Shape(1, 3, 100, 72)), ids=str)
def test_no_write_lands_outside(kernel, device, shape):
    """guards around out, window and state"""
    case = Case(shape=shape, slots=(0, 1, 2), pool=3)
    inputs, options = projections(case, device), arguments(case, device)
    window, state = memories(case, device)
    guarded = [Guarded(*x.shape, dtype=x.dtype, device=device, fill=x) for x in (window, state)]
    out = Guarded(3, 1, shape.Hv, shape.V, dtype=case.dtype, device=device)
    tensors = [x.tensor for x in guarded]
    assert kernel.gated_delta_step(*inputs, *tensors, **options, out=out.tensor) is out.tensor
    expected = kernel.gated_delta_step(*inputs, window, state, **options)
    assert_same(out.tensor, expected)
    for x in (*guarded, out):
        x.check()


def test_pools_of_different_sizes(kernel, device):
    """A slot that one of the pools lacks is padding for both"""
    case = Case(slots=(5, 2), pool=8)
    inputs, options = projections(case, device), arguments(case, device)
    window, state = memories(case, device)
    for small_window, small_state in ((window[:4], state), (window, state[:4])):
        before = [small_window.clone(), small_state.clone()]
        out = kernel.gated_delta_step(*inputs, small_window, small_state, **options)
        assert_zero(out[0])
        assert bool((out[1] != 0).any())
        assert_same(small_window[3:], before[0][3:])
        assert_same(small_state[3:], before[1][3:])


def test_nan_stays_in_its_row_and_head(kernel, device):
    """a NaN in a value channel reaches its head, one in the gate logits theirs, nothing else"""
    case = Case(shape=WIDE, slots=(0, 1, 2), pool=3)
    clean, options = projections(case, device), arguments(case, device)
    _, Hv, K, V = WIDE
    window, state = memories(case, device)
    expected = kernel.gated_delta_step(*clean, window, state, **options)
    for position, where in ((0, (1, 0, 2 * K + V + 3)), (1, (1, 0, 1, 5)), (2, (1, 0, 1)), (3, (1, 0, 1))):
        inputs = [x.clone() for x in clean]
        inputs[position][where] = float("nan")
        fresh_window, fresh_state = memories(case, device)
        out = kernel.gated_delta_step(*inputs, fresh_window, fresh_state, **options)
        others = [(n, h) for n in range(3) for h in range(Hv) if (n, h) != (1, 1)]
        for n, h in others:
            assert_same(out[n, :, h], expected[n, :, h], f"output of row {n}, head {h}")
            assert_same(fresh_state[n, h], state[n, h], f"state of row {n}, head {h}")
        assert bool(out[1, :, 1].isnan().any()), "control"


def test_beta_is_never_rounded(kernel, device):
    """b = 0.5 in bfloat16, many steps, against the oracle in float64 on the same inputs"""
    case = Case(slots=(0,), pool=1)
    options = arguments(case, device)
    window, state = memories(case, device)
    inputs = projections(case, device)
    inputs[3].fill_(0.5)
    start = state.clone()
    kernel.gated_delta_step(*inputs, window, state, **options)
    state.copy_(start)
    for _ in range(200):
        kernel.gated_delta_step(*inputs, window, state, **options)
    Hk, Hv, K, V = case.shape
    mixed = kernel.causal_conv1d_update(inputs[0].transpose(1, 2), window.clone(), options["conv_weight"], None, "silu")
    q, k, v = mixed.transpose(1, 2).split([Hk * K, Hk * K, Hv * V], -1)
    q, k, v = q.unflatten(-1, (Hk, K)), k.unflatten(-1, (Hk, K)), v.unflatten(-1, (Hv, V))
    g, _ = oracle.gated_delta_gates(inputs[2], inputs[3], options["A_log"], options["dt_bias"])
    beta, expected = torch.sigmoid(torch.full((1, 1, Hv), 0.5, dtype=torch.float64)), start
    repeated = [x.expand(1, 200, *x.shape[2:]).cpu() for x in (q, k, v, g, beta)]
    # The first four outputs saw the older window: from a full window on the tokens are all alike.
    _, expected = oracle.gated_delta_rule(*repeated, start.cpu(), use_qk_l2norm=True)
    assert_close(state, expected, 1e-5)
    rounded = repeated[:4] + [beta.bfloat16().double().expand(1, 200, Hv)]
    _, wrong = oracle.gated_delta_rule(*rounded, start.cpu(), use_qk_l2norm=True)
    with pytest.raises(AssertionError):
        assert_close(wrong, expected, 1e-5)


def test_outputs_do_not_share_storage(kernel, device):
    case = Case()
    inputs, options = projections(case, device), arguments(case, device)
    first = kernel.gated_delta_step(*inputs, *memories(case, device), **options)
    kept = first.clone()
    second = kernel.gated_delta_step(*projections(case, device, seed=50), *memories(case, device), **options)
    assert first.data_ptr() != second.data_ptr()
    assert_same(first, kept)


@pytest.mark.cuda_only
@pytest.mark.parametrize("shape", (SMALL, QWEN), ids=str)
def test_graph_with_fewer_live_rows(kernel, device, shape):
    """captured once, replayed with other slots, no synchronisation"""
    case = Case(shape=shape, slots=tuple(range(8)), pool=9)
    inputs, options = projections(case, device), arguments(case, device)
    slots = options["slots"]
    window, state = memories(case, device)
    out = torch.empty(8, 1, shape.Hv, shape.V, device=device, dtype=case.dtype)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel.gated_delta_step(*inputs, window, state, **options, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.gated_delta_step(*inputs, window, state, **options, out=out)
    start = [x.clone() for x in memories(case, device)]
    for live in range(1, 9):
        slots.copy_(torch.tensor([n if n < live else -1 for n in range(8)]))
        window.copy_(start[0])
        state.copy_(start[1])
        graph.replay()
        eager = [x.clone() for x in start]
        expected = kernel.gated_delta_step(*inputs, *eager, **options)
        assert_same(out, expected, f"output, {live} live rows")
        assert_same(window, eager[0], "window")
        assert_same(state, eager[1], "state")


@pytest.mark.cuda_only
@pytest.mark.parametrize("v_first", (False, True), ids=("K-first", "V-first"))
@pytest.mark.parametrize("rows", (1, 4, 33, 150))
def test_bits_at_every_batch_size(kernel, device, rows, v_first):
    """Qwen's shape, repeatedly: no block may run ahead of another"""
    case = Case(shape=QWEN, slots=tuple(range(rows)), pool=rows, v_first=v_first, keeps_width=True)
    inputs, options = projections(case, device), arguments(case, device)
    start = memories(case, device)
    chain = [x.clone() for x in start]
    expected = separate_ops(kernel, case, *inputs, *chain, options)
    for _ in range(5):
        fused = [x.clone() for x in start]
        assert_same(kernel.gated_delta_step(*inputs, *fused, **options), expected, "output")
        assert_same(fused[0], chain[0], "window")
        assert_same(fused[1], chain[1], "state")
