# SPDX-License-Identifier: Apache-2.0
"""Bad input: every fault raises before anything is written, and the message names the op and the argument."""

import re

import pytest
import torch

from .helpers import RAISES, SENTINEL, Shape, assert_same, normal, rule_inputs, rule_state

SHAPE = Shape(2, 4, 16, 24)
FUNCTIONAL = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")


def rule_arguments(device):
    out = torch.full((3, 5, 4, 24), SENTINEL, device=device)
    return {
        **rule_inputs(3, 5, SHAPE, device=device)._asdict(),
        "state": rule_state(3, SHAPE, device=device),
        "out": out,
    }


def ragged_rule_arguments(device):
    out = torch.full((1, 15, 4, 24), SENTINEL, device=device)
    return {
        **rule_inputs(1, 15, SHAPE, device=device)._asdict(),
        "state": rule_state(8, SHAPE, device=device),
        "cu_seqlens": torch.tensor([0, 4, 9, 15], device=device),
        "slots": torch.tensor([5, 0, 2], device=device),
        "out_slots": torch.tensor([5, 1, 3], device=device),
        "has_initial_state": torch.ones(3, dtype=torch.bool, device=device),
        "out": out,
    }


def functional_arguments(device):
    x = rule_inputs(3, 5, SHAPE, device=device)
    return {**x._asdict(), "initial_state": rule_state(3, SHAPE, device=device), "output_final_state": True}


def conv_arguments(device):
    return {
        "x": normal(3, 12, 5, device=device),
        "weight": normal(12, 4, seed=1, device=device),
        "bias": normal(12, seed=2, device=device),
        "activation": "silu",
        "conv_state": normal(3, 12, 3, seed=3, device=device),
        "out": torch.full((3, 12, 5), SENTINEL, device=device),
    }


def ragged_conv_arguments(device):
    return {
        **conv_arguments(device),
        "x": normal(15, 12, device=device),
        "conv_state": normal(8, 12, 3, seed=3, device=device),
        "cu_seqlens": torch.tensor([0, 4, 9, 15], device=device),
        "slots": torch.tensor([5, 0, 2], device=device),
        "has_initial_state": torch.ones(3, dtype=torch.bool, device=device),
        "out": torch.full((15, 12), SENTINEL, device=device),
    }


def gates_arguments(device):
    return {name: normal(*size, device=device) for name, size in
            (("a", (2, 5, 4)), ("b", (2, 5, 4)), ("A_log", (4,)), ("dt_bias", (4,)))}  # fmt: skip


def norm_arguments(device):
    return {"x": normal(2, 5, 4, 24, device=device), "z": normal(2, 5, 4, 24, device=device),
            "weight": normal(24, device=device), "eps": 1e-6}  # fmt: skip


def rope_arguments(device):
    return {"q": normal(2, 5, 4, 24, device=device), "k": normal(2, 5, 2, 24, device=device),
            "q_weight": normal(24, device=device), "k_weight": normal(24, device=device),
            "cos": normal(2, 5, 8, device=device), "sin": normal(2, 5, 8, device=device), "eps": 1e-6}  # fmt: skip


def output_gate_arguments(device):
    return {"x": normal(2, 5, 4, 24, device=device), "gate": normal(2, 5, 4, 24, seed=1, device=device)}


def step_arguments(device):
    Hk, Hv, K, V = SHAPE
    sizes = {"mixed_qkv": (3, 2, 2 * Hk * K + Hv * V), "z": (3, 2, Hv, V), "a": (3, 2, Hv), "b": (3, 2, Hv),
             "conv_state": (8, 2 * Hk * K + Hv * V, 3), "conv_weight": (2 * Hk * K + Hv * V, 4),
             "conv_bias": (2 * Hk * K + Hv * V,), "A_log": (Hv,), "dt_bias": (Hv,), "norm_weight": (V,)}  # fmt: skip
    return {
        **{name: normal(*size, seed=seed, device=device) for seed, (name, size) in enumerate(sizes.items())},
        "state": rule_state(8, SHAPE, device=device),
        "eps": 1e-6,
        "num_key_heads": Hk,
        "layout": "qkv",
        "slots": torch.tensor([5, 0, 2], device=device),
        "out": torch.full((3, 2, Hv, V), SENTINEL, device=device),
    }


