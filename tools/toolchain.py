# SPDX-License-Identifier: Apache-2.0
"""Finds what the build runs and links: the C++ compiler, ninja, torch, and nvcc where there is one."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tools.project import BuildError


@dataclass(frozen=True)
class Torch:
    """The headers and libraries of the torch that this Python would import. The CPU wheel serves every backend."""

    root: Path
    version: tuple[int, int]

    def include_dirs(self) -> list[Path]:
        return [self.root / "include", self.root / "include/torch/csrc/api/include"]

    def libraries(self) -> list[Path]:
        return [self.root / "lib" / name for name in ("libtorch.so", "libtorch_cpu.so", "libc10.so")]


@dataclass(frozen=True)
class Cuda:
    """One CUDA toolkit."""

    nvcc: str
    version: tuple[int, int]
    include: Path
    cudart: Path
    known_capabilities: frozenset[tuple[int, int]]


def find_torch(minimum: str) -> Torch:
    spec = importlib.util.find_spec("torch")  # found, not imported: that takes seconds
    if spec is None:
        raise BuildError("torch is not installed in this Python; run `pip install -r requirements-dev.txt`")
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    version = int(major), int(minor)
    if version < tuple(int(part) for part in minimum.split(".")):
        raise BuildError(f"the build needs torch {minimum} or newer, this is {major}.{minor}")
    return Torch(Path(spec.submodule_search_locations[0]), version)


def find_compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BuildError(f"there is no C++ compiler `{compiler}`; install g++ or name one in CXX")
    return compiler


def find_ninja() -> str:
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    found = shutil.which("ninja")
    if found is None:
        raise BuildError("there is no ninja; run `pip install ninja`")
    return found


def find_cuda() -> Cuda | None:
    """The toolkit of the nvcc in CUDA_HOME or on the PATH; None where there is none."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    if nvcc is None:
        return None
    release = re.search(r"release (\d+)\.(\d+)", _output(nvcc, "--version"))
    if release is None:
        raise BuildError(f"{nvcc} does not say which release of CUDA it is")
    # nvcc itself knows best where its headers and libraries are, also when the one on the PATH is a wrapper.
    plan = _output(nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null")
    include = [Path(path) for path in re.findall(r'"-I([^"]+)"', plan)]
    libraries = [Path(path) for path in re.findall(r'"-L([^"]+)"', plan)]
    cudart = next((file for folder in libraries for file in sorted(folder.glob("libcudart.so*"))), None)
    if not include or cudart is None:
        raise BuildError(f"{nvcc} is there, but its headers or libcudart are not; install the CUDA runtime's")
    known = re.findall(r"compute_(\d+)(\d)\b", _output(nvcc, "--list-gpu-arch"))
    return Cuda(
        nvcc=nvcc,
        version=(int(release[1]), int(release[2])),
        include=include[0],
        cudart=cudart,
        known_capabilities=frozenset((int(major), int(minor)) for major, minor in known),
    )


def present_devices() -> list[str]:
    """The compute capabilities of this machine's GPUs, `["9.0"]`; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    lines = _output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").split()
    return sorted({line for line in lines if re.fullmatch(r"\d+\.\d+", line)})


def _output(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout
