"""Ranks as threads communicate exactly, and end with an error that names the ranks that wait."""

from __future__ import annotations

import threading

import pytest
import torch

from hardpoint.errors import CommunicationAbortedError
from hardpoint.testing import run_ranks


def test_results_are_in_rank_order_and_operations_exact():
    def rank(communicator):
        values = torch.full((2,), float(communicator.rank + 1))
        rows = torch.arange(3) + 10 * communicator.rank
        return [
            communicator.all_reduce(values).tolist(),
            communicator.all_gather(values).tolist(),
            communicator.all_to_all(rows).tolist(),
            communicator.broadcast(values.clone(), 2).tolist(),
        ]

    results = run_ranks(3, rank)
    for index, (total, gathered, row, sent) in enumerate(results):
        assert total == [6.0, 6.0]
        assert gathered == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
        assert row == [index, 10 + index, 20 + index]
        assert sent == [3.0, 3.0]


def test_bfloat16_is_summed_in_float32_and_rounded_once():
    values = [256.0, 0.75, 0.75]

    def rank(communicator):
        return float(communicator.all_reduce(torch.tensor(values[communicator.rank]).bfloat16()))

    assert run_ranks(3, rank) == [258.0] * 3  # rounding after each sum would give 256


def test_sends_do_not_wait_and_arrive_in_order():
    def rank(communicator):
        other = 1 - communicator.rank
        x = torch.zeros(1)
        for number in range(3):
            communicator.send(x.fill_(10 * communicator.rank + number), other)
        return [float(communicator.recv(torch.empty(1), other)) for _ in range(3)]

    assert run_ranks(2, rank) == [[10, 11, 12], [0, 1, 2]]


def test_the_first_error_is_raised_and_no_thread_is_left():
    def rank(communicator):
        if communicator.rank == 1:
            raise KeyError("lost")
        communicator.all_reduce(torch.zeros(1))

    before = set(threading.enumerate())
    with pytest.raises(KeyError, match="lost"):
        run_ranks(3, rank)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda c: None if c.rank else c.all_reduce(torch.zeros(2)),
            r"rank 0 waits in all_reduce of \[2\] torch.float32, rank 1 has returned",
        ),
        (
            lambda c: c.recv(torch.zeros(1), 1 - c.rank),
            "rank 0 waits in recv from rank 1, rank 1 waits in recv from rank 0",
        ),
        (
            lambda c: c.all_reduce(torch.zeros(2 + c.rank)),
            r"different calls \(rank 0: all_reduce of \[2\] .*, rank 1: all_reduce of \[3\]",
        ),
        (lambda c: c.send(torch.zeros(1), c.rank), "destination: expected a rank from 0 to 1, an"),
        (lambda c: c.broadcast(torch.zeros(1), 2), "source: expected a rank from 0 to 1, got 2"),
    ],
)
def test_wrong_calls_end_with_an_error(function, message):
    with pytest.raises((CommunicationAbortedError, ValueError), match=message):
        run_ranks(2, function)
