"""The stand-in for a device with a stream, by a clock that only waiting moves."""

import pytest
import torch

from hardpoint.testing.timing.device_stream import DeviceStream


class Clock:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream(clock: Clock) -> DeviceStream:
    return DeviceStream(clock, clock.sleep)


def test_launches_return_at_once_and_their_times_add_up(stream, clock):
    for _ in range(3):
        stream.launch(lambda: None, 2.0)
    assert clock.now == 0
    stream.synchronize()
    assert clock.now == 6


def test_the_host_computes_while_the_device_works(stream, clock):
    stream.launch(lambda: None, 2.0)
    clock.sleep(1.5)
    stream.synchronize()
    assert clock.now == 2


def test_an_idle_device_begins_at_the_launch(stream, clock):
    clock.sleep(5.0)
    stream.launch(lambda: None, 2.0)
    stream.synchronize()
    assert clock.now == 7


def test_a_copy_before_its_event_is_refused_whatever_the_time(stream, clock):
    copied = stream.copy_to_host(torch.tensor([7]))
    clock.sleep(100.0)
    with pytest.raises(RuntimeError, match=r"expected event\.synchronize"):
        copied.read()
    copied.event.synchronize()
    assert copied.read().tolist() == [7]


def test_a_query_does_not_wait(stream, clock):
    stream.launch(lambda: None, 2.0)
    copied = stream.copy_to_host(torch.tensor([7]))
    assert not copied.event.query()
    assert clock.now == 0
    clock.sleep(2.0)
    assert copied.event.query()
    assert copied.read().tolist() == [7]


def test_the_next_step_reads_tokens_that_the_host_has_not(stream, clock):
    tokens, copies = torch.zeros(1, dtype=torch.int64), []
    for _ in range(3):
        stream.launch(lambda: tokens.add_(1), 2.0)
        copies.append(stream.copy_to_host(tokens))
    copies[0].event.synchronize()
    assert (clock.now, copies[0].read().tolist()) == (2, [1])
    with pytest.raises(RuntimeError):
        copies[1].read()
    copies[2].event.synchronize()
    assert (clock.now, copies[2].read().tolist()) == (6, [3])


def test_work_without_a_time_runs_after_the_event_before_it(stream):
    done = []
    stream.launch(lambda: done.append("before"))
    event = stream.record_event()
    stream.launch(lambda: done.append("after"))
    event.synchronize()
    assert done == ["before"]


def test_a_buffer_written_too_early_gives_the_later_values(stream):
    inputs = torch.tensor([1])
    copied = stream.copy_to_host(inputs)
    inputs.fill_(2)
    copied.event.synchronize()
    assert copied.read().tolist() == [2]


def test_errors_of_work_come_with_each_later_wait(stream):
    def fail() -> None:
        raise ZeroDivisionError

    stream.launch(fail)
    copied = stream.copy_to_host(torch.tensor([1]))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            copied.event.synchronize()
    with pytest.raises(RuntimeError):
        copied.read()


def test_a_negative_time_is_refused(stream):
    with pytest.raises(ValueError, match=r"seconds: expected at least 0, got -1"):
        stream.launch(lambda: None, -1.0)
