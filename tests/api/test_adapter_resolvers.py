"""Resolvers are asked in order; one that fails or hangs is named, and the request gets an error."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.waiting import PATIENCE_S, until, wait_until

from hardpoint import LLM
from hardpoint.calls.adapter_resolvers import AdapterResolvers
from hardpoint.configuration.loading import config_from
from hardpoint.core.frontend.engine_parts import Opening
from hardpoint.errors import EngineClosedError, PluginFaultError, PluginLoadError, RequestError
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import AdapterResolver, EngineConfig
from hardpoint.testing import scripted_config

GO_ON = threading.Event()
THREADS = 4


class First(AdapterResolver):
    """Knows one name, and refuses one; does something else for others."""

    contract = 1
    closed = 0
    hanging = 0

    def resolve(self, name):
        if name == "wrong":
            return name
        if name == "raises":
            raise KeyError(name)
        if name == "refused":
            raise RequestError("model: not for you")
        if name == "hangs":
            First.hanging += 1
            assert GO_ON.wait(PATIENCE_S)
        return None

    def close(self):
        First.closed += 1


class Second(First):
    contract = 1


class Unbuilt(First):
    contract = 1

    def __init__(self, context):
        raise OSError("no disk")


def opened(tmp_path, *resolvers, seconds=10.0) -> AdapterResolvers:
    (tmp_path / "sql").mkdir(exist_ok=True)
    (tmp_path / "sql" / "adapter_config.json").write_text("{}")
    config, sources = config_from(
        {
            "adapters": {"resolvers": [*resolvers, "folder"], "resolve_seconds": seconds},
            "plugin": {"folder": {"path": str(tmp_path)}},
        },
        {},
        caller="LLM",
    )
    assert isinstance(config, EngineConfig)
    opening = Opening(config, resolve_plugins(config, sources), None, 0, None)
    return AdapterResolvers(opening)


@pytest.fixture(params=["async", "sync"])
def ask(request):
    """Asks resolvers as AsyncLLM and as LLM do."""
    if request.param == "sync":
        return lambda resolvers, name: resolvers.wait_for(name)
    return lambda resolvers, name: asyncio.run(resolvers.resolve(name))


def test_they_are_asked_in_order_until_one_knows_the_name(tmp_path, ask):
    resolvers = opened(tmp_path, First)
    assert ask(resolvers, "sql") == tmp_path / "sql"
    assert ask(resolvers, "absent") is None
    before = First.closed
    resolvers.close()
    resolvers.close()
    assert First.closed == before + 1


def test_faults_name_the_resolver(tmp_path, ask):
    resolvers = opened(tmp_path, First)
    with pytest.raises(PluginFaultError, match=r"'first'.*resolve.*KeyError: 'raises'"):
        ask(resolvers, "raises")
    expected = "'first'.*returned 'wrong', expected a Path, a LoRARequest or None"
    with pytest.raises(PluginFaultError, match=expected):
        ask(resolvers, "wrong")
    with pytest.raises(RequestError, match="^model: not for you$"):
        ask(resolvers, "refused")
    resolvers.close()


def test_one_that_hangs_is_named_and_others_go_on(tmp_path, monkeypatch, ask):
    GO_ON.clear()
    resolvers = opened(tmp_path, First, seconds=0.2)
    try:
        expected = r"'first'.*took longer than adapters.resolve_seconds \(0.2\)"
        with pytest.raises(PluginFaultError, match=expected):
            ask(resolvers, "hangs")
        monkeypatch.setattr(resolvers, "_seconds", PATIENCE_S)  # from here on it shall answer
        assert ask(resolvers, "sql") == tmp_path / "sql"
    finally:
        GO_ON.set()
        resolvers.close()


async def test_those_who_wait_when_it_is_closed_are_told_so(tmp_path):
    GO_ON.clear()
    First.hanging = 0
    names = [f"{__name__}:First", f"{__name__}:Second"]

    resolvers = opened(tmp_path, *names, seconds=PATIENCE_S)
    asked = [asyncio.create_task(resolvers.resolve("hangs")) for _ in range(THREADS + 2)]
    cancelled = asyncio.create_task(resolvers.resolve("hangs"))
    await until(lambda: First.hanging >= THREADS, "the threads")
    cancelled.cancel()
    await asyncio.to_thread(resolvers.close)
    GO_ON.set()
    for error in await asyncio.gather(*asked, return_exceptions=True):
        assert type(error) is EngineClosedError  # or the next one would be asked
    with pytest.raises(asyncio.CancelledError):
        await cancelled


def test_one_that_cannot_be_built_stops_the_start(tmp_path):
    before = First.closed
    with pytest.raises(PluginLoadError, match=r"'unbuilt'.*OSError: no disk"):
        opened(tmp_path, First, Unbuilt)
    assert First.closed == before + 1


def test_a_program_without_an_event_loop_is_told_when_it_is_closed(tmp_path):
    GO_ON.clear()
    First.hanging = 0
    resolvers, ended = opened(tmp_path, First, seconds=PATIENCE_S), []

    def wait():
        with pytest.raises(EngineClosedError):
            resolvers.wait_for("hangs")
        ended.append(True)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(THREADS + 2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: First.hanging >= THREADS, what="the threads")
    resolvers.close()
    GO_ON.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(ended) == len(threads)
    with pytest.raises(EngineClosedError):
        resolvers.wait_for("sql")


def test_llm_has_the_call(tmp_path, scripted):
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "adapter_config.json").write_text("{}")
    extra = {
        "adapters": {"resolvers": ["folder"]},
        "plugin": {"folder": {"path": str(tmp_path)}},
    }
    with LLM(config=scripted_config(scripted, extra)) as llm:
        assert llm.adapters.resolve("sql") == tmp_path / "sql"
        assert llm.adapters.resolve("../sql") is None
