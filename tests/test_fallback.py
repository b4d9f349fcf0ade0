# SPDX-License-Identifier: Apache-2.0
"""Devices without a kernel: the reference answers, and says so once."""

import warnings

import pytest
import torch

from .helpers import StepOp, assert_close, normal, rule_inputs, rule_state


def rule(kernel):
    state = rule_state(2)
    return kernel.gated_delta_rule(*rule_inputs(2, 5), state, use_qk_l2norm=True), state


def functional(name):
    def call(kernel):
        q, k, v, g, beta = rule_inputs(2, 5)
        return getattr(kernel, name)(q, k, v, g, beta=beta, initial_state=rule_state(2), output_final_state=True)

    return call


def checkpoints(kernel):
    state, kept = rule_state(2), rule_state(2)
    options = {"use_qk_l2norm": True, "checkpoint_every": 64, "checkpoints": kept}
    return kernel.gated_delta_rule(*rule_inputs(2, 70), state, **options), state, kept


def verify(kernel):
    """All three contracts; one row longer than the ring"""
    x, rows, counts = rule_inputs(1, 9), torch.tensor([2, -1, 0]), torch.tensor([3, 1, 1])
    options = {"cu_seqlens": torch.tensor([0, 3, 4, 9]), "use_qk_l2norm": True}
    state, ring = rule_state(4), kernel.new_ring(3, 2, 4, 32, 32, 2, device="cpu")
    out = kernel.gated_delta_verify(*x, state, ring, slots=rows, ring_slots=rows, **options)
    buffer, table = torch.zeros(3, 2, 4, 32, 32), torch.tensor([[0, 1, 3], [0, 1, 2], [2, -1, 9]])
    kernel.gated_delta_verify(*x, rule_state(4), slots=rows, states_out=buffer, **options)
    by_table = rule_state(4)
    kernel.gated_delta_verify(*x, by_table, state_table=table, num_accepted=counts - 1, **options)
    return out, state, ring, buffer, by_table


def fold(kernel):
    rows = torch.tensor([[1, 0], [-1, 2]])
    tables = {"slots": rows, "ring_slots": rows, "num_accepted": torch.tensor([3, 2])}
    return (kernel.fold_ring(rule_state(2), normal(2, 2, 4, 100), **tables),)


def copies(kernel):
    return (kernel.copy_slots(rule_state(4), torch.tensor([0, 3, 9]), torch.tensor([1, 2, 0])),)


def zeros(kernel):
    return (kernel.zero_slots(rule_state(4), torch.tensor([0, 3, 9])),)


def cast(kernel):
    return (kernel.cast_state(rule_state(4), rule_state(4, dtype=torch.bfloat16)),)


def conv_write(kernel):
    window = normal(2, 12, 3, seed=1)
    return (kernel.conv_state_write(normal(2, 12, 5), window, num_accepted=torch.tensor([2, 9])),)


def conv(kernel):
    window = normal(2, 12, 3, seed=1)
    return kernel.causal_conv1d(normal(2, 12, 5), normal(12, 4, seed=2), None, "silu", conv_state=window), window


def conv_update(kernel):
    window = normal(2, 12, 4, seed=1)
    return kernel.causal_conv1d_update(normal(2, 12, 1), window, normal(12, 4, seed=2), normal(12, seed=3)), window


def step(kernel):
    op = StepOp()
    pool = op.pool(3)
    return op.call(kernel, op.inputs(3, 2), pool, torch.tensor([2, -1, 0])), pool


def gates(kernel):
    return kernel.gated_delta_gates(normal(2, 5, 4), normal(2, 5, 4, seed=1), normal(4, seed=2), normal(4, seed=3))


def norm(kernel):
    return (kernel.rms_norm_gated(normal(2, 5, 16), normal(2, 5, 16, seed=1), normal(16, seed=2), 1e-6),)


def rope(kernel):
    angles = normal(2, 5, 8, seed=2)
    weights = normal(16, seed=3), normal(16, seed=4)
    return kernel.qk_norm_rope(normal(2, 5, 4, 16), normal(2, 5, 2, 16, seed=1), *weights, angles, angles + 1, 1e-6)


def output_gate(kernel):
    return (kernel.output_gate(normal(2, 5, 16), normal(2, 5, 16, seed=1)),)


CALLS = {
    "gated_delta_rule": rule,
    "gated_delta_verify": verify,
    "fold_ring": fold,
    "copy_slots": copies,
    "zero_slots": zeros,
    "cast_state": cast,
    "conv_state_write": conv_write,
    "chunk_gated_delta_rule": functional("chunk_gated_delta_rule"),
    "fused_recurrent_gated_delta_rule": functional("fused_recurrent_gated_delta_rule"),
    "causal_conv1d": conv,
    "causal_conv1d_update": conv_update,
    "gated_delta_step": step,
    "gated_delta_gates": gates,
    "rms_norm_gated": norm,
    "qk_norm_rope": rope,
    "output_gate": output_gate,
}


def caught(function):
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        result = function()
    return result, [str(record.message) for record in records if "gated-deltanet" in str(record.message)]


def test_checkpoints_of_the_reference(kernel):
    reference = kernel.reference
    ours, theirs = checkpoints(kernel), checkpoints(reference)
    for a, b in zip(ours, theirs):
        assert_close(a, b, 1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_device_without_a_kernel_uses_the_reference(kernel, monkeypatch, name):
    """Here the CPU plays a device that the build has no kernel for."""
    expected, messages = caught(lambda: CALLS[name](kernel))
    assert messages == []
    monkeypatch.setattr(kernel._dispatch, "KERNEL_DEVICES", ())
    kernel._dispatch._warned.clear()
    actual, messages = caught(lambda: [CALLS[name](kernel) for _ in range(2)][0])
    assert len(messages) == 1 and name in messages[0] and "reference" in messages[0]
    for a, b in zip(actual, expected):
        assert_close(a, b, 1e-6)


def test_the_warning_survives_torch_compile(kernel, monkeypatch):
    monkeypatch.setattr(kernel._dispatch, "KERNEL_DEVICES", ())
    kernel._dispatch._warned.clear()
    torch._dynamo.reset()
    x, weight = normal(2, 5, 16), normal(16, seed=2)
    compiled = torch.compile(lambda x: kernel.rms_norm_gated(x, x, weight, 1e-6), fullgraph=True, backend="eager")
    _, messages = caught(lambda: [compiled(x) for _ in range(2)])
    assert len(messages) == 1
