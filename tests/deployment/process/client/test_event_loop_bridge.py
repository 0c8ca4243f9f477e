"""From threads to an event loop: merged while it is busy, and in chunks."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from support.waiting import PATIENCE_S

from hardpoint.errors import EngineDeadError
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs, FinishReason
from hardpoint.process.client import event_loop as module
from hardpoint.process.client.event_loop import EventLoopBridge

END = EngineDeadError("gone")


class Taker:
    """Notes its items."""

    def __init__(self) -> None:
        self.items: list = []
        self.threads: set = set()

    def take(self, item) -> None:
        self.items.append(item)
        self.threads.add(threading.current_thread())

    def tokens(self) -> dict[str, list[int]]:
        result: dict[str, list[int]] = {}
        for item in self.items:
            for each in getattr(item, "outputs", []):
                result.setdefault(each.request_id, []).extend(each.new_token_ids)
        return result


def batch(token: int, names, **fields) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        outputs=[EngineCoreOutput(request_id=n, new_token_ids=[token], **fields) for n in names]
    )


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def in_thread(call) -> None:
    """Run something in another thread, while the loop of this one stands still."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(PATIENCE_S)


def connected() -> tuple[EventLoopBridge, Taker]:
    bridge, taker = EventLoopBridge(), Taker()
    bridge.connect(asyncio.get_running_loop(), taker.take)
    return bridge, taker


async def test_a_loop_that_keeps_up_gets_the_very_batches():
    bridge, taker = connected()
    sent = [batch(number, "ab") for number in range(5)]
    for each in sent:
        in_thread(lambda each=each: bridge(each))
        await settle()
    assert [taken is each for taken, each in zip(taker.items, sent, strict=True)] == [True] * 5
    assert taker.threads == {threading.main_thread()}


async def test_a_busy_loop_finds_one_entry_per_request():
    bridge, taker = connected()
    names = [f"r{number}" for number in range(32)]
    in_thread(lambda: [bridge(batch(token, names)) for token in range(1000)])
    assert bridge.num_waiting == 32
    assert len(asyncio.get_running_loop()._ready) <= 2
    await settle()
    assert bridge.num_waiting == 0
    assert taker.tokens() == {name: list(range(1000)) for name in names}
    assert len(taker.items) == 1


async def test_chunks_leave_the_loop_to_others(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_SIZE", 4)

    bridge, taker = connected()
    turns = []

    async def other():
        while len(taker.items) < 4:
            turns.append(len(taker.items))
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    bridge(batch(1, [f"r{number}" for number in range(14)]))
    await task
    assert [len(item.outputs) for item in taker.items] == [4, 4, 4, 2]
    assert {1, 2, 3} <= set(turns)
    assert list(taker.tokens()) == [f"r{number}" for number in range(14)]


async def test_what_comes_between_chunks_comes_after_them(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_SIZE", 1)

    bridge, taker = connected()
    bridge(batch(1, "abc"))
    await asyncio.sleep(0)
    bridge(batch(2, "abc"))
    bridge(batch(3, "abc", finish_reason=FinishReason.STOP))
    bridge(END)
    await settle()
    assert taker.tokens() == {name: [1, 2, 3] for name in "abc"}
    assert taker.items[-1] is END
    assert len([item for item in taker.items if item is END]) == 1


def test_what_came_before_the_loop_waits_for_it():
    bridge, taker = EventLoopBridge(), Taker()
    assert bridge.failure is None
    for token in range(3):
        bridge(batch(token, "a"))
    bridge(END)
    assert bridge.failure is END

    async def main():
        bridge.connect(asyncio.get_running_loop(), taker.take)
        assert bridge.failure is None  # it is on its way to those who wait
        assert taker.items == []
        await settle()

    asyncio.run(main())
    assert taker.tokens() == {"a": [0, 1, 2]}
    assert taker.items[-1] is END


async def test_an_error_of_the_taker_does_not_lose_the_rest(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_SIZE", 1)

    class Breaks(Taker):
        def take(self, item) -> None:
            super().take(item)
            if len(self.items) == 1:
                raise ValueError("broken")

    bridge, taker, failures = EventLoopBridge(), Breaks(), []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(str(context["exception"])))
    bridge.connect(loop, taker.take)
    bridge(batch(1, "abc"))
    await settle()
    assert taker.tokens() == {name: [1] for name in "abc"}
    assert failures == ["broken"]


async def test_it_keeps_nobody_alive():
    bridge, taker = connected()
    items = taker.items
    del taker
    gc.collect()
    for token in range(100):
        bridge(batch(token, "ab"))
    await settle()
    assert items == []
    assert bridge.num_waiting <= 2


@pytest.mark.parametrize("item", [END, EngineCoreOutputs()])
def test_a_closed_loop_is_nobody(item):
    async def main():
        return connected()

    bridge, taker = asyncio.run(main())
    bridge(item)
    assert taker.items == []


async def test_nothing_comes_after_a_disconnect():
    bridge, taker = connected()
    bridge(batch(1, "ab"))
    bridge.disconnect()
    bridge(batch(2, "ab"))
    bridge(END)
    await settle()
    assert taker.items == []
