"""Imports among the modules of a package: dependencies, and renaming of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping

__all__ = ["dependencies", "renamed"]


def dependencies(module: str, sources: Mapping[str, bytes], packages: Collection[str]) -> set[str]:
    """Return a module and the modules of its package that it imports, directly or not.

    Parent packages, which Python imports first, count only if an import names them. A module that
    cannot be parsed has no imports.

    Args:
        sources: source code of each module of the package, by dotted name.
        packages: names of those that are packages.
    """
    reached, waiting = set[str](), [module]
    while waiting:
        name = waiting.pop()
        if name in reached or name not in sources:
            continue
        reached.add(name)
        waiting += _imported(name, sources[name], is_package=name in packages)
    return reached


def _imported(module: str, source: bytes, *, is_package: bool) -> Iterator[str]:
    for node in _nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def renamed(source: bytes, package: str, name: str) -> bytes:
    """Return source code that imports modules of a package under another name.

    Source code that cannot be parsed stays unchanged: its import raises the error.

    Args:
        package: present name of the top-level package.
        name: new name of the package.
    """
    lines = source.splitlines(keepends=True)
    edits: list[tuple[int, int, bytes, bytes]] = []
    for node in _nodes(source):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_in(node.module, package):
            pattern = rb"from\s+" + re.escape(package.encode())
            if match := re.compile(pattern).match(lines[node.lineno - 1], node.col_offset):
                edits.append((node.lineno, node.col_offset, match[0], f"from {name}".encode()))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_in(alias.name, package):
                    new = _new_import(alias, package, name)
                    edits.append((alias.lineno, alias.col_offset, alias.name.encode(), new))
    for line, column, old, new in sorted(edits, reverse=True):
        text = lines[line - 1]
        lines[line - 1] = text[:column] + new + text[column + len(old) :]
    return b"".join(lines)


def _nodes(source: bytes) -> Iterator[ast.AST]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return iter(())
    return ast.walk(tree)


def _is_in(module: str | None, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def _new_import(alias: ast.alias, package: str, name: str) -> bytes:
    """Return the new text of a name in an import statement, which binds the same name."""
    new = name + alias.name[len(package) :]
    if alias.asname is None:
        new = f"{name} as {package}" if alias.name == package else f"{new}, {name} as {package}"
    return new.encode()
