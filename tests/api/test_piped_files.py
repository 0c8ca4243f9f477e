"""`hardpoint generate --file -` with a program that waits for each answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from support.scripted_folder import write_config

from hardpoint.builtin_plugins.commands.answer_file import StandardOutput
from hardpoint.cli import main


def prompt(name, **fields):
    return {"id": name, "max_tokens": 3, "prompt": "say abc"} | fields


def conversation(name):
    """Return a prompt that the chat template rejects, before the engine has it."""
    return {"id": name, "max_tokens": 3, "messages": [{"role": [], "content": {}}]}


def request(name, method="POST"):
    body = {"prompt": "say abc", "max_tokens": 3}
    return {"custom_id": name, "method": method, "url": "/v1/completions", "body": body}


FORMS = pytest.mark.parametrize("line", [prompt, request])


def id_of(answer):
    return answer["custom_id" if "custom_id" in answer else "id"]


@pytest.fixture
def folder(scripted, tmp_path, monkeypatch):
    write_config(tmp_path, scripted, "scheduler.max_num_seqs = 2")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([prompt("a"), prompt("b"), prompt("c")], 0),
        ([conversation("a"), prompt("b", prompt=""), prompt("c")], 1),
        ([request("a"), request("b"), request("c")], 0),
        ([request("a", "GET"), request("b", "GET"), request("c")], 1),
    ],
    ids=["prompts", "rejected-prompts", "requests", "wrong-requests"],
)
def test_each_line_is_answered_before_the_next_one(folder, monkeypatch, lines, code):
    reads, writes = os.pipe()
    pieces = [json.dumps(line).encode() + b"\n" for line in lines]
    names = []

    def write(_, answer):
        names.append(id_of(answer))
        if len(names) < len(pieces):
            os.write(writes, pieces[len(names)])
        else:
            os.close(writes)

    os.write(writes, pieces[0])
    monkeypatch.setattr(StandardOutput, "write", write)
    with open(reads) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["generate", "--file", "-"]) == code
    assert names == ["a", "b", "c"]


@FORMS
@pytest.mark.parametrize("path", ["-", "/dev/stdin"])
def test_an_interrupt_ends_a_command_that_waits_for_a_line(folder, line, path):
    command = [sys.executable, "-m", "hardpoint", "generate", "--file", path]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        for name in ("a", "b"):  # "a" is counted before "b" is answered
            program.stdin.write(json.dumps(line(name)) + "\n")
            program.stdin.flush()
            assert id_of(json.loads(program.stdout.readline())) == name
        program.send_signal(signal.SIGINT)
        assert program.wait() == 130
        err = program.stderr.read()
    assert "stopped: " in err
    assert "Traceback" not in err
    assert "Fatal" not in err
