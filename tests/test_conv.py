# SPDX-License-Identifier: Apache-2.0
"""The causal convolution: against the oracle and torch, windows, layouts, packing, causality."""

import pytest
import torch
import torch.nn.functional as F

from . import oracle
from .helpers import DTYPES, Guarded, assert_close, assert_same, assert_zero, normal, short

NAN = float("nan")
WIDTHS = (2, 3, 4)
channels_last = pytest.mark.parametrize("channels_last", (False, True), ids=("BCT", "BTC"))


def weights(C, W, device, dtype=torch.float32):
    return normal(C, W, seed=2, dtype=dtype, device=device), normal(C, seed=3, dtype=dtype, device=device)


def signal(B, C, T, device, channels_last=False, dtype=torch.float32, seed=0):
    """x [B, C, T] of the same numbers in either memory order."""
    x = normal(B, C, T, seed=seed, dtype=dtype, device=device)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if channels_last else x


@pytest.mark.kernels_ci
@pytest.mark.parametrize("tokens", (1, 2, 3, 4, 5, 70))
@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize("C", (1, 3, 7, 16, 31, 264, 2047, 2049))
def test_channel_counts(kernel, device, C, W, tokens):
    """prefill and update between guards, window of W - 1 and of W"""
    x, (weight, bias) = signal(2, C, tokens, device), weights(C, W, device)
    for length in (W - 1, W):
        before = normal(2, C, length, seed=4, device=device)
        expected, last = oracle.causal_conv1d(x, weight, bias, "silu", before)
        ops = ["prefill"] + ["update"] * (tokens <= 8)
        for op in ops:
            out = Guarded(2, C, tokens, device=device)
            window = Guarded(2, C, length, device=device, fill=before)
            if op == "prefill":
                kernel.causal_conv1d(x, weight, bias, "silu", conv_state=window.tensor, out=out.tensor)
            else:
                kernel.causal_conv1d_update(x, window.tensor, weight, bias, "silu", out=out.tensor)
            assert_close(out.tensor, expected, 1e-6, op)
            assert_same(window.tensor.cpu(), last.float(), f"{op} window")
            out.check()
            window.check()


@pytest.mark.parametrize("length", (3, 4))
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_update_of_one_token_has_one_set_of_bits(kernel, device, dtype, length):
    """Rows of every count, padding, with and without bias: dense and strided windows, any weight dtype"""
    C, (weight, bias) = 264, weights(264, 4, device, dtype)
    for rows, bias in ((1, bias), (2, None), (3, bias), (9, None)):
        x = normal(rows, C, 1, dtype=dtype, device=device)
        slots = torch.tensor([(7 * n + 2) % 10 if n % 4 != 1 else -1 for n in range(rows)], device=device)
        dense = normal(10, C, length, seed=4, dtype=dtype, device=device)
        strided = normal(10, C, 2 * length, dtype=dtype, device=device)[..., ::2].copy_(dense)
        wide = dense.clone()
        results = [
            kernel.causal_conv1d_update(x, window, w, bias, "silu", slots=slots)
            for window, w in ((dense, weight), (strided, weight), (wide, weight.float()))
        ]
        for result, window in zip(results[1:], (strided, wide)):
            assert_same(result, results[0], f"{rows} rows")
            assert_same(window, dense, f"windows of {rows} rows")
        assert_zero(results[0][slots < 0], "padding")


@pytest.mark.parametrize("window_dtype", DTYPES, ids=lambda dtype: f"window_{short(dtype)}")
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=lambda dtype: f"weight_{short(dtype)}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: f"x_{short(dtype)}")
def test_dtypes(kernel, device, dtype, weight_dtype, window_dtype):
    """x, weight and window in every dtype; the window holds the inputs, rounded to its own dtype"""
    x, (weight, bias) = signal(2, 24, 6, device, dtype=dtype), weights(24, 4, device, weight_dtype)
    before = normal(2, 24, 3, seed=4, dtype=window_dtype, device=device)
    expected, last = oracle.causal_conv1d(x, weight, bias, "silu", before)
    for update in (False, True):
        window = before.clone()
        if update:
            out = kernel.causal_conv1d_update(x, window, weight, bias, "silu")
        else:
            out = kernel.causal_conv1d(x, weight, bias, "silu", conv_state=window)
        assert out.dtype == dtype
        assert_close(out, expected, oracle.ELEMENTWISE_BOUNDS[dtype])
        assert_same(window.cpu(), last.to(window_dtype), "window")


