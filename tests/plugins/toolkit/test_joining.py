"""Checks of calls for executors: whether a method is a worker's, and whether ranks are in step."""

from concurrent.futures import Future

import pytest

from hardpoint.plugins import HardpointError, ModelError
from hardpoint.toolkit.workers import joining
from hardpoint.toolkit.workers.joining import are_out_of_step, worker_method


class Sleeper:
    _secret = print
    helper = print

    def sleep(self, level):
        return level


def test_methods_of_workers_are_called_by_name():
    assert worker_method(Sleeper(), "sleep")(2) == 2


@pytest.mark.parametrize("name", ["helper", "_secret", "__init__", "nothing"])
def test_other_names_are_refused(name):
    with pytest.raises(HardpointError, match=rf"^method: '{name}' is none of Worker"):
        worker_method(Sleeper(), name)


def ended(error=None):
    future = Future()
    future.set_exception(error) if error is not None else future.set_result(None)
    return future


@pytest.mark.parametrize(
    ("method", "futures", "expected"),
    [
        ("sleep", [ended(), ended()], False),
        ("sleep", [ended(), Future()], False),  # it takes long
        ("sleep", [ended(ModelError("no")), ended(ModelError("no"))], False),
        ("sleep", [ended(ModelError("no")), ended(ModelError("not")), ended()], True),
        ("sleep", [ended(ModelError("no")), ended(ValueError("no"))], True),
        ("sleep", [ended(), ended(ModelError("no"))], True),
        ("sleep", [Future(), ended(ModelError("no"))], True),
        ("plugin_meters", [ended(), ended(ModelError("no"))], False),
        ("start_parts", [ended(), ended(ModelError("no"))], False),
    ],
)
def test_ranks_are_out_of_step_where_some_fail_a_joint_call(monkeypatch, method, futures, expected):
    monkeypatch.setattr(joining, "_SETTLE_SECONDS", 0.02)
    assert are_out_of_step(method, futures) is expected
