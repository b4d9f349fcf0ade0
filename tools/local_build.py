# SPDX-License-Identifier: Apache-2.0
"""Builds the folders that the hub serves, build/<variant>/, from build.toml with ninja alone.

    python setup.py build_kernel [--backend cpu|cuda] [--arch 9.0,8.0 | --arch native] [--debug] ...
    python setup.py source_digest
    python setup.py kernel_resources

The result has the layout, the names and the metadata of kernel-builder's, so `kernels` loads it the same way. Objects,
generated files and ptxas' reports (registers, spills) stay in .build/, outside what `kernels` looks at.
Published builds come from kernel-builder itself.
"""

import argparse
import base64
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.project import BuildError, Project, Section, gencode, runs_on, select_capabilities
from tools.ptxas import report, table
from tools.toolchain import Cuda, Torch, find_compiler, find_cuda, find_ninja, find_torch, present_devices

ROOT = Path(__file__).resolve().parent.parent
RULE, SHIPPED_RULE = "csrc/common/rule.h", "rule.h"  # the package ships a copy, for emit_step_program
BINDING = "torch-ext"  # the only room whose sources see TORCH_EXTENSION_NAME, hence the only ones it rebuilds
SHARED = ("csrc/cpu/", ".build/generated/")  # sources without torch and backend: compiled once for all variants

# The macros that kernel-builder's header of the same name gives a binding. Written against Python's stable ABI without
# Python.h, so that a machine needs no Python headers to build the extension.
REGISTRATION_H = """\
#pragma once

#define GDN_JOIN_(a, b) a##b
#define GDN_JOIN(a, b) GDN_JOIN_(a, b)
#define GDN_STRING_(a) #a
#define GDN_STRING(a) GDN_STRING_(a)

// torch's macros with the name expanded first, so that it may be TORCH_EXTENSION_NAME.
#define TORCH_LIBRARY_EXPAND(name, module) TORCH_LIBRARY(name, module)
#define TORCH_LIBRARY_IMPL_EXPAND(name, device, module) TORCH_LIBRARY_IMPL(name, device, module)
#define STABLE_TORCH_LIBRARY_EXPAND(name, module) STABLE_TORCH_LIBRARY(name, module)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(name, device, module) STABLE_TORCH_LIBRARY_IMPL(name, device, module)

// PyModuleDef as the stable ABI fixes it since Python 3.2, its PyObject head first.
struct GdnModuleDef {
  struct { long refcount; void* type; void* (*init)(); long index; void* copy; } head;
  const char* name;
  const char* doc;
  long size;
  void* rest[5];
};
extern "C" void* PyModule_Create2(GdnModuleDef*, int abi_version);

// An empty module: importing it loads the library, and that registers the ops.
#define REGISTER_EXTENSION(extension)                                                     \\
  extern "C" __attribute__((visibility("default"))) void* GDN_JOIN(PyInit_, extension)() { \\
    static GdnModuleDef def = {{1, nullptr, nullptr, 0, nullptr},                          \\
                               GDN_STRING(extension), nullptr, 0, {}};                    \\
    return PyModule_Create2(&def, 3);                                                     \\
  }
"""

# glibc 2.32's flag, which libstdc++ reads before it counts references. Defined here, hidden, so that a library built on
# a newer system also loads on the glibc 2.28 of manylinux_2_28; zero means: count atomically.
SINGLE_THREADED_CPP = 'extern "C" { __attribute__((visibility("hidden"))) char __libc_single_threaded = 0; }\n'

OPS_PY = '''\
import torch
from . import {ops}
ops = torch.ops.{ops}

def add_op_namespace_prefix(op_name: str):
    """
    Prefix op by namespace.
    """
    return f"{ops}::{{op_name}}"
'''

NINJA_RULES = """\
ninja_required_version = 1.5
builddir = .build

rule cxx
  command = {compiler} -MD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = C++ $in

rule nvcc
  command = {nvcc} -MD -MF $out.d $flags -c $in -o $out 2> $log; s=$$?; grep -Ev '{ptxas_lines}' $log >&2; exit $$s
  depfile = $out.d
  deps = gcc
  description = CUDA $in

rule link
  command = {compiler} -shared -o $out $in $libraries
  description = LINK $out

"""
PTXAS_LINES = "^ptxas info|^ +[0-9]+ bytes stack frame"


