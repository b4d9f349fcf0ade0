# SPDX-License-Identifier: Apache-2.0
"""Section D: strides, dtypes, devices, forms of the metadata, execution contexts; optional arguments and loading."""

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import oracle
from .helpers import (
    DTYPES,
    MODES,
    RAISES,
    Inputs,
    Shape,
    assert_close,
    assert_rule,
    assert_same,
    assert_zero,
    normal,
    right_or_raises,
    rule_inputs,
    rule_state,
    short,
)

NORM = {"use_qk_l2norm": True}
ROOT = Path(__file__).resolve().parent.parent
NAN = float("nan")


def compare(kernel, x, expected_x, mode="recurrent", shape=None, expected_mode=None):
    """The call on x equals the one on expected_x (in expected_mode, default mode) bitwise, output and state."""
    shape = shape or Shape(x.q.shape[2], x.v.shape[2], x.q.shape[3], x.v.shape[3])
    state, expected_state = (rule_state(x.q.shape[0], shape, device=x.q.device) for _ in range(2))
    expected = kernel.gated_delta_rule(*expected_x, expected_state, mode=expected_mode or mode, **NORM)
    assert_same(kernel.gated_delta_rule(*x, state, mode=mode, **NORM), expected, "output")
    assert_same(state, expected_state, "state")


def packed_projection(shape, dtype, device, offset=0):
    """q, k, v as a split of one [tokens, 2 Hk K + Hv V] tensor, g and beta of one [tokens, 2 Hv]; NaN between."""
    Hk, Hv, K, V = shape
    width = 2 * Hk * K + Hv * V
    wide = torch.full((2, 9, width + offset + 5), NAN, dtype=dtype, device=device)
    wide[..., offset : offset + width] = normal(2, 9, width)
    gates = torch.cat([torch.nn.functional.logsigmoid(normal(2, 9, Hv)), normal(2, 9, Hv, seed=1).sigmoid()], -1)
    g, beta = gates.to(device).split(Hv, -1)
    q, k, v = wide[..., offset : offset + width].split([Hk * K, Hk * K, Hv * V], -1)
    return Inputs(q.unflatten(-1, (Hk, K)), k.unflatten(-1, (Hk, K)), v.unflatten(-1, (Hv, V)), g, beta)


@pytest.mark.parametrize("offset", (0, 1, 3))
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", (Shape(2, 4, 32, 32), Shape(1, 2, 128, 128), Shape(1, 3, 24, 100)), ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_views_into_a_packed_projection(kernel, device, mode, shape, dtype, offset):
    """at any alignment; rows that start at no multiple of 16 bytes are the recurrence's in every mode"""
    x = packed_projection(shape, dtype, device, offset)
    assert not x.q.is_contiguous()
    compare(kernel, x, Inputs(*(part.contiguous() for part in x)), mode, expected_mode="recurrent")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_views_into_the_elementwise_ops(kernel, device, dtype):
    """a, b = split of [tokens, 2 Hv]; z = a slice of a wider row"""
    a, b = normal(2, 9, 12, dtype=dtype, device=device).split(6, -1)
    A_log, dt_bias = normal(6, 2, device=device).unbind(-1)
    strided = kernel.gated_delta_gates(a, b, A_log, dt_bias)
    plain = kernel.gated_delta_gates(a.contiguous(), b.contiguous(), A_log.contiguous(), dt_bias.contiguous())
    for mine, expected in zip(strided, plain):
        assert_same(mine, expected)
    x, z = normal(2, 9, 3 * 70 + 7, dtype=dtype, device=device)[..., 5:205].split(100, -1)
    x, z = x.unflatten(-1, (2, 50)), z.unflatten(-1, (2, 50))
    weight = normal(100, device=device)[::2]
    strided = kernel.rms_norm_gated(x, z, weight, 1e-6)
    assert_same(strided, kernel.rms_norm_gated(x.contiguous(), z.contiguous(), weight.contiguous(), 1e-6))