def interleaved_step_arguments(device):
    Hk, Hv, K, V = SHAPE
    call = step_arguments(device)
    projections = {
        "mixed_qkv": normal(3, 2, 2 * Hk * K + 2 * Hv * V, device=device),
        "z": None,
        "a": None,
        "b": normal(3, 2, 2 * Hv, device=device),
    }
    return {**call, "layout": "interleaved", **projections}


def verify_arguments(device):
    return {
        **rule_inputs(1, 15, SHAPE, device=device)._asdict(),
        "state": rule_state(8, SHAPE, device=device),
        "ring": torch.full((5, 2, 8, 70), SENTINEL, device=device),
        "slots": torch.tensor([5, 0, 2], device=device),
        "ring_slots": torch.tensor([0, 4, 2], device=device),
        "cu_seqlens": torch.tensor([0, 4, 9, 15], device=device),
        "out": torch.full((1, 15, 4, 24), SENTINEL, device=device),
    }


def table_arguments(device):
    call = verify_arguments(device)
    for name in ("ring", "ring_slots", "slots"):
        del call[name]
    table, counts = torch.arange(6, device=device).view(3, 2), torch.tensor([1, 2, 1], device=device)
    return {**call, "state_table": table, "num_accepted": counts}


def states_arguments(device):
    call = verify_arguments(device)
    del call["ring"], call["ring_slots"]
    return {**call, "states_out": torch.full((3, 6, 4, 16, 24), SENTINEL, device=device)}


def fold_arguments(device):
    call, slots = verify_arguments(device), torch.tensor([[5, 0, 2], [1, 3, 4]], device=device)
    return {"state": call["state"], "ring": call["ring"], "slots": slots, "ring_slots": slots.clone(),
            "num_accepted": torch.tensor([1, 2, 3], device=device)}  # fmt: skip


def double(x):
    return x.double()


def integer(x):
    return x.long()


def named(name, fault):
    fault.__name__ = name
    return fault


def one_short(dim):
    return named(f"dim{dim}_short", lambda x: x.narrow(dim, 0, x.shape[dim] - 1))


def one_more(dim):
    return named(f"dim{dim}_long", lambda x: torch.cat([x, x.narrow(dim, 0, 1)], dim))


def value(bad):
    """Whatever came, this instead"""
    text = "tensor" if isinstance(bad, torch.Tensor) else str(bad)
    return named(f"value_{text}", lambda _: bad)


def flat(x):
    return x.flatten(0, 1)


def extra_dim(x):
    return x[..., None]


def as_list(x):
    return x.tolist()


def swapped(x):
    """K and V exchanged, contiguous"""
    return x.transpose(-1, -2).contiguous()


def scattered(x):
    """Neither of the last two dims contiguous"""
    return torch.stack([x, x], -1)[..., 0]


def overlapping(x):
    return x[:1].expand(x.shape)


def to(dtype):
    return named(str(dtype).removeprefix("torch."), lambda x: x.to(dtype))