@dataclass(frozen=True)
class Variant:
    """One backend's build: where it goes, and what it is compiled with."""

    project: Project
    backend: str
    torch: Torch
    cuda: Cuda | None
    devices: list[str] | None
    debug: bool
    line_info: bool

    @property
    def name(self) -> str:
        abi = self.project.stable_abi[self.backend].replace(".", "")
        compute = f"cu{self.cuda.version[0]}{self.cuda.version[1]}" if self.cuda else self.backend
        return f"torch-stable-abi{abi}-{compute}-{platform.machine()}-{platform.system().lower()}"

    @property
    def work(self) -> Path:
        """Relative to the root, as all of the project's paths in build.ninja, so that none ends up in the library."""
        return Path(".build") / self.name

    def capabilities(self, section: Section) -> list[str]:
        return select_capabilities(section, self.devices, self.cuda.known_capabilities)

    def archs(self) -> list[str] | None:
        """What metadata.json names: the union over the sections."""
        if self.cuda is None:
            return None
        sections = [section for section in self.project.sections_for(self.backend) if section.backend]
        archs = sorted({capability for section in sections for capability in self.capabilities(section)})
        if self.devices is not None:  # a section that is kept for its symbols alone runs on none of them
            archs = [arch for arch in archs if any(runs_on(arch, device) for device in self.devices)]
        for device in self.devices or []:
            if not any(runs_on(arch, device) for arch in archs):
                raise BuildError(f"build.toml has no architecture that runs on a GPU of compute capability {device}")
        return archs


