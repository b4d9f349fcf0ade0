# SPDX-License-Identifier: Apache-2.0
"""gated_delta_rule on a CPU, beside transformers' two torch functions, an in-place scale and the FMA peak.

Every row's calls alternate, so that ratios hold on a machine whose speed drifts; times are medians. `scale` is torch's
`mul_` over the same bytes of state: the ceiling of a one-token step. `of peak` counts 7 flops per state element and
token against a loop of independent FMAs on as many threads. The torch functions get their heads already repeated.
`step` is gated_delta_step beside all that transformers does for it; its `scale` column is the rule alone.
"""

import ctypes
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import torch
from harness import Report, load_kernel, out_argument

KEY_HEADS, VALUE_HEADS, HEAD_DIM = 16, 48, 128
FLOPS_PER_STATE_ELEMENT = 7
DECODE_STATES = 16   # 48 MB of them: past the caches
PEAK_SOURCE = """
typedef float pack_t __attribute__((vector_size(32)));
float fma_loop(long count) {
  pack_t sums[12], x, y;
  for (int lane = 0; lane < 8; ++lane) { x[lane] = 0.999f; y[lane] = 1e-3f * count; }
  for (int i = 0; i < 12; ++i) sums[i] = y * (float)i;
  for (long n = 0; n < count; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sums[i] = sums[i] * x + y;
  }
  float total = 0;
  for (int i = 0; i < 12; ++i) total += sums[i][0];
  return total;
}
"""
FLOPS_PER_ROUND = 12 * 8 * 2


