# SPDX-License-Identifier: Apache-2.0
"""The package as the hub sees it: build.toml, the variants that stand in build/, and the local build that made them.

Without a build these tests fail and say so; a build of other sources than these fails too.
"""

import ast
import base64
import hashlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.local_build import build_kernel, check_shipped_rule, install, loose_symbols
from tools.project import BuildError, Project, Section, gencode, runs_on, select_capabilities
from tools.ptxas import report
from tools.toolchain import find_compiler, find_ninja

from .sources import PACKAGE, ROOT, cxx_files, local_includes, public_names, python_files

PROJECT = Project(ROOT)
VARIANTS = sorted(path.name for path in (ROOT / "build").glob("torch*")) or ["no-build"]
NEEDED = re.compile(
    r"libtorch(_cpu)?\.so|libc10\.so|libcudart\.so\.\d+|libstdc\+\+\.so\.6|lib(gcc_s|m|c)\.so\.\d|ld-linux.*"
)
REGISTRATIONS = {
    "custom_op",
    "register_fake",
    "register_kernel",
    "register_vmap",
    "register_torch_dispatch",
    "triton_op",
}

# Layer: what it stands in for in transformers' modeling_qwen3_5.
SLOTS = {
    "Qwen3_5GatedDeltaNet": "Qwen3_5GatedDeltaNet",
    "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn": "causal_conv1d_fn",
    "causal_conv1d_update": "causal_conv1d_update",
    "RMSNormGated": "Qwen3_5RMSNormGated",
    "RMSNormZeroCentered": "Qwen3_5RMSNorm",
}


@pytest.fixture(params=VARIANTS)
def variant(request):
    """The folder of one variant in build/."""
    folder = ROOT / "build" / request.param
    if not folder.is_dir():
        pytest.fail("nothing is built: run `make build`")
    return folder


@pytest.fixture
def library(variant):
    """The one extension of a variant."""
    found = list(variant.glob("*.so"))
    assert len(found) == 1, f"{variant.name} holds {len(found)} libraries: run `make build`"
    return found[0]


def described(variant):
    return json.loads((variant / "metadata.json").read_text())


def output(*command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} on this machine")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# build.toml


def test_build_toml_is_valid():
    from kernels._rust import Build

    Build.open(ROOT)


def test_misspelt_build_toml_is_refused(tmp_path):
    from kernels._rust import Build

    text = (ROOT / "build.toml").read_text()
    (tmp_path / "build.toml").write_text(text.replace("cuda-capabilities", "cuda-capability"))
    with pytest.raises(ValueError, match="cuda-capability"):
        Build.open(tmp_path)


def test_listed_files_exist():
    assert [path for path in PROJECT.listed() if not (ROOT / path).is_file()] == []


def test_every_source_is_listed():
    """A header that build.toml does not list does not exist in the hub's build."""
    assert sorted(set(cxx_files()) - set(PROJECT.listed())) == []


def test_nothing_is_listed_twice():
    sources = [source for section in PROJECT.sections for source in section.sources]
    assert sorted(sources) == PROJECT.listed()


def missing_includes(root, listed):
    return sorted(
        {f"{path} includes {name}" for path in listed for name in local_includes(path, root) if name not in listed}
    )


def test_every_included_header_is_listed():
    assert missing_includes(ROOT, PROJECT.listed()) == []


def test_unlisted_header_is_found(tmp_path):
    (tmp_path / "csrc/common").mkdir(parents=True)
    (tmp_path / "csrc/common/rule.h").write_text("")
    (tmp_path / "csrc/a.cpp").write_text('#include "common/rule.h"\n#include "gone.h"\n#include <cmath>\n')
    found = missing_includes(tmp_path, ["csrc/a.cpp"])
    assert found == ["csrc/a.cpp includes csrc/common/rule.h", "csrc/a.cpp includes csrc/gone.h"]


def test_arithmetic_flags_are_in_build_toml():
    """kernel-builder takes its flags from there, so those that decide bits cannot live in the local build alone.

    The chunk kernels do not follow the bit rule: they may fuse.
    """
    for section in PROJECT.sections:
        if any(source.endswith(".cpp") for source in section.sources):
            assert {"-std=c++17", "-ffp-contract=off"} <= set(section.cxx_flags), section.name
        kernels = [source for source in section.sources if source.endswith(".cu")]
        fuses = kernels and all(source.startswith("csrc/cuda/chunk_") for source in kernels)
        if kernels:
            assert "-std=c++17" in section.cuda_flags, section.name
            assert fuses or "--fmad=false" in section.cuda_flags, section.name


