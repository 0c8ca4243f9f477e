"""The hooks that the half of a step part has, and the fields that select its requests."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, get_args

import msgspec

from hardpoint.errors import shown
from hardpoint.plugins import (
    EngineCoreRequest,
    EngineHalf,
    FrontendHalf,
    SamplingParams,
    WorkerHalf,
)
from hardpoint.plugins.step_part.engine_hooks import EngineHooks
from hardpoint.plugins.step_part.worker_hooks import WorkerHooks
from hardpoint.typed import suggest

_CLOSE = 0.8
"""Similarity of a name to that of a hook, from which on it is taken for a misspelled one."""
_ABSENT = object()

_FILTERS: Mapping[str, tuple[str, type[msgspec.Struct]]] = {
    "for_fields": ("", EngineCoreRequest),
    "for_parameters": ("params.", SamplingParams),
}
"""Attributes that select requests by fields: where a request has these, and their struct."""


@dataclass(frozen=True)
class HookTable:
    """The hooks of the halves in one process.

    Attributes:
        defaults: class that has all hooks, each with a default.
        protocols: protocols for halves of other classes; none if there is no other class.
        place: where the halves are, for messages.
        other: class with the hooks of the halves in another process.
    """

    defaults: type
    protocols: tuple[type, ...] = ()
    place: str = ""
    other: type = object

    @cached_property
    def names(self) -> list[str]:
        """Names of all hooks."""
        return [name for name in dir(self.defaults) if not name.startswith("_")]

    @cached_property
    def _inherited(self) -> dict[str, list[Any]]:
        """The members of the defaults and the protocols, by the names of all hooks."""
        interfaces = [vars(interface) for interface in (self.defaults, *self.protocols)]
        return {
            name: [members[name] for members in interfaces if name in members]
            for name in self.names
        }

    def implemented(self, half: object) -> frozenset[str]:
        """Return the hooks that the class of a half has, and neither a default nor a protocol."""
        cls = type(half.original if isinstance(half, CompletedHalf) else half)
        return frozenset(
            name
            for name, inherited in self._inherited.items()
            if (member := getattr(cls, name, _ABSENT)) is not _ABSENT
            and all(member is not other for other in inherited)
        )

    def completed(self, half: Any, implemented: Collection[str] | None = None) -> Any:
        """Return a half with all hooks: itself, or an object that adds the defaults of others.

        Args:
            implemented: the result of `implemented` for it, if known.
        """
        if isinstance(half, self.defaults):
            return half
        hooks = self.implemented(half) if implemented is None else implemented
        return CompletedHalf(half, self.defaults(), hooks)

    def defect(self, half: object) -> str | None:
        """Return why an object cannot be a half, as the end of a sentence; None if it can."""
        is_complete = isinstance(half, self.defaults)
        is_plain = isinstance(half, type) or type(half).__module__ == "builtins"
        if not is_complete and (not self.protocols or is_plain):
            return f"gave {shown(half)}, expected {self._article} or None"
        described = f"gave a {type(half).__name__}"
        if (wrong := self._filter_defect(half)) is not None:
            return f"{described} {wrong}"
        if is_complete:
            return None
        present = self.implemented(half) | (getattr(half, "__dict__", {}).keys() & {*self.names})
        for protocol in self.protocols:
            required = sorted(required_members(protocol))
            lacking = [name for name in required if not hasattr(half, name)]
            if lacking and len(lacking) < len(required):
                first = next(name for name in required if name not in lacking)
                return (
                    f"{described} that has {first}, and no {' and no '.join(lacking)}; expected "
                    f"all of {protocol.__name__}: {', '.join(required)}"
                )
        for wrong in self.misnamed(half, present):
            return (
                f"{described} whose {wrong}; expected a hook, or a name with a leading "
                f"underscore, which is not called"
            )
        if not present - {"close", *_FILTERS}:
            hooks = ", ".join(sorted({*self.names} - {"close", *_FILTERS}))
            return (
                f"{described} without a hook, expected {self._article} or None; the hooks of a "
                f"half {self.place} are {hooks}"
            )
        return None

    def _filter_defect(self, half: object) -> str | None:
        for attribute, (_, struct) in _FILTERS.items():
            names: Any = getattr(half, attribute, ())
            known = f"optional fields of {struct.__name__}"
            if isinstance(names, str) or not isinstance(names, Collection):
                return f"whose {attribute} is {shown(names)}; expected a tuple of {known}"
            for name in names:
                if name not in (optional := _defaults(struct)):
                    close = suggest(name, list(optional)) if isinstance(name, str) else ""
                    return f"whose {attribute} has {shown(name)}; expected {known}{close}"
            if names and "uses" in self.implemented(half):
                return f"that has {attribute} and uses(); expected one of them"
        return None

    def misnamed(self, half: object, present: Collection[str] = ()) -> Iterator[str]:
        """Yield a text about each public method of a half with nearly the name of a hook.

        Args:
            present: hooks that it has, for which no method is taken.
        """
        missing = [name for name in self.names if name not in present]
        for name in dir(type(half)):
            is_other = name.startswith("_") or name in self.names
            if is_other or not callable(getattr(type(half), name, None)):
                continue
            if name in dir(self.other):
                yield f"{name} is a hook of a {self.other.__name__} alone"
            for hook in difflib.get_close_matches(name, missing, n=1, cutoff=_CLOSE):
                yield f"{name} is not a hook (did you mean {hook!r}?)"

    @property
    def _article(self) -> str:
        name = self.defaults.__name__
        return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


class CompletedHalf:
    """A half with all hooks: its own, and defaults for missing ones.

    Attributes:
        original: the half.
    """

    def __init__(self, half: object, defaults: object, implemented: Collection[str]) -> None:
        """Bind the methods of the half; attributes, which may change, are read when asked for."""
        self.original, self._defaults = half, defaults
        for name in implemented:
            if callable(getattr(type(half), name)):
                setattr(self, name, getattr(half, name))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the half; of the defaults if it has none."""
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.original, name, _ABSENT)
        return getattr(self._defaults, name) if value is _ABSENT else value