def fma_loop():
    """The loop as a function of its count, or None where there is no compiler."""
    folder = tempfile.TemporaryDirectory()
    source, library = Path(folder.name) / "peak.c", Path(folder.name) / "peak.so"
    source.write_text(PEAK_SOURCE)
    command = ["gcc", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", str(source), "-o", str(library)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    loop = ctypes.CDLL(str(library)).fma_loop
    loop.argtypes, loop.restype, loop.folder = [ctypes.c_long], ctypes.c_float, folder
    return loop


PEAK_ROUNDS = 10_000_000


def run_peak(loop, rounds=PEAK_ROUNDS):
    threads = [threading.Thread(target=loop, args=(rounds,)) for _ in range(torch.get_num_threads())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rounds * FLOPS_PER_ROUND * len(threads)


def interleaved(calls, repeats):
    """Median seconds of each call; a call gets the number of the repeat. The first repeat only warms up."""
    times = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call(repeat)
            if repeat > 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def inputs(length, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(heads):
        return torch.randn(1, length, heads, HEAD_DIM, generator=generator).to(dtype)

    gates = torch.randn(2, 1, length, VALUE_HEADS, generator=generator)
    return (normal(KEY_HEADS), normal(KEY_HEADS), normal(VALUE_HEADS), torch.nn.functional.logsigmoid(gates[0] + 3),
            torch.sigmoid(gates[1]))


def peer(function, arguments, state):
    q, k, v, g, beta = arguments
    q, k = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=2) for x in (q, k))
    return lambda repeat: function(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
                                   use_qk_l2norm_in_kernel=True)


def bench_decode(kernel, report, torch_recurrent):
    arguments = inputs(1)
    out = torch.empty_like(arguments[2])
    for dtype, layout in ((torch.float32, "K-first"), (torch.float32, "V-first"), (torch.bfloat16, "K-first"),
                          (torch.bfloat16, "V-first")):
        states = [0.1 * torch.randn(1, VALUE_HEADS, HEAD_DIM, HEAD_DIM).to(dtype) for _ in range(DECODE_STATES)]
        scaled = [state.clone() for state in states]
        views = states if layout == "K-first" else [state.transpose(-1, -2) for state in states]

        def ours(repeat):
            kernel.gated_delta_rule(*arguments, views[repeat % DECODE_STATES], use_qk_l2norm=True, out=out)

        # The torch function by itself: whatever follows its many small kernels pays for waking the threads.
        times = interleaved({"scale": lambda repeat: scaled[repeat % DECODE_STATES].mul_(0.999), "ours": ours},
                            20 * DECODE_STATES)
        recurrent = None
        if dtype == torch.float32 and layout == "K-first":
            recurrent = interleaved({"peer": peer(torch_recurrent, arguments, states[0])}, 2 * DECODE_STATES)["peer"]
        report.row("1 token", str(dtype)[6:], layout, 1e3 * times["ours"],
                   1e3 * recurrent if recurrent else "", recurrent / times["ours"] if recurrent else "", "", "",
                   1e3 * times["scale"], times["scale"] / times["ours"], "")


def bench_step(kernel, report, qwen):
    """gated_delta_step beside transformers' own code for the same work, and beside the rule alone (`scale` here)."""
    q, k, v, g, beta = inputs(1, torch.bfloat16)
    channels = 2 * q.numel() + v.numel()
    mixed, weight = torch.randn(1, 1, channels).bfloat16(), torch.randn(channels, 4).bfloat16()
    a, b = torch.randn(2, 1, 1, VALUE_HEADS).bfloat16()
    A_log, dt_bias, out = torch.rand(VALUE_HEADS).log(), torch.rand(VALUE_HEADS), torch.empty_like(v)
    norm = qwen.Qwen3_5RMSNormGated(HEAD_DIM, eps=1e-6).bfloat16()
    states = [0.1 * torch.randn(1, VALUE_HEADS, HEAD_DIM, HEAD_DIM) for _ in range(2 * DECODE_STATES)]
    windows = [torch.randn(1, channels, 4).bfloat16() for _ in range(DECODE_STATES)]
    given = {"conv_weight": weight, "A_log": A_log, "dt_bias": dt_bias, "norm_weight": norm.weight, "eps": 1e-6}

    def ours(repeat):
        window, state = windows[repeat % DECODE_STATES], states[repeat % DECODE_STATES]
        kernel.gated_delta_step(mixed, v, a, b, window, state, **given, num_key_heads=KEY_HEADS, out=out)

    def rule(repeat):   # on states of its own: none of them is in a cache because of the other call
        state = states[DECODE_STATES + repeat % DECODE_STATES]
        kernel.gated_delta_rule(q, k, v, g, beta, state, use_qk_l2norm=True, out=out)

    def eager(repeat):
        y = qwen.causal_conv1d_update(mixed.transpose(1, 2), windows[0], weight, None, "silu").transpose(1, 2)
        parts = y.split([q.numel(), k.numel(), v.numel()], -1)
        query, key, value = (part.unflatten(-1, (-1, HEAD_DIM)) for part in parts)
        decay = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
        peer(qwen.torch_recurrent_gated_delta_rule, (query, key, value, decay, b.sigmoid()), states[0])(repeat)
        norm(v.flatten(0, 2), v.flatten(0, 2))

    times = interleaved({"rule": rule, "ours": ours}, 20 * DECODE_STATES)
    times.update(interleaved({"eager": eager}, 2 * DECODE_STATES))
    report.row("step", "float32", "K-first", 1e3 * times["ours"], 1e3 * times["eager"], times["eager"] / times["ours"],
               "", "", 1e3 * times["rule"], times["rule"] / times["ours"], "")


def bench_tokens(kernel, report, length, torch_recurrent, torch_chunk, loop):
    for dtype in (torch.float32, torch.bfloat16):
        arguments = inputs(length, dtype)
        state = torch.zeros(1, VALUE_HEADS, HEAD_DIM, HEAD_DIM)
        out = torch.empty_like(arguments[2])

        def ours(repeat):
            kernel.gated_delta_rule(*arguments, state, use_qk_l2norm=True, mode="recurrent", out=out)

        calls = {"ours": ours, "torch_recurrent": peer(torch_recurrent, arguments, None),
                 "torch_chunk": peer(torch_chunk, arguments, None)}
        if loop is not None:
            calls["peak"] = lambda repeat: run_peak(loop)
        times = interleaved(calls, 7)
        flops = FLOPS_PER_STATE_ELEMENT * VALUE_HEADS * HEAD_DIM**2 * length
        peak = PEAK_ROUNDS * FLOPS_PER_ROUND * torch.get_num_threads() / times["peak"] if loop is not None else None
        report.row(f"{length} tokens", str(dtype)[6:], "K-first", 1e3 * times["ours"],
                   1e3 * times["torch_recurrent"], times["torch_recurrent"] / times["ours"],
                   1e3 * times["torch_chunk"], times["torch_chunk"] / times["ours"],
                   "", "", flops / times["ours"] / peak if peak else "")


def main():
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    recurrent, chunk = qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule
    columns = ("shape", "dtype", "layout", "ms", "torch_rec ms", "times faster", "torch_chunk ms", "times faster 2",
               "scale ms", "of scale", "of peak")
    report = Report("cpu", columns, out_argument())
    kernel, loop = load_kernel(), fma_loop()
    with torch.inference_mode():
        bench_decode(kernel, report, recurrent)
        bench_step(kernel, report, qwen)
        for length in (64, 512):
            bench_tokens(kernel, report, length, recurrent, chunk, loop)
    report.save()


if __name__ == "__main__":
    main()
