# SPDX-License-Identifier: Apache-2.0
"""Section E: gate regimes, ranges, infinities, NaN, causality, long runs; padding and continuation of the rule (F)."""

import math

import pytest
import torch
import torch.nn.functional as F

from . import oracle
from .helpers import (
    DTYPES,
    MODES,
    SMALL,
    Inputs,
    Shape,
    assert_close,
    assert_rule,
    assert_same,
    assert_zero,
    normal,
    rule_inputs,
    rule_state,
    short,
)
from .peers import torch_recurrent_gated_delta_rule

NORM = {"use_qk_l2norm": True}
NAN = float("nan")
each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.mark.parametrize("dim", (1, 32))
@pytest.mark.parametrize("beta, answer", ((1.0, 1.0), (0.5, 0.75)))
@each_mode
def test_decay_comes_before_the_error(kernel, device, mode, beta, answer, dim):
    """S = 1, g = ln 0.5, k = v = q = 1; by hand"""

    def one(*shape, value=1.0):
        tensor = torch.zeros(*shape, device=device)
        tensor.view(-1)[0] = value
        return tensor

    vector, gate = one(1, 1, 1, dim), (1, 1, 1)
    state = one(1, 1, dim, dim)
    out = kernel.gated_delta_rule(
        vector, vector, vector, one(*gate, value=math.log(0.5)), one(*gate, value=beta), state, scale=1, mode=mode
    )
    assert_close(state, one(1, 1, dim, dim, value=answer), 1e-7, "state")
    assert_close(out, one(1, 1, 1, dim, value=answer), 1e-7, "output")


GATES = {
    "zero": lambda g: torch.zeros_like(g),
    "tiny": lambda g: g * 1e-4,
    "usual": lambda g: g,
    "-20": lambda g: torch.full_like(g, -20.0),
    "-100": lambda g: torch.full_like(g, -100.0),
    "-1e4": lambda g: torch.full_like(g, -1e4),
    "alternating": lambda g: torch.where(torch.arange(g.shape[1])[None, :, None] % 2 == 0, 0.0, -50.0).expand_as(g),
    "-inf": lambda g: torch.where(torch.arange(g.shape[1])[None, :, None] == 100, -math.inf, g),
}


@pytest.mark.parametrize("regime", GATES)
@each_mode
def test_gate_regimes(kernel, device, mode, regime):
    """T = 200 with an initial state"""
    x = rule_inputs(1, 200)
    x = x._replace(g=GATES[regime](x.g))
    state = rule_state(1)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to(device, copy=True)
    out = kernel.gated_delta_rule(*x.to(device), mine, mode=mode, **NORM)
    assert bool(out.isfinite().all()) and bool(mine.isfinite().all())
    assert_rule(out, mine, expected, torch.float32, mode)


@each_mode
def test_infinite_decay_clears_the_state_exactly(kernel, device, mode):
    """g = -inf and beta = 0 leave exactly nothing"""
    x = rule_inputs(1, 1, device=device)
    x = x._replace(g=torch.full_like(x.g, -math.inf), beta=torch.zeros_like(x.beta))
    state = rule_state(1, device=device)
    assert_zero(kernel.gated_delta_rule(*x, state, mode=mode, **NORM), "output")
    assert_zero(state, "state")


def test_strong_decay_shrinks_by_nine_orders(kernel, device):
    """g = ln 1e-9, nothing written: the state is 1e-9 of what it was"""
    x = rule_inputs(1, 1, device=device)
    x = x._replace(g=torch.full_like(x.g, math.log(1e-9)), beta=torch.zeros_like(x.beta))
    state = rule_state(1, device=device)
    before = state.cpu().double()
    kernel.gated_delta_rule(*x, state, **NORM)
    assert_close(state, before * float(x.g[0, 0, 0].double().exp()), 1e-6)


