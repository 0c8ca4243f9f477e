"""OpenAI's batch files: the routes of the server answer the bodies."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from hardpoint.builtin_plugins.commands.prompt_file import LineFile
from hardpoint.builtin_plugins.server.batches.lines import (
    ID_PREFIX,
    BatchAnswer,
    BatchLine,
    BatchReader,
)
from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.plugins import CommandContext, ConfigError, EngineConfig, RequestError
from hardpoint.plugins.commands import ConfigSources
from hardpoint.plugins.server import AsyncGenerator

from .form import Answered, EarlierAnswer

_FLAGS = ("chat", "json", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed",
    "stop", "structured", "plugin_args", "n", "logprobs", "max_tokens")  # fmt: skip

_SERVER: dict[str, Any] = {"allowed_hosts": None, "root_path": "", "access_log": "off"}
"""Settings of a server that does not listen."""


def check_options(
    options: argparse.Namespace, defaults: argparse.Namespace, config: EngineConfig
) -> None:
    """Check that no option is given that only prompts have, and that there is a server.

    Args:
        options: the options of the command.
        defaults: options of an empty command line.

    Raises:
        RequestError: an option is given.
        ConfigError: the plugin of the server is not enabled.
    """
    try:
        config.table(ServerConfig)
    except ConfigError:
        raise ConfigError(
            "plugins.disable: expected a list without 'server', because its routes answer files of "
            "OpenAI's batch service"
        ) from None
    for name in _FLAGS:
        if getattr(options, name) != getattr(defaults, name):
            raise RequestError(
                f"--{name.replace('_', '-')}: expected none for a file of OpenAI's batch service, "
                "because the bodies have their own parameters"
            )


class OpenAIRequests:
    """The requests of one file."""

    noun = "request"

    def __init__(self, file: LineFile, model: str) -> None:
        self._file, self._model = file, model
        self._engine: AsyncGenerator

    def requests(self) -> Iterator[BatchLine]:
        """Yield the requests, including invalid ones."""
        reader = BatchReader(self._file.name, self._model)
        for number, text in self._file.texts():
            yield reader.read(number, text)

    def read_answer(self, line: bytes) -> EarlierAnswer:
        """Return the request of a line of an answer file."""
        answer = msgspec.json.decode(line, type=BatchAnswer)
        if (answer.response is None) == (answer.error is None):
            raise ValueError("expected either a response or an error")
        digest = int(answer.id.removeprefix(ID_PREFIX), 16)
        return EarlierAnswer(answer.custom_id, digest, None, answer.problem is not None)

    def open(
        self,
        context: CommandContext,
        config: EngineConfig,
        sources: ConfigSources,
        stack: contextlib.ExitStack,
    ) -> None:
        """Load the model, for a server that does not listen."""
        from hardpoint.builtin_plugins.server.serving import loop_factory  # noqa: PLC0415 - slow

        table = msgspec.structs.replace(config.table(ServerConfig), **_SERVER)
        changed: Any = {"server": table}
        paths = {f"server.{name}": "generate --file" for name in _SERVER}
        self._version = context.version
        self._engine = context.open_async(
            msgspec.structs.replace(config, **changed),
            ConfigSources({**sources.by_path, **paths}),
            "never",
        )
        self._runner = stack.enter_context(asyncio.Runner(loop_factory=loop_factory()))
        stack.callback(lambda: self._runner.run(self._engine.aclose()))

    def run(
        self, wanted: Iterator[BatchLine], write: Callable[[BatchLine, Answered], None]
    ) -> None:
        """Answer requests as a server would, with as many at once as the engine has room for."""
        from hardpoint.builtin_plugins.server.batches.answering import (  # noqa: PLC0415 - slow
            answer_lines,
        )

        def written(line: BatchLine, answer: BatchAnswer) -> None:
            write(line, Answered(msgspec.to_builtins(answer), answer.num_tokens, answer.problem))

        self._runner.run(answer_lines(self._engine, self._version, wanted, written))
