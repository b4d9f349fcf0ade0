# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: the kernel, the clock, the header and the table.

Method: the calls of a row are captured in one CUDA graph (several where they are short, each on its own buffers, so
that together they exceed the L2), the graph is replayed, and the median of the replays is divided by the calls. On a
CPU: medians of interleaved wall-clock runs.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
ROTATED_BYTES = 400 << 20   # well past the L2 of any card
SHORT_CALL = 300            # microseconds; a replay costs 2 beside its calls (H200), which short ones share


def load_kernel():
    """The package as users load it, from this checkout unless LOCAL_KERNELS says otherwise."""
    os.environ.setdefault("LOCAL_KERNELS", f"org/gated-deltanet={ROOT}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from kernels import get_kernel

    return get_kernel("org/gated-deltanet", version=1)


def source_digest():
    """Digest of the sources that the variant was built from, as `make digest` prints it."""
    command = [sys.executable, str(ROOT / "setup.py"), "source_digest"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def environment():
    """Card, driver, versions and source digest: the header of every result."""
    facts = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "python": platform.python_version(),
             "source_digest": source_digest()}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        facts["card"] = torch.cuda.get_device_name(0)
        facts["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        facts["method"] = "CUDA graph replay, median, buffers rotated past the L2 or larger than it"
    else:
        facts["card"] = platform.processor() or platform.machine()
        facts["threads"] = torch.get_num_threads()
        facts["method"] = "wall clock, median of interleaved runs"
    return facts


def copies_past_l2(num_bytes, most=64):
    """How many sets of buffers of this size a row should rotate through."""
    return max(1, min(most, -(-ROTATED_BYTES // max(1, num_bytes))))


def rotated(rivals, make_buffers):
    """For each function the calls that its graph should hold, all on the same sets of buffers.

    One set where the calls are long; where one of them is short 4 to 16 sets, which together exceed the L2.
    """
    sets = [make_buffers()]
    if min(graph_microseconds([partial(call, *sets[0])], replays=5) for call in rivals) < SHORT_CALL:
        num_bytes = sum(buffer.nbytes for buffer in sets[0])
        sets += [make_buffers() for _ in range(max(4, copies_past_l2(num_bytes, most=16)) - 1)]
    return [[partial(call, *buffers) for buffers in sets] for call in rivals]


def graph_microseconds(calls, replays=20):
    """Median microseconds of one call; `calls` is a list of functions, captured in order into one graph."""
    return rival_microseconds([calls], replays)[0]


def rival_microseconds(rivals, replays=20):
    """graph_microseconds of each list of calls; the graphs are replayed in turn, so that what drifts meets them all."""
    graphs, times = [capture(calls) for calls in rivals], [[] for _ in rivals]
    for replay in range(replays + 3):
        for graph, calls, measured in zip(graphs, rivals, times):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 3:
                measured.append(start.elapsed_time(end) * 1e3 / len(calls))
    return [statistics.median(measured) for measured in times]


def capture(calls):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def copy_bandwidth():
    """Bytes per second, read plus written, of 1 GiB copied by a kernel: the ceiling that byte floors are given against.

    An elementwise kernel, not copy_, which a graph turns into a memcpy node: those run at two thirds of the speed.
    """
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (graph_microseconds([lambda: torch.neg(source, out=target)] * 4) * 1e-6)


class Report:
    """Collects rows, prints them as they come, writes them beside the header as JSON."""

    def __init__(self, name, columns, out=None):
        self.name, self.columns, self.out, self.rows = name, columns, out, []
        self.header = environment()
        print(f"# {name}")
        for key, value in self.header.items():
            print(f"#   {key}: {value}")
        print("  ".join(f"{column:>14}" for column in columns), flush=True)

    def row(self, *values):
        self.rows.append(dict(zip(self.columns, values)))
        print("  ".join(f"{value:>14.4g}" if isinstance(value, float) else f"{value!s:>14}" for value in values),
              flush=True)

    def save(self):
        if self.out is not None:
            path = Path(self.out) / f"{self.name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"header": self.header, "rows": self.rows}, indent=1) + "\n")


def argument_parser():
    """With `--out FOLDER`, the only option that all benchmarks have."""
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=None, help="folder for the JSON result")
    return parser


def out_argument():
    return argument_parser().parse_args().out