def test_stride_zero_inputs(kernel, device):
    """g, beta and v expanded"""
    x = rule_inputs(2, 9, device=device)
    x = x._replace(g=x.g[:1, :1].expand(2, 9, 4), beta=x.beta[:1, :1].expand(2, 9, 4), v=x.v[:1].expand(2, 9, 4, 32))
    compare(kernel, x, Inputs(*(part.contiguous() for part in x)))


@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"))
def test_expanded_initial_state(kernel, device, name):
    """read only, so one state may serve all rows"""
    q, k, v, g, beta = rule_inputs(3, 9, device=device)
    state = rule_state(1, device=device).expand(3, 4, 32, 32)
    options = {"g": g, "beta": beta, "output_final_state": True}
    function = getattr(kernel, name)
    out, final = function(q, k, v, initial_state=state, **options)
    expected, expected_final = function(q, k, v, initial_state=state.contiguous(), **options)
    assert_same(out, expected, "output")
    assert_same(final, expected_final, "state")


def test_overlapping_written_tensors_raise(kernel, device):
    """an in-place state with stride 0 in the slot dimension; out and window likewise"""
    x = rule_inputs(3, 2, device=device)
    state = rule_state(1, device=device)
    before = state.clone()
    with pytest.raises(RuntimeError, match="gated_delta_rule: state"):
        kernel.gated_delta_rule(*x, state.expand(3, 4, 32, 32))
    assert_same(state, before, "state")
    with pytest.raises(RuntimeError, match="gated_delta_rule: out"):
        kernel.gated_delta_rule(*x, rule_state(3, device=device), out=x.v[:1].clone().expand(3, 2, 4, 32))
    window, signal, weight = normal(1, 8, 3, device=device), normal(3, 8, 2, device=device), normal(8, 4, device=device)
    with pytest.raises(RuntimeError, match="causal_conv1d: conv_state"):
        kernel.causal_conv1d(signal, weight, conv_state=window.expand(3, 8, 3))
    with pytest.raises(RuntimeError, match="causal_conv1d_update: conv_state"):
        kernel.causal_conv1d_update(signal, window.expand(3, 8, 3), weight)
    assert_same(window, normal(1, 8, 3, device=device), "window")


@pytest.mark.parametrize("mode", MODES)
def test_reordered_and_overlapping_inputs(kernel, device, mode):
    """q.flip(1); q, k, v as overlapping windows of one tensor; tokens and heads transposed"""
    x = rule_inputs(2, 9, device=device)
    compare(kernel, x._replace(q=x.q.flip(1)), x._replace(q=x.q.flip(1).contiguous()), mode)
    line = normal(2 * 9 * 40 + 400, device=device)
    windows = x._replace(
        q=line.as_strided((2, 9, 2, 32), (360, 40, 17, 1), 0),
        k=line.as_strided((2, 9, 2, 32), (360, 40, 17, 1), 7),
        v=line.as_strided((2, 9, 4, 32), (360, 40, 9, 1), 3),
    )
    compare(kernel, windows, Inputs(*(part.contiguous() for part in windows)), mode)
    turned = Inputs(*(part.transpose(1, 2).contiguous().transpose(1, 2) for part in x))
    compare(kernel, turned, x, mode)
    inner = Inputs(*(part.transpose(2, 3).contiguous().transpose(2, 3) for part in x[:3]), x.g, x.beta)
    assert inner.q.stride(-1) != 1
    compare(kernel, inner, x, mode)


