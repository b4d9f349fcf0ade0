# SPDX-License-Identifier: Apache-2.0
"""The rule against the float64 oracle and against transformers, within the table of errors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from . import oracle
from .helpers import (
    DTYPES,
    MODES,
    QWEN,
    SMALL,
    Inputs,
    Shape,
    assert_close,
    assert_rule,
    assert_zero,
    normal,
    rule_inputs,
    rule_state,
    short,
)
from .peers import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

NORM = {"use_qk_l2norm": True}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("mode", MODES)
def test_matches_the_oracle(kernel, device, mode, dtype, state_dtype):
    x = rule_inputs(3, 70, dtype=dtype)
    state = rule_state(3, dtype=state_dtype)
    mine = state.to(device, copy=True)
    out = kernel.gated_delta_rule(*x.to(device), mine, mode=mode, **NORM)
    assert out.dtype == dtype and out.shape == x.v.shape
    assert_rule(out, mine, oracle.gated_delta_rule_pooled(*x, state, **NORM), dtype, mode)


@pytest.mark.parametrize("use_qk_l2norm", (True, False), ids=("l2norm", "plain"))
@pytest.mark.parametrize(
    "batch, tokens, heads, dim",
    (
        (1, 1, (2, 2), 64),
        (2, 1, (4, 8), 128),
        (1, 16, (2, 4), 128),
        (3, 33, (4, 8), 64),
        (2, 64, (2, 4), 128),
        (3, 100, (8, 8), 64),
        (1, 127, (2, 8), 128),
        (3, 256, (2, 2), 64),
        (1, 256, (2, 4), 128),
    ),
    ids=str,
)
def test_fp32_stands_by_the_reference(kernel, device, batch, tokens, heads, dim, use_qk_l2norm):
    """The bar: 5.5e-7 from transformers' recurrence, 1e-6 from the oracle, output and final state."""
    x = rule_inputs(batch, tokens, Shape(*heads, dim, dim), seed=tokens)
    if not use_qk_l2norm:  # normal keys of this length would make the rule diverge
        x = x._replace(q=oracle.l2norm(x.q), k=oracle.l2norm(x.k))
    x = x.to(device)
    state = rule_state(batch, Shape(*heads, dim, dim), device=device)
    group = heads[1] // heads[0]
    q, k = (part.repeat_interleave(group, dim=2) for part in (x.q, x.k))
    peer, peer_state = torch_recurrent_gated_delta_rule(
        q, k, *x[2:], initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=use_qk_l2norm
    )
    expected = oracle.gated_delta_rule(*x, state, use_qk_l2norm=use_qk_l2norm)
    out = kernel.gated_delta_rule(*x, state, mode="recurrent", use_qk_l2norm=use_qk_l2norm)
    assert_close(out, peer, 5.5e-7, "output against transformers")
    assert_close(state, peer_state, 5.5e-7, "state against transformers")
    assert_rule(out, state, expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_qwen_shape(kernel, device, dtype):
    x = rule_inputs(1, 24, QWEN, dtype=dtype)
    state = rule_state(1, QWEN)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to(device, copy=True)
    out = kernel.gated_delta_rule(*x.to(device), mine, mode="recurrent", **NORM)
    assert_rule(out, mine, expected, dtype)


@pytest.mark.parametrize("with_state", (True, False), ids=("initial", "zero"))
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"))
def test_functional_names(kernel, device, name, dtype, with_state):
    """flash-linear-attention's signature: (o, final state), initial_state left as it was"""
    x = rule_inputs(2, 20, dtype=dtype)
    state = rule_state(2) if with_state else None
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = None if state is None else state.to(device, copy=True)
    q, k, v, g, beta = x.to(device)
    options = {"g": g, "beta": beta, "initial_state": mine, "use_qk_l2norm_in_kernel": True}
    out, final = getattr(kernel, name)(q, k, v, output_final_state=True, **options)
    assert out.dtype == dtype and final.dtype == torch.float32
    assert_rule(out, final, expected, dtype, "chunk" if name.startswith("chunk") else "recurrent")
    if state is not None:
        assert torch.equal(mine.cpu(), state), "initial_state was written"
        assert final.data_ptr() != mine.data_ptr()
    out, final = getattr(kernel, name)(q, k, v, **options)
    assert final is None
    assert_close(out, expected[0], oracle.BOUNDS[dtype, "chunk"][0])


@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"))
def test_functional_state_dtype_and_v_first(kernel, device, name, state_dtype):
    """The final state takes initial_state's dtype; state_v_first means [V, K] in and out"""
    shape = Shape(2, 4, 32, 48)
    x = rule_inputs(2, 9, shape)
    state = rule_state(2, shape, dtype=state_dtype)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    q, k, v, g, beta = x.to(device)
    options = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    function = getattr(kernel, name)
    out, final = function(q, k, v, initial_state=state.to(device, copy=True), **options)
    assert final.dtype == state_dtype
    assert_rule(out, final, expected, torch.float32)
    v_first = state.transpose(-1, -2).contiguous().to(device, copy=True)
    out, final = function(q, k, v, initial_state=v_first, state_v_first=True, **options)
    assert final.shape == (2, 4, 48, 32)
    assert_rule(out, final.transpose(-1, -2), expected, torch.float32)
    out, final = function(q, k, v, state_v_first=True, **options)
    assert final.shape == (2, 4, 48, 32) and final.dtype == torch.float32
    assert_close(final.transpose(-1, -2), oracle.gated_delta_rule(*x, **NORM)[1], 1e-6)


@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"))
def test_functional_ragged(kernel, device, name):
    x = rule_inputs(1, 30)
    state = rule_state(3)
    offsets = torch.tensor([0, 11, 11, 28])
    expected = oracle.gated_delta_rule_pooled(*x, state, cu_seqlens=offsets, **NORM)
    q, k, v, g, beta = x.to(device)
    out, final = getattr(kernel, name)(
        q, k, v, g=g, beta=beta, initial_state=state.to(device, copy=True), output_final_state=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=offsets.to(device),
    )  # fmt: skip
    assert_rule(out, final, expected, torch.float32)
    assert_zero(out[:, 28:], "tokens of no sequence")


@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"))
def test_functional_agrees_with_transformers_chunk_form(kernel, device, name):
    x = rule_inputs(2, 100, Shape(4, 4, 64, 64)).to(device)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    peer, peer_state = torch_chunk_gated_delta_rule(*x, **options)
    out, state = getattr(kernel, name)(x.q, x.k, x.v, g=x.g, beta=x.beta, **options)
    assert_close(out, peer, 1e-5, "output")
    assert_close(state, peer_state, 1e-5, "state")


@pytest.mark.parametrize("mode", ("recurrent", "chunk", "auto"))
def test_linear_gate_domain(kernel, device, mode):
    """gate_domain="linear": g is the decay itself, 0 and 1 included"""
    x = rule_inputs(2, 20)
    decay = x.g.exp()
    decay[0, 3], decay[1, 5] = 0.0, 1.0
    x = x._replace(g=decay)
    state = rule_state(2)
    expected = oracle.gated_delta_rule(*x, state, gate_domain="linear", **NORM)
    mine = state.to(device, copy=True)
    out = kernel.gated_delta_rule(*x.to(device), mine, gate_domain="linear", mode=mode, **NORM)
    assert_rule(out, mine, expected, torch.float32)


@pytest.mark.parametrize("scale", (1, 0.25, -2.0, 0.0))
def test_scale(kernel, device, scale):
    x = rule_inputs(1, 8)
    state = rule_state(1)
    expected = oracle.gated_delta_rule(*x, state, scale=scale, **NORM)
    mine = state.to(device, copy=True)
    out = kernel.gated_delta_rule(*x.to(device), mine, scale=scale, **NORM)
    assert_rule(out, mine, expected, torch.float32)


@pytest.mark.parametrize("wide", (torch.float32, torch.bfloat16, torch.float16), ids=short)
def test_new_state(kernel, device, wide):
    state = kernel.new_state(3, 4, 16, 32, dtype=wide, device=device)
    assert state.shape == (3, 4, 16, 32) and state.dtype == wide and state.device.type == device
    assert_zero(state)
    assert kernel.new_state(1, 1, 8, 8, device=device).dtype == torch.float32


def test_new_state_lands_on_the_accelerator(kernel, device):
    expected = "cuda" if torch.cuda.is_available() and "-cu" in kernel.__file__ else "cpu"
    assert kernel.new_state(1, 1, 8, 8).device.type == expected


heads = st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)])
dims = st.sampled_from([1, 4, 16, 31, 32, 40, 64, 100])