def test_code_for_one_capability_has_a_portable_answer():
    """Every GPU that a section is named for also runs the sections that all calls need"""
    cuda = [section for section in PROJECT.sections_for("cuda") if section.backend]
    portable = [section for section in cuda if not any("a" in capability for capability in section.capabilities)]
    assert len(portable) == 1 and len(cuda) > 1
    for capability in {capability for section in cuda for capability in section.capabilities}:
        device = capability.removesuffix("+PTX").rstrip("a")
        assert any(runs_on(other, device) for other in portable[0].capabilities), capability


# The variants


def test_variant_is_built_from_these_sources(variant):
    backend = described(variant)["backend"]["type"]
    assert described(variant)["id"] == PROJECT.ops_name(backend), "build/ is of other sources: run `make build`"


def test_variant_holds_exactly_the_package(variant, library):
    present = {path.relative_to(variant) for path in variant.rglob("*") if path.is_file()}
    present = {path for path in present if "__pycache__" not in path.parts}  # written by whoever imported it
    made = {Path("_ops.py"), Path("metadata.json"), Path(library.name)}
    assert present == made | set(PROJECT.python_files())
    assert [
        path for path in PROJECT.python_files() if (variant / path).read_bytes() != (PACKAGE / path).read_bytes()
    ] == []


def test_variant_name_is_the_hubs(variant):
    from kernels.variants import parse_variant

    parsed = parse_variant(variant.name)
    backend = described(variant)["backend"]["type"]
    assert parsed.variant_str == variant.name
    assert parsed.arch.backend.name == backend
    assert str(parsed.framework.version) == PROJECT.stable_abi[backend]


def test_metadata_is_complete(variant, library):
    from kernels._rust import Metadata

    metadata = Metadata.read_from_file(variant / "metadata.json")
    about = described(variant)
    assert metadata.id == library.name.removesuffix(".abi3.so") == about["id"]
    assert (str(metadata.name), metadata.version, metadata.license) == ("gated-deltanet", 1, "Apache-2.0")
    assert about["python-depends"] == [] and about["kernel-depends"] == []
    assert ("archs" in about["backend"]) == (about["backend"]["type"] == "cuda")
    assert all(gencode(arch) for arch in about["backend"].get("archs", []))


def test_digest_is_valid(variant):
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    digest = Metadata.read_from_file(variant / "metadata.json").digest
    digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_digest_notices_a_changed_file(variant, tmp_path):
    from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

    copy = shutil.copytree(variant, tmp_path / variant.name)
    with (copy / "__init__.py").open("a") as file:
        file.write("\n")
    with pytest.raises(DigestValidationError, match="__init__.py"):
        digest = Metadata.read_from_file(variant / "metadata.json").digest
        digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, copy))


def test_ops_module_is_the_hubs(variant, library):
    name = library.name.removesuffix(".abi3.so")
    text = (variant / "_ops.py").read_text()
    assert f"from . import {name}\n" in text and f"ops = torch.ops.{name}\n" in text
    assert 'return f"' + name + '::{op_name}"' in text


def test_library_keeps_the_abi_promises(library):
    """Python's stable ABI of 3.9 and manylinux_2_28."""
    kernel_abi_check = pytest.importorskip("kernel_abi_check")
    checked = kernel_abi_check.ObjectFile(library)
    assert checked.check_python_abi("3.9") == []
    assert checked.check_manylinux("manylinux_2_28") == []


def test_library_needs_only_torchs_stable_symbols(library):
    assert "torch_library_impl" in output("nm", "-D", "--undefined-only", str(library))
    assert loose_symbols(library) == []


def test_unstable_symbol_is_found(tmp_path):
    """torch's C++ symbols and our own missing ones are found, the standard library's and torch's C ones are not."""
    source = """
        #include <string>
        extern "C" void aoti_torch_get_sizes();
        namespace at { void sum(); }
        namespace gdn { void rule(int); }
        std::string f() { aoti_torch_get_sizes(); at::sum(); gdn::rule(1); return std::to_string(1.5); }
    """
    (tmp_path / "a.cpp").write_text(source)
    output("g++", "-shared", "-fPIC", str(tmp_path / "a.cpp"), "-o", str(tmp_path / "a.so"))
    assert loose_symbols(tmp_path / "a.so") == ["at::sum()", "gdn::rule(int)"]