@pytest.mark.parametrize("gates", DTYPES, ids=lambda dtype: f"gates_{short(dtype)}")
@pytest.mark.parametrize("out_dtype", DTYPES, ids=lambda dtype: f"out_{short(dtype)}")
@pytest.mark.parametrize("state_dtype", DTYPES, ids=lambda dtype: f"state_{short(dtype)}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: f"qkv_{short(dtype)}")
def test_dtype_combinations(kernel, device, dtype, state_dtype, out_dtype, gates):
    """q/k/v as a group, gates, state and out, each in every dtype"""
    x = rule_inputs(1, 12, dtype=dtype)
    x = x._replace(g=x.g.to(gates), beta=x.beta.to(gates))
    state = rule_state(1, dtype=state_dtype)
    expected = oracle.gated_delta_rule_pooled(*x, state, **NORM)
    mine = state.to(device, copy=True)
    out = torch.empty(x.v.shape, dtype=out_dtype, device=device)
    kernel.gated_delta_rule(*x.to(device), mine, out=out, mode="recurrent", **NORM)
    assert_rule(out, mine, expected, dtype)


@pytest.mark.parametrize("k, v", [pair for pair in itertools.product(DTYPES, DTYPES) if pair != (DTYPES[1],) * 2])
def test_mixed_dtypes_are_never_misread(kernel, device, k, v):
    """q bf16 with k or v of another dtype is right or raises"""
    x = rule_inputs(1, 12)
    x = x._replace(q=x.q.bfloat16(), k=x.k.to(k), v=x.v.to(v))
    state = rule_state(1)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to(device, copy=True)
    right_or_raises(
        lambda: kernel.gated_delta_rule(*x.to(device), mine, **NORM),
        lambda out: assert_rule(out, mine, expected, torch.bfloat16),
        mine,
    )


@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64), ids=short)
@pytest.mark.parametrize("offsets", ([3, 8, 12], [0, 8, 9], [0, 12], [12, 12], [4]), ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_legal_offsets(kernel, device, mode, offsets, index_dtype):
    """int32, int64, strided; a first offset above 0 and a last below the total leave zeros outside"""
    x = rule_inputs(1, 12)
    state = rule_state(len(offsets) - 1)
    expected = oracle.gated_delta_rule_pooled(*x, state, cu_seqlens=torch.tensor(offsets), **NORM)
    strided = torch.full((2 * len(offsets),), 7, dtype=index_dtype, device=device)
    strided[::2] = torch.tensor(offsets, dtype=index_dtype)
    for cu_seqlens in (strided[::2].contiguous(), strided[::2]):
        mine = state.to(device, copy=True)
        out = kernel.gated_delta_rule(*x.to(device), mine, cu_seqlens=cu_seqlens, mode=mode, **NORM)
        assert_rule(out, mine, expected, torch.float32, mode)
        assert_zero(out[:, : offsets[0]], "tokens before the first sequence")
        assert_zero(out[:, offsets[-1] :], "tokens after the last sequence")


BAD_OFFSETS = ([-1, 5, 12], [0, 8, 5], [0, 5, 13], [0, 2**31 - 1, 12], [-(2**31), 6, 12], [9, 3, 12])


@pytest.mark.parametrize("offsets", BAD_OFFSETS, ids=str)
def test_bad_offset_values(kernel, device, offsets):
    """raise on the CPU; on CUDA they never lead outside the tensors and a negative length counts as empty"""
    x, state = rule_inputs(1, 12, device=device), rule_state(2, device=device)
    signal, weight, window = normal(12, 8, device=device), normal(8, 4, device=device), normal(2, 8, 3, device=device)
    cu_seqlens = torch.tensor(offsets, device=device)
    if device == "cpu":
        before = state.clone()
        with pytest.raises(RuntimeError, match="gated_delta_rule: cu_seqlens"):
            kernel.gated_delta_rule(*x, state, cu_seqlens=cu_seqlens)
        with pytest.raises(RuntimeError, match="causal_conv1d: cu_seqlens"):
            kernel.causal_conv1d(signal, weight, conv_state=window, cu_seqlens=cu_seqlens)
        assert_same(state, before, "state")
        assert_same(window, normal(2, 8, 3), "window")
        return
    cut = [min(max(offset, 0), 12) for offset in offsets]
    expected_state, out_expected = state.clone(), torch.zeros(1, 12, 4, 32, device=device)
    seen = torch.zeros(12, dtype=torch.bool)
    for n, (first, end) in enumerate(zip(cut[:-1], cut[1:])):
        if first < end and not bool(seen[first:end].any()):
            part = expected_state[n : n + 1]
            out_expected[:, first:end] = kernel.gated_delta_rule(*x.tokens(first, end), part, **NORM)
            seen[first:end] = True
    out = kernel.gated_delta_rule(*x, state, cu_seqlens=cu_seqlens, **NORM)
    conv_out = kernel.causal_conv1d(signal, weight, conv_state=window, cu_seqlens=cu_seqlens)
    torch.cuda.synchronize()
    assert bool(out.isfinite().all()) and bool(conv_out.isfinite().all())
    if offsets != [9, 3, 12]:  # there the only live sequence still covers tokens 3..12, whatever came before
        assert_same(out, out_expected, "output")
    assert_same(state, expected_state, "state")


@pytest.mark.parametrize("scale", (2, True, 0.5, torch.tensor(0.5), "0.5"), ids=repr)
def test_forms_of_scale(kernel, device, scale):
    """a number or a 0-d tensor is right or raises; a string raises"""
    x, state = rule_inputs(1, 4), rule_state(1)
    mine = state.to(device, copy=True)
    if isinstance(scale, str):
        with pytest.raises(RAISES, match="scale"):
            kernel.gated_delta_rule(*x.to(device), mine, scale=scale)
        assert_same(mine.cpu(), state, "state")
        return
    expected = oracle.gated_delta_rule(*x, state, scale=float(scale), **NORM)
    right_or_raises(
        lambda: kernel.gated_delta_rule(*x.to(device), mine, scale=scale, **NORM),
        lambda out: assert_rule(out, mine, expected, torch.float32),
        mine,
    )


@pytest.mark.two_gpus
def test_second_gpu(kernel, device):
    """all tensors on cuda:1 while cuda:0 is current"""
    x, state = rule_inputs(2, 5), rule_state(2)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to("cuda:1")
    out = kernel.gated_delta_rule(*x.to("cuda:1"), mine, **NORM)
    assert_rule(out, mine, expected, torch.float32)
    signal, weight = normal(2, 8, 5, device="cuda:1"), normal(8, 4, device="cuda:1")
    assert_same(
        kernel.causal_conv1d(signal, weight).cpu(), kernel.causal_conv1d(signal.to("cuda:0"), weight.to("cuda:0")).cpu()
    )
    window, other = normal(2, 8, 3, device="cuda:1"), normal(2, 8, 3, device="cuda:0")
    kernel.causal_conv1d_update(signal, window, weight)
    kernel.causal_conv1d_update(signal.to("cuda:0"), other, weight.to("cuda:0"))
    assert_same(window.cpu(), other.cpu(), "window")
    y = x.to("cuda:1")
    for mine, same in zip(
        kernel.gated_delta_gates(y.g, y.beta, y.g[0, 0], y.g[0, 1]),
        kernel.gated_delta_gates(*(part.to("cuda:0") for part in (y.g, y.beta, y.g[0, 0], y.g[0, 1]))),
    ):
        assert_same(mine.cpu(), same.cpu())
    assert kernel.rms_norm_gated(y.v, y.v, y.v[0, 0, 0], 1e-6).device == torch.device("cuda:1")
    for result in kernel.qk_norm_rope(y.q, y.k, y.q[0, 0, 0], y.k[0, 0, 0], y.v[0, :, 0, :16], y.v[0, :, 1, :16], 1e-6):
        assert result.device == torch.device("cuda:1")
    assert kernel.output_gate(y.v, y.v).device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match="on cuda:1"):
        kernel.gated_delta_rule(*x.to("cuda:1"), state.to("cuda:0"))