def test_growth_is_followed(kernel, device):
    """g = +0.01 over 64 tokens"""
    x = rule_inputs(1, 64)
    x = x._replace(g=torch.full_like(x.g, 0.01))
    state = rule_state(1)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to(device, copy=True)
    out = kernel.gated_delta_rule(*x.to(device), mine, mode="recurrent", **NORM)
    assert_close(out, expected[0], 1e-4)
    assert_close(mine, expected[1], 1e-4)


def test_outside_the_contraction_region(kernel, device):
    """beta |k|^2 > 2, g = 0: diverges as the oracle and the reference do, to five figures"""
    x = rule_inputs(1, 64, Shape(2, 2, 32, 32))
    keys = oracle.l2norm(x.k + 2 * x.k[:, :1]) * 1.7  # they share a direction, or the growth is lost in the other 31
    x = x._replace(k=keys, g=torch.zeros_like(x.g), beta=torch.full_like(x.beta, 0.99))
    assert bool((x.beta[..., None] * x.k.square().sum(-1, keepdim=True) > 2).all())
    state = rule_state(1, Shape(2, 2, 32, 32))
    expected = oracle.gated_delta_rule(*x, state)
    assert float(expected[1].norm() / state.norm()) > 1e5, "control: this case does diverge"
    peer, peer_state = torch_recurrent_gated_delta_rule(*x, initial_state=state, output_final_state=True)
    mine = state.to(device, copy=True)
    out = kernel.gated_delta_rule(*x.to(device), mine, mode="recurrent")
    assert_close(out, expected[0], 1e-4, "output against the oracle")
    assert_close(mine, expected[1], 1e-4, "state against the oracle")
    assert_close(out, peer, 1e-5, "output against transformers")
    assert_close(mine, peer_state, 1e-5, "state against transformers")


@each_mode
def test_beta_up_to_two(kernel, device, mode):
    """beta in (1, 2), T = 4096; and beta = 2, g = 0 with one key in all of T = 256"""
    x = rule_inputs(1, 4096, Shape(1, 2, 32, 32))
    x = x._replace(beta=1 + x.beta)
    state = rule_state(1, Shape(1, 2, 32, 32))
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to(device, copy=True)
    out = kernel.gated_delta_rule(*x.to(device), mine, mode=mode, **NORM)
    assert_rule(out, mine, expected, torch.float32, mode)
    x = rule_inputs(1, 256)
    x = x._replace(k=x.k[:, :1].expand_as(x.k), g=torch.zeros_like(x.g), beta=torch.full_like(x.beta, 2.0))
    state = rule_state(1)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to(device, copy=True)
    out = kernel.gated_delta_rule(*x.to(device), mine, mode=mode, **NORM)
    assert_close(out, expected[0], 1e-3)
    assert_close(mine, expected[1], 1e-3)


@pytest.mark.parametrize("tokens", (1, 70))
@each_mode
def test_output_beyond_the_fp16_range(kernel, device, mode, tokens):
    """an fp32 out is finite and right, an fp16 out is inf where it must be, never NaN"""
    x = rule_inputs(1, tokens, dtype=torch.float16)
    x = x._replace(g=x.g / 64)
    state = rule_state(1) * 1e6
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    assert float(expected[0].abs().max()) > 65520, "control: the output does leave the range"
    mine = state.to(device, copy=True)
    out = torch.empty(x.v.shape, device=device)
    kernel.gated_delta_rule(*x.to(device), mine, mode=mode, out=out, **NORM)
    assert_rule(out, mine, expected, torch.float16, mode)
    half = kernel.gated_delta_rule(*x.to(device), state.to(device, copy=True), mode=mode, **NORM)
    assert half.dtype == torch.float16 and not bool(half.isnan().any())
    assert_same(half, out.half(), "fp16 output")
    assert bool(half.isinf().any())


