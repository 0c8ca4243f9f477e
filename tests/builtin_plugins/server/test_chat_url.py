"""`hardpoint chat --url`: a conversation with a running server."""

import io
import sys

import pytest
from support.serve_program import KEYS

from hardpoint.cli import main


@pytest.fixture
def chat(server, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("HARDPOINT_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def chat(text, *arguments, url=server.url):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return main(["chat", "--url", url, "--temperature", "0", *arguments])

    return chat


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_an_answer(chat, server, capsys, path):
    expected = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "fox"}], "temperature": 0, "max_tokens": 30},
    ).json()["choices"][0]["message"]["content"]
    assert chat("fox\n", "--max-tokens", "30", url=server.url + path) == 0
    assert capsys.readouterr().out.rstrip("\n") == expected


def test_the_conversation_goes_on(chat, server, capsys, tmp_path):
    assert chat("fox\nfox\n/save talk.json\n/model other\nfox\n", "--max-tokens", "5") == 0
    assert len((tmp_path / "talk.json").read_text().split('"role"')) == 5
    assert "other answers from here on." in capsys.readouterr().err


def test_errors(chat, server, capsys):
    assert chat("hi\n", "--model", "nothing") == 2
    assert (
        f"model: expected a model of {server.url} (scripted, other), got 'nothing'"
        in capsys.readouterr().err
    )
    for url in ("localhost:8000", "http://[x", "http://x:abc"):
        assert chat("hi\n", url=url) == 2
        assert "--url: expected http://HOST:PORT or https://..." in capsys.readouterr().err
    assert chat("hi\n", url="http://127.0.0.1:1") == 2
    assert "http://127.0.0.1:1 cannot be reached" in capsys.readouterr().err
    assert chat("hi\n", "--plugin-args", "nowhere.x=1") == 1
    assert "nowhere" in capsys.readouterr().err


def test_a_key(program, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    command = ["chat", "--url", program.url, "--temperature", "0", "--max-tokens", "8"]
    for name in ("HARDPOINT_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(command) == 2
    assert "a key is read from HARDPOINT_API_KEY or OPENAI_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_API_KEY", KEYS["alice"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(command) == 0
    assert capsys.readouterr().out == "hello\n"
