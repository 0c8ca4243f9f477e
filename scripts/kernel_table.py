"""Write kernels/triton/compiled.md: resources of the Triton kernels on GPUs; no GPU is needed.

scripts/kernel-table             compiles all kernels, writes the page
scripts/kernel-table --check     writes nothing; exits 1 and names the kernels that differ from it
scripts/kernel-table --only X    only those whose module or name contains X; prints their tables

Whatever is done, a kernel that breaks a limit is named, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Triton reads these when it is imported: to interpret kernels, for tools and options of its own.
CHANGES_RESULTS = ("TRITON_", "AMDGCN_", "LLVM_", "MLIR_", "PTXAS_", "DISABLE_", "USE_IR_LOC")
for variable in [name for name in os.environ if name.startswith(CHANGES_RESULTS)]:
    del os.environ[variable]

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hardpoint.kernels.triton.launch import Variant  # noqa: E402

PAGE = Path(__file__).resolve().parent.parent / "kernels" / "triton" / "compiled.md"
NOTE = "<!-- Written by scripts/kernel-table from the kernels. Change them, then run it again. -->"
REGISTER_UNIT = 8
"""Registers of a thread are allocated in multiples of it."""


@dataclass(frozen=True)
class Target:
    """An architecture for which kernels are compiled.

    Attributes:
        gpus: those that have it.
        backend, arch, warp_size: as Triton names them.
        registers: of 32 bits, in the file that the threads of a program share.
        shared: bytes of shared memory that a program may have.
    """

    name: str
    gpus: str
    backend: str
    arch: int | str
    warp_size: int
    registers: int
    shared: int


TARGETS = (
    Target("sm_80", "A100", "cuda", 80, 32, 65536, 163 * 1024),
    Target("sm_90", "H100, H200", "cuda", 90, 32, 65536, 227 * 1024),
    Target("gfx942", "MI300X", "hip", "gfx942", 64, 131072, 64 * 1024),
)


@dataclass(frozen=True)
class Figures:
    """Resources of a compiled kernel.

    Attributes:
        registers: of each thread.
        spilled: bytes of memory of each thread, for what has no register.
        shared: bytes of shared memory of each program.
    """

    registers: int
    spilled: int
    shared: int


@dataclass(frozen=True)
class Result:
    """A kernel that was compiled for a target; `error` says why it could not be."""

    module: str
    variant: Variant
    target: Target
    figures: Figures | None
    error: str = ""

    def problems(self) -> Iterator[str]:
        """Yield the limits that it breaks, with its name."""
        name = f"{self.module}: {self.variant.name!r}: {self.target.name}"
        if self.figures is None:
            yield f"{name}: does not compile: {self.error}"
            return
        figures, target = self.figures, self.target
        threads = self.variant.num_warps * target.warp_size
        taken = -(-figures.registers // REGISTER_UNIT) * REGISTER_UNIT * threads
        if taken > target.registers:
            each = f"{figures.registers} for each of {threads} threads"
            yield f"{name}: {taken} registers, {each}; the limit is {target.registers}"
        if figures.spilled:
            yield f"{name}: {figures.spilled} bytes of registers are spilled; the limit is 0"
        if figures.shared > target.shared:
            yield f"{name}: {figures.shared} bytes of shared memory; the limit is {target.shared}"


def main() -> int:
    """Compile kernels, write or check the page; return the exit code."""
    parser = argparse.ArgumentParser(description="Compile the kernels for GPUs; write the table.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check", action="store_true", help="only report whether the page is stale"
    )
    action.add_argument("--only", metavar="NAME", default="", help="kernels with it in their names")
    parser.add_argument("--package", default="hardpoint.kernels.triton", help="of the kernels")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page is")
    options = parser.parse_args()
    tables = read_variants(options.package, options.only)
    if not any(tables.values()):
        parser.error(f"no kernel of {options.package} has {options.only!r} in its name")
    results = compile_all(tables)
    text = page(results)
    problems = [problem for result in results for problem in result.problems()]
    if options.only:
        print(text[text.index("\n## ") + 1 :], end="")
    elif options.check:
        problems += stale(options.page, text)
    elif not problems:
        options.page.write_text(text, encoding="utf-8")
        print(f"wrote {options.page}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def read_variants(package: str, only: str = "") -> dict[str, list[Variant]]:
    """Return the variants of each module of a package that has some."""
    path = importlib.import_module(package).__path__
    tables = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(path)):
        variants = getattr(importlib.import_module(f"{package}.{name}"), "VARIANTS", ())
        names = [variant.name for variant in variants]
        if twice := {variant for variant in names if names.count(variant) > 1}:
            raise SystemExit(f"{package}.{name}: variants that have the same name: {sorted(twice)}")
        if matches := [v for v in variants if only in name or only in v.name]:
            tables[name] = matches
    return tables


def compile_all(tables: Mapping[str, Sequence[Variant]]) -> list[Result]:
    """Compile all variants for all targets, in a process for each processor."""
    # Kernels cannot be pickled; processes have them by being forked, and are given their places.
    tasks = [
        (module, index, target)
        for module, variants in tables.items()
        for index in range(len(variants))
        for target in TARGETS
    ]
    results = []
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="kernel-table-") as folder,
        multiprocessing.get_context("fork").Pool(
            os.cpu_count(), _start_worker, (folder, tables)
        ) as pool,
    ):
        for (module, index, target), done in zip(tasks, pool.imap(_compile, tasks), strict=True):
            results.append(Result(module, tables[module][index], target, *done))
            if index == len(tables[module]) - 1 and target is TARGETS[-1]:
                seconds = time.monotonic() - started
                print(f"{module}: compiled after {seconds:.0f} s", file=sys.stderr, flush=True)
    return results


_tables: Mapping[str, Sequence[Variant]] = {}


def _start_worker(folder: str, tables: Mapping[str, Sequence[Variant]]) -> None:
    global _tables
    _tables = tables
    triton.knobs.cache.dir = folder


def _compile(task: tuple[str, int, Target]) -> tuple[Figures | None, str]:
    """Return the resources of a variant on a target, or why it cannot be compiled."""
    module, index, target = task
    variant = _tables[module][index]
    try:
        source = ASTSource(variant.kernel, *_signature(variant))
        compiled = triton.compile(
            source,
            target=GPUTarget(target.backend, target.arch, target.warp_size),
            options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
        )
        read = _read_cubin if target.backend == "cuda" else _read_amdgcn
        registers, spilled = read(compiled)
        return Figures(registers, spilled, compiled.metadata.shared), ""
    except Exception as error:  # whatever a compiler raises
        return None, f"{type(error).__name__}: {error}"


def _signature(
    variant: Variant,
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[tuple[str, int]]]]:
    """Return the types, constants and attributes of a kernel's arguments."""
    names = variant.kernel.arg_names
    if missing := set(names) ^ (variant.types.keys() | variant.constants.keys()):
        raise ValueError(f"arguments without a type, or types without an argument: {missing}")
    types, attributes = {}, {}
    for place, name in enumerate(names):
        type_name = "constexpr" if name in variant.constants else variant.types[name]
        if type_name.startswith("*") or type_name.endswith(":16"):
            attributes[(place,)] = [("tt.divisibility", 16)]
        types[name] = type_name.removesuffix(":16")
    return types, dict(variant.constants), attributes