def test_library_needs_only_what_torch_brings(library):
    dynamic = output("readelf", "-dW", str(library))
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert {"libtorch.so", "libc10.so"} <= set(needed)
    assert [name for name in needed if not NEEDED.fullmatch(name)] == []
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic


def build_paths(content):
    """Absolute paths of the machine that built it."""
    folders = "|".join(re.escape(folder) for folder in {str(ROOT), sys.prefix, str(Path.home())} if folder != "/")
    return re.findall(rf"(?:{folders}|/(?:home|root|tmp|work|opt|usr/local)/)[\w./-]*".encode(), content)


def test_library_holds_no_path_of_its_builder(library):
    assert build_paths(library.read_bytes()) == []


def test_path_of_the_builder_is_found():
    assert build_paths(b"\0/home/someone/csrc/rule.h\0" + str(ROOT / "csrc").encode()) != []


# The Python package


def test_python_is_3_9():
    """Syntax of 3.9, and no `X | None` that 3.9 would evaluate."""
    for path in python_files():
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        unions = [node for node in annotations(tree) if any(isinstance(part, ast.BitOr) for part in ast.walk(node))]
        assert not unions or "from __future__ import annotations" in path.read_text(), path.name


def annotations(tree):
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                yield getattr(node, field)


def test_newer_python_is_found():
    with pytest.raises(SyntaxError):
        ast.parse("match x:\n    case 1: pass\n", feature_version=(3, 9))
    assert len(list(annotations(ast.parse("def f(x: int | None, *, y: str) -> int: pass")))) == 3


def unprefixed_registrations(tree):
    """Registrations whose op name is not wrapped in add_op_namespace_prefix."""
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in REGISTRATIONS and node.args:
            if not (isinstance(node.args[0], ast.Call) and called(node.args[0]) == "add_op_namespace_prefix"):
                wrong.append(node.lineno)
    return wrong


def called(node):
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def test_registrations_use_the_op_namespace():
    assert {path.name: unprefixed_registrations(ast.parse(path.read_text())) for path in python_files()} == {
        path.name: [] for path in python_files()
    }


def test_unprefixed_registration_is_found():
    planted = "register_fake(add_op_namespace_prefix('y'))\n@torch.library.register_fake('x::y')\ndef f(): pass\n"
    assert unprefixed_registrations(ast.parse(planted)) == [2]


def test_bindings_use_the_op_namespace():
    """In C++ the library's name only ever comes from TORCH_EXTENSION_NAME."""
    text = "".join((ROOT / path).read_text() for path in cxx_files())
    names = re.findall(r"\b(?:STABLE_)?TORCH_LIBRARY(?:_IMPL|_FRAGMENT)?(?:_EXPAND)?\((\w+)", text)
    assert names and set(names) == {"TORCH_EXTENSION_NAME"}


def test_public_names_exist(kernel):
    assert list(kernel.__all__) == public_names()
    assert [name for name in public_names() if not hasattr(kernel, name)] == []


@pytest.mark.kernels_ci
def test_loads_through_get_kernel(monkeypatch):
    from kernels import get_kernel

    if VARIANTS == ["no-build"]:
        pytest.fail("nothing is built: run `make build`")
    monkeypatch.setenv("LOCAL_KERNELS", f"org/gated-deltanet={ROOT}")
    module = get_kernel("org/gated-deltanet", version=1)
    assert hasattr(torch.ops, module.__name__)
    assert Path(module.__file__).parent.parent == ROOT / "build"


def test_layers_fit_their_slots(kernel):
    """Stateless modules whose forward has the slot's signature, and which say what they can do."""
    from kernels.layer.layer import _validate_layer

    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    classes = {name: value for name, value in vars(kernel.layers).items() if inspect.isclass(value)}
    assert classes and set(classes) <= set(SLOTS)
    for name, layer in classes.items():
        slot = getattr(modeling, SLOTS[name])
        _validate_layer(check_cls=slot if inspect.isclass(slot) else type(slot), cls=layer, repo=name)
        assert isinstance(layer.has_backward, bool) and isinstance(layer.can_torch_compile, bool)


