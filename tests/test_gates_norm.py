# SPDX-License-Identifier: Apache-2.0
"""gated_delta_gates and rms_norm_gated against the oracle, torch and transformers, at the edges of their ranges."""

import math

import pytest
import torch
import torch.nn.functional as F

from . import oracle
from .helpers import DTYPES, Guarded, assert_close, assert_same, normal, short

NAN = float("nan")


def per_head(*values, dtype=torch.float32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("allow_neg_eigval", (False, True))
@pytest.mark.parametrize("head_dtype", DTYPES, ids=lambda dtype: f"heads_{short(dtype)}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: f"a_{short(dtype)}")
def test_gates_match_the_oracle(kernel, device, dtype, head_dtype, allow_neg_eigval):
    a, b = normal(2, 70, 6, dtype=dtype), normal(2, 70, 6, seed=1, dtype=dtype)
    a = a * 8
    A_log, dt_bias = normal(6, seed=2, dtype=head_dtype), normal(6, seed=3, dtype=head_dtype)
    expected = oracle.gated_delta_gates(a, b, A_log, dt_bias, allow_neg_eigval=allow_neg_eigval)
    moved = [part.to(device) for part in (a, b, A_log, dt_bias)]
    results = kernel.gated_delta_gates(*moved, allow_neg_eigval=allow_neg_eigval)
    for mine, wanted, name in zip(results, expected, ("g", "beta")):
        assert mine.dtype == torch.float32 and mine.shape == a.shape and mine.is_contiguous()
        assert_close(mine, wanted, 1e-6, name)
        assert float(((mine.cpu().double() - wanted) / wanted).abs().max()) < 2e-6, f"{name}, the worst element"


def test_gates_agree_with_transformers(kernel, device):
    """The expressions of the Qwen3.5 layer, in float32"""
    a, b, A_log, dt_bias = normal(1, 50, 6), normal(1, 50, 6, seed=1), normal(6, seed=2), normal(6, seed=3)
    g, beta = kernel.gated_delta_gates(*(part.to(device) for part in (a, b, A_log, dt_bias)))
    assert_close(g, -A_log.exp() * F.softplus(a + dt_bias), 1e-6, "g")
    assert_close(beta, b.sigmoid(), 1e-6, "beta")


def test_doubled_beta_is_exact(kernel, device):
    """allow_neg_eigval doubles the sigmoid exactly"""
    a, heads = normal(2, 70, 6, device=device), normal(6, device=device)
    single, double = (kernel.gated_delta_gates(a, a, heads, heads, allow_neg_eigval=flag) for flag in (False, True))
    assert_same(double[0], single[0], "g")
    assert_same(double[1], 2 * single[1], "beta")


def test_gates_at_the_edges(kernel, device):
    """a huge rate behind a closed gate; A_log = -inf; a = 1e4"""
    one = torch.ones(1, 1, 1, device=device)

    def g(a, A_log, dt_bias=0.0):
        return float(
            kernel.gated_delta_gates(a * one, one, per_head(A_log, device=device), per_head(dt_bias, device=device))[0]
        )

    closed = g(-200.0, 100.0)
    assert -1e-40 <= closed <= 0.0
    assert -1e-40 <= g(-100.0, 100.0, -100.0) <= 0.0
    assert g(1.0, -math.inf) == 0.0
    assert abs(g(1e4, 1.0) / (-1e4 * math.e) - 1) < 1e-6
    assert g(1e4, 100.0) < -1e38 and not math.isnan(g(1e4, 100.0))
    # Linear above 20, as in torch, and continuous there.
    assert g(25.0, 0.0) == -25.0
    assert abs(g(20.0, 0.0) + 20.0) < 1e-5 and abs(g(20.001, 0.0) + 20.001) < 1e-5
    # The tail keeps its relative error down to where float32 ends.
    for a in (-5.0, -20.0, -50.0, -80.0):
        assert abs(g(a, 0.0) / -math.log1p(math.exp(a)) - 1) < 1e-6


def test_beta_at_the_edges(kernel, device):
    b = torch.tensor([-1e4, -200.0, -80.0, -1.0, 0.0, 1.0, 80.0, 200.0, 1e4, math.inf, -math.inf], device=device)
    heads = torch.zeros(11, device=device)
    beta = kernel.gated_delta_gates(b[None, None], b[None, None], heads, heads)[1][0, 0].cpu().double()
    expected = torch.sigmoid(b.cpu().double())
    assert bool(((beta >= 0) & (beta <= 1)).all())
    assert float((beta - expected).abs().max()) < 1e-7
    assert float(beta[4]) == 0.5 and float(beta[0]) == 0.0 and float(beta[8]) == 1.0


@pytest.mark.parametrize("value", (1.5, 12.0, 20.0))
def test_fp16_rates_are_widened_before_exp(kernel, device, value):
    """exp(12) and exp(20) overflow fp16"""
    a = torch.full((1, 1, 1), 0.25, device=device)
    g, _ = kernel.gated_delta_gates(
        a, a, per_head(value, dtype=torch.float16, device=device), per_head(0.0, device=device)
    )
    assert_close(g, torch.tensor([[[-math.exp(value) * math.log1p(math.exp(0.25))]]]), 1e-6)


@pytest.mark.parametrize("which", ("a", "b", "A_log", "dt_bias"))
def test_nan_in_the_gates_stays_in_its_head(kernel, device, which):
    parts = {
        "a": normal(2, 9, 6),
        "b": normal(2, 9, 6, seed=1),
        "A_log": normal(6, seed=2),
        "dt_bias": normal(6, seed=3),
    }
    parts = {name: part.to(device) for name, part in parts.items()}
    clean = kernel.gated_delta_gates(**parts)
    place = (1, 4, 3) if which in "ab" else (3,)
    parts[which][place] = NAN
    hit = torch.zeros(2, 9, 6, dtype=torch.bool, device=device)
    hit[place if which in "ab" else (..., 3)] = True
    for name, mine, expected in zip(("g", "beta"), kernel.gated_delta_gates(**parts), clean):
        sees = (name == "beta") == (which == "b")
        assert bool(mine[hit].isnan().all()) == sees, f"{name} at the NaN"
        assert_same(mine[~hit], expected[~hit], name)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("order", (True, False), ids=("norm_gate", "gate_norm"))
@pytest.mark.parametrize("activation", ("silu", "sigmoid"))
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=lambda dtype: f"weight_{short(dtype)}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: f"x_{short(dtype)}")
def test_norm_matches_the_oracle(kernel, device, dtype, weight_dtype, activation, order):
    x, z = normal(2, 9, 6, 64, dtype=dtype), normal(2, 9, 6, 64, seed=1, dtype=dtype)
    weight = normal(64, seed=2, dtype=weight_dtype)
    options = {"activation": activation, "norm_before_gate": order}
    expected = oracle.rms_norm_gated(x, z, weight, 1e-6, **options)
    out = kernel.rms_norm_gated(x.to(device), z.to(device), weight.to(device), 1e-6, **options)
    assert out.dtype == dtype and out.shape == x.shape
    assert_close(out, expected, oracle.ELEMENTWISE_BOUNDS[dtype])


@pytest.mark.parametrize("order", (True, False), ids=("norm_gate", "gate_norm"))
@pytest.mark.parametrize(
    "V, group_size",
    ((64, None), (128, 32), (96, 48), (100, 50), (100, 1), (7, 7), (1, 1), (300, 100), (2048, 256), (4096, None)),
)
def test_norm_groups(kernel, device, V, group_size, order):
    """Each group has its own mean; any last dim"""
    x, z, weight = normal(2, 3, 2, V), normal(2, 3, 2, V, seed=1), normal(V, seed=2)
    options = {"group_size": group_size, "norm_before_gate": order}
    expected = oracle.rms_norm_gated(x, z, weight, 1e-5, **options)
    out = kernel.rms_norm_gated(x.to(device), z.to(device), weight.to(device), 1e-5, **options)
    assert_close(out, expected, 1e-6)


@pytest.mark.parametrize("leading", ((5,), (2, 5), (2, 3, 5)), ids=str)
def test_norm_takes_one_to_three_leading_dims(kernel, device, leading):
    x, z, weight = (
        normal(*leading, 32, device=device),
        normal(*leading, 32, seed=1, device=device),
        normal(32, device=device),
    )
    assert_close(kernel.rms_norm_gated(x, z, weight, 1e-6), oracle.rms_norm_gated(x, z, weight, 1e-6), 1e-6)


@pytest.mark.parametrize("dtype, bound", ((torch.float32, 1e-6), (torch.bfloat16, 6e-3)), ids=("float32", "bfloat16"))
def test_norm_agrees_with_transformers(kernel, device, dtype, bound):
    """Qwen3.5's module; in bf16 it rounds twice more than we do and is itself 4e-3 from the oracle"""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    module = Qwen3_5RMSNormGated(64, eps=1e-6).to(device, dtype)
    with torch.no_grad():
        module.weight.copy_(normal(64))
        x, z = normal(20, 64, dtype=dtype, device=device), normal(20, 64, seed=1, dtype=dtype, device=device)
        expected = module(x, z)
        assert_close(kernel.rms_norm_gated(x, z, module.weight, 1e-6), expected, bound)


def test_norm_of_zeros_and_large_numbers(kernel, device):
    """eps keeps zeros finite; an fp32 o far outside fp16's range comes out of the norm in range"""
    z, weight = normal(1, 1, 2, 64, device=device), normal(64, device=device)
    zero = kernel.rms_norm_gated(torch.zeros(1, 1, 2, 64, device=device), z, weight, 1e-6)
    assert bool((zero == 0).all())
    x = normal(1, 1, 2, 64, seed=1, device=device) * 1e8
    out = kernel.rms_norm_gated(x, z, weight, 1e-6)
    assert bool(out.isfinite().all())
    assert_close(out, oracle.rms_norm_gated(x, z, weight, 1e-6), 1e-6)
    tiny = normal(1, 1, 2, 64, seed=1, device=device) * 1e-4
    assert_close(
        kernel.rms_norm_gated(tiny, z, weight, 1e-6), oracle.rms_norm_gated(tiny, z, weight, 1e-6), 1e-6, "below eps"
    )


@pytest.mark.parametrize("order", (True, False), ids=("norm_gate", "gate_norm"))
def test_nan_in_the_norm_stays_in_its_vector(kernel, device, order):
    x, z, weight = (
        normal(2, 3, 2, 64, device=device),
        normal(2, 3, 2, 64, seed=1, device=device),
        normal(64, device=device),
    )
    clean = kernel.rms_norm_gated(x, z, weight, 1e-6, norm_before_gate=order)
    x[1, 2, 0, 7] = NAN
    out = kernel.rms_norm_gated(x, z, weight, 1e-6, norm_before_gate=order)
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[1, 2, 0] = True
    assert_same(out[~hit], clean[~hit], "other vectors")
    assert bool(out[hit].isnan().all()), "control: the NaN is seen"


@pytest.mark.parametrize("shape", ((3, 7, 5, 100), (70, 1, 3, 33)), ids=str)
def test_repeated_runs_and_rows_alone(kernel, device, shape):
    """Bitwise repeatable; a vector does not depend on the batch"""
    x, z, weight = (
        normal(*shape, device=device),
        normal(*shape, seed=1, device=device),
        normal(shape[-1], device=device),
    )
    out = kernel.rms_norm_gated(x, z, weight, 1e-6)
    assert_same(kernel.rms_norm_gated(x, z, weight, 1e-6), out, "again")
    row = slice(shape[0] - 1, shape[0])
    assert_same(kernel.rms_norm_gated(x[row], z[row], weight, 1e-6), out[row], "last row alone")
    a, heads = x[..., 0], weight[: shape[2]]
    whole = kernel.gated_delta_gates(a, a, heads, heads)
    for mine, expected in zip(kernel.gated_delta_gates(a[row], a[row], heads, heads), whole):
        assert_same(mine, expected[row], "gates of the last row alone")


def test_inputs_next_to_nan_are_not_read(kernel, device):
    """x, z and weight inside buffers of NaN"""
    buffers = [torch.full((2, 3, 2, 80), NAN, device=device) for _ in range(2)] + [
        torch.full((80,), NAN, device=device)
    ]
    for seed, buffer in enumerate(buffers):
        buffer[..., 8:72] = normal(*buffer.shape[:-1], 64, seed=seed).to(device)
    x, z, weight = (buffer[..., 8:72] for buffer in buffers)
    assert_close(kernel.rms_norm_gated(x, z, weight, 1e-6), oracle.rms_norm_gated(x, z, weight, 1e-6), 1e-6)
    inside = Guarded(2, 3, 2, 64, device=device, fill=x)
    kernel.rms_norm_gated(inside.tensor, inside.tensor, weight, 1e-6)
    inside.check()
    assert_same(inside.tensor, x.contiguous(), "inputs")
