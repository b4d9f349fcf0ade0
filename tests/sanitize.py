# SPDX-License-Identifier: Apache-2.0
"""A small run of every op on a GPU, under compute-sanitizer: `python tests/sanitize.py [FOLDER]`, FOLDER for the logs.

Every tool runs over every part of the small run, side by side, each in a process of its own with torch's caching
allocator off, so that every tensor is an allocation whose ends the tool knows. Nothing is filtered: torch's kernels are
looked at too, which initcheck needs to know who wrote what ours read. The shapes are small and awkward on purpose: odd
lengths, padding rows, ragged offsets, strided views.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("racecheck", "memcheck", "initcheck", "synccheck")  # the slowest first
SECONDS = 140  # for everything; what is not done then is killed and counts as failed
PROCESSES = 12  # at once
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
# the first line of a report, up to where it says where; and the kernel, in that line or the next
FINDING = re.compile(r"^========= (?! |COMPUTE-SANITIZER|[A-Z]+ SUMMARY|Target)(.+?)(?: between .*)?$")
KERNEL = re.compile(r"\bat (?:void )?([\w:<>~ ]*?\w)(?=<[^:>]*[(:]|[<(+])")


def run_rule(kernel, torch, smaller):
    for key_dim, value_dim in ((128, 32),) if smaller else ((32, 32), (128, 128), (24, 72)):
        for dtype in (torch.bfloat16,) if smaller else (torch.float32, torch.bfloat16):
            q, k = (torch.randn(3, 21, 2, key_dim, device="cuda", dtype=dtype) for _ in range(2))
            v = torch.randn(3, 21, 6, value_dim, device="cuda", dtype=dtype)
            g, beta = -torch.rand(3, 21, 6, device="cuda"), torch.rand(3, 21, 6, device="cuda")
            pool = torch.randn(4, 6, key_dim, value_dim, device="cuda").to(dtype)
            slots = torch.tensor([2, -1, 0], device="cuda")
            has = torch.tensor([True, True, False], device="cuda")
            for state in (pool, pool.transpose(-1, -2).contiguous().transpose(-1, -2)):
                kernel.gated_delta_rule(q, k, v, g, beta, state, slots=slots, has_initial_state=has, use_qk_l2norm=True)
                kernel.gated_delta_rule(q[:, :1], k[:, :1], v[:, :1], g[:, :1], beta[:, :1], state, slots=slots)
            cu_seqlens = torch.tensor([1, 4, 4, 19], device="cuda", dtype=torch.int32)
            kernel.gated_delta_rule(q[:1], k[:1], v[:1], g[:1], beta[:1], pool, slots=slots, cu_seqlens=cu_seqlens)
            kernel.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, output_final_state=True)


def run_chunk(kernel, torch, smaller):
    for dtype in (torch.bfloat16,) if smaller else (torch.bfloat16, torch.float16):
        q, k = (torch.randn(2, 300, 1, 128, device="cuda", dtype=dtype) for _ in range(2))
        v = torch.randn(2, 300, 2, 128, device="cuda", dtype=dtype)
        g, beta = -torch.rand(2, 300, 2, device="cuda"), torch.rand(2, 300, 2, device="cuda")
        pool = torch.randn(4, 2, 128, 128, device="cuda")
        slots = torch.tensor([2, -1], device="cuda")
        for out in (torch.empty_like(v), torch.empty_like(v, dtype=torch.float32)):
            options = {"use_qk_l2norm": True, "mode": "chunk", "out": out}
            kernel.gated_delta_rule(q, k, v, g, beta, pool, slots=slots, **options)
            kernel.gated_delta_rule(q, k, v, g, beta, pool, slots=slots, precision="high", **options)
        kept = torch.empty(8, 2, 128, 128, device="cuda")
        kernel.gated_delta_rule(q, k, v, g, beta, pool, slots=slots, checkpoint_every=64, checkpoints=kept, **options)
        narrow, kept = torch.randn(4, 2, 128, 80, device="cuda"), torch.empty(8, 2, 128, 80, device="cuda")
        options = {"checkpoint_every": 64, "checkpoints": kept, "use_qk_l2norm": True, "mode": "chunk"}
        kernel.gated_delta_rule(q, k, v[..., :80], g, beta, narrow, slots=slots, **options)  # mma.sync
        if not smaller:  # cut into segments, as if one sequence
            x = [y.flatten(0, 1).unsqueeze(0).repeat(1, 5, *[1] * (y.ndim - 2)) for y in (q, k, v, g, beta)]
            kernel.gated_delta_rule(*x, pool[:1], use_qk_l2norm=True)
        slots = torch.tensor([3, 0, -1, 1], device="cuda")
        cu_seqlens = torch.tensor([1, 4, 131, 200, 290], device="cuda", dtype=torch.int32)
        row = [x[:1] for x in (q, k, v, g, beta)]
        raw = {"gate_domain": "raw", "A_log": g[0, 0], "dt_bias": g[0, 1]}
        for gates in ({}, raw):  # the rule's two kernels each
            kernel.gated_delta_rule(*row, pool, slots=slots, cu_seqlens=cu_seqlens, use_qk_l2norm=True, **gates)
    # so many rows that a block of an H200 takes two tiles of V at a time (choose_pairs) and then, of the shortest rows,
    # one; all of one head, and all padding but the longest and the two shortest
    rows, one_head = 140, (q[:1, :1], k[:1, :1], v[:1, :1, :1], g[:1, :1, :1], beta[:1, :1, :1])
    slots = torch.tensor([2] + [-1] * (rows - 3) + [0, 1], device="cuda")
    options = {"slots": slots, "use_qk_l2norm": True, "mode": "chunk", "scan": "off"}
    lengths = torch.tensor([3, 200] + [40] * (rows - 3) + [30, 30], device="cuda")
    packed = [x.expand(1, 65 * rows, *x.shape[2:]) for x in one_head]
    kernel.gated_delta_rule(*packed, pool[:, :1], cu_seqlens=lengths.cumsum(0), **options)
    if not smaller:
        dense = [x.expand(rows, 5, *x.shape[2:]) for x in one_head]
        kernel.gated_delta_rule(*dense, pool[:, :1], **options)
        # a row so long that an H200 carries it beside its preparation (plan.h)
        q, k, v = (torch.randn(1, 4096, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        long_pool = torch.randn(1, 16, 64, 64, device="cuda")
        kernel.gated_delta_rule(q, k, v, None, None, long_pool, use_qk_l2norm=True, mode="chunk", scan="off")


def run_conv(kernel, torch, smaller):
    for channels in (7,) if smaller else (7, 64):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(2, 19, channels, device="cuda", dtype=dtype)
            weight = torch.randn(channels, 4, device="cuda", dtype=dtype)
            window = torch.randn(5, channels, 4, device="cuda", dtype=dtype)
            slots = torch.tensor([3, -1], device="cuda")
            for layout in (x.transpose(1, 2), x.transpose(1, 2).contiguous()):
                kernel.causal_conv1d(layout, weight, weight[:, 0], "silu", conv_state=window, slots=slots)
                for tokens in (1, 2):
                    kernel.causal_conv1d_update(layout[..., :tokens], window, weight, activation="silu", slots=slots)
            cu_seqlens = torch.tensor([1, 3, 3, 17], device="cuda")
            ragged_slots = torch.tensor([0, -1, 1], device="cuda")
            kernel.causal_conv1d(x[0], weight, conv_state=window, slots=ragged_slots, cu_seqlens=cu_seqlens)
            documents = (torch.arange(19, device="cuda") // 5).int().expand(2, 19).contiguous()
            kernel.causal_conv1d(x.transpose(1, 2), weight, seq_idx=documents)


def run_gates_and_norm(kernel, torch, smaller):
    a, b = torch.randn(2, 5, 18, device="cuda", dtype=torch.bfloat16).split(9, dim=-1)
    kernel.gated_delta_gates(a, b, torch.randn(9, device="cuda"), torch.randn(9, device="cuda"))
    for size in (100,) if smaller else (16, 100, 128):
        x, z = torch.randn(2, 3, 7, 5, size, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(size, device="cuda")
        kernel.rms_norm_gated(x, z, weight, 1e-6)
        kernel.rms_norm_gated(x, z, weight, 1e-6, activation="sigmoid", norm_before_gate=False, group_size=size // 2)
    for size, rotated in ((100, 20),) if smaller else ((100, 20), (64, 16), (256, 64)):
        q, gate = torch.randn(2, 3, 5, 2 * size, device="cuda", dtype=torch.bfloat16).chunk(2, -1)
        angles = torch.randn(3, rotated, device="cuda")
        q, k = kernel.qk_norm_rope(q, q[:, :, :2], q[0, 0, 0], gate[0, 0, 0], angles, angles, 1e-6)
        kernel.output_gate(q, gate)


def run_step(kernel, torch, smaller):
    for key_dim, value_dim, groups in ((64, 64, 3),) if smaller else ((128, 128, 3), (64, 64, 2), (24, 40, 2)):
        heads, channels = 2 * groups, 4 * key_dim + 2 * groups * value_dim
        weights = {
            "conv_weight": torch.randn(channels, 4, device="cuda", dtype=torch.bfloat16),
            "A_log": torch.randn(heads, device="cuda"),
            "dt_bias": torch.randn(heads, device="cuda"),
            "norm_weight": torch.randn(value_dim, device="cuda"),
        }
        windows = torch.randn(4, channels, 3, device="cuda", dtype=torch.bfloat16)
        pool = torch.randn(4, heads, key_dim, value_dim, device="cuda")
        slots = torch.tensor([2, -1, 0], device="cuda")
        for state in (pool, pool.transpose(-1, -2).contiguous().transpose(-1, -2), pool.bfloat16()):
            for tokens in (1, 2):
                mixed = torch.randn(3, tokens, channels, device="cuda", dtype=torch.bfloat16)
                z = torch.randn(3, tokens, heads, value_dim, device="cuda", dtype=torch.bfloat16)
                a, b = torch.randn(2, 3, tokens, heads, device="cuda", dtype=torch.bfloat16)
                options = {**weights, "eps": 1e-6, "num_key_heads": 2, "slots": slots}
                kernel.gated_delta_step(mixed, z, a, b, windows, state, **options)


def run_serving(kernel, torch, smaller):
    for key_dim, value_dim in ((128, 32),) if smaller else ((64, 64), (128, 128), (24, 72)):
        for dtype in (torch.bfloat16,) if smaller else (torch.float32, torch.bfloat16):
            q, k = (torch.randn(1, 23, 2, key_dim, device="cuda", dtype=dtype) for _ in range(2))
            v = torch.randn(1, 23, 6, value_dim, device="cuda", dtype=dtype)
            g, beta = -torch.rand(1, 23, 6, device="cuda"), torch.rand(1, 23, 6, device="cuda")
            pool = torch.randn(5, 6, key_dim, value_dim, device="cuda").to(dtype)
            cu_seqlens = torch.tensor([1, 4, 4, 19, 21], device="cuda")
            slots, rows = torch.tensor([2, -1, 0, 4], device="cuda"), torch.tensor([1, 9, 0, 2], device="cuda")
            ring = kernel.new_ring(3, 2, 4, key_dim, value_dim, 3, device="cuda")
            buffer = torch.zeros(4, 3, 6, key_dim, value_dim, device="cuda", dtype=dtype)
            table = torch.tensor([[0, 1], [2, -1], [3, 9], [4, 7]], device="cuda")
            options = {"cu_seqlens": cu_seqlens, "use_qk_l2norm": True}
            for state in (pool, pool.transpose(-1, -2).contiguous().transpose(-1, -2)):
                kernel.gated_delta_verify(q, k, v, g, beta, state, ring, slots=slots, ring_slots=rows, **options)
                kernel.gated_delta_verify(q, k, v, g, beta, state, states_out=buffer, slots=slots, **options)
                counts = torch.tensor([2, 1, 0, 3], device="cuda")
                kernel.gated_delta_verify(q, k, v, g, beta, state, state_table=table, num_accepted=counts, **options)
                kernel.fold_ring(state, ring, slots=slots, ring_slots=rows, num_accepted=torch.clamp(counts, 1, 2))
                kernel.copy_slots(state, rows, slots)
                kernel.zero_slots(state, slots)
                kernel.cast_state(pool, state.clone())
                kernel.cast_state(state, torch.empty_like(state, dtype=torch.float16))
            long = [torch.cat([x] * 6, 1) for x in (q, k, v, g, beta)]
            starts = torch.tensor([1, 0], device="cuda")
            offsets, ends = torch.tensor([0, 70, 138], device="cuda"), torch.tensor([0, 3], device="cuda")
            kernel.gated_delta_rule(
                *long,
                pool,
                slots=ends,
                cu_seqlens=offsets,
                mode="recurrent",
                checkpoint_every=64,
                checkpoints=buffer[0, :2].clone(),
                checkpoint_starts=starts,
            )
    for channels in (7,) if smaller else (7, 64):
        x, window = torch.randn(2, 5, channels, device="cuda"), torch.randn(3, channels, 3, device="cuda")
        counts, slots = torch.tensor([2, 9], device="cuda"), torch.tensor([1, 0], device="cuda")
        kernel.conv_state_write(x.transpose(1, 2), window, num_accepted=counts, slots=slots)


PARTS = {run.__name__.removeprefix("run_"): run
         for run in (run_rule, run_chunk, run_conv, run_gates_and_norm, run_step, run_serving)}  # fmt: skip


def small_run(part, smaller):
    import torch
    from kernels import get_kernel

    kernel = get_kernel("org/gated-deltanet", version=1)
    torch.manual_seed(0)
    PARTS[part](kernel, torch, smaller)
    torch.cuda.synchronize()
    print("small run: done")


def findings(log):
    """What the tools reported, by first line and kernel, with its count."""
    found, lines = Counter(), log.splitlines()
    for line, after in zip(lines, [*lines[1:], ""]):
        match = FINDING.match(line.rstrip())
        if match:
            kernel = KERNEL.search(line) or KERNEL.search(after)
            found[f"{match.group(1).strip()} in {kernel.group(1) if kernel else 'no kernel'}"] += 1
    return found


def run_tool(tool, part, deadline):
    """A tool over a part of the small run: whether it is clean, and the log."""
    environment = {
        "LOCAL_KERNELS": f"org/gated-deltanet={ROOT}",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    command = [
        SANITIZER,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--show-backtrace",
        "no",
        sys.executable,
        str(Path(__file__)),
        "--part",
        part,
    ]
    if tool == "racecheck":  # it follows every access to shared memory: minutes for what the others do in seconds
        command.append("--smaller")
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:  # no pipe: what outlives the tool could hold it open
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(max(1.0, deadline - start))
            late = ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and what it looks at
            process.wait()
            late = "\n========= Out of time\n"
        output.seek(0)
        log = output.read().decode(errors="replace") + late
    clean = process.returncode == 0 and "small run: done" in log
    log = f"# {tool} {part}: {'clean' if clean else 'FAILED'}, {time.monotonic() - start:.0f} s\n{log}\n"
    return clean, log


def main():
    if "--part" in sys.argv:
        return small_run(sys.argv[sys.argv.index("--part") + 1], "--smaller" in sys.argv)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("OUT", ROOT / ".build/sanitize"))
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with ThreadPoolExecutor(PROCESSES) as pool:
        runs = {tool: [pool.submit(run_tool, tool, part, start + SECONDS) for part in PARTS] for tool in TOOLS}
    all_clean = True
    for tool, results in runs.items():
        logs = "".join(result.result()[1] for result in results)
        (folder / f"sanitize_{tool}.txt").write_text(logs)
        failed = [part for part, result in zip(PARTS, results) if not result.result()[0]]
        all_clean = all_clean and not failed
        print(f"{tool}: {'clean, ' + str(len(PARTS)) + ' parts' if not failed else 'FAILED in ' + ', '.join(failed)}")
        for finding, count in findings(logs).most_common(12):
            print(f"    {count} x {finding}")
    print(f"logs in {folder}, {time.monotonic() - start:.0f} s")
    sys.exit(0 if all_clean else 1)


if __name__ == "__main__":
    main()
