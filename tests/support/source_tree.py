"""The source of the package as syntax trees: modules, importers, and defined names."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .processes import ROOT

PACKAGE = ROOT / "src" / "hardpoint"
"""The package: modules of its own, and links to the folders that hold the others."""


@cache
def modules() -> dict[str, Path]:
    """Return the file of each module by its dotted name, without the kernels."""
    paths = {}
    for folder, folders, files in os.walk(PACKAGE, followlinks=True):
        folders[:] = sorted({*folders} - {"__pycache__", "kernels"})
        for file in sorted(name for name in files if name.endswith(".py")):
            path = Path(folder, file)
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            paths[name.removesuffix(".__init__")] = path.resolve()
    return paths


def top_level_folders() -> list[str]:
    """Return the paths of the folders that make up the package, relative to the root."""
    folders = {path.resolve() for path in PACKAGE.iterdir() if path.is_symlink()}
    return sorted(str(path.relative_to(ROOT)) for path in (PACKAGE, *folders))


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Suspend garbage collections: they visit a million syntax nodes, and call finalizers."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a source file."""
    return _trees().get(path) or ast.parse(path.read_text(encoding="utf-8"))


@cache
def _trees() -> dict[Path, ast.Module]:
    with without_collections():
        trees = {path: ast.parse(path.read_text("utf-8")) for path in modules().values()}
        gc.freeze()
    return trees


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of the syntax tree of a source file."""
    return tuple(ast.walk(tree(path)))


def is_package(module: str) -> bool:
    """Whether a module is a folder's `__init__`."""
    return modules()[module].name == "__init__.py"


@cache
def imported_names(module: str) -> list[tuple[str, str]]:
    """Return module and name of each `from MODULE import NAME`; "" as name of an `import MODULE`.

    Imports for type checking and inside functions are included; other distributions are not.
    """
    package = module if is_package(module) else module.rpartition(".")[0]
    names: list[tuple[str, str]] = []
    for node in nodes(modules()[module]):
        if isinstance(node, ast.Import):
            names += ((alias.name, "") for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                base = package.rsplit(".", node.level - 1)[0]
                source = f"{base}.{source}" if source else base
            if source in modules():
                names += ((source, alias.name) for alias in node.names)
    return names


def defining_module(module: str, name: str) -> str:
    """Return the module in which a name is defined that can be imported from a module.

    A package's `__init__` that re-exports a name is passed through.
    """
    if f"{module}.{name}" in modules():
        return f"{module}.{name}"
    if is_package(module):
        for source, imported in imported_names(module):
            if imported == name:
                return defining_module(source, name)
    return module


@cache
def importers() -> dict[str, set[str]]:
    """Return the modules that import each module; the `__init__` of packages do not count."""
    importers_of: dict[str, set[str]] = {module: set() for module in modules()}
    for module in modules():
        if not is_package(module):
            for source, name in imported_names(module):
                importers_of[defining_module(source, name)].add(module)
    return importers_of


@cache
def classes() -> dict[str, set[str]]:
    """Return the members of each class of the package by its name, inherited ones included."""
    members_of: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in modules().values():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                members_of.setdefault(node.name, set()).update(members(node))
                bases.setdefault(node.name, set()).update(map(base_name, node.bases))

    def inherited(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        """Follow the bases; `seen` ends it where classes of one name are bases of each other."""
        seen |= {name}
        from_bases = (inherited(base, seen) for base in bases.get(name, set()) - seen)
        return members_of.get(name, set()).union(*from_bases)

    return {name: inherited(name) for name in members_of}


def members(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names of a class's methods and attributes."""
    for part in ast.walk(node):
        match part:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield part.name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case _:
                pass


def base_name(node: ast.expr) -> str:
    """Return the last part of a base class's name, without its type arguments."""
    return ast.unparse(node).partition("[")[0].rpartition(".")[2]


@cache
def class_nodes() -> dict[str, list[ast.ClassDef]]:
    """Return the definitions of each class of the package by its name."""
    class_definitions: dict[str, list[ast.ClassDef]] = {}
    for path in modules().values():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                class_definitions.setdefault(node.name, []).append(node)
    return class_definitions


@cache
def functions() -> set[str]:
    """Return the names of all functions and methods of the package."""
    return {
        node.name
        for path in modules().values()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@cache
def defined_names() -> set[str]:
    """Return the names of all variables, attributes and parameters of the package."""
    names: set[str] = set()
    for path in modules().values():
        for node in nodes(path):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
                case ast.arg(arg=name):
                    names.add(name)
                case _:
                    pass
    return names
