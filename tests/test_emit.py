# SPDX-License-Identifier: Apache-2.0
"""emit_step_program: the program compiles with nothing but a compiler and prints the op's bits."""

import shutil
import subprocess

import pytest
import torch

from .conftest import ROOT
from .helpers import RAISES, Shape, assert_same, normal, rule_inputs, rule_state

NAN, INF = float("nan"), float("inf")
SHAPES = (Shape(1, 1, 16, 8), Shape(2, 4, 32, 16), Shape(1, 3, 100, 20), Shape(1, 2, 128, 128))
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")


def numbers_of(program, folder, language, run=True):
    """Compiles the program as its own comment says and gives what it prints, float32."""
    source, binary = folder / ("step.cu" if language == "cuda" else "step.cpp"), folder / "step"
    source.write_text(program)
    command = next(line for line in program.splitlines() if "-o step && ./step" in line).removeprefix("//").split("&&")
    subprocess.run(command[0].split(), cwd=folder, check=True, capture_output=True, timeout=300)
    if not run:
        return None
    done = subprocess.run([str(binary)], check=True, capture_output=True, text=True, timeout=60)
    values = [float.fromhex(line) for line in done.stdout.split()]
    return torch.tensor(values, dtype=torch.float64).float()


def check_bits(kernel, device, folder, x, state, **options):
    """Program and op agree on o and on the state, bit for bit; returns the two."""
    language = "cuda" if device == "cuda" else "cpp"
    program = kernel.emit_step_program(*x, state, language=language, **options)
    printed = numbers_of(program, folder, language)
    after, out = state.float().to(device, copy=True), torch.empty(x[2].shape, device=device)
    moved = [part if part is None else part.to(device) for part in x]
    kernel.gated_delta_rule(*moved, after, mode="recurrent", out=out, **options)
    o, S = printed[: out.numel()].view(out.shape), printed[out.numel() :].view(after.shape)
    assert_same(o, out.cpu(), "o")
    assert_same(S, after.cpu(), "state")
    return out, after


@pytest.mark.parametrize("use_qk_l2norm", (False, True), ids=("raw", "l2norm"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_program_prints_the_bits_of_the_op(kernel, device, tmp_path, shape, use_qk_l2norm):
    """Grouped heads, a key dim that is no multiple of 32, and a whole head of Qwen3.5"""
    if device == "cuda" and shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc here")
    x, state = rule_inputs(2, 1, shape), rule_state(2, shape)
    before = state.clone()
    check_bits(kernel, device, tmp_path, tuple(x), state, use_qk_l2norm=use_qk_l2norm, scale=0.3)
    assert_same(state, before, "the state that was given")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=lambda dtype: str(dtype)[6:])
def test_program_of_16_bit_tensors(kernel, tmp_path, dtype):
    """Widened exactly, V-first state, gates left out; a 16-bit result is what is printed, rounded once"""
    shape = Shape(1, 2, 48, 24)
    x = rule_inputs(1, 1, shape, dtype=dtype)
    state = rule_state(1, shape, dtype=dtype).transpose(-1, -2).contiguous().transpose(-1, -2)
    out, after = check_bits(kernel, "cpu", tmp_path, (x.q, x.k, x.v, None, None), state)
    narrow = state.clone()
    assert_same(kernel.gated_delta_rule(x.q, x.k, x.v, None, None, narrow, mode="recurrent"), out.to(dtype))
    assert_same(narrow, after.to(dtype), "16-bit state")


def test_program_keeps_every_number(kernel, tmp_path):
    """Subnormals, the largest and the smallest numbers, -0, inf and NaN stand in the program exactly"""
    shape = Shape(1, 1, 4, 4)
    x, state = rule_inputs(1, 1, shape), rule_state(1, shape)
    edges = torch.tensor([[1e-45, 3.4028235e38, -0.0, INF], [-1e-45, 1.1754944e-38, 0.1, NAN]])
    state[0, 0, :2] = edges
    x = x._replace(k=x.k * 0, g=x.g * 0)
    _, after = check_bits(kernel, "cpu", tmp_path, tuple(x), state)
    assert_same(after[..., :3], state[..., :3], "columns that a step without key and decay keeps")
    assert bool(after[..., 3].isnan().all()), "0 * inf in the prediction"


def test_another_input_prints_other_bits(kernel, tmp_path):
    """Control: the inputs do reach the program"""
    x, state = rule_inputs(1, 1, SHAPES[0]), rule_state(1, SHAPES[0])
    first = numbers_of(kernel.emit_step_program(*x, state, language="cpp"), tmp_path, "cpp")
    for name in ("q", "k", "v", "g", "beta"):
        changed = x._replace(**{name: getattr(x, name) * 0.75})
        program = kernel.emit_step_program(*changed, state, language="cpp")
        assert not torch.equal(numbers_of(program, tmp_path, "cpp"), first), name


def test_program_carries_the_header_of_the_kernels(kernel):
    """One source of the arithmetic: the header as csrc/ has it, found from the folder that get_kernel loads"""
    x, state = rule_inputs(1, 1, SHAPES[0]), rule_state(1, SHAPES[0])
    for language in ("cpp", "cuda"):
        program = kernel.emit_step_program(*x, state, language=language)
        assert (ROOT / "csrc/common/rule.h").read_text().replace("#pragma once\n", "") in program
        assert '#include "' not in program and "torch" not in program.split("---- the inputs")[1]


@needs_nvcc
def test_cuda_program_compiles(kernel, tmp_path):
    x, state = rule_inputs(1, 1, SHAPES[1]), rule_state(1, SHAPES[1])
    numbers_of(kernel.emit_step_program(*x, state, use_qk_l2norm=True), tmp_path, "cuda", run=False)


FAULTS = {
    "q": (torch.zeros(1, 2, 1, 16), torch.zeros(1, 1, 16), torch.zeros(1, 1, 3, 16), None),
    "k": (torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 16, dtype=torch.float64), [1.0]),
    "v": (torch.zeros(1, 1, 3, 8), torch.zeros(2, 1, 4, 8), "v"),
    "g": (torch.zeros(1, 1, 3), torch.zeros(1, 4), torch.zeros(1, 1, 4, dtype=torch.int32)),
    "beta": (torch.zeros(1, 1, 3), torch.zeros(1, 1, 4, dtype=torch.float64)),
    "state": (torch.zeros(1, 4, 8, 16), torch.zeros(4, 16, 8), None),
    "scale": ("1", torch.ones(())),
    "language": ("c", None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_raises(kernel, name):
    shape = Shape(2, 4, 16, 8)
    valid = {**rule_inputs(1, 1, shape)._asdict(), "state": rule_state(1, shape)}
    kernel.emit_step_program(**valid)
    for fault in FAULTS[name]:
        with pytest.raises(RAISES, match=rf"emit_step_program: {'(q|k|v)' if name == 'q' else name}|{name} must be"):
            kernel.emit_step_program(**{**valid, name: fault})


def test_inputs_of_a_graph_are_taken(kernel):
    """Tensors that require grad are read like others"""
    shape = Shape(1, 1, 16, 8)
    x, state = rule_inputs(1, 1, shape), rule_state(1, shape)
    wanted = kernel.emit_step_program(*x, state)
    assert kernel.emit_step_program(normal(1).requires_grad_() * 0 + x.q, *x[1:], state) == wanted
