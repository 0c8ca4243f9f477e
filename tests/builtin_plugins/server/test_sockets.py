"""The sockets of a server."""

import socket

from support.fake_engine import configured

from hardpoint.builtin_plugins.server.serving import bind


def test_parts_of_an_answer_are_sent_at_once():
    bound = bind(configured().server)
    with bound:
        assert bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
