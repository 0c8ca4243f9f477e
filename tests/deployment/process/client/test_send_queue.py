"""Tasks that try to send, one after another, while the loop goes on."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.waiting import PATIENCE_S

from hardpoint.errors import EngineDeadError, EngineTimeoutError
from hardpoint.process.client.event_loop import SendQueue


class Engine:
    """Takes as many messages as it has room for."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.got: list[int] = []

    def send(self, number: int) -> bool:
        if len(self.got) == self.room:
            return False
        self.got.append(number)
        return True


def sending(queue: SendQueue, engine: Engine, number: int, ended=lambda: False) -> asyncio.Task:
    return asyncio.create_task(queue.send(lambda: engine.send(number), ended))


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_who_finds_room_does_not_wait():
    engine, queue = Engine(1), SendQueue()
    await queue.send(lambda: engine.send(1), lambda: False)
    assert (engine.got, queue.num_waiting) == ([1], 0)


async def test_who_came_first_is_sent_first():
    engine, queue = Engine(), SendQueue()
    tasks = [sending(queue, engine, number) for number in range(50)]
    await settle()
    assert queue.num_waiting == 50
    engine.room = 20
    while len(engine.got) < 20:
        await asyncio.sleep(0.01)
    engine.room = 100
    tasks.append(sending(queue, engine, 50))
    await asyncio.gather(*tasks)
    assert engine.got == list(range(51))
    assert queue.num_waiting == 0


async def test_all_are_told_when_their_time_is_over():
    engine, queue = Engine(), SendQueue(0.1)
    began = time.monotonic()
    tasks = [sending(queue, engine, number) for number in range(1000)]
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, EngineTimeoutError)
    assert 0.1 <= time.monotonic() - began < PATIENCE_S  # not one after another
    assert queue.num_waiting == 0


async def test_an_error_is_for_who_met_it():
    engine, queue = Engine(), SendQueue()

    def dead() -> bool:
        if engine.room:
            raise EngineDeadError("gone")
        return False

    first = asyncio.create_task(queue.send(dead, lambda: False))
    second = sending(queue, engine, 2)
    await settle()
    engine.room = 1
    with pytest.raises(EngineDeadError, match="^gone$"):
        await first
    await second
    assert engine.got == [2]


@pytest.mark.parametrize("cancelled", [0, 2])
async def test_who_is_cancelled_holds_up_nobody(cancelled):
    engine, queue = Engine(), SendQueue()
    tasks = [sending(queue, engine, number) for number in range(4)]
    await settle()
    tasks.pop(cancelled).cancel()
    await settle()
    assert queue.num_waiting == 3
    engine.room = 10
    await asyncio.gather(*tasks)
    assert engine.got == [number for number in range(4) if number != cancelled]


async def test_who_has_nothing_left_to_send_goes():
    engine, queue, ended = Engine(), SendQueue(), set()
    tasks = [sending(queue, engine, n, lambda n=n: n in ended) for n in range(4)]
    await settle()
    ended.add(2)
    queue.wake_ended()
    await asyncio.wait_for(tasks[2], PATIENCE_S)
    assert queue.num_waiting == 3
    await asyncio.wait_for(queue.send(lambda: engine.send(9), lambda: True), PATIENCE_S)
    ended.update(range(4))
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    assert engine.got == []
