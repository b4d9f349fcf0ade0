# SPDX-License-Identifier: Apache-2.0
"""Rows of which blocks of Hopper's chunk kernel carry two tiles, or several tasks one after the other, and rows beside
their preparation: the same bits."""

import pytest
import torch

from .helpers import Shape, assert_same, assert_zero, normal, rule_inputs, rule_state

NAN = float("nan")


def run(kernel, x, state, **options):
    """The output; `state` is updated in place."""
    return kernel.gated_delta_rule(*x, state, mode="chunk", scan="off", use_qk_l2norm=True, **options)


@pytest.mark.parametrize("shape", (Shape(1, 2, 128, 128), Shape(2, 2, 64, 256)), ids=str)
def test_more_rows_than_the_device_takes_at_once(kernel, device, shape):
    """Of so many rows a block of Hopper's kernel carries two tiles of V: the bits of the row alone, checkpoints too"""
    rows, tokens = 34, 200
    x = rule_inputs(rows, tokens, shape, dtype=torch.bfloat16, device=device)
    fresh = rule_state(rows, shape, device=device)
    state, kept = fresh.clone(), torch.full((3 * rows, *fresh.shape[1:]), NAN, device=device)
    options = {"checkpoint_every": 64}
    out = run(kernel, x, state, checkpoints=kept, **options)
    for n in (0, 1, 16, 33):
        alone, of_row = fresh[n : n + 1].clone(), torch.full_like(kept[:3], NAN)
        expected = run(kernel, x.rows(slice(n, n + 1)), alone, checkpoints=of_row, **options)
        assert_same(out[n : n + 1], expected, f"output of row {n}")
        assert_same(state[n : n + 1], alone, f"state of row {n}")
        assert_same(kept[3 * n : 3 * n + 3], of_row, f"checkpoints of row {n}")


