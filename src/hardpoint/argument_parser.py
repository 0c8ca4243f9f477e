"""The parser of the command line, and its messages for a line that is wrong."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from hardpoint.configuration.names_of_vllm import key_hint
from hardpoint.configuration.whole_numbers import whole_number
from hardpoint.errors import shown
from hardpoint.plugins import HardpointError
from hardpoint.typed import suggest

__all__ = ["ProgramParser", "UsageError", "check_encoding", "global_options"]

_EXPECTED = {int: "a whole number", float: "a number"}


class UsageError(HardpointError):
    """A command line is wrong; `usage` is the usage text of its command."""

    def __init__(self, message: str, usage: str = "") -> None:
        """`usage`: shown below the message."""
        super().__init__(message)
        self.usage = usage


class ProgramParser(argparse.ArgumentParser):
    """A parser that takes the options of every command, as do the parsers of its commands."""

    def __init__(self, **settings: Any) -> None:
        # An abbreviation would be taken here and missed when plugins are resolved.
        super().__init__(**{**settings, "allow_abbrev": False})
        if hasattr(self, "color"):
            self.color = False  # a help text is the same everywhere
        self._refuses_unknown = True
        self._commands: argparse._SubParsersAction[ProgramParser] | None = None
        self._add_configuration()
        self._add_output()

    def _add_configuration(self) -> None:
        group = self.add_argument_group("configuration")
        add = functools.partial(group.add_argument, default=argparse.SUPPRESS)
        add("--config", metavar="PATH", help="instead of ./hardpoint.toml")
        add("--model", metavar="MODEL", help="short for --set model=MODEL")
        add(
            "--set",
            action="append",
            metavar="PATH=VALUE",
            help="set one value, as in scheduler.policy=fair; repeatable",
        )

    def _add_output(self) -> None:
        group = self.add_argument_group("messages")
        add = functools.partial(group.add_argument, default=argparse.SUPPRESS)
        for flag, name, text in (
            ("-q", "quiet", "errors only: no progress, no log"),
            ("-v", "verbose", "the whole log, with times"),
        ):
            add(flag, f"--{name}", action="store_const", const=name, dest="verbosity", help=text)
        add(
            "--log-format",
            choices=("text", "json"),
            help="json: log and errors as one object per line",
        )

    def add_subparsers(  # type: ignore[override]
        self, **settings: Any
    ) -> argparse._SubParsersAction[ProgramParser]:
        """Add a set of commands, and remember it for messages."""
        self._commands = super().add_subparsers(**settings)
        return self._commands

    def with_commands(self) -> Iterator[ProgramParser]:
        """Yield this parser and the parsers of its commands, at any depth."""
        yield self
        if self._commands is not None:
            for parser in self._commands.choices.values():
                yield from parser.with_commands()

    def arguments(self) -> list[argparse.Action]:
        """Return the arguments of this parser, without its commands' arguments."""
        return self._actions

    def accept_unknown(self) -> None:
        """Let `parse_known_args` return unknown arguments, as argparse does."""
        self._refuses_unknown = False

    def format_usage(self) -> str:
        """Return one line: options are named in the help alone."""
        if self.usage is not None:
            return super().format_usage()
        formatter = self.formatter_class(prog=f"{self.prog} [options]")
        formatter.add_usage(None, self._get_positional_actions(), ())
        return formatter.format_help()

    def format_help(self) -> str:
        """Return the help, with the usage as one line."""
        if self.usage is None:
            usage = " ".join(self.format_usage().removeprefix("usage: ").split())
            self.usage = usage.replace("%", "%%")
        return super().format_help()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments; an unknown one is an error of the parser that meets it.

        argparse hands those of a command up to the program, whose usage does not help.
        """
        args, is_default = self._with_default_command(list(sys.argv[1:] if args is None else args))
        if self._refuses_unknown and self._commands is not None:
            self._check_options_before_command(args)
        options, unknown = super().parse_known_args(args, namespace)
        if unknown and self._refuses_unknown:
            option = next((arg for arg in unknown if arg.startswith("-") and arg != "-"), None)
            if option is None:
                self.error(f"unexpected argument {shown(unknown[0])}")
            self._refuse_option(option)
        if is_default:
            options.is_default_command = True
        return options, unknown

    def _with_default_command(self, args: list[str]) -> tuple[list[str], bool]:
        """Return arguments with `set_defaults(default_command=...)`, if they name no command."""
        name = self.get_default("default_command")
        if name is None or self._commands is None or {"-h", "--help"} & set(args):
            return args, False
        if set(args) & self._commands.choices.keys():
            return args, False
        return [name, *args], True

    def _check_options_before_command(self, arguments: Sequence[str]) -> None:
        """Reject an unknown option before a command; its value would be taken for the command."""
        rest = iter(arguments)
        for argument in rest:
            if not argument.startswith("-") or argument in ("-", "--"):
                return
            name, equals, _ = argument.partition("=")
            action = self._option_string_actions.get(name)
            if action is not None:
                if action.nargs is None and not equals:
                    next(rest, None)
            elif argument.startswith("--") or argument[:2] not in self._option_string_actions:
                self._refuse_option(argument)

    def _refuse_option(self, argument: str) -> NoReturn:
        name = argument.partition("=")[0]
        choices: Mapping[str, ProgramParser] = {}
        if self._commands is not None:
            choices = self._commands.choices
        owners = [
            f"`{parser.prog}`"
            for parser in choices.values()
            if name in parser._option_string_actions
        ]
        if owners:
            self.error(f"option {name} belongs to {' and '.join(owners)}: write it after that")
        known = {option for option in self._option_string_actions if option.startswith("--")}
        for parser in choices.values():
            known.update(parser._option_string_actions)
        # Without the dashes, which any two options have in common.
        names = sorted(option.lstrip("-") for option in known)
        near = suggest(name.lstrip("-"), names).removeprefix(" (").removesuffix(")")
        near = re.sub("'(.*)'", r"--\1", near)
        advice = key_hint(name.lstrip("-")) or (near and f"; {near}")
        self.error(f"unrecognized option {shown(name)[1:-1]}{advice}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.type is int and (number := whole_number(arg_string)) is not None:
            return number
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if (expected := _EXPECTED.get(action.type)) is None:  # type: ignore[call-overload]
                raise
            raise argparse.ArgumentError(
                action, f"expected {expected}, got {shown(arg_string)}"
            ) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        known, near = ", ".join(names), suggest(str(value), names)
        if action is self._commands:
            raise argparse.ArgumentError(
                None, f"unknown command {shown(value)}{near}; the commands are {known}"
            )
        raise argparse.ArgumentError(action, f"expected one of {known}, got {shown(value)}{near}")

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError with this parser's usage.

        Raises:
            UsageError: always.
        """
        text = message.removeprefix("argument ")
        text = text.replace("the following arguments are required:", "missing argument:")
        if text.endswith(": expected one argument"):
            option = text.removesuffix(": expected one argument").split("/")[-1]
            text = f"{option}: a value is missing; write one with a leading - as {option}=-..."
        elif self._commands is not None and text == f"missing argument: {self._commands.metavar}":
            text = f"a command is missing: {', '.join(self._commands.choices)}"
        raise UsageError(text, self.format_usage().rstrip())


def check_encoding(arguments: Sequence[str]) -> None:
    """Refuse arguments that are no text.

    Raises:
        UsageError: a byte of one cannot be decoded.
    """
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            wrong = argument[error.start]
            problem = (
                f"byte 0x{ord(wrong) - 0xDC00:02x}"
                if "\udc80" <= wrong <= "\udcff"
                else ascii(wrong)
            )
            raise UsageError(
                f"argument {number}: {problem} at character {error.start} of {shown(argument)} is "
                "not UTF-8"
            ) from None


def global_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the global options of a command line.

    They decide which commands there are. A wrong one is left to the parser of its command.
    """
    parser = ProgramParser(add_help=False)
    parser.accept_unknown()
    try:
        return parser.parse_known_args(arguments)[0]
    except UsageError:
        return argparse.Namespace()
