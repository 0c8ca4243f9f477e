"""`hardpoint chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hardpoint.plugins import Command, CommandContext, EngineConfig, HardpointError, RequestError
from hardpoint.plugins.commands import ConfigSources
from hardpoint.typed import suggest

from .conversation import (
    ChatHistory,
    ChatModel,
    TextOutput,
    is_dumb_terminal,
    notice,
    read_messages,
)
from .remote.chat_server import ServedModel
from .sampling import (
    add_sampling_options,
    conversation_params,
    sampling_fields,
    sampling_params,
)

_HELP = "/help lists the commands, Ctrl-C stops an answer, exit or Ctrl-D leaves."
_LEAVING = ("exit", "quit")
_KEYS = """\
exit, quit      leave, as Ctrl-D does
//TEXT          send /TEXT as a message
Alt-Enter       add a line, as a backslash before Enter does
Tab             complete a command; pasted lines are one message
Ctrl-C          stop an answer, or clear the line; twice, leave"""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.description = (
        "Talk with the model. When standard input is no terminal, each of its lines is a message "
        "and only the answers are printed."
    )
    parser.epilog = "In a conversation, /help lists its commands."
    add = parser.add_argument
    add("--url", metavar="URL", help="a running server with OpenAI's API, such as http://HOST:8000")
    add("--system", metavar="TEXT", help="the system message")
    add("--load", metavar="FILE", type=Path, help="go on with a conversation that /save wrote")
    add(
        "--when-full",
        choices=("stop", "drop-oldest"),
        default="stop",
        help="when the context is full, refuse the message, or no longer send the oldest turns "
        "(default: stop)",
    )
    add_sampling_options(parser, max_tokens=1024, temperature="as the model recommends")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    sampling_params(options)  # refuses wrong ones before a model is loaded
    conversation = ChatHistory(drop_oldest=options.when_full == "drop-oldest")
    if options.load is not None:
        conversation.begin(read_messages(options.load))
    if options.system is not None:
        conversation.system = options.system
    config, config_sources = context.load_config()
    chat = _Chat(conversation, options, context, (config, config_sources))
    try:
        if sys.stdin.isatty():
            _talk_on_terminal(chat)
            return 0
        return _talk_in_pipe(chat)
    finally:
        chat.close()


class _PlainOutput:
    """Writes answers as they are, and reasoning on lines of its own."""

    _in_reasoning = False

    def write(self, text: str, *, reasoning: bool = False) -> None:
        if self._in_reasoning and not reasoning:
            print()
        self._in_reasoning = reasoning
        print(text, end="", flush=True)

    def end(self) -> None:
        self._in_reasoning = False
        print()


class _Chat:
    """A conversation with an open model, and the commands in it."""

    def __init__(
        self,
        conversation: ChatHistory,
        options: argparse.Namespace,
        context: CommandContext,
        config: tuple[EngineConfig, ConfigSources],
    ) -> None:
        self.output: TextOutput = _PlainOutput()
        self.is_over = False
        self._conversation, self._options, self._context = conversation, options, context
        self._config, self._config_sources = config
        self._use(self._open(*config))

    def _open(self, config: EngineConfig, config_sources: ConfigSources) -> ChatModel:
        if self._options.url is None:
            return self._context.open_model(config, config_sources)
        is_default = config_sources.of("model") == "default"
        name = None if is_default else config.model
        return ServedModel(self._options.url, name, sampling_fields(self._options))

    def _use(self, generator: ChatModel) -> None:
        self._generator = generator
        if self._options.url is not None:
            self._config = msgspec.structs.replace(self._config, model=generator.config.model)
        self._params = conversation_params(self._options, generator)

    @property
    def model(self) -> str:
        return self._config.model

    def show_error(self, error: HardpointError) -> None:
        self._context.show_error(str(error))

    def close(self) -> None:
        self._generator.close()

    def handle(self, text: str) -> None:
        """Run a command, or answer a message.

        Raises:
            HardpointError: it failed; the conversation is as before.
        """
        if not text:
            return
        if not text.startswith("/") or text.startswith("//"):
            message = text.removeprefix("/")
            self._conversation.ask(self._generator, self._params, message, self.output)
            return
        name, _, argument = text.partition(" ")
        command = _COMMANDS.get(name)
        if command is None:
            hint = suggest(name, list(_COMMANDS)) or "; /help lists them"
            raise RequestError(f"there is no command {name}{hint}; /{name} sends it as a message")
        argument = argument.strip()
        if argument and not command.argument:
            raise RequestError(f"{name}: expected nothing after it, got {argument!r}")
        if not argument and command.argument == "FILE":
            raise RequestError(f"{name}: expected the name of a file")
        command.run(self, argument)

    def help(self, _: str) -> None:
        for name, command in _COMMANDS.items():
            if command.summary:
                argument = f"[{command.argument}]" if command.is_optional else command.argument
                print(f"{f'{name} {argument}':16}{command.summary}", file=sys.stderr)
        print(_KEYS, file=sys.stderr)

    def reset(self, _: str) -> None:
        self._conversation.begin([])

    def system(self, text: str) -> None:
        """Show the system message, or set it; the messages stay."""
        if text:
            self._conversation.system = "" if text == '""' else text
        else:
            print(self._conversation.system or "no system message", file=sys.stderr)

    def save(self, path: str, *, replace: bool = False) -> None:
        file = _expanded(path)
        self._conversation.save(file, self.model, self._params, replace=replace)
        notice(f"Saved to {file}.")

    def load(self, path: str) -> None:
        self._conversation.begin(read_messages(_expanded(path)))
        notice(f"{len(self._conversation.messages)} messages.")

    def switch_model(self, name: str) -> None:
        if not name:
            length = self._generator.config.max_model_len
            print(f"{self.model}, a context of {length} tokens", file=sys.stderr)
            return
        config = msgspec.structs.replace(self._config, model=name)
        sources = ConfigSources({**self._config_sources.by_path, "model": f"/model {name}"})
        # The old one is closed once the new one is open, and so is there when that fails.
        new = self._open(config, sources)
        self._generator.close()
        self._config, self._config_sources = config, sources
        self._use(new)
        self._conversation.send_all()
        notice(f"{name} answers from here on.")

    def leave(self, _: str) -> None:
        self.is_over = True


@dataclass(frozen=True)
class _ChatCommand:
    """A command in a conversation; without a summary it is not listed."""

    argument: str
    summary: str
    run: Callable[[_Chat, str], None]

    @property
    def is_optional(self) -> bool:
        return self.argument not in ("", "FILE")


_COMMANDS = {
    "/help": _ChatCommand("", "list the commands", _Chat.help),
    "/reset": _ChatCommand("", "forget all messages but the system message", _Chat.reset),
    "/system": _ChatCommand("TEXT", 'show or set the system message; "" removes it', _Chat.system),
    "/save": _ChatCommand("FILE", "save the conversation; /save! replaces a file", _Chat.save),
    "/save!": _ChatCommand("FILE", "", lambda chat, path: chat.save(path, replace=True)),
    "/load": _ChatCommand("FILE", "go on with a saved conversation", _Chat.load),
    "/model": _ChatCommand("NAME", "show the model, or go on with another", _Chat.switch_model),
    "/exit": _ChatCommand("", "leave, as Ctrl-D does", _Chat.leave),
    "/quit": _ChatCommand("", "", _Chat.leave),
}


def _expanded(path: str) -> Path:
    """Return a path with the home folder of its user; without such a user, as it is."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        return Path(path)


