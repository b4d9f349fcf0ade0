# SPDX-License-Identifier: Apache-2.0
"""gated_delta_step on a GPU, one token: beside its byte floor, and beside the same work as separate launches.

Bytes: states and windows read and written, the projections' outputs and z read, the output written, the weights read
once. Every call has its own states, windows, projections and output; weights are the same for all, as bench_around's.
`separate` is causal_conv1d_update, gated_delta_gates, gated_delta_rule (l2norm inside) and rms_norm_gated.
"""

import torch
from harness import Report, copies_past_l2, copy_bandwidth, graph_microseconds, load_kernel, out_argument

KEY_HEADS, VALUE_HEADS, HEAD_DIM, WIDTH = 16, 48, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * HEAD_DIM
DTYPE = torch.bfloat16
LEAST_CALLS = 50


def weights():
    def normal(*size):
        return torch.randn(*size, device="cuda", dtype=DTYPE)

    return {"conv_weight": normal(CHANNELS, WIDTH), "A_log": torch.rand(VALUE_HEADS, device="cuda").log(),
            "dt_bias": torch.rand(VALUE_HEADS, device="cuda"), "norm_weight": normal(HEAD_DIM)}


class Buffers:
    """What one call reads and writes."""

    def __init__(self, batch, state_dtype, layout):
        def normal(*size):
            return torch.randn(batch, *size, device="cuda", dtype=DTYPE)

        self.mixed, self.z = normal(1, CHANNELS), normal(1, VALUE_HEADS, HEAD_DIM)
        self.a, self.b = normal(1, 2 * VALUE_HEADS).split(VALUE_HEADS, -1)
        self.window = normal(CHANNELS, WIDTH)
        state = torch.randn(batch, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device="cuda").to(state_dtype)
        self.state = state if layout == "K-first" else state.transpose(-1, -2)
        self.out = torch.empty_like(self.z)
        self.conv_out = torch.empty_like(self.mixed).transpose(1, 2)
        self.rule_out = torch.empty_like(self.z)

    def moved_bytes(self):
        once = (self.mixed, self.z, self.a, self.b, self.out)
        return sum(x.numel() * x.element_size() for x in (*once, self.window, self.window, self.state, self.state))


def fused(kernel, x, given):
    return kernel.gated_delta_step(x.mixed, x.z, x.a, x.b, x.window, x.state, **given, eps=1e-6,
                                   num_key_heads=KEY_HEADS, out=x.out)


def separate(kernel, x, given):
    mixed = kernel.causal_conv1d_update(x.mixed.transpose(1, 2), x.window, given["conv_weight"], None, "silu",
                                        out=x.conv_out).transpose(1, 2)
    q, k, v = mixed.split([KEY_HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM, VALUE_HEADS * HEAD_DIM], -1)
    q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in (q, k, v))
    g, beta = kernel.gated_delta_gates(x.a, x.b, given["A_log"], given["dt_bias"])
    o = kernel.gated_delta_rule(q, k, v, g, beta, x.state, use_qk_l2norm=True, out=x.rule_out)
    return kernel.rms_norm_gated(o, x.z, given["norm_weight"], 1e-6)


def time_of(function, kernel, sets, given):
    def call(x):
        return lambda: function(kernel, x, given)

    return graph_microseconds([call(sets[i % len(sets)]) for i in range(max(LEAST_CALLS, len(sets)))])


def bench(kernel, report, bandwidth, batches=(1, 4, 16, 64, 256)):
    given = weights()
    weight_bytes = sum(x.numel() * x.element_size() for x in given.values())
    for state_dtype in (torch.float32, torch.bfloat16, torch.float16):
        for layout in ("K-first", "V-first"):
            for batch in batches:
                num_bytes = Buffers(batch, state_dtype, layout).moved_bytes()
                sets = [Buffers(batch, state_dtype, layout) for _ in range(copies_past_l2(num_bytes // 2))]
                ours, chain = (time_of(function, kernel, sets, given) for function in (fused, separate))
                floor = (num_bytes + weight_bytes) / bandwidth * 1e6
                report.row(f"{batch}x1", str(state_dtype)[6:], layout, ours, floor, ours / floor, chain, chain / ours)
                del sets


def main():
    columns = ("shape", "state", "layout", "us", "floor us", "times floor", "separate us", "times faster")
    report = Report("gated_delta_step", columns, out_argument())
    bench(load_kernel(), report, copy_bandwidth())
    report.save()


if __name__ == "__main__":
    main()
