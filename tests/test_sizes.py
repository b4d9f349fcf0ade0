# SPDX-License-Identifier: Apache-2.0
"""Section C: offsets past 32 bits, large grids, empty and odd sizes, every length and head dim."""

import pytest
import torch

from . import oracle
from .helpers import (
    DTYPES,
    MODES,
    QWEN,
    SMALL,
    Guarded,
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

NORM = {"use_qk_l2norm": True}
HEAD_DIMS = (1, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256)


def decode_far_slot(kernel, device, pool, slot, shape):
    """One decode on `slot` of a huge pool: the slot matches, slots 0..3 keep their pattern."""
    x = rule_inputs(1, 1, shape, device=device)
    state = rule_state(1, shape, dtype=pool.dtype)
    pool[:4] = normal(*pool[0].shape, seed=9).to(device, pool.dtype)
    pool[slot] = state[0].to(device, copy=True)
    near = pool[:4].clone()
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    out = kernel.gated_delta_rule(*x, pool, slots=torch.tensor([slot], device=device), **NORM)
    assert_rule(out, pool[slot : slot + 1], expected, torch.float32)
    assert_same(pool[:4], near, "slots 0..3")


@pytest.mark.large(gib=12)
@pytest.mark.parametrize("slot_stride", (524288, 540672))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=short)
def test_pool_offset_past_2_31_elements(kernel, device, dtype, slot_stride):
    shape, slots = Shape(16, 32, 128, 128), 4200
    storage = torch.empty(slots, slot_stride, dtype=dtype, device=device)
    pool = storage[:, : 32 * 128 * 128].unflatten(1, (32, 128, 128))
    decode_far_slot(kernel, device, pool, slots - 1 if slot_stride == 524288 else 4000, shape)


@pytest.mark.large(gib=12)
def test_pool_offset_past_2_32_elements(kernel, device):
    """the slot starts exactly 2**32 elements in"""
    shape = Shape(1, 1, 32, 32)
    storage = torch.empty(2**32 + 2**20, dtype=torch.bfloat16, device=device)
    pool = storage.as_strided((4097, 1, 32, 32), (2**20, 1024, 32, 1))
    decode_far_slot(kernel, device, pool, 4096, shape)


@pytest.mark.large(gib=30)
@pytest.mark.parametrize("tokens", (17476, 17477))
def test_token_offset_past_2_31_elements(kernel, device, tokens):
    """16 rows just below and just above 2**31 elements; the last row equals the row alone"""
    B, H, D = 16, 60, 128
    q, k, v = (torch.empty(B, tokens, H, D, dtype=torch.bfloat16, device=device).normal_() for _ in range(3))
    g, beta = (torch.rand(B, tokens, H, device=device).neg_(), torch.rand(B, tokens, H, device=device))
    state = torch.zeros(B, H, D, D, device=device)
    out = kernel.gated_delta_rule(q, k, v, g, beta, state, mode="recurrent", **NORM)
    last = [x[-1:].clone() for x in (q, k, v, g, beta)]
    alone = torch.zeros(1, H, D, D, device=device)
    assert_same(kernel.gated_delta_rule(*last, alone, mode="recurrent", **NORM), out[-1:], "last row")
    assert_same(alone, state[-1:], "last state")


@pytest.mark.large(gib=30)
def test_one_sequence_past_2_31_elements(kernel, device):
    """524,289 tokens at once equal two halves with carried state"""
    T, H, D = 524289, 32, 128
    q, k, v = (torch.empty(1, T, H, D, dtype=torch.bfloat16, device=device).normal_() for _ in range(3))
    g, beta = torch.rand(1, T, H, device=device).neg_(), torch.rand(1, T, H, device=device)
    state, halves = torch.zeros(1, H, D, D, device=device), torch.zeros(1, H, D, D, device=device)
    out = kernel.gated_delta_rule(q, k, v, g, beta, state, mode="recurrent", **NORM)
    for part in (slice(0, 262144), slice(262144, T)):
        tokens = [x[:, part] for x in (q, k, v, g, beta)]
        piece = kernel.gated_delta_rule(*tokens, halves, mode="recurrent", **NORM)
    assert_same(piece[:, -100:], out[:, -100:], "last tokens")
    assert_same(halves, state, "state")


