# SPDX-License-Identifier: Apache-2.0
"""Generates text with a small trained Qwen3.5 model, once eager and once through the gated-deltanet kernel.

    python examples/generate.py
    python examples/generate.py --prompt "Mr. Knightley" --new-tokens 400 --device cpu

Loads the kernel as every hub kernel is loaded (`kernels.get_kernel`, here from the build/ folder of this repository),
lets `kernels.kernelize` replace the model's gated delta net layers, generates greedily with both models and compares
the token ids, then times prefill and decode of both. Exit status 1 if no layer was replaced or the ids differ.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries below are imported; nothing is downloaded

import torch
import transformers
from kernels import LayerRepository, Mode, get_kernel, has_kernel, kernelize, use_kernel_mapping
from tiny_model import EXAMPLES, MODEL_DIR, decode, encode, load_text
from transformers import AutoModelForCausalLM, DynamicCache

REPO_ID = "org/gated-deltanet"
REPO_ROOT = EXAMPLES.parent
# The slot of the whole layer, its gated norm included. The function slots (chunk_gated_delta_rule, ...) are left alone:
# transformers keeps one object of such a function for all models of a process, so that replacing it here would change
# the eager model too.
LAYER = "Qwen3_5GatedDeltaNet"
PREFILL_TOKENS = 512
DECODE_TOKENS = 64
ROUNDS = 3


def parse_args():
    parser = argparse.ArgumentParser(description="Generate text with a small Qwen3.5 model: eager, then the kernel.")
    parser.add_argument("--prompt", default="It was impossible for Elizabeth to think of Mr. Darcy without ")
    parser.add_argument("--new-tokens", type=int, default=256, help="bytes to generate")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where a GPU and a CUDA build are there"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="bfloat16 rounds between the steps of a layer, so that near ties may fall differently and ids differ",
    )
    return parser.parse_args()


def use_local_build():
    """Points LOCAL_KERNELS at this repository, unless the caller already chose another place.

    A CUDA build of torch asks for a CUDA variant even on a machine without a GPU; where only the CPU variant was built,
    the entry names its folder.
    """
    if "LOCAL_KERNELS" in os.environ:
        return
    os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={REPO_ROOT}"
    if not has_kernel(REPO_ID, version=1):
        for folder in sorted((REPO_ROOT / "build").glob("torch*-cpu-*")):
            os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={folder}"


def variant_of(kernel):
    """The folder of the variant a kernel was loaded from, and its metadata."""
    folder = next(path for path in Path(kernel.__file__).parents if (path / "metadata.json").exists())
    return folder, json.loads((folder / "metadata.json").read_text(encoding="utf-8"))


def load_model(device, dtype):
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype).to(device).eval()


def kernelize_layers(model, device):
    """Replaces the gated delta net layers by the kernel's; the mapping holds for this call alone.

    revision="v1" is the branch of version 1. LayerRepository looks version=1 up on the hub or in its cache before
    it reads LOCAL_KERNELS, which fails offline.
    """
    layer = LayerRepository(REPO_ID, layer_name=LAYER, revision="v1", trust_remote_code=True)
    with use_kernel_mapping({LAYER: {device: layer}}, inherit_mapping=False):
        return kernelize(model, mode=Mode.INFERENCE, device=device)


def replaced_modules(model):
    """Names of the modules whose forward is no longer that of their class, grouped by class name."""
    replaced = {}
    for name, module in model.named_modules():
        if getattr(module.forward, "__func__", None) is not type(module).forward:
            replaced.setdefault(type(module).__name__, []).append(name)
    return replaced


@torch.inference_mode()
def generate(model, ids, new_tokens, **sampling):
    """The new ids that follow the prompt ids, [new_tokens]; greedy unless sampling options are given."""
    options = {"do_sample": False, **sampling}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **options)
    return output[0, ids.shape[1] :]


@torch.inference_mode()
def run_timed(model, ids, new_tokens):
    """Prefills ids, then decodes new_tokens greedily. Returns (prefill seconds, decode seconds, the cache)."""
    synchronize = torch.cuda.synchronize if ids.is_cuda else lambda: None
    cache = DynamicCache(config=model.config)
    synchronize()
    started = time.perf_counter()
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    synchronize()
    prefilled = time.perf_counter()
    for _ in range(new_tokens):
        logits = model(logits[:, -1].argmax(-1, keepdim=True), past_key_values=cache, use_cache=True).logits
    synchronize()
    return prefilled - started, time.perf_counter() - prefilled, cache


def tokens_per_second(models, ids):
    """Median prefill and decode speed of each model, in turns after one round of warm-up; and the last cache."""
    times = [[] for _ in models]
    for round_idx in range(ROUNDS + 1):
        for model, rows in zip(models, times):
            prefill, decode_time, cache = run_timed(model, ids, DECODE_TOKENS)
            if round_idx > 0:
                rows.append((ids.shape[1] / prefill, DECODE_TOKENS / decode_time))
    return [tuple(statistics.median(column) for column in zip(*rows)) for rows in times], cache


def print_speeds(eager, kernel):
    """A small table: tokens/s of both models and their ratio."""
    print(f"\n{'tokens/s':10}{f'prefill ({PREFILL_TOKENS})':>16}{f'decode ({DECODE_TOKENS})':>16}")
    for name, speeds in (("eager", eager), ("kernel", kernel)):
        print(f"{name:10}{speeds[0]:16,.0f}{speeds[1]:16,.0f}")
    print(f"{'ratio':10}{kernel[0] / eager[0]:15.2f}x{kernel[1] / eager[1]:15.2f}x")


def print_memory(model, cache):
    """What one sequence keeps in memory: constant for the linear layers, growing for full attention."""
    layer_types = model.config.layer_types
    linear = [i for i, kind in enumerate(layer_types) if kind == "linear_attention"]
    print("\nmemory per sequence")
    for name, read in (("recurrent state", cache.get_recurrent_state), ("conv window", cache.get_conv_state)):
        states = [read(i)[0] for i in linear]
        size = sum(state.nbytes for state in states) / 1024
        shape = f"{len(states)} layers x {list(states[0].shape)} {str(states[0].dtype).removeprefix('torch.')}"
        print(f"  {name:16}{size:8.1f} KiB   {shape}, whatever the length")
    config, width = model.config, next(model.parameters()).element_size()
    per_token = 2 * config.num_key_value_heads * config.head_dim * width * layer_types.count("full_attention")
    print(f"  {'keys and values':16}{per_token / 1024:8.1f} KiB   a token, in the full attention layer")


def main():
    args = parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("kernels.layer").setLevel(logging.ERROR)  # it warns of every slot that is left alone

    use_local_build()
    kernel = get_kernel(REPO_ID, version=1)
    folder, metadata = variant_of(kernel)
    backend = metadata["backend"]["type"]
    device = args.device or ("cuda" if backend == "cuda" and torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"kernel    {REPO_ID} version {metadata['version']}, variant {folder.name}")
    print(f"device    {name}, {args.dtype}; torch {torch.__version__}, transformers {transformers.__version__}")

    dtype = getattr(torch, args.dtype)
    eager = load_model(device, dtype)
    kernelized = kernelize_layers(load_model(device, dtype), device)
    replaced = replaced_modules(kernelized)
    for class_name, names in replaced.items():
        print(f"replaced  {len(names)} {class_name}: {', '.join(names)}")
    if not replaced:
        print("replaced  nothing: these versions of transformers and kernels do not work together")
        return 1

    ids = encode(args.prompt).to(device)
    eager_ids = generate(eager, ids, args.new_tokens)
    kernel_ids = generate(kernelized, ids, args.new_tokens)
    agree = torch.equal(eager_ids, kernel_ids)
    if agree:
        print(f"ids       agree: all {args.new_tokens} greedy tokens of eager and kernel are the same")
    else:
        first = int((eager_ids != kernel_ids).nonzero()[0])
        print(f"ids       DIFFER: first at token {first} of {args.new_tokens}")
    print(f"\ngreedy, through the kernel:\n{args.prompt}{decode(kernel_ids)}")
    torch.manual_seed(0)
    sampled = generate(kernelized, ids, args.new_tokens, do_sample=True, temperature=0.7, top_k=0)
    print(f"\nsampled at temperature 0.7, through the kernel:\n{args.prompt}{decode(sampled)}")

    passage = load_text()[1][:PREFILL_TOKENS].long()[None].to(device)
    (eager_speed, kernel_speed), cache = tokens_per_second((eager, kernelized), passage)
    print_speeds(eager_speed, kernel_speed)
    print_memory(kernelized, cache)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
