"""The transcripts of the page on faults are what its commands print."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from hardpoint.cli import main
from hardpoint.testing import write_scripted_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "token-traces.md").read_text(encoding="utf-8")
FILES = re.findall(r"^```\w+\n# file: (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SECTIONS = dict(
    re.findall(r"^### ([^\n]+)\n.*?^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    replies = {"say abc": " abc abc", "user: say abc\nassistant: ": "abc"}
    write_scripted_model(tmp_path / "scripted", replies)
    for name, text in FILES:
        (tmp_path / name).write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "examples" / "faulty.py", tmp_path)
    return tmp_path


def commands(transcript: str) -> list[tuple[list[str], str]]:
    """Return the commands of a transcript, each with what it prints."""
    parts = transcript.split("$ hardpoint ")[1:]
    lines = re.compile(
        r"((?:\"[^\"]*\"|[^\"\n])*)\n(.*)", re.DOTALL
    )  # a quoted text may have several
    found = [match.groups() for one in parts if (match := lines.fullmatch(one))]
    return [(shlex.split(command), printed) for command, printed in found]


def pattern(printed: str) -> str:
    """Return a pattern of what is printed, in which `...` stands for any text of a line.

    Alone in a line, it is a completion, which may have line breaks.
    """
    lines = [r"(?s:.*)" if line == "..." else line_pattern(line) for line in printed.split("\n")]
    return "\n".join(lines)


def line_pattern(line: str) -> str:
    return r"[^\n]*".join(map(re.escape, line.split("...")))


@pytest.mark.parametrize("title", SECTIONS)
def test_a_transcript_is_what_is_printed(title, folder, capsys):
    for arguments, printed in commands(SECTIONS[title]):
        status = main(["-q", *arguments])
        found = capsys.readouterr().out
        assert re.fullmatch(pattern(printed), found), found
        assert status == (1 if "differs" in printed else 0)


def test_every_section_has_a_transcript():
    assert list(SECTIONS) == re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
