"""Commands of the `hardpoint` program. They come in through the `cli_commands` hook."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .params import SamplingParams
from .requests import RequestOutput

if TYPE_CHECKING:
    from hardpoint.registry.plugin_set import PluginSet

    from .config import ConfigSources, EngineConfig

__all__ = ["Command", "CommandContext", "Generator"]


class Generator(Protocol):
    """An open model, as a command sees it."""

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield outputs of a prompt as they come; each holds only what is new."""

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield outputs for a conversation as they come; each holds only what is new."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True)
class CommandContext:
    """What a command may use.

    Attributes:
        load_config: returns the configuration and each value's origin, as the command line,
            environment and file give it.
        load_plugins: resolves a configuration's plugins.
        open_model: loads the configured model; shows progress on a terminal.
        version: of Hardpoint.
    """

    load_config: Callable[[], tuple[EngineConfig, ConfigSources]]
    load_plugins: Callable[[EngineConfig, ConfigSources], PluginSet]
    open_model: Callable[[EngineConfig, ConfigSources], Generator]
    version: str


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        name: as typed after `hardpoint`.
        summary: one line of help.
        configure: adds arguments to the command's parser. `--config`, `--model` and `--set` are
            there already.
        run: runs it and returns the exit code. Errors under HardpointError become one line on
            standard error and exit code 2.
    """

    name: str
    summary: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, CommandContext], int]
