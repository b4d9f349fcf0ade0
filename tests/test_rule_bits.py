# SPDX-License-Identifier: Apache-2.0
"""Where bits are promised: the bit rule itself, splits, batches, packing, slot order, layouts, tiles, repeated runs."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .helpers import (
    DTYPES,
    SMALL,
    TENSOR_CORES,
    Inputs,
    Shape,
    StepOp,
    assert_same,
    normal,
    rule_inputs,
    rule_state,
    short,
)
from .oracle import one_thread

ROOT = Path(__file__).resolve().parent.parent
SHAPES = (SMALL, Shape(1, 3, 128, 128), Shape(2, 2, 40, 100), Shape(2, 4, 64, 192))


def run(kernel, x, state, **options):
    return kernel.gated_delta_rule(*x, state, mode="recurrent", **{"use_qk_l2norm": True, **options})


def fma(a, b, c):
    """fp32 a * b + c, rounded once: exact product in float64, the sum rounded to odd there, then to fp32."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    even = total.view(torch.int64) % 2 == 0
    toward = torch.where(lost > 0, torch.inf, -torch.inf).double()
    return torch.where((lost != 0) & even, torch.nextafter(total, toward), total).float()


def tree_sum(a, b):
    """sum over the next to last dim of a * b: 32 partials, ascending, by fma from +0; then adjacent pairs."""
    a, b = torch.broadcast_tensors(a, b)
    missing = -a.shape[-2] % 32
    a, b = (torch.nn.functional.pad(x, (0, 0, 0, missing)).unflatten(-2, (-1, 32)) for x in (a, b))
    partial = torch.zeros_like(a[..., 0, :, :])
    for i in range(a.shape[-3]):
        partial = fma(a[..., i, :, :], b[..., i, :, :], partial)
    for _ in range(5):
        partial = partial[..., 0::2, :] + partial[..., 1::2, :]
    return partial[..., 0, :]


def norm_factor(total):
    """1 / sqrt(total + 1e-6), each step rounded to fp32 (torch's own fp32 sqrt is off by a bit here and there)."""
    root = (total + 1e-6).double().sqrt().float()
    return (1.0 / root.double()).float()


def bit_rule(x, decay, state, use_qk_l2norm, scale):
    """The arithmetic of the docs in fp32 torch: raw q and k, the old S, one order for every sum. decay = exp(g)."""
    q, k, v, _, beta = x
    heads = torch.arange(v.shape[2]) // (v.shape[2] // q.shape[2])
    q, k, S = q[:, :, heads, :, None], k[:, :, heads, :, None], state
    outputs = []
    for t in range(v.shape[1]):
        alpha, b = decay[:, t, :, None], beta[:, t, :, None]
        sk = sq = torch.ones_like(alpha)
        if use_qk_l2norm:
            sk, sq = (norm_factor(tree_sum(z, z)) for z in (k[:, t], q[:, t]))
        u, w, c = tree_sum(S, k[:, t]), tree_sum(S, q[:, t]), tree_sum(k[:, t], q[:, t])
        f = (b * fma(-(alpha * sk), u, v[:, t])) * sk
        outputs.append((scale * sq) * fma(c, f, alpha * w))
        S = fma(k[:, t], f[..., None, :], alpha[..., None] * S)
    return torch.stack(outputs, 1), S


