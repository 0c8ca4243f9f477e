"""The sockets of a server."""

import contextlib
import socket

from support.fake_engine import configured

from hardpoint.builtin_plugins.server.operations.addresses import bind


def test_parts_of_an_answer_are_sent_at_once():
    with contextlib.closing(bind(configured().server)) as bound:
        # With it, asyncio and uvloop set TCP_NODELAY for each connection.
        assert bound.socket.proto == socket.IPPROTO_TCP
