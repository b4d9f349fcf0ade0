# SPDX-License-Identifier: Apache-2.0
"""mode="chunk" beside a peer's prefill on the same GPU, in the same run, by the same method; both errors.

`--peer flashinfer` (the default), `flashqla` or `fla` (flash-linear-attention, its own kernels): one a process, since
they need different versions of tvm_ffi. The results are peers.json, peers_flashqla.json and peers_fla.json, the errors
peers_errors.json and so on.

Both read the same buffers: bf16 q, k, v, fp32 gates, beta and state; FlashInfer always gets cu_seqlens, the others, as
this kernel, only where there is more than one sequence. This kernel updates the state in place, so the peer starts from
what it left. FlashInfer writes where it is told, the others allocate what they return: in a graph the same memory for
each call. Their graphs are replayed in turn, medians of ten. "in the call": both get raw q, k and log gates, and the
peer's launches for l2norm and exp(g) count, since this kernel does both inside. "before": q and k come normalised,
FlashInfer's decays as exp(g). Each peer chooses its kernels itself (FlashInfer's use_cp and FlashQLA's auto_cp are left
as they are, FlashInfer is told the longest sequence). A row that the peer cannot run in a graph has this kernel's time
alone, the output says why; so do all without the peer.
"""

import os
import traceback
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Callable

import torch
from bench_gated_delta_rule import HEAD_DIM, inputs
from bench_prefill import SHAPES, correlated, in_float64, name_of, offsets_of, relative_rms, unit_norm
from harness import Report, argument_parser, load_kernel, rival_microseconds, rotated

FORMS = ("in the call", "before")
ERROR_ROW = ((1024,), (16, 48))
# FlashQLA and flash-linear-attention compile anew for each number of heads: of SHAPES only these.
FEW_SHAPES = tuple(row for row in SHAPES if row[:3] in (
    ((512,), 16, 48), ((2048,), 16, 48), ((8192,), 16, 48), ((32768,), 16, 48), ((1024,) * 8, 16, 64)
))


@dataclass
class Peer:
    name: str
    version: str
    call_of: Callable       # (lengths, form, **options) -> a function like call_of's
    shapes: tuple = FEW_SHAPES
    variants: tuple = ()    # more rows of errors: name, options


def make_buffers(lengths, heads, form):
    q, k, v, g, beta = inputs(1, sum(lengths), torch.bfloat16, heads=heads)
    if form == "before":
        q, k = unit_norm(q), unit_norm(k)
    states = [torch.zeros(len(lengths), heads[1], HEAD_DIM, HEAD_DIM, device="cuda") for _ in range(2)]
    return q, k, v, g, g.exp(), beta, *states, torch.empty_like(v)


def call_of(kernel, lengths, form):
    options = {"use_qk_l2norm": form == "in the call", "mode": "chunk"}
    if len(lengths) > 1:
        options["cu_seqlens"] = offsets_of(lengths)

    def call(q, k, v, g, decay, beta, state, final_state, out):
        kernel.gated_delta_rule(q, k, v, g, beta, state, out=out, **options)
        return out, state

    return call


def flashinfer_call_of(function, lengths, form, **options):
    """Its states are [V, K], and read and written in two places."""
    is_raw, offsets = form == "in the call", offsets_of(lengths)
    options = {"use_qk_l2norm_in_kernel": is_raw, "gate_domain": "log" if is_raw else "linear",
               "cu_seqlens": offsets, "max_seqlen": max(lengths), "output_final_state": True,
               "backend": "flashinfer", **options}

    def call(q, k, v, g, decay, beta, state, final_state, out):
        function(q[0], k[0], v[0], g=(g if is_raw else decay)[0], beta=beta[0], initial_state=state,
                 output_state=final_state, output=out[0], **options)
        return out, final_state.transpose(-1, -2)

    return call


def fla_call_of(function, lengths, form):
    """flash-linear-attention's signature, which is FlashQLA's too: log gates, states [K, V], both results new."""
    options = {"use_qk_l2norm_in_kernel": form == "in the call", "output_final_state": True}
    if len(lengths) > 1:
        options["cu_seqlens"] = offsets_of(lengths)

    def call(q, k, v, g, decay, beta, state, final_state, out):
        return function(q, k, v, g, beta, initial_state=state, **options)

    return call


