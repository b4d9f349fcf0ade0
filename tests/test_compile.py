# SPDX-License-Identifier: Apache-2.0
"""The ops under torch.library.opcheck, torch.compile and its fake tensors."""

import pytest
import torch

from .helpers import (
    SMALL,
    TENSOR_CORES,
    Shape,
    assert_close,
    assert_same,
    normal,
    rule_inputs,
    rule_state,
    step_weights,
)

NORM = {"use_qk_l2norm": True}
HEADS = (2, 4, 32, 32)


def rule_call(device, *, ragged=False, in_place=True, state_given=True, padded=False, mode=2, raw=False):
    shape, dtype = (TENSOR_CORES, torch.bfloat16) if mode == 1 else (SMALL, torch.float32)
    x = rule_inputs(1 if ragged else 3, 9 if ragged else 3, shape, dtype=dtype, device=device)
    state = rule_state(5, shape, device=device, slot_padding=32 if padded else 0)
    index = torch.tensor([4, -1, 0], device=device)
    return {
        **x._asdict(),
        "initial_state": None if in_place or not state_given else rule_state(3, shape, device=device),
        "state": state if in_place or state_given else None,
        "in_place": in_place,
        "out": torch.empty_like(x.v),
        "scale": 0.5,
        "use_qk_l2norm": True,
        "gate_domain": 2 if raw else 0,
        "A_log": x.g[0, 0] if raw else None,
        "dt_bias": x.beta[0, 0] if raw else None,
        "beta_is_raw": raw,
        "allow_neg_eigval": raw,
        "rule_mode": mode,
        "is_high_precision": False,
        "may_scan": True,
        "cu_seqlens": torch.tensor([0, 4, 4, 8], device=device) if ragged else None,
        "slots": index if in_place else None,
        "out_slots": index if state_given or in_place else None,
        "has_initial_state": torch.tensor([True, False, True], device=device),
        "checkpoints": None,
        "checkpoint_every": 0,
        "checkpoint_starts": None,
    }


def checkpoint_call(device):
    x, state = rule_inputs(2, 70, device=device), rule_state(2, device=device)
    starts = torch.tensor([1, 0], device=device)
    checkpoints = {"checkpoints": rule_state(2, device=device), "checkpoint_every": 64, "checkpoint_starts": starts}
    given = {**x._asdict(), "state": state, "out": torch.empty_like(x.v), "slots": None, "out_slots": None}
    return {**rule_call(device), **given, **checkpoints, "has_initial_state": None}


def verify_call(device, *, contract="ring"):
    x, index = rule_inputs(3, 3, device=device), torch.tensor([4, -1, 0], device=device)
    table = torch.arange(9, device=device).view(3, 3)
    is_table = contract == "table"
    return {
        **x._asdict(),
        "state": rule_state(9, device=device),
        "ring": normal(5, 2, 4, 110, device=device) if contract == "ring" else None,
        "states_out": normal(3, 3, 4, 32, 32, device=device) if contract == "states" else None,
        "out": torch.empty_like(x.v),
        "scale": 0.5,
        "use_qk_l2norm": True,
        "gate_is_linear": False,
        "cu_seqlens": None,
        "slots": None if is_table else index,
        "ring_slots": torch.tensor([2, 7, 0], device=device) if contract == "ring" else None,
        "state_table": table if is_table else None,
        "num_accepted": torch.tensor([1, 3, 0], device=device) if is_table else None,
    }


def fold_call(device):
    slots = torch.tensor([[4, -1, 0], [1, 2, 3]], device=device)
    tensors = {"state": rule_state(6, device=device), "ring": normal(7, 2, 4, 110, device=device)}
    return {**tensors, "slots": slots, "ring_slots": slots, "num_accepted": torch.tensor([1, 2, 9], device=device)}


def copy_call(device):
    index = torch.tensor([4, -1, 0], device=device)
    return {"pool": rule_state(6, device=device), "src": index, "dst": index + 1}


def zero_call(device):
    return {"pool": rule_state(6, device=device), "slots": torch.tensor([4, -1, 0], device=device)}


