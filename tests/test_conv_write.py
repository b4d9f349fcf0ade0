# SPDX-License-Identifier: Apache-2.0
"""The deferred window write: conv_state_write after a convolution that left the windows alone."""

import pytest
import torch

from .helpers import DTYPES, Guarded, assert_same, normal, short

WIDTHS = (2, 3, 4)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("channels_last", (False, True), ids=("BCT", "BTC"))
@pytest.mark.parametrize("extra", (0, 1), ids=("W-1", "W"))
@pytest.mark.parametrize("W", WIDTHS)
def test_window_is_that_of_the_accepted_tokens(kernel, device, W, extra, channels_last):
    """Every count from -1 to past the row, dense: what the writing convolution over them leaves, bitwise"""
    T, C = 6, 33
    counts = list(range(-1, T + 2)) + [2**30]
    x = normal(len(counts), C, T, device=device)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if channels_last else x
    weight = normal(C, W, seed=1, device=device)
    before = normal(len(counts), C, W - 1 + extra, seed=2, device=device)
    window = Guarded(*before.shape, device=device, fill=before)
    out = kernel.causal_conv1d(x, weight, conv_state=window.tensor, write_state=False)
    assert_same(window.tensor, before, "window after the convolution")
    num_accepted = torch.tensor(counts, device=device)
    assert kernel.conv_state_write(x, window.tensor, num_accepted=num_accepted) is window.tensor
    for n, count in enumerate(counts):
        expected = before[n : n + 1].clone()
        if 1 <= count <= T:
            y = kernel.causal_conv1d(x[n : n + 1, :, :count], weight, conv_state=expected)
            assert_same(out[n : n + 1, :, :count], y, "output")
            assert not torch.equal(expected, before[n : n + 1]), "control: an accepted token moves the window"
        assert_same(window.tensor[n : n + 1], expected, f"{count} accepted")
    window.check()


@pytest.mark.parametrize("window_dtype", DTYPES, ids=lambda dtype: f"window_{short(dtype)}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: f"x_{short(dtype)}")
@pytest.mark.parametrize("C", (1, 7, 264, 2048))
def test_dtypes_and_channel_counts(kernel, device, C, dtype, window_dtype):
    """rounded to the window's dtype, old columns bit for bit; slots and ragged rows"""
    total = 13
    x, pool = normal(total, C, dtype=dtype, device=device), normal(6, C, 3, seed=1, dtype=window_dtype, device=device)
    before = pool.clone()
    offsets = torch.tensor([0, 4, 4, 5, 11, 13], dtype=torch.int32, device=device)
    slots = torch.tensor([5, 0, 1, 3, -1], device=device)
    counts = torch.tensor([2, 1, 1, 6, 2], dtype=torch.int32, device=device)
    kernel.conv_state_write(x, pool, num_accepted=counts, slots=slots, cu_seqlens=offsets)
    expected = before.clone()
    for slot, first, count in ((5, 0, 2), (1, 4, 1), (3, 5, 6)):
        rows = torch.cat([before[slot], x[first : first + count].T.to(window_dtype)], -1)
        expected[slot] = rows[:, -3:]
    assert_same(pool, expected, "windows")


def test_row_that_begins_does_not_read_its_window(kernel, device):
    """has_initial_state False: NaN in the old window is zero, not NaN"""
    x, window = normal(3, 8, 4, device=device), torch.full((3, 8, 3), float("nan"), device=device)
    flags = torch.tensor([False, False, True], device=device)
    counts = torch.tensor([1, 3, 4], device=device)
    kernel.conv_state_write(x, window, num_accepted=counts, has_initial_state=flags)
    expected = torch.zeros_like(window)
    expected[0, :, 2:], expected[1], expected[2] = x[0, :, :1], x[1, :, :3], x[2, :, 1:4]
    assert_same(window, expected, "window")


def test_strided_windows_and_views(kernel, device):
    """x as a view of a projection, windows [pool, W, C] transposed, strided counts"""
    wide = normal(9, 100, device=device)
    x, windows = wide[:, 7:71], normal(2, 4, 64, seed=1, device=device).transpose(1, 2)
    plain = windows.contiguous()
    offsets = torch.tensor([0, 5, 9], device=device)
    counts = torch.tensor([3, 77, 4, 77], device=device)[::2]
    kernel.conv_state_write(x, windows, num_accepted=counts, cu_seqlens=offsets)
    kernel.conv_state_write(x.contiguous(), plain, num_accepted=counts.contiguous(), cu_seqlens=offsets)
    assert_same(windows, plain, "window")


def test_bad_input_raises(kernel, device):
    x, window, counts = (
        normal(2, 8, 4, device=device),
        normal(2, 8, 3, device=device),
        torch.ones(2, device=device).long(),
    )
    with pytest.raises(RuntimeError, match="num_accepted must be"):
        kernel.conv_state_write(x, window, num_accepted=counts.float())
    with pytest.raises(RuntimeError, match="num_accepted must be"):
        kernel.conv_state_write(x, window, num_accepted=counts[:1])
    with pytest.raises(RuntimeError, match="conv_state must be"):
        kernel.conv_state_write(x, window[:, :7], num_accepted=counts)
    with pytest.raises(RuntimeError, match="conv_state must be of window 1 to 4"):
        kernel.conv_state_write(x, normal(2, 8, 5, device=device), num_accepted=counts)
    with pytest.raises(ValueError, match="x must be"):
        kernel.conv_state_write(x[0].T, window, num_accepted=counts)


def test_flags_need_a_window(kernel, device):
    """has_initial_state without conv_state would be ignored: it raises"""
    x, weight = normal(2, 8, 4, device=device), normal(8, 4, device=device)
    flags = torch.ones(2, dtype=torch.bool, device=device)
    with pytest.raises(RuntimeError, match="has_initial_state needs conv_state"):
        kernel.causal_conv1d(x, weight, has_initial_state=flags)
