# SPDX-License-Identifier: Apache-2.0
"""The serving ops on a GPU beside their byte floors: verify with a ring, fold, window write, moved slots."""

import torch
from harness import Report, copies_past_l2, copy_bandwidth, graph_microseconds, load_kernel, out_argument

KEY_HEADS, VALUE_HEADS, HEAD_DIM, LAYERS = 16, 48, 128, 48
GROUP = VALUE_HEADS // KEY_HEADS
CHANNELS, WINDOW = 2 * KEY_HEADS * HEAD_DIM + VALUE_HEADS * HEAD_DIM, 3
# (batch, tokens) -> microseconds that verify may take in fp32
BARS = {(1, 4): 6.5, (16, 8): 36.0, (64, 4): 90.0}


def inputs(batch, tokens):
    def normal(heads):
        return torch.randn(batch, tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    gates = torch.randn(2, batch, tokens, VALUE_HEADS, device="cuda")
    logs = torch.nn.functional.logsigmoid(gates[0])
    return normal(KEY_HEADS), normal(KEY_HEADS), normal(VALUE_HEADS), logs, torch.sigmoid(gates[1])


def states(batch, dtype, layout):
    pool = torch.randn(batch, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device="cuda").to(dtype)
    return pool if layout == "K-first" else pool.transpose(-1, -2)


def bench_verify(kernel, report, bandwidth):
    record = kernel.ring_record_elements(HEAD_DIM, HEAD_DIM, GROUP)
    for dtype, layout in ((torch.float32, "K-first"), (torch.float32, "V-first"), (torch.bfloat16, "K-first")):
        for batch, tokens in ((1, 1), *BARS, (16, 4), (64, 8)):
            x, length = inputs(batch, tokens), max(tokens, 2)
            out, slots = torch.empty_like(x[2]), torch.arange(batch, device="cuda")
            num_bytes = batch * VALUE_HEADS * HEAD_DIM * HEAD_DIM * dtype.itemsize
            sets = [(states(batch, dtype, layout),
                     kernel.new_ring(batch, KEY_HEADS, length, HEAD_DIM, HEAD_DIM, GROUP, device="cuda"))
                    for _ in range(copies_past_l2(num_bytes))]  # fmt: skip

            def call(state, ring):
                options = {"slots": slots, "ring_slots": slots, "use_qk_l2norm": True, "out": out}
                return lambda: kernel.gated_delta_verify(*x, state, ring, **options)

            calls = [call(*sets[i % len(sets)]) for i in range(max(50, len(sets)))]
            written = batch * KEY_HEADS * tokens * record * 4
            time, floor = graph_microseconds(calls), (num_bytes + written) / bandwidth * 1e6
            bar = BARS.get((batch, tokens), "") if dtype == torch.float32 else ""
            report.row("verify", f"{batch}x{tokens}", str(dtype)[6:], layout, time, floor, time / floor, bar)
            del sets, calls


def bench_fold(kernel, report, bandwidth):
    record = kernel.ring_record_elements(HEAD_DIM, HEAD_DIM, GROUP)
    for dtype, layout, layers, batch, accepted in (
        (torch.float32, "K-first", LAYERS, 16, 4),
        (torch.float32, "K-first", LAYERS, 16, 8),
        (torch.float32, "K-first", LAYERS, 16, 1),
        (torch.float32, "V-first", LAYERS, 16, 4),
        (torch.bfloat16, "K-first", LAYERS, 16, 4),
        (torch.float32, "K-first", LAYERS, 1, 4),
    ):
        rows = layers * batch
        pool, tables = states(rows, dtype, layout), torch.arange(rows, device="cuda").view(layers, batch)
        ring = kernel.new_ring(rows, KEY_HEADS, 8, HEAD_DIM, HEAD_DIM, GROUP, device="cuda").normal_(0, 0.01)
        counts = torch.full((batch,), accepted, device="cuda")

        def call():
            kernel.fold_ring(pool, ring, slots=tables, ring_slots=tables, num_accepted=counts)

        num_bytes = 2 * pool.numel() * dtype.itemsize + rows * KEY_HEADS * accepted * record * 4
        time, floor = graph_microseconds([call] * (4 if rows > 100 else 20)), num_bytes / bandwidth * 1e6
        bar = 1.15 * floor if (layers, batch) == (LAYERS, 16) else ""
        report.row("fold", f"{layers}x{batch} a={accepted}", str(dtype)[6:], layout, time, floor, time / floor, bar)


def bench_windows(kernel, report, bandwidth):
    for batch, tokens in ((1, 4), (64, 4), (64, 8), (256, 4)):
        x = torch.randn(batch, tokens, CHANNELS, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        counts = torch.arange(batch, device="cuda") % tokens + 1
        num_bytes = 2 * batch * CHANNELS * WINDOW * 2
        windows = [torch.randn(batch, CHANNELS, WINDOW, device="cuda", dtype=torch.bfloat16)
                   for _ in range(copies_past_l2(num_bytes))]  # fmt: skip

        def call(window):
            return lambda: kernel.conv_state_write(x, window, num_accepted=counts)

        calls = [call(windows[i % len(windows)]) for i in range(max(50, len(windows)))]
        time, floor = graph_microseconds(calls), num_bytes / bandwidth * 1e6
        report.row("window write", f"{batch}x{tokens}", "bfloat16", "BTC", time, floor, time / floor, "")


def bench_slots(kernel, report, bandwidth):
    for rows in (LAYERS, LAYERS * 16):
        pool = states(2 * rows, torch.float32, "K-first")
        src, dst = torch.arange(rows, device="cuda"), torch.arange(rows, 2 * rows, device="cuda")
        size = pool[:rows].numel() * 4
        narrow, turned = states(rows, torch.bfloat16, "K-first"), states(rows, torch.float32, "V-first")
        for name, num_bytes, call in (
            ("copy_slots", 2 * size, lambda: kernel.copy_slots(pool, src, dst)),
            ("zero_slots", size, lambda: kernel.zero_slots(pool, dst)),
            ("cast to bf16", 1.5 * size, lambda: kernel.cast_state(pool[:rows], narrow)),
            ("transpose", 2 * size, lambda: kernel.cast_state(pool[:rows], turned)),
        ):
            time, floor = graph_microseconds([call] * 4), num_bytes / bandwidth * 1e6
            report.row(name, f"{rows} slots", "float32", "K-first", time, floor, time / floor, "")


def main():
    columns = ("op", "shape", "state", "layout", "us", "floor us", "times floor", "bar us")
    report = Report("serving", columns, out_argument())
    kernel, bandwidth = load_kernel(), copy_bandwidth()
    for bench in (bench_verify, bench_fold, bench_windows, bench_slots):
        bench(kernel, report, bandwidth)
    report.save()


if __name__ == "__main__":
    main()
