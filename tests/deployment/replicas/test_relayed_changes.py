"""Live changes of frontends in other processes: one after another, while the first still runs."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import msgspec
import pytest
from support.waiting import until, wait_until

from hardpoint.errors import HardpointError
from hardpoint.host.live.change import Changes
from hardpoint.host.live.settings import ChangeRequest
from hardpoint.plugins import EngineConfig
from hardpoint.process.engine.loop import Abort
from hardpoint.replicas.relay import owner
from hardpoint.replicas.relay.client import Figures
from hardpoint.replicas.relay.frontends import CHANGE, FrontendChanges
from hardpoint.replicas.relay.messages import SEPARATOR, Notice
from hardpoint.workers.process import WorkerLLM


def asked(text):
    return ChangeRequest.of(text, config={"scheduler.max_waiting": 7})


@pytest.fixture
def sent():
    """The notices of one frontend."""
    return []


@pytest.fixture
def frontends(sent):
    return FrontendChanges(
        lambda: {"W"}, lambda notice, _: sent.append(notice.value), lambda *_: None
    )


def change(text):
    return SimpleNamespace(asked=asked(text), config=EngineConfig(), manifest=None)


def test_an_answer_to_a_change_that_is_undone_is_none_to_the_next(sent, frontends):
    changes = Changes([frontends])
    changes.prepare(change("first"), object())
    wait_until(lambda: len(sent) == 1)
    changes.undo()  # an engine has refused it
    changes.prepare(change("second"), object())
    wait_until(lambda: len(sent) == 2)
    (_, first, _), (_, second, _) = sent
    frontends.answer("W", first, None, "")
    wait_until(lambda: ["undo", first, None] in sent)
    assert not changes.is_prepared()
    frontends.answer("W", second, "other", "it cannot")
    with pytest.raises(HardpointError, match="it cannot"):
        wait_until(changes.is_prepared)
    assert ["undo", second, None] in sent


class Worker(WorkerLLM):
    """Reads notices; `engine` prepares changes, and `client` has its answers."""

    def __init__(self, engine, client):
        self._engine, self._figures = engine, Figures()
        self._client = SimpleNamespace(client=client)


class Client:
    """Plays the owner of the engines."""

    def __init__(self):
        self.waiting, self.answers, self.view = [], [], None

    def next_notices(self):
        self.waiting.append(Future())
        return self.waiting[-1]

    def send(self, *notices):
        self.waiting.pop().set_result(list(notices))

    def ask(self, method, *arguments):
        self.answers.append((method, *arguments))
        return Future()


class Engine:
    def __init__(self):
        self.finished, self.goes_on = [], asyncio.Event()

    async def follow_change(self, request):
        if request.origin == "refused":
            raise HardpointError("not here")
        await self.goes_on.wait()

    def finish_change(self, action):
        self.finished.append(action)
        if action == "commit" and len(self.finished) > 3:
            raise HardpointError("it cannot be committed")


def step(action, number, origin=None):
    value = None if origin is None else msgspec.to_builtins(asked(origin))
    return Notice(CHANGE, [action, number, value])


async def test_a_worker_reads_on_while_it_prepares_and_takes_part_in_one_change(caplog):
    engine, client = Engine(), Client()
    following = asyncio.create_task(Worker(engine, client).follow())

    async def tell(*notices):
        await until(lambda: client.waiting, "the reader")
        client.send(*notices)
        await until(lambda: client.waiting, "the reader again")

    await tell(step("prepare", 1, "slow"))
    await tell(step("prepare", 2, "early"))
    await until(lambda: client.answers, "the answer to the second")
    ((method, number, kind, text),) = client.answers
    assert (method, number, kind) == ("change_state", 2, "BusyError")
    assert "another live change is under way" in text
    await tell(step("undo", 2))  # in which it takes no part
    assert engine.finished == []
    await tell(step("undo", 1))
    assert engine.finished == ["undo"]
    engine.goes_on.set()
    await tell(step("prepare", 3, "next"))
    await until(lambda: ("change_state", 3, None, "") in client.answers, "the third")
    await tell(step("commit", 3), step("keep", 3))
    assert engine.finished == ["undo", "commit", "keep"]
    await tell(step("prepare", 4, "refused"), step("prepare", 5, "after"))
    await until(lambda: len(client.answers) >= 5, "the others")
    assert [answer[1] for answer in client.answers if answer[3] == "not here"] == [4]
    await tell(step("undo", 4), step("prepare", 6, "last"))
    await until(lambda: ("change_state", 6, None, "") in client.answers, "the last")
    await tell(step("commit", 6))
    assert "notice 'change' of the engines' owner: it cannot be committed" in caplog.text
    assert not following.done()
    await until(lambda: client.waiting, "the reader")
    client.waiting.pop().set_exception(HardpointError("it has ended"))
    await following


def test_an_aborted_request_leaves_nothing_with_the_owner(monkeypatch):
    ended, aborted, asked = [], [], []

    class Sockets:
        def __init__(self, _identity, _addresses, queues):
            asked.append(queues.input)

        def start(self, _):
            pass

        def close(self, **_):
            pass

        def requests_ended(self, client, request_ids):
            ended.append((client, list(request_ids)))

    monkeypatch.setattr(owner, "EngineIO", Sockets)
    group = SimpleNamespace(abort_requests=aborted.append)
    link = owner.Link(group, None, None)
    asked[0].put(Abort(["a", "b"], 0))
    wait_until(lambda: ended)
    link.close()
    assert ended == [(0, ["a", "b"])]
    assert [name.rpartition(SEPARATOR)[2] for name in aborted[0]] == ["a", "b"]
