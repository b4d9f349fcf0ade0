# SPDX-License-Identifier: Apache-2.0
"""The modes of gated_delta_rule side by side on a GPU: from how many tokens on the chunk kernel is the faster one.

auto on dense rows launches the kernel that their length asks for; on packed rows both kernels, each for its own rows.
"""

import torch
from bench_gated_delta_rule import HEAD_DIM, VALUE_HEADS, inputs
from harness import Report, copies_past_l2, graph_microseconds, load_kernel, out_argument

LENGTHS = (1, 16, 32, 48, 64, 96, 128, 192, 256, 1024)
BATCHES = (1, 8)


def calls_of(kernel, batch, length, mode, is_packed):
    """Calls on buffers of their own, which together exceed the L2."""
    q, k, v, g, beta = inputs(batch, length, torch.bfloat16)
    offsets = None
    if is_packed:
        q, k, v, g, beta = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g, beta))
        offsets = torch.arange(0, batch * length + 1, length, device="cuda", dtype=torch.int32)
    out = torch.empty_like(v)
    states = [kernel.new_state(batch, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device="cuda")
              for _ in range(copies_past_l2(batch * VALUE_HEADS * HEAD_DIM * HEAD_DIM * 4))]

    def call(state):
        return lambda: kernel.gated_delta_rule(
            q, k, v, g, beta, state, use_qk_l2norm=True, mode=mode, cu_seqlens=offsets, out=out
        )

    return [call(states[i % len(states)]) for i in range(max(20, len(states)))]


def main():
    columns = ("shape", "recurrent us", "chunk us", "auto us", "packed auto us", "chunk is faster")
    report = Report("modes", columns, out_argument())
    kernel = load_kernel()
    for batch in (*BATCHES, 256):
        for length in LENGTHS if batch in BATCHES else (1,):
            forms = (("recurrent", False), ("chunk", False), ("auto", False), ("auto", True))
            times = [graph_microseconds(calls_of(kernel, batch, length, *form), replays=7) for form in forms]
            report.row(f"{batch}x{length}", *times, times[1] < times[0])
    report.save()


if __name__ == "__main__":
    main()