WITHOUT_GPU = """
import torch
from kernels import get_kernel
from tests import oracle
from tests.helpers import assert_rule, rule_inputs, rule_state

kernel = get_kernel("org/gated-deltanet", version=1)
assert not torch.cuda.is_initialized()
x, state = rule_inputs(2, 5), kernel.new_state(2, 4, 32, 32)
expected = oracle.gated_delta_rule(*x, state, use_qk_l2norm=True)
assert_rule(kernel.gated_delta_rule(*x, state, use_qk_l2norm=True), state, expected, torch.float32)
signal, window = torch.randn(2, 8, 3), torch.zeros(2, 8, 3)
kernel.causal_conv1d_update(kernel.causal_conv1d(signal, torch.ones(8, 4), conv_state=window), window, torch.ones(8, 4))
kernel.rms_norm_gated(x.v, x.v, x.v[0, 0, 0], 1e-6)
kernel.gated_delta_gates(x.g, x.beta, x.g[0, 0], x.beta[0, 0])
kernel.qk_norm_rope(x.q, x.k, x.q[0, 0, 0], x.k[0, 0, 0], x.v[0, :, 0, :16], x.v[0, :, 1, :16], 1e-6)
kernel.output_gate(x.v, x.v)
assert not torch.cuda.is_initialized()
print("right on", state.device)
"""


