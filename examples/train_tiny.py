# SPDX-License-Identifier: Apache-2.0
"""Trains the small Qwen3.5 model of the examples on public-domain text and saves it in bfloat16.

    python examples/train_tiny.py --out examples/tiny_qwen3_5    # the repository's checkpoint: a few minutes on a GPU
    python examples/train_tiny.py --steps 20 --batch 2 --length 128 --out /tmp/tiny --device cpu

Plain transformers and torch: the model trains with transformers' own torch code of the gated delta rule, with AdamW,
a linear warm-up and a cosine schedule. At the end the saved folder is loaded again, its bits per byte on the held-out
text are measured, and all settings are written beside the weights (TRAINING.md).
"""

import argparse
import math
import platform
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tiny_model import EXAMPLES, TEXT_FILE, decode, encode, load_text, tiny_config
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM

WARMUP_STEPS = 100
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
SAMPLE_PROMPT = "Elizabeth was "


def parse_args():
    parser = argparse.ArgumentParser(description="Train the small Qwen3.5 model of the examples.")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32, help="sequences per step")
    parser.add_argument("--length", type=int, default=512, help="bytes per sequence")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, default=TEXT_FILE, help="training text, plain or .bz2")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, config and TRAINING.md")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--log-every", type=int, default=50, help="steps between two progress lines")
    return parser.parse_args()


def learning_rate(step, steps, peak):
    """Linear warm-up over WARMUP_STEPS (or a tenth of a short run), then a cosine down to a twentieth of the peak."""
    warmup = min(WARMUP_STEPS, max(1, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def next_byte_loss(model, windows):
    """Mean cross entropy in nats; windows: uint8 [B, length + 1], each byte but the first is predicted."""
    ids = windows.long()
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def random_windows(data, batch, length, generator):
    """Cuts `batch` windows of length + 1 bytes out of data, at starts drawn from the CPU generator."""
    starts = torch.randint(len(data) - length, (batch, 1), generator=generator)
    return data[(starts + torch.arange(length + 1)).to(data.device)]


@torch.no_grad()
def bits_per_byte(model, data, length, batch):
    """Bits per byte of data, cut into windows of length + 1 bytes that overlap by one; each starts without context."""
    windows = data.unfold(0, length + 1, length)
    nats = sum(next_byte_loss(model, part).item() * len(part) for part in windows.split(batch))
    return nats / len(windows) / math.log(2)


def make_optimizer(model, lr, device):
    """AdamW; weight decay on matrices only, not on norms, gates and biases."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=device.type == "cuda")


def train(model, data, args, device):
    """Runs all steps, prints a progress line every args.log_every of them; returns the last line's bits per byte."""
    generator = torch.Generator().manual_seed(args.seed)
    optimizer = make_optimizer(model, args.lr, device)
    model.train()
    losses = []
    shown = math.nan
    started = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        loss = next_byte_loss(model, random_windows(data, args.batch, args.length, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            shown = torch.stack(losses).mean().item() / math.log(2)
            losses.clear()
            seconds = time.perf_counter() - started
            print(f"step {step + 1:5d}/{args.steps}  {shown:.3f} bits/byte  {seconds:6.1f} s", flush=True)
    return shown


@torch.no_grad()
def greedy_sample(model, device, new_bytes=160):
    """A greedy continuation of SAMPLE_PROMPT, prompt included."""
    ids = encode(SAMPLE_PROMPT).to(device)
    ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_bytes, do_sample=False)
    return decode(ids[0])


def write_report(args, device, num_parameters, seconds, train_bits, held_out_bits, num_held_out, sample):
    """TRAINING.md beside the weights: what was run, on what, and what came out."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    text = args.text.resolve()
    shown_text = text.relative_to(EXAMPLES.parent) if text.is_relative_to(EXAMPLES.parent) else text.name
    rows = [
        ("parameters", f"{num_parameters:,}"),
        ("weights", f"bfloat16, {(args.out / 'model.safetensors').stat().st_size:,} bytes"),
        ("text", f"{shown_text}, the last 5 % held out"),
        ("steps x batch x length", f"{args.steps} x {args.batch} x {args.length} bytes"),
        ("optimiser", f"AdamW, betas {BETAS}, decay {WEIGHT_DECAY} on matrices, gradient norm clipped at {CLIP_NORM}"),
        ("learning rate", f"{args.lr}, linear warm-up over at most {WARMUP_STEPS} steps, cosine to a twentieth"),
        ("seed", f"{args.seed}"),
        ("device", name),
        ("versions", f"torch {torch.__version__}, transformers {transformers.__version__}"),
        ("training time", f"{seconds:.0f} s"),
        ("training loss", f"{train_bits:.3f} bits/byte (mean of the last progress line's steps)"),
        ("held-out loss", f"{held_out_bits:.3f} bits/byte over {num_held_out:,} bytes"),
    ]
    lines = ["# Training of this checkpoint", "", "Written by `examples/train_tiny.py` at the end of its run.", ""]
    lines += ["| what | value |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows), ""]
    lines += [
        "The held-out loss is that of the saved weights, loaded again from this folder and run in float32,",
        f"in windows of {args.length} bytes that each start without context. A greedy continuation:",
        "",
        *(f"> {line}".rstrip() for line in sample.splitlines()),
    ]
    (args.out / "TRAINING.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main():
    args = parse_args()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    training, held_out = (part.to(device) for part in load_text(args.text))
    model = Qwen3_5ForCausalLM(tiny_config()).to(device)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters on {device}; {len(training):,} bytes to train on, {len(held_out):,} held out")

    started = time.perf_counter()
    train_bits = train(model, training, args, device)
    seconds = time.perf_counter() - started
    model.to(torch.bfloat16).save_pretrained(args.out)

    torch.set_float32_matmul_precision("highest")
    saved = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(device).eval()
    held_out_bits = bits_per_byte(saved, held_out, args.length, args.batch)
    sample = greedy_sample(saved, device)
    num_held_out = (len(held_out) - 1) // args.length * args.length
    print(f"held out: {held_out_bits:.3f} bits/byte over {num_held_out:,} bytes\n{sample}")
    write_report(args, device, num_parameters, seconds, train_bits, held_out_bits, num_held_out, sample)


if __name__ == "__main__":
    main()
