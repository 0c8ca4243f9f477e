"""Failures, deadlines and leases of a KV connector, and figures of its requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.core.connector_driver import OTHER, Driver
from support.core.scripted_connector import Script

from hardpoint import RequestError
from hardpoint.builtin_plugins.server.routes.answers import LOAD_FAILED
from hardpoint.builtin_plugins.step_parts.kv_transfer import engine_half
from hardpoint.testing import ScriptedClock

FAILED = LOAD_FAILED  # by which the server knows that the request may be sent again


@pytest.fixture
def open_driver(scripted):
    """Return drivers with the prompt in their connectors, each on its own clock."""
    opened = []

    def start(**settings):
        clock = ScriptedClock(100.0)
        settings = {"load_seconds": 5, "lease_seconds": 30, **settings}
        driver = Driver(scripted, Script(), clock=clock, **settings)
        driver.clock = clock
        opened.append(driver)
        driver.add("first")
        driver.run()
        driver.core.reset_prefix_cache()
        driver.script.calls.clear()
        return driver

    yield start
    for driver in opened:
        driver.engine.close()


def spoil(driver, index):
    """Let the load of a block of the prompt fail."""
    hashes = list(driver.script.kept)
    driver.script.bad = {hashes[index]}


@pytest.mark.parametrize("asynchronous", [True, False])
class TestFailures:
    @pytest.mark.parametrize("bad", [0, 2, 4])
    def test_blocks_are_computed_from_the_first_bad_one_on(self, open_driver, asynchronous, bad):
        driver = open_driver()
        driver.script.asynchronous = asynchronous
        spoil(driver, bad)
        driver.add("v")
        driver.run()
        assert driver.tokens["v"] == driver.tokens["first"]
        assert driver.ends["v"] == ("length", None)
        assert driver.num_held == 0
        stats = driver.cached["v"]
        # 20 tokens, of which the last is always computed: four whole blocks are loaded.
        assert stats.num_cached_tokens == min(bad, 4) * 4
        driver.core.reset_prefix_cache()
        driver.script.bad.clear()
        driver.add("w")
        driver.run()
        assert driver.cached["w"].num_cached_tokens == 16
        assert driver.tokens["w"] == driver.tokens["first"]

    def test_a_request_may_end_with_an_error_instead(self, open_driver, asynchronous):
        driver = open_driver(on_load_failure="error")
        driver.script.asynchronous = asynchronous
        spoil(driver, 2)
        driver.add("v")
        driver.add("other", OTHER, 12)
        driver.run()
        reason, message = driver.ends["v"]
        assert reason == "error"
        assert message == f"{FAILED}, for 1 of its blocks (kv_connector.on_load_failure)"
        assert driver.tokens["v"] == []
        assert driver.ends["other"] == ("length", None)
        assert driver.num_held == 0

    def test_a_half_that_raises_is_a_failure_as_well(self, open_driver, asynchronous):
        driver = open_driver(on_load_failure="error")
        driver.script.asynchronous = asynchronous
        driver.script.faults = {"worker.start_load_kv": RuntimeError("out")}
        driver.add("v")
        driver.run()
        assert driver.ends["v"][0] == "error"
        assert driver.num_held == 0

    def test_a_lost_step_is_no_failure_of_the_load(self, open_driver, asynchronous):
        driver = open_driver(on_load_failure="error")
        driver.script.asynchronous = asynchronous
        driver.script.delay = 4
        driver.add("v")
        driver.lose("execute_model", before=False)
        driver.run()
        assert driver.ends["v"] == ("length", None)
        assert driver.tokens["v"] == driver.tokens["first"]

    def test_what_was_loaded_is_reported(self, open_driver, asynchronous):
        driver = open_driver()
        driver.script.asynchronous = asynchronous
        driver.add("v")
        driver.run()
        stats = driver.cached["v"]
        assert stats.num_cached_tokens == stats.num_external_tokens == 16
        driver.add("again")
        driver.run()
        assert driver.cached["again"].num_cached_tokens == 16
        assert driver.cached["again"].num_external_tokens == 0


def test_blocks_have_hashes_without_prefix_caching_too(open_driver):
    driver = open_driver(kv_cache={"prefix_caching": False})
    driver.add("v")
    driver.run()
    assert driver.cached["v"].num_external_tokens == 16
    assert driver.tokens["v"] == driver.tokens["first"]


class TestDeadlines:
    def test_a_load_that_never_ends_is_cancelled_and_computed(self, open_driver):
        driver = open_driver()
        driver.script.delay = 10**9
        driver.add("v")
        for _ in range(6):
            driver.step()
        assert driver.is_loading()
        for _ in range(6):
            driver.clock.now += 0.9
            driver.step()
        driver.run(20)
        assert driver.tokens["v"] == driver.tokens["first"]
        assert driver.script.calls.count("worker.cancel_loads") == 1
        assert driver.script.ended[-1] == ("v", True)
        (message,) = driver.faults.values()
        assert "the load of request 'v' took more than 5 s (kv_connector.load_seconds)" in message
        assert driver.num_held == 0

    def test_a_lookup_that_is_never_answered_ends(self, open_driver):
        driver = open_driver()
        driver.script.asks = 10**9
        driver.add("v")
        for _ in range(6):
            driver.step()
            driver.clock.now += 0.9
        driver.run(20)
        assert driver.tokens["v"] == driver.tokens["first"]
        (message,) = driver.faults.values()
        assert "did not know how much of request 'v' can be loaded for 5 s" in message

    @pytest.mark.parametrize("slow", ["asks", "delay"])
    def test_the_time_of_a_pause_is_not_that_of_a_lookup_or_load(self, open_driver, slow):
        driver = open_driver()
        setattr(driver.script, slow, 3)
        driver.add("v")
        driver.step()
        driver.core.pause("keep", clear_cache=False)
        driver.clock.now += 1000
        driver.core.resume()
        driver.run()
        assert driver.faults == {}
        assert driver.cached["v"].num_external_tokens == 16

    @pytest.mark.parametrize("slow", ["asks", "delay"])
    def test_the_time_without_requests_is_not_that_of_a_lookup_or_load(self, open_driver, slow):
        driver = open_driver(load_seconds=0.5)
        driver.clock.now += 1000
        setattr(driver.script, slow, 3)
        driver.add("v")
        driver.run()
        assert driver.faults == {}
        assert driver.cached["v"].num_external_tokens == 16

    def test_a_late_name_does_not_end_the_load_of_a_later_request(self, open_driver):
        driver = open_driver()
        driver.script.delay = 10**9
        driver.script.faults = {"worker.cancel_loads": lambda half, ids: half.loading.clear()}
        driver.add("v")
        driver.step()
        driver.take(driver.core.abort_requests(["v"]))
        driver.run(10)
        assert driver.num_held == 0
        driver.script.faults = {"worker.get_finished": lambda half, ended: (["v"], [])}
        driver.add("v")
        driver.run()
        assert driver.cached["v"].num_external_tokens == 0  # it is computed, for now
        driver.add("other", OTHER, 12)
        for _ in range(7):
            driver.clock.now += 0.9
            driver.step()
        driver.run()
        driver.script.faults.clear()
        driver.script.delay = 0
        driver.core.reset_prefix_cache()
        driver.add("v")
        driver.run()
        assert driver.cached["v"].num_external_tokens == 16
        assert driver.tokens["v"] == driver.tokens["first"]

    def test_blocks_are_kept_for_a_save_until_the_lease_is_over(self, open_driver):
        driver = open_driver()
        driver.script.keeps = True
        driver.script.faults = {"worker.get_finished": lambda half, ended: ((), ())}
        driver.add("v", OTHER)
        driver.until(lambda: "v" in driver.ends)
        held = driver.num_held
        assert held > 0
        driver.clock.now += 29
        for _ in range(5):
            driver.step()
        assert driver.num_held == held
        with pytest.raises(RequestError, match="its KV blocks are still being moved"):
            driver.add("v")
        driver.clock.now += 2
        driver.run(5)
        assert driver.num_held == 0
        (message,) = driver.faults.values()
        assert "did not report within 30 s (kv_connector.lease_seconds) that the blocks" in message

    def test_a_name_of_a_save_that_nobody_asked_for_is_ignored(self, open_driver):
        driver = open_driver()
        driver.script.keeps = True
        driver.script.faults = {"worker.get_finished": lambda half, ended: ((), ["v"])}
        driver.add("v", OTHER, 3)
        driver.until(lambda: "v" in driver.ends)
        assert driver.num_held > 0  # the step that tells of its end has yet to come
        driver.run(5)
        assert driver.num_held == 0

    def test_waiting_does_not_spin(self, open_driver, monkeypatch):
        driver = open_driver()
        driver.script.delay = 10**9
        driver.add("v")
        driver.step()
        slept = []
        monkeypatch.setattr(engine_half, "time", SimpleNamespace(sleep=slept.append))
        for _ in range(20):
            driver.step()
        assert len(slept) == 20
        assert slept == sorted(slept)
        assert sum(slept) > 0.06
        for _ in range(7):
            driver.clock.now += 0.9
            driver.step()
        driver.run()


class TestLeftOut:
    def test_a_half_that_cannot_cancel_is_closed(self, open_driver):
        driver = open_driver()
        driver.script.delay = 10**9
        driver.script.faults = {"worker.cancel_loads": RuntimeError("stuck")}
        driver.add("v")
        driver.step()
        driver.take(driver.core.abort_requests(["v"]))
        driver.run(20)
        assert "worker.close" in driver.script.calls
        assert driver.num_held == 0
        calls = len(driver.script.calls)
        driver.add("w")
        driver.run()
        assert driver.tokens["w"] == driver.tokens["first"]
        of_worker = [c for c in driver.script.calls[calls:] if c.startswith("worker.")]
        assert of_worker == []
        assert "get_num_new_matched_tokens" not in " ".join(driver.script.calls[calls:])
        (message,) = driver.faults.values()
        assert "cancel_loads() failed, and it is not called again: RuntimeError: stuck" in message

    @pytest.mark.parametrize("method", ["release_kv_caches", "register_kv_caches"])
    def test_a_half_that_does_not_survive_a_nap_is_left_out_until_the_model_is_loaded(
        self, open_driver, method
    ):
        driver = open_driver()
        driver.script.faults = {f"worker.{method}": RuntimeError("no")}
        driver.core.sleep(1).result(0)
        driver.core.wake_up()
        driver.script.faults = {}
        for name in ("u", "v"):
            driver.add(name)
            driver.run()
            driver.core.reset_prefix_cache()
            assert driver.tokens[name] == driver.tokens["first"]
        assert driver.cached["v"].num_cached_tokens == 0
        (message,) = driver.faults.values()
        assert f"{method}() failed, and it is not called again: RuntimeError: no" in message
        driver.core.sleep(2).result(0)
        driver.core.wake_up()
        driver.add("w")
        driver.run()
        assert driver.cached["w"].num_external_tokens == 16
        assert driver.tokens["w"] == driver.tokens["first"]