# (arguments that a message may name, the faulty one first; label; fault). A fault maps the valid argument to a bad one.
VECTORS = [
    ("k", flat), ("k", double), ("k", integer), ("k", as_list), ("k", one_short(1)), ("k", one_more(2)),
    ("k", one_short(3)), ("k", to(torch.bfloat16)), ("v", flat), ("v", double), ("v", as_list), ("v", one_short(0)),
    ("v", one_short(1)), ("v", one_short(2)), ("v", to(torch.float16)), ("q", flat), ("q", extra_dim), ("q", double),
    ("q", integer), ("q", as_list), ("q k", one_short(0)), ("q k", one_short(1)), ("q k v", one_more(2)),
    ("q k", one_short(3)), ("q k", to(torch.bfloat16)), ("g", flat), ("g", double), ("g", integer), ("g", one_short(2)),
    ("g", one_more(1)), ("g", extra_dim), ("g", as_list), ("beta", flat), ("beta", double), ("beta", one_short(2)),
    ("beta", one_more(0)), ("beta", to(torch.bool)), ("beta", as_list),
]  # fmt: skip
STATES = [
    flat, extra_dim, double, integer, as_list, one_short(0), one_more(0), one_short(1), one_more(1), one_short(2),
    one_short(3), swapped, scattered,
]  # fmt: skip
RULE = [
    *VECTORS,
    *(("state", fault) for fault in (*STATES, overlapping)),
    *(("out", fault) for fault in (flat, double, integer, as_list, one_short(0), one_short(1), one_short(2),
                                   one_short(3), one_more(1), overlapping)),
    ("mode", value("fast")), ("precision", value("fp32")), ("scan", value("on")),
    ("gate_domain", value("decay")), ("scale", value("1")), ("scale", value([1.0])),
    ("slots", value(torch.zeros(3))), ("slots", value(torch.zeros(3, 1, dtype=torch.long))),
    ("cu_seqlens", value(torch.tensor([0, 5]))),
]  # fmt: skip
INDEX = [
    as_list, to(torch.float32), to(torch.uint32), to(torch.int16), to(torch.bool), one_short(0), one_more(0), extra_dim,
]  # fmt: skip
OFFSETS = [
    as_list, to(torch.float32), to(torch.uint32), to(torch.int16), extra_dim, lambda x: x[:0], lambda x: x.view(2, 2),
    lambda x: x[0],
]  # fmt: skip
FLAGS = [as_list, to(torch.int32), to(torch.uint8), to(torch.float32), one_short(0), one_more(0), extra_dim]
RAGGED = [
    *(("slots", fault) for fault in INDEX),
    *(("out_slots", fault) for fault in INDEX),
    *(("cu_seqlens", fault) for fault in OFFSETS),
    *(("has_initial_state", fault) for fault in FLAGS),
]
RAGGED_CONV = [(name, fault) for name, fault in RAGGED if name != "out_slots"]
RAGGED_CONV += [("out", fault) for fault in (extra_dim, double, as_list, one_short(0), one_short(1), overlapping)]
CONV = [
    ("x", flat), ("x", double), ("x", integer), ("x", as_list), ("x weight out", one_short(1)), ("x", extra_dim),
    ("weight", flat), ("weight", double), ("weight", as_list), ("weight", one_short(0)), ("weight", one_more(0)),
    ("weight conv_state", lambda x: x[:, :2]), ("weight", lambda x: x[:, :1]),
    ("weight", lambda x: normal(12, 5).to(x)),
    ("bias", double), ("bias", one_short(0)), ("bias", extra_dim), ("bias", as_list),
    ("activation", value("relu")), ("activation", value(True)),
    ("conv_state", flat), ("conv_state", double), ("conv_state", as_list), ("conv_state", one_short(0)),
    ("conv_state", one_more(0)), ("conv_state", one_short(1)), ("conv_state", one_short(2)),
    ("conv_state", lambda x: normal(3, 12, 5).to(x)), ("conv_state", overlapping),
    ("out", flat), ("out", double), ("out", one_short(0)), ("out", one_short(1)), ("out", one_short(2)),
    ("out", as_list), ("out", overlapping),
]  # fmt: skip
GATES = [
    *(pair for name in ("a", "b") for pair in ((name, double), (name, integer), (name, as_list))),
    ("a b A_log", one_short(2)), ("b", one_short(2)), ("b", one_more(1)), ("b", one_short(0)), ("a b", flat),
    *(pair for name in ("A_log", "dt_bias") for pair in ((name, double), (name, as_list), (name, one_short(0)),
                                                        (name, one_more(0)), (name, extra_dim))),
]  # fmt: skip
NORM = [
    ("x", double), ("x", integer), ("x", as_list), ("x z weight", one_short(3)), ("z", double), ("z", as_list),
    ("z", one_short(0)), ("z", one_short(3)), ("z x", flat), ("weight", double), ("weight", one_short(0)),
    ("weight", one_more(0)), ("weight", extra_dim), ("weight", as_list), ("activation", value("relu")),
    ("activation", value(None)), ("eps", value("1e-6")), ("eps", value(torch.ones(()))),
    ("group_size", value(5)), ("group_size", value(0)),
    ("group_size", value(-24)), ("group_size", value(48)),
]  # fmt: skip
ROPE = [
    *((name, fault) for name in ("q", "k") for fault in (double, integer, as_list, flat, extra_dim)),
    ("q k cos", one_short(0)), ("q k cos", one_short(1)), ("q k q_weight", one_short(3)), ("k", one_short(3)),
    ("k", one_short(0)), ("q", value(torch.zeros(2, 5, 4, 257))), ("q", value(torch.zeros(2, 5, 4, 0))),
    *((name, fault) for name in ("q_weight", "k_weight") for fault in (double, one_short(0), extra_dim, as_list)),
    *((name, fault) for name in ("cos", "sin") for fault in (double, one_more(0), one_short(1), extra_dim, as_list)),
    ("cos", one_short(2)), ("sin", one_short(2)), ("cos", value(torch.zeros(2, 5, 26))),
    ("cos sin", value(torch.zeros(5))),
    ("eps", value("1e-6")), ("eps", value(torch.ones(()))),
]  # fmt: skip
OUTPUT_GATE = [
    ("x", double), ("x", integer), ("x", as_list), ("x gate", one_short(3)), ("x gate", flat), ("gate", double),
    ("gate", as_list), ("gate", one_short(0)), ("gate", one_short(3)), ("gate", flat), ("x", value(torch.zeros(()))),
]  # fmt: skip
STEP = [
    *(("mixed_qkv", fault) for fault in (flat, double, integer, as_list, one_short(2), one_more(2), extra_dim)),
    ("mixed_qkv", lambda x: torch.cat([x] * 5, 1)), ("mixed_qkv z", one_short(0)), ("mixed_qkv z", one_short(1)),
    *(("z", fault) for fault in (flat, double, as_list, one_short(1), one_short(2), one_short(3), value(None))),
    *((name, fault) for name in ("a", "b") for fault in (flat, double, integer, as_list, one_short(2), one_more(1))),
    ("a", value(None)), ("b", value(None)),
    *(("conv_state", fault) for fault in (flat, double, as_list, one_short(1), one_short(2), one_more(1), overlapping)),
    *(("state", fault) for fault in (flat, extra_dim, double, integer, as_list, scattered, overlapping)),
    ("state mixed_qkv z", swapped), ("state num_key_heads", one_short(1)),
    *(("conv_weight", fault) for fault in (flat, double, as_list, one_short(0), one_more(0), lambda x: x[:, :1])),
    ("conv_weight conv_state", lambda x: x[:, :2]),
    *(("conv_bias", fault) for fault in (double, as_list, one_short(0), extra_dim)),
    *((name, fault) for name in ("A_log", "dt_bias", "norm_weight")
      for fault in (double, as_list, one_short(0), one_more(0), extra_dim, value(None))),
    ("eps", value("1e-6")), ("eps", value(torch.ones(()))),
    *(("num_key_heads", value(bad)) for bad in (0, -2, 3, 2.0, True, "2")),
    ("layout", value("packed")), ("activation", value("relu")), ("activation", value(None)),
    *(("slots", fault) for fault in INDEX),
    *(("out", fault) for fault in (flat, double, as_list, one_short(0), one_short(2), one_short(3), overlapping)),
]  # fmt: skip
INTERLEAVED_STEP = [
    ("mixed_qkv", one_short(2)), ("b", one_short(2)), ("z", value(torch.zeros(3, 2, 4, 24))),
    ("a", value(torch.zeros(3, 2, 4))), ("layout mixed_qkv z", value("qkv")),
]  # fmt: skip
FUNCTIONAL_FAULTS = [
    *VECTORS,
    *(("initial_state", fault) for fault in STATES),
    ("cu_seqlens", value(torch.tensor(5))), ("cu_seqlens", value(torch.zeros(0, dtype=torch.long))),
    ("gk", value(torch.zeros(3, 5, 4, 16))), ("gv", value(torch.zeros(3, 5, 4, 24))), ("scale", value("1")),
]  # fmt: skip

