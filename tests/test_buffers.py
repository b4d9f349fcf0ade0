# SPDX-License-Identifier: Apache-2.0
"""Section B: CUDA graphs, streams, synchronisation, and who owns which memory."""

import pytest
import torch

from .helpers import (
    DTYPES,
    QWEN,
    SLOT_OPS,
    SMALL,
    Guarded,
    Shape,
    assert_same,
    assert_zero,
    move,
    name_of,
    normal,
    rule_inputs,
    rule_state,
    short,
    step_weights,
)

each_op = pytest.mark.parametrize("op", SLOT_OPS, ids=name_of)
NORM = {"use_qk_l2norm": True}


def elementwise_calls(kernel, device):
    """Name -> function of a seed, for the ops without a state."""

    def gates(seed):
        a = normal(2, 5, 6, seed=seed, device=device)
        return kernel.gated_delta_gates(a, -a, a[0, 0], a[0, 1])

    def norm(seed):
        x = normal(2, 5, 6, 32, seed=seed, device=device)
        return (kernel.rms_norm_gated(x, -x, x[0, 0, 0], 1e-6),)

    def rope(seed):
        q, k = (normal(2, 5, heads, 32, seed=seed, device=device) for heads in (6, 2))
        return kernel.qk_norm_rope(q, k, q[0, 0, 0], k[0, 0, 0], q[0, :, 0, :16], q[0, :, 1, :16], 1e-6)

    def output_gate(seed):
        x = normal(2, 5, 6, 32, seed=seed, device=device)
        return (kernel.output_gate(x, -x),)

    return {"gated_delta_gates": gates, "rms_norm_gated": norm, "qk_norm_rope": rope, "output_gate": output_gate}