def cast_call(device):
    return {"src": rule_state(6, device=device), "dst": rule_state(6, dtype=torch.bfloat16, device=device)}


def conv_write_call(device):
    call = conv_call(device)
    counts = torch.tensor([2, 0, 5], device=device)
    names = ("x", "conv_state", "slots", "cu_seqlens", "has_initial_state")
    return {"num_accepted": counts, **{name: call[name] for name in names}}


def conv_call(device, *, ragged=False, documents=False):
    x = normal(3, 24, 5, device=device)
    x = x.transpose(1, 2).reshape(1, 15, 24).transpose(1, 2) if ragged else x
    plain = not documents
    return {
        "x": x,
        "weight": normal(24, 4, device=device),
        "bias": normal(24, device=device),
        "conv_state": normal(5, 24, 3, device=device) if plain else None,
        "out": torch.empty_like(x),
        "use_silu": True,
        "write_state": True,
        "cu_seqlens": torch.tensor([0, 4, 4, 15], device=device) if ragged else None,
        "seq_idx": torch.zeros(3, 5, dtype=torch.int32, device=device) if documents else None,
        "slots": torch.tensor([4, -1, 0], device=device) if plain else None,
        "has_initial_state": torch.tensor([True, False, True], device=device) if plain else None,
    }


def update_call(device):
    names = ("x", "conv_state", "weight", "bias", "out", "use_silu", "slots")
    call = conv_call(device)
    return {name: call[name] for name in names}


def gates_call(device):
    a = normal(2, 5, 6, device=device)
    heads = {"A_log": normal(6, device=device), "dt_bias": normal(6, device=device)}
    return {
        "a": a,
        "b": a + 1,
        **heads,
        "g": torch.empty_like(a),
        "beta": torch.empty_like(a),
        "allow_neg_eigval": True,
    }


def norm_call(device):
    x = normal(2, 5, 6, 32, device=device)
    tensors = {"x": x, "z": x + 1, "weight": normal(32, device=device), "out": torch.empty_like(x)}
    return {**tensors, "eps": 1e-6, "use_silu": True, "norm_before_gate": True, "group_size": 16}


def rope_call(device):
    q, k = normal(2, 5, 6, 32, device=device), normal(2, 5, 2, 32, device=device)
    angles = normal(2, 5, 16, device=device)
    weights = {"q_weight": normal(32, device=device), "k_weight": normal(32, device=device)}
    outputs = {"q_out": torch.empty_like(q), "k_out": torch.empty_like(k)}
    return {"q": q, "k": k, **weights, "cos": angles, "sin": angles, **outputs, "eps": 1e-6, "zero_centered": True}


def output_gate_call(device):
    x = normal(2, 5, 6, 32, device=device)
    return {"x": x, "gate": x + 1, "out": torch.empty_like(x)}


def step_call(device, *, interleaved=False):
    Hk, Hv, K, V = SMALL
    C = 2 * Hk * K + Hv * V
    return {
        "mixed_qkv": normal(3, 2, C + interleaved * Hv * V, device=device),
        "z": None if interleaved else normal(3, 2, Hv, V, device=device),
        "a": None if interleaved else normal(3, 2, Hv, device=device),
        "b": normal(3, 2, Hv + interleaved * Hv, device=device),
        "conv_state": normal(5, C, 3, device=device),
        "state": rule_state(5, device=device),
        **step_weights(SMALL, device),
        "out": torch.empty(3, 2, Hv, V, device=device),
        "eps": 1e-6,
        "scale": 0.5,
        "num_key_heads": Hk,
        "is_interleaved": interleaved,
        "use_silu": True,
        "norm_before_gate": True,
        "allow_neg_eigval": False,
        "slots": torch.tensor([4, -1, 0], device=device),
    }


