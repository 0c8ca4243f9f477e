"""Each option of each command with wrong values: a message, never a traceback."""

import argparse
import io
import itertools
import re
import sys

import pytest
from support.searching import searches_long

from hardpoint.builtin_plugins import commands as builtin_commands
from hardpoint.cli import main
from hardpoint.host.registry.discovery import discover
from hardpoint.testing.running.command_suite import ScriptedGenerator

WRONG = (
    "",
    "9" * 5000,
    "-1",
    "nan",
    "1e999",
    "/",
    "/no/such/file",
    "a=b",
    "[=",
    "caf\udce9",
    "\ud800",
)
SHARED = ["--config", "--model", "--set", "--log-format"]
LINES = {
    "generate": ["x"],
    "chat": [],
    "embed": ["x"],
    "plugins list": [],
    "plugins show": ["min_p"],
    "config show": [],
    "info": [],
    "models show": [],
    "pull": ["acme/model"],
    "config schema": [],
    "completion": ["bash"],
    "engine": ["--join", "tcp://10.0.0.1:1"],
    "keys new": ["keys", "a"],
    "keys list": ["keys"],
    "keys revoke": ["keys", "a"],
    "replay": ["no.journal"],
    "journal export": ["no.journal", "trace"],
    "trace": ["x"],
    "simulate": ["no.jsonl"],
    "calibrate": ["--seconds", "0.01"],
    "bench startup": ["--runs", "0"],
}


def options(name: str) -> list[str]:
    """Return the options of a command that take a value; for one, those of every command too."""
    command = next(c for c in builtin_commands.cli_commands() if name.split()[0] == c.name)
    parser = argparse.ArgumentParser()
    command.configure(parser)
    named = re.findall(r"(--[\w-]+) [A-Z]", parser.format_help())
    if name == "chat":
        named = [option for option in named if option not in options("generate")]
    return named + SHARED if name == "config show" else named


def tried(name: str) -> list[str]:
    """Return wrong values for each option of a command, and for an argument.

    With --all, these are all values, else one of them, another one for each.
    """
    values = itertools.cycle(WRONG)
    next(itertools.islice(values, len(name), len(name)), None)  # begins at another one
    count = len(WRONG) if searches_long() else 1
    prefixes = [*(f"{option}=" for option in options(name)), ""]
    return [prefix + next(values) for prefix in prefixes for _ in range(count)]


def test_every_command_is_here():
    assert {line.split()[0] for line in LINES} == {c.name for c in builtin_commands.cli_commands()}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", LINES)
def test_wrong_values_end_with_a_message(monkeypatch, capsys, name):
    monkeypatch.setattr("hardpoint.llm.open_resolved", lambda *a, **k: ScriptedGenerator())
    found = discover()  # 20 ms each time, which is not what is tested
    monkeypatch.setattr("hardpoint.command_plugins.discover", lambda foreign_groups: found)
    for wrong in [*tried(name), "--no-such-option"]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        given = [*name.split(), *LINES[name], wrong]
        code = main(given)
        out, err = capsys.readouterr()
        assert "Traceback" not in err, given
        assert code in (0, 1, 2), given
        if code == 2:
            first, *rest = err.splitlines()
            assert first.startswith("hardpoint: error: "), given
            assert all(line.startswith(("usage: ", " " * 7)) for line in rest), (given, err)
            assert len(first) <= 2048, given
            assert out == "", given
