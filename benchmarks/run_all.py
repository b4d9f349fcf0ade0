# SPDX-License-Identifier: Apache-2.0
"""Runs every benchmark that this machine can run but bench_peers.py.

`python benchmarks/run_all.py FOLDER` writes one JSON each there.
"""

import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ON_GPU = (
    "bench_gated_delta_rule.py",
    "bench_gated_delta_step.py",
    "bench_prefill.py",
    "bench_modes.py",
    "bench_around_the_rule.py",
    "bench_serving.py",
    "bench_layers.py",
)
ON_CPU = ("bench_cpu.py",)


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else str(HERE / "results")
    failed = []
    for script in ON_GPU if torch.cuda.is_available() else ON_CPU:
        if subprocess.run([sys.executable, str(HERE / script), "--out", out]).returncode != 0:
            failed.append(script)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
