# SPDX-License-Identifier: Apache-2.0
"""States kept while a prefill runs: after every n tokens, from the fp32 accumulator."""

import pytest
import torch

from .helpers import (
    DTYPES,
    SENTINEL,
    SMALL,
    TENSOR_CORES,
    Shape,
    assert_same,
    rule_inputs,
    rule_state,
    short,
)

NORM = {"use_qk_l2norm": True, "mode": "recurrent"}
# The recurrence, and the chunk kernel where there is one.
each_kernel = pytest.mark.parametrize(
    "mode, shape", (("recurrent", SMALL), ("chunk", TENSOR_CORES)), ids=("recurrent", "chunk")
)


def empty_checkpoints(count, shape=SMALL, *, dtype=torch.float32, layout="K-first", device="cpu"):
    pool = rule_state(count, shape, dtype=dtype, layout=layout, device=device)
    return pool.fill_(SENTINEL)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", (SMALL, Shape(1, 3, 24, 72), Shape(2, 6, 128, 128), Shape(1, 1, 256, 256)), ids=str)
@pytest.mark.parametrize("every, tokens", ((64, 300), (64, 128), (128, 300), (192, 192), (64, 63)))
def test_checkpoint_is_the_state_of_a_prefill_stopped_there(kernel, device, shape, every, tokens):
    """bitwise in the recurrence, the last token included; output and final state as without"""
    x, state = rule_inputs(2, tokens, shape, device=device), rule_state(2, shape, device=device)
    fresh, plain = state.clone(), state.clone()
    count = tokens // every
    checkpoints = empty_checkpoints(2 * count + 1, shape, device=device)
    out = kernel.gated_delta_rule(*x, state, checkpoint_every=every, checkpoints=checkpoints, **NORM)
    assert_same(out, kernel.gated_delta_rule(*x, plain, **NORM), "output")
    assert_same(state, plain, "final state")
    for i in range(count):
        stopped = fresh.clone()
        kernel.gated_delta_rule(*x.tokens(0, (i + 1) * every), stopped, **NORM)
        for n in range(2):
            assert_same(checkpoints[n * count + i], stopped[n], f"sequence {n}, checkpoint {i}")
    assert bool((checkpoints[2 * count :] == SENTINEL).all()), "rows of no checkpoint"


@pytest.mark.parametrize("layout", ("K-first", "V-first"))
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("pool_dtype", (torch.float32, torch.bfloat16), ids=lambda dtype: f"pool_{short(dtype)}")
@each_kernel
def test_checkpoints_come_from_the_accumulator(kernel, device, mode, shape, pool_dtype, dtype, layout):
    """bf16 inputs; an fp32 checkpoint of a bf16 pool has not passed through 16 bits"""
    x = rule_inputs(1, 300, shape, dtype=torch.bfloat16, device=device)
    state, options = rule_state(1, shape, dtype=pool_dtype, device=device), {**NORM, "mode": mode}
    wide = state.float()
    checkpoints = empty_checkpoints(4, shape, dtype=dtype, layout=layout, device=device)
    kernel.gated_delta_rule(*x, state, checkpoint_every=64, checkpoints=checkpoints, **options)
    for i in range(4):
        stopped = wide.clone()
        kernel.gated_delta_rule(*x.tokens(0, 64 * (i + 1)), stopped, **options)
        assert_same(checkpoints[i], stopped[0].to(dtype), f"checkpoint {i}")


@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64), ids=short)
@each_kernel
def test_ragged_checkpoints(kernel, device, mode, shape, index_dtype):
    """Each sequence at its own rows; padding rows, short sequences and rows outside write nothing"""
    lengths = (130, 0, 64, 63, 200, 70)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=device)
    x = rule_inputs(1, sum(lengths), shape, dtype=torch.bfloat16, device=device)
    pool, norm = rule_state(8, shape, device=device), {**NORM, "mode": mode}
    fresh = pool.clone()
    slots = torch.tensor([7, 3, 0, 1, -1, 5], device=device)
    starts = torch.tensor([4, 0, 1, 0, 2, 8], dtype=index_dtype, device=device)  # the last lies outside
    checkpoints = empty_checkpoints(8, shape, device=device)
    options = {"cu_seqlens": offsets, "slots": slots, "checkpoint_starts": starts, **norm}
    kernel.gated_delta_rule(*x, pool, checkpoint_every=64, checkpoints=checkpoints, **options)
    for row, n, tokens in ((4, 0, 64), (5, 0, 128), (1, 2, 64)):
        state = fresh[slots[n] : slots[n] + 1].clone()
        first = int(offsets[n])
        kernel.gated_delta_rule(*x.tokens(first, first + tokens), state, **norm)
        assert_same(checkpoints[row], state[0], f"sequence {n} after {tokens}")
    assert bool((checkpoints[[0, 2, 3, 6, 7]] == SENTINEL).all()), "other rows"
    for start in (-1, -(2**31), 2**31 - 1, 7):
        options["checkpoint_starts"] = torch.full_like(starts, start)
        checkpoints.fill_(SENTINEL)
        kernel.gated_delta_rule(*x, fresh.clone(), checkpoint_every=64, checkpoints=checkpoints, **options)
        kept = checkpoints[:7] if start == 7 else checkpoints
        assert bool((kept == SENTINEL).all()), f"start {start}"


