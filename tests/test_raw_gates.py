# SPDX-License-Identifier: Apache-2.0
"""Raw gates: a rule that gets a and b in the place of g and beta gives the bits of gated_delta_gates and a call with
its gates, whatever computes it."""

import math

import pytest
import torch

from . import oracle
from .helpers import (
    DTYPES,
    SMALL,
    TENSOR_CORES,
    Shape,
    assert_rule,
    assert_same,
    normal,
    rule_inputs,
    rule_state,
    short,
)

NORM = {"use_qk_l2norm": True}
CALLS = {
    "recurrent": {"mode": "recurrent"},
    "chunk": {"mode": "chunk", "scan": "off"},
    "cut": {"mode": "chunk", "scan": "auto"},
    "high": {"mode": "chunk", "precision": "high"},
    "auto": {"mode": "auto"},
}


def heads_of(Hv, device, dtype=torch.float32):
    """A_log and dt_bias."""
    return normal(Hv, seed=20, dtype=dtype, device=device), normal(Hv, seed=21, dtype=dtype, device=device)


def raw_inputs(B, T, shape, device, *, dtype=torch.bfloat16, gates=torch.float32):
    """q, k, v, a, b: the last two as a projection leaves them, side by side in a row."""
    x = rule_inputs(B, T, shape, dtype=dtype, device=device)
    a, b = normal(B, T, 2 * shape.Hv, seed=22, dtype=gates, device=device).chunk(2, -1)
    return x._replace(g=a, beta=b)


def both(kernel, x, state, A_log, dt_bias, *, allow_neg_eigval=False, **options):
    """Output and state of the raw call, and of the op and a call with its gates."""
    zeros = torch.zeros_like(A_log) if dt_bias is None else dt_bias
    gates = kernel.gated_delta_gates(x.g, x.beta, A_log, zeros, allow_neg_eigval=allow_neg_eigval)
    mine, expected = state.clone(), state.clone()
    raw = {"gate_domain": "raw", "A_log": A_log, "dt_bias": dt_bias, "allow_neg_eigval": allow_neg_eigval}
    out = kernel.gated_delta_rule(*x, mine, **raw, **options, **NORM)
    wanted = kernel.gated_delta_rule(*x[:3], *gates, expected, **options, **NORM)
    return (out, mine), (wanted, expected)


def assert_both_same(results):
    assert_same(results[0][0], results[1][0], "output")
    assert_same(results[0][1], results[1][1], "state")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("T", (1, 3, 70, 200))
def test_bits_are_those_of_the_op_and_the_rule(kernel, device, call, T):
    x, state = raw_inputs(2, T, TENSOR_CORES, device), rule_state(2, TENSOR_CORES, device=device)
    results = both(kernel, x, state, *heads_of(2, device), **CALLS[call])
    assert_both_same(results)
    assert not torch.equal(results[0][1], state), "the state has moved"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("heads", DTYPES, ids=lambda dtype: f"heads_{short(dtype)}")
@pytest.mark.parametrize("gates", DTYPES, ids=lambda dtype: f"a_{short(dtype)}")
def test_any_dtype(kernel, device, call, gates, heads):
    x, state = raw_inputs(1, 65, TENSOR_CORES, device, gates=gates), rule_state(1, TENSOR_CORES, device=device)
    A_log, dt_bias = heads_of(2, device, heads)
    assert_both_same(both(kernel, x, state, A_log, dt_bias, allow_neg_eigval=True, **CALLS[call]))
    assert_both_same(both(kernel, x, state, A_log, None, **CALLS[call]))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", (SMALL, Shape(1, 3, 96, 48), Shape(2, 6, 64, 64), Shape(1, 1, 256, 192)), ids=str)
def test_any_shape(kernel, device, shape, dtype):
    x, state = raw_inputs(2, 40, shape, device, dtype=dtype), rule_state(2, shape, device=device)
    assert_both_same(both(kernel, x, state, *heads_of(shape.Hv, device)))


@pytest.mark.parametrize("call", CALLS)
def test_packed_rows_of_a_pool(kernel, device, call):
    """Rows that the chunk kernels take, rows that they leave, an empty one, padding, tokens of none"""
    x, pool = raw_inputs(1, 260, TENSOR_CORES, device), rule_state(7, TENSOR_CORES, device=device)
    offsets = torch.tensor([0, 100, 100, 107, 171, 250], device=device)
    slots = torch.tensor([5, 0, 3, -1, 2], device=device)
    flags = torch.tensor([True, True, False, True, False], device=device)
    given = {"cu_seqlens": offsets, "slots": slots, "has_initial_state": flags, **CALLS[call]}
    assert_both_same(both(kernel, x, pool, *heads_of(2, device), **given))


def test_a_split_keeps_the_bits(kernel, device):
    x, (A_log, dt_bias) = raw_inputs(1, 20, SMALL, device, dtype=torch.float32), heads_of(4, device)
    raw = {"gate_domain": "raw", "A_log": A_log, "dt_bias": dt_bias, "mode": "recurrent", **NORM}
    whole, split = rule_state(1, device=device), rule_state(1, device=device)
    out = kernel.gated_delta_rule(*x, whole, **raw)
    pieces = [kernel.gated_delta_rule(*x.tokens(*bounds), split, **raw) for bounds in ((0, 1), (1, 8), (8, 20))]
    assert_same(torch.cat(pieces, 1), out, "output")
    assert_same(split, whole, "state")


