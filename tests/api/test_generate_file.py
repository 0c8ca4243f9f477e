"""`hardpoint generate --file`: prompts of a file, and runs that are stopped and go on."""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import io
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.process.forked_python import forked_python
from support.scripted_folder import write_config

from hardpoint import LLM
from hardpoint.builtin_plugins.commands import generate
from hardpoint.cli import main
from hardpoint.plugins import HardpointError, RequestError
from hardpoint.testing import scripted_config
from hardpoint.testing.engine_access import command_context
from hardpoint.testing.running.command_suite import ScriptedGenerator

PROMPTS = ["say abc", {"id": "b", "prompt": [97, 98], "max_tokens": 3}, "third"]


class Generator(ScriptedGenerator):
    """Refuses empty prompts, and remembers what it is asked."""

    def __init__(self, fails_at=None):
        self.asked, self._fails_at = [], fails_at

    def generate_unordered(self, requests):
        for position, (prompt, params) in enumerate(requests):
            if position == self._fails_at:
                raise KeyboardInterrupt
            self.asked.append((prompt, params))
            if not prompt:
                yield position, RequestError("prompt: expected at least one token")
            else:
                *_, last = self.stream(prompt, params)
                yield position, last


@pytest.fixture
def here(folder):
    write_prompts(folder / "p.jsonl", PROMPTS)
    return folder


def write_prompts(path, prompts):
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def run(*arguments, generator=None, quiet=False):
    parser = argparse.ArgumentParser(prog="hardpoint generate")
    generate.COMMAND.configure(parser)
    options = parser.parse_args(["--file", *arguments])
    context = dataclasses.replace(command_context(generator or Generator()), quiet=quiet)
    return generate.COMMAND.run(options, context)


def error(*arguments):
    """Return the error of a run that must not open the model."""
    generator = Generator()
    with pytest.raises(HardpointError) as caught:
        run(*arguments, generator=generator)
    assert generator.asked == []
    return str(caught.value)


def answers(path="a.jsonl"):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


