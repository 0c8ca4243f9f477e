"""No module of ours is imported by a string: a checker of imports would not see the dependency."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest
from support.source_tree import modules

LOADERS = ("hardpoint.host.registry.", "hardpoint.old_names.modules")
"""Import what configurations and entry points name; the table of old import paths."""
IMPORTING = {"import_module", "__import__", "resolve_name", "find_spec"}
"""Functions that import a module by its name."""
MODULE = re.compile(r"hardpoint(?:\.\w+)+\.?")
REFERENCE = re.compile(r"hardpoint(?:\.\w+)+:\w[\w.]*")
"""An object that a process or the loader imports: `hardpoint.package.module:object`."""
REFERENCES = {
    ("hardpoint.builtin_plugins.server.command", "hardpoint.simulation:PacedExecutor"): (
        "a value of the configuration, which the loader imports"
    ),
}
"""References to another package, and why."""
SUITE = "conformance_suite"
"""The attribute by which any plugin names the kit's suite that tests it."""

Named = tuple[int, str]
"""Line and string."""


def imported_strings(source: ast.Module) -> list[Named]:
    """Return the strings with a module of ours that may reach a function that imports.

    Values are followed through names, attributes and parameters, wherever in the module these are
    set; so a string is found although another value may reach the call.
    """
    values = assigned(source)
    waiting = [
        each
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and called(node) in IMPORTING
        for each in (*node.args, *(keyword.value for keyword in node.keywords))
    ]
    found: set[Named] = set()
    seen: set[str] = set()
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if MODULE.fullmatch(node.value):
                    found.add((node.lineno, node.value))
            elif (name := name_of(node)) is not None and name not in seen:
                seen.add(name)
                waiting += values[name]
    return sorted(found)


def assigned(source: ast.Module) -> dict[str, list[ast.AST]]:
    """Return the expressions that are assigned to each name, attribute or parameter."""
    values: dict[str, list[ast.AST]] = defaultdict(list)
    parameters: dict[str, list[str]] = {}
    for node in ast.walk(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
            parameters[node.name] = [name for name in names if name not in ("self", "cls")]
            results = (n.value for n in ast.walk(node) if isinstance(n, ast.Return))
            values[node.name] += (value for value in results if value is not None)
        for target, value in bindings(node):
            for part in ast.walk(target):
                if (name := name_of(part)) is not None:
                    values[name].append(value)
    for node in ast.walk(source):
        if isinstance(node, ast.Call):
            names = parameters.get(called(node), [])
            for name, value in zip(names, node.args, strict=False):
                values[name].append(value)
            for keyword in node.keywords:
                values[keyword.arg or ""].append(keyword.value)
    return values


def bindings(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield target and value of an assignment, a loop or a comprehension."""
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield target, value
        case ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield target, value
        case _:
            pass


def called(node: ast.Call) -> str:
    """Return the last part of the name of a called function."""
    return name_of(node.func) or ""


def name_of(node: ast.AST) -> str | None:
    """Return the name of a variable or attribute; None for another node."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return None


def references(source: ast.Module) -> Iterator[Named]:
    """Yield the references to objects of ours, but for those to suites of the kit."""
    suites = {
        id(node.value)
        for node in ast.walk(source)
        if isinstance(node, ast.Assign) and SUITE in map(name_of, node.targets)
    }
    for node in ast.walk(source):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and REFERENCE.fullmatch(node.value) and id(node) not in suites:
            yield node.lineno, node.value


def package_of(module: str) -> str:
    """Return the package of a module that import-linter has a layer for."""
    return ".".join(module.split(".")[:2])


def outside_the_loader(text: re.Pattern[str]) -> Iterator[tuple[str, ast.Module]]:
    """Yield name and syntax tree of the modules with a text, but for those of the loader."""
    for module, path in modules().items():
        source = path.read_text(encoding="utf-8")
        if not module.startswith(LOADERS) and text.search(source):
            yield module, ast.parse(source)


def test_no_import_function_gets_a_string_with_a_module_of_ours():
    sources = list(outside_the_loader(re.compile("|".join(IMPORTING))))
    assert len(sources) > 10
    assert [
        f"{module}:{line}: {text}"
        for module, source in sources
        for line, text in imported_strings(source)
    ] == []


def test_references_name_objects_of_the_same_package():
    found = {
        (module, text)
        for module, source in outside_the_loader(REFERENCE)
        for _, text in references(source)
        if package_of(text.partition(":")[0]) != package_of(module)
    }
    assert found == REFERENCES.keys()


@pytest.mark.parametrize(
    "source",
    [
        "importlib.import_module('hardpoint.core.build')",
        "__import__('hardpoint.core.build')",
        "pkgutil.resolve_name('hardpoint.core.build')",
        "_NAME = 'hardpoint.core.build'\ndef load():\n    return import_module(_NAME)",
        "_TABLE = {'a': ('hardpoint.core.build',)}\n"
        "def load(name):\n    for path in _TABLE[name]:\n        import_module(path)",
        "_CORE = 'hardpoint.core'\nimport_module(f'{_CORE}.build')",
        "def load(path):\n    import_module(path)\nload('hardpoint.core.build')",
        "class Late:\n    def __init__(self):\n        self._path = 'hardpoint.core.build'\n"
        "    def load(self):\n        import_module(self._path)",
    ],
)
def test_a_planted_string_is_found(source):
    (found,) = imported_strings(ast.parse(source))
    assert found[1].startswith("hardpoint.core")


def test_a_planted_reference_is_found():
    source = ast.parse("run = 'hardpoint.core.build:build'\nlogger = 'hardpoint.core'")
    assert [text for _, text in references(source)] == ["hardpoint.core.build:build"]
    suite = ast.parse("class A:\n    conformance_suite = 'hardpoint.testing:Suite'")
    assert list(references(suite)) == []


def test_other_strings_are_not_found():
    assert imported_strings(ast.parse("import_module('xgrammar')\nname = 'hardpoint.core'")) == []
