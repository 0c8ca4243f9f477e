"""Build `hardpoint-core`, the second distribution of this tree: Hardpoint with nine requirements.

  scripts/build-core OUT          writes OUT/hardpoint_core-VERSION-py3-none-any.whl
  scripts/build-core --list       prints its modules, its entry points, and what it leaves out

It has the same import package. What comes along follows from the imports: a module is left out if
it needs a requirement of `hardpoint` that is not one of the nine, or a module that is left out.
Of the contract, the registry, the core and the kit, what a module imports when it is used does not
count: it belongs to components that are left out. An import in a `try` for ImportError never does.
Entry points whose modules are left out move to groups from which errors know what to install. The
kernels for CPUs are not compiled. Needs the packages `build` and `setuptools`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hardpoint"

# By what they are imported as.
CORE = {
    "cloudpickle": "cloudpickle",
    "huggingface_hub": "huggingface_hub",
    "importlib_metadata": "importlib_metadata",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "pluggy": "pluggy",
    "psutil": "psutil",
    "torch": "torch",
    "zmq": "pyzmq",
}
# Of `hardpoint` they are optional too, and whoever uses one says what is missing.
OPTIONAL = {"hypothesis", "opentelemetry", "pytest", "ray", "redis", "triton", "xgrammar"}
EXTRAS = ("testing", "gpu", "opentelemetry", "ray", "redis")

# Packages of which everything comes that can; of the others, what these and the entry points reach.
WHOLE = (
    "boundary",
    "core",
    "errors",
    "features",
    "journal",
    "live",
    "plugins",
    "registry",
    "replicas",
    "simulation",
    "system",
    "testing",
    "toolkit",
    "typed",
)
FRONT = (PACKAGE, f"{PACKAGE}.__main__")

LEFT_OUT = f"{PACKAGE}_left_out"
"""Group of the entry points that are left out, before their kind; `registry.discovery` reads it."""

_NAMED = re.compile(rf"""["']({PACKAGE}(?:\.\w+)*)[:"']""")
"""Text that names a module, as in `"hardpoint.a.b:Name"`."""
_NESTED = (ast.stmt, ast.excepthandler, ast.match_case)
"""Nodes that may have imports in them."""

DESCRIPTION = """\
# hardpoint-core

The engine of Hardpoint with nine requirements, for programs that bring
the rest themselves: a tokenizer, a loader of weights, a server. The import
package is `hardpoint`, as that of the distribution `hardpoint`, which has all
of it and more: install one of the two, never both.
"""


@dataclass
class Module:
    """A module of the source.

    Attributes:
        path: of its file.
        needed: modules and packages whose absence it does not survive, by their full names.
        used: these, and those whose absence it does.
    """

    path: Path
    needed: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Contents:
    """What the distribution has.

    Attributes:
        modules: their files, by name.
        points: entry points by group and name.
        left_out: those of `hardpoint` that it has not.
        reasons: why a module is left out, by its name.
    """

    modules: Mapping[str, Path]
    points: Mapping[str, Mapping[str, str]]
    left_out: Mapping[str, Mapping[str, str]]
    reasons: Mapping[str, str]


def read_modules(project: Mapping[str, Any], root: Path = ROOT) -> dict[str, Module]:
    """Return all modules of the distribution `hardpoint`, with what they import."""
    folders = project["tool"]["setuptools"]["package-dir"]
    found: dict[str, Module] = {}
    for package in project["tool"]["setuptools"]["packages"]:
        top = next(
            name
            for name in sorted(folders, key=len, reverse=True)
            if f"{package}.".startswith(f"{name}.")
        )
        folder = root / folders[top] / package[len(top) :].strip(".").replace(".", "/")
        for path in folder.glob("*.py"):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = Module(path)
    for name, module in found.items():
        _read_imports(name, module, set(found))
    return found


def _read_imports(name: str, module: Module, known: set[str]) -> None:
    is_lenient = name.removeprefix(f"{PACKAGE}.").partition(".")[0] in (*WHOLE, "kernels")
    package = name if module.path.stem == "__init__" else name.rpartition(".")[0]
    module.needed.add(package if package != name else package.rpartition(".")[0] or PACKAGE)
    text = module.path.read_text(encoding="utf-8")
    body = ast.parse(text).body
    for node, on_use, guarded in _statements(body, on_use=False, guarded=False):
        targets = set(_targets(node, package, known))
        module.used |= targets
        if not guarded and not (on_use and is_lenient):
            module.needed |= targets
    module.used |= module.needed | known.intersection(_NAMED.findall(text))


def _statements(
    body: list[Any], *, on_use: bool, guarded: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """Yield the imports of a body, whether each runs on use alone, and whether it may fail."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, on_use, guarded
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(node.orelse, on_use=on_use, guarded=guarded)
        elif isinstance(node, ast.Try) and any(map(_catches_missing, node.handlers)):
            yield from _statements(node.body, on_use=on_use, guarded=True)
            rest = [*node.handlers, *node.orelse, *node.finalbody]
            yield from _statements(rest, on_use=on_use, guarded=guarded)
        else:
            inside = on_use or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            nested = [child for child in ast.iter_child_nodes(node) if isinstance(child, _NESTED)]
            yield from _statements(nested, on_use=inside, guarded=guarded)


def _catches_missing(handler: ast.ExceptHandler) -> bool:
    caught = ast.unparse(handler.type) if handler.type is not None else "ImportError"
    return bool(re.search(r"\b(ModuleNotFoundError|ImportError)\b", caught))


def _targets(node: ast.Import | ast.ImportFrom, package: str, known: set[str]) -> Iterator[str]:
    """Yield the modules of ours, and the top-level names of other packages, of an import."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        base = node.module or ""
        if node.level:
            parent = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            base = f"{parent}.{base}".rstrip(".")
        inner = [f"{base}.{alias.name}" for alias in node.names]
        names = [base, *(name for name in inner if name in known)]
    for name in names:
        top = name.partition(".")[0]
        if top == PACKAGE:
            yield name
        elif top not in sys.stdlib_module_names:
            yield top


def contents(project: Mapping[str, Any], root: Path = ROOT) -> Contents:
    """Return what comes along, and what does not."""
    modules = read_modules(project, root)
    reasons = _reasons(modules)
    able = modules.keys() - reasons.keys()
    points: dict[str, dict[str, str]] = {}
    left_out: dict[str, dict[str, str]] = {}
    for group, given in project["project"]["entry-points"].items():
        for name, value in given.items():
            table = points if value.partition(":")[0] in able else left_out
            table.setdefault(group, {})[name] = value
    tops = tuple(f"{PACKAGE}.{name}" for name in WHOLE)
    pending = {name for name in able if name in FRONT or f"{name}.".startswith(_dotted(tops))}
    pending |= {value.partition(":")[0] for given in points.values() for value in given.values()}
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        if name in able and name not in reached:
            reached.add(name)
            pending |= modules[name].used
    return Contents(
        {name: modules[name].path for name in sorted(reached)}, points, left_out, reasons
    )


def _dotted(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}." for name in names)


def _reasons(modules: Mapping[str, Module]) -> dict[str, str]:
    """Return the modules that cannot come along, each with what it needs."""
    able = {*modules, *CORE, *OPTIONAL}
    reasons: dict[str, str] = {}
    while True:
        found = {
            name: ", ".join(sorted(missing))
            for name, module in modules.items()
            if name not in reasons and (missing := module.needed - able)
        }
        if not found:
            return reasons
        reasons |= found
        able -= found.keys()


def render(project: Mapping[str, Any], found: Contents, folder: Path) -> None:
    """Write the source of the distribution into an empty folder."""
    packages = set()
    for name, path in found.modules.items():
        is_package = path.stem == "__init__"
        packages.add(name if is_package else name.rpartition(".")[0])
        parts = name.split(".")
        place = folder.joinpath(*parts[:-1], f"{parts[-1]}.py")
        if is_package:
            place = folder.joinpath(*parts, "__init__.py")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    shutil.copy(ROOT / "api" / "py.typed", folder / PACKAGE)
    shutil.copy(ROOT / "LICENSE", folder)
    (folder / "README.md").write_text(DESCRIPTION, encoding="utf-8")
    text = pyproject(project, found, sorted(packages))
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")


def pyproject(project: Mapping[str, Any], found: Contents, packages: list[str]) -> str:
    """Return the pyproject.toml of the distribution."""
    own = project["project"]
    fields = {key: own[key] for key in ("version", "requires-python", "license", "license-files")}
    summary = (
        "The core of Hardpoint, with nine requirements; "
        "in the place of `hardpoint`, never beside it."
    )
    fields |= {"name": f"{PACKAGE}-core", "description": summary, "readme": "README.md"}
    fields["dependencies"] = requirements(project)
    lines = ["[build-system]", *_table(project["build-system"]), "", "[project]", *_table(fields)]
    extras = {name: own["optional-dependencies"][name] for name in EXTRAS}
    lines += ["", "[project.optional-dependencies]", *_table(extras)]
    groups = dict(found.points)
    groups |= {
        group.replace(PACKAGE, LEFT_OUT, 1): points for group, points in found.left_out.items()
    }
    for group, points in groups.items():
        lines += ["", f"[project.entry-points.{json.dumps(group)}]", *_table(points)]
    setuptools = {"include-package-data": False, "packages": packages}
    lines += ["", "[tool.setuptools]", *_table(setuptools)]
    lines += ["", "[tool.setuptools.package-data]", *_table({PACKAGE: ["py.typed"]})]
    return "\n".join(lines) + "\n"


def _table(values: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of texts, lists of texts and booleans: JSON is TOML there."""
    return [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in values.items()]


def requirements(project: Mapping[str, Any]) -> list[str]:
    """Return the nine requirements, with the versions of `hardpoint`."""
    stated = {
        re.split(r"[^\w.-]", requirement)[0]: requirement
        for requirement in project["project"]["dependencies"]
    }
    return [stated[name] for name in sorted(CORE.values())]


def read_project(root: Path = ROOT) -> dict[str, Any]:
    """Return the content of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def build(out: Path) -> None:
    """Build the wheel into a folder, with the setuptools that is installed."""
    project = read_project()
    with tempfile.TemporaryDirectory(prefix="hardpoint-core-") as folder:
        render(project, contents(project), Path(folder))
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
        command += ["-o", str(out.resolve()), folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def show() -> None:
    """Print what the distribution has, and what it leaves out."""
    found = contents(read_project())
    for name in found.modules:
        print(name)
    for title, groups in (("entry points", found.points), ("left out", found.left_out)):
        print(f"\n{title}:")
        for group, points in groups.items():
            print(f"  {group.removeprefix(f'{PACKAGE}.')}: {', '.join(sorted(points))}")
    print("\nmodules that are left out, and what they need:")
    for name, reason in sorted(found.reasons.items()):
        print(f"  {name}: {reason}")


def main() -> int:
    """Build, or list; return the exit code."""
    parser = argparse.ArgumentParser(description="Build the distribution hardpoint-core.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("out", nargs="?", type=Path, help="folder for the wheel")
    what.add_argument("--list", action="store_true", help="print what it has")
    given = parser.parse_args()
    if given.list:
        show()
    else:
        build(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
