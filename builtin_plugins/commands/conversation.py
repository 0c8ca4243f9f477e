"""The messages of a conversation: prompt, answers and the saved file."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from hardpoint.plugins import CompletionOutput, RequestError, SamplingParams

if TYPE_CHECKING:
    from hardpoint.plugins import EngineConfig, RequestOutput
    from hardpoint.plugins.server.groups import PromptControl

__all__ = [
    "ChatHistory",
    "ChatModel",
    "HistoryMessage",
    "TextOutput",
    "is_dumb_terminal",
    "notice",
    "read_messages",
]

_LEAST_ROOM = 4
"""An answer has room for `max_tokens`, or for this fraction of the context if that is less."""


class HistoryMessage(msgspec.Struct, frozen=True):
    """One message, in the form that chat templates and saved files share."""

    role: Literal["system", "user", "assistant"]
    content: str


class _Saved(msgspec.Struct):
    messages: list[HistoryMessage]


class TextOutput(Protocol):
    """Where an answer is written."""

    def write(self, text: str, *, reasoning: bool = False) -> None:
        """Write a piece of the answer, or of the reasoning before it."""

    def end(self) -> None:
        """Write the text held back, and end the line."""


class ChatModel(Protocol):
    """A model that answers: in this program, or at a server."""

    @property
    def config(self) -> EngineConfig:
        """The configuration, with the context length."""

    @property
    def model(self) -> PromptControl:
        """Default parameters and chat template."""

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Stream the outputs of a prompt; each holds only the new tokens."""

    def close(self) -> None:
        """Release the model."""