def test_no_gpu(kernel, monkeypatch):
    """a fresh process that sees no GPU imports, runs every op, and never wakes the driver"""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_GPU]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right on cpu"


@pytest.mark.parametrize("context", ("inference_mode", "no_grad", "deterministic", "autocast"))
def test_execution_contexts(kernel, device, context):
    """same values and dtypes; under autocast the dtypes of the inputs given. Inference tensors serve as state"""
    x, fresh = rule_inputs(2, 9, device=device), rule_state(2, device=device)
    signal, weight, window = normal(2, 8, 5, device=device), normal(8, 4, device=device), normal(2, 8, 3, device=device)

    def calls(state, window):
        out = kernel.gated_delta_rule(*x, state, **NORM)
        functional = kernel.chunk_gated_delta_rule(
            x.q, x.k, x.v, g=x.g, beta=x.beta, initial_state=fresh, output_final_state=True
        )
        conv = kernel.causal_conv1d(signal, weight, None, "silu", conv_state=window)
        update = kernel.causal_conv1d_update(signal[..., :1], window, weight)
        gates = kernel.gated_delta_gates(x.g, x.beta, x.g[0, 0], x.g[0, 1])
        return (
            out,
            *functional,
            conv,
            update,
            *gates,
            kernel.rms_norm_gated(x.v, x.v, x.v[0, 0, 0], 1e-6),
            *kernel.qk_norm_rope(x.q, x.k, x.q[0, 0, 0], x.k[0, 0, 0], x.v[0, :, 0, :16], x.v[0, :, 1, :16], 1e-6),
            kernel.output_gate(x.v, x.v),
            state,
            window,
        )

    plain = calls(fresh.clone(), window.clone())
    if context == "deterministic":
        torch.use_deterministic_algorithms(True)
        try:
            results = calls(fresh.clone(), window.clone())
        finally:
            torch.use_deterministic_algorithms(False)
    else:
        manager = {
            "inference_mode": torch.inference_mode,
            "no_grad": torch.no_grad,
            "autocast": lambda: torch.autocast(device, dtype=torch.bfloat16),
        }[context]
        with manager():
            results = calls(fresh.clone(), window.clone())
    for result, expected in zip(results, plain):
        assert_same(result, expected)
    if context == "inference_mode":
        assert results[-2].is_inference()
        with torch.inference_mode():
            kernel.gated_delta_rule(*x, results[-2], **NORM)


OPTIONAL = ("g", "beta", "scale", "slots", "out_slots", "cu_seqlens", "has_initial_state", "out")


