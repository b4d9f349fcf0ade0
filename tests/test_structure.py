# SPDX-License-Identifier: Apache-2.0
"""A line knows its room: reads the sources and fails on an include or an import that points backwards.

The rooms, from the bottom: common feeds all; ptx -> tile -> kernel -> api -> binding -> Python op -> layer. What is
checked here needs neither a build nor torch. Each check has a control that must fail.
"""

import ast
import re
from pathlib import Path

import pytest

from .sources import (
    PACKAGE,
    ROOT,
    code_only,
    cxx_files,
    first_branches,
    local_includes,
    module_level_imports,
    public_names,
    python_files,
    system_includes,
)

# Room: the rooms that it may include from. `entry` is a backend's list of entry points, csrc/<backend>/ops.h.
MAY_INCLUDE = {
    "common": {"common"},
    "cpu": {"common", "cpu", "entry"},
    "ptx": {"ptx"},
    "tile": {"common", "ptx", "tile"},
    "kernel": {"common", "ptx", "tile", "kernel", "entry"},
    "entry": {"common"},
    "api": {"common", "entry", "api", "declarations"},
    "declarations": set(),
    "binding": {"declarations"},
}
# Room: what it never holds, as a pattern over its code without comments and strings, and why.
NEVER_HOLDS = {
    "common": [
        (r"\basm\b|__CUDA_ARCH__ *[<>=!]|__CUDA_ARCH_(?!_\b)", "host or device is asked here, not which device")
    ],
    "cpu": [
        (r"\basm\b|\bat::|\btorch::", "neither instructions by name nor torch"),
        (r"\b(?:CPU_KERNEL|CUDA_KERNEL|USE_CUDA|TORCH_\w+)\b", "compiled once for all variants, so it knows of none"),
    ],
    "ptx": [],
    "tile": [(r"\basm\b|__CUDA_ARCH", "instructions and architectures belong in ptx/"), (r"\bblockIdx\b", "no grid")],
    "kernel": [(r"\basm\b|__CUDA_ARCH", "instructions and architectures belong in ptx/")],
    "entry": [(r"\{[^}]*;[^}]*\breturn\b", "declarations only")],
    "api": [(r"\basm\b|<<<", "no instructions, no launches")],
    "declarations": [],
    "binding": [(r"\basm\b|<<<", "no instructions, no launches")],
}
TORCH_HEADER = re.compile(r"(torch|ATen|c10)/")
CUDA_RUNTIME_HEADER = re.compile(
    r"cuda(_runtime.*|_runtime_api|)\.h|cooperative_groups.*|cuda/.*|cub/.*|thrust/.*|mma\.h"
)
INTRINSICS_HEADER = re.compile(r"(\w*intrin|arm_\w+)\.h")
# folders whose kernels are built from the parts of another's
BUILT_ON = {"csrc/cuda/chunk_sm90/": ("csrc/cuda/chunk_mma/",)}
MOST_LINES_OF_A_FILE = 600
MOST_LINES_OF_A_FUNCTION = 80


def room(path: str) -> str:
    """The room of a C++ file, by its place."""
    if path.startswith("torch-ext/"):
        return "declarations" if path.endswith(".h") else "binding"
    if re.fullmatch(r"csrc/(cpu|cuda)/ops\.h", path):
        return "entry"
    for folder in ("cuda/ptx", "cuda/tile", "common", "cpu", "api", "cuda"):
        if path.startswith(f"csrc/{folder}/"):
            return {"cuda/ptx": "ptx", "cuda/tile": "tile", "cuda": "kernel"}.get(folder, folder)
    raise AssertionError(f"{path} is in no room of the floor plan")


def wrong_includes(root: Path) -> list[str]:
    """Every include that points at a room its file may not see."""
    wrong = []
    for path in cxx_files(root):
        for target in local_includes(path, root):
            if room(target) not in MAY_INCLUDE[room(path)]:
                wrong.append(f"{path} ({room(path)}) includes {target} ({room(target)})")
            if target.endswith("cuda/launch.cuh") and not path.endswith(".cu"):
                wrong.append(f"{path} includes {target}, which is for launchers, in .cu files")
            kernel_folder = re.match(r"csrc/cuda/\w+/", target)
            own = (kernel_folder[0], *BUILT_ON.get(kernel_folder[0], ())) if kernel_folder else ()
            if room(target) == "kernel" and own and not path.startswith(own):
                wrong.append(f"{path} includes {target}, which is private to its kernel")
        for name in system_includes(path, root):
            if TORCH_HEADER.match(name) and room(path) not in ("api", "declarations", "binding"):
                wrong.append(f"{path} includes <{name}>: torch is for api/ and the binding")
            if CUDA_RUNTIME_HEADER.fullmatch(name) and room(path) not in ("ptx", "tile", "kernel"):
                wrong.append(f"{path} includes <{name}>: the CUDA runtime is for csrc/cuda/")
            if INTRINSICS_HEADER.fullmatch(name) and not re.match(r"csrc/cpu/(simd|isa)\w*\.h", path):
                wrong.append(f"{path} includes <{name}>: intrinsics are for csrc/cpu/simd*.h and isa*.h")
    return wrong


