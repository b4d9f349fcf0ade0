# SPDX-License-Identifier: Apache-2.0
"""Reads what ptxas said of every kernel of the last build: registers, spills, stack and shared memory."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '(?P<arch>\w+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Kernel:
    """One kernel compiled for one architecture; sizes in bytes, per thread but for `shared`."""

    source: str
    name: str
    arch: str
    registers: int
    spills: int
    stack: int
    shared: int


def report(root: Path) -> list[Kernel]:
    """Every kernel of the CUDA variant that was built last in the project at `root`."""
    kernels = []
    for log in sorted(root.glob(".build/*/ptxas/*.log")):
        for entry in ENTRY.finditer(log.read_text()):
            shared = re.search(r"(\d+) bytes smem", entry["rest"])
            kernels.append(
                Kernel(
                    source=log.stem,
                    name=entry["name"],
                    arch=entry["arch"],
                    registers=int(entry["registers"]),
                    spills=int(entry["stores"]) + int(entry["loads"]),
                    stack=int(entry["stack"]),
                    shared=int(shared[1]) if shared else 0,
                )
            )
    return kernels


def table(kernels: list[Kernel]) -> str:
    """One line a kernel, worst spills first."""
    mangled = "\n".join(kernel.name for kernel in kernels)
    names = subprocess.run(["c++filt"], input=mangled, capture_output=True, text=True, check=True).stdout.splitlines()
    lines = [f"{'registers':>9} {'spills':>7} {'stack':>6} {'shared':>7}  arch     kernel"]
    for kernel, name in sorted(zip(kernels, names), key=lambda pair: (-pair[0].spills, pair[1], pair[0].arch)):
        short = re.sub(r"\(anonymous namespace\)::|\((bool|int|long)\)|^void ", "", name).split("(")[0]
        lines.append(
            f"{kernel.registers:9} {kernel.spills:7} {kernel.stack:6} {kernel.shared:7}  {kernel.arch:8} {short}"
        )
    return "\n".join(lines)
