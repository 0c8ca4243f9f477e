"""`hardpoint serve`: errors of keys and certificates are reported before the model loads."""

import argparse
from types import SimpleNamespace

import msgspec
import pytest
from support.fake_engine import configured

from hardpoint.builtin_plugins.server.command import COMMAND
from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.builtin_plugins.server.serving import exposure
from hardpoint.plugins import ConfigError
from hardpoint.plugins.commands import ConfigSources


def serve(*arguments, **server):
    def open_async(*_):
        pytest.fail("the model would be loaded")

    context = SimpleNamespace(
        quiet=False,
        load_config=lambda: (configured(**server), ConfigSources()),
        open_async=open_async,
    )
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    return COMMAND.run(parser.parse_args(arguments), context)


class LoadedError(Exception):
    """The model would load with `args[0]` as its configuration."""


@pytest.mark.parametrize(
    ("setting", "used"), [({}, 2048), ({"max_waiting": 5}, 5), ({"max_waiting": None}, None)]
)
def test_the_number_of_waiting_requests_is_bounded(setting, used):
    config = configured()
    config = msgspec.structs.replace(
        config, scheduler=msgspec.structs.replace(config.scheduler, **setting)
    )
    sources = ConfigSources({f"scheduler.{name}": "a file" for name in setting})

    def open_async(config, *_):
        raise LoadedError(config)

    context = SimpleNamespace(
        quiet=False, load_config=lambda: (config, sources), open_async=open_async
    )
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    with pytest.raises(LoadedError) as loaded:
        COMMAND.run(parser.parse_args([]), context)
    assert loaded.value.args[0].scheduler.max_waiting == used


@pytest.mark.parametrize(
    ("arguments", "server", "message"),
    [
        (["--workers", "0"], {}, "server.workers: expected"),
        (["--workers", "65"], {}, "server.workers: expected"),
        (["--keys-file", "/nowhere/keys"], {}, "server.keys_file: '/nowhere/keys' cannot be read"),
        ([], {"keys_file": "/nowhere/keys"}, "server.keys_file: '/nowhere/keys' cannot be read"),
        (["--api-key", ""], {}, "--api-key: expected a key, got an empty text"),
        (["--api-key", "a b"], {}, "key 'default': expected 1 to 1024 visible ASCII characters"),
        ([], {"tls_key": "/nowhere/key"}, "server.tls_certificate: expected a PEM file"),
    ],
)
def test_before_the_model_loads(arguments, server, message):
    with pytest.raises(ConfigError, match=message):
        serve(*arguments, **server)


def test_an_empty_variable_is_no_open_server(monkeypatch):
    monkeypatch.setenv("HARDPOINT_API_KEY", "")
    with pytest.raises(ConfigError, match="HARDPOINT_API_KEY: expected a key, got an empty text"):
        serve()


@pytest.mark.parametrize(
    ("host", "has_keys", "allowed", "expected"),
    [
        ("127.0.0.1", False, None, None),
        ("127.0.0.9", False, None, None),
        ("localhost", False, None, None),
        ("::1", False, None, None),
        (None, False, None, None),
        ("0.0.0.0", True, None, None),
        ("0.0.0.0", False, None, "0.0.0.0, 127.0.0.1, ::1, gpu-1, gpu-1.local, localhost"),
        ("::", False, None, "127.0.0.1, ::, ::1, gpu-1, gpu-1.local, localhost"),
        ("10.0.0.5", False, None, "10.0.0.5, 127.0.0.1, ::1, localhost"),
        ("0.0.0.0", False, ["llm.example.org"], "llm.example.org"),
        ("0.0.0.0", False, ["*"], "any"),
    ],
)
def test_a_server_that_others_can_use_without_a_key_warns(
    monkeypatch, host, has_keys, allowed, expected
):
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-1")
    settings = configured(allowed_hosts=allowed).table(ServerConfig)
    service = SimpleNamespace(has_keys=has_keys, settings=settings)
    warning = exposure(service, SimpleNamespace(host=host))
    if expected is None:
        assert warning is None
    else:
        assert warning == (
            "other machines can use this server without a key (--api-key or server.keys_file "
            f"sets one); accepted host names: {expected} (--allowed-hosts or server.allowed_hosts)"
        )


def test_allowed_hosts_of_the_command_line():
    def open_async(config, *_):
        raise LoadedError(config)

    context = SimpleNamespace(
        quiet=False, load_config=lambda: (configured(), ConfigSources()), open_async=open_async
    )
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    with pytest.raises(LoadedError) as loaded:
        COMMAND.run(parser.parse_args(["--port", "0", "--allowed-hosts", "a.example, b"]), context)
    assert loaded.value.args[0].table(ServerConfig).allowed_hosts == ["a.example", "b"]
