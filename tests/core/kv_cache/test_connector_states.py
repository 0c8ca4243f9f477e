"""What befalls a request of a connector in each state: its tokens stay, and its blocks are freed."""

from __future__ import annotations

import time

import pytest
from support.core.scripted_connector import Script, use
from support.internals import core_of, scheduler_of

from hardpoint import RequestError, SamplingParams
from hardpoint.plugins import EngineCoreRequest, RequestStatus
from hardpoint.testing import scripted_engine

SMALL = {
    "max_model_len": 128,
    "kv_cache": {"block_size": 4, "num_blocks": 64},
    "scheduler": {"max_num_seqs": 1},
}
PROMPT = tuple(range(30, 50))
OTHER = (1, 2, 3, 4, 5, 6, 7, 8, 9)


class Driver:
    """An engine core with real workers, whose steps may fail."""

    def __init__(self, scripted, script=None, clock=None, **connector):
        table = {}
        if script is not None:
            use(script)
            uses = "support.core.scripted_connector:ScriptedConnector"
            table = {"kv_connector": {"use": uses, **connector}}
        self.script = script
        self.engine = scripted_engine(scripted, {**SMALL, **table}, clock=clock)
        self.core, self.scheduler = core_of(self.engine), scheduler_of(self.engine)
        self.executor = self.core._executor
        self.tokens = {}
        self.ends = {}
        self.cached = {}

    def add(self, name, prompt=PROMPT, max_tokens=6, **fields):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.tokens[name] = []
        self.core.add_request(
            EngineCoreRequest(
                request_id=name, prompt_token_ids=list(prompt), params=params, **fields
            )
        )

    def step(self):
        outputs, _ = self.core.step()
        self.take(outputs)

    def take(self, by_client):
        for outputs in by_client.values():
            for output in outputs.outputs:
                self.tokens[output.request_id] += output.new_token_ids
                if output.prefill_stats is not None:
                    self.cached[output.request_id] = output.prefill_stats
                if output.finished:
                    self.ends[output.request_id] = (str(output.finish_reason), output.error)

    def run(self, most=300):
        for _ in range(most):
            if not self.core.has_requests():
                return
            self.step()
        raise AssertionError("it does not end")

    def until(self, condition, most=100):
        for _ in range(most):
            if condition():
                return
            self.step()
        raise AssertionError("it did not come to that")

    def status(self, name="v"):
        live = self.scheduler.live_request(name)
        return None if live is None else live.status

    @property
    def num_held(self):
        cache = self.scheduler.context.kv_cache
        return cache.num_usable_blocks - cache.num_free_blocks

    def lose(self, method, *, before):
        """Let the next call of a method of the executor or scheduler fail."""
        owner = self.scheduler if method == "update" else self.executor
        original = getattr(owner, method)

        def fail(*args):
            setattr(owner, method, original)
            if not before:
                result = original(*args)
                if owner is self.scheduler:  # else the client would not get them
                    self.take(result)
            raise ValueError("the step is lost")

        setattr(owner, method, fail)
        with pytest.raises(ValueError, match="the step is lost"):
            self.step()


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
    """A driver whose connector has the prompt."""
    driver = Driver(scripted, Script(), clock=time.monotonic, load_seconds=5, lease_seconds=5)
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
    assert driver.status() is RequestStatus.WAITING_FOR_REMOTE_KV


def loaded(driver):
    driver.add("v")
    driver.step()
    driver.add("other", OTHER, 12)
    driver.until(lambda: driver.status() is RequestStatus.WAITING)
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


@pytest.mark.parametrize("event", EVENTS, ids=name_of)
@pytest.mark.parametrize("state", STATES, ids=name_of)
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
