"""The interfaces of each kind as plain data, and the breaking parts of a change.

    PYTHONPATH=tests python -m support.interfaces [--compatible KIND ...]

writes `tests/compatibility/interfaces.json`: for each kind, the interface of each number of its
contract; and the classes of the data that their methods take, return and find in contexts, with
the kinds and numbers that use each. The record has the present number of a kind and the one
before, which the engine accepts; that of a number only grows. A change that may break a
plugin needs a new number in `host/registry/kinds.py`, and an adapter for the old one in
`host/registry/adapters/`. `--compatible` records a change of a kind that breaks nothing, such as
a type that is written differently. A change without a line in
docs/contract-history.md under its kind is not recorded.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import dis
import functools
import importlib
import inspect
import json
import pkgutil
import re
import sys
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, ForwardRef, get_args

import msgspec

from hardpoint import plugins
from hardpoint.host.registry.kinds import KINDS
from hardpoint.plugins.component import Component, Context
from hardpoint.plugins.server.hook_specs import HookSpecs
from hardpoint.plugins.step_part.engine_hooks import EngineHooks
from hardpoint.plugins.step_part.worker_hooks import WorkerHooks

RECORD = Path(__file__).parents[1] / "compatibility" / "interfaces.json"

HISTORY = Path(__file__).parents[2] / "docs" / "contract-history.md"

NAMES = "names of hardpoint.plugins"
"""The record's key for the names that authors have been able to import."""

DATA = "data"
"""The record's key for the classes of data, and in it the key for the kinds that use each."""
USED_BY = "used by"

_CONTRACT = "hardpoint.plugins"

_UNIONS = {
    name: " | ".join(protocol.__name__ for protocol in get_args(union))
    for name, union in (("EngineHooks", EngineHooks), ("WorkerHooks", WorkerHooks))
}
"""The classes that each name of a union in a signature stands for."""

_REQUIRED = "required"


def recorded() -> dict[str, dict[str, Any]]:
    """Return the record: interfaces by kind and number."""
    interfaces: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    return interfaces


def changelog() -> dict[str, str]:
    """Return the section of each kind of the contract history, heading included."""
    sections: dict[str, str] = defaultdict(str)
    for section in re.split(r"^(?=##)", HISTORY.read_text(), flags=re.MULTILINE):
        if section.startswith("### "):
            for kind in re.findall(r"`(\w+)`", section.partition("\n")[0]):
                sections[kind] += section
    return dict(sections)


def unexplained(
    kind: str,
    before: Mapping[str, Any] | None,
    now: Mapping[str, Any],
    sections: Mapping[str, str],
) -> list[str]:
    """Return each change of a kind's interface that its section of the changelog does not have.

    A change is there if the section has the name of the member, or of its class. Of an interface
    that was not recorded before, the heading has to have the number.
    """
    section = sections.get(kind, "")
    if before is None:
        number = KINDS[kind].contract
        heading = section.partition("\n")[0]
        is_there = number == 1 or re.search(rf"contract {number}\b", heading) is not None
        message = f"docs/contract-history.md has no heading with `{kind}`, contract {number}"
        return [] if is_there else [message]
    members = {
        (owner, name)
        for owner in before.keys() | now.keys()
        for name in before.get(owner, {}).keys() | now.get(owner, {}).keys()
        if before.get(owner, {}).get(name) != now.get(owner, {}).get(name)
    }
    return [
        f"{owner}.{name} changed, and its section of docs/contract-history.md has neither name"
        for owner, name in sorted(members)
        if not re.search(rf"`[^`]*\b(?:{owner}|{name})\b[^`]*`", section)
    ]


