"""Launches of workers: what must be the same where they are opened, and what they leave."""

from __future__ import annotations

import gc
from pathlib import Path

import msgspec
import pytest

from hardpoint.core.engine.prepare import prepare_worker
from hardpoint.core.engine.worker_launch import WorkerLauncher
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineConfig, HardpointError
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.executor import WorkerLaunch, open_worker
from hardpoint.plugins.parallel import Placement
from hardpoint.testing import scripted_config
from hardpoint.typed import convert

HERE = Placement(hosts=("", ""))


@pytest.fixture
def make(scripted):
    config = convert(scripted_config(scripted, {"parallel": {"tensor": 2}}), EngineConfig, path="")
    sources = ConfigSources()
    spec = prepare_worker(config, resolve_plugins(config, sources), sources, lambda *_: None)
    return lambda: WorkerLauncher(spec, sources, Activity())


@pytest.fixture
def launcher(make):
    made = make()
    yield made
    made.close()


def changed(launch: WorkerLaunch, **fields) -> WorkerLaunch:
    data = msgspec.msgpack.decode(launch.data) | fields
    return WorkerLaunch(launch.factory, 1, 2, msgspec.msgpack.encode(data))


def test_a_launch_is_plain_data(launcher):
    launch = launcher.launch(1, HERE)
    again = WorkerLaunch.decode(launch.encode())
    assert again == launch
    open_worker(again).close()


def test_an_engine_that_starts_no_processes_refuses_an_executor_that_needs_one(launcher):
    with pytest.raises(HardpointError, match="built without `start_worker`"):
        launcher.start_process(launcher.launch(1, HERE), "acme.executor:run")


@pytest.mark.parametrize("name", ["hardpoint", "torch"])
def test_other_versions_are_refused_by_name(launcher, name):
    other = changed(launcher.launch(1, HERE), **{name: "0.0.1"})
    with pytest.raises(
        HardpointError, match=rf"^{name}: the engine has version 0\.0\.1, rank 1 on"
    ):
        open_worker(other)


def test_versions_are_compared_before_what_they_change(launcher):
    other = changed(launcher.launch(1, HERE), hardpoint="9", data=b"\xc1")
    with pytest.raises(HardpointError, match=r"^hardpoint: the engine has version 9"):
        open_worker(other)


def test_other_plugins_are_refused(launcher):
    other = changed(launcher.launch(1, HERE), manifest_hash="0")
    with pytest.raises(HardpointError, match="rank 1 on .* got other plugins than the engine has"):
        open_worker(other)


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"data": b""})])
def test_what_is_damaged_is_refused(launcher, data):
    damaged = WorkerLaunch(launcher.launch(0, HERE).factory, 0, 2, data)
    with pytest.raises(HardpointError, match=r"^launch: rank 0 on .* cannot read it: "):
        open_worker(damaged)


def test_there_is_no_other_rank(launcher):
    with pytest.raises(ValueError, match="rank: expected 0 to 1, got 2"):
        launcher.launch(2)


def test_the_folder_of_the_ranks_goes_with_the_launcher(make, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    other = make()
    other.launch(0)
    other.launch(1)
    assert len(list(Path(tmp_path).iterdir())) == 1
    other.close()
    assert list(Path(tmp_path).iterdir()) == []
    other.launch(0)  # after the start
    assert len(list(Path(tmp_path).iterdir())) == 1
    del other
    gc.collect()
    assert list(Path(tmp_path).iterdir()) == []