@pytest.mark.kernels_ci
@pytest.mark.parametrize("use_qk_l2norm", (True, False), ids=("l2norm", "plain"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arithmetic_is_the_bit_rule(kernel, device, shape, use_qk_l2norm):
    """Every rounding and the order of every sum, both backends: equal to the rule as it is written"""
    x = rule_inputs(2, 3, shape)
    if not use_qk_l2norm:
        x = x._replace(k=x.k / 8)
    decay = x.g.exp()
    state = rule_state(2, shape)
    scale = torch.tensor(shape.K**-0.5, dtype=torch.float32)
    with one_thread():
        expected_out, expected_state = bit_rule(x, decay, state, use_qk_l2norm, scale)
    mine = state.to(device, copy=True)
    linear = x._replace(g=decay).to(device)
    out = run(kernel, linear, mine, use_qk_l2norm=use_qk_l2norm, gate_domain="linear")
    assert_same(out.cpu(), expected_out, "output")
    assert_same(mine.cpu(), expected_state, "state")


@pytest.mark.parametrize(
    "dtype, use_qk_l2norm, layout",
    (
        (torch.float32, True, "K-first"),
        (torch.float32, False, "V-first"),
        (torch.bfloat16, True, "V-first"),
        (torch.float16, False, "K-first"),
    ),
    ids=lambda value: short(value) or {True: "l2norm", False: "plain"}.get(value),
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_split_of_the_tokens(kernel, device, shape, dtype, use_qk_l2norm, layout):
    """96 tokens = six calls of 16 = token by token = 1 + 50 + 45 (fp32 state)"""
    x = rule_inputs(2, 96, shape, dtype=dtype)
    x = (x if use_qk_l2norm else x._replace(k=x.k / 16)).to(device)
    fresh = rule_state(2, shape, layout=layout, device=device)
    whole_state = fresh.clone()
    whole = run(kernel, x, whole_state, use_qk_l2norm=use_qk_l2norm)
    for lengths in ([16] * 6, [1] * 96, [1, 50, 45]):
        state, pieces, first = fresh.clone(), [], 0
        for length in lengths:
            piece = x.tokens(first, first + length)
            pieces.append(run(kernel, piece, state, use_qk_l2norm=use_qk_l2norm))
            first += length
        assert_same(torch.cat(pieces, 1), whole, f"output of {len(lengths)} calls")
        assert_same(state, whole_state, f"state of {len(lengths)} calls")


@pytest.mark.parametrize("first", (512, 500))
def test_long_split(kernel, device, first):
    """512 + 512 and 500 + 524 with carried state against 1024 in one call"""
    x = rule_inputs(1, 1024, device=device)
    whole_state, state = rule_state(1, device=device), rule_state(1, device=device)
    whole = run(kernel, x, whole_state)
    halves = [run(kernel, x.tokens(0, first), state), run(kernel, x.tokens(first, 1024), state)]
    assert_same(torch.cat(halves, 1), whole, "output")
    assert_same(state, whole_state, "state")


@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_batch_row_is_the_row_alone(kernel, device, dtype, state_dtype):
    x = rule_inputs(5, 19, dtype=dtype, device=device)
    fresh = rule_state(5, dtype=state_dtype, device=device)
    state = fresh.clone()
    out = run(kernel, x, state)
    for n in range(5):
        alone = fresh[n : n + 1].clone()
        assert_same(run(kernel, x.rows(slice(n, n + 1)), alone), out[n : n + 1], f"output of row {n}")
        assert_same(alone, state[n : n + 1], f"state of row {n}")


def test_row_does_not_see_the_size_of_the_batch(kernel, device):
    """One row of a batch large enough that work is cut differently"""
    x = rule_inputs(130, 3, Shape(2, 4, 64, 64), device=device)
    state = rule_state(130, Shape(2, 4, 64, 64), device=device)
    alone = state[77:78].clone()
    out = run(kernel, x, state)
    assert_same(run(kernel, x.rows(slice(77, 78)), alone), out[77:78], "output")
    assert_same(alone, state[77:78], "state")


@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64), ids=short)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_dense_is_ragged(kernel, device, dtype, index_dtype):
    """sequences packed by cu_seqlens equal separate calls"""
    lengths = (7, 64, 30)
    x = rule_inputs(1, sum(lengths), dtype=dtype, device=device)
    fresh = rule_state(3, device=device)
    packed = fresh.clone()
    offsets = torch.tensor([0, 7, 71, 101], dtype=index_dtype, device=device)
    out = run(kernel, x, packed, cu_seqlens=offsets)
    first = 0
    for n, length in enumerate(lengths):
        alone = fresh[n : n + 1].clone()
        expected = run(kernel, x.tokens(first, first + length), alone)
        assert_same(out[:, first : first + length], expected, f"output of sequence {n}")
        assert_same(packed[n : n + 1], alone, f"state of sequence {n}")
        first += length


def test_any_slot_order(kernel, device):
    x = rule_inputs(6, 5, device=device)
    fresh = rule_state(8, device=device)
    rows = fresh[:6].clone()
    expected = run(kernel, x, rows)
    for slots in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [7, 0, 3, 6, 1, 2]):
        pool = torch.full_like(fresh, float("nan"))
        pool[slots] = fresh[:6]
        out = run(kernel, x, pool, slots=torch.tensor(slots, device=device))
        assert_same(out, expected, f"output with slots {slots}")
        assert_same(pool[slots], rows, f"states with slots {slots}")