@pytest.mark.parametrize("longest", (200, 1000))
@pytest.mark.parametrize("rows, shape", ((34, Shape(1, 2, 128, 128)), (23, Shape(1, 3, 64, 128))), ids=str)
def test_packed_rows_that_the_device_takes_two_tiles_of(kernel, device, rows, shape, longest):
    """Rows of 0 to 200 tokens; a long one among them forbids it (choose_pairs): the bits of the row alone"""
    lengths = [(61 * n + 7) % 200 for n in range(rows)]
    lengths[0], lengths[3], lengths[rows // 2] = 199, 0, longest
    starts = torch.tensor([3, *lengths]).cumsum(0)
    tokens = int(starts[-1]) + 5
    x = rule_inputs(1, tokens, shape, dtype=torch.bfloat16, device=device)
    fresh = rule_state(rows, shape, device=device)
    state, counts = fresh.clone(), torch.tensor([length // 64 for length in lengths])
    first_kept = counts.cumsum(0) - counts
    kept = torch.full((int(counts.sum()), *fresh.shape[1:]), NAN, device=device)
    out = torch.full_like(x.v, NAN)
    options = {"checkpoint_every": 64}
    offsets = {"cu_seqlens": starts.to(device), "checkpoint_starts": first_kept.to(device)}
    run(kernel, x, state, checkpoints=kept, out=out, **offsets, **options)
    assert_zero(out[:, :3], "tokens before the first row")
    assert_zero(out[:, -5:], "tokens behind the last row")
    for n in (0, 1, 3, 5, rows // 2, rows - 1):
        begin, end, first, count = int(starts[n]), int(starts[n + 1]), int(first_kept[n]), int(counts[n])
        alone, of_row = fresh[n : n + 1].clone(), torch.full((count, *fresh.shape[1:]), NAN, device=device)
        expected = run(kernel, x.tokens(begin, end), alone, checkpoints=of_row, **options)
        assert_same(out[:, begin:end], expected, f"output of row {n}")
        assert_same(state[n : n + 1], alone, f"state of row {n}")
        assert_same(kept[first : first + count], of_row, f"checkpoints of row {n}")


@pytest.mark.parametrize("state_dtype", (torch.float32, torch.bfloat16), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    "rows, shape", ((100, Shape(1, 4, 128, 128)), (100, Shape(2, 4, 64, 64)), (25, Shape(4, 16, 64, 64))), ids=str
)
def test_several_tasks_for_a_block(kernel, device, rows, shape, state_dtype):
    """Rows of 0 to 199 tokens, some padding, 400 heads in all: of so many a block of Hopper's kernel takes several,
    where V is 128 first pairs of tiles, then one at a time. Their bits are those of five rows at a time"""
    lengths = torch.tensor([(77 * n + 199) % 200 * (n % 9 > 0) for n in range(rows)])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    x = rule_inputs(1, int(starts[-1]), shape, dtype=torch.bfloat16, device=device)
    fresh = rule_state(rows, shape, device=device).to(state_dtype)
    slots = (37 * torch.arange(rows) + 5) % rows
    slots[3::7] = -1
    has = (torch.arange(rows) % 3 > 0).to(device)
    outs, states, kept = [], [], []
    for of_call in (rows, 5):
        out, state = torch.full_like(x.v, NAN), fresh.clone()
        counts = lengths // 64
        checkpoints = torch.full((int(counts.sum()), *fresh.shape[1:]), NAN, device=device)
        for n in range(0, rows, of_call):
            begin, end, last = int(starts[n]), int(starts[n + of_call]), n + of_call
            options = {"slots": slots[n:last].to(device), "has_initial_state": has[n:last], "checkpoint_every": 64}
            options["cu_seqlens"] = (starts[n : last + 1] - begin).to(device)
            options["checkpoint_starts"] = (counts.cumsum(0) - counts)[n:last].to(device)
            of_rows = x.tokens(begin, end)
            run(kernel, of_rows, state, out=out[:, begin:end], checkpoints=checkpoints, **options)
        outs.append(out)
        states.append(state)
        kept.append(checkpoints)
    assert_same(outs[0], outs[1], "output")
    assert_same(states[0], states[1], "states")
    assert_same(kept[0].nan_to_num(7), kept[1].nan_to_num(7), "checkpoints")
    for n in range(3, rows, 7):
        assert_zero(outs[0][:, int(starts[n]) : int(starts[n + 1])], f"output of the padding row {n}")


def test_more_sequences_than_tokens(kernel, device):
    """Nearly all of them empty: their states stay, and the launcher plans with rows of no chunks"""
    rows, tokens, shape = 300, 100, Shape(4, 4, 64, 64)
    x = rule_inputs(1, tokens, shape, dtype=torch.bfloat16, device=device)
    fresh = rule_state(rows, shape, device=device)
    state = fresh.clone()
    offsets = torch.zeros(rows + 1, dtype=torch.int32)
    offsets[8:], offsets[251:] = 30, tokens
    out = run(kernel, x, state, cu_seqlens=offsets.to(device))
    for n, (begin, end) in {7: (0, 30), 250: (30, tokens)}.items():
        alone = fresh[n : n + 1].clone()
        assert_same(out[:, begin:end], run(kernel, x.tokens(begin, end), alone), f"output of row {n}")
        assert_same(state[n : n + 1], alone, f"state of row {n}")
        fresh[n] = state[n]
    assert_same(state, fresh, "states of empty rows")


def in_pieces(kernel, x, state, kept, piece):
    """Outputs of a row computed `piece` tokens at a time, the state after every 1024 of them to `kept`"""
    outputs = []
    for first in range(0, x.q.shape[1], piece):
        outputs.append(run(kernel, x.tokens(first, min(first + piece, x.q.shape[1])), state))
        if (first + piece) % 1024 == 0 and first + piece <= x.q.shape[1]:
            kept[(first + piece) // 1024 - 1] = state[0]
    return torch.cat(outputs, 1)


@pytest.mark.cuda_only
@pytest.mark.parametrize("lengths", ((4177,), (9000, 7000)), ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_rows_beside_their_preparation(kernel, device, dtype, lengths):
    """Rows that an H200 prepares and carries side by side (plan.h): the bits of pieces that are too short for it"""
    shape, rows = Shape(16, 48, 128, 128), len(lengths)
    starts = torch.tensor([3, *lengths]).cumsum(0)
    x = rule_inputs(1, int(starts[-1]) + 5, shape, dtype=dtype, device=device)
    fresh = rule_state(rows, shape, device=device)
    counts = torch.tensor([length // 1024 for length in lengths])
    first_kept = counts.cumsum(0) - counts
    kept = torch.full((int(counts.sum()), *fresh.shape[1:]), NAN, device=device)
    state, out = fresh.clone(), torch.full_like(x.v, NAN)
    offsets = {"cu_seqlens": starts.to(device), "checkpoint_starts": first_kept.to(device)}
    run(kernel, x, state, out=out, checkpoints=kept, checkpoint_every=1024, **offsets)
    assert_zero(out[:, :3], "tokens before the first row")
    assert_zero(out[:, -5:], "tokens behind the last row")
    for n in range(rows):
        begin, end, first, count = int(starts[n]), int(starts[n + 1]), int(first_kept[n]), int(counts[n])
        alone, of_row = fresh[n : n + 1].clone(), torch.full((count, *fresh.shape[1:]), NAN, device=device)
        expected = in_pieces(kernel, x.tokens(begin, end), alone, of_row, 512)
        assert_same(out[:, begin:end], expected, f"output of row {n}")
        assert_same(state[n : n + 1], alone, f"state of row {n}")
        assert_same(kept[first : first + count], of_row, f"checkpoints of row {n}")


@pytest.mark.cuda_only
def test_calls_on_several_streams_beside_their_preparation(kernel, device):
    """Calls each of which waits for a preparation of its own, at once on the device: all end, with their bits"""
    shape, calls = Shape(16, 48, 128, 128), 4
    inputs = [rule_inputs(1, 4096, shape, dtype=torch.bfloat16, seed=n, device=device) for n in range(calls)]
    fresh = rule_state(1, shape, device=device)
    expected = []
    for x in inputs:
        state = fresh.clone()
        expected.append((run(kernel, x, state), state))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(calls)]
    for _ in range(5):
        found = []
        for x, stream in zip(inputs, streams):
            with torch.cuda.stream(stream):
                state = fresh.clone()
                found.append((run(kernel, x, state), state))
        torch.cuda.synchronize()
        for (out, state), (wanted, wanted_state) in zip(found, expected):
            assert_same(out, wanted, "output")
            assert_same(state, wanted_state, "state")


@pytest.mark.cuda_only
def test_graph_of_rows_beside_their_preparation(kernel, device):
    """Captured once: what one replay tells of its preparation is not taken for the next one's, whatever the offsets"""
    shape, tokens = Shape(16, 48, 128, 128), 5000
    x = rule_inputs(1, tokens, shape, dtype=torch.bfloat16, device=device)
    fresh = rule_state(1, shape, device=device)
    state, out, offsets = fresh.clone(), torch.empty_like(x.v), torch.tensor([0, tokens], device=device)
    options = {"cu_seqlens": offsets, "out": out}
    run(kernel, x, state, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(kernel, x, state, **options)
    for turn, (begin, end) in enumerate(((0, 5000), (7, 4990), (64, 64), (1000, 1001), (0, 5000), (4000, 100))):
        x.k.copy_(normal(*x.k.shape, seed=turn))
        offsets.copy_(torch.tensor([begin, end]))
        state.copy_(fresh)
        out.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()  # also where offsets descend: no sequence, and nobody waits for its chunks
        if begin < end:
            alone, of_row = fresh.clone(), torch.empty(4, *fresh.shape[1:], device=device)
            expected = in_pieces(kernel, x.tokens(begin, end), alone, of_row, 512)
            assert_same(out[:, begin:end], expected, f"output of {begin}..{end}")
            assert_same(state, alone, f"state of {begin}..{end}")
        else:
            assert_same(state, fresh, f"state of {begin}..{end}")