@each_mode
def test_large_state_element(kernel, device, mode):
    """an fp32 state with an element 65536 under fp16 tokens"""
    x = rule_inputs(1, 70, dtype=torch.float16)
    state = rule_state(1)
    state[0, 1, 3, 5] = 65536.0
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to(device, copy=True)
    out = kernel.gated_delta_rule(*x.to(device), mine, mode=mode, **NORM)
    assert not bool(out.isnan().any()) and bool(mine.isfinite().all())
    assert_rule(out, mine, expected, torch.float16, mode)


def test_beta_stays_in_fp32(kernel, device):
    """b = 0.5 in bf16, 1000 decode steps of bf16 activations through gates and rule"""
    steps = 1000
    x = rule_inputs(1, steps, dtype=torch.bfloat16, device=device)
    b = torch.full((1, steps, 4), 0.5, dtype=torch.bfloat16, device=device)
    a, A_log, dt_bias = (
        normal(1, steps, 4, dtype=torch.bfloat16, device=device),
        normal(4, device=device),
        normal(4, seed=2, device=device),
    )
    state, expected = torch.zeros(1, 4, 32, 32, device=device), oracle.gated_delta_gates(a, b, A_log, dt_bias)
    for t in range(steps):
        g, beta = kernel.gated_delta_gates(a[:, t : t + 1], b[:, t : t + 1], A_log, dt_bias)
        token = x.tokens(t, t + 1)._replace(g=g, beta=beta)
        kernel.gated_delta_rule(*token, state, **NORM)
    assert beta.dtype == torch.float32 and abs(float(beta[0, 0, 0]) - 0.62245935) < 1e-7
    exact = x.to("cpu")._replace(g=expected[0], beta=expected[1])
    assert_close(state, oracle.gated_delta_rule(*exact, **NORM)[1], 1e-6)


@pytest.mark.parametrize("window_dtype", (torch.bfloat16, torch.float32), ids=short)
def test_fp32_state_with_bf16_activations(kernel, device, window_dtype):
    """2000 decode steps; state and window keep their own dtypes, nothing is rounded to bf16 between steps"""
    steps = 2000
    x = rule_inputs(1, steps, Shape(1, 1, 32, 32), dtype=torch.bfloat16)
    x = x._replace(g=x.g / 100)
    signal = normal(1, 8, steps, dtype=torch.bfloat16)
    weight = normal(8, 4, seed=2)
    y, signal_here, weight_here = x.to(device), signal.to(device), weight.to(device)
    state, window = torch.zeros(1, 1, 32, 32, device=device), torch.zeros(1, 8, 3, dtype=window_dtype, device=device)
    for t in range(steps):
        kernel.gated_delta_rule(*y.tokens(t, t + 1), state, **NORM)
        kernel.causal_conv1d_update(signal_here[..., t : t + 1], window, weight_here)
    assert state.dtype == torch.float32 and window.dtype == window_dtype
    assert_close(state, oracle.gated_delta_rule(*x, **NORM)[1], 1e-4, "state")
    assert_same(window.cpu(), signal[..., -3:].to(window_dtype), "window")


@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"))
def test_missing_gates(kernel, device, name):
    """g = None is g = 0, beta = None is ones; the state is updated"""
    x = rule_inputs(2, 20, device=device)
    state = rule_state(2, device=device)
    zero, one = torch.zeros_like(x.g), torch.ones_like(x.beta)
    for given in ({}, {"g": x.g}, {"beta": x.beta}):
        full = {"g": given.get("g", zero), "beta": given.get("beta", one)}
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        out, final = getattr(kernel, name)(*x[:3], **given, **options)
        expected, expected_final = getattr(kernel, name)(*x[:3], **full, **options)
        assert_same(out, expected, "output")
        assert_same(final, expected_final, "final state")
        assert not torch.equal(final, state)