VERIFY = [
    *VECTORS,
    *(("state", fault) for fault in (*STATES, overlapping) if fault.__name__ not in ("dim0_short", "dim0_long")),
    *(("ring", fault) for fault in (flat, double, integer, as_list, one_short(1), one_more(1), overlapping, scattered,
                                    lambda x: x[..., :65], lambda x: x[:, :, :0])),
    *((name, fault) for name in ("slots", "ring_slots") for fault in INDEX),
    *(("cu_seqlens", fault) for fault in OFFSETS),
    ("gate_domain", value("decay")), ("scale", value("1")),
]  # fmt: skip
VERIFY = [(names, fault) for names, fault in VERIFY if (names, fault.__name__) not in (
    ("v", "dim0_short"), ("q k", "dim0_short"), ("beta", "dim0_long"))]  # fmt: skip
TABLE = [
    *(("state_table", fault) for fault in (flat, double, to(torch.uint32), as_list, one_short(0), one_more(0))),
    ("state_table", extra_dim),
    *(("num_accepted", fault) for fault in INDEX),
]
STATES_OUT = [("states_out", fault) for fault in (flat, extra_dim, double, integer, as_list, one_short(0), one_more(0),
              one_short(2), one_short(3), one_short(4), swapped, scattered, overlapping)]  # fmt: skip
