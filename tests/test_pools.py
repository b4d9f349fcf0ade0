# SPDX-License-Identifier: Apache-2.0
"""Slots copied, cleared, and states moved between dtypes and layouts."""

import pytest
import torch

from .helpers import DTYPES, Guarded, Shape, assert_same, normal, rule_state, short

NAN = float("nan")
SHAPES = ((4, 32, 32), (3, 24, 72), (2, 128, 128), (24, 3), (24, 4), (7,), (4096,), (1, 1, 1), (1, 5, 33))
index_dtypes = pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64), ids=short)


def pool_of(shape, slots=6, *, dtype=torch.float32, device="cpu", seed=1):
    return normal(slots, *shape, seed=seed, dtype=dtype, device=device)


def strided(pool):
    """The same numbers in slots that are padded and, where there are two more dims, transposed."""
    wide = torch.full((pool.shape[0], pool[0].numel() + 5), NAN, dtype=pool.dtype, device=pool.device)
    inner = wide[:, : pool[0].numel()]
    if pool.dim() > 2:
        view = inner.view(pool.shape[0], *pool.shape[1:-2], pool.shape[-1], pool.shape[-2]).transpose(-1, -2)
    else:
        view = inner
    return view.copy_(pool), wide


@pytest.mark.kernels_ci
@index_dtypes
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copy_slots(kernel, device, shape, dtype, index_dtype):
    """A fork: slots in any order, one src twice, src and dst outside the pool skipped, NaN payloads kept"""
    pool = pool_of(shape, dtype=dtype, device=device)
    pool[3].view(-1)[0] = NAN
    expected = pool.clone()
    src = torch.tensor([3, 0, 3, 9, 1, -1], dtype=index_dtype, device=device)
    dst = torch.tensor([5, 2, 4, 0, -1, 1], dtype=index_dtype, device=device)
    for source, target in ((3, 5), (0, 2), (3, 4)):
        expected[target] = expected[source]
    view, wide = strided(pool)
    assert kernel.copy_slots(pool, src, dst) is pool
    assert_same(pool, expected, "pool")
    kernel.copy_slots(view, src, dst)
    assert_same(view, expected, "strided pool")
    assert bool(wide[:, -5:].isnan().all()), "between slots"


@index_dtypes
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zero_slots(kernel, device, shape, dtype, index_dtype):
    """One named twice, two outside; NaN is cleared too"""
    pool = pool_of(shape, dtype=dtype, device=device)
    pool[4] = NAN
    expected = pool.clone()
    slots = torch.tensor([4, 0, 4, -1, 6], dtype=index_dtype, device=device)
    expected[[4, 0]] = 0
    view, wide = strided(pool)
    kernel.zero_slots(pool, slots)
    assert_same(pool, expected, "pool")
    kernel.zero_slots(view, slots[::2])
    expected[0] = view[0]
    assert_same(view, expected, "strided pool, strided slots")
    assert bool(wide[:, -5:].isnan().all()), "between slots"


CAST_SHAPES = (Shape(1, 4, 32, 32), Shape(1, 3, 24, 72), Shape(1, 2, 128, 100), Shape(1, 1, 64, 136))


@pytest.mark.parametrize("to_dtype", DTYPES, ids=lambda dtype: f"to_{short(dtype)}")
@pytest.mark.parametrize("from_dtype", DTYPES, ids=lambda dtype: f"from_{short(dtype)}")
@pytest.mark.parametrize("slot_padding", (0, 3))
@pytest.mark.parametrize("shape", CAST_SHAPES, ids=str)
def test_cast_state(kernel, device, shape, slot_padding, from_dtype, to_dtype):
    """Every pair of dtypes and layouts, slots aligned and not: torch's copy_, nothing outside the target"""
    for from_layout in ("K-first", "V-first"):
        src = rule_state(5, shape, dtype=from_dtype, layout=from_layout, device=device, slot_padding=slot_padding)
        src[2, 0, 0, 0] = NAN
        for to_layout in ("K-first", "V-first"):
            sizes = (5, *shape[1:]) if to_layout == "K-first" else (5, shape.Hv, shape.V, shape.K)
            guarded = Guarded(*sizes, dtype=to_dtype, device=device)
            dst = guarded.tensor if to_layout == "K-first" else guarded.tensor.transpose(-1, -2)
            assert kernel.cast_state(src, dst) is dst
            assert_same(dst, src.to(to_dtype), f"{from_layout} to {to_layout}")
            guarded.check()


def test_pools_of_nothing(kernel, device):
    pool = pool_of((4, 8, 8), device=device)
    before, none = pool.clone(), torch.zeros(0, dtype=torch.int64, device=device)
    kernel.copy_slots(pool, none, none)
    kernel.zero_slots(pool, none)
    kernel.zero_slots(pool[:0], torch.tensor([0, 1], device=device))
    kernel.cast_state(pool[:0], pool[:0].clone())
    assert_same(pool, before, "pool")


def test_other_slots_are_untouched(kernel, device):
    """Unnamed slots bit-identical, guards intact"""
    guarded = Guarded(8, 3, 16, 16, device=device, fill=rule_state(8, Shape(1, 3, 16, 16)))
    before = guarded.tensor.clone()
    kernel.copy_slots(guarded.tensor, torch.tensor([7, 0], device=device), torch.tensor([1, 2], device=device))
    kernel.zero_slots(guarded.tensor, torch.tensor([5], device=device))
    others = [0, 3, 4, 6, 7]
    assert_same(guarded.tensor[others], before[others], "other slots")
    guarded.check()


@pytest.mark.large(gib=40)
def test_pools_past_2_32_elements(kernel, device):
    """a slot that starts past 2^32 elements"""
    wide = torch.empty(4097, 2**20, dtype=torch.bfloat16, device=device)
    pool = wide[:, :2048].unflatten(1, (2, 32, 32))
    pool[0], pool[1] = 0.5, rule_state(1, Shape(1, 2, 32, 32), device=device)[0]
    far = torch.tensor([4096], device=device)
    kernel.copy_slots(pool, torch.tensor([1], device=device), far)
    assert_same(pool[4096], pool[1], "far slot")
    kernel.zero_slots(pool, far)
    assert bool((pool[4096] == 0).all()) and bool((pool[0] == 0.5).all())


def test_bad_pools_raise(kernel, device):
    pool, slots = pool_of((4, 8, 8), device=device), torch.tensor([0, 1], device=device)
    with pytest.raises(RuntimeError, match="src must be"):
        kernel.copy_slots(pool, slots.float(), slots)
    with pytest.raises(RuntimeError, match="dst must be"):
        kernel.copy_slots(pool, slots, slots[:1])
    with pytest.raises(RuntimeError, match="slots must be"):
        kernel.zero_slots(pool, slots.view(2, 1))
    with pytest.raises(RuntimeError, match="pool must be free of elements that share memory"):
        kernel.zero_slots(pool[:1].expand(3, 4, 8, 8), slots)
    with pytest.raises(RuntimeError, match="dst must be of the same shape"):
        kernel.cast_state(pool, pool[:, :2].clone())
    with pytest.raises(RuntimeError, match="dst must be memory of its own"):
        kernel.cast_state(pool, pool)
    with pytest.raises(RuntimeError, match="pool must be float32"):
        kernel.copy_slots(pool.double(), slots, slots)