def required_members(protocol: type) -> set[str]:
    """Return the members that a class with a protocol has to have."""
    members: Collection[str] = getattr(protocol, "__abstractmethods__", ())
    attributes = vars(protocol).get("__annotations__", {})
    return {*members, *(name for name in attributes if name not in vars(protocol))}


@functools.cache
def _defaults(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        field.name: field.default
        if field.default_factory is msgspec.NODEFAULT
        else field.default_factory()
        for field in msgspec.structs.fields(struct)
        if not field.required
    }


def selecting_fields(half: object) -> frozenset[str]:
    """Return the fields that select the requests of a half, by their paths in a request."""
    return frozenset(
        path + name
        for attribute, (path, _) in _FILTERS.items()
        for name in getattr(half, attribute, ())
    )


def selects(half: object, request: EngineCoreRequest) -> bool:
    """Return whether a half declares no selecting fields, or a request has one of its fields."""
    paths = selecting_fields(half)
    return not paths or bool(SelectingFields(paths).set_in(request))


class SelectingFields:
    """Finds out which of the fields that select requests have a value in a request."""

    def __init__(self, paths: Iterable[str]) -> None:
        defaults = {
            path + name: default
            for path, struct in _FILTERS.values()
            for name, default in _defaults(struct).items()
        }
        self._fields = [(path, attrgetter(path), defaults[path]) for path in sorted({*paths})]

    def set_in(self, request: EngineCoreRequest) -> set[str]:
        """Return the paths of the fields that have another value than their default."""
        paths = set()
        for path, read, default in self._fields:
            value = read(request)
            if default is None:  # which an array cannot be compared with
                is_set = value is not None
            else:  # one that is empty is as good as another that is
                is_set = value != default if default else bool(value)
            if is_set:
                paths.add(path)
        return paths


FRONTEND_HOOKS = HookTable(FrontendHalf)
ENGINE_HOOKS = HookTable(EngineHalf, get_args(EngineHooks), "in the engine", WorkerHalf)
WORKER_HOOKS = HookTable(WorkerHalf, get_args(WorkerHooks), "in a worker", EngineHalf)