FOLD = [
    ("state", flat), ("state", double), ("state", as_list), ("state", overlapping), ("state", scattered),
    ("ring state", one_short(1)),
    *(("ring", fault) for fault in (flat, double, as_list, scattered, lambda x: x[..., :65], lambda x: x[:, :, :0])),
    *(("slots", fault) for fault in (double, to(torch.uint32), as_list, extra_dim)),
    *(("ring_slots", fault) for fault in (double, to(torch.uint32), as_list, extra_dim, one_short(0), one_more(1))),
    *(("num_accepted", fault) for fault in INDEX),
]  # fmt: skip

CASES = [
    (op, arguments, names.split(), fault)
    for ops, arguments, faults in (
        (("gated_delta_rule",), rule_arguments, RULE),
        (("gated_delta_rule",), ragged_rule_arguments, RAGGED),
        (("gated_delta_verify",), verify_arguments, VERIFY),
        (("gated_delta_verify",), table_arguments, TABLE),
        (("gated_delta_verify",), states_arguments, STATES_OUT),
        (("gated_delta_step",), step_arguments, STEP),
        (("gated_delta_step",), interleaved_step_arguments, INTERLEAVED_STEP),
        (("fold_ring",), fold_arguments, FOLD),
        (FUNCTIONAL, functional_arguments, FUNCTIONAL_FAULTS),
        (("causal_conv1d",), conv_arguments, CONV),
        (("causal_conv1d",), ragged_conv_arguments, RAGGED_CONV),
        (("causal_conv1d_update",), conv_arguments, CONV),
        (("gated_delta_gates",), gates_arguments, GATES),
        (("rms_norm_gated",), norm_arguments, NORM),
        (("qk_norm_rope",), rope_arguments, ROPE),
        (("output_gate",), output_gate_arguments, OUTPUT_GATE),
    )
    for op in ops
    for names, fault in faults
]


