# SPDX-License-Identifier: Apache-2.0
"""Moving states and windows between slots, dtypes and layouts."""

from . import _values, reference
from ._dispatch import check_inputs, count_writes, has_kernel, register_fakes
from ._ops import ops

register_fakes("copy_slots", "zero_slots", "cast_state")


def copy_slots(pool, src, dst):
    """Copies slots within a pool, as for the fork of a prefix: pool[dst[i]] = pool[src[i]].

    Args:
        pool: [slots, ...] of two to four dims (states, windows, a ring), float32, bfloat16 or float16, any strides.
            Updated in place.
        src: int32 or int64 [N], slot that item i reads.
        dst: int32 or int64 [N], slot that item i writes. An item whose src or dst lies outside the pool is skipped.
            Live dst are distinct, and none is the src of another item.

    Updated in place:
        pool at dst, bit for bit; all other slots stay as they are.

    Returns:
        pool.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: a shape, dtype or device is not the one above, or an input requires grad under grad mode.

    Source: prefix sharing of serving engines (vLLM, SGLang).
    """
    check_inputs("copy_slots", {"pool": pool, "src": src, "dst": dst}, {})
    if _values.ENABLED:
        _values.check_copy(pool, src, dst)
    if not has_kernel("copy_slots", pool):
        return reference.copy_slots(pool, src, dst)
    ops.copy_slots(pool, src, dst)
    count_writes(pool)
    return pool


def zero_slots(pool, slots):
    """Clears slots of a pool, as for a sequence that begins: pool[slots[i]] = 0.

    Args:
        pool: [slots, ...] of two to four dims, float32, bfloat16 or float16, any strides. Updated in place.
        slots: int32 or int64 [N]; one outside the pool is skipped, one named twice is cleared.

    Updated in place:
        pool at slots; all other slots stay as they are.

    Returns:
        pool.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: a shape, dtype or device is not the one above, or an input requires grad under grad mode.

    Source: serving engines clear a slot when they hand it out.
    """
    check_inputs("zero_slots", {"pool": pool, "slots": slots}, {})
    if not has_kernel("zero_slots", pool):
        return reference.zero_slots(pool, slots)
    ops.zero_slots(pool, slots)
    count_writes(pool)
    return pool


def cast_state(src, dst):
    """Copies states between dtypes and layouts: dst = src, element by element.

    Args:
        src: [slots, ...] of two to four dims, float32, bfloat16 or float16, any strides; a V-first pool
            [slots, Hv, V, K] is passed as pool.transpose(-1, -2).
        dst: the same shape, any of those dtypes, any strides, memory of its own. Updated in place.

    Updated in place:
        dst, rounded to nearest even where its dtype is narrower; bit for bit where it is src's.

    Returns:
        dst.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: a shape, dtype or device is not the one above, or an input requires grad under grad mode.

    Source: the state IO of TensorRT-LLM's prefill.
    """
    check_inputs("cast_state", {"src": src, "dst": dst}, {})
    if not has_kernel("cast_state", src):
        return reference.cast_state(src, dst)
    ops.cast_state(src, dst)
    count_writes(dst)
    return dst
