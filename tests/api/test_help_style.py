"""The help texts of all built-in commands have one style."""

import argparse
import re

import pytest

from hardpoint.argument_parser import ProgramParser
from hardpoint.builtin_plugins.commands import cli_commands
from hardpoint.builtin_plugins.server.command import COMMAND as SERVE
from hardpoint.builtin_plugins.server.operations.scale_command import COMMAND as SCALE

COMMANDS = [*cli_commands(), SERVE, SCALE]


def actions():
    for command in COMMANDS:
        parser = ProgramParser(prog=command.name)
        command.configure(parser)
        for part in parser.with_commands():
            for action in part.arguments():
                yield part.prog, action


TEXTS = {
    f"{prog} {'/'.join(action.option_strings) or action.metavar or action.dest}": action
    for prog, action in actions()
    if action.nargs != argparse.PARSER and action.dest != "help"
}


def check(text):
    """A phrase: no capital at the start but of a name, no full stop, one form of defaults."""
    first = text.split()[0]
    assert first[0].islower() or not first[1:].islower() or first in ("Unix",), text
    assert not text.endswith("."), text
    assert "(default " not in text, text
    assert "may be repeated" not in text, text


@pytest.mark.parametrize("name", TEXTS)
def test_an_argument(name):
    action = TEXTS[name]
    assert action.help, "an argument has a text"
    check(action.help)
    assert not action.help.startswith("("), action.help
    takes_value = action.nargs != 0 and action.choices is None
    if action.option_strings and takes_value:
        metavar = action.metavar or action.dest.upper()
        assert re.fullmatch(r"[A-Za-z][A-Za-z=.,:/]*", metavar), "a metavar without underscores"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_summary(command):
    check(command.summary)


def test_a_description_is_sentences():
    for command in COMMANDS:
        parser = ProgramParser(prog=command.name)
        command.configure(parser)
        for part in parser.with_commands():
            assert part.description, part.prog
            assert part.description[0].isupper(), part.prog
            assert part.description.endswith("."), part.prog
