"""The types in the signatures of public names, from their evaluated annotations."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import sys
import typing
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import hardpoint.plugins

OURS = ("hardpoint.errors", "hardpoint.plugins", "hardpoint.toolkit", "hardpoint.typed")


def types_in_signatures(public: Iterable[Any]) -> dict[type, Any]:
    """Return the types of ours that signatures name, at any depth, by a thing that names each."""
    types: dict[type, Any] = {}
    waiting = [(thing, thing) for thing in public]
    walked: set[int] = set()
    while waiting:
        thing, origin = waiting.pop()
        if id(thing) in walked:
            continue
        walked.add(id(thing))
        for annotation in _annotations(thing):
            for cls in _classes(annotation):
                if cls.__module__.startswith(OURS):
                    types.setdefault(cls, origin)
                    waiting.append((cls, cls))
    return types


def _annotations(thing: Any) -> Iterator[Any]:
    """Yield the evaluated annotations of a function; or of a class and its public methods."""
    if not getattr(thing, "__module__", "").startswith(OURS):
        return
    if inspect.isfunction(thing):
        yield from _evaluated(thing, {})
    if not inspect.isclass(thing):
        return
    for base in thing.__mro__:
        if not base.__module__.startswith(OURS):
            continue
        annotations = {
            n: a for n, a in inspect.get_annotations(base).items() if not n.startswith("_")
        }
        yield from _evaluated_all(annotations, base.__module__, vars(base))
        for name, member in vars(base).items():
            member = member.fget if isinstance(member, property) else member
            function = inspect.unwrap(getattr(member, "__func__", member)) if member else None
            is_written = name == "__call__" or not dataclasses.is_dataclass(base)
            is_public = not name.startswith("_") or (
                name in ("__init__", "__call__") and is_written
            )
            is_own = inspect.isfunction(function) and function.__module__ == base.__module__
            if is_public and is_own and not issubclass(base, enum.Enum):
                yield from _evaluated(function, vars(base))


def _evaluated(function: Any, local: Any) -> Iterator[Any]:
    return _evaluated_all(inspect.get_annotations(function), function.__module__, local)


def _evaluated_all(annotations: dict[str, Any], module: str, local: Any) -> Iterator[Any]:
    names = _names(module)
    for name, annotation in annotations.items():
        try:
            yield (
                eval(annotation, names, dict(local)) if isinstance(annotation, str) else annotation
            )
        except NameError as cause:
            raise AssertionError(f"{module}: {name}: {annotation}: {cause}") from cause


@functools.cache
def _names(name: str) -> dict[str, Any]:
    """Return the names of a module, including imports for type checkers alone."""
    module: ModuleType = importlib.import_module(name)
    names = dict(vars(module))
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            imports = [
                statement
                for statement in node.body
                if isinstance(statement, ast.ImportFrom | ast.Import)
            ]
            exec(compile(ast.Module(imports, []), name, "exec"), names)
    return names


def _classes(annotation: Any) -> Iterator[type]:
    """Yield the classes in a type, such as both in `Mapping[str, list[Name]]`."""
    if isinstance(annotation, typing.TypeVar):
        annotation = annotation.__bound__
    if isinstance(annotation, typing.ForwardRef | str):
        text = getattr(annotation, "__forward_arg__", annotation)
        annotation = vars(sys.modules["hardpoint.plugins"]).get(text)
    if inspect.isclass(annotation) and typing.get_origin(annotation) is None:
        yield annotation
    for part in annotation if isinstance(annotation, list) else typing.get_args(annotation):
        yield from _classes(part)
    if inspect.isclass(origin := typing.get_origin(annotation)):
        yield origin


def public_names(modules: Iterable[str]) -> list[Any]:
    """Return the values of the public names of `hardpoint.plugins` and other modules."""
    assert hardpoint.plugins
    all_modules = [importlib.import_module(name) for name in ("hardpoint.plugins", *modules)]
    return [getattr(module, name) for module in all_modules for name in module.__all__]
