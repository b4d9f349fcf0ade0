# SPDX-License-Identifier: Apache-2.0
"""reference.py: itself against the oracle and transformers, in float64 and float32, and its gradients."""

import inspect

import pytest
import torch

from . import oracle
from .helpers import (
    DTYPES,
    SMALL,
    Shape,
    StepOp,
    assert_close,
    assert_rule,
    assert_same,
    assert_zero,
    move,
    normal,
    rule_inputs,
    rule_state,
    short,
)
from .peers import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

NORM = {"use_qk_l2norm": True}
OPS = (
    "gated_delta_rule",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "causal_conv1d",
    "causal_conv1d_update",
    "gated_delta_gates",
    "rms_norm_gated",
    "qk_norm_rope",
    "output_gate",
    "gated_delta_step",
)


@pytest.fixture(scope="module")
def reference(kernel):
    return kernel.reference


@pytest.mark.parametrize("name", OPS)
def test_same_arguments_as_the_op(kernel, reference, name):
    """A reference stands in for its op: same names, same defaults"""
    mine, theirs = inspect.signature(getattr(reference, name)), inspect.signature(getattr(kernel, name))
    assert list(mine.parameters) == list(theirs.parameters)
    for parameter in theirs.parameters.values():
        assert mine.parameters[parameter.name].default == parameter.default, parameter.name