class ChatHistory:
    """The messages so far. After an error, a question is not one of them."""

    def __init__(self, *, drop_oldest: bool) -> None:
        """`drop_oldest`: when the context is full, send the newest turns alone; else fail."""
        self.system = ""
        self.messages: list[HistoryMessage] = []
        self._drop_oldest = drop_oldest
        self._first_sent = 0

    def begin(self, messages: list[HistoryMessage]) -> None:
        """Replace all messages; replace the system message only if they begin with one."""
        if messages and messages[0].role == "system":
            self.system = messages[0].content
            messages = messages[1:]
        self.messages = messages
        self.send_all()

    def send_all(self) -> None:
        """Send the dropped turns again, if they fit: the context has changed."""
        self._first_sent = 0

    def with_system(self) -> list[HistoryMessage]:
        """Return all messages, the system message first."""
        return [*([HistoryMessage("system", self.system)] if self.system else []), *self.messages]

    def ask(
        self, generator: ChatModel, params: SamplingParams, text: str, output: TextOutput
    ) -> None:
        """Write the answer to a message as it comes.

        An interrupt keeps the part that has come, and is raised again.

        Raises:
            RequestError: the request failed, or the context is full.
        """
        question, answer, error = HistoryMessage("user", text), "", None
        prompt, first = self._prompt(generator, params, question)
        tokens, cut = len(prompt["prompt_token_ids"]), False
        try:
            try:
                for result in generator.stream(prompt, params):
                    for new in result.outputs:
                        answer += _written(new, output)
                        tokens += len(new.token_ids)
                        cut = new.finish_reason == "length"
                        if new.finish_reason == "error":
                            error = new.error or "the request failed"
            finally:
                if answer:
                    output.end()
        except KeyboardInterrupt:
            if answer:
                self._add(question, answer, first, generator)
            raise
        if error is not None:
            raise RequestError(error)
        if not answer:
            output.end()
        self._add(question, answer, first, generator)
        if cut:
            notice(_why_cut(tokens, generator, params))

    def _add(self, question: HistoryMessage, answer: str, first: int, generator: ChatModel) -> None:
        self.messages += [question, HistoryMessage("assistant", answer)]
        if first and not self._first_sent:
            limit = _context_length(generator)
            notice(f"The context of {limit} tokens is full: the oldest turns are no longer sent.")
        self._first_sent = first

    def _prompt(
        self, generator: ChatModel, params: SamplingParams, question: HistoryMessage
    ) -> tuple[Mapping[str, Any], int]:
        """Return the messages to send, with as many turns as fit, and the first one's position.

        Raises:
            RequestError: they do not all fit, and none may be dropped.
        """
        limit = _context_length(generator)
        room = min(params.max_tokens or limit, limit // _LEAST_ROOM)
        system = self.with_system()[: 1 if self.system else 0]
        first, prompt_limit = self._first_sent, limit - room
        while True:
            sent = [*system, *self.messages[first:], question]
            prompt = generator.model.apply_chat_template([msgspec.to_builtins(m) for m in sent])
            tokens = len(prompt["prompt_token_ids"])
            if tokens <= prompt_limit or first == len(self.messages):
                break
            if not self._drop_oldest:
                raise RequestError(
                    f"the context is full: with this message the conversation has {tokens} tokens, "
                    f"and {prompt_limit} of {limit} fit, for an answer needs room; "
                    "/reset begins again, /save FILE keeps it, "
                    "--when-full drop-oldest drops the oldest turns"
                )
            # More is dropped than necessary: the rest is in the prefix cache in the next turns.
            prompt_limit = limit - room - limit // _LEAST_ROOM
            first = self._next_turn(first)
        return prompt, first

    def _next_turn(self, first: int) -> int:
        for position in range(first + 1, len(self.messages)):
            if self.messages[position].role == "user":
                return position
        return len(self.messages)

    def save(self, path: Path, model: str, params: SamplingParams, *, replace: bool) -> None:
        """Write model, sampling parameters and messages as JSON; the file is whole or untouched.

        Raises:
            RequestError: the file exists and may not be replaced, or it cannot be written.
        """
        sampling = msgspec.to_builtins(params)
        sampling.pop("output_kind", None)
        content = {"model": model, "sampling": sampling, "messages": self.with_system()}
        text = msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
        if path.exists() and not path.is_file():  # /dev/full would become a file
            raise RequestError(f"{path} cannot be written: it is no regular file")
        try:
            if replace:
                _replace_file(path.resolve(), text)
            else:
                _create_file(path, text)
        except FileExistsError:
            raise RequestError(f"{path} exists; /save! {path} replaces it") from None
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from None
        except ValueError as error:  # a NUL in the path
            raise RequestError(f"{str(path)!r} cannot be written: {error}") from None


def _written(new: CompletionOutput, output: TextOutput) -> str:
    if new.reasoning:
        output.write(new.reasoning, reasoning=True)
    if new.content:
        output.write(new.content)
    return new.content or ""


def read_messages(path: Path) -> list[HistoryMessage]:
    """Return the messages of a saved conversation.

    Raises:
        RequestError: the file cannot be read, or is not one of a conversation.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Saved).messages
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise RequestError(f"{path} is no saved conversation: {error}") from None
    except ValueError as error:  # a NUL in the path
        raise RequestError(f"{str(path)!r} cannot be read: {error}") from None


def _create_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        try:
            file.write(content)
            file.flush()
        except OSError:
            path.unlink()
            raise


def _replace_file(path: Path, content: bytes) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.chmod(file.name, mode)
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


def _context_length(generator: ChatModel) -> int:
    length = generator.config.max_model_len
    assert isinstance(length, int)  # the engine has filled it in
    return length


def _why_cut(tokens: int, generator: ChatModel, params: SamplingParams) -> str:
    limit = _context_length(generator)
    if tokens >= limit:
        return f"The answer was cut: the context of {limit} tokens is full."
    return f"The answer was cut after --max-tokens {params.max_tokens}."


def notice(text: str) -> None:
    """Print a message that is no answer, dim where the terminal can."""
    sys.stdout.flush()
    if sys.stderr.isatty() and not is_dumb_terminal() and not os.environ.get("NO_COLOR"):
        text = f"\x1b[2m{text}\x1b[0m"
    print(text, file=sys.stderr, flush=True)


def is_dumb_terminal() -> bool:
    """Return whether the terminal, if there is one, shows plain text alone."""
    return os.environ.get("TERM", "dumb").lower() in ("dumb", "unknown")
