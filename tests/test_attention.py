# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope and output_gate against the oracle and transformers, in every layout that an attention layer has."""

import pytest
import torch

from . import oracle
from .helpers import DTYPES, Guarded, assert_close, assert_same, normal, short

NAN = float("nan")
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)


def rope_inputs(B, T, Hq, Hk, D, R, *, dtype=torch.float32, weight_dtype=None, angle_dtype=None):
    """Names of qk_norm_rope's arguments to tensors on the CPU; angles as a rotary embedding makes them."""
    weight_dtype, angle_dtype = weight_dtype or dtype, angle_dtype or dtype
    frequencies = 10000.0 ** (-torch.arange(0, R, 2) / max(1, R))
    angles = (torch.arange(B * T).view(B, T, 1) * frequencies).repeat(1, 1, 2)
    return {
        "q": normal(B, T, Hq, D, dtype=dtype),
        "k": normal(B, T, Hk, D, seed=1, dtype=dtype),
        "q_weight": (normal(D, seed=2) * 0.3).to(weight_dtype),
        "k_weight": (normal(D, seed=3) * 0.3).to(weight_dtype),
        "cos": angles.cos().to(angle_dtype),
        "sin": angles.sin().to(angle_dtype),
    }


def on(device, inputs):
    return {name: x.to(device) for name, x in inputs.items()}


def check_rope(kernel, device, inputs, **options):
    """The op within the bounds of its dtype of the oracle; returns what the op gave."""
    results = kernel.qk_norm_rope(**on(device, inputs), eps=1e-6, **options)
    for mine, wanted, name in zip(results, oracle.qk_norm_rope(**inputs, eps=1e-6, **options), "qk"):
        assert mine.dtype == inputs[name].dtype and mine.shape == inputs[name].shape and mine.is_contiguous()
        assert_close(mine, wanted, oracle.ELEMENTWISE_BOUNDS[mine.dtype], name)
    return results


