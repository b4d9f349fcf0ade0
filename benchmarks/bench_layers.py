# SPDX-License-Identifier: Apache-2.0
"""Decode through a stack of whole gated delta net layers, projections included: transformers' own code beside ours.

On a GPU: 8 layers of Qwen3.5-27B's shape, bf16, one sequence, each step on a given hidden state (layer after layer with
a residual sum, no MLPs between). Rows: transformers eager; our functions in its function slots; our layer in its layer
slot; each also in a CUDA graph. The floor is the bytes of all weights and states, read once, and of the states, written
once. On a CPU: two tiny layers, to see that it runs.
"""

import logging
import statistics
import time

import torch
from harness import Report, copy_bandwidth, load_kernel, out_argument
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping
from torch import nn
from transformers import DynamicCache, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

logging.getLogger("kernels.layer.layer").setLevel(logging.ERROR)   # it warns of every slot that is left alone

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
LAYERS, HIDDEN, KEY_HEADS, VALUE_HEADS, HEAD_DIM = (8, 5120, 16, 48, 128) if ON_GPU else (2, 64, 2, 4, 16)
PROMPT, STEPS, ROUNDS = 16, 20, 15
# slot of transformers -> layer of the package
FUNCTION_SLOTS = {
    "chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "recurrent_gated_delta_rule",
    "causal_conv1d_fn": "causal_conv1d_fn",
    "causal_conv1d_update": "causal_conv1d_update",
    "RMSNormGated": "RMSNormGated",
}
LAYER_SLOT = {"Qwen3_5GatedDeltaNet": "Qwen3_5GatedDeltaNet"}
# variant: what goes into which slots, whether the step is captured, least times faster than eager and eager in a graph
VARIANTS = {
    "eager": ({}, False, None),
    "eager, graph": ({}, True, None),
    "functions": (FUNCTION_SLOTS, False, None),
    "functions, graph": (FUNCTION_SLOTS, True, None),
    "layer": (LAYER_SLOT, False, None),
    "layer, graph": (LAYER_SLOT, True, (3.0, 1.5)),
}


class Stack(nn.Module):
    """The gated delta net layers of a model, one after the other."""

    def __init__(self):
        super().__init__()
        self.config = Qwen3_5TextConfig(
            hidden_size=HIDDEN, num_hidden_layers=LAYERS, layer_types=["linear_attention"] * LAYERS,
            linear_num_key_heads=KEY_HEADS, linear_num_value_heads=VALUE_HEADS,
            linear_key_head_dim=HEAD_DIM, linear_value_head_dim=HEAD_DIM, linear_conv_kernel_dim=4,
        )  # fmt: skip
        self.layers = nn.ModuleList(Qwen3_5GatedDeltaNet(self.config, i) for i in range(LAYERS))

    def forward(self, hidden, cache):
        for layer in self.layers:
            hidden = hidden + layer(hidden_states=hidden, cache_params=cache)
        return hidden


def put_in(stack, slots):
    """Our layers into exactly these slots; every other one gets transformers' own code."""
    mapping = {
        slot: {DEVICE: LayerRepository("org/gated-deltanet", revision="v1", trust_remote_code=True, layer_name=name)}
        for slot, name in slots.items()
    }
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(stack, mode=Mode.INFERENCE, device=DEVICE)


def synchronize():
    if ON_GPU:
        torch.cuda.synchronize()


def captured(step):
    """The step as a replay of a CUDA graph, captured after a warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def milliseconds(step):
    """Median over rounds of the time of one step, host included: from a device at rest to one at rest."""
    times = []
    for turn in range(ROUNDS + 2):
        synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronize()
        if turn >= 2:
            times.append((time.perf_counter() - start) * 1e3 / STEPS)
    return statistics.median(times)


def measure(stack, slots, is_graph, prompt, token):
    """(milliseconds a step, what the first step after the prompt gives) with our layers in `slots`."""
    put_in(stack, slots)
    try:
        cache = DynamicCache(config=stack.config)
        stack(prompt, cache)
        first = stack(token, cache).float()
        step = captured(lambda: stack(token, cache)) if is_graph else lambda: stack(token, cache)
        return milliseconds(step), first
    finally:
        put_in(stack, {})


def main():
    columns = ("variant", "ms/token", "us/layer", "times floor", "x eager", "x eager graph", "bar", "difference")
    report = Report("layers", columns, out_argument())
    load_kernel()
    torch.manual_seed(0)
    with torch.device(DEVICE):
        stack = Stack().eval().to(DTYPE)
    prompt, token = (torch.randn(1, tokens, HIDDEN, device=DEVICE, dtype=DTYPE) for tokens in (PROMPT, 1))
    state_bytes = LAYERS * VALUE_HEADS * HEAD_DIM * HEAD_DIM * 4
    num_bytes = sum(weight.nbytes for weight in stack.parameters()) + 2 * state_bytes
    floor = num_bytes / copy_bandwidth() * 1e3 if ON_GPU else None
    times, expected = {}, None
    with torch.inference_mode():
        for name, (slots, is_graph, bar) in VARIANTS.items():
            if is_graph and not ON_GPU:
                continue
            times[name], first = measure(stack, slots, is_graph, prompt, token)
            expected = first if expected is None else expected
            faster = [times[other] / times[name] if other in times else "" for other in ("eager", "eager, graph")]
            difference = float((first - expected).norm() / expected.norm())
            report.row(name, times[name], times[name] * 1e3 / LAYERS, times[name] / floor if floor else "", *faster,
                       f"{bar[0]}, {bar[1]}" if bar else "", difference)  # fmt: skip
    report.save()


if __name__ == "__main__":
    main()
