"""Completion of the command line for shells that have run `hardpoint completion`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable

from argcomplete.completers import FilesCompleter, SuppressCompleter
from argcomplete.finders import CompletionFinder
from argcomplete.lexers import split_line

from hardpoint.host.registry.discovery import discover
from hardpoint.host.registry.model_files import ALIASES
from hardpoint.plugins import EngineConfig

from .argument_parser import ProgramParser
from .configuration.loading import setting_paths

__all__ = ["arguments_before_cursor", "complete"]


def arguments_before_cursor() -> list[str]:
    """Return the arguments before the word that is completed."""
    *_, arguments, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    if arguments[1:] and arguments[-1].startswith("-"):
        arguments.pop()  # its value is being typed
    return arguments[1:]


def complete(parser: ProgramParser, config_type: type[EngineConfig]) -> None:
    """Print the completions of the word under the cursor, as argcomplete's scripts read it; exit.

    An argument's values follow from its metavar, so that commands of plugins have them too.

    Args:
        parser: parser of the program.
        config_type: type of the configuration with the settings to offer.
    """
    completers: dict[str, Callable[..., Iterable[str]]] = {
        **_COMPLETERS,
        "PATH=VALUE": functools.partial(_settings, config_type),
    }
    for part in parser.with_commands():
        part.accept_unknown()
        for action in part.arguments():
            metavar = action.metavar if isinstance(action.metavar, str) else ""
            if (completer := completers.get(metavar)) is not None:
                action.completer = completer  # type: ignore[attr-defined]
    CompletionFinder()(
        parser,
        exit_method=sys.exit,
        always_complete_options=False,
        default_completer=SuppressCompleter(),
    )


def _plugins(prefix: str, **_: object) -> Iterable[str]:
    if "/" in prefix:
        return [f"{plugin.kind}/{plugin.name}" for plugin in discover()]
    return [plugin.name for plugin in discover()]


def _models(prefix: str, **_: object) -> Iterable[str]:
    files: list[str] = FilesCompleter()(prefix)
    return [*ALIASES, *files]


def _settings(config_type: type[EngineConfig], prefix: str, **_: object) -> Iterable[str]:
    return [] if "=" in prefix else [f"{path}=" for path in setting_paths(config_type)]


_COMPLETERS: dict[str, Callable[..., Iterable[str]]] = {
    "PATH": FilesCompleter(),
    "FILE": FilesCompleter(),
    "MODEL": _models,
    "PLUGIN": _plugins,
}
"""What completes a value, by the metavar of its argument."""
