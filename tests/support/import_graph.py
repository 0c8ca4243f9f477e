"""The graph of imports inside one folder of the package, and its longest chain."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

Graph = dict[str, set[str]]
"""The imported modules of each module."""


def import_graph(folder: Path, package: str) -> Graph:
    """Return the imports among the modules of a folder, including imports for type checking.

    Imports inside functions count. Python's own import of the parent packages does not.
    """
    files = {_module(path, folder, package): path for path in sorted(folder.rglob("*.py"))}
    return {module: set(_imports(module, path, files)) for module, path in files.items()}


def _module(path: Path, folder: Path, package: str) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join((package, *parts)).removesuffix(".__init__")


def _imports(module: str, path: Path, files: dict[str, Path]) -> Iterator[str]:
    holder = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                base = holder.rsplit(".", node.level - 1)[0]
                source = f"{base}.{source}".rstrip(".")
            submodules = [f"{source}.{alias.name}" for alias in node.names]
            names = [each if each in files else source for each in submodules]
        yield from (name for name in names if name in files and name != module)


def longest_chain(graph: Graph) -> list[str]:
    """Return the longest chain of modules in which each imports the next.

    The modules of a cycle all count, one after the other.
    """
    below = {module: _reachable(graph, module) for module in graph}

    @cache
    def chain(module: str) -> tuple[str, ...]:
        cycle = sorted({module} | {m for m in below[module] if module in below[m]})
        further = {m for each in cycle for m in graph[each]}.difference(cycle)
        return (*cycle, *max(map(chain, sorted(further)), key=len, default=()))

    return list(max(map(chain, sorted(graph)), key=len))


def _reachable(graph: Graph, start: str) -> set[str]:
    modules: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        module = waiting.pop()
        if module not in modules:
            modules.add(module)
            waiting += graph[module]
    return modules