@pytest.mark.parametrize("size", (1e-4, 0.0, 1e-30, 1e20))
@pytest.mark.parametrize("which", ("k", "q"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=short)
def test_l2norm_of_odd_vectors(kernel, device, dtype, which, size):
    """x * rsqrt(sum + 1e-6), zero gives zero; a sum that overflows fp32 gives a zero vector, documented"""
    x = rule_inputs(1, 3, dtype=dtype)
    x = x._replace(**{which: (getattr(x, which).float() * size).to(dtype)})
    state = rule_state(1)
    seen = x._replace(**{which: torch.zeros_like(getattr(x, which))}) if size == 1e20 else x
    expected = oracle.gated_delta_rule(*seen, state, **NORM)
    mine = state.to(device, copy=True)
    out = kernel.gated_delta_rule(*x.to(device), mine, mode="recurrent", **NORM)
    assert bool(out.isfinite().all()) and bool(mine.isfinite().all())
    assert_rule(out, mine, expected, dtype)


@each_mode
def test_grouped_heads(kernel, device, mode):
    """value head h uses key head h // 3, not h % 2; the interleaved map is a permutation of value heads"""
    shape = Shape(2, 6, 32, 32)
    x, state = rule_inputs(1, 20, shape, device=device), rule_state(1, shape, device=device)
    grouped_state, repeated_state = state.clone(), state.clone()
    out = kernel.gated_delta_rule(*x, grouped_state, mode=mode, **NORM)
    repeated = x._replace(q=x.q.repeat_interleave(3, 2), k=x.k.repeat_interleave(3, 2))
    assert_same(out, kernel.gated_delta_rule(*repeated, repeated_state, mode=mode, **NORM), "output")
    assert_same(grouped_state, repeated_state, "state")
    wrong = x._replace(q=x.q.repeat(1, 1, 3, 1), k=x.k.repeat(1, 1, 3, 1))
    wrong_out = kernel.gated_delta_rule(*wrong, state.clone(), mode=mode, **NORM)
    assert not torch.allclose(wrong_out, out, rtol=1e-2), "control: h % 2 is another function"
    order = torch.tensor([0, 2, 4, 1, 3, 5], device=device)  # heads of key head 0 first
    permuted = x._replace(v=x.v[:, :, order], g=x.g[..., order], beta=x.beta[..., order])
    interleaved = kernel.gated_delta_rule(*permuted, state[:, order].clone(), mode=mode, **NORM)
    assert_same(interleaved, wrong_out[:, :, order], "interleaved map")


@pytest.mark.parametrize("tokens", (1, 3))
def test_infinity_in_the_state(kernel, device, tokens):
    """non-finite exactly where the oracle is, of the same kind in the state; the rest is right"""
    x, state = rule_inputs(2, tokens), rule_state(2)
    state[1, 2, 7, 9] = math.inf
    expected_out, expected_state = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to(device, copy=True)
    out = kernel.gated_delta_rule(*x.to(device), mine, mode="recurrent", **NORM).cpu()
    mine = mine.cpu()
    assert torch.equal(out.isfinite(), expected_out.isfinite()), "output is non-finite elsewhere"
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(mine), kind(expected_state)), f"{kind.__name__} of the state"
    assert not bool(expected_state.isfinite().all())
    assert_close(out[out.isfinite()], expected_out[out.isfinite()], 1e-6, "finite output")
    assert_close(mine[mine.isfinite()], expected_state[mine.isfinite()], 1e-6, "finite state")