CALLS = {
    "gated_delta_rule-pool": ("gated_delta_rule", rule_call, {}),
    "gated_delta_rule-padded": ("gated_delta_rule", rule_call, {"padded": True}),
    "gated_delta_rule-ragged": ("gated_delta_rule", rule_call, {"ragged": True}),
    "gated_delta_rule-chunk": ("gated_delta_rule", rule_call, {"ragged": True, "mode": 1}),
    "gated_delta_rule-raw": ("gated_delta_rule", rule_call, {"raw": True}),
    "gated_delta_rule-functional": ("gated_delta_rule", rule_call, {"in_place": False}),
    "gated_delta_rule-stateless": ("gated_delta_rule", rule_call, {"in_place": False, "state_given": False}),
    "gated_delta_rule-checkpoints": ("gated_delta_rule", checkpoint_call, {}),
    "gated_delta_verify-ring": ("gated_delta_verify", verify_call, {}),
    "gated_delta_verify-table": ("gated_delta_verify", verify_call, {"contract": "table"}),
    "gated_delta_verify-states": ("gated_delta_verify", verify_call, {"contract": "states"}),
    "fold_ring": ("fold_ring", fold_call, {}),
    "copy_slots": ("copy_slots", copy_call, {}),
    "zero_slots": ("zero_slots", zero_call, {}),
    "cast_state": ("cast_state", cast_call, {}),
    "conv_state_write": ("conv_state_write", conv_write_call, {}),
    "causal_conv1d-pool": ("causal_conv1d", conv_call, {}),
    "causal_conv1d-ragged": ("causal_conv1d", conv_call, {"ragged": True}),
    "causal_conv1d-documents": ("causal_conv1d", conv_call, {"documents": True}),
    "causal_conv1d_update": ("causal_conv1d_update", update_call, {}),
    "gated_delta_step": ("gated_delta_step", step_call, {}),
    "gated_delta_step-interleaved": ("gated_delta_step", step_call, {"interleaved": True}),
    "gated_delta_gates": ("gated_delta_gates", gates_call, {}),
    "rms_norm_gated": ("rms_norm_gated", norm_call, {}),
    "qk_norm_rope": ("qk_norm_rope", rope_call, {}),
    "output_gate": ("output_gate", output_gate_call, {}),
}
WRITTEN = {
    "gated_delta_rule": {"state", "out", "checkpoints"},
    "gated_delta_verify": {"state", "ring", "states_out", "out"},
    "gated_delta_step": {"conv_state", "state", "out"},
    "fold_ring": {"state"},
    "copy_slots": {"pool"},
    "zero_slots": {"pool"},
    "cast_state": {"dst"},
    "conv_state_write": {"conv_state"},
    "causal_conv1d": {"conv_state", "out"},
    "causal_conv1d_update": {"conv_state", "out"},
    "gated_delta_gates": {"g", "beta"},
    "rms_norm_gated": {"out"},
    "qk_norm_rope": {"q_out", "k_out"},
    "output_gate": {"out"},
}


def registered(kernel, name):
    return getattr(kernel.rule.ops, name).default


@pytest.mark.kernels_ci
@pytest.mark.parametrize("call", CALLS)
def test_opcheck(kernel, device, call):
    """Schema, fake, autograd registration and dynamic shapes, as torch checks them"""
    name, build, options = CALLS[call]
    operator, arguments = registered(kernel, name), build(device, **options)
    names = [argument.name for argument in operator._schema.arguments]
    torch.library.opcheck(operator, tuple(arguments[argument] for argument in names))


@pytest.mark.parametrize("name", WRITTEN)
def test_schema_declares_what_is_written(kernel, name):
    arguments = registered(kernel, name)._schema.arguments
    assert {x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write} == WRITTEN[name]


def test_every_op_is_covered_here(kernel):
    """A new schema belongs into CALLS and WRITTEN"""
    namespace = registered(kernel, "gated_delta_rule").namespace
    schemas = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(namespace + "::")
    }
    assert schemas == set(WRITTEN) == {op for op, *_ in CALLS.values()}