def test_rows_in_any_order(kernel, device):
    x = rule_inputs(6, 5, device=device)
    fresh = rule_state(6, device=device)
    pool = fresh.clone()
    expected = run(kernel, x, pool)
    order = torch.tensor([3, 5, 0, 1, 4, 2], device=device)
    permuted = fresh.clone()
    out = run(kernel, x.rows(order), permuted, slots=order)
    assert_same(out, expected[order], "output")
    assert_same(permuted, pool, "pool")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_repeated_runs(kernel, device, dtype):
    x = rule_inputs(3, 130, Shape(2, 6, 128, 128), dtype=dtype, device=device)
    fresh = rule_state(3, Shape(2, 6, 128, 128), device=device)
    state = fresh.clone()
    out = run(kernel, x, state)
    for _ in range(5):
        again = fresh.clone()
        assert_same(run(kernel, x, again), out, "output")
        assert_same(again, state, "state")


@pytest.mark.parametrize("state_dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layouts_hold_the_same_bits(kernel, device, shape, state_dtype):
    """K-first, V-first, padded slots: one result"""
    x = rule_inputs(3, 20, shape, device=device)
    plain = rule_state(3, shape, dtype=state_dtype, device=device)
    layouts = [
        rule_state(3, shape, dtype=state_dtype, device=device, layout=layout, slot_padding=padding)
        for layout in ("K-first", "V-first")
        for padding in (0, 1, 64)
    ]
    expected = run(kernel, x, plain)
    for state in layouts:
        out = run(kernel, x, state)
        assert_same(out, expected, f"output, strides {state.stride()}")
        assert_same(state, plain, f"state, strides {state.stride()}")


@pytest.mark.parametrize("tokens", (1, 40))
def test_columns_and_heads_are_independent(kernel, device, tokens):
    """Any tile of V and any subset of heads gives the same bits: odd widths against the whole"""
    shape = Shape(2, 4, 96, 100)
    x = rule_inputs(2, tokens, shape, device=device)
    fresh = rule_state(2, shape, device=device)
    state = fresh.clone()
    out = run(kernel, x, state)
    for columns in (slice(0, 32), slice(32, 81), slice(99, 100)):
        part = fresh[..., columns].contiguous()
        assert_same(run(kernel, x._replace(v=x.v[..., columns]), part), out[..., columns], f"output of {columns}")
        assert_same(part, state[..., columns], f"state of {columns}")
    heads = slice(2, 4)  # the group of key head 1
    part = fresh[:, heads].contiguous()
    y = Inputs(x.q[:, :, 1:], x.k[:, :, 1:], x.v[:, :, heads], x.g[..., heads], x.beta[..., heads])
    assert_same(run(kernel, y, part), out[:, :, heads], "output of one group")
    assert_same(part, state[:, heads], "state of one group")


@pytest.mark.parametrize("batch", (1, 3))
def test_whole_layer_is_its_groups(kernel, device, batch):
    """16 key and 48 value heads, as many as fill a card once and more than once, against one group at a time"""
    shape = Shape(16, 48, 128, 128)
    x = rule_inputs(batch, 35, shape, dtype=torch.bfloat16, device=device)
    fresh = rule_state(batch, shape, device=device)
    state = fresh.clone()
    out = run(kernel, x, state)
    for group in (0, 7, 15):
        heads = slice(3 * group, 3 * group + 3)
        q, k = x.q[:, :, group, None], x.k[:, :, group, None]
        y = Inputs(q, k, x.v[:, :, heads], x.g[..., heads], x.beta[..., heads])
        part = fresh[:, heads].contiguous()
        assert_same(run(kernel, y, part), out[:, :, heads], f"output of group {group}")
        assert_same(part, state[:, heads], f"state of group {group}")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=short)
