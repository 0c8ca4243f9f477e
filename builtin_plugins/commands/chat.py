"""`hardpoint chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from hardpoint.plugins import (
    Command,
    CommandContext,
    CompletionOutput,
    RequestError,
    SamplingParams,
)
from hardpoint.plugins.commands import Generator

from .sampling import add_sampling_options, sampling_params

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."


class _Conversation:
    """The messages so far and the model that answers."""

    def __init__(self, generator: Generator, params: SamplingParams, system: str | None) -> None:
        self._generator = generator
        self._params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = []

    def reset(self) -> None:
        """Remove all messages but the system message."""
        self._messages = []

    def ask(self, text: str) -> bool:
        """Print the answer to a message as it comes; return False on an error.

        After an error the message is removed. Ctrl-C ends the answer and keeps the part received.
        """
        question = {"role": "user", "content": text}
        answer, error = "", None
        try:
            for new in self._outputs([*self._system, *self._messages, question]):
                print(new.text, end="", flush=True)
                answer += new.text
                if new.finish_reason == "error":
                    error = new.error or "the request failed"
        except RequestError as refused:
            error = str(refused)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        if answer or error is None:
            print()
        if error is not None:
            print(f"hardpoint: error: {error}", file=sys.stderr)
            return False
        self._messages += [question, {"role": "assistant", "content": answer}]
        return True

    def _outputs(self, messages: list[dict[str, Any]]) -> Iterator[CompletionOutput]:
        for output in self._generator.stream_chat(messages, self._params):
            yield from output.outputs


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.description = (
        "Talk with the model. When standard input is no terminal, each of its lines is a message "
        "and only the answers are printed."
    )
    parser.epilog = _HELP
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling_options(parser, max_tokens=1024)


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    params = sampling_params(options)
    config, config_sources = context.load_config()
    generator = context.open_model(config, config_sources)
    try:
        conversation = _Conversation(generator, params, options.system)
        interactive = sys.stdin.isatty()
        if interactive:
            print(f"{config.model}. {_HELP}", file=sys.stderr)
        return _talk(conversation, interactive=interactive)
    finally:
        generator.close()


def _talk(conversation: _Conversation, *, interactive: bool) -> int:
    """Answer all messages; if not interactive, an error ends with exit code 1."""
    for line in _typed_lines() if interactive else sys.stdin:
        text = line.strip()
        if text == "/exit":
            break
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/") and interactive:
            print(f"There is no command {text}. {_HELP}", file=sys.stderr)
        elif text and not conversation.ask(text) and not interactive:
            return 1
    return 0


def _typed_lines() -> Iterator[str]:
    _enable_editing()
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def _enable_editing() -> None:
    """Enable arrow keys and history in the prompt, if Python has readline."""
    try:
        import readline  # noqa: F401, PLC0415 - the import enables it
    except ImportError:
        pass


COMMAND = Command("chat", "Talk with the model.", _configure, _run)