class FusedStep(torch.nn.Module):
    """The same step in one op."""

    def __init__(self, kernel, device, slots=6):
        super().__init__()
        Hk, Hv, K, V = HEADS
        self.kernel, self.weights = kernel, step_weights(Shape(*HEADS), device)
        self.window = normal(slots, 2 * Hk * K + Hv * V, 3, seed=4, device=device)
        self.state = rule_state(slots, Shape(*HEADS), device=device)

    def forward(self, mixed, z, a, b, slots):
        given = {**self.weights, "num_key_heads": HEADS[0], "eps": 1e-6, "slots": slots}
        return self.kernel.gated_delta_step(mixed.transpose(1, 2), z, a, b, self.window, self.state, **given)


class DecodeStep(torch.nn.Module):
    """What a layer does between its projections for one token, on pools updated in place."""

    def __init__(self, kernel, device, slots=6):
        super().__init__()
        Hk, Hv, K, V = HEADS
        self.kernel, self.sizes = kernel, [Hk * K, Hk * K, Hv * V]
        self.weight = normal(sum(self.sizes), 4, seed=2, device=device)
        self.A_log, self.dt_bias, self.norm = (normal(n, seed=n, device=device) for n in (Hv, Hv, V))
        self.window = normal(slots, sum(self.sizes), 3, seed=4, device=device)
        self.state = rule_state(slots, Shape(*HEADS), device=device)

    def forward(self, mixed, z, a, b, slots):
        kernel = self.kernel
        mixed = kernel.causal_conv1d_update(mixed, self.window, self.weight, None, "silu", slots=slots).transpose(1, 2)
        q, k, v = mixed.split(self.sizes, -1)
        Hk, Hv, K, V = HEADS
        g, beta = kernel.gated_delta_gates(a, b, self.A_log, self.dt_bias)
        q, k, v = q.unflatten(-1, (Hk, K)), k.unflatten(-1, (Hk, K)), v.unflatten(-1, (Hv, V))
        o = kernel.gated_delta_rule(q, k, v, g, beta, self.state, slots=slots, **NORM)
        return kernel.rms_norm_gated(o, z, self.norm, 1e-6)


def decode_inputs(batch, device, seed=0):
    Hk, Hv, K, V = HEADS
    sizes = ((2 * Hk * K + Hv * V, 1), (1, Hv, V), (1, Hv), (1, Hv))
    tensors = [normal(batch, *size, seed=seed + n, device=device) for n, size in enumerate(sizes)]
    return *tensors, torch.tensor([5, -1, 0, 2, 3][:batch], device=device)


@pytest.mark.parametrize("step", (DecodeStep, FusedStep))
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_decode_step(kernel, device, backend, step):
    """fullgraph, static pools: the values and the change of both pools are those of the eager call"""
    torch._dynamo.reset()
    eager, module = step(kernel, device), step(kernel, device)
    for pool in (module.state, module.window):
        torch._dynamo.mark_static_address(pool)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    with torch.no_grad():
        for turn in range(3):
            inputs = decode_inputs(4, device, seed=10 * turn)
            expected = eager(*inputs)
            assert_same(compiled(*inputs), expected, f"output of step {turn}")
            assert_same(module.state, eager.state, f"state after step {turn}")
            assert_same(module.window, eager.window, f"window after step {turn}")


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_attention_pieces(kernel, device, backend):
    """The norm, rotation and gate of one attention layer in one graph, queries and gates from one projection"""
    torch._dynamo.reset()
    projected, k = normal(2, 5, 4, 64, device=device), normal(2, 5, 2, 32, seed=1, device=device)
    weight, angles = normal(32, seed=2, device=device), normal(5, 16, seed=3, device=device)

    def call(projected, k):
        q, gate = projected.chunk(2, -1)
        q, k = kernel.qk_norm_rope(q, k, weight, weight, angles.cos(), angles.sin(), 1e-6)
        return kernel.output_gate(q + k.sum(2, keepdim=True), gate)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    assert_close(compiled(projected, k), call(projected, k), 1e-6)


@pytest.mark.parametrize("step", (DecodeStep, FusedStep))
def test_dynamic_batch_does_not_recompile(kernel, device, step):
    """One compilation serves every batch size"""
    torch._dynamo.reset()
    eager, module = step(kernel, device), step(kernel, device)
    compilations = []

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for batch in (2, 3, 4, 5):
            inputs = decode_inputs(batch, device)
            assert_same(compiled(*inputs), eager(*inputs), f"batch {batch}")
    assert_same(module.state, eager.state, "state")
    assert len(compilations) == 1, f"{len(compilations)} compilations for four batch sizes"


