"""The program as its users run it: a process, a scripted model, pipes and a terminal."""

import codecs
import contextlib
import json
import math
import os
import re
import select
import subprocess
import termios
import time
from pathlib import Path

import pytest
from support.process.forked_python import forked_python
from support.scripted_folder import write_config

PROGRAM = ["-m", "hardpoint"]


@pytest.fixture
def folder(scripted: Path, tmp_path: Path) -> Path:
    """A working directory whose `hardpoint.toml` names the scripted model."""
    write_config(tmp_path, scripted)
    return tmp_path


def run(folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, *arguments]
    return forked_python().run(command, folder, dict(os.environ), stdin=stdin)


def test_generate_in_a_pipe_prints_the_text_and_nothing_else(folder):
    done = run(folder, "generate", "say abc", "--max-tokens", "100")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == " abc abc abc\n"


def test_generate_in_a_pipe_shows_the_log_to_whom_the_sink_of_that_name_is_on(folder):
    done = run(folder, "generate", "say abc", "--set", 'stats.sinks=["log"]')
    assert (done.returncode, done.stdout) == (0, " abc abc abc\n")
    assert re.search(r"^hardpoint: \S+: prompt .* tokens/s, generation ", done.stderr, re.MULTILINE)


def test_generate_json(folder):
    done = run(folder, "generate", "emoji", "--json", "--n", "2")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["index"], line["text"]) for line in lines] == [(0, "go 😀 on"), (1, "go 😀 on")]
    assert all(line["finish_reason"] == "stop" for line in lines)
    assert lines[0]["usage"]["completion_tokens"] == len(lines[0]["token_ids"])


def test_generate_ends_at_a_stop_string(folder):
    assert run(folder, "generate", "long", "--stop", "56").stdout == "01234\n"


def test_chat_in_a_pipe(folder):
    done = run(folder, "chat", stdin="hi\n/reset\nhi\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "hello\nhello\n"


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_errors_are_one_line(folder, command):
    arguments = ["--model", "/no/such/model"]
    prompt = ["hi"] if command == "generate" else []
    done = run(folder, command, *prompt, *arguments, stdin="hi\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hardpoint: error: model: ")
    assert done.stderr.count("\n") == 1


def test_a_request_that_asks_for_an_unknown_plugin_is_refused(folder):
    done = run(folder, "generate", "hi", "--plugin-args", "nowhere.a=1")
    assert done.returncode == 2
    assert "plugin_args.nowhere" in done.stderr


class Terminal:
    """The program on a terminal of its own."""

    def __init__(
        self, folder: Path, *arguments: str, term: str = "xterm", columns: int = 80
    ) -> None:
        self.fd, terminal = os.openpty()
        termios.tcsetwinsize(terminal, (24, columns))
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        command, environment = [*PROGRAM, *arguments], {**os.environ, "TERM": term}
        self.program = forked_python().popen(command, cwd=folder, env=environment, **streams)
        os.close(terminal)
        self.seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end in mid-character

    def expect(self, text: str, seconds: float = 60) -> None:
        """Read until a text comes, and forget what came before its end."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not come; this did: {self.seen!r}"
            self._read()
        self.seen = self.seen.partition(text)[2]

    def _read(self) -> None:
        """Read what is there, or comes within a tenth of a second."""
        if select.select([self.fd], [], [], 0.1)[0]:
            self.seen += self._decoder.decode(os.read(self.fd, 4096))

    def _drain(self) -> None:
        """Read on until the program has gone, because a full terminal would stop it."""
        try:
            self._read()
        except OSError:
            time.sleep(0.1)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def exit_code(self, keys: str, seconds: float = 120) -> int:
        """Type keys until the program ends.

        They are repeated, because Python's line editor can miss a signal during its start;
        seldom, because a second signal would kill a program that is about to end.
        """
        end, typed = time.monotonic() + seconds, -math.inf
        while time.monotonic() < end:
            if time.monotonic() > typed + 30:
                with contextlib.suppress(OSError):  # the program has just gone
                    self.type(keys)
                typed = time.monotonic()
            self._drain()
            if (code := self.program.poll()) is not None:
                os.close(self.fd)
                return code
        self.program.kill()
        self.program.wait()
        raise AssertionError(f"the program did not end; it said {self.seen!r}")


@pytest.mark.parametrize("term", [pytest.param("xterm", marks=pytest.mark.nightly), "dumb"])
def test_chat_on_a_terminal(folder, term):
    terminal = Terminal(folder, "chat", term=term)
    terminal.expect("/help lists the commands")
    terminal.expect(">")
    terminal.type("hi\n")
    terminal.expect("hello\r\n")
    terminal.expect(">")
    terminal.type("/what\n")
    terminal.expect("there is no command /what")
    terminal.expect(">")
    assert terminal.exit_code("\x04") == 0


@pytest.mark.nightly
def test_a_narrow_terminal_gets_a_paste_a_completion_and_whole_words(folder):
    terminal = Terminal(folder, "chat", "--temperature", "0", columns=20)
    terminal.expect("/help lists the commands")
    terminal.expect(">")
    terminal.type("\x1b[200~words\nplease\x1b[201~\r")
    terminal.expect("the quick brown fox\r\njumps over the lazy\r\ndog\r\n")
    terminal.expect(">")
    terminal.type("/hel\t\r")
    terminal.expect("/system [TEXT]")
    terminal.expect("twice, leave")
    terminal.expect(">")
    terminal.type("half a line\x03")
    terminal.expect("Ctrl-C again, or Ctrl-D, leaves.")
    terminal.expect(">")
    assert terminal.exit_code("\x03") == 0