def test_16_bit_inputs_are_widened_exactly(kernel, device, dtype):
    """the state of 16-bit q, k, v equals that of the same numbers in fp32; the output is that one, rounded"""
    x = rule_inputs(2, 33, dtype=dtype, device=device)
    wide = Inputs(*(part.float() for part in x))
    fresh = rule_state(2, device=device)
    narrow_state, wide_state = fresh.clone(), fresh.clone()
    out, expected = run(kernel, x, narrow_state), run(kernel, wide, wide_state)
    assert_same(narrow_state, wide_state, "state")
    assert_same(out, expected.to(dtype), "output")
    rounded = x._replace(g=x.g.to(dtype), beta=x.beta.to(dtype))
    narrow_state, wide_state = fresh.clone(), fresh.clone()
    run(kernel, rounded, narrow_state)
    run(kernel, Inputs(*(part.float() for part in rounded)), wide_state)
    assert_same(narrow_state, wide_state, "state with 16-bit gates")


@pytest.mark.parametrize("state_dtype", (torch.bfloat16, torch.float16), ids=short)
def test_16_bit_state_is_rounded_once_per_call(kernel, device, state_dtype):
    x = rule_inputs(2, 33, device=device)
    state = rule_state(2, dtype=state_dtype, device=device)
    wide = state.float()
    out = run(kernel, x, state)
    assert_same(out, run(kernel, x, wide), "output")
    assert_same(state, wide.to(state_dtype), "state")


@pytest.mark.parametrize("mode", ("chunk", "auto"))
def test_fp32_is_recurrent(kernel, device, mode):
    """fp32 inputs are the recurrence's in every mode, on every device"""
    x = rule_inputs(2, 150, TENSOR_CORES, device=device)
    fresh = rule_state(2, TENSOR_CORES, device=device)
    state, other = fresh.clone(), fresh.clone()
    expected = run(kernel, x, state)
    assert_same(kernel.gated_delta_rule(*x, other, mode=mode, use_qk_l2norm=True), expected, "output")
    assert_same(other, state, "state")


@pytest.mark.parametrize("use_qk_l2norm", (True, False), ids=("l2norm", "plain"))
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_closed_gates_leave_the_state_alone(kernel, device, dtype, use_qk_l2norm):
    """beta = 0 and g = 0: the state is bit-identical whatever the tokens hold"""
    x = rule_inputs(2, 50, dtype=dtype, device=device)
    x = x._replace(g=torch.zeros_like(x.g), beta=torch.zeros_like(x.beta))
    for state_dtype in DTYPES:
        state = rule_state(2, dtype=state_dtype, device=device)
        before = state.clone()
        run(kernel, x, state, use_qk_l2norm=use_qk_l2norm)
        assert_same(state, before, "state")
        run(kernel, x._replace(beta=x.beta + 0.5), state, use_qk_l2norm=use_qk_l2norm)
        assert not torch.equal(state, before), "control: an open gate writes"