@pytest.mark.parametrize("dtype", (torch.float64, *DTYPES), ids=short)
@pytest.mark.parametrize("ragged", (False, True), ids=("dense", "ragged"))
def test_rule_matches_the_oracle(reference, device, ragged, dtype):
    """With slots, padding, flags and scale; float64 to float64's last digits"""
    x = rule_inputs(1, 40, dtype=dtype) if ragged else rule_inputs(4, 10, dtype=dtype)
    pool = rule_state(7, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    options = {
        "slots": torch.tensor([5, -1, 0, 3]),
        "out_slots": torch.tensor([5, 1, 6, 9]),
        "has_initial_state": torch.tensor([True, True, False, True]),
    }
    if ragged:
        options["cu_seqlens"] = torch.tensor([2, 11, 20, 20, 35])
    expected = oracle.gated_delta_rule_pooled(*x, pool, scale=0.3, **options, **NORM)
    mine = pool.to(device, copy=True)
    moved = {name: value.to(device) for name, value in options.items()}
    out = reference.gated_delta_rule(*x.to(device), mine, scale=0.3, **moved, **NORM)
    assert out.dtype == dtype
    if dtype == torch.float64:
        assert_close(out, expected[0], 1e-14, "output")
        assert_close(mine, expected[1], 1e-14, "pool")
    else:
        assert_rule(out, mine, expected, dtype)


@pytest.mark.parametrize("Hk, Hv", ((2, 2), (2, 6)))
def test_rule_agrees_with_transformers(reference, device, Hk, Hv):
    shape = Shape(Hk, Hv, 32, 32)
    x, state = rule_inputs(2, 70, shape, device=device), rule_state(2, shape, device=device)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, final = reference.chunk_gated_delta_rule(*x[:3], g=x.g, beta=x.beta, **options)
    q, k = (part.repeat_interleave(Hv // Hk, 2) for part in (x.q, x.k))
    recurrent = torch_recurrent_gated_delta_rule(q, k, *x[2:], **options)
    chunked = torch_chunk_gated_delta_rule(q, k, *x[2:], **options)
    for peer, bound in ((recurrent, 1e-6), (chunked, 1e-5)):
        assert_close(out, peer[0], bound, "output")
        assert_close(final, peer[1], bound, "state")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=short)
def test_op_agrees_with_the_reference(kernel, reference, device, dtype):
    """Every op against its own reference on the same device"""
    bound = oracle.ELEMENTWISE_BOUNDS[dtype]
    x = rule_inputs(2, 20, dtype=dtype, device=device)
    state, other = rule_state(2, device=device), rule_state(2, device=device)
    assert_close(kernel.gated_delta_rule(*x, state, **NORM), reference.gated_delta_rule(*x, other, **NORM), 2 * bound)
    assert_close(state, other, 1e-6)
    signal, weight = normal(2, 24, 7, dtype=dtype, device=device), normal(24, 4, seed=2, device=device)
    windows = [normal(2, 24, 3, seed=3, device=device) for _ in range(2)]
    for name in ("causal_conv1d", "causal_conv1d_update"):
        results = []
        for module, window in zip((kernel, reference), windows):
            if name == "causal_conv1d":
                results.append(module.causal_conv1d(signal, weight, None, "silu", conv_state=window))
            else:
                results.append(module.causal_conv1d_update(signal, window, weight, None, "silu"))
        assert_close(*results, 2 * bound, name)
        assert_same(*windows, f"window of {name}")
    a, heads = normal(2, 9, 6, dtype=dtype, device=device), normal(6, device=device)
    for mine, theirs in zip(
        kernel.gated_delta_gates(a, a, heads, heads), reference.gated_delta_gates(a, a, heads, heads)
    ):
        assert_close(mine, theirs, 1e-6)
    op = StepOp()
    step, pools = move(op.inputs(3, 2, dtype), device), [op.pool(3).to(device, copy=True) for _ in range(2)]
    outs = [op.call(module, step, pool) for module, pool in zip((kernel, reference), pools)]
    assert_close(*outs, 4 * bound, "step")
    assert_close(*pools, 1e-6 if dtype == torch.float32 else 1e-3, "state of the step")
    args = (x.v, x.v, normal(32, device=device), 1e-6)
    assert_close(kernel.rms_norm_gated(*args), reference.rms_norm_gated(*args), 2 * bound)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=short)
@pytest.mark.parametrize("form", ("window", "ragged", "seq_idx"))
def test_conv_matches_the_oracle(reference, device, form, dtype):
    weight, bias = normal(24, 4, seed=2, dtype=dtype), normal(24, seed=3, dtype=dtype)
    args = (weight.to(device), bias.to(device), "silu")
    bound = 1e-14 if dtype == torch.float64 else 1e-6
    x = normal(2, 24, 9, dtype=dtype)
    if form == "seq_idx":
        seq_idx = torch.tensor([[0, 0, 1, 1, 1, 0, 0, -1, -1]] * 2, dtype=torch.int32)
        out = reference.causal_conv1d(x.to(device), *args, seq_idx=seq_idx.to(device))
        assert_close(out, oracle.causal_conv1d(x, weight, bias, "silu", seq_idx=seq_idx)[0], bound)
        return
    window = normal(4, 24, 3, seed=4, dtype=dtype)
    mine = window.to(device, copy=True)
    slots = torch.tensor([3, 1], device=device)
    if form == "window":
        out = reference.causal_conv1d(x.to(device), *args, conv_state=mine, slots=slots)
    else:
        rows = torch.cat([x[0].T, x[1].T, torch.ones(2, 24, dtype=dtype)]).to(device)
        offsets = torch.tensor([0, 9, 18], device=device)
        out = reference.causal_conv1d(rows, *args, conv_state=mine, slots=slots, cu_seqlens=offsets)
        assert_zero(out[18:], "tokens of no sequence")
        out = out[:18].unflatten(0, (2, 9)).transpose(1, 2)
    expected, last = oracle.causal_conv1d(x, weight, bias, "silu", window[[3, 1]])
    assert_close(out, expected, bound)
    assert_same(mine[[3, 1]].cpu(), last.to(dtype), "windows")
    assert_same(mine[[0, 2]].cpu(), window[[0, 2]], "other windows")


@pytest.mark.parametrize("order", (True, False), ids=("norm_gate", "gate_norm"))
def test_norm_and_gates_match_the_oracle(reference, device, order):
    x, z, weight = normal(3, 64).double(), normal(3, 64, seed=1).double(), normal(64, seed=2).double()
    options = {"norm_before_gate": order, "group_size": 16, "activation": "sigmoid"}
    out = reference.rms_norm_gated(x.to(device), z.to(device), weight.to(device), 1e-6, **options)
    assert_close(out, oracle.rms_norm_gated(x, z, weight, 1e-6, **options), 1e-14)
    a, b, A_log, dt_bias = (normal(*size, seed=3).double() for size in ((2, 5, 4), (2, 5, 4), (4,), (4,)))
    moved = [part.to(device) for part in (a, b, A_log, dt_bias)]
    expected = oracle.gated_delta_gates(a, b, A_log, dt_bias, allow_neg_eigval=True)
    for mine, wanted in zip(reference.gated_delta_gates(*moved, allow_neg_eigval=True), expected):
        assert mine.dtype == torch.float64
        assert_close(mine, wanted, 1e-8)  # torch's softplus is linear above 20


@pytest.mark.parametrize("zero_centered", (True, False), ids=("zero_centered", "plain"))
def test_attention_pieces_match_the_oracle(reference, device, zero_centered):
    sizes = ((2, 5, 6, 20), (2, 5, 2, 20), (20,), (20,), (5, 8), (5, 8))
    inputs = [normal(*size, seed=n).double() for n, size in enumerate(sizes)]
    options = {"eps": 1e-6, "zero_centered": zero_centered}
    results = reference.qk_norm_rope(*(part.to(device) for part in inputs), **options)
    for mine, wanted in zip(results, oracle.qk_norm_rope(*inputs, **options)):
        assert_close(mine, wanted, 1e-14)
    x, gate = inputs[0], inputs[0].flip(0)
    assert_close(reference.output_gate(x.to(device), gate.to(device)), oracle.output_gate(x, gate), 1e-14)


def test_gradients_of_the_rule(reference):
    """the differentiable stand-in: gradients through q, k, v, g, beta and initial_state, checked numerically"""
    shape = Shape(1, 2, 3, 2)
    x = rule_inputs(1, 4, shape).map(lambda part: part.double().requires_grad_())
    state = rule_state(1, shape).double().requires_grad_()

    def f(q, k, v, g, beta, initial):
        options = {"initial_state": initial, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return reference.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, **options)

    assert torch.autograd.gradcheck(f, (*x, state))


def test_gradients_of_the_rest(reference):
    inputs = [normal(*size, seed=n).double().requires_grad_() for n, size in enumerate(((1, 3, 5), (3, 4), (3,)))]
    assert torch.autograd.gradcheck(lambda x, weight, bias: reference.causal_conv1d(x, weight, bias, "silu"), inputs)
    inputs = [normal(*size, seed=n).double().requires_grad_() for n, size in enumerate(((2, 4), (2, 4), (4,)))]
    assert torch.autograd.gradcheck(lambda x, z, weight: reference.rms_norm_gated(x, z, weight, 1e-6), inputs)
    sizes = ((1, 2, 2, 6), (1, 2, 1, 6), (6,), (6,), (2, 4), (2, 4))
    inputs = [normal(*size, seed=n).double().requires_grad_() for n, size in enumerate(sizes)]
    assert torch.autograd.gradcheck(lambda *inputs: reference.qk_norm_rope(*inputs, 1e-6), inputs)
    assert torch.autograd.gradcheck(reference.output_gate, (inputs[0], inputs[0].detach().flip(0).requires_grad_()))
    sizes = ((1, 2, 3), (1, 2, 3), (3,), (3,))
    inputs = [normal(*size, seed=n).double().requires_grad_() for n, size in enumerate(sizes)]
    assert torch.autograd.gradcheck(reference.gated_delta_gates, inputs)


def test_gradients_agree_with_transformers(reference, device):
    """float32, against autograd through transformers' recurrence"""
    x = rule_inputs(1, 20, Shape(2, 2, 32, 32), device=device).map(lambda part: part.requires_grad_())
    out, _ = reference.chunk_gated_delta_rule(*x[:3], g=x.g, beta=x.beta, use_qk_l2norm_in_kernel=True)
    peer, _ = torch_recurrent_gated_delta_rule(*x, use_qk_l2norm_in_kernel=True)
    weight = normal(*out.shape, seed=5, device=device)
    for name, mine, theirs in zip(
        x._fields, torch.autograd.grad((out * weight).sum(), x), torch.autograd.grad((peer * weight).sum(), x)
    ):
        assert_close(mine, theirs, 1e-5, f"gradient of {name}")


def test_in_place_state_is_stored_detached(reference):
    x = rule_inputs(1, 3).map(lambda part: part.requires_grad_())
    state = rule_state(1)
    out = reference.gated_delta_rule(*x, state, **NORM)
    assert out.requires_grad and not state.requires_grad
    assert_close(state, oracle.gated_delta_rule(*x, rule_state(1), **NORM)[1], 1e-6)
    assert SMALL.K == state.shape[2]
