# SPDX-License-Identifier: Apache-2.0
"""precision="high": float32's digits from the tensor cores; and what only the mma.sync chunk kernel takes.

Outputs are float32 where their error is measured, so that no rounding hides it. On the CPU "chunk" is the recurrence at
both precisions, and everything here holds for it too.
"""

import pytest
import torch

from . import oracle
from .helpers import (
    DTYPES,
    SENTINEL,
    TENSOR_CORES,
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

HIGH = {"mode": "chunk", "precision": "high", "use_qk_l2norm": True}
NORMAL = {"mode": "chunk", "use_qk_l2norm": True}
PRECISIONS = {"high": HIGH, "fp16": NORMAL}
HIGH_BOUND = 2e-5  # of output and state, relative RMS against float64
NAN = float("nan")
HALVES = (torch.bfloat16, torch.float16)
each_half = pytest.mark.parametrize("dtype", HALVES, ids=short)
each_precision = pytest.mark.parametrize("precision", PRECISIONS)


def run(kernel, x, state, **options):
    """The output in float32; `state` is updated in place."""
    out = torch.empty(x.v.shape, dtype=torch.float32, device=x.v.device)
    return kernel.gated_delta_rule(*x, state, out=out, **{**HIGH, **options})


def correlated(x):
    """Keys and queries that share most of their direction."""
    q, k = ((part[:, :1] + 0.2 * part.float()).to(part.dtype) for part in x[:2])
    return x._replace(q=q, k=k)


def assert_high(out, state, expected):
    assert_close(out, expected[0], HIGH_BOUND, "output")
    assert_close(state, expected[1], HIGH_BOUND, "state")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("keys", ("random", "correlated", "slow decay"))
@each_half
def test_error_over_many_tokens(kernel, device, dtype, keys):
    """T = 1024"""
    x = rule_inputs(1, 1024, TENSOR_CORES, dtype=dtype)
    x = correlated(x) if keys == "correlated" else x
    x = x._replace(g=x.g / 16) if keys == "slow decay" else x
    state = rule_state(1, TENSOR_CORES)
    expected = oracle.gated_delta_rule(*x, state, use_qk_l2norm=True)
    mine = state.to(device, copy=True)
    assert_high(run(kernel, x.to(device), mine), mine, expected)


@each_half
def test_16_bit_output_is_rounded_once(kernel, device, dtype):
    """And every element is the float32 output's, rounded"""
    x, fresh = rule_inputs(1, 150, TENSOR_CORES, dtype=dtype, device=device), rule_state(1, TENSOR_CORES, device=device)
    wide = run(kernel, x, fresh.clone())
    assert_same(kernel.gated_delta_rule(*x, fresh.clone(), **HIGH), wide.to(dtype))


@pytest.mark.parametrize("first", (1, 65, 129))
def test_every_length(kernel, device, first):
    """T = 1..200, beside the recurrence"""
    x, fresh = rule_inputs(1, 200, TENSOR_CORES, dtype=torch.bfloat16, device=device), rule_state(1, TENSOR_CORES)
    fresh = fresh.to(device)
    for T in range(first, first + (64 if first < 129 else 72)):
        states = [fresh.clone() for _ in range(2)]
        part = x.tokens(0, T)
        expected = run(kernel, part, states[0], mode="recurrent")
        out = run(kernel, part, states[1])
        assert_close(out, expected, HIGH_BOUND, f"output of {T} tokens")
        assert_close(states[1], states[0], HIGH_BOUND, f"state after {T} tokens")


@pytest.mark.parametrize("size", (0.25, 1.0, 3.0))
def test_keys_outside_the_contraction_region(kernel, device, size):
    """64 tokens without l2norm, beta |k|^2 up to 16, no decay: the state grows by orders of magnitude"""
    x = rule_inputs(1, 64, TENSOR_CORES, dtype=torch.bfloat16)
    k = (oracle.l2norm(x.k.float()) * (1 + size)).bfloat16()
    x = x._replace(k=k, g=torch.zeros_like(x.g), beta=0.9 + 0.1 * x.beta)
    assert float((x.beta.amin() * (k.float() ** 2).sum(-1).amin())) > (1.3 if size < 1 else 2)
    state = rule_state(1, TENSOR_CORES)
    expected = oracle.gated_delta_rule(*x, state)
    mine = state.to(device, copy=True)
    assert_high(run(kernel, x.to(device), mine, use_qk_l2norm=False), mine, expected)


@pytest.mark.parametrize("k_size, q_size, v_size", ((1e-3, 1e4, 1.0), (1.0, 1e30, 1e-30), (0.5, 1e-30, 1e30)))
def test_any_magnitude(kernel, device, k_size, q_size, v_size):
    """bfloat16 holds what float16 does not: q, k, v of any size without l2norm"""
    x = rule_inputs(1, 150, TENSOR_CORES, dtype=torch.bfloat16)
    q, k = (oracle.l2norm(part.float()) for part in x[:2])
    x = x._replace(q=(q * q_size).bfloat16(), k=(k * k_size).bfloat16(), v=(x.v.float() * v_size).bfloat16())
    state = rule_state(1, TENSOR_CORES) * v_size
    expected = oracle.gated_delta_rule(*x, state)
    mine = state.to(device, copy=True)
    assert_high(run(kernel, x.to(device), mine, use_qk_l2norm=False), mine, expected)


@pytest.mark.parametrize("every", (3, 20))
def test_tokens_that_forget_everything(kernel, device, every):
    """Sums of log decays of thousands, whose differences keep their digits"""
    x = rule_inputs(1, 200, TENSOR_CORES, dtype=torch.float16)
    x.g[:, ::every] = -1e4
    state = rule_state(1, TENSOR_CORES)
    expected = oracle.gated_delta_rule(*x, state, use_qk_l2norm=True)
    mine = state.to(device, copy=True)
    assert_high(run(kernel, x.to(device), mine), mine, expected)


@each_half
def test_split_between_pieces(kernel, device, dtype):
    x = rule_inputs(2, 333, TENSOR_CORES, dtype=dtype, device=device)
    sizes = torch.exp2(torch.floor(normal(2, 333, 1, 1, seed=9) * 4)).to(device)
    x = x._replace(v=(x.v.float() * sizes).to(dtype))
    fresh = rule_state(2, TENSOR_CORES, device=device)
    whole_state = fresh.clone()
    whole = run(kernel, x, whole_state, scan="off")
    for cuts in ((64,), (128, 320)):
        state, bounds = fresh.clone(), (0, *cuts, 333)
        parts = [run(kernel, x.tokens(*part), state, scan="off") for part in zip(bounds[:-1], bounds[1:])]
        assert_same(torch.cat(parts, 1), whole, f"output split at {cuts}")
        assert_same(state, whole_state, f"state split at {cuts}")


def test_split_of_a_state_that_is_in_range_as_it_comes(kernel, device):
    """Every row's largest element in [8, 128): a start from there takes the exponents of a run that came by"""
    x = rule_inputs(1, 128, TENSOR_CORES, dtype=torch.float16, device=device)
    x = x._replace(v=x.v * 16, g=torch.zeros_like(x.g))
    fresh = rule_state(1, TENSOR_CORES, device=device) * 32
    for options in PRECISIONS.values():
        whole, pieces = fresh.clone(), fresh.clone()
        out = run(kernel, x, whole, **options)
        parts = [run(kernel, x.tokens(first, first + 64), pieces, **options) for first in (0, 64)]
        assert_same(torch.cat(parts, 1), out, "output")
        assert_same(pieces, whole, "state")


@each_precision
@pytest.mark.parametrize("layout", ("K-first", "V-first"))
@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
def test_rows_of_every_kind_in_one_call(kernel, device, precision, layout, state_dtype):
    """Empty, short, long, padding, new rows; NaN outside the sequences and in slots that nobody reads; V of 80"""
    shape = Shape(1, 2, 64, 80)
    lengths = (0, 70, 5, 130, 64, 63, 66)
    offsets = torch.tensor([3] + [3 + sum(lengths[: n + 1]) for n in range(len(lengths))])
    x = rule_inputs(1, int(offsets[-1]) + 7, shape, dtype=torch.float16)
    for part in x:
        part[:, :3] = part[:, int(offsets[-1]) :] = NAN
    pool = rule_state(12, shape, dtype=state_dtype, layout=layout)
    options = {
        "cu_seqlens": offsets,
        "slots": torch.tensor([4, 9, -1, 0, 11, 2, 12]),
        "out_slots": torch.tensor([4, 8, 3, 0, -1, 2, 5]),
        "has_initial_state": torch.tensor([True, True, True, False, True, False, True]),
    }
    expected = oracle.gated_delta_rule_pooled(*x, pool, use_qk_l2norm=True, **options)
    mine = rule_state(12, shape, dtype=state_dtype, layout=layout, device=device)
    unread = [0, 1, 2, 3, 5, 6, 7, 8, 10]  # 0 and 2 belong to new rows
    mine[unread] = NAN
    out = torch.full(x.v.shape, NAN, dtype=torch.float32, device=device)
    arguments = {name: value.to(device) for name, value in options.items()}
    kernel.gated_delta_rule(*x.to(device), mine, out=out, **PRECISIONS[precision], **arguments)
    written = [0, 2, 4, 8]
    bounds = oracle.rule_bounds(torch.float16, "chunk", state_dtype, torch.float32)
    assert_close(out, expected[0], HIGH_BOUND if precision == "high" else bounds[0], "output")
    state_bound = HIGH_BOUND if precision == "high" and state_dtype == torch.float32 else bounds[1]
    assert_close(mine[written], expected[1][written], state_bound, "states")
    assert_zero(out[:, :3], "tokens before the first sequence")
    assert_zero(out[:, int(offsets[-1]) :], "tokens after the last sequence")
    for n in (2, 6):
        assert_zero(out[:, offsets[n] : offsets[n + 1]], f"padding row {n}")
    assert bool(mine[[1, 3, 5, 6, 7, 10]].isnan().all()), "slots that nobody names"
    assert_same(mine[[9, 11]].cpu(), pool[[9, 11]], "slots that are only read")


@pytest.mark.parametrize("mode", ("chunk", "auto"))
def test_batch_row_is_the_row_alone(kernel, device, mode):
    lengths = (10, 130, 64, 0, 65)
    offsets = torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], device=device)
    x = rule_inputs(1, sum(lengths), TENSOR_CORES, dtype=torch.bfloat16, device=device)
    fresh = rule_state(len(lengths), TENSOR_CORES, device=device)
    states = fresh.clone()
    out = run(kernel, x, states, mode=mode, cu_seqlens=offsets)
    for n, length in enumerate(lengths):
        first, alone = int(offsets[n]), fresh[n : n + 1].clone()
        expected = run(kernel, x.tokens(first, first + length), alone, mode=mode)
        assert_same(out[:, first : first + length], expected, f"output of {length} tokens")
        assert_same(states[n], alone[0], f"state of {length} tokens")


