"""The table of compiled kernels is what `scripts/kernel-table` finds, and has all of them."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import ROOT

PAGE = ROOT / "kernels" / "triton" / "compiled.md"
KERNELS = ROOT / "kernels" / "triton"
MODULES = sorted(
    path.stem for path in KERNELS.glob("*.py") if "@triton.jit" in path.read_text(encoding="utf-8")
)

ROWS = """
import triton
import triton.language as tl

from hardpoint.kernels.triton.launch import Variant


@triton.jit
def subtract_max(x, y, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    row = tl.load(x + at, mask=at < count)
    tl.store(y + at, row - tl.max(row), mask=at < count)


TYPES = {"x": "*fp32", "y": "*fp32", "count": "i32:16"}
VARIANTS = [Variant("few columns", subtract_max, TYPES, {"SIZE": 512})]
"""
BROKEN = """
VARIANTS += [
    Variant("a large row", subtract_max, TYPES, {"SIZE": 8192}, num_warps=1),
    Variant("a lost size", subtract_max, TYPES),
]
"""


def kernel_table(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script, which is to ignore that the tests interpret kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    if path is not None:
        found = [str(path), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, found))
        arguments = ("--package", "tiny_kernels", "--page", str(path / "page.md"), *arguments)
    command = [sys.executable, str(ROOT / "scripts" / "kernel_table.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def folder(tmp_path):
    """A folder with a package of kernels."""
    (tmp_path / "tiny_kernels").mkdir()
    (tmp_path / "tiny_kernels" / "__init__.py").write_text("")
    (tmp_path / "tiny_kernels" / "rows.py").write_text(ROWS)
    return tmp_path


@pytest.mark.nightly
def test_what_breaks_a_limit_is_named(folder):
    with (folder / "tiny_kernels" / "rows.py").open("a") as file:
        file.write(BROKEN)
    done = kernel_table(path=folder)
    assert done.returncode == 1
    assert "few columns" not in done.stderr
    for target in ("sm_80", "sm_90"):
        spilled = rf"^rows: 'a large row': {target}: [1-9]\d+ bytes .* spilled; the limit is 0$"
        assert re.search(spilled, done.stderr, re.MULTILINE), done.stderr
    assert (
        "rows: 'a lost size': gfx942: does not compile: ValueError: arguments without a type"
        in (done.stderr)
    )
    assert not (folder / "page.md").exists()


@pytest.mark.nightly
def test_check_names_what_differs_and_writes_nothing(folder):
    page = folder / "page.md"
    assert kernel_table(path=folder).returncode == 0
    written = page.read_text()
    (row,) = [line for line in written.splitlines() if line.startswith("| few columns |")]
    figures = row.split(" | ")[1:]
    assert figures[:2] == ["4", "2"]
    assert all(1 < float(count) < 64 for count in figures[2::3])
    assert {*figures[3::3]} == {"0"}
    assert kernel_table("--check", path=folder).returncode == 0

    page.write_text(old := written.replace(row, row.replace(" | 0 | ", " | 8 | ", 1)))
    done = kernel_table("--check", path=folder)
    assert done.returncode == 1
    assert f"compiled: {row}" in done.stderr
    assert f"{page} is stale; run scripts/kernel-table" in done.stderr
    assert page.read_text() == old


@pytest.mark.nightly
def test_of_another_version_of_triton_limits_are_checked(folder):
    page = folder / "page.md"
    page.write_text("It was made with triton 3.1.0.\n")
    done = kernel_table("--check", path=folder)
    assert done.returncode == 0
    assert f"{page} is of triton 3.1.0, and this is " in done.stderr
    assert "only the limits were checked" in done.stderr
    with (folder / "tiny_kernels" / "rows.py").open("a") as file:
        file.write(BROKEN)
    assert kernel_table("--check", path=folder).returncode == 1


@pytest.mark.nightly
def test_names_are_given_once_and_those_asked_for_exist(folder):
    done = kernel_table("--only", "nothing", path=folder)
    assert done.returncode == 2
    assert "no kernel of tiny_kernels has 'nothing' in its name" in done.stderr
    with (folder / "tiny_kernels" / "rows.py").open("a") as file:
        file.write("VARIANTS *= 2\n")
    done = kernel_table(path=folder)
    assert done.returncode == 1
    assert "tiny_kernels.rows: variants that have the same name: ['few columns']" in done.stderr


@pytest.mark.nightly
def test_all_kernels_are_compiled_as_on_the_page():
    done = kernel_table("--check")
    assert done.returncode == 0, done.stderr


def variants(module):
    """Return those of a module; one of functions that kernels of others share has none."""
    loaded = importlib.import_module(f"hardpoint.kernels.triton.{module}")
    return getattr(loaded, "VARIANTS", ())


@pytest.mark.parametrize("module", MODULES)
def test_the_page_has_every_variant(module):
    section = (PAGE.read_text() + f"\n## {module}\n").split(f"\n## {module}\n")[1].split("\n## ")[0]
    names = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    # The first row is of titles. Other launch parameters may be those of the interpreter here.
    assert names[1:] == [f"| {variant.name}" for variant in variants(module)]


@functools.cache
def jitted(module):
    """Return the functions of a module that Triton compiles."""
    tree = ast.parse((KERNELS / f"{module}.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    marked = {n for n in functions if any("triton.jit" in ast.unparse(d) for d in n.decorator_list)}
    return {node.name: node for node in functions if node in marked}


@functools.cache
def used_names():
    """Return the names that the functions which Triton compiles use."""
    functions = [node for module in MODULES for node in jitted(module).values()]
    return {n.id for node in functions for n in ast.walk(node) if isinstance(n, ast.Name)}


@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_is_in_the_table(module):
    """A kernel is what no other function that Triton compiles uses."""
    kernels = jitted(module).keys() - used_names()
    assert kernels <= {variant.kernel.fn.__name__ for variant in variants(module)}
