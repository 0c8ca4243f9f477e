"""The sockets of a server."""

import contextlib
import socket

import pytest
from support.fake_engine import configured

from hardpoint.builtin_plugins.server.operations.addresses import bind
from hardpoint.errors import ConfigError


def test_parts_of_an_answer_are_sent_at_once():
    with contextlib.closing(bind(configured().server)) as bound:
        # With it, asyncio and uvloop set TCP_NODELAY for each connection.
        assert bound.socket.proto == socket.IPPROTO_TCP


def test_a_malformed_name_of_a_host():
    with pytest.raises(ConfigError, match=r"^server.port: a..b:0 cannot be bound: a part of the n"):
        bind(configured(host="a..b").server)