@pytest.mark.parametrize("activation", (None, "silu", "swish"))
@pytest.mark.parametrize("with_bias", (True, False), ids=("bias", "plain"))
def test_agrees_with_torch(kernel, device, with_bias, activation):
    """The torch one-liner: a grouped convolution, padded on the left"""
    x, (weight, bias) = signal(2, 40, 33, device), weights(40, 4, device)
    bias = bias if with_bias else None
    expected = F.conv1d(
        x.double(), weight.double()[:, None], None if bias is None else bias.double(), padding=3, groups=40
    )
    expected = expected[..., :33]
    expected = expected if activation is None else F.silu(expected)
    assert_close(kernel.causal_conv1d(x, weight, bias, activation), expected, 1e-6)


@pytest.mark.parametrize("W", WIDTHS)
@channels_last
def test_layouts_and_odd_slices(kernel, device, channels_last, W):
    """C = 8k + 1, T odd, slices that start at an odd column; bitwise equal to contiguous inputs"""
    C, T = 41, 37
    wide = signal(2, C + 7, T + 6, device, channels_last)
    x = wide[:, 3 : 3 + C, 5 : 5 + T]
    weight, bias = weights(C + 2, W + 1, device)
    weight, bias = weight[1:-1, 1:], bias[1:-1]
    windows = normal(2, C, 9, seed=4, device=device)
    first = windows[..., 1 : 2 * W - 1 : 2].clone()
    before = windows.clone()
    out = kernel.causal_conv1d(x, weight, bias, "silu", conv_state=windows[..., 1 : 2 * W - 1 : 2])
    expected_window = first.clone()
    expected = kernel.causal_conv1d(
        x.contiguous(), weight.contiguous(), bias.contiguous(), "silu", conv_state=expected_window
    )
    assert_same(out, expected, "output")
    assert_same(windows[..., 1 : 2 * W - 1 : 2], expected_window, "strided window")
    assert_same(windows[..., 0::2], before[..., 0::2], "between the window's columns")
    assert_close(out, oracle.causal_conv1d(x, weight, bias, "silu", first)[0], 1e-6)


@channels_last
def test_out_keeps_the_layout_of_x(kernel, device, channels_last):
    x = signal(2, 16, 9, device, channels_last)
    assert kernel.causal_conv1d(x, weights(16, 4, device)[0]).stride() == x.stride()


@pytest.mark.parametrize("W", WIDTHS)
@channels_last
def test_documents_do_not_leak(kernel, device, channels_last, W):
    """seq_idx in both layouts equals separate calls; a negative document is padding"""
    lengths = (7, 64, 1, 30)
    x, (weight, bias) = signal(2, 33, 104, device, channels_last), weights(33, W, device)
    documents = torch.repeat_interleave(torch.tensor([4, 2, 9, 1]), torch.tensor(lengths))
    seq_idx = torch.cat([documents, torch.tensor([-1, -1])]).int().expand(2, 104)
    x[..., 102:] = NAN
    out = kernel.causal_conv1d(x, weight, bias, "silu", seq_idx=seq_idx.to(device))
    assert_close(out, oracle.causal_conv1d(x, weight, bias, "silu", seq_idx=seq_idx)[0], 1e-6)
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        assert_same(
            out[..., part], kernel.causal_conv1d(x[..., part].contiguous(), weight, bias, "silu"), f"at {first}"
        )
        first += length
    assert_zero(out[..., 102:], "padding")
    wide = torch.full((2, 208), 77, dtype=torch.int32, device=device)
    wide[:, ::2] = seq_idx.to(device)
    assert_same(kernel.causal_conv1d(x, weight, bias, "silu", seq_idx=wide[:, ::2]), out, "strided seq_idx")


@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64), ids=short)
@pytest.mark.parametrize("with_state", (True, False), ids=("window", "fresh"))
@pytest.mark.parametrize("W", WIDTHS)
def test_packed_sequences(kernel, device, W, with_state, index_dtype):
    """cu_seqlens equals separate calls bitwise, and the window holds the last real inputs"""
    lengths, C = (1, 2, 0, 7, 64, 30), 33
    total = sum(lengths)
    x, (weight, bias) = normal(total + 3, C, device=device), weights(C, W, device)
    x[total:] = NAN
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=index_dtype, device=device)
    fresh = normal(len(lengths), C, W - 1, seed=4, device=device) if with_state else None
    window = None if fresh is None else fresh.clone()
    out = kernel.causal_conv1d(x, weight, bias, "silu", conv_state=window, cu_seqlens=offsets)
    assert out.shape == x.shape
    first = 0
    for n, length in enumerate(lengths):
        alone = None if fresh is None else fresh[n : n + 1].clone()
        expected = kernel.causal_conv1d(x[first : first + length].T[None], weight, bias, "silu", conv_state=alone)
        assert_same(out[first : first + length], expected[0].T, f"sequence {n}")
        if alone is not None:
            assert_same(window[n : n + 1], alone, f"window {n}")
        first += length
    assert_zero(out[total:], "tokens of no sequence")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("W", WIDTHS)
