# SPDX-License-Identifier: Apache-2.0
"""mode="chunk" on a GPU: long sequences, dense and packed, at several numbers of heads; its error against float64.

Form "dense": the rows of a packed call as a batch, the same work. "raw gates": a and b in the place of g and beta;
"gates before": gated_delta_gates and the call, in one graph.
A call of less than 0.3 ms is captured 4 to 16 times in one graph, on buffers of its own each; a longer one once. The
graphs of all forms of a row are replayed in turn, so that clocks and heat of the row before meet them all.
"best peer ms" is the fastest of FlashInfer 0.7.4, FlashQLA 0.1.3 and flash-linear-attention 0.6.0 as measured once on
an H200 with torch 2.11, by graph replay, of how many calls is not known (one a graph adds 2 us): not in this run
(bench_peers.py runs each of them beside this kernel).
flash-linear-attention's error on the same inputs is printed where it is installed.
"""

import importlib.util
import itertools

import torch
from bench_gated_delta_rule import HEAD_DIM, inputs
from harness import Report, load_kernel, out_argument, rival_microseconds, rotated

# Lengths of the sequences, key and value heads, the best peer's ms.
SHAPES = (
    ((512,), 16, 48, 0.0377),
    ((2048,), 16, 48, 0.1119),
    ((8192,), 16, 48, 0.364),
    ((32768,), 16, 48, 1.290),
    ((131072,), 16, 48, 5.08),
    ((2048,) * 4, 16, 48, 0.2055),
    ((512,) * 31, 16, 48, None),
    ((28672, 4096), 16, 48, 1.273),
    ((4096, 28672), 16, 48, 1.273),
    ((8192,), 16, 64, 0.412),
    ((4096,) * 8, 16, 64, 0.760),
    ((1024,) * 8, 16, 64, 0.225),
    ((8192,), 16, 32, 0.249),
    ((2048,), 2, 8, 0.0633),
    ((8192,), 2, 8, 0.1147),
    ((32768,), 2, 8, 0.2376),
)
FORMS = {
    "": {},
    "no l2norm": {"use_qk_l2norm": False},
    "scan off": {"scan": "off"},
    "high": {"precision": "high"},
    "checkpoint_every=1024": {"checkpoint_every": 1024},
    "raw gates": {"gate_domain": "raw"},
    "gates before": {},
    "dense": {},
}
GATES = ("raw gates", "gates before")
MORE_FORMS = {
    ((512,), 16, 48): GATES,
    ((2048,), 16, 48): GATES,
    ((8192,), 16, 48): (*GATES, "no l2norm", "high", "checkpoint_every=1024"),
    ((32768,), 16, 48): GATES,
    ((8192,), 2, 8): ("scan off",),
    ((2048,) * 4, 16, 48): ("dense",),
    ((512,) * 31, 16, 48): ("dense",),
    ((1024,) * 8, 16, 64): ("dense",),
    ((4096,) * 8, 16, 64): ("dense",),
}


def offsets_of(lengths):
    return torch.tensor((0, *lengths), device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)


def unit_norm(x):
    return torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype)