@pytest.mark.large(gib=12)
@pytest.mark.parametrize("channels_last", (False, True), ids=("BCT", "BTC"))
def test_conv_offset_past_2_31_elements(kernel, device, channels_last):
    """the last tokens equal a run on a small copy of them"""
    C, T = 10240, 210000
    x = torch.empty(1, T, C, dtype=torch.bfloat16, device=device).normal_()
    x = x.transpose(1, 2) if channels_last else x.view(1, C, T)
    weight = normal(C, 4, device=device)
    out = kernel.causal_conv1d(x, weight, None, "silu")
    expected = kernel.causal_conv1d(x[..., -103:].contiguous(), weight, None, "silu")
    assert_same(out[..., -100:], expected[..., -100:], "last tokens")
    if channels_last:
        ragged = kernel.causal_conv1d(x[0].T, weight, None, "silu", cu_seqlens=torch.tensor([0, T], device=device))
        assert_same(ragged[-100:].T, expected[0, :, -100:], "last ragged tokens")


@pytest.mark.large(gib=12)
def test_conv_batch_stride_past_2_31_elements(kernel, device):
    """two rows cut out of a larger tensor"""
    storage = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device=device)
    x = storage.as_strided((2, 64, 100), (2**31 + 64, 100, 1))
    x.copy_(normal(2, 64, 100))
    weight = normal(64, 4, seed=2, device=device)
    assert_same(kernel.causal_conv1d(x, weight), kernel.causal_conv1d(x.contiguous(), weight), "both rows")


