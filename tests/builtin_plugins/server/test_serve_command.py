"""`hardpoint serve`: errors of keys and certificates are reported before the model loads."""

import argparse
from types import SimpleNamespace

import msgspec
import pytest
from support.fake_engine import configured

from hardpoint.builtin_plugins.server.command import COMMAND
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
    ("given", "used"), [({}, 2048), ({"max_waiting": 5}, 5), ({"max_waiting": None}, None)]
)
def test_the_number_of_waiting_requests_is_bounded(given, used):
    config = configured()
    config = msgspec.structs.replace(
        config, scheduler=msgspec.structs.replace(config.scheduler, **given)
    )
    sources = ConfigSources({f"scheduler.{name}": "a file" for name in given})

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