@given(data=st.data())
def test_any_combination_matches_the_oracle(kernel, device, data):
    """Shapes, dtypes, layout, ragged or dense, slots, flags, scale, norm: drawn together"""
    draw = data.draw
    shape = Shape(*draw(heads), draw(dims), draw(dims))
    dtype, state_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    ragged = draw(st.booleans())
    N, tail = len(lengths), draw(st.integers(0, 3))
    x = (
        rule_inputs(1, sum(lengths) + tail, shape, dtype=dtype)
        if ragged
        else rule_inputs(N, lengths[0], shape, dtype=dtype)
    )
    pool = rule_state(N + 2, shape, dtype=state_dtype, layout=draw(st.sampled_from(["K-first", "V-first"])))
    slots = draw(st.permutations(range(-1, N + 2)).map(lambda order: order[:N]))
    options = {"use_qk_l2norm": True, "slots": torch.tensor(slots)}
    if ragged:
        options["cu_seqlens"] = torch.tensor([0] + [sum(lengths[: n + 1]) for n in range(N)])
    if draw(st.booleans()):
        options["has_initial_state"] = torch.tensor(draw(st.lists(st.booleans(), min_size=N, max_size=N)))
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(-2, 2))
    expected = oracle.gated_delta_rule_pooled(*x, pool, **options)
    mine = pool.to(device, copy=True)
    out = kernel.gated_delta_rule(
        *x.to(device), mine, mode="recurrent",
        **{name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()},
    )  # fmt: skip
    if shape.K == 1 and dtype != torch.float32:
        return  # one element: the relative error of a single rounded product, no statistics
    assert_rule(out, mine, expected, dtype)


def test_error_measure_sees_a_wrong_answer():
    """Control: the bound that passes everywhere above fails on the interleaved head map and on a missing decay"""
    x = rule_inputs(1, 20)
    state = rule_state(1)
    right, _ = oracle.gated_delta_rule(*x, state, **NORM)
    swapped = Inputs(*x[:2], x.v[:, :, [0, 2, 1, 3]], x.g[..., [0, 2, 1, 3]], x.beta[..., [0, 2, 1, 3]])
    interleaved = oracle.gated_delta_rule(*swapped, state[:, [0, 2, 1, 3]], **NORM)[0][:, :, [0, 2, 1, 3]]
    undecayed, _ = oracle.gated_delta_rule(*x._replace(g=None), state, **NORM)
    for wrong in (interleaved, undecayed, right * math.nan, right + 1e-5 * normal(*right.shape).double()):
        with pytest.raises(AssertionError):
            assert_close(wrong, right, 1e-6)
    assert_close(right.float(), right, 1e-6)
    assert SMALL.Hv // SMALL.Hk == 2
