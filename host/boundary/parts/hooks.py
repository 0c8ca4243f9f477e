"""The hooks that the half of a step part has: which the engine calls, and which are misspelled."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

from hardpoint.errors import shown
from hardpoint.plugins import EngineHalf, FrontendHalf, WorkerHalf
from hardpoint.plugins.step_part.engine_hooks import EngineHooks
from hardpoint.plugins.step_part.worker_hooks import WorkerHooks

_CLOSE = 0.8
"""Similarity of a name to that of a hook, from which on it is taken for a misspelled one."""
_ABSENT = object()


@dataclass(frozen=True)
class HookTable:
    """The hooks of the halves in one process.

    Attributes:
        defaults: class that has all hooks, each with a default.
        protocols: those that a half of another class implements; none if there is no other class.
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

    def implemented(self, half: object) -> frozenset[str]:
        """Return the hooks that the class of a half has, and neither a default nor a protocol."""
        own_half = half.original if isinstance(half, CompletedHalf) else half
        cls, interfaces = type(own_half), (self.defaults, *self.protocols)
        return frozenset(
            name
            for name in self.names
            if (own := getattr(cls, name, _ABSENT)) is not _ABSENT
            and all(own is not vars(interface).get(name, _ABSENT) for interface in interfaces)
        )

    def completed(self, half: Any) -> Any:
        """Return a half with all hooks: itself, or an object that adds the defaults of others."""
        if isinstance(half, self.defaults):
            return half
        return CompletedHalf(half, self.defaults(), self.implemented(half))

    def defect(self, half: object) -> str | None:
        """Return why an object cannot be a half, as the end of a sentence; None if it can."""
        if isinstance(half, self.defaults):
            return None
        if not self.protocols or isinstance(half, type) or type(half).__module__ == "builtins":
            return f"gave {shown(half)}, expected {self._article} or None"
        described = f"gave a {type(half).__name__}"
        own = self.implemented(half) | (getattr(half, "__dict__", {}).keys() & {*self.names})
        for protocol in self.protocols:
            required = sorted(required_members(protocol))
            lacking = [name for name in required if not hasattr(half, name)]
            if lacking and len(lacking) < len(required):
                first = next(name for name in required if name not in lacking)
                return (
                    f"{described} that has {first}, and no {' and no '.join(lacking)}; expected "
                    f"all of {protocol.__name__}: {', '.join(required)}"
                )
        for wrong in self.misnamed(half, own):
            return (
                f"{described} whose {wrong}; expected a hook, or a name with a leading "
                f"underscore, which is not called"
            )
        if not own - {"close"}:
            hooks = ", ".join(sorted({*self.names} - {"close"}))
            return (
                f"{described} without a hook, expected {self._article} or None; the hooks of a "
                f"half {self.place} are {hooks}"
            )
        return None

    def misnamed(self, half: object, own: Collection[str] = ()) -> Iterator[str]:
        """Yield a text about each public method of a half with nearly the name of a hook.

        Args:
            half: half to look at.
            own: hooks that it has, for which no method is taken.
        """
        missing = [name for name in self.names if name not in own]
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
    """A half with all hooks: its own, and the defaults of those that it does not have.

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


FRONTEND_HOOKS = HookTable(FrontendHalf)
ENGINE_HOOKS = HookTable(EngineHalf, get_args(EngineHooks), "in the engine", WorkerHalf)
WORKER_HOOKS = HookTable(WorkerHalf, get_args(WorkerHooks), "in a worker", EngineHalf)
