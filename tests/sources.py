# SPDX-License-Identifier: Apache-2.0
"""What test_build.py and test_structure.py read: the package's files, their includes, their code without comments."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torch-ext" / "gated_deltanet"
GENERATED = {"registration.h", "_ops.py"}  # by kernel-builder or the local build; never committed, never listed
CXX = {".h", ".cuh", ".cpp", ".cu"}

NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'',
    re.DOTALL,
)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.MULTILINE)


def cxx_files(root: Path = ROOT) -> list[str]:
    """Every C++ and CUDA file of csrc/ and the binding, relative to the root."""
    found = [path for path in (*root.glob("csrc/**/*"), *root.glob("torch-ext/*")) if path.suffix in CXX]
    return sorted(path.relative_to(root).as_posix() for path in found if path.name not in GENERATED)


def python_files(folder: Path = PACKAGE) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*.py") if path.name not in GENERATED and path.parts[-2] != "__pycache__"
    )


def code_only(text: str) -> str:
    """C++ text with comments, strings and character literals blanked; the lines keep their numbers."""
    return NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def first_branches(code: str) -> str:
    """Of each #if only the first branch, and no preprocessor lines, so that braces match; lines keep their numbers."""
    kept, skipping, continued = [], [], False
    for line in code.split("\n"):
        directive = re.match(r"\s*#\s*(\w+)", line)
        if directive and directive[1] in ("if", "ifdef", "ifndef"):
            skipping.append(False)
        elif directive and directive[1] in ("else", "elif"):
            skipping[-1] = True
        elif directive and directive[1] == "endif":
            skipping.pop()
        kept.append("" if directive or continued or any(skipping) else line)
        continued = (continued or bool(directive)) and line.endswith("\\")
    return "\n".join(kept)


def system_includes(path: str, root: Path = ROOT) -> list[str]:
    return [name for bracket, name in INCLUDE.findall((root / path).read_text()) if bracket == "<"]


def local_includes(path: str, root: Path = ROOT) -> list[str]:
    """What a file includes in quotes, resolved against its own folder, then csrc/; relative to the root."""
    resolved = []
    for bracket, name in INCLUDE.findall((root / path).read_text()):
        if bracket == '"' and name not in GENERATED:
            candidates = [(root / path).parent / name, root / "csrc" / name]
            file = next((candidate for candidate in candidates if candidate.exists()), candidates[0])
            resolved.append(file.resolve().relative_to(root.resolve()).as_posix())
    return resolved


def module_level_imports(tree: ast.Module) -> list[str]:
    """The top names a module imports when it is imported; relative imports count as `.`, functions are not entered."""
    names, waiting = [], list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names += [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("." if node.level else node.module.split(".")[0])
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
    return sorted(set(names))


def public_names(package: Path = PACKAGE) -> list[str]:
    """The package's `__all__`, which must be one plain list of strings for the hub's card and API checks to read it."""
    tree = ast.parse((package / "__init__.py").read_text())
    lists = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]
    ]
    assert len(lists) == 1, "__init__.py assigns __all__ exactly once"
    assert isinstance(lists[0], ast.List), "__all__ is a list literal"
    assert all(isinstance(item, ast.Constant) and isinstance(item.value, str) for item in lists[0].elts)
    return [item.value for item in lists[0].elts]