# The local build


def cuda_section(*capabilities):
    return Section("x", "cuda", ("x.cu",), (), (), (), capabilities)


@pytest.mark.parametrize(
    ("capability", "gpu", "runs"),
    [
        ("8.0", "8.0", True),
        ("8.0", "8.6", True),
        ("8.9", "8.6", False),
        ("8.0", "9.0", False),
        ("9.0a", "9.0", True),
        ("9.0a", "10.0", False),
        ("12.0+PTX", "12.1", True),
        ("12.0+PTX", "13.0", True),
        ("12.0", "13.0", False),
    ],
)
def test_capability_runs_on_gpu(capability, gpu, runs):
    assert runs_on(capability, gpu) == runs


def test_capabilities_are_the_devices_best():
    known = {(8, 0), (8, 9), (9, 0), (12, 0)}
    portable = cuda_section("8.0", "8.9", "9.0", "10.0", "12.0+PTX")
    assert select_capabilities(portable, None, known) == ["8.0", "8.9", "9.0", "12.0+PTX"]  # 10.0: not this nvcc
    assert select_capabilities(portable, ["9.0"], known) == ["9.0"]
    assert select_capabilities(portable, ["8.6", "12.1"], known) == ["8.0", "12.0+PTX"]
    assert select_capabilities(cuda_section("9.0a"), ["9.0"], known) == ["9.0a"]
    assert select_capabilities(cuda_section("9.0a"), ["8.0"], known) == ["9.0a"]  # its symbols are linked
    with pytest.raises(BuildError, match="10.0"):
        select_capabilities(cuda_section("10.0"), None, known)


def test_arch_means_its_sibling_too():
    """--arch 9.0 compiles 9.0a where a section asks for it; what is compiled for its symbols alone is not announced"""
    from tools import local_build
    from tools.toolchain import Cuda

    known = frozenset({(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)})
    cuda = Cuda("nvcc", (13, 0), Path("include"), Path("libcudart.so"), known)

    def archs(devices):
        return local_build.Variant(PROJECT, "cuda", None, cuda, devices, False, False).archs()

    assert archs(["9.0"]) == ["9.0", "9.0a"]
    assert archs(["8.0"]) == ["8.0"]
    assert archs(None) == ["10.0", "12.0+PTX", "8.0", "8.9", "9.0", "9.0a"]
    with pytest.raises(BuildError, match="7.5"):
        archs(["7.5"])


def test_gencode():
    assert gencode("9.0a") == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert gencode("12.0+PTX")[1:] == ["-gencode=arch=compute_120,code=compute_120"]
    with pytest.raises(BuildError, match="nine"):
        gencode("nine")


def test_install_leaves_nothing_old(tmp_path):
    """A library of another digest, bytecode and files that the package no longer has all go."""
    folder = tmp_path / "variant"
    for stale in ("_gated_deltanet_cpu_0000000.abi3.so", "gone.py", "__pycache__/rule.cpython-311.pyc"):
        (folder / stale).parent.mkdir(parents=True, exist_ok=True)
        (folder / stale).write_bytes(b"stale")
    (tmp_path / "extension.so").write_bytes(b"library")
    install(PROJECT, "cpu", None, tmp_path / "extension.so", folder)
    made = {"_ops.py", "metadata.json", f"{PROJECT.ops_name('cpu')}.abi3.so"}
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == made | {
        path.as_posix() for path in PROJECT.python_files()
    }
    digest = base64.b64encode(hashlib.sha256(b"library").digest()).decode()
    assert described(folder)["digest"]["files"][f"{PROJECT.ops_name('cpu')}.abi3.so"] == digest


def test_ptxas_report_is_read(tmp_path):
    log = tmp_path / ".build/variant/ptxas/csrc.cuda.rule.cu.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function '_Z4rulePf' for 'sm_90a'\n"
        "ptxas info    : Function properties for _Z4rulePf\n"
        "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 3 barriers, 16 bytes cumulative stack size, 1024 bytes smem\n"
    )
    (kernel,) = report(tmp_path)
    assert (kernel.source, kernel.name, kernel.arch) == ("csrc.cuda.rule.cu", "_Z4rulePf", "sm_90a")
    assert (kernel.registers, kernel.spills, kernel.stack, kernel.shared) == (168, 12, 16, 1024)