def misplaced_code(root: Path) -> list[str]:
    """Every line that holds what its room never holds."""
    wrong = []
    for path in cxx_files(root):
        code = code_only((root / path).read_text())
        for pattern, why in NEVER_HOLDS[room(path)]:
            for match in re.finditer(pattern, code):
                wrong.append(f"{path}:{code.count(chr(10), 0, match.start()) + 1} `{match[0].strip()}`: {why}")
        if room(path) == "kernel" and not path.endswith(".cu") and "<<<" in code:
            wrong.append(f"{path} launches a kernel, which is a launcher's work, in a .cu file")
    return wrong


def long_cxx_functions(text: str, most: int) -> list[tuple[int, int]]:
    """(line, lines) of every block longer than `most` that is not a namespace, a type or an extern "C"."""
    code, long = first_branches(code_only(text)), []
    opened: list[tuple[bool, int]] = []  # of each open brace: does it only contain declarations, and where
    for match in re.finditer(r"[{}]", code):
        if match[0] == "{":
            head = re.split(r"[;{}]", code[: match.start()])[-1]
            container = re.search(r"\b(namespace|struct|class|union|enum|extern)\b", head) and "(" not in head
            opened.append((bool(container), match.start()))
        elif opened:
            container, start = opened.pop()
            lines = code.count("\n", start, match.start()) + 1
            if lines > most and not container and all(outer for outer, _ in opened):
                long.append((code.count("\n", 0, start) + 1, lines))
    return long


def long_python_functions(text: str, most: int) -> list[tuple[int, int]]:
    """(line, lines) of every function longer than `most`, its docstring and signature not counted."""
    long = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            lines = node.end_lineno - first.lineno + 1
            if lines > most:
                long.append((node.lineno, lines))
    return long


def all_code() -> list[str]:
    folders = ("torch-ext", "tests", "tools", "benchmarks", "examples")
    python = [path for folder in folders for path in python_files(ROOT / folder)]
    return cxx_files() + [path.relative_to(ROOT).as_posix() for path in python] + ["setup.py"]


def documented_arguments(docstring: str) -> list[str]:
    """The names in a docstring's Args section: `q, k: [B, T, Hk, K] ...` documents q and k."""
    section = re.search(r"^( *)Args:\n((?:\1 +.*\n|\s*\n)*)", docstring + "\n", re.MULTILINE)
    if section is None:
        return []
    indent = min(len(line) - len(line.lstrip()) for line in section[2].splitlines() if line.strip())
    entries = re.findall(rf"^ {{{indent}}}((?:\*{{0,2}}\w+, )*\*{{0,2}}\w+)(?: \([^)]*\))?:", section[2], re.MULTILINE)
    return [name.lstrip("*") for entry in entries for name in entry.split(", ")]


def undocumented(function: ast.FunctionDef) -> list[str]:
    """What differs between a function's signature and its docstring."""
    arguments = function.args
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    named += [argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument]
    told = documented_arguments(ast.get_docstring(function) or "")
    missing = [f"{function.name}: {name} is not in the docstring's Args" for name in named if name not in told]
    return missing + [
        f"{function.name}: the docstring tells of {name}, no argument" for name in told if name not in named
    ]


def public_functions() -> list[ast.FunctionDef]:
    names = set(public_names())
    trees = [ast.parse(path.read_text()) for path in python_files()]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = {}
    for function in functions:
        if function.name in names and not (function.name in found and not ast.get_docstring(function)):
            found[function.name] = function
    return list(found.values())


def test_includes_point_one_way():
    assert wrong_includes(ROOT) == []


def test_each_room_holds_only_its_own():
    assert misplaced_code(ROOT) == []


