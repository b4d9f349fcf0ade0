# SPDX-License-Identifier: Apache-2.0
"""mode="chunk" beside FlashInfer's prefill on the same GPU, in the same run, by the same method; both errors.

Both read the same buffers: bf16 q, k, v, fp32 gates, beta and state; FlashInfer always gets cu_seqlens, this kernel
where there is more than one sequence. This kernel updates the state in place, so FlashInfer starts from what it left.
Their graphs are replayed in turn, medians of ten. "in the call": both get raw q, k and log gates, and FlashInfer's
launches for l2norm and exp(g) count, since this kernel does both inside. "before": q and k come normalised,
FlashInfer's decays as exp(g). FlashInfer chooses its kernels itself (use_cp is left at "auto", it is told the longest
sequence). Without FlashInfer this kernel is timed alone.
"""

import traceback
from functools import partial
from importlib.metadata import version

import torch
from bench_gated_delta_rule import HEAD_DIM, inputs
from bench_prefill import SHAPES, in_float64, name_of, offsets_of, relative_rms, unit_norm
from harness import Report, graph_microseconds, load_kernel, out_argument, rival_microseconds, rotated

FORMS = ("in the call", "before")


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

    return call


def peer_call_of(peer, lengths, form, **options):
    """The same call of FlashInfer. Its states are [V, K], and read and written in two places."""
    is_raw, offsets = form == "in the call", offsets_of(lengths)
    options = {"use_qk_l2norm_in_kernel": is_raw, "gate_domain": "log" if is_raw else "linear",
               "cu_seqlens": offsets, "max_seqlen": max(lengths), "output_final_state": True,
               "backend": "flashinfer", **options}

    def call(q, k, v, g, decay, beta, state, final_state, out):
        peer(q[0], k[0], v[0], g=(g if is_raw else decay)[0], beta=beta[0], initial_state=state,
             output_state=final_state, output=out[0], **options)

    return call


def peer_or_none():
    """FlashInfer's function, after a small graph of it; None, and the reason printed, where that does not work."""
    try:
        from flashinfer.gdn_prefill import chunk_gated_delta_rule

        for lengths in ((512,), (512,) * 32):
            for form in FORMS:
                call = peer_call_of(chunk_gated_delta_rule, lengths, form)
                graph_microseconds([partial(call, *make_buffers(lengths, (2, 4), form))], replays=1)
        return chunk_gated_delta_rule
    except Exception:  # another's package: whatever it raises, this kernel's rows are still wanted
        traceback.print_exc()
        print("# FlashInfer does not run here: this kernel alone", flush=True)
        return None


def peer_version(peer):
    if peer is None:
        return None
    import flashinfer

    return f"FlashInfer {flashinfer.__version__}, CuTe DSL {version('nvidia-cutlass-dsl')}"


def bench_errors(kernel, peer, report):
    lengths, heads, form = (1024,), (2, 4), "in the call"
    for keys in ("random", "correlated"):
        q, k, v, g, beta = inputs(1, sum(lengths), torch.bfloat16, heads=heads)
        if keys == "correlated":
            q, k = ((x[:, :1].float() + 0.2 * x.float()).to(x.dtype) for x in (q, k))
        expected = in_float64(q, k, v, g, beta)
        rivals = {"ours": (call_of(kernel, lengths, form), False)}
        if peer is not None:
            rivals["FlashInfer"] = (peer_call_of(peer, lengths, form), True)
            rivals["FlashInfer, use_cp off"] = (peer_call_of(peer, lengths, form, use_cp=False), True)
        for name, (call, is_peer) in rivals.items():
            state, final_state = (torch.zeros(1, heads[1], HEAD_DIM, HEAD_DIM, device="cuda") for _ in range(2))
            out = torch.empty_like(v)
            call(q, k, v, g, None, beta, state, final_state, out)
            result = (out, final_state.transpose(-1, -2) if is_peer else state)
            report.row(name, keys, *(relative_rms(*pair) for pair in zip(result, expected)))


def bench_times(kernel, peer, report):
    for lengths, *heads, _ in SHAPES:
        for form in FORMS:
            rivals = [call_of(kernel, lengths, form)]
            if peer is not None:
                rivals.append(peer_call_of(peer, lengths, form))
            calls = rotated(rivals, partial(make_buffers, lengths, heads, form))
            ours, *theirs = (time / 1e3 for time in rival_microseconds(calls, replays=10))
            name = f"{heads[0]}/{heads[1]}"
            report.row(name_of(lengths), name, form, ours, *theirs, *(time / ours for time in theirs))


def main():
    kernel, peer = load_kernel(), peer_or_none()
    tables = (
        ("peers_errors", ("of", "keys", "error of o", "error of the state"), bench_errors),
        ("peers", ("sequences", "heads", "l2norm, exp", "ms", "FlashInfer ms", "times faster"), bench_times),
    )
    for name, columns, bench in tables:
        report = Report(name, columns, out_argument())
        report.header["peer"] = peer_version(peer)
        print(f"#   peer: {report.header['peer']}")
        bench(kernel, peer, report)
        report.save()


if __name__ == "__main__":
    main()
