# SPDX-License-Identifier: Apache-2.0
"""What ptxas said of the kernels at the memory wall in the build that is here: everything in registers.

Reads the log that the build keeps in .build/ and compiles nothing. Hopper's code, which the bars are set for; a build
without it, or without CUDA, has nothing to say.
"""

import re

import pytest

from tools.project import Project
from tools.ptxas import Kernel, report, table

from .conftest import ROOT

# one token or a few, and what belongs to them: a spill costs these kernels the bandwidth they live on
AT_THE_WALL = re.compile(r"csrc/cuda/(decode/\w+|gated_delta_verify|fold_ring|step/\w+|attention)\.cu")
ARCH = "sm_90"
GENERAL_FORMS = ("step_any", "verify_any")  # take what the fast kernels do not; no bar is set for them


def of_the_build(root):
    """Kernels of sources at the wall that build.toml still lists; logs of sources that are gone stay in .build/."""
    listed = {source.replace("/", ".") for source in Project(ROOT).listed() if AT_THE_WALL.fullmatch(source)}
    return [kernel for kernel in report(root) if kernel.source in listed and kernel.arch == ARCH]


def outside_registers(kernels):
    return [k for k in kernels if (k.spills or k.stack) and not any(name in k.name for name in GENERAL_FORMS)]


@pytest.fixture
def kernels():
    found = of_the_build(ROOT)
    if not found:
        pytest.skip(f"no CUDA build for {ARCH} is here")
    return found


def test_kernels_at_the_memory_wall_stay_in_registers(kernels):
    """No spills, no local memory, in any instance"""
    bad = outside_registers(kernels)
    assert bad == [], f"{len(bad)} of {len(kernels)} kernels:\n{table(bad)}"


def test_every_source_at_the_wall_is_in_the_log(kernels):
    """The log is whole: a source whose kernels are not in it would pass unseen"""
    wanted = {source.replace("/", ".") for source in Project(ROOT).listed() if AT_THE_WALL.fullmatch(source)}
    assert {kernel.source for kernel in kernels} == wanted


@pytest.mark.parametrize("line", ("8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
                                  "0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads"))  # fmt: skip
def test_planted_spill_is_found(tmp_path, line):
    """Control"""
    log = tmp_path / ".build/variant/ptxas/csrc.cuda.fold_ring.cu.log"
    log.parent.mkdir(parents=True)
    entry = (
        "ptxas info    : Compiling entry function '_Z4foldPf' for 'sm_90'\n"
        "ptxas info    : Function properties for _Z4foldPf\n    {}\n"
        "ptxas info    : Used 80 registers, used 1 barriers\n"
    )
    log.write_text(entry.format(line))
    assert [type(kernel) for kernel in outside_registers(of_the_build(tmp_path))] == [Kernel]
    log.write_text(entry.format("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"))
    assert len(of_the_build(tmp_path)) == 1 and outside_registers(of_the_build(tmp_path)) == []
