# SPDX-License-Identifier: Apache-2.0
"""What one layer needs around the rule, on a GPU: convolution, gates and gated norm, each beside its byte floor. And
what the attention layers between them need: norm with rotation, output gate.
"""

import torch
from harness import Report, copies_past_l2, copy_bandwidth, graph_microseconds, load_kernel, out_argument

CHANNELS, WIDTH, VALUE_HEADS, HEAD_DIM = 10240, 4, 48, 128
QUERY_HEADS, KEY_HEADS, ATTENTION_DIM, ROTATED = 24, 4, 256, 64   # of the attention layers
DTYPE = torch.bfloat16


def rotated(make_call, num_bytes):
    """Calls on as many buffer sets as it takes to leave the L2, at least 16 calls."""
    calls = [make_call() for _ in range(copies_past_l2(num_bytes))]
    return [calls[i % len(calls)] for i in range(max(16, len(calls)))]


def bench_conv(kernel, report, bandwidth):
    weight = torch.randn(CHANNELS, WIDTH, device="cuda", dtype=DTYPE)
    for tokens in (2048, 16384):
        for layout in ("channel-last", "channel-first"):
            def make_call():
                x = torch.randn(1, tokens, CHANNELS, device="cuda", dtype=DTYPE).transpose(1, 2)
                x = x if layout == "channel-last" else x.contiguous()
                window = torch.zeros(1, CHANNELS, WIDTH, device="cuda", dtype=DTYPE)
                out = torch.empty_like(x)
                return lambda: kernel.causal_conv1d(x, weight, activation="silu", conv_state=window, out=out)

            num_bytes = 2 * tokens * CHANNELS * DTYPE.itemsize
            time, floor = graph_microseconds(rotated(make_call, num_bytes)), num_bytes / bandwidth * 1e6
            report.row("causal_conv1d", f"{tokens}x{CHANNELS}", layout, time, floor, time / floor)
    for batch in (1, 64, 256):
        def make_call():
            x = torch.randn(batch, CHANNELS, 1, device="cuda", dtype=DTYPE)
            window = torch.zeros(batch, CHANNELS, WIDTH, device="cuda", dtype=DTYPE)
            out = torch.empty_like(x)
            return lambda: kernel.causal_conv1d_update(x, window, weight, activation="silu", out=out)

        num_bytes = batch * CHANNELS * DTYPE.itemsize * (2 + 2 * WIDTH) + weight.nbytes
        time, floor = graph_microseconds(rotated(make_call, num_bytes)), num_bytes / bandwidth * 1e6
        report.row("conv update", f"{batch}x{CHANNELS}", "window last", time, floor, time / floor)


def bench_gates(kernel, report, bandwidth):
    A_log, dt_bias = torch.rand(2, VALUE_HEADS, device="cuda").log()
    for tokens in (1, 64, 16384):
        def make_call():
            a, b = torch.randn(2, 1, tokens, VALUE_HEADS, device="cuda", dtype=DTYPE)
            return lambda: kernel.gated_delta_gates(a, b, A_log, dt_bias)

        num_bytes = tokens * VALUE_HEADS * (2 * DTYPE.itemsize + 8)
        time, floor = graph_microseconds(rotated(make_call, num_bytes)), num_bytes / bandwidth * 1e6
        report.row("gates", f"{tokens}x{VALUE_HEADS}", "contiguous", time, floor, time / floor)


def bench_norm(kernel, report, bandwidth):
    weight = torch.randn(HEAD_DIM, device="cuda")
    for tokens in (1, 64, 16384):
        def make_call():
            x, z = torch.randn(2, 1, tokens, VALUE_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
            return lambda: kernel.rms_norm_gated(x, z, weight, 1e-6)

        num_bytes = 3 * tokens * VALUE_HEADS * HEAD_DIM * DTYPE.itemsize
        time, floor = graph_microseconds(rotated(make_call, num_bytes)), num_bytes / bandwidth * 1e6
        report.row("rms_norm_gated", f"{tokens}x{VALUE_HEADS}x{HEAD_DIM}", "contiguous", time, floor, time / floor)


def attention_inputs(tokens, head_dim=ATTENTION_DIM):
    """q and gate interleaved in one projection as Qwen3.5 has them, k, and the angles of a quarter of the head."""
    projected = torch.randn(1, tokens, QUERY_HEADS, 2 * head_dim, device="cuda", dtype=DTYPE)
    k = torch.randn(1, tokens, KEY_HEADS, head_dim, device="cuda", dtype=DTYPE)
    cos, sin = torch.randn(2, 1, tokens, ROTATED * head_dim // ATTENTION_DIM, device="cuda", dtype=DTYPE)
    return *projected.chunk(2, -1), k, cos, sin


def bench_attention(kernel, report, bandwidth):
    for head_dim, layout in ((ATTENTION_DIM, "interleaved"), (128, "interleaved"), (64, "interleaved")):
        weight = torch.zeros(head_dim, device="cuda", dtype=DTYPE)
        for tokens in (1, 64, 1024, 16384):
            def make_rope():
                q, _, k, cos, sin = attention_inputs(tokens, head_dim)
                return lambda: kernel.qk_norm_rope(q, k, weight, weight, cos, sin, 1e-6)

            elements = 2 * (QUERY_HEADS + KEY_HEADS) * head_dim + 2 * ROTATED * head_dim // ATTENTION_DIM
            num_bytes = tokens * elements * DTYPE.itemsize
            time, floor = graph_microseconds(rotated(make_rope, num_bytes)), num_bytes / bandwidth * 1e6
            shape = f"{tokens}x{QUERY_HEADS}+{KEY_HEADS}x{head_dim}"
            report.row("qk_norm_rope", shape, layout, time, floor, time / floor)
    for tokens in (1, 64, 1024, 16384):
        def make_gate():
            q, gate, *_ = attention_inputs(tokens)
            x = torch.randn(q.shape, device="cuda", dtype=DTYPE)
            return lambda: kernel.output_gate(x, gate)

        num_bytes = tokens * 3 * QUERY_HEADS * ATTENTION_DIM * DTYPE.itemsize
        time, floor = graph_microseconds(rotated(make_gate, num_bytes)), num_bytes / bandwidth * 1e6
        report.row("output_gate", f"{tokens}x{QUERY_HEADS}x{ATTENTION_DIM}", "interleaved", time, floor, time / floor)


def main():
    report = Report("around_the_rule", ("op", "shape", "layout", "us", "floor us", "times floor"), out_argument())
    kernel = load_kernel()
    bandwidth = copy_bandwidth()
    report.row("copy, TB/s", "1 GiB", "", bandwidth / 1e12, 0.0, 0.0)
    bench_conv(kernel, report, bandwidth)
    bench_gates(kernel, report, bandwidth)
    bench_norm(kernel, report, bandwidth)
    bench_attention(kernel, report, bandwidth)
    report.save()


if __name__ == "__main__":
    main()