def updated(
    record: Mapping[str, dict[str, Any]],
    compatible: Collection[str] = (),
    sections: Mapping[str, str] | None = None,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the record with the present interfaces, and the changes that keep it from that.

    Args:
        record: interfaces by kind and number.
        compatible: kinds whose changes break nothing.
        sections: those of the changelog by kind; None reads them.
    """
    changes = []
    sections = changelog() if sections is None else sections
    new = {kind: dict(numbers) for kind, numbers in record.items()}
    for kind, now in interfaces().items():
        number = str(KINDS[kind].contract)
        before = new.setdefault(kind, {}).get(number)
        if before is not None and kind not in compatible:
            changes += [f"{kind}, contract {number}: {c}" for c in breaking(before, now)]
        changes += [f"{kind}: {c}" for c in unexplained(kind, before, now, sections)]
        new[kind] = {n: new[kind][n] for n in new[kind] if int(n) == int(number) - 1}
        new[kind][number] = now
    new[DATA] = data()
    changes += _changes_of_data(record.get(DATA, {}), new[DATA], compatible)
    names = set(new.get(NAMES, ())) | set(plugins.__all__)
    new[NAMES] = dict.fromkeys(sorted(names), "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        changes += [f"{_CONTRACT}.{name} is gone" for name in names if not hasattr(plugins, name)]
    return new, sorted(changes)


@functools.cache
def interfaces() -> dict[str, dict[str, Any]]:
    """Return the interface of each kind, by the kind's name."""
    return {
        kind.name: _of_hooks() if kind.interface is None else of_kind(kind)
        for kind in KINDS.values()
    }


def of_kind(kind: Any) -> dict[str, Any]:
    """Return the classes of a kind and the fields of their contexts, by name."""
    interface: dict[str, Any] = {}
    for form in kind.forms or (kind.interface,):
        interface[form.__name__] = dict(sorted(_members(form)))
        context = _context_of(form)
        interface[context.__name__] = {
            field.name: _field(field) for field in dataclasses.fields(context)
        }
    return interface


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
            elif there[name] != text and text != f"abstract {there[name]}":  # no longer required
                changes.append(f"{owner}.{name} was {text!r} and is {there[name]!r}")
        for name in there.keys() - members.keys():
            if there[name].startswith(("abstract ", _REQUIRED)):
                changes.append(f"{owner}.{name} is new and {there[name].partition(' ')[0]}")
    return sorted(changes)


@functools.cache
def data() -> dict[str, dict[str, Any]]:
    """Return the members of each class of data that components take or return, and who uses it.

    What only the engine makes may get members that plugins need not have: they are recorded as
    neither abstract nor required.
    """
    classes = _classes()
    used: dict[str, dict[str, int]] = defaultdict(dict)
    made = set()
    for kind, uses in _uses(classes):
        for name, by_plugins in uses:
            used[name][kind.name] = kind.contract
            made.update([name] if by_plugins else [])
    return {
        name: {USED_BY: dict(sorted(kinds.items())), **_data_members(classes[name], name in made)}
        for name, kinds in sorted(used.items())
    }


def _changes_of_data(
    before: Mapping[str, Any], now: Mapping[str, Any], compatible: Collection[str]
) -> list[str]:
    """Return the changes of data that break a plugin of a kind with an unchanged number."""
    changes = []
    for name, members in before.items():
        same = [
            f"{kind} {number}"
            for kind, number in members[USED_BY].items()
            if kind not in compatible and kind in KINDS and KINDS[kind].contract == number
        ]
        old, new = (
            {n: v for n, v in m.items() if n != USED_BY} for m in (members, now.get(name, {}))
        )
        if same:
            breaking_changes = breaking({name: old}, {name: new} if name in now else {})
            changes += [
                f"{change}; contracts that use it: {', '.join(same)}" for change in breaking_changes
            ]
    return changes


@functools.cache
def _classes() -> dict[str, type]:
    """Return the contract's classes that are neither interfaces of kinds nor contexts, by name."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(plugins.__path__, f"{_CONTRACT}.")
    ]
    forms = {form for kind in KINDS.values() for form in kind.forms or (kind.interface,)}
    recorded_apart = {Component, Context, *forms, *(_context_of(f) for f in forms if f)}
    return {
        item.__name__: item
        for module in modules
        for item in vars(module).values()
        if inspect.isclass(item)
        and item.__module__.startswith(_CONTRACT)
        and item not in recorded_apart
    }


def _uses(classes: Mapping[str, type]) -> Iterator[tuple[Any, set[tuple[str, bool]]]]:
    """Yield each kind with the classes of its data, and whether its components make them."""
    for kind in KINDS.values():
        if kind.interface is None:
            functions = [f for n, f in vars(HookSpecs).items() if not n.startswith("_")]
            texts = [(_signature(f), True) for f in functions]
        else:
            contexts = {_context_of(form).__name__ for form in kind.forms or (kind.interface,)}
            texts = [
                (text, owner not in contexts)
                for owner, members in of_kind(kind).items()
                for text in members.values()
            ]
        names: set[tuple[str, bool]] = set()
        while texts:
            text, by_plugins = texts.pop()
            taken, _, returned = text.rpartition(" -> ")
            for part, made in ((taken, not by_plugins), (returned, by_plugins)):
                part = re.sub(r"\w+", lambda match: _UNIONS.get(match[0], match[0]), part)
                new = {(n, made) for n in re.findall(r"\w+", part) if n in classes} - names
                names |= new
                texts += [(t, made) for n, made in new for t in _data_members(classes[n]).values()]
        yield kind, names


def _data_members(owner: type, by_plugins: bool = True) -> dict[str, str]:
    """Return the name and the description of each public member of a class of data."""
    members: dict[str, str] = {}
    if issubclass(owner, Enum):
        return dict.fromkeys(owner.__members__, "member")
    members.update(_members(owner))
    if issubclass(owner, msgspec.Struct):
        for field in msgspec.structs.fields(owner):
            members[field.name] = f"{_REQUIRED} " * field.required + members[
                field.name
            ].removeprefix(f"{_REQUIRED} ")
    elif dataclasses.is_dataclass(owner):
        members.update({f.name: _field(f) for f in dataclasses.fields(owner)})
    elif inspect.isfunction(init := vars(owner).get("__init__")) and not _is_protocol(owner):
        members.update(_assigned(init), __init__=f"method {_signature(init)}")
    if by_plugins and _is_protocol(owner) and not _has_defaults(owner):
        required = [name for name in members if not _computes(getattr(owner, name, None))]
        members |= {n: f"abstract {members[n].removeprefix('abstract ')}" for n in required}
    if not by_plugins:
        members = {
            n: re.sub(f"^({_REQUIRED}|optional|abstract) ", "", t) for n, t in members.items()
        }
    return dict(sorted(members.items()))


def _has_defaults(protocol: type) -> bool:
    """Return whether a protocol tells required members from others, as a base that has these."""
    declared = vars(protocol).get("__annotations__", {})
    return bool(getattr(protocol, "__abstractmethods__", ())) or any(
        name in vars(protocol) for name in declared
    )


def _computes(member: object) -> bool:
    """Return whether a method reads an argument, and so is more than its description."""
    code = getattr(member, "__code__", None)
    return any(step.opname.startswith("LOAD_FAST") for step in dis.get_instructions(code or "0"))


def _is_protocol(owner: type) -> bool:
    return bool(getattr(owner, "_is_protocol", False))


def _assigned(init: Any) -> dict[str, str]:
    """Return the public attributes that an `__init__` sets, with their types where it has them."""
    attributes = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(init)))):
        match node:
            case ast.AnnAssign(target=ast.Attribute(attr=name), annotation=declared):
                attributes[name] = f"attribute {ast.unparse(declared)}"
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                attributes.setdefault(name, "attribute")
    return {name: text for name, text in attributes.items() if not name.startswith("_")}


def _of_hooks() -> dict[str, Any]:
    """Return the arguments of each hook; an implementation takes the ones that it names."""
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
        if (name := inspect.get_annotations(base).get("context")) is not None:
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
        abstract = "abstract " if name in getattr(form, "__abstractmethods__", ()) else ""
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
            if isinstance(declared, ForwardRef):  # its text has the module, which may change
                declared = declared.__forward_arg__
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
    return str(getattr(function, "__annotations__", {}).get("return", "Any"))


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