SMALL_BUILD_TOML = """
[general]
name = "small"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cpu"]
[torch]
src = ["torch-ext/binding.cpp", "csrc/one.cpp"]
[torch.stable-abi]
cpu = "2.10"
[kernel.small_cpu]
backend = "cpu"
depends = ["torch"]
src = ["csrc/one.h"]
"""


@pytest.fixture
def small_project(tmp_path):
    """A project of one source and one header that compiles in a second, since it leaves torch alone."""
    try:
        find_compiler()
        find_ninja()
    except BuildError as missing:
        pytest.skip(str(missing))
    files = {
        "build.toml": SMALL_BUILD_TOML,
        "torch-ext/binding.cpp": '#include "registration.h"\nREGISTER_EXTENSION(TORCH_EXTENSION_NAME)\n',
        "torch-ext/small/__init__.py": "from . import _ops\n",
        "csrc/one.h": "#pragma once\n",
        "csrc/one.cpp": '#include "one.h"\n',
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_local_build_is_incremental(small_project, capfd):
    """The command builds, imports, does nothing twice, and after a change rebuilds what depends on it."""
    from tools.local_build import arguments

    def rebuilt():
        build_kernel(Project(small_project), arguments().parse_args(["build_kernel", "--backend", "cpu"]))
        return sorted(re.findall(r"C\+\+ (\S+)", capfd.readouterr().out))

    assert rebuilt() == [".build/generated/single_threaded.cpp", "csrc/one.cpp", "torch-ext/binding.cpp"]
    assert rebuilt() == []
    first = Project(small_project).ops_name("cpu")
    (small_project / "csrc/one.h").write_text("#pragma once\nextern int one;\n")
    assert rebuilt() == ["csrc/one.cpp", "torch-ext/binding.cpp"]  # the binding carries the digest
    second = Project(small_project).ops_name("cpu")
    (folder,) = (small_project / "build").iterdir()
    assert first != second and [path.name for path in folder.glob("*.so")] == [f"{second}.abi3.so"]
    load = f"import sys; sys.path.insert(0, {str(folder)!r}); import torch, {second}"
    assert subprocess.run([sys.executable, "-B", "-c", load], cwd=small_project, check=False).returncode == 0


def test_sources_that_change_during_the_build_raise(small_project, monkeypatch):
    """Objects of one state of the sources never get the name of another."""
    from tools.local_build import arguments

    compiler = small_project / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "// more" >> {small_project}/csrc/one.h\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match="changed while"):
        build_kernel(Project(small_project), arguments().parse_args(["build_kernel", "--backend", "cpu"]))
    assert not (small_project / "build").exists()


def test_local_build_says_what_is_missing(small_project, monkeypatch):
    from tools.local_build import arguments

    options = arguments().parse_args(["build_kernel", "--backend", "cpu"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler"):
        build_kernel(Project(small_project), options)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("CUDA_HOME", str(small_project))
    with pytest.raises(BuildError, match="nvcc"):
        build_kernel(Project(small_project), arguments().parse_args(["build_kernel", "--backend", "cuda"]))
    (small_project / "csrc/one.h").unlink()
    with pytest.raises(BuildError, match="csrc/one.h"):
        build_kernel(Project(small_project), options)


def test_stale_copy_of_the_rule_is_refused(tmp_path):
    """The package ships csrc/common/rule.h as it is; a missing or an old copy stops the build"""
    check_shipped_rule(PROJECT)
    (tmp_path / "build.toml").write_text(SMALL_BUILD_TOML.replace('"csrc/one.cpp"', '"csrc/common/rule.h"'))
    for folder in ("csrc/common", "torch-ext/small"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "csrc/common/rule.h").write_text("// the rule\n")
    for stale in (None, "// an older rule\n"):
        if stale is not None:
            (tmp_path / "torch-ext/small/rule.h").write_text(stale)
        with pytest.raises(BuildError, match="torch-ext/small/rule.h is not csrc/common/rule.h"):
            check_shipped_rule(Project(tmp_path))
    (tmp_path / "torch-ext/small/rule.h").write_text("// the rule\n")
    check_shipped_rule(Project(tmp_path))