class TestLines:
    def test_each_prompt_has_one_line(self, here, capsys):
        generator = Generator()
        assert run("p.jsonl", "--temperature", "0.5", generator=generator) == 0
        captured = capsys.readouterr()
        lines = [json.loads(line) for line in captured.out.splitlines()]
        assert [(line["id"], line["prompt"]) for line in lines] == [
            (1, "say abc"),
            ("b", [97, 98]),
            (3, "third"),
        ]
        assert lines[0]["text"] == " abc"
        assert captured.err.startswith("hardpoint: 3 prompts finished, ")
        assert captured.err.count("\n") == 1
        ((_, params), (_, own), _) = generator.asked
        assert (params.temperature, params.max_tokens) == (0.5, 256)
        assert (own.temperature, own.max_tokens) == (0.5, 3)

    def test_conversations_go_through_the_chat_template(self, here):
        write_prompts(here / "p.jsonl", ["hi", {"messages": [{"role": "user", "content": "hi"}]}])
        generator = Generator()
        run("p.jsonl", generator=generator)
        run("p.jsonl", "--chat", generator=generator)
        asked = [prompt if isinstance(prompt, str) else "chat" for prompt, _ in generator.asked]
        assert asked == ["hi", "chat", "chat", "chat"]

    def test_text_has_a_prompt_per_line(self, here, capsys):
        (here / "p.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\n{two\n  \nthree")
        assert run("p.txt", "--format", "text") == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(line["id"], line["prompt"]) for line in lines] == [
            (1, "one"),
            (3, "{two"),
            (5, "three"),
        ]

    def test_what_is_refused_is_a_line_with_its_error(self, here, capsys):
        write_prompts(here / "p.jsonl", ["one", "", "three"])
        assert run("p.jsonl", "--output", "a.jsonl") == 1
        assert [line.get("error") for line in answers()] == [
            None,
            "prompt: expected at least one token",
            None,
        ]
        assert capsys.readouterr().err.endswith(
            ", 1 failed\nhardpoint: error: 1 prompt failed; the first one: id 2: prompt: expected "
            "at least one token\n"
        )

    def test_quiet_prints_errors_alone(self, here, capsys):
        assert run("p.jsonl", "--output", "a.jsonl", quiet=True) == 0
        with open("a.jsonl", "a") as file:
            file.write('{"id":')
        assert run("p.jsonl", "--output", "a.jsonl", "--resume", quiet=True) == 0
        assert len(answers()) == 3
        write_prompts(here / "p.jsonl", [""])
        assert capsys.readouterr().err == ""
        assert run("p.jsonl", quiet=True) == 1
        assert capsys.readouterr().err.startswith("hardpoint: error: 1 prompt failed; ")

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b'{"prompt": "half', 'expected a line of JSON, got \'{"prompt": "half\': '),
            (b"\x00\x00", "expected a line of JSON, got "),
            (b"[" * 100_000, "expected a line of JSON, got "),
            (b'"caf\xe9"', "expected UTF-8, got the byte 0xe9 at position 4"),
            (b"7", "expected a text, or an object with prompt or messages, got 7"),
            (b"{}", "expected either prompt or messages"),
            (b'{"prompt": "a", "messages": []}', "expected either prompt or messages"),
            (b'{"prompt": [1, "a"]}', "prompt: expected a text or a list of token ids, got "),
            (b'{"messages": ["hi"]}', "messages[0]: expected an object with role and content"),
            (b'{"prompt": "a", "id": 1.5}', "id: expected a text or a whole number, got 1.5"),
            (b'{"prompt": "a", "id": 1}', "id: expected a new one, got 1, which line 1 has"),
            (
                b'{"prompt": "a", "max_token": 5}',
                "max_token: unknown field (did you mean 'max_tokens'?); known: id, prompt, ",
            ),
            (
                b'{"prompt": "a", "max_tokens": 0}',
                "max_tokens: expected a whole number >= 1, got 0",
            ),
            (b'{"prompt": "a", "temperature": 1e999}', "expected a line of JSON, got "),
            (
                b'{"prompt": "a", "logit_bias": {"%s": 1}}' % (b"9" * 5000),
                "logit_bias: expected a whole number as key, got ",
            ),
            (b'{"custom_id": "a", "body": {}}', "custom_id: this is a line for OpenAI's batch"),
        ],
    )
    def test_a_wrong_line_is_named_before_the_model_is_loaded(self, here, line, message):
        (here / "p.jsonl").write_bytes(b'"fine"\n\n' + line)
        found = error("p.jsonl", "--output", "a.jsonl")
        assert found.startswith(f"p.jsonl:3: {message}")
        assert len(found) < 600
        assert not Path("a.jsonl").exists()

    def test_in_a_pipe_what_comes_before_a_wrong_line_is_answered(self, monkeypatch, capsys, here):
        given = io.TextIOWrapper(io.BytesIO(b'"one"\n"two"\n"thr'))
        monkeypatch.setattr(sys, "stdin", given)
        with pytest.raises(RequestError, match="standard input:3: expected a line of JSON"):
            run("-")
        assert len(capsys.readouterr().out.splitlines()) == 2

    def test_a_line_has_a_limit(self, here, monkeypatch):
        monkeypatch.setattr(
            "hardpoint.builtin_plugins.server.batches.text_lines.MAX_LINE_BYTES", 1 << 20
        )
        (here / "p.jsonl").write_bytes(b'"' + b"a" * (1 << 20) + b'"')
        assert error("p.jsonl") == "p.jsonl:1: expected a line of at most 1 MiB"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "--file: 'none' cannot be read: No such file or directory"),
        (["."], "--file: '.' cannot be read: Is a directory"),
        (["a\0b"], "--file: 'a\\x00b' cannot be read: embedded null byte"),
        (["empty"], "empty: expected a prompt per line, got none"),
        (["p.jsonl", "prompt"], "prompt: expected none besides --file, got 'prompt'"),
        (["p.jsonl", "--resume"], "--resume: it needs an answer file; add --output PATH"),
        (
            ["p.jsonl", "--output", "/dev/null", "--resume"],
            "--resume: expected a regular file as --output, got '/dev/null'",
        ),
        (["p.jsonl", "--output", "no/a"], "--output: 'no/a' cannot be opened: No such file"),
        (["p.jsonl", "--output", "a\0b"], "--output: 'a\\x00b' cannot be opened: embedded null"),
        (["p.jsonl", "--output", "."], "--output: '.' cannot be opened: Is a directory"),
        (
            ["p.jsonl", "--output", "./p.jsonl", "--overwrite"],
            "--output: expected another file than --file, got './p.jsonl'",
        ),
    ],
)
def test_wrong_arguments(here, arguments, message):
    (here / "empty").write_text("\n \n")
    assert error(*arguments).startswith(message)


def test_batch_options_need_a_file(folder, capsys):
    assert main(["generate", "a prompt", "--output", "a.jsonl"]) == 2
    assert "--output: it is for prompts of a file; add --file PATH" in capsys.readouterr().err


def test_a_full_disk_is_named(here, capsys):
    with pytest.raises(HardpointError, match="'/dev/full' cannot be written: No space left"):
        run("p.jsonl", "--output", "/dev/full")