@each_precision
@pytest.mark.parametrize("value_dim", (16, 48, 96))
@pytest.mark.parametrize("key_dim", (64, 128))
def test_columns_in_sixteens(kernel, device, key_dim, value_dim, precision):
    shape = Shape(2, 4, key_dim, value_dim)
    x, state = rule_inputs(2, 100, shape, dtype=torch.float16), rule_state(2, shape)
    expected = oracle.gated_delta_rule(*x, state, use_qk_l2norm=True)
    mine = state.to(device, copy=True)
    out = run(kernel, x.to(device), mine, **PRECISIONS[precision])
    if precision == "high":
        assert_high(out, mine, expected)
    else:
        assert_rule(out, mine, expected, torch.float16, "chunk")
    if has_chunk_kernel(kernel, device):
        exact = state.to(device, copy=True)
        run(kernel, x.to(device), exact, mode="recurrent")
        assert not torch.equal(exact, mine), "control: it is the chunk kernel"


@each_precision
@pytest.mark.parametrize("every, tokens", ((64, 300), (128, 256), (64, 63)))
def test_checkpoint_is_the_state_of_a_prefill_stopped_there(kernel, device, every, tokens, precision):
    """Bitwise, the last token included; the checkpoints' own dtype, from the accumulator of a 16-bit pool"""
    options = PRECISIONS[precision]
    x = rule_inputs(2, tokens, TENSOR_CORES, dtype=torch.bfloat16, device=device)
    fresh = rule_state(2, TENSOR_CORES, dtype=torch.bfloat16, device=device)
    count = tokens // every
    checkpoints = rule_state(2 * count + 1, TENSOR_CORES, device=device).fill_(SENTINEL)
    keeping = {"checkpoint_every": every, "checkpoints": checkpoints}
    out = run(kernel, x, fresh.clone(), **keeping, **options)
    assert bool((checkpoints[2 * count :] == SENTINEL).all()), "rows of no checkpoint"
    for i in range(count):
        stopped, done = fresh.float(), (i + 1) * every
        part = run(kernel, x.tokens(0, done), stopped, **options)
        assert_same(part, out[:, :done], f"output up to {done}")
        for n in range(2):
            assert_same(checkpoints[n * count + i], stopped[n], f"sequence {n}, checkpoint {i}")


