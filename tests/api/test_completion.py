"""Completion of command lines: by argcomplete's protocol, and in a real shell."""

import os
import pty
import select
import sys
import time
from pathlib import Path

import pytest
from argcomplete.finders import CompletionFinder
from support.strangers import open_site

from hardpoint.cli import main

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def completions(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that completes a line, as the shells' scripts do."""

    def complete(line: str) -> list[str]:
        # It would open descriptor 9, which is pytest's here.
        monkeypatch.setattr(CompletionFinder, "_init_debug_stream", lambda finder: None)
        answer = folder.parent / "completions"
        for name, value in {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "COMP_TYPE": "9",
        }.items():
            monkeypatch.setenv(name, value)
        assert main([]) == 0
        return [word.strip() for word in answer.read_text().splitlines()]

    return complete


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "hardpoint ",
            {
                *["generate", "models", "chat", "plugins", "config", "completion", "serve"],
                *["embed", "engine", "keys", "scale", "simulate", "calibrate", "trace"],
                *["replay", "journal", "bench", "info", "pull"],
            },
        ),
        ("hardpoint --max", set()),
        ("hardpoint -q gen", {"generate"}),
        ("hardpoint generate --max", {"--max-tokens"}),
        ("hardpoint generate ", set()),
        ("hardpoint generate --nothing x --se", {"--seed", "--set"}),
        ("hardpoint plugins ", {"check", "list", "new", "show"}),
        ("hardpoint plugins show top_", {"top_k", "top_p"}),
        ("hardpoint plugins show schedulers/", {"schedulers/default"}),
        ("hardpoint chat --log-format ", {"text", "json"}),
        ("hardpoint --set scheduler.po", {"scheduler.policy="}),
        ("hardpoint config show --set=scheduler.po", {"--set=scheduler.policy="}),
        ("hardpoint chat --set scheduler.policy=fa", set()),
        ("hardpoint chat --model ", {"smollm2", "scripted", "mine.gguf"}),
        ("hardpoint --config mi", {"mine.gguf"}),
        ("hardpoint completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_words_are_completed(completions, folder, line, expected):
    (folder / "mine.gguf").touch()
    assert set(completions(line)) == expected


def test_commands_of_plugins_are_completed(completions, folder, tmp_path, monkeypatch):
    with open_site(tmp_path / "site", monkeypatch) as site:
        site.install_stranger()
        assert "hello" not in completions("hardpoint ")
        line = "hardpoint --set 'plugins.enable=[\"greeter\"]' hel"
        assert completions(line) == ["hello"]
        assert set(completions(line + "lo --lo")) == {"--loud", "--log-format"}
        (folder / "hardpoint.toml").write_text("plugins.enable = ['greeter']")
        assert completions("hardpoint hel") == ["hello"]


def test_a_broken_configuration_completes_the_default_commands(completions, folder, capsys):
    (folder / "hardpoint.toml").write_text("nothing = 1")
    assert completions("hardpoint gen") == ["generate"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.nightly
def test_a_shell_completes(folder, tmp_path, monkeypatch, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "rc").write_text(f"PS1=ready:\n{capsys.readouterr().out}")
    program = tmp_path / "hardpoint"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hardpoint "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("bash", ["bash", "--noprofile", "--rcfile", str(tmp_path / "rc"), "-i"])
    seen = ""

    def expect(text: str) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 4096).decode()
        seen = seen.partition(text)[2]

    try:
        expect("ready:")
        os.write(terminal, b"hardpoint comp\t")
        expect("hardpoint completion ")
        os.write(terminal, b"--se\t")
        expect("--set ")
        os.write(terminal, b"seed=1 fis\t\n")
        expect("complete")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(capsys, shell):
    assert main(["completion", shell]) == 0
    assert "hardpoint" in capsys.readouterr().out
