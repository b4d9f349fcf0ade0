# SPDX-License-Identifier: Apache-2.0
"""What is built: build.toml, the digest of the sources it lists, and the CUDA architectures of each section."""

import functools
import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

CAPABILITY = re.compile(r"(\d+)\.(\d+)([af]?)(\+PTX)?")
COMPILED = {".cpp", ".cc", ".cxx", ".cu"}
GENERATED = {"registration.h", "_ops.py"}  # kernel-builder writes these into torch-ext


class BuildError(Exception):
    """Something the person at the keyboard can mend; the message says what."""


@dataclass(frozen=True)
class Section:
    """One section of build.toml that lists sources: [torch] (backend None: every backend) or [kernel.<name>]."""

    name: str
    backend: str | None
    sources: tuple[str, ...]
    include: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    cuda_flags: tuple[str, ...]
    capabilities: tuple[str, ...]

    def compiled(self) -> list[str]:
        return [source for source in self.sources if Path(source).suffix in COMPILED]


class Project:
    """build.toml of the project at `root`, the only list of its sources."""

    def __init__(self, root: Path):
        self.root = root
        try:
            config = tomllib.loads((root / "build.toml").read_text())
        except FileNotFoundError:
            raise BuildError(f"there is no build.toml in {root}") from None
        except tomllib.TOMLDecodeError as error:
            raise BuildError(f"build.toml is not valid TOML: {error}") from None
        self.general = config["general"]
        self.name = self.general["name"]
        self.python_name = self.name.replace("-", "_")
        self.package = root / "torch-ext" / self.python_name
        torch = config["torch"]
        self.stable_abi = torch.get("stable-abi", {})
        self.python_extensions = tuple(torch.get("pyext", ("py", "pyi")))
        self.sections = [_section("torch", torch)]
        self.sections += [_section(name, kernel) for name, kernel in config.get("kernel", {}).items()]

    def sections_for(self, backend: str) -> list[Section]:
        return [section for section in self.sections if section.backend in (None, backend)]

    def listed(self) -> list[str]:
        """Every file build.toml lists, headers too, sorted by path."""
        return sorted({source for section in self.sections for source in section.sources})

    def python_files(self) -> list[Path]:
        """The files of the Python package, relative to it, sorted by path."""
        return sorted(
            path.relative_to(self.package)
            for path in self.package.rglob("*")
            if path.suffix.lstrip(".") in self.python_extensions and path.name not in GENERATED
        )

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over paths and contents of build.toml, every file it lists and the Python package.

        Taken once: one build carries one name, whatever happens to the files meanwhile.
        """
        package = self.package.relative_to(self.root)
        python = [(package / path).as_posix() for path in self.python_files()]
        total = hashlib.sha256()
        for path in sorted(["build.toml", *self.listed(), *python]):
            try:
                content = hashlib.sha256((self.root / path).read_bytes()).hexdigest()
            except FileNotFoundError:
                raise BuildError(f"build.toml lists {path}, which does not exist") from None
            total.update(f"{path} {content}\n".encode())
        return total.hexdigest()

    def ops_name(self, backend: str) -> str:
        """The extension's and the op namespace's name. It carries the digest, so it names these very sources."""
        return f"_{self.python_name}_{backend}_{self.digest[:7]}"


def _section(name: str, table: dict) -> Section:
    def strings(key: str) -> tuple[str, ...]:
        return tuple(table.get(key, ()))

    return Section(
        name=name,
        backend=table.get("backend"),
        sources=strings("src"),
        include=strings("include"),
        cxx_flags=strings("cxx-flags"),
        cuda_flags=strings("cuda-flags"),
        capabilities=strings("cuda-capabilities"),
    )


def parse_capability(capability: str) -> tuple[int, int, str, bool]:
    """`12.0+PTX` -> (12, 0, "", True); `9.0a` -> (9, 0, "a", False)."""
    match = CAPABILITY.fullmatch(capability)
    if match is None:
        raise BuildError(f"{capability!r} is not a CUDA architecture like 9.0, 9.0a or 12.0+PTX")
    return int(match[1]), int(match[2]), match[3], match[4] is not None


def runs_on(capability: str, device: str) -> bool:
    """Whether code built for `capability` runs on a device of compute capability `device` (its suffix is ignored)."""
    major, minor, suffix, ptx = parse_capability(capability)
    device_version = parse_capability(device)[:2]
    if suffix == "a":
        return device_version == (major, minor)
    return device_version[0] == major and device_version[1] >= minor or ptx and device_version >= (major, minor)


def select_capabilities(section: Section, devices: list[str] | None, known: set[tuple[int, int]]) -> list[str]:
    """The architectures a section is compiled for.

    Args:
        section: its `capabilities` are the candidates.
        devices: compute capabilities to restrict the build to; each gets the section's best code for it. A section
            with code for none of them keeps its first architecture, since the others link against its symbols.
            None keeps all.
        known: the (major, minor) that this nvcc can compile; others are left out, as kernel-builder does.
    """
    possible = [capability for capability in section.capabilities if parse_capability(capability)[:2] in known]
    if not possible:
        raise BuildError(f"nvcc supports none of the architectures of [kernel.{section.name}]: {section.capabilities}")
    if devices is None:
        return possible
    chosen = set()
    for device in devices:
        chosen.add(max((c for c in possible if runs_on(c, device)), key=parse_capability, default=None))
    return [capability for capability in possible if capability in chosen] or possible[:1]


def gencode(capability: str) -> list[str]:
    """nvcc's flags for one architecture of build.toml: machine code, and PTX where it is asked for."""
    major, minor, suffix, ptx = parse_capability(capability)
    target = f"{major}{minor}{suffix}"
    flags = [f"-gencode=arch=compute_{target},code=sm_{target}"]
    if ptx:
        flags.append(f"-gencode=arch=compute_{target},code=compute_{target}")
    return flags
