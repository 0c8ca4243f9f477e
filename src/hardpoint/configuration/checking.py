"""Checks of a whole configuration, which report all errors at once."""

from __future__ import annotations

import bisect
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hardpoint.errors import HardpointError
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.config import ConfigSources

from .loading import (
    PREFIX,
    ConfigBuilder,
    default_config_type,
    file_table,
    filled,
    find_tables,
    setting_paths,
)

__all__ = ["find_errors", "unknown_variables"]

_VARIABLES = (
    "HARDPOINT_ADMIN_KEY",
    "HARDPOINT_API_KEY",
    "HARDPOINT_BUILD_KERNELS",
    "HARDPOINT_EXAMPLES",
    "HARDPOINT_HEALTH_PORT",
    "HARDPOINT_KERNELS",
    "HARDPOINT_SEED",
)
"""Environment variables that are not values of the configuration."""
_OTHERS = "HARDPOINT_TEST_"  # of test suites
_PATH = re.compile(r"[A-Za-z_][\w/-]*(?:\.[\w/-]+|\[\d+\])*(?=: )")
_STEP = re.compile(r"\[(\d+)\]|([\w/-]+)")
_INDEX = re.compile(r"\[\d+\]")
_Steps = tuple[str | int, ...]


def find_errors(
    path: str | Path | None = None,
    *,
    settings: Sequence[str] = (),
    model: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """Return all errors of the configuration of a command line; the arguments are `load_config`'s.

    After an error, its value is left out, and the rest is checked again. Plugins are resolved and
    their options are checked; no model is read.
    """
    errors: dict[str, None] = {}
    environ = os.environ if environ is None else environ
    table: tuple[Mapping[str, Any], str] = {}, ""
    with _Kept(errors):
        table = file_table(path)

    def fill(builder: ConfigBuilder) -> None:
        with _Kept(errors):
            builder.add_table(*table)
        for name in sorted(environ):
            if name.startswith(PREFIX):
                with _Kept(errors):
                    builder.add_environment({name: environ[name]})
        for setting in settings:
            with _Kept(errors):
                builder.add_setting(setting)
        if model is not None:
            builder.add_table({"model": model}, "argument --model")

    type_ = default_config_type()
    problem: list[HardpointError] = []
    try:
        type_ = EngineConfig.with_tables(find_tables(*filled(EngineConfig, fill).plugins()))
    except HardpointError as error:  # found again when plugins are resolved
        problem.append(error)
    builder = filled(type_, fill)
    for message in _messages(builder, problem):
        errors.setdefault(message)
    return list(errors)


class _Kept:
    """A context that keeps the message of an error instead of raising it."""

    def __init__(self, messages: dict[str, None]) -> None:
        self._messages = messages

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, HardpointError):
            self._messages.setdefault(str(error))
        return isinstance(error, HardpointError)


def _messages(builder: ConfigBuilder, problem: Sequence[HardpointError]) -> Iterator[str]:
    """Yield the errors of a builder's values; remove each wrong value after its error."""
    removed: dict[_Steps, list[int]] = {}
    check: Callable[[EngineConfig, ConfigSources], object]
    for check in (lambda *_: None, resolve_plugins):
        while True:
            try:
                check(*builder.build(None))
            except HardpointError as error:
                message = str(error)
            else:
                break
            path = match[0] if (match := _PATH.match(message)) else ""
            steps = tuple(int(i) if i else name for i, name in _STEP.findall(path))
            original = _original(steps, removed)
            indices = [step for step in original if isinstance(step, int)]
            yield _INDEX.sub("[{}]", path).format(*indices) + message[len(path) :]
            depth = builder.discard(steps)
            if not depth:
                return
            if isinstance(index := original[depth - 1], int):
                bisect.insort(removed.setdefault(original[: depth - 1], []), index)
    yield from (str(error) for error in problem if not removed and not _PATH.match(str(error)))


def _original(steps: _Steps, removed: Mapping[_Steps, Sequence[int]]) -> _Steps:
    """Return a path as it was before items of lists were removed.

    Args:
        removed: indices that the removed items had at first, in order, by the path of their list.
    """
    original: _Steps = ()
    for step in steps:
        if isinstance(step, int):
            for index in removed.get(original, ()):
                step += index <= step
        original += (step,)
    return original


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return warnings of environment variables that look like Hardpoint's and name nothing.

    A variable that begins with `HARDPOINT__` is a value of the configuration, whose error is raised
    when the configuration is read.

    Args:
        environ: None is the process's own.
    """
    names = sorted(os.environ if environ is None else environ)
    unknown = [
        name
        for name in names
        if name.startswith("HARDPOINT_")
        and not name.startswith((PREFIX, _OTHERS))
        and name not in _VARIABLES
    ]
    settings = setting_paths(default_config_type()) if unknown else ()
    known = [*_VARIABLES, *(PREFIX + path.upper().replace(".", "__") for path in settings)]
    warnings = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"settings begin with {PREFIX}"
        warnings.append(f"environment: no variable {name} is read; {hint}")
    return warnings
