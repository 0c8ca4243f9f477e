"""The interfaces of each kind as plain data, and what of a change would break a plugin.

    PYTHONPATH=tests python -m support.interfaces [--compatible KIND ...]

writes `tests/compatibility/interfaces.json`: for each kind, the interface of each number of its
contract. The record of a number only grows. A change that may break a plugin needs a new number in
`registry/kinds.py`, and an adapter for the old one in `registry/adapters/`. `--compatible` records
a change of a kind that breaks nothing, such as a type that is written differently.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hardpoint import plugins
from hardpoint.plugins.component import Context
from hardpoint.plugins.hooks import HookSpecs
from hardpoint.registry.kinds import KINDS

RECORD = Path(__file__).parents[1] / "compatibility" / "interfaces.json"

NAMES = "names of hardpoint.plugins"
"""The record's key for the names that authors have been able to import."""

_CONTRACT = "hardpoint.plugins"
_REQUIRED = "required"


def recorded() -> dict[str, dict[str, Any]]:
    """Return the record: interfaces by kind and number."""
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    return found


def updated(
    record: Mapping[str, dict[str, Any]], compatible: Collection[str] = ()
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the record with the present interfaces, and the changes that keep it from that.

    Args:
        record: interfaces by kind and number.
        compatible: kinds whose changes break nothing.
    """
    changes = []
    new = {kind: dict(numbers) for kind, numbers in record.items()}
    for kind, now in interfaces().items():
        number = str(KINDS[kind].contract)
        before = new.setdefault(kind, {}).get(number)
        if before is not None and kind not in compatible:
            changes += [f"{kind}, contract {number}: {c}" for c in breaking(before, now)]
        new[kind][number] = now
    names = set(new.get(NAMES, ())) | set(plugins.__all__)
    new[NAMES] = dict.fromkeys(sorted(names), "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        changes += [f"{_CONTRACT}.{name} is gone" for name in names if not hasattr(plugins, name)]
    return new, sorted(changes)


def interfaces() -> dict[str, dict[str, Any]]:
    """Return the interface of each kind, by the kind's name."""
    return {
        kind.name: _of_hooks() if kind.interface is None else of_kind(kind)
        for kind in KINDS.values()
    }


def of_kind(kind: Any) -> dict[str, Any]:
    """Return the classes of a kind and the fields of their contexts, by name."""
    found: dict[str, Any] = {}
    for form in kind.forms or (kind.interface,):
        found[form.__name__] = dict(sorted(_members(form)))
        context = _context_of(form)
        found[context.__name__] = {
            field.name: _field(field) for field in dataclasses.fields(context)
        }
    return found


def breaking(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return each change of an interface that may break a plugin written for `before`."""
    changes = []
    for owner, members in before.items():
        there = now.get(owner)
        if there is None:
            changes.append(f"{owner} is gone")
            continue
        for name, text in members.items():
            if name not in there:
                changes.append(f"{owner}.{name} is gone")
            elif there[name] != text:
                changes.append(f"{owner}.{name} was {text!r} and is {there[name]!r}")
        for name in there.keys() - members.keys():
            if there[name].startswith(("abstract ", _REQUIRED)):
                changes.append(f"{owner}.{name} is new and {there[name].partition(' ')[0]}")
    return sorted(changes)


def _of_hooks() -> dict[str, Any]:
    """Return the arguments of each hook, of which an implementation takes those that it names."""
    specified = {n: f for n, f in vars(HookSpecs).items() if not n.startswith("_")}
    return {
        name: {
            parameter.name: f"argument {parameter.annotation}"
            for parameter in inspect.signature(function).parameters.values()
            if parameter.name != "self"
        }
        for name, function in sorted(specified.items())
    }


def _context_of(form: type) -> Any:
    """Return the class of the context that a component of an interface is built with."""
    for base in form.__mro__:
        if (name := base.__annotations__.get("context")) is not None:
            return vars(sys.modules[base.__module__])[name]
    return Context


def _members(form: type) -> Iterator[tuple[str, str]]:
    """Yield the name and the description of each public member of an interface."""
    bases = [base for base in form.__mro__ if base.__module__.startswith(_CONTRACT)]
    names = {name for base in bases for name in (*vars(base), *base.__annotations__)}
    for name in names:
        if name.startswith("_") or name == "context":
            continue
        member = inspect.getattr_static(form, name, None)
        abstract = "abstract " if name in form.__abstractmethods__ else ""
        if isinstance(member, property):
            yield name, f"{abstract}property -> {_returned(member.fget)}"
        elif isinstance(member, classmethod | staticmethod):
            yield name, f"{abstract}{type(member).__name__} {_signature(member.__func__)}"
        elif inspect.isfunction(member):
            yield name, f"{abstract}method {_signature(member)}"
        else:
            declared = next(
                (b.__annotations__[name] for b in bases if name in b.__annotations__), "type"
            )
            required = "" if hasattr(form, name) else f"{_REQUIRED} "
            yield name, f"{required}attribute {declared}"


def _field(field: dataclasses.Field[Any]) -> str:
    missing = dataclasses.MISSING
    required = field.default is missing and field.default_factory is missing
    return f"{_REQUIRED if required else 'optional'} {field.type}"


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    shown = [
        parameter
        if parameter.default is inspect.Parameter.empty
        else parameter.replace(default=...)
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    text = str(signature.replace(parameters=shown))
    return text.replace("'", "").replace("Ellipsis", "...")


def _returned(function: Any) -> str:
    return str(inspect.signature(function).return_annotation)


def _main() -> int:
    parser = argparse.ArgumentParser(description="Record the interfaces of kinds.")
    parser.add_argument("--compatible", action="append", default=[], metavar="KIND")
    record, changes = updated(recorded() if RECORD.exists() else {}, parser.parse_args().compatible)
    for change in changes:
        print(change)
    if not changes:
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return bool(changes)


if __name__ == "__main__":
    sys.exit(_main())
