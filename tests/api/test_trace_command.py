"""`hardpoint trace`: a table, JSON or a page."""

from __future__ import annotations

import io
import sys

import msgspec
import pytest
from support.scripted_folder import write_config

from hardpoint.cli import main
from hardpoint.toolkit.trace import Trace


@pytest.fixture
def folder(tmp_path, scripted):
    write_config(tmp_path, scripted)
    return tmp_path


@pytest.fixture
def traced(folder, monkeypatch, capsys):
    """Return a function that runs the command, and returns its output or its errors."""
    monkeypatch.chdir(folder)

    def run(*arguments, status=0, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        found = main(["-q", "trace", *arguments]), *capsys.readouterr()
        assert found[0] == status, found[2]
        return found[1 if status == 0 else 2]

    return run


def test_a_table_is_printed(traced):
    text = traced("say abc", "--max-tokens", "2")
    assert text.startswith("prompt, 7 tokens: say abc\n\ncompletion 0, 2 tokens")
    assert 'position 1: "a", step 2, number 1 of the model' in text


def test_json_of_several_completions(traced):
    options = ["--json", "--n", "2", "--temperature", "0.8", "--seed", "1", "--max-tokens", "3"]
    found = msgspec.json.decode(traced("-", *options, stdin="say abc"), type=Trace)
    assert [one.index for one in found.completions] == [0, 1]
    assert [len(one.tokens) for one in found.completions] == [3, 3]
    assert found.prompt == "say abc"


def test_a_page_is_a_new_file(folder, traced):
    assert traced("user: hi", "--html", "trace.html", "--chat") == ""
    assert (folder / "trace.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    message = traced("hi", "--html", "trace.html", status=2)
    assert "--html: expected a new file, 'trace.html' exists" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json", "--html", "x"], "--json: expected one of --json and --html, got both"),
        (["--temperature", "-1"], "temperature: expected"),
        (["--html", "no/folder/x.html"], "--html: 'no/folder/x.html' cannot be written"),
    ],
    ids=["both", "temperature", "folder"],
)
def test_wrong_options_are_refused(folder, traced, options, message):
    assert message in traced("hi", *options, status=2)
    assert not (folder / "x").exists()


def test_a_refused_prompt_leaves_no_file(folder, traced):
    options = ["--html", "x", "--plugin-args", "no_such.value=1"]
    assert "no_such" in traced("hi", *options, status=2)
    assert not (folder / "x").exists()