@pytest.mark.parametrize("which", Inputs._fields)
@each_mode
def test_nan_stays_where_it_is(kernel, device, mode, which):
    """4 ragged sequences of 70; NaN in token 35 of row 1, in the head that value heads 2 and 3 (or 3) use"""
    rows, tokens, at = 4, 70, 35
    x = rule_inputs(1, rows * tokens, device=device)
    offsets = torch.arange(0, rows * tokens + 1, tokens, device=device)
    fresh = rule_state(rows, device=device)
    clean_state, state = fresh.clone(), fresh.clone()
    options = {"cu_seqlens": offsets, "mode": mode, **NORM}
    clean = kernel.gated_delta_rule(*x, clean_state, **options)
    poisoned = getattr(x, which).clone()
    head = 1 if which in "qk" else 3
    poisoned[0, tokens + at, head].view(-1)[0] = NAN
    out = kernel.gated_delta_rule(*x._replace(**{which: poisoned}), state, **options)
    hit_heads = slice(2, 4) if which in "qk" else slice(3, 4)
    first_hit = at if mode == "recurrent" else at - at % 64
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[0, tokens + first_hit : 2 * tokens, hit_heads] = True
    assert_same(out[~hit], clean[~hit], "everything outside the row's own heads and earlier tokens")
    assert bool(out[0, tokens + at, hit_heads].isnan().any()), "control: the NaN is seen"
    hit_state = torch.zeros_like(state, dtype=torch.bool)
    hit_state[1, hit_heads] = which != "q" or mode == "chunk"
    assert_same(state[~hit_state], clean_state[~hit_state], "state")


@pytest.mark.parametrize("tokens", (1, 5, 70))
@each_mode
def test_nan_past_the_end_has_no_effect(kernel, device, mode, tokens):
    """memory just past a sequence that ends inside a chunk, dense and ragged, and padding inside a row's stride"""
    x = rule_inputs(1, 96, device=device)
    expected_state = rule_state(1, device=device)
    expected = kernel.gated_delta_rule(*x.tokens(0, tokens).map(torch.clone), expected_state, mode=mode, **NORM)
    for part in x:
        part[:, tokens:] = NAN
    state = rule_state(1, device=device)
    assert_same(kernel.gated_delta_rule(*x.tokens(0, tokens), state, mode=mode, **NORM), expected, "dense output")
    assert_same(state, expected_state, "dense state")
    state = rule_state(1, device=device)
    offsets = torch.tensor([0, tokens], device=device)
    out = kernel.gated_delta_rule(*x, state, cu_seqlens=offsets, mode=mode, **NORM)
    assert_same(out[:, :tokens], expected, "ragged output")
    assert_zero(out[:, tokens:], "tokens of no sequence")
    assert_same(state, expected_state, "ragged state")


@pytest.mark.parametrize("g", (0.0, -1e-3))
def test_long_decode_stays_bounded(kernel, device, g):
    """200,000 tokens of unit keys and |v| <= 1"""
    tokens = 200_000
    shape = Shape(1, 1, 32, 32)
    x = rule_inputs(1, tokens, shape, device=device)
    x = x._replace(v=torch.tanh(x.v), g=torch.full_like(x.g, g))
    state = torch.zeros(1, 1, 32, 32, device=device)
    out = kernel.gated_delta_rule(*x, state, mode="recurrent", **NORM)
    assert bool(out.isfinite().all())
    assert float(state.abs().max()) <= math.sqrt(tokens)


@pytest.mark.parametrize("at", (0, 15, 16, 63, 64, 100))
@pytest.mark.parametrize("V", (32, 192))
@each_mode
def test_causality(kernel, device, mode, V, at):
    """changing token t leaves every output before it (chunk mode: before its 64-token piece) bitwise unchanged"""
    shape = Shape(2, 4, 32, V)
    x, other = rule_inputs(1, 150, shape, device=device), rule_inputs(1, 150, shape, seed=7, device=device)
    changed = x.map(torch.clone)
    for mine, new in zip(changed, other):
        mine[:, at] = new[:, at]
    out = kernel.gated_delta_rule(*x, rule_state(1, shape, device=device), mode=mode, **NORM)
    out_changed = kernel.gated_delta_rule(*changed, rule_state(1, shape, device=device), mode=mode, **NORM)
    kept = at if mode == "recurrent" else at - at % 64
    assert_same(out_changed[:, :kept], out[:, :kept], "tokens before")
    if kept < at:
        assert_close(out_changed[:, kept:at], out[:, kept:at], oracle.BOUNDS[torch.float32, mode][0], "same piece")
    assert not torch.equal(out_changed[:, at], out[:, at]), "control: the token itself does change"