def check_raises(kernel, op, names, arguments):
    """The call raises, the message reads `op: argument ...`, and every tensor is as it was."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    before = {name: x.clone() for name, x in tensors.items()}
    with pytest.raises(RAISES) as raised:
        getattr(kernel, op)(**arguments)
    message = str(raised.value)
    op = f"({op}|gated_delta_rule)" if op in FUNCTIONAL else op
    assert re.search(rf"\b{op}: ({'|'.join(names)})\b", message), f"not `{op}: {' or '.join(names)} ...`: {message}"
    for name, x in tensors.items():
        assert_same(x, before[name], f"{name} after the exception")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("arguments", (rule_arguments, ragged_rule_arguments), ids=("dense", "ragged"))
def test_the_valid_call_works(kernel, device, arguments):
    """Control: without its fault each call of this file is accepted"""
    kernel.gated_delta_rule(**arguments(device))
    kernel.causal_conv1d(**(conv_arguments if arguments is rule_arguments else ragged_conv_arguments)(device))
    kernel.causal_conv1d_update(**conv_arguments(device))
    kernel.gated_delta_gates(**gates_arguments(device))
    kernel.rms_norm_gated(**norm_arguments(device))
    kernel.qk_norm_rope(**rope_arguments(device))
    kernel.output_gate(**output_gate_arguments(device))
    kernel.gated_delta_step(**step_arguments(device))
    kernel.gated_delta_step(**interleaved_step_arguments(device))
    for name in FUNCTIONAL:
        getattr(kernel, name)(**functional_arguments(device))


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=lambda n: f"{CASES[n][0]}-{CASES[n][2][0]}-{CASES[n][3].__name__}"
)
def test_fault_raises(kernel, device, number):
    """one argument of a valid call made wrong"""
    op, build, names, fault = CASES[number]
    arguments = build(device)
    bad = fault(arguments.get(names[0]))
    arguments[names[0]] = bad.to(device) if isinstance(bad, torch.Tensor) else bad
    check_raises(kernel, op, names, arguments)


ARGUMENTS = {
    "gated_delta_rule": ragged_rule_arguments,
    "chunk_gated_delta_rule": functional_arguments,
    "fused_recurrent_gated_delta_rule": functional_arguments,
    "causal_conv1d": ragged_conv_arguments,
    "causal_conv1d_update": conv_arguments,
    "gated_delta_gates": gates_arguments,
    "rms_norm_gated": norm_arguments,
    "qk_norm_rope": rope_arguments,
    "output_gate": output_gate_arguments,
    "gated_delta_step": step_arguments,
}
FLOATS = [
    (op, name)
    for op, build in ARGUMENTS.items()
    for name, x in build("cpu").items()
    if isinstance(x, torch.Tensor) and x.is_floating_point()
]
TENSORS = [
    (op, name) for op, build in ARGUMENTS.items() for name, x in build("cpu").items() if isinstance(x, torch.Tensor)
]


@pytest.mark.cuda_only
@pytest.mark.parametrize("op, name", TENSORS, ids="-".join)
def test_tensors_on_two_devices_raise(kernel, device, op, name):
    """one argument on the other device, in either direction"""
    for mine, other in ((device, "cpu"), ("cpu", device)):
        arguments = ARGUMENTS[op](mine)
        arguments[name] = arguments[name].to(other)
        check_raises(kernel, op, [*arguments], arguments)


@pytest.mark.parametrize("op, name", FLOATS, ids="-".join)
def test_no_gradient_is_lost_silently(kernel, device, op, name):
    """under grad mode an input that requires grad raises; without grad mode it is an ordinary tensor"""
    arguments = ARGUMENTS[op](device)
    arguments[name].requires_grad_()
    check_raises(kernel, op, [name], arguments)
    with torch.no_grad():
        result = getattr(kernel, op)(**arguments)
    for part in result if isinstance(result, tuple) else (result,):
        assert name == "out" or not part.requires_grad


def test_missing_gate_hides_no_gradient(kernel, device):
    """g=None, and g without grad beside a q with it"""
    arguments = functional_arguments(device)
    for g in (None, arguments["g"]):
        faulty = {**arguments, "g": g, "q": arguments["q"].clone().requires_grad_()}
        check_raises(kernel, "chunk_gated_delta_rule", ["q"], faulty)


@pytest.mark.parametrize("Hk, Hv", ((5, 12), (4, 1), (3, 4)))
def test_head_ratio_raises(kernel, device, Hk, Hv):
    shape = Shape(Hk, Hv, 16, 24)
    x, state = rule_inputs(1, 3, shape, device=device), rule_state(1, shape, device=device)
    check_raises(kernel, "gated_delta_rule", ["v", "q", "Hv"], {**x._asdict(), "state": state})
    faulty = {**x._asdict(), "initial_state": state}
    for name in FUNCTIONAL:
        with pytest.raises(RAISES, match="heads"):
            getattr(kernel, name)(**faulty)


def test_missing_state_raises(kernel, device):
    """the state of the in-place op is not optional"""
    check_raises(kernel, "gated_delta_rule", ["state"], {**rule_arguments(device), "state": None})
    check_raises(kernel, "causal_conv1d_update", ["conv_state"], {**conv_arguments(device), "conv_state": None})


def test_unsupported_combinations_raise(kernel, device):
    """slots without a pool, seq_idx with a window or offsets, several rows with offsets, [total, C] without them"""
    conv = conv_arguments(device)
    seq_idx = torch.zeros(3, 5, dtype=torch.int32, device=device)
    check_raises(kernel, "causal_conv1d", ["seq_idx"], {**conv, "seq_idx": seq_idx})
    slots = torch.arange(3, device=device)
    check_raises(kernel, "causal_conv1d", ["slots"], {**conv, "conv_state": None, "slots": slots})
    offsets = torch.tensor([0, 5], device=device)
    check_raises(kernel, "causal_conv1d", ["cu_seqlens"], {**conv, "conv_state": None, "cu_seqlens": offsets})
    ragged = {**ragged_conv_arguments(device), "conv_state": None, "slots": None, "has_initial_state": None}
    rows = seq_idx.view(1, 15)
    check_raises(kernel, "causal_conv1d", ["seq_idx", "cu_seqlens"], {**ragged, "seq_idx": rows})
    check_raises(kernel, "causal_conv1d", ["cu_seqlens", "x"], {**ragged, "cu_seqlens": None})
    check_raises(kernel, "causal_conv1d_update", ["x"], {**conv, "x": normal(3, 12, 9, device=device), "out": None})
    alone = {**conv, "conv_state": None}
    for fault in (seq_idx.long(), seq_idx.float(), seq_idx[:2], seq_idx[:, :4], seq_idx[0], seq_idx.tolist()):
        check_raises(kernel, "causal_conv1d", ["seq_idx"], {**alone, "seq_idx": fault})


@pytest.mark.parametrize("op", ARGUMENTS)
def test_unknown_keywords_raise(kernel, device, op):
    arguments = {**ARGUMENTS[op](device), "a_name_nobody_uses": None}
    with pytest.raises(TypeError, match="a_name_nobody_uses"):
        getattr(kernel, op)(**arguments)


def test_new_state_refuses_other_dtypes(kernel):
    for dtype in (torch.float64, torch.int32, "float32"):
        with pytest.raises(RAISES, match="new_state: dtype"):
            kernel.new_state(1, 1, 8, 8, dtype=dtype)


def test_message_says_what_came(kernel, device):
    """op: argument must be what is accepted, got dtype [shape] on device"""
    arguments = rule_arguments(device)
    arguments["g"] = arguments["g"][..., :2]
    with pytest.raises(RuntimeError) as raised:
        kernel.gated_delta_rule(**arguments)
    where = "cuda:0" if device == "cuda" else "cpu"
    expected = f"gated_delta_rule: g must be [B, T, Hv] = [3, 5, 4], got float32 [3, 5, 2] on {where}"
    assert expected in str(raised.value)


def test_check_notices_a_written_tensor(device):
    """Control of check_raises: a call that writes before it raises does not pass"""

    class Sloppy:
        @staticmethod
        def op(state):
            state.zero_()
            raise ValueError("op: state is bad")

    with pytest.raises(AssertionError):
        check_raises(Sloppy, "op", ["state"], {"state": torch.ones(2, device=device)})


def test_output_over_an_input_raises(kernel, device):
    faulty = rule_arguments(device)
    check_raises(kernel, "gated_delta_rule", ["out", "v"], {**faulty, "out": faulty["v"]})
    faulty = conv_arguments(device)
    for op, fault in (("causal_conv1d", faulty), ("causal_conv1d_update", faulty)):
        check_raises(kernel, op, ["out", "x"], {**fault, "out": fault["x"]})
    faulty = step_arguments(device)
    check_raises(kernel, "gated_delta_step", ["out", "z"], {**faulty, "out": faulty["z"]})


def test_one_meta_tensor_raises(kernel, device):
    """It would send the call to the fake, which computes nothing."""
    for name in ("k", "g", "slots", "cu_seqlens"):
        faulty = ragged_rule_arguments(device)
        with pytest.raises(RAISES, match=f"{name}.*meta"):
            kernel.gated_delta_rule(**{**faulty, name: faulty[name].to("meta")})


def test_in_place_write_is_seen_by_autograd(kernel, device):
    x, state = rule_inputs(3, 5, SHAPE, device=device), rule_state(3, SHAPE, device=device)
    weight = torch.ones_like(state, requires_grad=True)
    saved = (weight * state).sum()
    kernel.gated_delta_rule(*x, state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_forward_mode_tangent_raises(kernel, device):
    x = rule_inputs(3, 5, SHAPE, device=device)

    def rule(v):
        return kernel.chunk_gated_delta_rule(x.q, x.k, v, g=x.g, beta=x.beta)[0]

    with pytest.raises(RuntimeError, match="v has a forward-mode tangent"):
        torch.func.jvp(rule, (x.v,), (torch.ones_like(x.v),))