def test_rule_header_stands_alone():
    """The emitted program carries csrc/common/rule.h, so it includes nothing of ours."""
    assert local_includes("csrc/common/rule.h") == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("csrc/common/view.h", '#include "../api/checks.h"'),
        ("csrc/common/view.h", "#include <torch/csrc/stable/tensor.h>"),
        ("csrc/cpu/recurrent.cpp", "#include <immintrin.h>"),
        ("csrc/cuda/tile/copy.cuh", '#include "../chunk_sm90/config.h"'),
        ("csrc/cuda/chunk_sm80/kernel.cuh", '#include "../chunk_sm90/config.h"'),
        ("csrc/cuda/chunk_sm80/kernel.cuh", '#include "../launch.cuh"'),
        ("csrc/api/checks.h", "#include <cuda_runtime.h>"),
    ],
)
def test_planted_include_is_found(tmp_path, path, line):
    for file in ("csrc/api/checks.h", "csrc/cuda/chunk_sm90/config.h", "csrc/cuda/launch.cuh", path):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("// nothing\n")
    assert wrong_includes(tmp_path) == []
    (tmp_path / path).write_text(f"#pragma once\n{line}\n")
    assert wrong_includes(tmp_path) != []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("csrc/cuda/recurrent/kernel.cuh", 'asm volatile("bar.sync 0;");'),
        ("csrc/cuda/chunk_sm90/kernel.cuh", "#if __CUDA_ARCH_FEAT_SM90_ALL"),
        ("csrc/cuda/chunk_sm90/kernel.cuh", "kernel<<<1, 32>>>();"),
        ("csrc/cuda/tile/copy.cuh", "int x = blockIdx.x;"),
        ("csrc/common/rule.h", "#if __CUDA_ARCH__ >= 900"),
        ("csrc/api/rule.cpp", "kernel<<<1, 32>>>();"),
    ],
)
def test_planted_code_is_found(tmp_path, path, line):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(f'// {line}\nconst char* s = "asm <<< blockIdx";\n')
    assert misplaced_code(tmp_path) == []
    (tmp_path / path).write_text(f"\n{line}\n")
    assert len(misplaced_code(tmp_path)) == 1


def test_files_are_short():
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in all_code()}
    assert {path: count for path, count in lines.items() if count > MOST_LINES_OF_A_FILE} == {}


def test_functions_are_short():
    long = {}
    for path in all_code():
        measure = long_python_functions if path.endswith(".py") else long_cxx_functions
        found = measure((ROOT / path).read_text(), MOST_LINES_OF_A_FUNCTION)
        long.update({f"{path}:{line}": lines for line, lines in found})
    assert long == {}


def test_long_functions_are_found():
    body = "  x += 1;\n" * 90
    cxx = 'namespace a {\nstruct B {\n  int c = 0;\n};\nextern "C" {\nvoid f(struct B b) {\n' + body + "}\n}\n}\n"
    assert long_cxx_functions(cxx, 80) == [(6, 92)]
    assert long_python_functions("def f():\n" + "    x = 1\n" * 90, 80) == [(1, 90)]


def test_no_loose_ends():
    """A TODO names its issue, as TODO(#12)."""
    loose = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))")
    assert [
        path for path in all_code() if path != "tests/test_structure.py" and loose.search((ROOT / path).read_text())
    ] == []


def test_files_name_their_licence():
    unnamed = [
        path for path in all_code() if "SPDX-License-Identifier: Apache-2.0" not in (ROOT / path).read_text()[:200]
    ]
    assert [path for path in unnamed if (ROOT / path).stat().st_size] == []


def test_python_rooms():
    """reference.py stands alone, layers.py calls the ops' functions only, few know transformers."""
    for path in python_files():
        text = path.read_text()
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        modules = {node.module or "" for node in imports if isinstance(node, ast.ImportFrom) and node.level}
        outside = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
        outside |= {node.module for node in imports if isinstance(node, ast.ImportFrom) and not node.level}
        if path.name == "reference.py":
            assert modules == set(), "reference.py imports nothing of the package"
        if path.name == "layers.py":
            assert "_ops" not in modules, "layers.py calls Python functions, not the ops"
        if path.name not in ("integration.py", "layers.py"):
            assert not {name for name in outside if name.split(".")[0] in ("transformers", "kernels")}, path.name


def test_module_level_imports_are_torch_standard_or_relative():
    import sys

    allowed = {"torch", "."} | set(sys.stdlib_module_names)
    for path in python_files():
        imports = module_level_imports(ast.parse(path.read_text()))
        assert set(imports) <= allowed, f"{path.name} imports {sorted(set(imports) - allowed)} at module level"


def test_module_level_import_is_found():
    planted = "import os\nif os.name:\n    import numpy.linalg\ndef f():\n    import transformers\n"
    assert module_level_imports(ast.parse(planted)) == ["numpy", "os"]


def test_docstrings_name_every_argument():
    functions = public_functions()
    assert {function.name for function in functions} == set(public_names()) - {"layers"}
    assert [line for function in functions for line in undocumented(function)] == []


def test_wrong_docstring_is_found():
    planted = '''
def f(q, k, *, scale=None):
    """One line.

    Args:
        q, v: [B]
            more: of it
        scale: 1
    Returns:
        o: [B]
    """
'''
    function = ast.parse(planted).body[0]
    assert undocumented(function) == ["f: k is not in the docstring's Args", "f: the docstring tells of v, no argument"]


def test_package_has_its_files():
    assert (PACKAGE / "__init__.py").is_file()
    assert "layers" in public_names(), "the hub finds layers through __all__"
    assert not (PACKAGE / PACKAGE.name).exists(), "the hub refuses a package inside the package"
