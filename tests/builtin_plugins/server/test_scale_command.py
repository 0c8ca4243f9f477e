"""`hardpoint scale` changes the number of engines of a running server."""

from __future__ import annotations

import argparse
import json
import socket
import threading

import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running

from hardpoint.builtin_plugins import server as server_plugin
from hardpoint.configuration.loading import default_config_type
from hardpoint.plugins import CommandContext, HardpointError, RequestError
from hardpoint.plugins.commands import ConfigSources


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("admin") / "admin.sock"
    with running(FakeEngine(config=configured(admin=f"unix:{path}"))) as running_server:
        yield running_server


def scale(*arguments, config=None):
    (command,) = [c for c in server_plugin.cli_commands() if c.name == "scale"]
    parser = argparse.ArgumentParser(prog="hardpoint scale")
    command.configure(parser)
    context = CommandContext(
        load_config=lambda: (config or default_config_type()(), ConfigSources()),
        load_catalog=None,
        open_model=None,
        version="9.9",
    )
    return command.run(parser.parse_args(arguments), context)


def admin(server):
    return server.engine.config.server.admin


def test_the_number_of_engines(server, capsys):
    server.engine.utilities.clear()
    assert scale("2", "--admin", admin(server)) == 0
    assert scale("--retire", "1,3", "--drain-seconds", "5", "--admin", admin(server)) == 0
    assert server.engine.utilities == [("scale", 2, 30.0), ("retire", [1, 3], 5.0)]
    assert capsys.readouterr().out == "engines: 0, 1 (change 3)\nengines: 0 (change 4)\n"


def test_the_address_is_that_of_the_configuration_and_the_answer_json(server, capsys):
    assert scale("1", "--json", config=server.engine.config) == 0
    assert json.loads(capsys.readouterr().out) == {"epoch": 3, "ranks": [0]}


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            HardpointError("scale: the engines are being changed already; try again later"),
            HardpointError,
            "scale: the engines are being changed already; try again later (409)",
        ),
        (
            RequestError("scale: expected 1 to 1024 engines, got 0"),
            RequestError,
            "scale: expected 1 to 1024 engines, got 0 (400)",
        ),
    ],
)
def test_what_the_server_refuses(server, monkeypatch, error, kind, message):
    async def refuse(num_engines, *, drain_seconds):
        raise error

    monkeypatch.setattr(server.engine, "scale", refuse, raising=False)
    with pytest.raises(HardpointError) as refused:
        scale("0", "--admin", admin(server))
    assert (type(refused.value), str(refused.value)) == (kind, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "scale: expected either N or --retire RANKS"),
        (("1", "--retire", "0"), "scale: expected either N or --retire RANKS"),
        (
            ("1",),
            "--admin: expected the admin address of the server, for example unix:PATH",
        ),
        (
            ("--retire", "a", "--admin", "unix:x"),
            "--retire: expected numbers of engines such as 1,3, got 'a'",
        ),
        *(
            (
                ("1", "--admin", address),
                f"--admin: expected unix:PATH, HOST:PORT or https://HOST:PORT, got {address!r}",
            )
            for address in (
                *("here", "ftp://a:1", ":1", "a:b", "", "a b:1", "a..b:1", "https://.a:1"),
                *("a:65536", f"a:{'9' * 20}", "unix:a\0b"),
            )
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(RequestError) as refused:
        scale(*arguments)
    assert str(refused.value) == message


def test_nobody_there(tmp_path):
    with pytest.raises(HardpointError, match=r"^--admin: unix:\S+ cannot be reached: .*No such"):
        scale("1", "--admin", f"unix:{tmp_path / 'none.sock'}")


def test_somebody_else(server):
    host, port = server.client.base_url.host, server.client.base_url.port
    with pytest.raises(HardpointError, match=r"there is no route '/engines/scale'.*\(404\)$"):
        scale("1", "--admin", f"{host}:{port}")


def test_no_http_at_all():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def answer():
            connection, _ = other.accept()
            connection.recv(4096)
            connection.sendall(b"SSH-2.0-none\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HardpointError, match="^--admin: 127.0.0.1:"):
            scale("1", "--admin", f"127.0.0.1:{port}")
        thread.join(10)


def test_the_key_of_an_administrator(monkeypatch):
    seen = []
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            connection, _ = other.accept()
            seen.append(connection.recv(4096).decode())
            body = b'{"epoch": 1, "ranks": [0]}'
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            connection.sendall(head + body)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        monkeypatch.setenv("HARDPOINT_ADMIN_KEY", "k1")
        assert scale("1", "--admin", f"http://127.0.0.1:{other.getsockname()[1]}") == 0
        thread.join(10)
    assert "authorization: Bearer k1" in seen[0]