@pytest.mark.parametrize("call", ("recurrent", "chunk", "high"))
def test_gates_at_the_edges(kernel, device, call):
    """a rate that overflows behind a closed gate, no decay at all, a huge a; a NaN stays in its head"""
    shape = Shape(1, 4, 128, 128)
    x, state = raw_inputs(1, 70, shape, device), rule_state(1, shape, device=device)
    A_log = torch.tensor([100.0, -math.inf, 0.0, 0.0], device=device)
    x.g[..., 0], x.g[..., 2] = -200.0, 1e4
    x.g[:, 5, 3] = math.nan
    results = both(kernel, x, state, A_log, torch.zeros(4, device=device), **CALLS[call])
    assert_both_same(results)
    out, final = results[0]
    assert bool(out[:, :, :3].isfinite().all()) and bool(final[:, :3].isfinite().all())
    assert bool(final[:, 3].isnan().any())


@pytest.mark.parametrize("mode", ("recurrent", "chunk"))
def test_against_the_oracle(kernel, device, mode):
    x, state = raw_inputs(1, 130, TENSOR_CORES, "cpu"), rule_state(1, TENSOR_CORES)
    A_log, dt_bias = heads_of(2, "cpu")
    gates = oracle.gated_delta_gates(x.g, x.beta, A_log, dt_bias)
    expected = oracle.gated_delta_rule(*x[:3], *gates, state, **NORM)
    mine, heads = state.to(device, copy=True), {"A_log": A_log.to(device), "dt_bias": dt_bias.to(device)}
    out = kernel.gated_delta_rule(*x.to(device), mine, gate_domain="raw", mode=mode, **heads, **NORM)
    assert_rule(out, mine, expected, torch.bfloat16, mode)


@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"))
@pytest.mark.parametrize("T", (3, 70))
def test_functional_forms(kernel, device, name, T):
    """flash-linear-attention's keywords, each by itself and both"""
    x, (A_log, dt_bias) = raw_inputs(1, T, TENSOR_CORES, device), heads_of(2, device)
    g, beta = kernel.gated_delta_gates(x.g, x.beta, A_log, dt_bias)
    rule = getattr(kernel, name)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected = rule(*x[:3], g=g, beta=beta, **options)
    decay = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    strength = {"use_beta_sigmoid_in_kernel": True}
    results = [
        rule(*x[:3], g=x.g, beta=beta, **decay, **options),
        rule(*x[:3], g=g, beta=x.beta, **strength, **options),
        rule(*x[:3], g=x.g, beta=x.beta, **decay, **strength, **options),
    ]
    for out, final in results:
        assert_same(out, expected[0], "output")
        assert_same(final, expected[1], "final_state")


def test_reference_is_the_op_and_the_rule(kernel):
    """The plain torch reference: float64, the same in both forms, and connected to A_log"""
    reference = kernel.reference
    x = raw_inputs(1, 9, SMALL, "cpu", dtype=torch.float64, gates=torch.float64)
    A_log, dt_bias = heads_of(4, "cpu", torch.float64)
    gates = reference.gated_delta_gates(x.g, x.beta, A_log, dt_bias, allow_neg_eigval=True)
    states = [rule_state(1, dtype=torch.float64) for _ in range(2)]
    raw = {"gate_domain": "raw", "A_log": A_log, "dt_bias": dt_bias, "allow_neg_eigval": True}
    out = reference.gated_delta_rule(*x, states[0], **raw)
    assert_same(out, reference.gated_delta_rule(*x[:3], *gates, states[1]), "output")
    assert_same(states[0], states[1], "state")
    A_log.requires_grad_()
    options = {"use_gate_in_kernel": True, "A_log": A_log, "use_beta_sigmoid_in_kernel": True}
    out, _ = reference.chunk_gated_delta_rule(*x[:3], g=x.g, beta=x.beta, **options)
    out.sum().backward()
    assert A_log.grad is not None and bool(A_log.grad.isfinite().all())


BAD = {
    "A_log": ({"A_log": None}, "A_log"),
    "A_log's heads": ({"A_log": torch.zeros(3)}, "A_log"),
    "A_log's dims": ({"A_log": torch.zeros(1, 4)}, "A_log"),
    "A_log's dtype": ({"A_log": torch.zeros(4, dtype=torch.int32)}, "A_log"),
    "dt_bias's heads": ({"dt_bias": torch.zeros(5)}, "dt_bias"),
    "no a": ({"g": None}, "g"),
    "A_log of a log decay": ({"gate_domain": "log", "dt_bias": None}, "A_log"),
    "dt_bias of a decay": ({"gate_domain": "linear", "A_log": None}, "dt_bias"),
    "2 sigmoid of a log decay": (
        {"gate_domain": "log", "A_log": None, "dt_bias": None, "allow_neg_eigval": True},
        "allow_neg_eigval",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(kernel, device, case):
    changes, name = BAD[case]
    x, (A_log, dt_bias) = raw_inputs(1, 3, SMALL, device), heads_of(4, device)
    options = {"g": x.g, "gate_domain": "raw", "A_log": A_log, "dt_bias": dt_bias}
    options.update({key: y.to(device) if isinstance(y, torch.Tensor) else y for key, y in changes.items()})
    state = rule_state(1, device=device)
    before = state.clone()
    with pytest.raises(RuntimeError, match=f"gated_delta_rule: {name} "):
        kernel.gated_delta_rule(x.q, x.k, x.v, options.pop("g"), x.beta, state, **options)
    assert_same(state, before, "the state behind the error")


def test_gradients_are_refused(kernel, device):
    x, (A_log, dt_bias) = raw_inputs(1, 3, SMALL, device), heads_of(4, device)
    A_log.requires_grad_()
    with pytest.raises(RuntimeError, match="A_log requires grad"):
        kernel.gated_delta_rule(*x, rule_state(1, device=device), gate_domain="raw", A_log=A_log, dt_bias=dt_bias)