def _talk_in_pipe(chat: _Chat) -> int:
    """Answer each line of standard input; return 1 after the first request that fails."""
    for line in sys.stdin:
        try:
            chat.handle(line.strip())
        except RequestError as error:
            chat.show_error(error)
            return 1
        if chat.is_over:
            break
    return 0


def _talk_on_terminal(chat: _Chat) -> None:
    """Answer typed messages until the user leaves; an error or interrupt ends one answer alone."""
    messages, hidden = _open_terminal(chat)
    notice(f"{chat.model}. {_HELP}")
    with hidden:
        while not chat.is_over:
            try:
                text = next(messages, None)
                if text is None or text.strip().lower() in _LEAVING:
                    return
                chat.handle(text.strip())
            except HardpointError as error:
                chat.show_error(error)
            except KeyboardInterrupt:
                notice("Stopped.")


def _open_terminal(chat: _Chat) -> tuple[Iterator[str], AbstractContextManager[None]]:
    """Return the typed lines, and a context in which nothing typed is shown amid an answer.

    Answers are wrapped on a terminal. A terminal that cannot move its cursor has no line editor.
    """
    screen = next((stream for stream in (sys.stdout, sys.stderr) if stream.isatty()), None)
    plain = _typed_messages(_input, lambda: ""), contextlib.nullcontext()
    if screen is None:
        return plain
    # Its packages take a fifth of a second to import.
    from .terminal import LineEditor, WrappedOutput  # noqa: PLC0415

    if sys.stdout.isatty():
        chat.output = WrappedOutput(sys.stdout)
    if is_dumb_terminal():
        return plain
    editor = LineEditor({name: c.argument == "FILE" for name, c in _COMMANDS.items()}, screen)
    return _typed_messages(editor.read, editor.typed), editor.input_hidden()


def _typed_messages(read: Callable[[], str], typed: Callable[[], str]) -> Iterator[str]:
    """Yield typed messages until Ctrl-D, or Ctrl-C twice, the second time on an empty line."""
    interrupted = False
    while True:
        try:
            yield read()
            interrupted = False
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted and not typed():
                return
            interrupted = True
            notice("Ctrl-C again, or Ctrl-D, leaves.")


def _input() -> str:
    lines = []
    # Standard output may be a file, which is for the answers alone.
    with (
        contextlib.nullcontext() if sys.stdout.isatty() else contextlib.redirect_stdout(sys.stderr)
    ):
        try:
            lines.append(input("> "))
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(input("  "))
        except (EOFError, KeyboardInterrupt):
            print()
            raise
    return "\n".join(lines)


COMMAND = Command("chat", "talk with the model", _configure, _run)