@pytest.mark.kernels_ci
@pytest.mark.parametrize("zero_centered", (True, False), ids=("zero_centered", "plain"))
@pytest.mark.parametrize("small_dtype", DTYPES, ids=lambda dtype: f"weight_{short(dtype)}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: f"q_{short(dtype)}")
def test_norm_rope_matches_the_oracle(kernel, device, dtype, small_dtype, zero_centered):
    """A quarter of the head rotated, as Qwen3-Next has it; weights and angles of either dtype"""
    for angle_dtype in (dtype, torch.float32):
        inputs = rope_inputs(2, 9, 6, 2, 256, 64, dtype=dtype, weight_dtype=small_dtype, angle_dtype=angle_dtype)
        check_rope(kernel, device, inputs, zero_centered=zero_centered)


@pytest.mark.parametrize("part", (0.0, 0.25, 0.5, 1.0))
@pytest.mark.parametrize("D", (*HEAD_DIMS, 2, 24, 80, 100, 250))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=short)
def test_norm_rope_of_any_head(kernel, device, dtype, D, part):
    """Every head dim of the design, others, and any part of them; more query heads than one piece of a token holds"""
    check_rope(kernel, device, rope_inputs(2, 5, 7, 3, D, int(D * part) // 2 * 2, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_many_tokens(kernel, device, dtype):
    """Enough of them for the kernel that shares weights between heads, and bitwise what each token is alone"""
    inputs = on(device, rope_inputs(2, 2100 if device == "cuda" else 70, 5, 2, 128, 64, dtype=dtype))
    whole = kernel.qk_norm_rope(**inputs, eps=1e-6)
    expected = oracle.qk_norm_rope(**inputs, eps=1e-6)
    tokens = (slice(0, 3), slice(40, 41), slice(-1, None))
    for mine, wanted in zip(whole, expected):
        assert_close(mine, wanted, oracle.ELEMENTWISE_BOUNDS[dtype])
    for token in tokens:
        part = {name: x[:, token] if x.dim() > 1 else x for name, x in inputs.items()}
        for mine, wanted in zip(kernel.qk_norm_rope(**part, eps=1e-6), whole):
            assert_same(mine, wanted[:, token], "a token alone")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("D, R, offset", ((256, 64, 0), (64, 16, 0), (128, 128, 3), (100, 20, 1)), ids=str)
def test_queries_and_gates_of_one_projection(kernel, device, dtype, D, R, offset):
    """q and gate interleaved as Qwen3.5's q_proj emits them, k inside a wider row, at any alignment: the same bits"""
    inputs = on(device, rope_inputs(2, 9, 6, 2, D, R, dtype=dtype))
    wide = torch.full((2, 9, 6 * 2 * D + offset), NAN, dtype=dtype, device=device)
    q, gate = wide[..., offset:].unflatten(-1, (6, 2 * D)).chunk(2, -1)
    q.copy_(inputs["q"])
    gate.copy_(normal(2, 9, 6, D, seed=5))
    keys = torch.full((2, 9, 2 * D + offset + 8), NAN, dtype=dtype, device=device)
    k = keys[..., offset : offset + 2 * D].unflatten(-1, (2, D))
    k.copy_(inputs["k"])
    weight = torch.stack([inputs["q_weight"], torch.full_like(inputs["q_weight"], NAN)], -1)[:, 0]
    strided = {**inputs, "q": q, "k": k, "q_weight": weight}
    for mine, wanted in zip(kernel.qk_norm_rope(**strided, eps=1e-6), kernel.qk_norm_rope(**inputs, eps=1e-6)):
        assert_same(mine, wanted)
    x = normal(2, 9, 6, D, seed=6, dtype=dtype, device=device)
    gated = kernel.output_gate(x, gate)
    assert_same(gated, kernel.output_gate(x, gate.contiguous()), "output_gate")
    assert_same(gated, kernel.output_gate(x.flatten(2), gate.flatten(2)).view_as(x), "output_gate of a flat row")
    assert_close(gated, oracle.output_gate(x, gate), oracle.ELEMENTWISE_BOUNDS[dtype])


def test_angles_are_broadcast(kernel, device):
    """[B, T, R], [1, T, R] and [T, R]"""
    inputs = on(device, rope_inputs(3, 5, 4, 2, 64, 32))
    angles = {name: inputs[name][1] for name in ("cos", "sin")}
    rows = {name: x.expand(3, -1, -1).contiguous() for name, x in angles.items()}
    expected = kernel.qk_norm_rope(**{**inputs, **rows}, eps=1e-6)
    for given in (angles, {name: x[None] for name, x in angles.items()}):
        for mine, wanted in zip(kernel.qk_norm_rope(**{**inputs, **given}, eps=1e-6), expected):
            assert_same(mine, wanted)


@pytest.mark.parametrize("dtype, bound", ((torch.float32, 1e-6), (torch.bfloat16, 8e-3)), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("family", ("qwen3_next", "qwen3_5"))
def test_agrees_with_transformers(kernel, device, family, dtype, bound):
    """Norm module, rotary embedding and apply_rotary_pos_emb of the model, and its output gate; it rounds in between"""
    import importlib

    model = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    Norm = model.Qwen3NextRMSNorm if family == "qwen3_next" else model.Qwen3_5RMSNorm
    inputs = on(device, rope_inputs(2, 9, 6, 2, 256, 64, dtype=dtype))
    q_norm, k_norm = Norm(256, eps=1e-6).to(device, dtype), Norm(256, eps=1e-6).to(device, dtype)
    with torch.no_grad():
        q_norm.weight.copy_(inputs["q_weight"])
        k_norm.weight.copy_(inputs["k_weight"])
        q, k = q_norm(inputs["q"]).transpose(1, 2), k_norm(inputs["k"]).transpose(1, 2)
        expected = model.apply_rotary_pos_emb(q, k, inputs["cos"], inputs["sin"])
        for mine, wanted in zip(kernel.qk_norm_rope(**inputs, eps=1e-6), expected):
            assert_close(mine.transpose(1, 2), wanted, bound)
        x, gate = inputs["q"].flatten(2), normal(2, 9, 6 * 256, seed=7, dtype=dtype, device=device)
        assert_close(kernel.output_gate(x, gate), x * torch.sigmoid(gate), bound, "output_gate")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("gate_dtype", DTYPES, ids=lambda dtype: f"gate_{short(dtype)}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: f"x_{short(dtype)}")
@pytest.mark.parametrize("shape", ((5,), (3, 64), (2, 3, 100), (2, 3, 4, 256), (2, 0, 8), (1, 1, 4096)), ids=str)
def test_output_gate_matches_the_oracle(kernel, device, shape, dtype, gate_dtype):
    x, gate = normal(*shape, dtype=dtype), normal(*shape, seed=1, dtype=gate_dtype) * 3
    out = kernel.output_gate(x.to(device), gate.to(device))
    assert out.dtype == dtype and out.shape == x.shape and out.is_contiguous()
    assert_close(out, oracle.output_gate(x, gate), oracle.ELEMENTWISE_BOUNDS[dtype])


@pytest.mark.parametrize("order", ((0, 1, 2, 3), (2, 0, 1, 3), (1, 2, 0, 3), (0, 3, 1, 2), (3, 2, 1, 0)), ids=str)
def test_output_gate_of_any_strides(kernel, device, order):
    """x, gate or both permuted, sliced, expanded: the same bits"""
    x, gate = (normal(4, 6, 8, 16, seed=seed, device=device).permute(order) for seed in (0, 1))
    expected = kernel.output_gate(x.contiguous(), gate.contiguous())
    assert_same(kernel.output_gate(x, gate), expected, "both")
    assert_same(kernel.output_gate(x.contiguous(), gate), expected, "gate")
    assert_same(kernel.output_gate(x, gate.contiguous()), expected, "x")
    part = (slice(None), slice(1, None, 2), slice(0, 3), slice(0, 8))
    assert_same(kernel.output_gate(x[part], gate[part]), expected[part].contiguous(), "slices")
    one = gate[:, :1].expand_as(gate)
    assert_same(kernel.output_gate(x, one), kernel.output_gate(x, one.contiguous()), "stride 0")


def test_output_gate_at_the_edges(kernel, device):
    gate = torch.tensor([-1e4, -100.0, -80.0, -1.0, 0.0, 1.0, 80.0, 1e4, torch.inf, -torch.inf, NAN], device=device)
    out = kernel.output_gate(torch.full_like(gate, 3.0), gate).cpu().double()
    expected = 3 * torch.sigmoid(gate.cpu().double())
    assert float((out - expected)[:-1].abs().max()) < 1e-6
    assert bool(out[-1].isnan()) and float(out[4]) == 1.5 and float(out[8]) == 3.0 and float(out[9]) == 0.0


def test_norm_rope_at_the_edges(kernel, device):
    """Zeros stay zeros; large and tiny heads keep their precision; a rotation by no angle is the norm alone"""
    inputs = rope_inputs(1, 3, 2, 1, 64, 32)
    inputs["q"] = inputs["q"] * torch.tensor([1e15, 1e-4, 0.0]).view(1, 3, 1, 1)
    q, _ = check_rope(kernel, device, inputs)
    assert bool((q[:, 2] == 0).all())
    still = {**inputs, "cos": torch.ones(3, 32), "sin": torch.zeros(3, 32)}
    for mine, wanted in zip(
        kernel.qk_norm_rope(**on(device, still), eps=1e-6),
        kernel.qk_norm_rope(**on(device, {**still, "cos": torch.ones(3, 0), "sin": torch.ones(3, 0)}), eps=1e-6),
    ):
        assert_same(mine, wanted)


def test_no_tokens_and_no_heads(kernel, device):
    for B, T, Hq, Hk in ((0, 5, 4, 2), (2, 0, 4, 2), (2, 5, 0, 2), (2, 5, 4, 0)):
        check_rope(kernel, device, rope_inputs(B, T, Hq, Hk, 64, 16))


@pytest.mark.parametrize("D, R", ((64, 16), (100, 20)))
def test_nan_stays_in_its_head(kernel, device, D, R):
    inputs = on(device, rope_inputs(2, 5, 6, 2, D, R))
    clean = kernel.qk_norm_rope(**inputs, eps=1e-6)
    inputs["q"][1, 3, 2, 7] = NAN
    dirty = kernel.qk_norm_rope(**inputs, eps=1e-6)
    hit = torch.zeros_like(clean[0], dtype=torch.bool)
    hit[1, 3, 2] = True
    assert_same(dirty[0][~hit], clean[0][~hit], "other query heads")
    assert_same(dirty[1], clean[1], "key heads")
    assert bool(dirty[0][hit].isnan().all()), "control: the NaN is seen"


def test_nothing_outside_is_read_or_written(kernel, device):
    """Inputs between guards: they and the guards stay as they are, and no guard reaches the results"""
    inputs = on(device, rope_inputs(2, 5, 6, 2, 64, 16))
    expected = kernel.qk_norm_rope(**inputs, eps=1e-6)
    inside = {name: Guarded(*x.shape, device=device, fill=x) for name, x in inputs.items()}
    results = kernel.qk_norm_rope(**{name: guarded.tensor for name, guarded in inside.items()}, eps=1e-6)
    for mine, wanted in zip(results, expected):
        assert_same(mine, wanted)
    kernel.output_gate(inside["q"].tensor, inside["q"].tensor)
    for name, guarded in inside.items():
        guarded.check()
        assert_same(guarded.tensor, inputs[name], name)
