"""Reads the metadata of installed distributions once, which is a quarter of an engine's start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, wraps
from typing import Any

import importlib_metadata

from hardpoint.host.registry import discovery
from hardpoint.host.registry.discovery import InstalledPlugin

State = tuple[tuple[str, int | None], ...]


def read_metadata_once() -> None:
    """Let entry points and versions be read again only where `sys.path` or a folder of it changed.

    An engine reads them anew each time, and tests open thousands. A distribution that is installed
    changes its folder; its files must not be written again after they were read.
    """
    importlib_metadata.entry_points = _by_folders(importlib_metadata.entry_points, _with_names)
    importlib_metadata.version = _by_folders(importlib_metadata.version)
    _discover_once()


def _discover_once() -> None:
    """Let the components of the same entry points be found once.

    That is a tenth of an engine's start. Tests may replace `entry_points`.
    """
    discover = discovery.discover

    @lru_cache(maxsize=8)
    def cached(read: Any, state: State, groups: tuple[str, ...]) -> tuple[InstalledPlugin, ...]:
        del read, state
        return tuple(discover(groups))

    @wraps(discover)
    def function(foreign_groups: Sequence[str] = ()) -> list[InstalledPlugin]:
        return list(cached(importlib_metadata.entry_points, _state(), tuple(foreign_groups)))

    for module in list(sys.modules.values()):
        if vars(module).get("discover") is discover:
            module.discover = function


def _by_folders(read: Callable[..., Any], prepare: Callable[[Any], Any] = lambda value: value):
    @lru_cache(maxsize=8)
    def cached(state: State, args: tuple[str, ...], kwargs: frozenset[tuple[str, str]]) -> Any:
        return prepare(read(*args, **dict(kwargs)))

    @wraps(read)
    def function(*args: str, **kwargs: str) -> Any:
        return cached(_state(), args, frozenset(kwargs.items()))

    return function


def _state() -> State:
    """Return the folders of `sys.path`, and when each was changed: by an installation, too."""
    return tuple((path, _changed_at(path or ".")) for path in sys.path)


def _changed_at(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


class _Distribution:
    """Name and version of a distribution, which parses its metadata each time that it is asked."""

    def __init__(self, dist: importlib_metadata.Distribution) -> None:
        self._dist = dist

    @cached_property
    def name(self) -> str:
        return self._dist.name

    @cached_property
    def version(self) -> str:
        return self._dist.version


def _with_names(points: importlib_metadata.EntryPoints) -> importlib_metadata.EntryPoints:
    known: dict[int, _Distribution] = {}
    for point in points:
        if (dist := point.dist) is not None:
            vars(point)["dist"] = known.setdefault(id(dist), _Distribution(dist))
    return points
