# SPDX-License-Identifier: Apache-2.0
"""GATED_DELTANET_CHECK=1: bad values inside device tensors raise; without it they are memory-safe."""

import os
import subprocess
import sys

import pytest
import torch

from .conftest import ROOT
from .helpers import StepOp, assert_same, move, normal, rule_inputs, rule_state


@pytest.fixture
def checked(kernel, monkeypatch):
    monkeypatch.setattr(kernel._values, "ENABLED", True)
    return kernel


def rule(kernel, device, **options):
    x = rule_inputs(1, 9, device=device)
    g = options.pop("g", x.g)
    offsets = torch.tensor(options.pop("offsets", [0, 4, 9]), device=device)
    options = {name: torch.tensor(value, device=device) if isinstance(value, list) else value
               for name, value in options.items()}  # fmt: skip
    return kernel.gated_delta_rule(
        x.q, x.k, x.v, g, x.beta, rule_state(4, device=device), cu_seqlens=offsets, **options
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"slots": [2, 2]}, "slots must be distinct"),
        ({"slots": [2, 1], "out_slots": [3, 3]}, "out_slots must be distinct"),
        ({"slots": [2, 1], "out_slots": [1, 3]}, "out_slots must not name slot 1"),
        ({"slots": [2, 1], "offsets": [0, 5, 4]}, "cu_seqlens must ascend"),
        ({"slots": [2, 1], "offsets": [-1, 5, 9]}, "cu_seqlens must ascend"),
        ({"slots": [2, 1], "offsets": [0, 5, 10]}, "cu_seqlens must ascend"),
    ],
)
def test_bad_indices_raise(checked, device, options, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        rule(checked, device, **options)


def test_legal_values_pass(checked, device):
    rule(checked, device, slots=[2, 1])
    rule(checked, device, slots=[-1, -1])
    rule(checked, device, slots=[3, 99], out_slots=[3, 3])
    rule(checked, device, slots=[2, 1], out_slots=[2, 0])


@pytest.mark.parametrize("domain, bad", (("log", 0.25), ("linear", 1.5), ("linear", -0.5)))
def test_gates_out_of_range_raise(checked, device, domain, bad):
    """what a padding row or a token of no sequence holds is not looked at"""
    g = torch.full((1, 9, 4), -0.5 if domain == "log" else 0.5, device=device)
    options = {"gate_domain": domain, "offsets": [0, 4, 8]}
    g[0, 8, 0] = bad
    rule(checked, device, g=g, slots=[2, 1], **options)
    g[0, 5, 3] = bad
    rule(checked, device, g=g, slots=[2, -1], **options)
    with pytest.raises(ValueError, match="g must be .* sequence 1"):
        rule(checked, device, g=g, slots=[2, 1], **options)


def test_raw_gates_may_be_anything(checked, device):
    a = torch.full((1, 9, 4), 3.0, device=device)
    heads = {"A_log": a[0, 0], "dt_bias": a[0, 0]}
    out = rule(checked, device, g=a, slots=[2, 1], offsets=[0, 4, 8], gate_domain="raw", **heads)
    assert bool(out.isfinite().all())


def test_checkpoint_rows_are_checked(checked, device):
    x, state = rule_inputs(2, 130, device=device), rule_state(2, device=device)
    checkpoints = rule_state(4, device=device)
    options = {"checkpoint_every": 64, "checkpoints": checkpoints}
    checked.gated_delta_rule(*x, state, **options)
    for starts, message in (([0, 1], "must be distinct"), ([0, 3], "must leave room"), ([-1, 2], "must leave room")):
        with pytest.raises(ValueError, match=message):
            checked.gated_delta_rule(*x, state, checkpoint_starts=torch.tensor(starts, device=device), **options)


def test_verify_and_fold_are_checked(checked, device):
    x, state, ring = rule_inputs(2, 3, device=device), rule_state(4, device=device), None
    ring = checked.new_ring(3, 2, 4, 32, 32, 2, device=device)
    short = checked.new_ring(3, 2, 2, 32, 32, 2, device=device)
    same, other = torch.tensor([1, 1], device=device), torch.tensor([1, 2], device=device)
    table = torch.tensor([[0, 1, 2], [3, 1, -1]], device=device)
    checked.gated_delta_verify(*x, state, ring, slots=same, ring_slots=other)  # branches of one prefix
    with pytest.raises(ValueError, match="ring_slots must be distinct"):
        checked.gated_delta_verify(*x, state, ring, slots=other, ring_slots=same)
    with pytest.raises(ValueError, match="slots must be distinct where a row is longer than the ring"):
        checked.gated_delta_verify(*x, state, short, slots=same, ring_slots=other)
    with pytest.raises(ValueError, match="slots of state_table must be distinct"):
        checked.gated_delta_verify(*x, state, state_table=table, num_accepted=other)
    with pytest.raises(ValueError, match="g must be"):
        checked.gated_delta_verify(*x._replace(g=-x.g), state, ring, slots=same, ring_slots=other)
    before = state.clone()
    with pytest.raises(ValueError, match="slots must be distinct"):
        checked.fold_ring(state, ring, slots=same, ring_slots=other, num_accepted=other)
    assert_same(state, before, "state")
    skipped = torch.tensor([1, 9], device=device)
    checked.fold_ring(state, ring, slots=same, ring_slots=other, num_accepted=skipped)


def test_pools_and_windows_are_checked(checked, device):
    pool, x = rule_state(4, device=device), normal(2, 24, 3, device=device)
    window, weight = normal(4, 24, 3, device=device), normal(24, 4, device=device)
    same, other = torch.tensor([1, 1], device=device), torch.tensor([1, 2], device=device)
    with pytest.raises(ValueError, match="dst must be distinct"):
        checked.copy_slots(pool, other, same)
    with pytest.raises(ValueError, match="dst must not name slot 2"):
        checked.copy_slots(pool, other, other.flip(0))
    checked.copy_slots(pool, same, other + 1)
    step = StepOp()
    for call in (
        lambda: step.call(checked, move(step.inputs(2), device), step.pool(4).to(device), same),
        lambda: checked.causal_conv1d(x, weight, conv_state=window, slots=same),
        lambda: checked.causal_conv1d_update(x, window, weight, slots=same),
        lambda: checked.conv_state_write(x, window, slots=same, num_accepted=other),
    ):
        with pytest.raises(ValueError, match="slots must be distinct"):
            call()
    checked.causal_conv1d(x, weight, conv_state=window, slots=same, write_state=False)


def test_compiled_calls_are_not_checked(checked, device):
    torch._dynamo.reset()
    pool, other = rule_state(4, device=device), torch.tensor([1, 1], device=device)
    torch.compile(lambda: checked.copy_slots(pool, other, other), fullgraph=True, backend="aot_eager")()


def test_the_variable_turns_it_on(kernel):
    """In a process of its own; off by default"""
    assert not kernel._values.ENABLED or os.environ.get("GATED_DELTANET_CHECK")
    code = "from kernels import get_kernel; print(get_kernel('org/gated-deltanet', version=1)._values.ENABLED)"
    for value, expected in (("1", "True"), ("0", "False"), ("", "False")):
        environment = {**os.environ, "GATED_DELTANET_CHECK": value}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.stdout.strip() == expected, done.stderr
