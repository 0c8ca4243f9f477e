"""The conformance suite for commands; the built-in ones pass it too."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from hardpoint.plugins import (
    Command,
    CommandContext,
    CompletionOutput,
    EngineConfig,
    HardpointError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from hardpoint.plugins.commands import Prompt
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import PoolingRequestOutput
from hardpoint.testing.engine_access import builtin_commands, command_context
from hardpoint.testing.suite import (
    ConformanceSuite,
    Rule,
    checks,
    reject_replaced_tests,
    short_repr,
)
from hardpoint.toolkit.trace import CompletionTrace, Trace
from hardpoint.typed import Strict

DEFINITION = Rule(
    "definition: a name that no built-in command has, and one line of help",
    "name it with letters, digits, - and _, and describe it in one line",
)
HELP = Rule(
    "help: --help and the configuration options work, and every argument has a help text",
    "let configure only add arguments, each with help=...",
)
RUN = Rule(
    "run: it returns an exit code from 0 to 255",
    "return the code; raise a HardpointError with the message for the user",
)
WRONG = Rule(
    "wrong arguments: they end with a message, not with a traceback",
    "raise a ValueError or argparse.ArgumentTypeError in type=..., and a HardpointError in run",
)

_NAME = re.compile(r"[A-Za-z0-9][\w-]*")
_HIGHEST_CODE = 255
_GARBAGE = ("no such value", "-1", "")


class ScriptedGenerator:
    """An open model that answers every prompt with two outputs."""

    config = EngineConfig(max_model_len=512)

    @property
    def debug(self) -> ScriptedGenerator:
        """Itself: traces of prompts."""
        return self

    @property
    def model(self) -> ScriptedGenerator:
        """Itself: default parameters, chat template."""
        return self

    def default_sampling_params(self) -> SamplingParams:
        """Return the recommendations of a model without any."""
        return SamplingParams()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,  # noqa: ARG002
    ) -> Iterator[RequestOutput]:
        """Yield a piece of text, then the last one."""
        text = prompt if isinstance(prompt, str) else None
        for piece, reason in ((" abc", None), (" abc", "length")):
            new = CompletionOutput(
                index=0, text=piece, content=piece, token_ids=[32], finish_reason=reason
            )
            yield RequestOutput(
                request_id="r",
                prompt=text,
                prompt_token_ids=[1],
                outputs=[new],
                finished=reason is not None,
            )

    def trace(self, prompt: Prompt, params: SamplingParams | None = None) -> Trace:
        """Return the trace of a completion without tokens."""
        *_, output = self.stream(prompt, params)
        completions = [CompletionTrace(index=0, text=" abc abc", token_ids=[])]
        return Trace(prompt=output.prompt, num_prompt_tokens=1, completions=completions)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],  # noqa: ARG002
        params: SamplingParams | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield the same for a conversation."""
        return self.stream("chat", params)

    def generate_unordered(
        self, requests: Iterable[tuple[Prompt, SamplingParams | None]]
    ) -> Iterator[tuple[int, RequestOutput | RequestError]]:
        """Yield one output per prompt."""
        for position, (prompt, params) in enumerate(requests):
            *_, last = self.stream(prompt, params)
            yield position, last

    def embed(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | None = None,  # noqa: ARG002
        prompt_name: str | None = None,  # noqa: ARG002
    ) -> list[PoolingRequestOutput]:
        """Return the same vector for each prompt."""
        return [
            PoolingRequestOutput(
                request_id=str(index),
                outputs=np.array([0.6, 0.8], np.float32),
                prompt_token_ids=[1],
                finished=True,
                finish_reason="stop",
            )
            for index, _ in enumerate(prompts)
        ]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return a prompt with a token per character of the messages."""
        text = "".join(str(message.get("content")) for message in messages)
        ids = list(text.encode())
        return {"type": "token", "prompt_token_ids": ids, "prompt": text}

    def close(self) -> None:
        """Do nothing."""


class CommandSuite(ConformanceSuite):
    """Base class of a test class, which sets `command` and valid `arguments`.

    Attributes:
        command: the command under test.
        arguments: command lines that it accepts, each as a list of arguments after the name.
        wrong: command lines that it refuses, with a message.
        tables: tables of the configuration that the command's plugin declares, by name.
    """

    command: ClassVar[Command]
    arguments: ClassVar[Sequence[Sequence[str]]] = ((),)
    wrong: ClassVar[Sequence[Sequence[str]]] = ()
    tables: ClassVar[Mapping[str, type[Strict]]] = {}

    def _component(self) -> type[Any]:
        return type(self)

    def _context(self) -> CommandContext:
        return command_context(ScriptedGenerator(), **self.tables)

    def test_definition(self) -> None:
        """Its name is well-formed and no built-in command's, and its summary one line."""
        self._run_checks(
            DEFINITION.text,
            lambda: reject_replaced_tests(type(self), CommandSuite),
            self._check_definition,
        )

    @checks(HELP)
    def test_help(self) -> None:
        """The help can be shown, and explains every argument."""
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                self._parse(["--help"])
        except SystemExit as ended:
            if ended.code not in (0, None):
                raise HELP.violation(f"--help ended with code {ended.code}") from None
        except Exception as cause:
            raise HELP.violation(f"--help raised {type(cause).__name__}: {cause}") from cause
        if "usage:" not in output.getvalue():
            raise HELP.violation(f"--help printed {short_repr(output.getvalue())}")
        for action in _actions(self._parser()):
            if not action.help and not isinstance(action, argparse._SubParsersAction):
                named = "/".join(action.option_strings) or action.dest
                raise HELP.violation(f"its argument {named} has no help text")

    @checks(RUN)
    def test_run(self) -> None:
        """With `arguments` it returns an exit code from 0 to 255, and neither exits nor raises."""
        for arguments in self.arguments:
            line = " ".join([self.command.name, *arguments])
            try:
                with _quiet():
                    options = self._parse(arguments)
            except SystemExit:
                raise RUN.violation(
                    f"`{line}` is refused", "let the suite's `arguments` be valid ones"
                ) from None
            try:
                with _quiet():
                    code = self.command.run(options, self._context())
            except HardpointError as error:
                raise RUN.violation(f"`{line}` ended with an error: {error}") from error
            except BaseException as cause:
                outcome = "exited by" if isinstance(cause, SystemExit) else "raised"
                raise RUN.violation(
                    f"`{line}` {outcome} {type(cause).__name__}: {cause}"
                ) from cause
            if type(code) is not int or not 0 <= code <= _HIGHEST_CODE:
                raise RUN.violation(f"`{line}` returned {short_repr(code)}")

    @checks(WRONG)
    def test_wrong_arguments(self) -> None:
        """Unknown options, unusual values of each option, and `wrong` end with a message, not with
        a traceback; `wrong` ones not with the code 0.
        """
        for arguments in [*self._garbage(), *self.wrong]:
            line = " ".join([self.command.name, *map(repr, arguments)])
            output = io.StringIO()
            try:
                with _quiet(output):
                    options = self._parse(arguments)
                    code = self.command.run(options, self._context())
            except HardpointError:
                continue
            except SystemExit as ended:
                if not output.getvalue().strip() and not isinstance(ended.code, str):
                    raise WRONG.violation(f"`{line}` ended without a message") from None
                continue
            except BaseException as cause:
                raise WRONG.violation(f"`{line}` raised {type(cause).__name__}: {cause}") from cause
            if "Traceback (most recent call last)" in output.getvalue():
                raise WRONG.violation(f"`{line}` printed a traceback")
            if arguments in self.wrong and code == 0:
                raise WRONG.violation(f"`{line}` returned 0, as if it were right")

    def _check_definition(self) -> None:
        command = self.command
        if not isinstance(command, Command):
            raise DEFINITION.violation(
                f"command is {short_repr(command)}", "make it with hardpoint.plugins.Command"
            )
        if not isinstance(command.name, str) or not _NAME.fullmatch(command.name):
            raise DEFINITION.violation(f"its name is {short_repr(command.name)}")
        other = builtin_commands().get(command.name)
        if other is not None and other is not command:
            raise DEFINITION.violation(f"there is a built-in command {command.name!r}")
        if not isinstance(command.summary, str) or not command.summary.strip():
            raise DEFINITION.violation(f"it has no help text: summary is {command.summary!r}")
        if "\n" in command.summary:
            raise DEFINITION.violation(f"its summary has several lines: {command.summary!r}")

    def _parser(self) -> argparse.ArgumentParser:
        program = argparse.ArgumentParser(prog="hardpoint", allow_abbrev=False)
        commands = program.add_subparsers(dest="command")
        parser = commands.add_parser(self.command.name, help=self.command.summary)
        for names in _CONFIGURATION:
            parser.add_argument(*names, help="of every command")
        try:
            self.command.configure(parser)
        except BaseException as cause:
            raise HELP.violation(
                f"configure raised {type(cause).__name__}: {cause}",
                "let configure only add arguments that not every command has: "
                + ", ".join(name for names in _CONFIGURATION for name in names),
            ) from cause
        return program

    def _parse(self, line: Sequence[str]) -> argparse.Namespace:
        return self._parser().parse_args([self.command.name, *line])

    def _garbage(self) -> Iterator[list[str]]:
        valid = list(self.arguments[0]) if self.arguments else []
        yield [*valid, "--no-such-option"]
        for action in _actions(self._parser()):
            if action.option_strings and action.nargs != 0 and action.help != "of every command":
                yield from ([*valid, f"{action.option_strings[-1]}={bad}"] for bad in _GARBAGE)


_CONFIGURATION = (
    ("--config",),
    ("--model",),
    ("--set",),
    ("-q", "--quiet"),
    ("-v", "--verbose"),
    ("--log-format",),
)


def _actions(program: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in program._actions:
        if isinstance(action, argparse._SubParsersAction):
            for parser in action.choices.values():
                yield from (option for option in parser._actions if option.dest != "help")
                yield from _actions(parser)


@contextlib.contextmanager
def _quiet(output: io.StringIO | None = None) -> Iterator[None]:
    output = output or io.StringIO()
    stdin = sys.stdin
    sys.stdin = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            yield
    finally:
        sys.stdin = stdin
