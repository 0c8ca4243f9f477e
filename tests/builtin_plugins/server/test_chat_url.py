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
    assert chat("hi\n", url="http://127.0.0.1:1") == 2
    assert "http://127.0.0.1:1 cannot be reached" in capsys.readouterr().err
    assert chat("hi\n", "--plugin-args", "nowhere.x=1") == 1
    assert "nowhere" in capsys.readouterr().err


LONG = "a" * 70


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "http://localhost:abc",
        "http://localhost:65536",
        "http://[::1",
        "http://a b:80",
        "http://a..b",
        f"http://{LONG}",
        "http://localhost/\u00e9",
        "http://localhost/a b",
    ],
)
def test_a_malformed_url(monkeypatch, capsys, tmp_path, url):
    monkeypatch.chdir(tmp_path)
    assert main(["-q", "chat", "--url", url]) == 2
    expected = f"--url: expected http://HOST:PORT or https://..., got {url!r}"
    assert capsys.readouterr().err == f"hardpoint: error: {expected}\n"


@pytest.mark.parametrize("key", ["sk-secret\r", "sk-\u00e9cret", "sk secret", "sk-secret\n"])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["chat", "--url", "http://127.0.0.1:1"], "HARDPOINT_API_KEY"),
        (["chat", "--url", "http://127.0.0.1:1"], "OPENAI_API_KEY"),
        (["trace", "hi", "--url", "http://127.0.0.1:1"], "HARDPOINT_API_KEY"),
        (["scale", "1", "--admin", "127.0.0.1:1"], "HARDPOINT_ADMIN_KEY"),
    ],
)
def test_a_malformed_key_is_not_shown(monkeypatch, capsys, tmp_path, arguments, name, key):
    monkeypatch.chdir(tmp_path)
    for variable in ("HARDPOINT_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, key)
    assert main(["-q", *arguments]) == 2
    expected = f"{name}: expected a key of visible ASCII characters, got one with a blank, a line "
    assert capsys.readouterr().err == f"hardpoint: error: {expected}end or another character\n"


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