@pytest.mark.parametrize("mode", MODES)
def test_more_than_65535_sequence_heads(kernel, device, mode):
    """2,050 ragged sequences of 32 heads (16 tokens each on CUDA, 2 on the CPU)"""
    N, tokens, shape = 2050, 16 if device == "cuda" else 2, Shape(16, 32, 32, 32)
    x = rule_inputs(1, N * tokens, shape, device=device)
    state = torch.zeros(N, 32, 32, 32, device=device)
    offsets = torch.arange(0, N * tokens + 1, tokens, device=device)
    out = kernel.gated_delta_rule(*x, state, cu_seqlens=offsets, mode=mode, **NORM)
    for n in (0, N // 2, N - 1):
        part = x.tokens(n * tokens, (n + 1) * tokens)
        expected = oracle.gated_delta_rule(*part, **NORM)
        assert_rule(out[:, n * tokens : (n + 1) * tokens], state[n : n + 1], expected, torch.float32, mode)
    half = N // 2
    split = torch.zeros_like(state)
    for first, end in ((0, half), (half, N)):
        part = x.tokens(first * tokens, end * tokens)
        rows = offsets[first : end + 1] - first * tokens
        piece = kernel.gated_delta_rule(*part, split[first:end], cu_seqlens=rows, mode=mode, **NORM)
        assert_same(piece, out[:, first * tokens : end * tokens], "split call")
    assert_same(split, state, "states of the split call")


def test_decode_of_more_than_65535_row_heads(kernel, device):
    """2,100 rows of 32 heads"""
    shape = Shape(16, 32, 32, 32)
    x = rule_inputs(2100, 1, shape, device=device)
    state = rule_state(2100, shape, device=device)
    rows = [0, 1050, 2099]
    expected = oracle.gated_delta_rule(*x.rows(rows), state[rows], **NORM)
    halves = state.clone()
    out = kernel.gated_delta_rule(*x, state, **NORM)
    assert_rule(out[rows], state[rows], expected, torch.float32)
    for part in (slice(0, 1000), slice(1000, 2100)):
        assert_same(kernel.gated_delta_rule(*x.rows(part), halves[part], **NORM), out[part], "split call")
    assert_same(halves, state, "states of the split call")


def test_conv_of_70000_sequences(kernel, device):
    """one token each, C = 8"""
    N = 70000
    x, weight = normal(N, 8, device=device), normal(8, 4, seed=2, device=device)
    window = normal(N, 8, 3, seed=3, device=device)
    expected = oracle.causal_conv1d(x[:, :, None], weight, None, "silu", window)
    updated = window.clone()
    out = kernel.causal_conv1d(
        x, weight, None, "silu", conv_state=window, cu_seqlens=torch.arange(N + 1, device=device)
    )
    assert_close(out, expected[0][..., 0], 1e-6)
    assert_close(window, expected[1], 1e-7)
    assert_same(kernel.causal_conv1d_update(x[:, :, None], updated, weight, None, "silu")[..., 0], out, "update")
    assert_same(updated, window, "window of the update")


OFFSETS = ([0, 5, 5, 5, 12, 12], [0, 0, 7, 12], [0, 7, 12, 12], [0, 0, 0], [0, 5, 9, 9, 9])


@pytest.mark.parametrize("has_state", (True, False), ids=("with", "without"))
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_empty_sequences(kernel, device, mode, offsets, has_state):
    """an empty sequence keeps its state; without one it has zero"""
    x = rule_inputs(1, 12)
    N = len(offsets) - 1
    state = rule_state(N)
    options = {"cu_seqlens": torch.tensor(offsets), "has_initial_state": torch.full((N,), has_state)}
    expected = oracle.gated_delta_rule_pooled(*x, state, **options, **NORM)
    mine = state.to(device, copy=True)
    moved = {name: value.to(device) for name, value in options.items()}
    out = kernel.gated_delta_rule(*x.to(device), mine, mode=mode, **moved, **NORM)
    assert_rule(out, mine, expected, torch.float32, mode)
    for n in range(N):
        if offsets[n] == offsets[n + 1]:
            wanted = state[n] if has_state else torch.zeros_like(state[n])
            assert_same(mine[n].cpu(), wanted, f"state of empty sequence {n}")
    initial = state.to(device, copy=True) if has_state else None
    q, k, v, g, beta = x.to(device)
    function = kernel.chunk_gated_delta_rule if mode == "chunk" else kernel.fused_recurrent_gated_delta_rule
    out, final = function(
        q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=True, use_qk_l2norm_in_kernel=True,
        cu_seqlens=moved["cu_seqlens"],
    )  # fmt: skip
    assert_rule(out, final, expected, torch.float32, mode)


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_empty_sequences_in_the_conv(kernel, device, offsets):
    N = len(offsets) - 1
    x, weight, window = normal(12, 24), normal(24, 4, seed=2), normal(N, 24, 3, seed=3)
    mine = window.to(device, copy=True)
    out = kernel.causal_conv1d(
        x.to(device), weight.to(device), conv_state=mine, cu_seqlens=torch.tensor(offsets, device=device)
    )
    for n, (first, end) in enumerate(zip(offsets[:-1], offsets[1:])):
        expected, last = oracle.causal_conv1d(x[first:end].T[None], weight, window=window[n : n + 1])
        assert_close(out[first:end].T, expected[0], 1e-6, f"sequence {n}")
        assert_same(mine[n].cpu(), last[0].float(), f"window {n}")
    assert_zero(out[offsets[-1] :], "tokens of no sequence")


@pytest.mark.parametrize(
    "batch, tokens, ragged", ((1, 0, False), (3, 0, False), (0, 5, False), (0, 0, False), (1, 0, True))
)
def test_no_tokens_at_all(kernel, device, batch, tokens, ragged):
    """cu_seqlens [0] names no sequence"""
    x = rule_inputs(batch, tokens, dtype=torch.bfloat16, device=device)
    options = {"cu_seqlens": torch.tensor([0], device=device)} if ragged else {}
    N = 0 if ragged else batch
    state = rule_state(N, device=device)
    before = state.clone()
    out = kernel.gated_delta_rule(*x, state, **options, **NORM)
    assert out.shape == (batch, tokens, 4, 32) and out.dtype == torch.bfloat16 and out.device.type == device
    assert_same(state, before, "state")
    final = kernel.chunk_gated_delta_rule(x.q, x.k, x.v, g=x.g, beta=x.beta, output_final_state=True, **options)[1]
    assert final.shape == (N, 4, 32, 32)
    assert_zero(final)
    window = normal(N, 24, 3, device=device)
    signal = normal(0, 24, device=device) if ragged else normal(batch, 24, tokens, device=device)
    before = window.clone()
    out = kernel.causal_conv1d(signal, normal(24, 4, device=device), conv_state=window, **options)
    assert out.shape == signal.shape
    if tokens == 0:
        assert_same(window, before, "window")


def test_elementwise_ops_without_tokens(kernel, device):
    for batch, tokens in ((1, 0), (0, 3)):
        a, x = normal(batch, tokens, 6, device=device), normal(batch, tokens, 6, 32, device=device)
        g, beta = kernel.gated_delta_gates(a, a, normal(6, device=device), normal(6, device=device))
        assert g.shape == beta.shape == a.shape and g.dtype == torch.float32
        assert kernel.rms_norm_gated(x, x, normal(32, device=device), 1e-6).shape == x.shape


@pytest.mark.parametrize("V", HEAD_DIMS)
@pytest.mark.parametrize("K", HEAD_DIMS)
def test_head_dims(kernel, device, K, V):
    """every pair; out and state between guards"""
    shape = Shape(1, 2, K, V)
    x = rule_inputs(1, 70, shape)
    state = rule_state(1, shape)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    out = Guarded(1, 70, 2, V, device=device)
    mine = Guarded(1, 2, K, V, device=device, fill=state)
    kernel.gated_delta_rule(*x.to(device), mine.tensor, mode="recurrent", out=out.tensor, **NORM)
    assert_rule(out.tensor, mine.tensor, expected, torch.float32)
    out.check()
    mine.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("layout", ("K-first", "V-first"))
@pytest.mark.parametrize("K, V", ((31, 257 - 7), (5, 3), (100, 72), (48, 100), (256, 255), (2, 129)))
def test_odd_head_dims(kernel, device, K, V, layout, dtype):
    """no multiple of a tile, with strided 16-bit inputs and either layout"""
    shape = Shape(1, 2, K, V)
    x = rule_inputs(2, 9, shape, dtype=dtype)
    state = rule_state(2, shape, layout=layout)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = rule_state(2, shape, layout=layout, device=device, slot_padding=3)
    packed = torch.cat([part.flatten(2) for part in x[:3]], -1).to(device)
    q, k, v = (p.unflatten(-1, (-1, d)) for p, d in zip(packed.split([K, K, 2 * V], -1), (K, K, V)))
    out = kernel.gated_delta_rule(q, k, v, *x.to(device)[3:], mine, mode="recurrent", **NORM)
    assert_rule(out, mine, expected, dtype)


@pytest.mark.parametrize("K, V", ((257, 32), (32, 257), (512, 512)))
def test_head_dims_past_256_raise(kernel, device, K, V):
    """the message states what is supported"""
    shape = Shape(1, 1, K, V)
    with pytest.raises(RuntimeError, match="256"):
        kernel.gated_delta_rule(*rule_inputs(1, 1, shape, device=device), rule_state(1, shape, device=device))


@pytest.mark.parametrize("Hk, Hv", ((3, 9), (1, 1), (1, 64)))
def test_head_counts(kernel, device, Hk, Hv):
    shape = Shape(Hk, Hv, 32, 32)
    x, state = rule_inputs(2, 8, shape), rule_state(2, shape)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to(device, copy=True)
    assert_rule(kernel.gated_delta_rule(*x.to(device), mine, **NORM), mine, expected, torch.float32)


@pytest.mark.parametrize("gate", ("constant", "random"))
@pytest.mark.parametrize("size", ("small", "qwen"))
@pytest.mark.parametrize("mode", MODES)
def test_every_length(kernel, device, mode, size, gate):
    """T = 1..130, output and final state for each T (on the CPU Qwen's head dims with 6 of its 48 heads)"""
    shape = SMALL if size == "small" else QWEN if device == "cuda" else Shape(2, 6, 128, 128)
    x = rule_inputs(1, 130, shape)
    if gate == "constant":
        x = x._replace(g=torch.full_like(x.g, -0.5))
    state = rule_state(1, shape)
    mine, fresh = x.to(device), state.to(device, copy=True)
    bounds = oracle.rule_bounds(torch.float32, mode)
    outputs = []
    for T, (o, S) in enumerate(oracle.rule_steps(*x, state, **NORM), 1):
        outputs.append(o)
        carried = fresh.clone()
        out = kernel.gated_delta_rule(*mine.tokens(0, T), carried, mode=mode, **NORM)
        assert_close(out, torch.stack(outputs, 1), bounds[0], f"output of {T} tokens")
        assert_close(carried, S, bounds[1], f"state after {T} tokens")


@pytest.mark.parametrize("tokens", (63, 64, 65, 127, 128, 129, 511, 512, 513, 1024))
@pytest.mark.parametrize("mode", MODES)
def test_block_boundaries(kernel, device, mode, tokens):
    x, state = rule_inputs(1, 1024).tokens(0, tokens), rule_state(1)
    expected = oracle.gated_delta_rule(*x, state, **NORM)
    mine = state.to(device, copy=True)
    assert_rule(kernel.gated_delta_rule(*x.to(device), mine, mode=mode, **NORM), mine, expected, torch.float32, mode)


@pytest.mark.parametrize("tokens", (32768, 131072))
@pytest.mark.parametrize("mode", MODES)
def test_long_sequence(kernel, device, mode, tokens):
    """no NaN, and the state equals that of two halves"""
    x = rule_inputs(1, tokens, Shape(1, 2, 32, 32), dtype=torch.bfloat16, device=device)
    state, halves = (torch.zeros(1, 2, 32, 32, device=device) for _ in range(2))
    out = kernel.gated_delta_rule(*x, state, mode=mode, **NORM)
    for part in ((0, tokens // 2), (tokens // 2, tokens)):
        kernel.gated_delta_rule(*x.tokens(*part), halves, mode=mode, **NORM)
    assert bool(out.isfinite().all()) and bool(state.isfinite().all())
    assert_same(halves, state, "state of two halves")
