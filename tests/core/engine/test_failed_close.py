"""A `close` that fails: it is named, the others are closed, and it hides no earlier error."""

from __future__ import annotations

from typing import ClassVar

import pytest
from support.samples import Sample

from hardpoint.builtin_plugins.executors.uniproc import UniprocExecutor
from hardpoint.builtin_plugins.policies import FirstComeFirstServed
from hardpoint.builtin_plugins.scheduling import DefaultScheduler
from hardpoint.errors import ConfigError, PluginError, PluginFaultError
from hardpoint.plugins import KVEventPublisher
from hardpoint.testing import scripted_engine

HERE = __name__


class Fails:
    """Raises when it is closed."""

    closed: ClassVar[list] = []
    error: ClassVar[type[BaseException]] = ValueError

    def close(self):
        self.closed.append(type(self).__name__)
        super().close()
        raise self.error("cannot close")


class Policy(Fails, FirstComeFirstServed):
    contract = 1


class Exits(Fails, FirstComeFirstServed):
    contract = 1
    error = SystemExit


class Executor(Fails, UniprocExecutor):
    contract = 1


class Publisher(Sample, Fails, KVEventPublisher, contract=1):
    def publish(self, batch):
        pass


class Refuses(Sample, DefaultScheduler, contract=1):
    def __init__(self, context):
        raise ConfigError("the first error")


class Unbuildable(Sample, KVEventPublisher, contract=1):
    def __init__(self, context):
        raise ConfigError("the first error")

    def publish(self, batch):
        pass


@pytest.fixture(autouse=True)
def nothing_closed():
    Fails.closed.clear()


@pytest.mark.parametrize("where", [{}, {"in_process": False}], ids=["here", "own process"])
@pytest.mark.parametrize(("policy", "error"), [("Policy", "ValueError"), ("Exits", "SystemExit")])
def test_a_policy_that_cannot_be_closed_is_named(scripted, policy, error, where):
    config = {"scheduler": {"policy": f"{HERE}:{policy}"}, "engine": where}
    engine = scripted_engine(scripted, config)
    if where:  # its process reports nothing any more
        engine.close()
        return
    message = rf"^plugin '{policy.lower()}' .*: its close\(\) failed: {error}: cannot close$"
    with pytest.raises(PluginFaultError, match=message):
        engine.close()
    engine.close()


def test_the_error_of_a_start_is_not_hidden_by_those_of_closing(scripted):
    """The executor was never started: the scheduler of the configuration cannot be built."""
    config = {
        "scheduler": {"policy": f"{HERE}:Policy", "use": f"{HERE}:Refuses"},
        "executor": {"use": f"{HERE}:Executor"},
    }
    with pytest.raises(ConfigError, match="^the first error") as error:
        scripted_engine(scripted, config)
    assert Fails.closed == ["Executor", "Policy"]
    executor, policy = (note.partition("\n")[0] for note in error.value.__notes__)
    assert executor.startswith("closing failed, too: plugin 'executor' ")
    assert executor.endswith(": its close failed: ValueError: cannot close")
    assert policy.startswith("closing failed, too: plugin 'policy' ")
    assert policy.endswith(": its close() failed: ValueError: cannot close")


def test_an_executor_that_was_never_started_hides_nothing(scripted):
    config = {"executor": {"use": f"{HERE}:Unstarted"}}
    with pytest.raises(
        PluginError, match="max_concurrent_batches: expected 1 to 7, got 9"
    ) as error:
        scripted_engine(scripted, config)
    (note,) = error.value.__notes__
    assert "its close failed: AttributeError" in note


class Unstarted(UniprocExecutor):
    contract = 2
    max_concurrent_batches = 9

    def start(self):
        self.started = True
        return super().start()

    def close(self):
        super().close()
        assert self.started


def test_a_component_of_many_that_cannot_be_built(scripted):
    publishers = [f"{HERE}:Publisher", f"{HERE}:Unbuildable"]
    with pytest.raises(ConfigError, match="^the first error") as error:
        scripted_engine(scripted, {"kv_events": {"publishers": publishers}})
    assert Fails.closed == ["Publisher"]
    (note,) = error.value.__notes__
    assert "its close failed: ValueError: cannot close" in note