def common_flags(variant: Variant) -> list[str]:
    """What kernel-builder passes to every file, but for the flags that stand in build.toml."""
    major, minor = (int(part) for part in variant.project.stable_abi[variant.backend].split("."))
    defines = {
        "cpu": ["-DCPU_KERNEL"],
        "cuda": ["-DCUDA_KERNEL", "-DUSE_CUDA=1"],
    }[variant.backend]
    defines += [f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#018x}", "-DPy_LIMITED_API=0x03090000"]
    system = variant.torch.include_dirs() + ([variant.cuda.include] if variant.cuda else [])
    return [*shared_flags(variant), *defines, *(flag for path in system for flag in ("-isystem", str(path)))]


def shared_flags(variant: Variant) -> list[str]:
    """The part of it that is the same for every variant."""
    optimise = ["-O0", "-g"] if variant.debug else ["-O3", "-DNDEBUG"]
    return [*optimise, "-Icsrc", "-I.build/generated"]


def is_shared(source: str) -> bool:
    return source.startswith(SHARED)


def host_flags(variant: Variant) -> list[str]:
    return [
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-gnu-unique",  # or two kernels that share a template's static member would share the member
        "-Wall",
        "-Wextra",
        f"-ffile-prefix-map={variant.torch.root}=torch",
    ]


def source_flags(variant: Variant, section: Section, source: str) -> list[str]:
    flags = shared_flags(variant) if is_shared(source) else common_flags(variant)
    flags += [f"-I{folder}" for folder in section.include]
    if source.startswith(BINDING):
        flags.append(f"-DTORCH_EXTENSION_NAME={variant.project.ops_name(variant.backend)}")
    if not source.endswith(".cu"):
        return flags + host_flags(variant) + list(section.cxx_flags)
    flags += ["-Xptxas=-v"] + (["-G"] if variant.debug else []) + (["-lineinfo"] if variant.line_info else [])
    flags += [flag for capability in variant.capabilities(section) for flag in gencode(capability)]
    host = host_flags(variant) + ["-Wno-unknown-pragmas"]  # of nvcc's pragmas, which the host compiler also sees
    return flags + [f"-Xcompiler={flag}" for flag in host] + list(section.cuda_flags)


def ninja_file(variant: Variant) -> str:
    """The whole build of one variant as build.ninja."""
    compiler = find_compiler()
    nvcc = f"{variant.cuda.nvcc} -ccbin {compiler}" if variant.cuda else ""
    text = NINJA_RULES.format(compiler=compiler, nvcc=nvcc, ptxas_lines=PTXAS_LINES)
    generated = Section("generated", None, (".build/generated/single_threaded.cpp",), (), (), (), ())
    objects = {}
    for section in [*variant.project.sections_for(variant.backend), generated]:
        for source in section.compiled():
            if source in objects:
                raise BuildError(f"build.toml lists {source} twice for {variant.backend}")
            if source.endswith(".cu") and section.backend != "cuda":
                raise BuildError(f"build.toml lists {source} in [{section.name}], it belongs to a cuda section")
            folder = Path(".build/shared") if is_shared(source) else variant.work
            objects[source] = str(folder / "obj" / f"{source}.o")
            rule = "nvcc" if source.endswith(".cu") else "cxx"
            text += f"build {objects[source]}: {rule} {source}\n"
            text += f"  flags = {quoted(source_flags(variant, section, source))}\n"
            if rule == "nvcc":
                text += f"  log = {ptxas_log(variant, source)}\n"
    libraries = variant.torch.libraries() + ([variant.cuda.cudart] if variant.cuda else [])
    # Kept even where no symbol is taken from one of them: through libtorch.so the CUDA half of torch is found.
    linked = ["-Wl,--no-as-needed", *map(str, libraries), "-Wl,--as-needed"]
    text += f"build {variant.work}/extension.so: link {' '.join(objects.values())}\n"
    text += f"  libraries = {quoted(linked)}\n"
    return text


def quoted(words: list[str]) -> str:
    """For the shell, then for ninja."""
    return shlex.join(words).replace("$", "$$")


def ptxas_log(variant: Variant, source: str) -> Path:
    return variant.work / "ptxas" / f"{source.replace('/', '.')}.log"


def write_if_changed(path: Path, content: bytes) -> None:
    """Replaces a file in one step, and only when it differs: a running process keeps the library that it has mapped."""
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    if path.is_dir():
        shutil.rmtree(path)
    temporary.replace(path)


def metadata(project: Project, backend: str, archs: list[str] | None, files: dict[str, bytes]) -> dict:
    """metadata.json as kernel-builder writes it, the digest over the variant's other files included."""
    general = project.general
    python_depends = general.get("python-depends", []) + general.get(backend, {}).get("python-depends", [])
    digests = {path: base64.b64encode(hashlib.sha256(data).digest()).decode() for path, data in sorted(files.items())}
    return {
        "name": project.name,
        "id": project.ops_name(backend),
        "version": general["version"],
        "license": general["license"],
        **{key: general[key] for key in ("upstream", "source") if key in general},
        "python-depends": python_depends,
        "kernel-depends": general.get("kernel-depends", []),
        "backend": {"type": backend} | ({"archs": archs} if archs else {}),
        "digest": {"algorithm": "sha256", "files": digests},
    }


def install(project: Project, backend: str, archs: list[str] | None, library: Path, folder: Path) -> None:
    """Makes `folder` hold exactly the package: what an earlier build or an import left there goes away."""
    ops = project.ops_name(backend)
    files = {path.as_posix(): (project.package / path).read_bytes() for path in project.python_files()}
    files["_ops.py"] = OPS_PY.format(ops=ops).encode()
    files[f"{ops}.abi3.so"] = library.read_bytes()
    about = metadata(project, backend, archs, files)
    files["metadata.json"] = (json.dumps(about, indent=2) + "\n").encode()
    for path, content in files.items():
        write_if_changed(folder / path, content)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.is_file() and path.relative_to(folder).as_posix() not in files:
            path.unlink()


def validate(root: Path) -> None:
    """build.toml through kernel-builder's own parser, where the `kernels` wheel is installed."""
    spec = importlib.util.find_spec("kernels")
    if spec is None:
        return
    module = sys.modules.get("kernels._rust")
    if module is None:  # the wheel's extension alone: importing `kernels` would import torch, which takes seconds
        path = next(Path(spec.submodule_search_locations[0]).glob("_rust*.so"))
        loader = importlib.machinery.ExtensionFileLoader("kernels._rust", str(path))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    try:
        module.Build.open(root)
    except ValueError as error:
        raise BuildError(f"build.toml: {error}") from None


def check_shipped_rule(project: Project) -> None:
    """The package's copy of the rule's header is the header. (kernel-builder ships only what lies in the package.)"""
    rule, shipped = project.root / RULE, project.package / SHIPPED_RULE
    if RULE in project.listed() and not (shipped.is_file() and shipped.read_bytes() == rule.read_bytes()):
        raise BuildError(f"{shipped.relative_to(project.root)} is not {RULE}: copy the latter over it")


def loose_symbols(library: Path) -> list[str]:
    """C++ symbols the library lacks, but for the standard library's.

    They are of a source that build.toml does not list for this backend, or of torch, whose stable ABI is C alone.
    """
    found = subprocess.run(["nm", "-D", "--undefined-only", str(library)], check=True, capture_output=True, text=True)
    mangled = re.findall(r" U (_Z(?!N?K?S[tabsiod])[^@\s]+)$", found.stdout, re.MULTILINE)
    names = subprocess.run(["c++filt"], input="\n".join(mangled), check=True, capture_output=True, text=True)
    return names.stdout.splitlines()


def build(variant: Variant, archs: list[str] | None, jobs: int) -> Path:
    """Compiles and installs one variant; returns its folder."""
    project, root = variant.project, variant.project.root
    write_if_changed(root / ".build/generated/registration.h", REGISTRATION_H.encode())
    write_if_changed(root / ".build/generated/single_threaded.cpp", SINGLE_THREADED_CPP.encode())
    write_if_changed(root / variant.work / "build.ninja", ninja_file(variant).encode())
    (root / variant.work / "ptxas").mkdir(exist_ok=True)
    command = [find_ninja(), "-f", str(variant.work / "build.ninja"), "-j", str(jobs)]
    if subprocess.run(command, cwd=root).returncode:
        raise BuildError(f"{variant.name} did not compile; ninja's output above says where")
    library = root / variant.work / "extension.so"
    if Project(root).digest != project.digest:
        raise BuildError(f"the sources changed while {variant.name} was compiled; build again")
    if missing := loose_symbols(library):
        raise BuildError(f"{variant.name} needs what no listed source defines: {', '.join(missing)}")
    folder = root / "build" / variant.name
    install(project, variant.backend, archs, library, folder)
    return folder


def variants(project: Project, options: argparse.Namespace) -> list[Variant]:
    cuda = None if options.backend == "cpu" else find_cuda()
    if options.backend == "cuda" and cuda is None:
        raise BuildError("there is no nvcc on the PATH or in CUDA_HOME, so the CUDA variant cannot be built")
    devices = options.arch.split(",") if options.arch else None
    if options.arch == "native":
        devices = present_devices()
        if not devices:
            raise BuildError("--arch native, but nvidia-smi finds no GPU here; name architectures, as in --arch 9.0")
    backends = [options.backend] if options.backend else ["cpu"] + (["cuda"] if cuda else [])
    return [
        Variant(
            project=project,
            backend=backend,
            torch=find_torch(project.stable_abi[backend]),
            cuda=cuda if backend == "cuda" else None,
            devices=devices,
            debug=options.debug,
            line_info=options.lineinfo,
        )
        for backend in backends
    ]


def build_kernel(project: Project, options: argparse.Namespace) -> None:
    (project.root / ".build").mkdir(exist_ok=True)
    with open(project.root / ".build/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds in one checkout take turns
        project = Project(project.root)  # as the sources are now, after the wait
        validate(project.root)
        check_shipped_rule(project)
        for variant in variants(project, options):
            archs = variant.archs()
            folder = build(variant, archs, options.jobs)
            print(f"{folder.relative_to(project.root)}: {project.ops_name(variant.backend)}", *(archs or []))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="setup.py", description="Local build of the kernel package, without Nix.")
    commands = parser.add_subparsers(dest="command", required=True)
    kernel = commands.add_parser("build_kernel", help="build the variants in build/")
    kernel.add_argument(
        "--backend", choices=["cpu", "cuda"], help="only this one (default: cpu, and cuda wherever nvcc is found)"
    )
    kernel.add_argument(
        "--arch",
        metavar="9.0,8.0",
        help="only for GPUs of these compute capabilities, or `native` (default: every architecture of build.toml)",
    )
    kernel.add_argument("--debug", action="store_true", help="no optimisation, debug information on host and device")
    kernel.add_argument(
        "--lineinfo",
        action="store_true",
        help="source lines in device code, for profilers and sanitizers; puts this folder's path into the library",
    )
    kernel.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once")
    commands.add_parser("kernel_resources", help="print registers, spills and shared memory of the kernels built last")
    commands.add_parser("source_digest", help="print the digest of everything the package is made of")
    return parser


def main() -> None:
    options = arguments().parse_args()
    try:
        project = Project(ROOT)
        if options.command == "source_digest":
            print(project.digest)
        elif options.command == "kernel_resources":
            print(table(report(ROOT)))
        else:
            build_kernel(project, options)
    except BuildError as error:
        sys.exit(f"error: {error}")