def _read_cubin(compiled: Any) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes that it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = said.split(f"Function {compiled.metadata.name}:")[1].splitlines()[1]
    numbers = {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", usage)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def _read_amdgcn(compiled: Any) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes that it spills."""
    numbers = dict(re.findall(r"^\s*[.](\w+):\s+(\d+)$", compiled.asm["amdgcn"], re.MULTILINE))
    return int(numbers["vgpr_count"]), int(numbers["private_segment_fixed_size"])


def page(results: Sequence[Result]) -> str:
    """Return the page of compiled kernels."""
    lines = [
        "# GPU kernels",
        "",
        NOTE,
        "",
        "Resources of the Triton kernels of `kernels/triton` on GPUs, compiled ahead of time,",
        f"without a GPU, for shapes that common models have, with triton {triton.__version__}.",
        "A kernel that breaks a limit, or a figure that is not the one below, fails",
        "`scripts/kernel-table --check`, which `scripts/test --all` runs; nothing here is a speed.",
        "",
        "| limits | GPUs | registers of a program | spilled bytes | shared KiB of a program |",
        "|---|---|---|---|---|",
    ]
    for target in TARGETS:
        limits = f"{target.registers} | 0 | {target.shared // 1024}"
        lines.append(f"| {target.name} | {target.gpus} | {limits} |")
    lines += [
        "",
        "Below are registers of a thread, bytes of memory that a thread takes for values without",
        "register, and KiB of shared memory of a program; a warp has 32 threads on sm_80 and",
        "sm_90, and 64 on gfx942.",
        "",
    ]
    for module in dict.fromkeys(result.module for result in results):
        lines += _module_lines(module, [r for r in results if r.module == module])
    return "\n".join(lines).rstrip() + "\n"


def _module_lines(module: str, results: Sequence[Result]) -> list[str]:
    """Return the section of a module."""
    titles = [
        f"{t.name} {figure}" for t in TARGETS for figure in ("registers", "spilled", "shared")
    ]
    titles = ["kernel", "warps", "stages", *titles]
    lines = [f"## {module}", "", "| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for at in range(0, len(results), len(TARGETS)):
        row = results[at : at + len(TARGETS)]
        variant = row[0].variant
        cells = [variant.name.replace("|", "\\|"), str(variant.num_warps), str(variant.num_stages)]
        for result in row:
            figures = result.figures
            cells += [""] * 3 if figures is None else _cells(figures)
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _cells(figures: Figures) -> list[str]:
    shared = f"{figures.shared / 1024:.2f}".rstrip("0").rstrip(".")
    return [str(figures.registers), str(figures.spilled), shared]


def stale(path: Path, text: str) -> Iterator[str]:
    """Yield the differences between a page and its expected text."""
    written = path.read_text(encoding="utf-8") if path.exists() else ""
    if written == text:
        return
    version = re.search(r"with triton (\S+)[.]$", written, re.MULTILINE)
    if version and version[1] != triton.__version__:
        both = f"{path} is of triton {version[1]}, and this is {triton.__version__}"
        print(f"{both}: only the limits were checked", file=sys.stderr)
        return
    old, new = written.splitlines(), text.splitlines()
    yield from (f"compiled: {line}" for line in new if line not in old)
    yield from (f"on the page: {line}" for line in old if line not in new)
    yield f"{path} is stale; run scripts/kernel-table"


if __name__ == "__main__":
    sys.exit(main())
