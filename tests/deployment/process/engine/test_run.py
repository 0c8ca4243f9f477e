"""An engine process closes its parts when it ends, whatever went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import pytest
from support.core.launch_harness import launch

from hardpoint.core.weights.worker_spec import StartWorker
from hardpoint.plugins import EngineConfig
from hardpoint.process.engine import run


@dataclass
class Spec:
    """The fields of a WorkerSpec that a start uses."""

    loader: SimpleNamespace
    start_worker: StartWorker | None = None


@pytest.fixture
def closed(monkeypatch):
    """Stand-ins for heavy parts; each notes its close, and the core then fails."""
    closed = []

    def close_core():
        closed.append("core")
        raise RuntimeError("the core does not close")

    spec = Spec(loader=SimpleNamespace(close=lambda: closed.append("loader")))
    built = SimpleNamespace(core=SimpleNamespace(close=close_core))
    plugins = SimpleNamespace(hooks=lambda: None)
    for name, stand_in in {
        "name_process": lambda name: None,
        "log_as": lambda index, level: None,
        "check_versions": lambda plugins, where: None,
        "PluginSet": lambda manifest: plugins,
        "prepare_worker": lambda *_: spec,
        "build_core": lambda *_: built,
    }.items():
        monkeypatch.setattr(run, name, stand_in)
    return closed


def test_one_that_does_not_close_keeps_nobody_from_it(closed, monkeypatch):
    def serve(*_):
        closed.append("sockets")
        raise OSError("no sockets")

    monkeypatch.setattr(run, "_serve", serve)
    config = msgspec.to_builtins(EngineConfig())
    with pytest.raises(RuntimeError, match="the core does not close") as caught:
        run.run_engine(launch(config=config).encode(), None)
    assert closed == ["sockets", "core", "loader"]
    assert isinstance(caught.value.__context__, OSError)


def test_a_core_that_cannot_be_built_leaves_no_loader_open(closed, monkeypatch):
    monkeypatch.setattr(run, "build_core", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.run_engine(launch(config=msgspec.to_builtins(EngineConfig())).encode(), None)
    assert closed == ["loader"]
