"""A request of a connector in each state: its tokens stay the same, and its blocks are freed."""

from __future__ import annotations

import itertools
import time

import pytest
from support.cases import nightly_but
from support.core.connector_driver import OTHER, Driver
from support.core.scripted_connector import Script

from hardpoint import RequestError
from hardpoint.plugins import RequestStatus


@pytest.fixture(scope="module")
def wanted(scripted):
    driver = Driver(scripted)
    driver.add("v")
    driver.run()
    driver.add("other", OTHER, 12)
    driver.run()
    driver.engine.close()
    return driver.tokens


@pytest.fixture
def filled(scripted):
    """A driver with the prompt in its connector."""
    driver = Driver(scripted, Script(), clock=time.monotonic, load_seconds=600, lease_seconds=600)
    driver.add("first")
    driver.run()
    driver.core.reset_prefix_cache()
    driver.script.calls.clear()
    driver.script.ended.clear()
    yield driver
    driver.engine.close()


def looking_up(driver):
    driver.script.asks = 4
    driver.add("v")
    driver.step()
    assert driver.status() is RequestStatus.WAITING
    assert "scheduler.get_num_new_matched_tokens" in driver.script.calls


def loading(driver):
    driver.script.delay = 6
    driver.add("v")
    driver.step()
    driver.step()
    assert driver.is_loading()


def loaded(driver):
    driver.add("v")
    driver.step()
    driver.add("other", OTHER, 12)
    driver.until(lambda: driver.status() is RequestStatus.WAITING and not driver.is_loading())
    assert driver.status("other") is RequestStatus.RUNNING


def running(driver):
    driver.add("v")
    driver.until(lambda: driver.tokens["v"])


def running_in_step(driver):
    driver.script.asynchronous = False
    running(driver)


def saving(driver):
    driver.script.keeps = True
    driver.script.faults = {"worker.get_finished": lambda half, ended: ((), ())}
    driver.script.kept.clear()
    driver.add("v", max_tokens=1)
    driver.until(lambda: driver.status() is None)
    assert driver.num_held > 0


STATES = [looking_up, loading, loaded, running, running_in_step]


def abort(driver):
    driver.take(driver.core.abort_requests(["v"]))


def reuse(driver):
    """Abort it, and add another one of the same id."""
    abort(driver)
    driver.ends.pop("v", None)
    for _ in range(100):
        try:
            driver.add("v", OTHER, 12)
        except RequestError as error:
            assert "its KV blocks are still being moved" in str(error)  # noqa: PT017
            driver.step()
        else:
            return
    raise AssertionError("its blocks are moved for ever")


def reset(driver):
    driver.core.reset_prefix_cache()


def preempt(driver):
    driver.scheduler.reset_prefix_cache(recompute_running=True)


def pause(driver):
    driver.core.pause("keep", clear_cache=False)
    for _ in range(20):
        driver.step()
    driver.core.resume()


def sleep(level):
    def event(driver):
        driver.core.sleep(level, "keep").result(0)
        for _ in range(3):
            driver.step()
        driver.core.wake_up()

    event.__name__ = f"sleep_{level}"
    return event


def lose(method, *, before):
    def event(driver):
        driver.lose(method, before=before)

    event.__name__ = f"lose_{method}_{'before' if before else 'after'}"
    return event


EVENTS = [
    reset,
    preempt,
    pause,
    sleep(1),
    sleep(2),
    lose("execute_model", before=True),
    lose("execute_model", before=False),
    lose("update", before=True),
    lose("update", before=False),
]


def name_of(function):
    return function.__name__


@pytest.mark.parametrize(
    ("state", "event"),
    nightly_but(
        itertools.product(STATES, EVENTS),
        *((state, event) for state in STATES for event in EVENTS[1:6:2]),
        *((loading, event) for event in EVENTS),
        name=lambda case: "-".join(map(name_of, case)),
    ),
)
def test_tokens_are_the_same_and_nothing_is_held(filled, wanted, state, event):
    state(filled)
    event(filled)
    filled.run()
    for name in filled.tokens.keys() - {"first"}:
        assert filled.tokens[name] == wanted[name]
        assert filled.ends[name] == ("length", None)
    assert filled.num_held == 0
    filled.core.reset_prefix_cache()
    filled.script.asks, filled.script.delay = 0, 1
    filled.add("w")
    filled.run()
    assert filled.tokens["w"] == wanted["v"]
    assert filled.num_held == 0


@pytest.mark.parametrize("state", STATES, ids=name_of)
def test_an_aborted_request_gives_its_blocks_back_at_once(filled, state):
    state(filled)
    abort(filled)
    assert filled.ends["v"] == ("abort", None)
    steps = len([call for call in filled.script.calls if call == "worker.start_load_kv"])
    filled.until(lambda: filled.num_held == 0 or filled.status("other") is not None, 3)
    filled.run()
    assert filled.num_held == 0
    if state is loading:
        assert "worker.cancel_loads" in filled.script.calls
        assert filled.script.ended == [("v", True)]
        calls = filled.script.calls
        assert calls.count("worker.start_load_kv") - steps <= 2
        assert calls.index("worker.cancel_loads") < len(calls)


@pytest.mark.parametrize("state", STATES, ids=name_of)
def test_another_request_of_the_same_id_gets_its_own_tokens(filled, wanted, state):
    state(filled)
    reuse(filled)
    filled.run()
    assert filled.tokens["v"] == wanted["other"]
    assert filled.num_held == 0


@pytest.mark.parametrize("state", [*STATES, saving], ids=name_of)
def test_an_engine_is_closed_in_each_state(filled, state):
    state(filled)
    filled.engine.close()
    assert filled.script.calls.count("worker.close") == 1
    assert filled.script.calls.count("scheduler.close") == 1


@pytest.mark.parametrize("event", EVENTS, ids=name_of)
def test_blocks_that_are_being_saved_are_kept_and_then_freed(filled, event):
    saving(filled)
    if event is not pause:  # without requests, a pause is complete at once, and so is a step
        event(filled)
    filled.script.faults = {}
    filled.run(5000)
    assert filled.num_held == 0
