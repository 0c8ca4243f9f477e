"""The counts equal the calls of a rank."""

import logging

import torch
from acme_communicators import Traffic


class Alone:
    """The wrapped communicator of one rank."""

    rank, closed = 0, False

    def all_reduce(self, x):
        return x

    def send(self, x, destination):
        self.sent = x, destination

    def close(self):
        self.closed = True


class Group:
    name, group, options = "traffic", "tensor", Traffic.Options()

    def create(self, use):
        assert use == "torch"
        return Alone()


def test_calls_and_bytes_are_logged_at_the_end(caplog):
    caplog.set_level(logging.INFO, "hardpoint")
    traffic = Traffic(Group())
    for _ in range(3):
        traffic.all_reduce(torch.zeros(4, 2))
    traffic.send(torch.zeros(5, dtype=torch.bfloat16), 1)
    traffic.close()
    assert traffic.wrapped.closed
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 of tensor: 3 calls of all_reduce, 96 bytes",
        "rank 0 of tensor: 1 calls of send, 10 bytes",
    ]