@pytest.mark.parametrize("name", ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"))
def test_compiled_functional_names(kernel, device, name):
    torch._dynamo.reset()
    x, state = rule_inputs(2, 5, device=device), rule_state(2, device=device)

    def call(q, k, v, g, beta, initial):
        function = getattr(kernel, name)
        return function(q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for mine, expected in zip(compiled(*x, state), call(*x, state)):
        assert_same(mine, expected)


def test_compiled_prefill(kernel, device):
    """Ragged prefill with all options in one graph"""
    torch._dynamo.reset()
    x = rule_inputs(1, 12, device=device)
    offsets, slots = torch.tensor([0, 5, 5, 11], device=device), torch.tensor([3, 0, -1], device=device)
    weight, rows = normal(24, 4, device=device), normal(12, 24, device=device)
    flags = torch.tensor([True, False, True], device=device)

    def call(state, window):
        options = {"cu_seqlens": offsets, "slots": slots, "has_initial_state": flags}
        out = kernel.gated_delta_rule(*x, state, scale=0.5, **options)
        return out, kernel.causal_conv1d(rows, weight, None, "silu", conv_state=window, **options)

    pools = [(rule_state(4, device=device), normal(4, 24, 3, device=device)) for _ in range(2)]
    results = torch.compile(call, fullgraph=True, backend="aot_eager")(*pools[0])
    for mine, expected in zip((*results, *pools[0]), (*call(*pools[1]), *pools[1])):
        assert_same(mine, expected)


def test_compiled_verify_and_fold(kernel, device):
    """The three contracts, fold, pool utilities and the deferred window write in one graph"""
    torch._dynamo.reset()
    x, rows, signal = rule_inputs(3, 4, device=device), torch.arange(3, device=device), normal(3, 24, 4, device=device)
    table, counts = torch.arange(12, device=device).view(3, 4), torch.tensor([2, 0, 4], device=device)

    def call(state, ring, window, buffer):
        out = kernel.gated_delta_verify(*x, state, ring, slots=rows, ring_slots=rows, **NORM)
        kernel.fold_ring(state, ring, slots=rows, ring_slots=rows, num_accepted=counts)
        kernel.conv_state_write(signal, window, num_accepted=counts)
        kernel.gated_delta_verify(*x, state, state_table=table, num_accepted=counts, **NORM)
        kernel.gated_delta_verify(*x, state, states_out=buffer, slots=rows, **NORM)
        kernel.copy_slots(state, rows, rows + 3)
        kernel.zero_slots(state, rows[:1])
        return out

    def pools():
        ring = kernel.new_ring(3, 2, 4, 32, 32, 2, device=device)
        return [
            rule_state(12, device=device),
            ring,
            normal(3, 24, 3, device=device),
            torch.zeros(3, 4, 4, 32, 32, device=device),
        ]

    mine, expected = pools(), pools()
    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager")(*mine), call(*expected), "output")
    for a, b in zip(mine, expected):
        assert_same(a, b)


def test_fake_tensors_give_the_shapes(kernel, device):
    """Tracing without memory: shapes, dtypes and devices of every result"""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, state = rule_inputs(2, 5, dtype=torch.bfloat16, device=device), rule_state(2, device=device)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(part) for part in (*x, state)]
        out = kernel.gated_delta_rule(*fake)
        assert out.shape == x.v.shape and out.dtype == torch.bfloat16 and out.device.type == device
        out, final = kernel.chunk_gated_delta_rule(*fake[:3], g=fake[3], beta=fake[4], output_final_state=True)
        assert final.shape == (2, 4, 32, 32) and final.dtype == torch.float32
        g, beta = kernel.gated_delta_gates(fake[3], fake[4], fake[3][0, 0], fake[3][0, 0])
        assert g.shape == beta.shape == x.g.shape and g.dtype == torch.float32