def calls_of(kernel, lengths, heads, form):
    """The calls of a form that one graph holds"""
    options = FORMS[form]
    tokens, every = sum(lengths), options.get("checkpoint_every")
    options = {"use_qk_l2norm": True, "mode": "chunk", **options}
    rows = len(lengths) if form == "dense" else 1
    if len(lengths) > rows:
        options["cu_seqlens"] = offsets_of(lengths)
    A_log, dt_bias = torch.zeros(2, heads[1], device="cuda")
    if form == "raw gates":
        options.update(A_log=A_log, dt_bias=dt_bias)

    def make_buffers():
        q, k, v, g, beta = inputs(rows, tokens // rows, torch.bfloat16, heads=heads)
        if form in GATES:
            g, beta = (torch.randn_like(x) for x in (v[..., 0], v[..., 0]))
        if not options["use_qk_l2norm"]:
            q, k = unit_norm(q), unit_norm(k)
        state = kernel.new_state(len(lengths), heads[1], HEAD_DIM, HEAD_DIM, device="cuda")
        checkpoints = [torch.empty(tokens // every, *state.shape[1:], device="cuda")] if every else []
        return q, k, v, g, beta, state, torch.empty_like(v), *checkpoints

    def call(q, k, v, g, beta, state, out, checkpoints=None):
        if form == "gates before":
            g, beta = kernel.gated_delta_gates(g, beta, A_log, dt_bias)
        kernel.gated_delta_rule(q, k, v, g, beta, state, out=out, checkpoints=checkpoints, **options)

    (calls,) = rotated([call], make_buffers)
    return calls


def name_of(lengths):
    return f"{lengths[0]}x{len(lengths)}" if len(set(lengths)) == 1 else "+".join(map(str, lengths))


def bench_times(kernel, report):
    for lengths, key_heads, value_heads, peer in SHAPES:
        forms = ("", *MORE_FORMS.get((lengths, key_heads, value_heads), ()))
        rivals = [calls_of(kernel, lengths, (key_heads, value_heads), form) for form in forms]
        for form, microseconds in zip(forms, rival_microseconds(rivals, replays=10)):
            time = microseconds / 1e3
            report.row(name_of(lengths), f"{key_heads}/{value_heads}", form, time, peer, peer and peer / time)


def in_float64(q, k, v, g, beta):
    """Output and final state of one sequence from zero, token by token."""
    q, k, v, g, beta = (x[0].double() for x in (q, k, v, g, beta))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    state, out = torch.zeros(v.shape[1], HEAD_DIM, HEAD_DIM, device="cuda", dtype=torch.float64), torch.empty_like(v)
    for t in range(v.shape[0]):
        state *= g[t].exp()[:, None, None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state += k[t][:, :, None] * delta[:, None, :]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t]) * HEAD_DIM**-0.5
    return out[None], state[None]


def correlated(x):
    """Keys or queries that share most of their direction."""
    return (x[:, :1].float() + 0.2 * x.float()).to(x.dtype)


def relative_rms(actual, expected):
    return ((actual.double() - expected).square().mean() / expected.square().mean()).sqrt().item()


def bench_errors(kernel, report):
    heads, dtypes, decays = (2, 4), (torch.bfloat16, torch.float16), {"usual": 1, "hardly any": 1000}
    for length, dtype, decay in itertools.product((1024, 4096), dtypes, decays):
        for keys in ("random", "correlated"):
            q, k, v, g, beta = inputs(1, length, dtype, heads=heads)
            g = g / decays[decay]
            if keys == "correlated":
                q, k = correlated(q), correlated(k)
            expected = in_float64(q, k, v, g, beta)
            for precision in ("fp16", "high"):
                state = kernel.new_state(1, heads[1], HEAD_DIM, HEAD_DIM, device="cuda")
                out = torch.empty_like(v, dtype=torch.float32 if precision == "high" else dtype)
                options = {"use_qk_l2norm": True, "mode": "chunk", "precision": precision, "out": out}
                kernel.gated_delta_rule(q, k, v, g, beta, state, **options)
                errors = [relative_rms(*pair) for pair in zip((out, state), expected)]
                report.row(length, str(dtype)[6:], keys, decay, precision, *errors)
            if importlib.util.find_spec("fla"):
                from fla.ops.gated_delta_rule import chunk_gated_delta_rule

                result = chunk_gated_delta_rule(
                    q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
                )
                errors = [relative_rms(*pair) for pair in zip(result, expected)]
                report.row(length, str(dtype)[6:], keys, decay, "fla", *errors)


def main():
    kernel = load_kernel()
    columns = ("tokens", "inputs", "keys", "decay", "precision", "error of o", "error of the state")
    report = Report("prefill_errors", columns, out_argument())
    bench_errors(kernel, report)
    report.save()
    columns = ("sequences", "heads", "form", "ms", "best peer ms", "times faster")
    report = Report("prefill", columns, out_argument())
    bench_times(kernel, report)
    report.save()


if __name__ == "__main__":
    main()