def captured(call):
    """A graph of one call, captured on a side stream after a warm-up, as torch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.cuda_only
@each_op
def test_one_graph_serves_fewer_live_rows(kernel, device, op):
    """8 rows captured, 1..8 live at replay"""
    inputs, fresh = move(op.inputs(8), device), op.pool(12).to(device, copy=True)
    pool = fresh.clone()
    slots = torch.arange(8, dtype=torch.int32, device=device)
    graph, out = captured(lambda: op.call(kernel, inputs, pool, slots))
    order = [9, 2, 11, 0, 5, 7, 3, 1]
    for live in range(1, 9):
        rows = torch.tensor(order[:live] + [-1] * (8 - live), dtype=torch.int32)
        slots.copy_(rows)
        pool.copy_(fresh)
        expected_pool = fresh.clone()
        expected = op.call(kernel, inputs, expected_pool, rows.to(device))
        graph.replay()
        assert_same(out, expected, f"output with {live} live rows")
        assert_same(pool, expected_pool, f"pool with {live} live rows")
        assert_zero(out[live:], "padding rows")
        others = [slot for slot in range(12) if slot not in order[:live]]
        assert_same(pool[others], fresh[others], "other slots")


@pytest.mark.cuda_only
@pytest.mark.parametrize("ragged", (False, True), ids=("dense", "ragged"))
@pytest.mark.parametrize("op", [op for op in SLOT_OPS if op.has_flags], ids=name_of)
def test_capture_of_a_prefill(kernel, device, op, ragged):
    """70 tokens, all buffers given; ragged offsets and flags may change between replays"""
    inputs, fresh = move(op.inputs(1, 70), device), op.pool(4).to(device, copy=True)
    options = {}
    if ragged:
        options["cu_seqlens"] = torch.tensor([0, 30, 30, 65], device=device)
        options["has_initial_state"] = torch.tensor([True, True, False], device=device)
        inputs = inputs if op.name.startswith("gated") else (inputs[0][0].T.contiguous(),)
    slots = torch.tensor([2, 0, 3] if ragged else [2], device=device)
    pool = fresh.clone()
    out = torch.empty_like(inputs[0] if not op.name.startswith("gated") else inputs[2])
    graph, _ = captured(lambda: op.call(kernel, inputs, pool, slots, out=out, **options))
    if ragged:
        options["cu_seqlens"].copy_(torch.tensor([0, 1, 40, 70]))
    pool.copy_(fresh)
    expected_pool = fresh.clone()
    expected = op.call(kernel, inputs, expected_pool, slots, **options)
    graph.replay()
    assert_same(out, expected, "output")
    assert_same(pool, expected_pool, "pool")


@pytest.mark.cuda_only
@pytest.mark.parametrize("name", ("gated_delta_gates", "rms_norm_gated", "qk_norm_rope", "output_gate"))
def test_capture_of_the_elementwise_ops(kernel, device, name):
    call = elementwise_calls(kernel, device)[name]
    a, x = normal(2, 5, 6, seed=1, device=device), normal(2, 5, 6, 32, seed=1, device=device)
    k = normal(2, 5, 2, 32, seed=1, device=device)

    def run():
        if name == "gated_delta_gates":
            return kernel.gated_delta_gates(a, -a, a[0, 0], a[0, 1])
        if name == "qk_norm_rope":
            return kernel.qk_norm_rope(x, k, x[0, 0, 0], k[0, 0, 0], x[0, :, 0, :16], x[0, :, 1, :16], 1e-6)
        if name == "output_gate":
            return (kernel.output_gate(x, -x),)
        return (kernel.rms_norm_gated(x, -x, x[0, 0, 0], 1e-6),)

    graph, results = captured(run)
    for part in (a, x, k):
        part.copy_(normal(*part.shape, seed=2))
    graph.replay()
    for result, expected in zip(results, call(2)):
        assert_same(result, expected, name)


def serving_step(kernel, device):
    """A call of every serving op on pools made here, and the index tensors and pools it uses."""
    x, signal = rule_inputs(3, 4, device=device), normal(3, 24, 4, device=device)
    state, window = rule_state(9, device=device), normal(9, 24, 3, device=device)
    narrow = torch.zeros_like(state, dtype=torch.bfloat16)
    ring, buffer = kernel.new_ring(3, 2, 4, 32, 32, 2, device=device), torch.zeros(3, 4, 4, 32, 32, device=device)
    slots, rows, counts = (torch.tensor(values, device=device) for values in ([4, 0, 2], [1, 2, 0], [2, 4, 1]))
    table = torch.arange(12, device=device).view(3, 4)

    def step():
        options = {"slots": slots, **NORM}
        out = kernel.gated_delta_verify(*x, state, ring, ring_slots=rows, **options)
        kernel.fold_ring(state, ring, slots=slots, ring_slots=rows, num_accepted=counts)
        kernel.conv_state_write(signal, window, slots=slots, num_accepted=counts)
        kernel.gated_delta_verify(*x, state, states_out=buffer, **options)
        kernel.copy_slots(state, slots, rows + 6)
        kernel.gated_delta_verify(*x, state, state_table=table, num_accepted=counts, **NORM)
        kernel.zero_slots(window, rows + 6)
        kernel.cast_state(state, narrow)
        return out

    return step, (slots, rows, counts), [state, window, narrow, ring, buffer]


@pytest.mark.cuda_only
def test_capture_of_the_serving_ops(kernel, device):
    """one graph of all of them; a replay with rewritten slots, rows and counts equals the eager calls"""
    step, indices, pools = serving_step(kernel, device)
    eager, eager_indices, eager_pools = serving_step(kernel, device)
    fresh = [pool.clone() for pool in pools]
    graph, out = captured(step)
    for slots, rows, counts in (([4, 0, 2], [1, 2, 0], [2, 4, 1]), ([1, -1, 3], [0, 7, 2], [4, 4, 0])):
        for values in (indices, eager_indices):
            for tensor, value in zip(values, (slots, rows, counts)):
                tensor.copy_(torch.tensor(value))
        for pool, eager_pool, start in zip(pools, eager_pools, fresh):
            pool.copy_(start)
            eager_pool.copy_(start)
        expected = eager()
        graph.replay()
        assert_same(out, expected, "output")
        for pool, eager_pool in zip(pools, eager_pools):
            assert_same(pool, eager_pool)


@pytest.mark.cuda_only
def test_no_op_synchronises(kernel, device):
    """an error under set_sync_debug_mode("error"); .item() is the control that the mode works"""
    calls = [serving_step(kernel, device)[0]]
    for op in SLOT_OPS:
        inputs, pool = move(op.inputs(3, 5), device), op.pool(4).to(device, copy=True)
        slots = torch.tensor([2, -1, 0], device=device)
        calls.append(lambda op=op, inputs=inputs, pool=pool, slots=slots: op.call(kernel, inputs, pool, slots))
    x, state = rule_inputs(1, 20, device=device), rule_state(2, device=device)
    offsets, flags = torch.tensor([0, 9, 20], device=device), torch.tensor([True, False], device=device)
    options = {"cu_seqlens": offsets, "has_initial_state": flags}
    calls.append(lambda: kernel.gated_delta_rule(*x, state, **options, **NORM))
    calls.append(
        lambda: kernel.chunk_gated_delta_rule(
            x.q, x.k, x.v, g=x.g, beta=x.beta, initial_state=state, output_final_state=True, cu_seqlens=offsets
        )
    )
    signal, weight, window = (
        normal(20, 24, device=device),
        normal(24, 4, device=device),
        normal(2, 24, 3, device=device),
    )
    calls.append(lambda: kernel.causal_conv1d(signal, weight, conv_state=window, **options))
    documents = torch.zeros(1, 24, dtype=torch.int32, device=device)
    calls.append(lambda: kernel.causal_conv1d(signal[None], weight[:20], seq_idx=documents))
    calls.append(lambda: kernel.gated_delta_gates(x.g, x.beta, x.g[0, 0], x.g[0, 1]))
    calls.append(lambda: kernel.rms_norm_gated(x.v, x.v, x.v[0, 0, 0], 1e-6))
    angles = x.v[0, :, 0, :16]
    calls.append(lambda: kernel.qk_norm_rope(x.q, x.k, x.q[0, 0, 0], x.k[0, 0, 0], angles, angles, 1e-6))
    calls.append(lambda: kernel.output_gate(x.v, x.v))
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            state.sum().item()
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda_only
def test_two_streams_at_once(kernel, device):
    """50 times two prefills side by side, bitwise what they are one after the other"""
    tokens = 2048
    inputs = [rule_inputs(1, tokens, QWEN, dtype=torch.bfloat16, seed=seed, device=device) for seed in (0, 1)]
    fresh = rule_state(1, QWEN, device=device)
    serial = []
    for x in inputs:
        state = fresh.clone()
        serial.append((kernel.gated_delta_rule(*x, state, **NORM), state))
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(50):
        results = []
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                state = fresh.clone()
                results.append((kernel.gated_delta_rule(*x, state, **NORM), state))
        torch.cuda.synchronize()
        for (out, state), (expected, expected_state) in zip(results, serial):
            assert torch.equal(out, expected) and torch.equal(state, expected_state)


@pytest.mark.cuda_only
@each_op
def test_work_is_queued_on_the_current_stream(kernel, device, op):
    """The call waits for what its stream waits for: inputs that arrive late are seen"""
    inputs, pool = move(op.inputs(2), device), op.pool(2).to(device, copy=True)
    expected_pool = pool.clone()
    expected = op.call(kernel, inputs, expected_pool)
    late = tuple(torch.zeros_like(x) for x in inputs)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        for target, source in zip(late, inputs):
            target.copy_(source)
        out = op.call(kernel, late, pool)
    torch.cuda.synchronize()
    assert_same(out, expected, "output")
    assert_same(pool, expected_pool, "pool")


@each_op
def test_outputs_do_not_share_storage(kernel, device, op):
    pool = op.pool(3).to(device, copy=True)
    first = op.call(kernel, move(op.inputs(3, seed=1), device), pool.clone())
    keep = first.clone()
    second = op.call(kernel, move(op.inputs(3, seed=2), device), pool.clone())
    assert_same(first, keep, "first result")
    assert first.data_ptr() != second.data_ptr() and not torch.equal(first, second)


@pytest.mark.parametrize("name", ("gated_delta_gates", "rms_norm_gated", "qk_norm_rope", "output_gate"))
def test_elementwise_outputs_do_not_share_storage(kernel, device, name):
    call = elementwise_calls(kernel, device)[name]
    first = call(1)
    keep = [result.clone() for result in first]
    second = call(2)
    for a, b, kept in zip(first, second, keep):
        assert_same(a, kept)
        assert a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"))
def test_final_states_do_not_share_storage(kernel, device, name):
    """neither with each other nor with initial_state, also when there are no tokens"""
    function, initial = getattr(kernel, name), rule_state(2, device=device)
    states = []
    for tokens in (3, 3, 0):
        x = rule_inputs(2, tokens, seed=tokens, device=device)
        options = {"g": x.g, "beta": x.beta, "initial_state": initial, "output_final_state": True}
        states.append(function(x.q, x.k, x.v, **options)[1])
    assert len({state.data_ptr() for state in (*states, initial)}) == 4
    assert_same(states[2], initial, "state after no tokens")


@pytest.mark.parametrize("mode", ("recurrent", "chunk"))
@pytest.mark.parametrize("out_dtype", DTYPES, ids=short)
def test_rule_writes_only_its_buffers(kernel, device, mode, out_dtype):
    """out and state between guards, aligned and not"""
    shape = Shape(1, 2, 32, 72)
    x = rule_inputs(2, 9, shape, device=device)
    fresh = rule_state(2, shape, device=device)
    expected_state = fresh.clone()
    expected = kernel.gated_delta_rule(*x, expected_state, mode=mode, **NORM)
    for margin in (64, 65):
        out = Guarded(2, 9, 2, 72, dtype=out_dtype, device=device, margin=margin)
        state = Guarded(2, 2, 32, 72, device=device, fill=fresh, margin=margin)
        returned = kernel.gated_delta_rule(*x, state.tensor, mode=mode, out=out.tensor, **NORM)
        assert returned.data_ptr() == out.tensor.data_ptr()
        assert_same(out.tensor, expected.to(out_dtype), "output")
        assert_same(state.tensor, expected_state, "state")
        out.check()
        state.check()


@pytest.mark.parametrize("margin", (64, 65))
def test_conv_writes_only_its_buffers(kernel, device, margin):
    x, weight = normal(2, 31, 5, device=device), normal(31, 4, seed=2, device=device)
    fresh = normal(2, 31, 3, seed=3, device=device)
    expected_window = fresh.clone()
    expected = kernel.causal_conv1d(x, weight, conv_state=expected_window)
    for update in (False, True):
        out = Guarded(2, 31, 5, device=device, margin=margin)
        window = Guarded(2, 31, 3, device=device, fill=fresh, margin=margin)
        if update:
            kernel.causal_conv1d_update(x, window.tensor, weight, out=out.tensor)
        else:
            kernel.causal_conv1d(x, weight, conv_state=window.tensor, out=out.tensor)
        assert_same(out.tensor, expected, "output")
        assert_same(window.tensor, expected_window, "window")
        out.check()
        window.check()


def test_strided_out_is_filled_and_the_gaps_are_left(kernel, device):
    """out as a slice of a wider tensor"""
    x, state = rule_inputs(2, 9, device=device), rule_state(2, device=device)
    expected = kernel.gated_delta_rule(*x, state.clone(), **NORM)
    wide = torch.full((2, 9, 4, 96), -7.75, device=device)
    kernel.gated_delta_rule(*x, state, out=wide[..., 32:64], **NORM)
    assert_same(wide[..., 32:64], expected, "output")
    assert bool((wide[..., :32] == -7.75).all()) and bool((wide[..., 64:] == -7.75).all())
    signal, weight = normal(2, 24, 10, device=device), normal(24, 4, seed=2, device=device)
    expected = kernel.causal_conv1d(signal, weight)
    wide = torch.full((2, 10, 50), -7.75, device=device)
    kernel.causal_conv1d(signal, weight, out=wide[..., 13:37].transpose(1, 2))
    assert_same(wide[..., 13:37].transpose(1, 2), expected, "conv output")
    assert bool((wide[..., :13] == -7.75).all()) and bool((wide[..., 37:] == -7.75).all())


def test_padded_slots_keep_their_padding(kernel, device):
    """nothing is written between the slots of a pool with a padded slot stride"""
    state = rule_state(3, SMALL, device=device, slot_padding=96)
    storage = state.as_strided((3, 4 * 32 * 32 + 96), (4 * 32 * 32 + 96, 1))
    kernel.gated_delta_rule(*rule_inputs(3, 4, device=device), state, **NORM)
    assert bool((storage[:, 4 * 32 * 32 :] == -7.75).all())


def test_guards_notice_a_write():
    """Control of the guards themselves"""
    guarded = Guarded(4, 4)
    guarded.check()
    guarded.buffer[64 + 16] = 0
    with pytest.raises(AssertionError):
        guarded.check()


@pytest.mark.parametrize("name", ("q", "k", "v"))
@pytest.mark.parametrize("op", ("gated_delta_rule", "gated_delta_verify"))
def test_out_that_is_an_input_is_refused(kernel, device, op, name):
    """The backends read tokens while they write outputs; each op says which argument it is"""
    shape = Shape(2, 2, 16, 16)
    x, state = rule_inputs(2, 3, shape, device=device), rule_state(2, shape, device=device)
    before = state.clone()
    ring = (kernel.new_ring(2, 2, 4, 16, 16, 1, device=device),) if op == "gated_delta_verify" else ()
    with pytest.raises(RuntimeError, match=f"{op}: out must be memory of its own, not {name}'s"):
        getattr(kernel, op)(*x, state, *ring, out=getattr(x, name))
    assert_same(state, before, "state")


@pytest.mark.parametrize("name", ("mixed_qkv", "z", "state", "conv_state"))
def test_step_out_that_is_an_argument_is_refused(kernel, device, name):
    shape = Shape(2, 2, 16, 16)
    given = {
        "mixed_qkv": normal(2, 1, 96, device=device),
        "z": normal(2, 1, 2, 16, device=device),
        "conv_state": normal(2, 96, 3, device=device),
        "state": rule_state(2, shape, device=device),
    }
    a = normal(2, 1, 2, device=device)
    out = given[name].reshape(-1)[:64].view(2, 1, 2, 16)
    call = {**given, "a": a, "b": a, **step_weights(shape, device), "eps": 1e-6, "num_key_heads": 2, "out": out}
    with pytest.raises(RuntimeError, match=f"gated_delta_step: out must be memory of its own, not {name}'s"):
        kernel.gated_delta_step(**call)
