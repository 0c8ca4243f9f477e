"""Files of prompts: lines of text, or of Hardpoint's own JSON."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint.builtin_plugins.commands.completions import assemble
from hardpoint.builtin_plugins.commands.prompt_file import PromptFile, PromptLine
from hardpoint.plugins import (
    CommandContext,
    EngineConfig,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from hardpoint.plugins.commands import ConfigSources

from .form import Answered, EarlierAnswer

if TYPE_CHECKING:
    from hardpoint.plugins.requests.params import Prompt
    from hardpoint.plugins.server.commands import Generator


class _SavedAnswer(msgspec.Struct):
    """The fields of an answer that a continued run needs."""

    id: str | int
    request: str
    model: str
    error: str | None = None


class Prompts:
    """The prompts of one file."""

    noun = "prompt"

    def __init__(self, file: PromptFile, model: str) -> None:
        """Answer a file; `model` is the name of the model in the answers."""
        self._file, self._model = file, model
        self._generator: Generator

    def requests(self) -> Iterator[PromptLine]:
        """Yield the prompts."""
        return self._file.requests()

    def read_answer(self, line: bytes) -> EarlierAnswer:
        """Return the request of a line of an answer file."""
        answer = msgspec.json.decode(line, type=_SavedAnswer)
        failed = answer.error is not None
        return EarlierAnswer(answer.id, int(answer.request, 16), answer.model, failed)

    def open(
        self,
        context: CommandContext,
        config: EngineConfig,
        sources: ConfigSources,
        stack: contextlib.ExitStack,
    ) -> None:
        """Load the model."""
        self._generator = context.open_model(config, sources)
        stack.callback(self._generator.close)

    def run(
        self, wanted: Iterator[PromptLine], write: Callable[[PromptLine, Answered], None]
    ) -> None:
        """Answer prompts, with as many in a batch as the engine has room for."""
        running: dict[int, PromptLine] = {}
        writing = threading.Lock()  # a thread of the generator takes prompts

        def asked() -> Iterator[tuple[Prompt, SamplingParams]]:
            position = 0
            for request in wanted:
                try:
                    prompt = self._prompt(request)
                except RequestError as error:
                    with writing:
                        write(request, self._answered(request, error))
                    continue
                running[position] = request
                position += 1
                yield prompt, request.params

        for position, result in self._generator.generate_unordered(asked()):
            request = running.pop(position)
            with writing:
                write(request, self._answered(request, result))

    def _prompt(self, request: PromptLine) -> Prompt:
        if request.messages is not None:
            return self._generator.model.apply_chat_template(request.messages)
        prompt: Prompt = request.fields["prompt"]
        return prompt

    def _answered(self, request: PromptLine, result: RequestOutput | RequestError) -> Answered:
        line: dict[str, Any] = {
            "id": request.id,
            "request": f"{request.digest:016x}",
            "model": self._model,
            **request.fields,
        }
        if isinstance(result, RequestError):
            return Answered({**line, "error": str(result)}, 0, str(result))
        completions = assemble([result])
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        if request.params.n == 1:
            line |= completions[0].as_json()
        else:
            line["completions"] = [completion.as_json() for completion in completions]
        errors = [completion.error for completion in completions if completion.error]
        line |= {"error": errors[0]} if errors else {}
        return Answered(line, num_tokens, line.get("error"))