class TestResume:
    def test_an_existing_file_is_not_touched(self, here):
        run("p.jsonl", "--output", "a.jsonl")
        before = answers()
        assert error("p.jsonl", "--output", "a.jsonl") == (
            "--output: 'a.jsonl' exists; add --resume to go on with it, or --overwrite to begin "
            "again"
        )
        assert answers() == before
        assert run("p.jsonl", "--output", "a.jsonl", "--overwrite") == 0
        assert len(answers()) == 3

    def test_what_has_an_answer_does_not_run_again(self, here, capsys):
        interrupted = Generator(fails_at=2)
        with pytest.raises(KeyboardInterrupt):
            run("p.jsonl", "--output", "a.jsonl", "--resume", generator=interrupted)
        err = capsys.readouterr().err
        assert err.startswith("hardpoint: stopped: 2 of 3 prompts finished, ")
        assert err.endswith("; the same command with --resume goes on with a.jsonl\n")
        generator = Generator()
        assert run("p.jsonl", "--output", "a.jsonl", "--resume", generator=generator) == 0
        assert [prompt for prompt, _ in generator.asked] == ["third"]
        assert [line["id"] for line in answers()] == [1, "b", 3]
        assert "hardpoint: 3 prompts finished (2 before), " in capsys.readouterr().err
        assert run("p.jsonl", "--output", "a.jsonl", "--resume", generator=Generator()) == 0
        assert capsys.readouterr().err == "hardpoint: a.jsonl has all 3 answers\n"

    def test_what_failed_runs_again_and_leaves_no_old_line(self, here):
        write_prompts(here / "p.jsonl", ["one", "", "three"])
        run("p.jsonl", "--output", "a.jsonl")
        generator = Generator()
        assert run("p.jsonl", "--output", "a.jsonl", "--resume", generator=generator) == 1
        assert [prompt for prompt, _ in generator.asked] == [""]
        assert [line["id"] for line in answers()] == [1, 3, 2]
        assert sorted(os.listdir()) == ["a.jsonl", "p.jsonl"]

    @pytest.mark.parametrize("kept", [2, 30, -1])
    def test_a_half_written_line_is_written_again(self, here, kept, capsys):
        run("p.jsonl", "--output", "a.jsonl")
        whole = Path("a.jsonl").read_bytes()
        *first, last = whole.splitlines(keepends=True)
        Path("a.jsonl").write_bytes(b"".join(first) + last[:kept])
        assert run("p.jsonl", "--output", "a.jsonl", "--resume") == 0
        err = capsys.readouterr().err
        assert ("a.jsonl:3: the line is half-written" in err) == (kept > 0)
        assert Path("a.jsonl").read_bytes().rstrip() == whole.rstrip()

    def test_another_file_is_not_taken_for_answers(self, here):
        Path("notes").write_text("my notes")
        message = "notes:1: expected an answer that --file wrote, got 'my notes'"
        assert error("p.jsonl", "--output", "notes", "--resume") == message
        assert Path("notes").read_text() == "my notes"

    def test_a_changed_prompt_is_an_error(self, here):
        run("p.jsonl", "--output", "a.jsonl")
        assert error("p.jsonl", "--output", "a.jsonl", "--resume", "--seed", "1").startswith(
            "p.jsonl:1: the id 1 has the answer to another prompt, or with other parameters, in "
            "a.jsonl:1; "
        )
        write_prompts(here / "p.jsonl", [*PROMPTS[:2], "another"])
        message = "p.jsonl:3: the id 3 has the answer to another prompt"
        assert error("p.jsonl", "--output", "a.jsonl", "--resume").startswith(message)

    def test_two_models_are_not_mixed(self, here):
        run("p.jsonl", "--output", "a.jsonl")
        text = Path("a.jsonl").read_text()
        Path("a.jsonl").write_text(text.replace('"scripted"', '"other"'))
        assert error("p.jsonl", "--output", "a.jsonl", "--resume") == (
            "a.jsonl:1: this answer is of the model 'other', and --resume with 'scripted' would "
            "mix them"
        )

    def test_one_process_at_a_time_has_the_file(self, here):
        with open("a.jsonl", "w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            message = "--output: 'a.jsonl' is in use by another process"
            assert error("p.jsonl", "--output", "a.jsonl") == message

    def test_a_new_file_of_another_process_stays(self, here, monkeypatch):
        """Both found no file; the other process locked the one that it made."""
        with open("a.jsonl", "w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            monkeypatch.setattr(os.path, "exists", lambda _: False)
            assert "in use by another process" in error("p.jsonl", "--output", "a.jsonl")
        assert Path("a.jsonl").is_file()


@pytest.mark.parametrize(
    ("columns", "term", "drawn"),
    [(80, "xterm", "1/3, 0:"), (20, "xterm", "1/3, 0:"), (80, "dumb", None)],
)
def test_progress_fits_the_terminal(here, monkeypatch, columns, term, drawn):
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monkeypatch.setenv("TERM", term)
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        run("p.jsonl", "--output", "a.jsonl")
        monkeypatch.undo()
    pieces = []
    with open(ours, "rb", buffering=0) as screen, suppress(OSError):  # EIO: all was read
        while piece := screen.read(4096):  # a read may give less than what was written
            pieces.append(piece)
    seen = b"".join(pieces).decode()
    *lines, summary = seen.split("\r\x1b[K")
    assert summary.startswith("hardpoint: 3 prompts finished, ")
    assert all(len(line) < columns for line in lines)
    assert (drawn in seen) if drawn else (lines == [])


def test_of_several_prompts_the_refused_one_is_named(scripted, capsys):
    parser = argparse.ArgumentParser()
    generate.COMMAND.configure(parser)
    options = parser.parse_args(["say abc", "", "emoji"])
    with LLM(config=scripted_config(scripted)) as llm:
        context = command_context(llm)
        with pytest.raises(RequestError, match="prompt 2 of 3: prompt: expected at least one"):
            generate.COMMAND.run(options, context)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_several_prompts_share_a_batch(scripted, folder, arguments, capsys, monkeypatch):
    def steps(*prompts):
        with LLM(config=scripted_config(scripted)) as llm:
            count, step = [], llm.llm_engine.step
            monkeypatch.setattr(llm.llm_engine, "step", lambda: count.append(1) or step())
            parser = argparse.ArgumentParser()
            generate.COMMAND.configure(parser)
            options = parser.parse_args([*prompts, *arguments])
            assert generate.COMMAND.run(options, command_context(llm)) == 0
            return len(count)

    assert steps("say abc", "emoji", "say abc") <= steps("say abc") + 2
    assert capsys.readouterr().out.count(" abc abc abc") == 3


def test_json_is_valid_in_any_encoding(here, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", output)
    write_prompts(here / "p.jsonl", ["é"])
    run("p.jsonl")
    assert json.loads(output.buffer.getvalue())["prompt"] == "é"


KILLED = """
import os, signal, sys
from hardpoint.builtin_plugins.commands import answer_file
from hardpoint.cli import main

class Killing:
    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, fd, data):
        if bytes(data).count(b'"id":') and len(open("a.jsonl").readlines()) == 11:
            os.write(fd, data[:40])
            os.kill(os.getpid(), signal.SIGKILL)
        return os.write(fd, data)

answer_file.os = Killing()
sys.exit(main())
"""
FILE = ["generate", "--file", "p.jsonl", "--output", "a.jsonl", "--resume", "--max-tokens", "40"]


@pytest.fixture
def scripted_folder(scripted, tmp_path):
    write_config(tmp_path, scripted, "scheduler.max_num_seqs = 4")
    return tmp_path


def test_a_killed_run_goes_on(scripted_folder):
    write_prompts(scripted_folder / "p.jsonl", [f"prompt {number}" for number in range(30)])
    python = forked_python()
    killed = python.run(["-c", KILLED, *FILE], scripted_folder, dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    assert (scripted_folder / "a.jsonl").read_text().count("\n") == 11
    done = python.run(["-m", "hardpoint", *FILE], scripted_folder, dict(os.environ))
    assert done.returncode == 0
    assert "a.jsonl:12: the line is half-written; its prompt runs again" in done.stderr
    assert "30 prompts finished (11 before)" in done.stderr
    found = answers(scripted_folder / "a.jsonl")
    assert sorted(line["id"] for line in found) == list(range(1, 31))


@pytest.mark.nightly
def test_a_run_killed_twice_answers_every_prompt_once(scripted_folder):
    prompts = [f"prompt {number}" for number in range(500)]
    write_prompts(scripted_folder / "p.jsonl", prompts)
    path = scripted_folder / "a.jsonl"
    for count in (100, 300):
        program = subprocess.Popen([sys.executable, "-m", "hardpoint", *FILE], cwd=scripted_folder)
        while not path.exists() or path.read_bytes().count(b"\n") < count:
            assert program.poll() is None
            time.sleep(0.001)
        program.kill()
        assert program.wait() == -signal.SIGKILL
        assert path.read_bytes().count(b"\n") < 500
    last = [sys.executable, "-m", "hardpoint", *FILE]
    done = subprocess.run(last, cwd=scripted_folder, capture_output=True, text=True, check=True)
    print(done.stderr)
    found = {line["id"]: line for line in answers(path)}
    assert len(answers(path)) == len(found) == 500
    assert [found[number]["prompt"] for number in range(1, 501)] == prompts