@pytest.mark.parametrize("op", ("rule", "conv", "gates", "norm"))
def test_threads_change_no_bit(kernel, op):
    """CPU: one thread and several"""
    x = rule_inputs(3, 40, Shape(2, 4, 64, 100))
    signal, weight = normal(2, 300, 50), normal(300, 4, seed=2)

    def call():
        if op == "rule":
            state = rule_state(3, Shape(2, 4, 64, 100))
            return run(kernel, x, state), state
        if op == "conv":
            window = normal(2, 300, 3, seed=3)
            return kernel.causal_conv1d(signal, weight, None, "silu", conv_state=window), window
        if op == "gates":
            return kernel.gated_delta_gates(x.g, x.beta, x.g[0, 0], x.beta[0, 0])
        return (kernel.rms_norm_gated(x.v, x.v, x.v[0, 0, 0], 1e-6),)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = call()
        torch.set_num_threads(5)
        several = call()
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(several, one):
        assert_same(a, b)


def digest_of_every_op(kernel):
    """SHA-256 over the results of every op in every dtype and layout, on the CPU."""
    digest = hashlib.sha256()
    for dtype in DTYPES:
        results = []
        for shape in (Shape(1, 3, 128, 128), Shape(2, 2, 40, 100), Shape(1, 1, 7, 13)):
            for layout in ("K-first", "V-first"):
                x, state = rule_inputs(2, 11, shape, dtype=dtype), rule_state(2, shape, dtype=dtype, layout=layout)
                results += [kernel.gated_delta_rule(*x, state, use_qk_l2norm=True), state]
                ring = (2, shape.Hk, 4, shape.K, shape.V, shape.Hv // shape.Hk)
                ring = kernel.new_ring(*ring, dtype=dtype, device="cpu")
                results += [kernel.gated_delta_verify(*x.tokens(0, 3), state, ring, use_qk_l2norm=True), ring]
                rows = torch.arange(2)
                kernel.fold_ring(state, ring, slots=rows, ring_slots=rows, num_accepted=rows + 2)
                results.append(state.clone())
        signal, window = normal(2, 37, 50, dtype=dtype), normal(2, 37, 3, seed=3, dtype=dtype)
        weight = normal(37, 4, seed=2, dtype=dtype)
        results += [kernel.causal_conv1d(signal, weight, None, "silu", conv_state=window), window.clone()]
        results += [kernel.causal_conv1d_update(signal[..., :1], window, weight, None, "silu"), window]
        op = StepOp()
        pool = op.pool(2, dtype)
        results += [op.call(kernel, op.inputs(2, 3, dtype), pool), pool]
        a, z = normal(2, 5, 37, dtype=dtype), normal(2, 5, 3, 100, seed=4, dtype=dtype)
        results += kernel.gated_delta_gates(a, -a, a[0, 0], a[0, 1])
        results.append(kernel.rms_norm_gated(z, -z, z[0, 0, 0], 1e-6))
        for result in results:
            digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


PRINT_DIGEST = """
from kernels import get_kernel
from tests.test_rule_bits import digest_of_every_op
print(digest_of_every_op(get_kernel("org/gated-deltanet", version=1)))
"""


def lesser_instruction_sets():
    """Those below the one that this process runs with, on this machine."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": ("baseline", "avx2"), "AVX2": ("baseline",)}.get(capability, ())


@pytest.mark.parametrize("isa", lesser_instruction_sets() or ("baseline",))
def test_instruction_sets_hold_the_same_bits(kernel, isa):
    """CPU: every op, dtype and layout under a lesser instruction set, in a process of its own"""
    environment = {**os.environ, "GATED_DELTANET_CPU_ISA": isa}
    command = [sys.executable, "-c", PRINT_DIGEST]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "is not one this machine has" not in done.stderr, done.stderr
    assert done.stdout.strip() == digest_of_every_op(kernel)