def test_ragged_checkpoints(kernel, device):
    lengths = (130, 0, 64, 63, 200)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=device)
    x = rule_inputs(1, sum(lengths), TENSOR_CORES, dtype=torch.bfloat16, device=device)
    pool = rule_state(5, TENSOR_CORES, device=device)
    fresh, starts = pool.clone(), torch.tensor([4, 0, 1, 0, 7], device=device)
    checkpoints = rule_state(8, TENSOR_CORES, device=device).fill_(SENTINEL)
    options = {"cu_seqlens": offsets, "checkpoint_starts": starts, "checkpoint_every": 64, "checkpoints": checkpoints}
    run(kernel, x, pool, **options)
    for row, n, tokens in ((4, 0, 64), (5, 0, 128), (1, 2, 64), (7, 4, 64)):
        state, first = fresh[n : n + 1].clone(), int(offsets[n])
        run(kernel, x.tokens(first, first + tokens), state)
        assert_same(checkpoints[row], state[0], f"sequence {n} after {tokens}")
    assert bool((checkpoints[[0, 2, 3, 6]] == SENTINEL).all()), "other rows"


def test_nan_stays_in_its_column(kernel, device):
    """Of v: one column of its head; of k: the heads that use it"""
    shape = Shape(2, 4, 128, 64)
    x, fresh = rule_inputs(1, 150, shape, dtype=torch.bfloat16, device=device), rule_state(1, shape, device=device)
    clean_state = fresh.clone()
    clean = run(kernel, x, clean_state)
    for name in ("v", "k"):
        poisoned, state = getattr(x, name).clone(), fresh.clone()
        poisoned[0, 100, 1, 5] = NAN
        out = run(kernel, x._replace(**{name: poisoned}), state)
        hit = torch.zeros_like(state, dtype=torch.bool)
        hit[0, *((1, slice(None), 5) if name == "v" else (slice(2, 4),))] = True
        assert_same(state[~hit], clean_state[~hit], f"state with NaN in {name}")
        assert_same(out[:, :64], clean[:, :64], f"output of the piece before, NaN in {name}")
        assert bool(state[hit].isnan().any()), "control"


def test_high_precision_is_the_recurrence_where_there_is_no_chunk_kernel(kernel, device):
    """On the CPU, bit for bit; elsewhere the two differ"""
    x, fresh = rule_inputs(1, 100, TENSOR_CORES, dtype=torch.bfloat16, device=device), rule_state(1, TENSOR_CORES)
    states = [fresh.to(device, copy=True) for _ in range(2)]
    out, exact = run(kernel, x, states[0]), run(kernel, x, states[1], mode="recurrent")
    if not has_chunk_kernel(kernel, device):
        assert_same(out, exact, "output")
        assert_same(states[0], states[1], "state")
    else:
        assert not torch.equal(states[0], states[1]), "control: it is the chunk kernel"
