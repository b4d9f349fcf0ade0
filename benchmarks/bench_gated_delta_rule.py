# SPDX-License-Identifier: Apache-2.0
"""gated_delta_rule on a GPU: the recurrence over long sequences, and one-token decode beside its byte floor."""

import torch
from harness import Report, copies_past_l2, copy_bandwidth, graph_microseconds, load_kernel, out_argument

KEY_HEADS, VALUE_HEADS, HEAD_DIM = 16, 48, 128
FFMA_PER_STATE_ELEMENT = 4          # rule.h: two sums, a multiply and an fma
FP32_LANES, BOOST_HZ = 132 * 128, 1.98e9


def inputs(batch, length, dtype, seed=0, heads=(KEY_HEADS, VALUE_HEADS)):
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(count):
        return torch.randn(batch, length, count, HEAD_DIM, device="cuda", generator=generator).to(dtype)

    gates = torch.randn(2, batch, length, heads[1], device="cuda", generator=generator)
    return (normal(heads[0]), normal(heads[0]), normal(heads[1]), torch.nn.functional.logsigmoid(gates[0]),
            torch.sigmoid(gates[1]))


def bench_recurrent(kernel, report):
    for dtype in (torch.bfloat16, torch.float32):
        for batch, length in ((1, 512), (1, 2048), (1, 8192), (4, 2048), (32, 512)):
            q, k, v, g, beta = inputs(batch, length, dtype)
            state = kernel.new_state(batch, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device="cuda")
            out = torch.empty_like(v)

            def call():
                kernel.gated_delta_rule(q, k, v, g, beta, state, use_qk_l2norm=True, mode="recurrent", out=out)

            elements = batch * length * VALUE_HEADS * HEAD_DIM * HEAD_DIM
            floor = elements * FFMA_PER_STATE_ELEMENT / (FP32_LANES * BOOST_HZ) * 1e6
            time = graph_microseconds([call], replays=10)
            shape, name = f"{batch}x{length}", str(dtype)[6:]
            report.row("recurrent", shape, name, "float32", "K-first", time, floor, time / floor)


def bench_decode(kernel, report, bandwidth):
    for state_dtype in (torch.float32, torch.bfloat16, torch.float16):
        for layout in ("K-first", "V-first"):
            for batch in (1, 4, 16, 64, 256):
                q, k, v, g, beta = inputs(batch, 1, torch.bfloat16)
                out = torch.empty_like(v)
                num_bytes = batch * VALUE_HEADS * HEAD_DIM * HEAD_DIM * state_dtype.itemsize
                states = [torch.randn(batch, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device="cuda").to(state_dtype)
                          for _ in range(copies_past_l2(num_bytes))]
                if layout == "V-first":
                    states = [state.transpose(-1, -2) for state in states]

                def call(state):
                    return lambda: kernel.gated_delta_rule(q, k, v, g, beta, state, use_qk_l2norm=True, out=out)

                calls = [call(states[i % len(states)]) for i in range(max(50, len(states)))]
                time, floor = graph_microseconds(calls), 2 * num_bytes / bandwidth * 1e6
                report.row("decode", f"{batch}x1", "bfloat16", str(state_dtype)[6:], layout, time, floor, time / floor)
                del states, calls


def main():
    columns = ("op", "shape", "inputs", "state", "layout", "us", "floor us", "times floor")
    report = Report("gated_delta_rule", columns, out_argument())
    kernel = load_kernel()
    bench_recurrent(kernel, report)
    bench_decode(kernel, report, copy_bandwidth())
    report.save()


if __name__ == "__main__":
    main()