def test_positions_count_from_the_start_of_the_call(kernel, device):
    """40 tokens, then 100 with a checkpoint every 64: one, at 104 overall"""
    x, state = rule_inputs(1, 140, device=device), rule_state(1, device=device)
    whole = state.clone()
    kernel.gated_delta_rule(*x.tokens(0, 40), state, **NORM)
    checkpoints = empty_checkpoints(2, device=device)
    kernel.gated_delta_rule(*x.tokens(40, 140), state, checkpoint_every=64, checkpoints=checkpoints, **NORM)
    kernel.gated_delta_rule(*x.tokens(0, 104), whole, **NORM)
    assert_same(checkpoints[:1], whole, "checkpoint")
    assert bool((checkpoints[1] == SENTINEL).all())


@pytest.mark.parametrize("mode", ("auto", "chunk"))
@pytest.mark.parametrize("every", (64, 128, 192))
@pytest.mark.parametrize("shape", (SMALL, TENSOR_CORES, Shape(1, 3, 64, 128)), ids=str)
def test_checkpoints_in_the_other_modes(kernel, device, shape, every, mode):
    """The bits of the same mode stopped there; output and final state as without"""
    x, state = rule_inputs(2, 333, shape, dtype=torch.bfloat16, device=device), rule_state(2, shape, device=device)
    fresh, plain, count = state.clone(), state.clone(), 333 // every
    checkpoints = empty_checkpoints(2 * count, shape, device=device)
    options = {"use_qk_l2norm": True, "mode": mode}
    out = kernel.gated_delta_rule(*x, state, checkpoint_every=every, checkpoints=checkpoints, **options)
    assert_same(out, kernel.gated_delta_rule(*x, plain, **options), "output")
    assert_same(state, plain, "final state")
    for i in range(count):
        stopped = fresh.clone()
        kernel.gated_delta_rule(*x.tokens(0, every * (i + 1)), stopped, **options)
        for n in range(2):
            assert_same(checkpoints[n * count + i], stopped[n], f"sequence {n}, checkpoint {i}")


@pytest.mark.parametrize("every", (0, -64, 63, 96, 64.0, True, "64"))
def test_checkpoint_every_is_a_multiple_of_64(kernel, device, every):
    x, state = rule_inputs(1, 70, device=device), rule_state(1, device=device)
    before = state.clone()
    with pytest.raises(ValueError, match="checkpoint_every must be a multiple of 64"):
        kernel.gated_delta_rule(*x, state, checkpoint_every=every, checkpoints=state.clone())
    assert_same(state, before, "state")


def test_incomplete_checkpoint_arguments_raise(kernel, device):
    x, state = rule_inputs(1, 70, device=device), rule_state(1, device=device)
    starts, offsets = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([0, 70], device=device)
    checkpoints = state.clone()
    with pytest.raises(ValueError, match="go together"):
        kernel.gated_delta_rule(*x, state, checkpoint_every=64)
    with pytest.raises(ValueError, match="go together"):
        kernel.gated_delta_rule(*x, state, checkpoints=checkpoints)
    with pytest.raises(RuntimeError, match="checkpoint_starts needs checkpoints"):
        kernel.gated_delta_rule(*x, state, checkpoint_starts=starts)
    with pytest.raises(RuntimeError, match="checkpoint_starts is needed with cu_seqlens"):
        kernel.gated_delta_rule(*x, state, cu_seqlens=offsets, checkpoint_every=64, checkpoints=checkpoints)
    with pytest.raises(RuntimeError, match="checkpoints must be"):
        kernel.gated_delta_rule(*x, state, checkpoint_every=64, checkpoints=checkpoints[:, :1])
