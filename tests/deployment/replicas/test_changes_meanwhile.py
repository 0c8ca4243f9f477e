"""Engines are started, weights replaced and plugins quarantined while a live change is made."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import Future

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from support.core.played_engines import Engine
from support.waiting import PATIENCE_S, wait_until

from hardpoint.calls.weights import WeightFiles, WeightUpdateGroup
from hardpoint.core.frontend.engine_parts import EngineParts
from hardpoint.host.live.driver import ChangeOwner, next_of
from hardpoint.host.live.settings import ChangeRequest
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import HardpointError


class Owner:
    """An owner of the parts of played engines."""

    def __init__(self, world, group):
        start = world.start
        self.parts = EngineParts(
            config=start.config, config_sources=start.config_sources,
            plugins=resolve_plugins(start.config, start.config_sources), hooks=None,
            model_config=None, tokenizer=None, client=group, supported_tasks=(),
            components=(), clock=time.monotonic,
        )  # fmt: skip

    def use(self, change):
        self.parts = change(self.parts)
        self.parts.client.restart_with(self.parts.config, self.parts.plugins.manifest)

    def set_load(self, load):
        self.use(lambda parts: parts.with_load(load))

    def call_utility(self, method, *args):
        return self.parts.client.call(method, *args).result(PATIENCE_S)


@pytest.fixture
def change(monkeypatch):
    """Makes a live change, and calls a function before one of its steps."""

    def made(owner, at, meanwhile):
        actions = []
        monkeypatch.setattr(Engine, "call", answered([], actions))
        changes = ChangeOwner(owner, [], lingers=False)
        request = ChangeRequest.of("set_config()", config={"scheduler.max_waiting": 7})
        with changes.begin(request) as (steps, _):
            answer = None
            while (action := next_of(steps, answer)) is not None:
                answer = None
                if not isinstance(action, float):
                    if action == at:
                        meanwhile()
                    answer = owner.call_utility("live_change", action, None)
        return [args[0] for args in actions]

    return made


def answered(result, calls):
    def call(engine, method, *args):
        engine.calls.append((method, args, None))
        calls.append(args)
        future = Future()
        future.set_result(result.get(method) if isinstance(result, dict) else result)
        return future

    return call


def restarting(world, group):
    """Let engine 1 die; return a function that ends the next start and waits until it serves."""
    world.hold = threading.Event()
    world.of(1).die(killed=True)
    wait_until(lambda: world.num_spawned == 3, what="the restart")

    def end():
        world.hold.set()
        wait_until(lambda: set(group.pids) == {0, 1}, what="the other engine")

    return end


def test_an_engine_whose_start_ends_when_others_commit_has_the_change(world, change):
    group = world.group(2, restarts=3)
    owner = Owner(world, group)
    change(owner, "commit", restarting(world, group))
    assert owner.parts.config.scheduler.max_waiting == 7
    assert world.of(1).start.config.scheduler.max_waiting == 7


def test_an_engine_whose_start_ends_when_others_take_weights_has_them(world, monkeypatch, tmp_path):
    group = world.group(2, restarts=3)
    owner, end = Owner(world, group), restarting(world, group)
    call = answered({"call_part": True}, [])

    def ends_start(engine, method, *args):
        if method == "call_part" and args[1] == "use":
            end()
        return call(engine, method, *args)

    monkeypatch.setattr(Engine, "call", ends_start)
    save_file({"w": torch.zeros(1)}, tmp_path / "new.safetensors")
    assert (
        WeightUpdateGroup(owner, WeightFiles()).update(tmp_path / "new.safetensors", version="7")
        == "7"
    )
    assert world.of(1).start.config.load.version == "7"


def test_weights_that_cannot_be_used_are_those_of_no_later_start(world, monkeypatch, tmp_path):
    owner = Owner(world, world.group(2))
    before, call = owner.parts.config.load, answered({"call_part": True}, [])

    def fails(engine, method, *args):
        if method == "call_part" and args[1] == "use":
            raise HardpointError("the engine sleeps")
        return call(engine, method, *args)

    monkeypatch.setattr(Engine, "call", fails)
    save_file({"w": torch.zeros(1)}, tmp_path / "new.safetensors")
    with pytest.raises(HardpointError, match="the engine sleeps"):
        WeightUpdateGroup(owner, WeightFiles()).update(tmp_path / "new.safetensors", version="7")
    owner.parts.client.scale(3, 0.0)
    assert owner.parts.config.load == world.of(2).start.config.load == before


def test_weights_that_come_while_a_change_is_prepared_stay(world, change):
    owner = Owner(world, world.group(2))
    load = msgspec.structs.replace(owner.parts.config.load, version="1", updates=("/new",))
    change(owner, "state", lambda: owner.set_load(load))
    assert owner.parts.config.load == load
    assert owner.parts.config.scheduler.max_waiting == 7


def test_a_plugin_that_is_quarantined_while_a_change_is_prepared_stays_so(world, change):
    owner = Owner(world, world.group(2))
    fewer = resolve_plugins(owner.parts.config, owner.parts.config_sources)

    def quarantine():
        owner.use(lambda parts: dataclasses.replace(parts, plugins=fewer))

    with pytest.raises(HardpointError, match="^a plugin was quarantined while the change was prep"):
        change(owner, "state", quarantine)
    assert owner.parts.plugins is fewer
    assert owner.parts.config.scheduler.max_waiting != 7
