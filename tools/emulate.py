# SPDX-License-Identifier: Apache-2.0
"""Builds the package with its CUDA kernels compiled for the host: `python -m tools.emulate` prints the folder.

The folder is a copy of the project whose CPU variant answers CPU tensors with the CUDA backend, run by tests/emulator/
as if on a Hopper GPU. Tests take it through LOCAL_KERNELS, so the suite can look at the CUDA kernels' indices, barriers
and bits on a machine without a GPU. Slow, and no proof of what a GPU does: see machine.h there.
`python -m tools.emulate --sources` makes the folder and builds nothing.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".build/emulated"
# what changes in the copy: file, what stands there, what takes its place
CHANGES = (
    ("csrc/api/checks.h", "  if (!check.on_cuda()) return on_cpu(params, parallel_for);\n",
     "  const char* error = on_cuda(params, nullptr);\n  return check.require(!error, error ? error : \"\");\n"),
    ("csrc/api/checks.h", "#if defined(CUDA_KERNEL)\n  if (!check.on_cuda()) return std::nullopt;", "#if 1\n"),
    ("csrc/api/checks.h", "  const torch::stable::accelerator::DeviceGuard guard(check.device_index());", ""),
    ("csrc/cuda/decode/across.cuh", "extern __shared__ float4 smem_tokens[];",
     "float4* const smem_tokens = static_cast<float4*>(emulated::shared_memory());"),
    ("csrc/cuda/decode/many.cuh", "extern __shared__ float4 smem_tokens[];",
     "float4* const smem_tokens = static_cast<float4*>(emulated::shared_memory());"),
    ("csrc/cuda/decode/one.cuh", "extern __shared__ float4 smem_tokens[];",
     "float4* const smem_tokens = static_cast<float4*>(emulated::shared_memory());"),
    ("csrc/cuda/recurrent/kernel.cuh", "extern __shared__ float4 smem[];",
     "float4* const smem = static_cast<float4*>(emulated::shared_memory());"),
    ("csrc/cuda/chunk_sm90/prepare.cuh", "extern __shared__ __align__(1024) char smem_bytes[];",
     "char* const smem_bytes = static_cast<char*>(emulated::shared_memory());"),
    ("csrc/cuda/chunk_mma/kernel.cuh", "extern __shared__ __align__(1024) char smem_bytes[];",
     "char* const smem_bytes = static_cast<char*>(emulated::shared_memory());"),
    ("csrc/cuda/chunk_mma/prepare_high.cuh", "extern __shared__ __align__(1024) char smem_bytes[];",
     "char* const smem_bytes = static_cast<char*>(emulated::shared_memory());"),
    ("csrc/cuda/fold_ring.cu", "extern __shared__ float4 smem[];",
     "float4* const smem = static_cast<float4*>(emulated::shared_memory());"),
    ("csrc/cuda/step/kernel.cuh", "extern __shared__ float4 smem_words[];",
     "float4* const smem_words = static_cast<float4*>(emulated::shared_memory());"),
    ("csrc/cuda/step/any.cuh", "extern __shared__ float4 smem_words[];",
     "float4* const smem_words = static_cast<float4*>(emulated::shared_memory());"),
    ("csrc/cuda/chunk_sm90/kernel.cuh", "extern __shared__ __align__(1024) char smem_bytes[];",
     "char* const smem_bytes = static_cast<char*>(emulated::shared_memory());"),
    ("csrc/cuda/chunk_sm90/segments.cuh", "extern __shared__ __align__(1024) char smem_bytes[];",
     "char* const smem_bytes = static_cast<char*>(emulated::shared_memory());"),
)  # fmt: skip


def copy_sources():
    """The project's sources in FOLDER, the emulator in place of launches and instructions."""
    for name in ("csrc", "torch-ext", "tools"):
        shutil.copytree(ROOT / name, FOLDER / name, dirs_exist_ok=True)
    for name in ("setup.py", "flake.nix"):
        shutil.copy2(ROOT / name, FOLDER / name)
    for name, old, new in CHANGES:
        text = (FOLDER / name).read_text()
        if old not in text:
            sys.exit(f"error: {name} has changed, tools/emulate.py does not find: {old.strip()}")
        (FOLDER / name).write_text(text.replace(old, new))
    shutil.copytree(ROOT / "tests/emulator", FOLDER / "csrc/cuda", dirs_exist_ok=True)


def write_manifest():
    """build.toml of the copy: each .cu through a .cpp that brings CUDA's words, and no CPU backend."""
    manifest = (ROOT / "build.toml").read_text()
    wrappers = []
    for kernel in re.findall(r'"(csrc/cuda/[^"]+\.cu)"', manifest):
        wrapper = f"csrc/cuda/emulated_{kernel.removeprefix('csrc/cuda/').replace('/', '_')}.cpp"
        (FOLDER / wrapper).write_text(f'#include "launch.cuh"\n#include "{kernel.removeprefix("csrc/cuda/")}"\n')
        wrappers.append(wrapper)
    sources = "".join(f'  "{name}",\n' for name in wrappers)
    manifest = re.sub(r"  \"csrc/cpu/[^\"]*\.cpp\",\n", "", manifest)  # nobody calls them here
    manifest = manifest.replace("src = [\n", f"src = [\n{sources}", 1)
    manifest = manifest.replace("cxx-flags = [", 'cxx-flags = ["-fno-strict-aliasing", "-Wno-maybe-uninitialized", ', 1)
    (FOLDER / "build.toml").write_text(manifest)


def main():
    copy_sources()
    if "--sources" in sys.argv[1:]:
        return print(FOLDER)
    write_manifest()
    command = [sys.executable, "setup.py", "build_kernel", "--backend", "cpu"]
    result = subprocess.run(command, cwd=FOLDER, stdout=sys.stderr)
    if result.returncode != 0:
        sys.exit(result.returncode)
    print(FOLDER)


if __name__ == "__main__":
    main()