@each_mode
def test_right_padded_batches(kernel, device, mode):
    """ragged over the real tokens, or dense with g = 0, beta = 0 in the padding: the state at the true length"""
    lengths = (8, 5, 1)
    x = rule_inputs(3, 8, device=device)
    fresh = rule_state(3, device=device)
    real = [x.rows(slice(n, n + 1)).tokens(0, length) for n, length in enumerate(lengths)]
    alone = [fresh[n : n + 1].clone() for n in range(3)]
    outs = [kernel.gated_delta_rule(*part, state, mode=mode, **NORM) for part, state in zip(real, alone)]
    packed = Inputs(*(torch.cat(parts, 1) for parts in zip(*real)))
    ragged, dense = fresh.clone(), fresh.clone()
    offsets = torch.tensor([0, 8, 13, 14], device=device)
    out = kernel.gated_delta_rule(*packed, ragged, cu_seqlens=offsets, mode=mode, **NORM)
    assert_same(out, torch.cat(outs, 1), "ragged output")
    padding = torch.arange(8, device=device)[None, :, None] >= torch.tensor(lengths, device=device)[:, None, None]
    closed = x._replace(g=x.g.masked_fill(padding, 0.0), beta=x.beta.masked_fill(padding, 0.0))
    out = kernel.gated_delta_rule(*closed, dense, mode=mode, **NORM)
    for n, length in enumerate(lengths):
        assert_same(ragged[n : n + 1], alone[n], f"ragged state {n}")
        assert_same(dense[n : n + 1], alone[n], f"dense state {n}")
        assert_same(out[n : n + 1, :length], outs[n], f"dense output {n}")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_continuation_of_the_whole_chain(kernel, device, dtype):
    """the ops: convolution, gates, rule and norm over 20 tokens = 12 + 5 + single ones"""
    Hk, Hv, K, V = SMALL
    C, T = 2 * Hk * K + Hv * V, 20
    mixed, z = normal(2, T, C, dtype=dtype, device=device), normal(2, T, Hv, V, seed=2, dtype=dtype, device=device)
    a, b = normal(2, T, Hv, seed=3, dtype=dtype, device=device), normal(2, T, Hv, seed=4, dtype=dtype, device=device)
    weight, heads = normal(C, 4, seed=5, device=device), normal(4, 2, seed=6, device=device)

    def chain(window, state, tokens):
        x = mixed[:, tokens].transpose(1, 2)
        if x.shape[-1] > 1:
            y = kernel.causal_conv1d(x, weight, None, "silu", conv_state=window).transpose(1, 2)
        else:
            y = kernel.causal_conv1d_update(x, window, weight, None, "silu").transpose(1, 2)
        q, k, v = y.split([Hk * K, Hk * K, Hv * V], -1)
        g, beta = kernel.gated_delta_gates(a[:, tokens], b[:, tokens], heads[:, 0], heads[:, 1])
        q, k, v = q.unflatten(-1, (Hk, K)), k.unflatten(-1, (Hk, K)), v.unflatten(-1, (Hv, V))
        o = kernel.gated_delta_rule(q, k, v, g, beta, state, mode="recurrent", **NORM)
        return kernel.rms_norm_gated(o, z[:, tokens], weight[:V, 0], 1e-6)

    def run(splits):
        window, state = torch.zeros(2, C, 3, dtype=dtype, device=device), torch.zeros(2, Hv, K, V, device=device)
        return torch.cat([chain(window, state, slice(*part)) for part in splits], 1), window, state

    whole = run([(0, T)])
    pieces = run([(0, 12), (12, 17), (17, 18), (18, 19), (19, 20)])
    for mine, expected in zip(pieces, whole):
        assert_same(mine, expected)
    assert_same(whole[1], mixed[:, -3:].transpose(1, 2).contiguous(), "window")
    assert float(F.cosine_similarity(whole[0].float().flatten(), z.float().flatten(), dim=0).abs()) < 0.9