def load_flashinfer():
    import flashinfer
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    return Peer("FlashInfer", f"FlashInfer {flashinfer.__version__}, CuTe DSL {version('nvidia-cutlass-dsl')}",
                partial(flashinfer_call_of, chunk_gated_delta_rule), SHAPES,
                (("FlashInfer, use_cp off", {"use_cp": False}),))


def load_flashqla():
    from flash_qla import chunk_gated_delta_rule

    return Peer("FlashQLA", f"FlashQLA {version('flash-qla')}, tilelang {version('tilelang')}",
                partial(fla_call_of, chunk_gated_delta_rule))


def load_fla():
    os.environ["FLA_FLASH_QLA"] = "0"   # else it calls FlashQLA where that is installed
    import fla
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return Peer("FLA", f"flash-linear-attention {fla.__version__}, Triton {version('triton')}",
                partial(fla_call_of, chunk_gated_delta_rule))


PEERS = {"flashinfer": load_flashinfer, "flashqla": load_flashqla, "fla": load_fla}


def peer_or_none(name):
    """The peer, after a call of it; None, and the reason printed, where that does not work.

    Of a middling length: flash-linear-attention tunes most of its kernels once, in the first call of so many heads.
    """
    try:
        peer = PEERS[name]()
        for form in FORMS:
            peer.call_of((8192,), form)(*make_buffers((8192,), (16, 48), form))
        torch.cuda.synchronize()
        return peer
    except Exception:  # another's package: whatever it raises, this kernel's rows are still wanted
        traceback.print_exc()
        print(f"# {name} does not run here: this kernel alone", flush=True)
        return None


def bench_errors(kernel, peer, report):
    (lengths, heads), form = ERROR_ROW, "in the call"
    rivals = {"ours": call_of(kernel, lengths, form)}
    if peer is not None:
        variants = ((peer.name, {}), *peer.variants)
        rivals |= {name: peer.call_of(lengths, form, **options) for name, options in variants}
    for keys in ("random", "correlated"):
        q, k, v, g, beta = inputs(1, sum(lengths), torch.bfloat16, heads=heads)
        if keys == "correlated":
            q, k = correlated(q), correlated(k)
        expected = in_float64(q, k, v, g, beta)
        for name, call in rivals.items():
            states = (torch.zeros(1, heads[1], HEAD_DIM, HEAD_DIM, device="cuda") for _ in range(2))
            result = call(q, k, v, g, None, beta, *states, torch.empty_like(v))
            report.row(name, keys, *(relative_rms(*pair) for pair in zip(result, expected)))


def milliseconds(calls, buffers):
    """Of each of the calls; of the first alone, and the reason printed, where the second does not run."""
    try:
        return [time / 1e3 for time in rival_microseconds(rotated(calls, buffers), replays=10)]
    except Exception as error:  # as in peer_or_none
        if len(calls) == 1:
            raise
        print(f"# the peer does not run in a graph: {type(error).__name__}: {error}", flush=True)
    torch.cuda.set_stream(torch.cuda.default_stream())   # a capture that fails leaves its own
    return milliseconds(calls[:1], buffers)


def bench_times(kernel, peer, report):
    for lengths, *heads, _ in peer.shapes if peer else SHAPES:
        for form in FORMS:
            calls = [call_of(kernel, lengths, form)]
            if peer is not None:
                calls.append(peer.call_of(lengths, form))
            ours, *theirs = milliseconds(calls, partial(make_buffers, lengths, heads, form))
            name = f"{heads[0]}/{heads[1]}"
            report.row(name_of(lengths), name, form, ours, *theirs, *(time / ours for time in theirs))


def main():
    parser = argument_parser()
    parser.add_argument("--peer", choices=PEERS, default="flashinfer")
    arguments = parser.parse_args()
    kernel, peer = load_kernel(), peer_or_none(arguments.peer)
    suffix = "" if arguments.peer == "flashinfer" else f"_{arguments.peer}"
    times = ("sequences", "heads", "l2norm, exp", "ms", f"{peer.name if peer else arguments.peer} ms", "times faster")
    tables = (
        (f"peers_errors{suffix}", ("of", "keys", "error of o", "error of the state"), bench_errors),
        (f"peers{suffix}", times, bench_times),
    )
    for name, columns, bench in tables:
        report = Report(name, columns, arguments.out)
        report.header["peer"] = peer and peer.version
        print(f"#   peer: {report.header['peer']}")
        bench(kernel, peer, report)
        report.save()


if __name__ == "__main__":
    main()
