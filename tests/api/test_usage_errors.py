"""The program's messages for a wrong command line, and their form."""

import io
import json
import logging
import sys
from datetime import datetime

import pytest

from hardpoint.builtin_plugins import commands as builtin_commands
from hardpoint.cli import main
from hardpoint.plugins import Command
from hardpoint.testing.running.command_suite import ScriptedGenerator

pytestmark = pytest.mark.usefixtures("folder")

GENERATE = "hardpoint generate [options] PROMPT [PROMPT ...]"
PROGRAM = "hardpoint [options] COMMAND ..."


@pytest.mark.parametrize(
    ("line", "message", "usage"),
    [
        (
            "generate x --max-token 3",
            "unrecognized option --max-token; did you mean --max-tokens?",
            GENERATE,
        ),
        ("generate x --nothing", "unrecognized option --nothing", GENERATE),
        ("generate x -z", "unrecognized option -z", GENERATE),
        ("generate x --max-tokens x", "--max-tokens: expected a whole number, got 'x'", GENERATE),
        ("generate x --top-p=", "--top-p: expected a number, got ''", GENERATE),
        (
            "generate x --stop -x",
            "--stop: a value is missing; write one with a leading - as --stop=-...",
            GENERATE,
        ),
        (
            "generat x",
            "unknown command 'generat' (did you mean 'generate'?); the commands are generate,",
            PROGRAM,
        ),
        (
            "--max-tokens 3 generate x",
            "option --max-tokens belongs to `hardpoint generate` and `hardpoint chat`",
            PROGRAM,
        ),
        ("--verbos config show", "unrecognized option --verbos; did you mean --verbose?", PROGRAM),
        (
            "config shwo",
            "unknown command 'shwo' (did you mean 'show'?); the commands are show, check, init, "
            "schema",
            "hardpoint config [options] COMMAND ...",
        ),
        (
            "plugins",
            "a command is missing: list, show",
            "hardpoint plugins [options] COMMAND ...",
        ),
        (
            "plugins --json list",
            "option --json belongs to `hardpoint plugins list` and `hardpoint plugins show`",
            "hardpoint plugins [options] COMMAND ...",
        ),
        ("plugins list x", "unexpected argument 'x'", "hardpoint plugins list [options]"),
        (
            "--log-format xml config show",
            "--log-format: expected one of text, json, got 'xml'",
            PROGRAM,
        ),
        (
            "config show --log-format jso",
            "--log-format: expected one of text, json, got 'jso' (did you mean 'json'?)",
            "hardpoint config show [options]",
        ),
        ("config show --set", "--set: a value is missing", "hardpoint config show [options]"),
    ],
)
def test_a_wrong_line_is_explained_with_the_usage_of_its_command(capsys, line, message, usage):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    explained, shown, *_ = err.splitlines()
    assert explained.startswith(f"hardpoint: error: {message}")
    assert (out, shown) == ("", f"usage: {usage}")


def test_quiet_leaves_the_usage_away(capsys):
    assert main(["-q", "plugins", "show"]) == 2
    assert capsys.readouterr().err == "hardpoint: error: missing argument: PLUGIN\n"


def test_an_argument_that_is_no_text_is_refused(capsys):
    assert main(["generate", "caf\udce9"]) == 2
    assert capsys.readouterr().err == (
        "hardpoint: error: argument 2: byte 0xe9 at character 3 of 'caf\\udce9' is not UTF-8\n"
    )


@pytest.mark.parametrize("command", [["generate", "-"], ["chat"]])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_input_that_is_no_text_is_refused(monkeypatch, capsys, command, errors):
    stdin = io.TextIOWrapper(io.BytesIO(b"un caf\xe9\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr("hardpoint.llm.open_resolved", lambda *a, **k: ScriptedGenerator())
    assert main(command) == 2
    assert capsys.readouterr().err == (
        "hardpoint: error: standard input: byte 0xe9 after 'un caf' is not utf-8; convert the "
        "text, with iconv for one\n"
    )


@pytest.fixture
def log(monkeypatch):
    """Let `hardpoint config` write to the log; return its context."""
    contexts = []

    def run(options, context):
        contexts.append(context)
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger("hardpoint").log(level, "of level %d", level)
        context.show_error("one\nfailed")
        return 1

    command = Command("config", "For a test.", lambda parser: None, run)
    monkeypatch.setattr(builtin_commands.config, "COMMAND", command)
    return contexts


@pytest.mark.parametrize(
    ("options", "levels"),
    [
        ([], [30, 40]),
        (["--quiet"], [40]),
        (["--log-format", "text"], [20, 30, 40]),
        (["-q", "--log-format", "text"], [40]),
    ],
)
def test_the_level_of_the_log(log, capsys, options, levels):
    expected = [*(f"of level {level}" for level in levels), "error: one failed"]
    for line in ([*options, "config"], ["config", *options]):
        assert main(line) == 1
        assert capsys.readouterr().err == "".join(f"hardpoint: {text}\n" for text in expected)
    assert [context.quiet for context in log] == [bool({"-q", "--quiet"} & {*options})] * 2
    assert logging.getLogger("hardpoint").handlers == []


def test_verbose_logs_all_with_times(log, capsys):
    assert main(["config", "-v"]) == 1
    first, *_, last = capsys.readouterr().err.splitlines()
    day, _, rest = first.partition(" ")
    datetime.fromisoformat(day)
    assert rest.partition(" ")[2] == "DEBUG hardpoint: of level 10"
    assert last == "hardpoint: error: one failed"


def test_log_lines_are_json(log, capsys):
    assert main(["config", "--log-format", "json", "--verbose"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == ["DEBUG", "INFO", "WARNING", "ERROR", "ERROR"]
    assert lines[-1].keys() == {"time", "level", "logger", "message"}
    assert (lines[-1]["logger"], lines[-1]["message"]) == ("hardpoint", "one failed")
    assert datetime.fromisoformat(lines[-1]["time"]).utcoffset().total_seconds() == 0
    assert main(["--log-format=json", "plugins", "show"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "missing argument: PLUGIN"