@pytest.mark.parametrize(
    "given",
    list(itertools.product((False, True), repeat=len(OPTIONAL)))[::3],
    ids=lambda g: "".join("01"[i] for i in g),
)
def test_optional_arguments_of_the_rule(kernel, device, given):
    """each optional argument None or given, in combination (every third of the 256)"""
    use = dict(zip(OPTIONAL, given))
    x = rule_inputs(1, 12) if use["cu_seqlens"] else rule_inputs(3, 4)
    x = x._replace(g=x.g if use["g"] else None, beta=x.beta if use["beta"] else None)
    options = {
        "scale": 0.3,
        "slots": torch.tensor([4, -1, 1]),
        "out_slots": torch.tensor([0, 1, 3]),
        "cu_seqlens": torch.tensor([0, 5, 5, 11]),
        "has_initial_state": torch.tensor([True, False, True]),
    }
    options = {name: value for name, value in options.items() if use[name]}
    pool = rule_state(5 if use["slots"] or use["out_slots"] else 3)
    if use["out_slots"] and not use["slots"]:
        pool = pool[:4]
    expected = oracle.gated_delta_rule_pooled(*x, pool, **options, **NORM)
    mine = pool.to(device, copy=True)
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    out = torch.empty_like(x.v, device=device) if use["out"] else None
    result = kernel.gated_delta_rule(*x.to(device), mine, out=out, **moved, **NORM)
    assert out is None or result.data_ptr() == out.data_ptr()
    assert_rule(result, mine, expected, torch.float32)


CONV_OPTIONAL = ("bias", "activation", "conv_state", "slots", "has_initial_state", "write_state", "out")


@pytest.mark.parametrize(
    "given",
    list(itertools.product((False, True), repeat=len(CONV_OPTIONAL))),
    ids=lambda g: "".join("01"[i] for i in g),
)
def test_optional_arguments_of_the_conv(kernel, device, given):
    """slots or has_initial_state without a conv_state raises"""
    use = dict(zip(CONV_OPTIONAL, given))
    x, weight, bias, pool = (
        normal(3, 8, 5),
        normal(8, 4, seed=2),
        normal(8, seed=3),
        normal(5 if use["slots"] else 3, 8, 3),
    )
    slots = torch.tensor([4, -1, 1]) if use["slots"] else None
    flags = torch.tensor([True, True, False]) if use["has_initial_state"] else None
    activation = "silu" if use["activation"] else None
    mine = pool.to(device, copy=True)
    options = {
        "conv_state": mine if use["conv_state"] else None,
        "slots": None if slots is None else slots.to(device),
        "has_initial_state": None if flags is None else flags.to(device),
        "write_state": not use["write_state"],
        "out": torch.empty_like(x, device=device) if use["out"] else None,
    }
    arguments = (x.to(device), weight.to(device), bias.to(device) if use["bias"] else None, activation)
    if (use["slots"] or use["has_initial_state"]) and not use["conv_state"]:
        with pytest.raises(RuntimeError, match="slots" if use["slots"] else "has_initial_state"):
            kernel.causal_conv1d(*arguments, **options)
        return
    out = kernel.causal_conv1d(*arguments, **options)
    for n in range(3):
        slot = n if slots is None else int(slots[n])
        if slot < 0:
            assert_zero(out[n], "padding row")
            continue
        starts_full = use["conv_state"] and (flags is None or bool(flags[n]))
        window = pool[slot][None] if starts_full else torch.zeros(1, 8, 3)
        expected, last = oracle.causal_conv1d(x[n : n + 1], weight, bias if use["bias"] else None, activation, window)
        assert_close(out[n : n + 1], expected, 1e-6, f"row {n}")
        if use["conv_state"]:
            wanted = last[0].float() if options["write_state"] else pool[slot]
            assert_same(mine[slot].cpu(), wanted, f"window {n}")


def test_loading_twice(kernel, device):
    """the same build under a second module name: no clash, equal results"""
    name = "a_second_copy_of_gated_deltanet"
    spec = importlib.util.spec_from_file_location(
        name, kernel.__file__, submodule_search_locations=[str(Path(kernel.__file__).parent)]
    )
    second = importlib.util.module_from_spec(spec)
    sys.modules[name] = second
    try:
        spec.loader.exec_module(second)
        x = rule_inputs(2, 5, device=device)
        state, other = rule_state(2, device=device), rule_state(2, device=device)
        assert second.gated_delta_rule is not kernel.gated_delta_rule
        assert_same(second.gated_delta_rule(*x, other, **NORM), kernel.gated_delta_rule(*x, state, **NORM), "output")
        assert_same(other, state, "state")
    finally:
        for module in [key for key in sys.modules if key.split(".")[0] == name]:
            del sys.modules[module]