def test_any_split_of_the_tokens(kernel, device, W, dtype):
    """Whole = pieces = one token at a time through the update, output and window"""
    T = 21
    x, (weight, bias) = signal(2, 40, T, device, dtype=dtype), weights(40, W, device, dtype)
    for length in (W - 1, W):
        fresh = normal(2, 40, length, seed=4, dtype=dtype, device=device)
        whole_window = fresh.clone()
        whole = kernel.causal_conv1d(x, weight, bias, "silu", conv_state=whole_window)
        for sizes in ([1, 2, 3, 15], [1] * T, [8, 8, 5]):
            for update in (False, True):
                window, pieces, first = fresh.clone(), [], 0
                for size in sizes:
                    piece = x[..., first : first + size]
                    first += size
                    if update and size <= 8:
                        pieces.append(kernel.causal_conv1d_update(piece, window, weight, bias, "silu"))
                    else:
                        pieces.append(kernel.causal_conv1d(piece, weight, bias, "silu", conv_state=window))
                assert_same(torch.cat(pieces, -1), whole, f"output of {sizes}")
                assert_same(window, whole_window, f"window of {sizes}")


def test_read_only_window(kernel, device):
    """write_state=False leaves the window as it was; the output is that of the writing call"""
    x, (weight, bias) = signal(2, 40, 5, device), weights(40, 4, device)
    window = normal(2, 40, 3, seed=4, device=device)
    before = window.clone()
    out = kernel.causal_conv1d(x, weight, bias, "silu", conv_state=window, write_state=False)
    assert_same(window, before, "window")
    assert_same(kernel.causal_conv1d(x, weight, bias, "silu", conv_state=window), out, "output")
    assert not torch.equal(window, before), "control: the writing call writes"


@channels_last
@pytest.mark.parametrize("at", (0, 3, 15, 64, 100))
def test_causality(kernel, device, at, channels_last):
    x, (weight, bias) = signal(1, 32, 150, device, channels_last), weights(32, 4, device)
    changed = x.clone()
    changed[..., at] += 1
    out, out_changed = (kernel.causal_conv1d(y, weight, bias, "silu") for y in (x, changed))
    assert_same(out_changed[..., :at], out[..., :at], "tokens before")
    assert_same(out_changed[..., at + 4 :], out[..., at + 4 :], "tokens past the taps")
    assert bool((out_changed[..., at] != out[..., at]).all()), "control: the token itself does change"


def test_nan_stays_where_it_is(kernel, device):
    """one row, one channel, W tokens; and not past the end of a sequence"""
    x, (weight, bias) = signal(3, 32, 70, device), weights(32, 4, device)
    clean = kernel.causal_conv1d(x, weight, bias, "silu")
    poisoned = x.clone()
    poisoned[1, 5, 35] = NAN
    out = kernel.causal_conv1d(poisoned, weight, bias, "silu")
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[1, 5, 35:39] = True
    assert_same(out[~hit], clean[~hit], "everything else")
    assert bool(out[hit].isnan().all()), "control: the NaN is seen"
    packed = poisoned.transpose(1, 2).reshape(210, 32)
    packed[70:] = NAN
    window = torch.zeros(1, 32, 3, device=device)
    out = kernel.causal_conv1d(
        packed, weight, bias, "silu", conv_state=window, cu_seqlens=torch.tensor([0, 70], device=device)
    )
    assert_same(out[:70].T, clean[0], "first sequence")
    assert_same(window[0], x[0, :, -3:], "window")


def test_strided_view_of_a_projection(kernel, device):
    """x as the transposed split of a packed projection, NaN between"""
    wide = torch.full((2, 33, 100), NAN, device=device)
    wide[..., 7:71] = normal(2, 33, 64)
    x, (weight, bias) = wide[..., 7:71].transpose(1, 2), weights(64, 4, device)
    expected = kernel.causal_conv1d(x.contiguous(), weight, bias, "silu")
    assert_same(kernel.causal_conv1d(x, weight, bias, "silu"), expected, "dense")
    rows = kernel.causal_conv1d(wide[0, :, 7:71], weight, bias, "silu", cu_seqlens=torch.tensor([0, 33], device=device))
    assert_same(rows.T, expected[0], "ragged")
    for window in (torch.zeros(2, 64, 3, device=device), torch.zeros(2, 3, 64, device=device).transpose(1, 2)):
        update = kernel.causal_conv1d_update(x[..., :5], window, weight, bias, "silu")
        assert_same(update, expected[..., :5], "update")
