"""A connector may fail, lie or hang in each method: tokens are the same as without it."""

from __future__ import annotations

import pytest
from support.core.scripted_connector import Script, use
from support.driving import FINAL, run
from support.internals import core_of, scheduler_of

from hardpoint import SamplingParams
from hardpoint.host.boundary.faults import StepFaults
from hardpoint.plugins.requests.stats import KVTierStats
from hardpoint.testing import ScriptedClock, scripted_engine

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **FINAL)
PROMPT = [7] * 3 + list(range(30))
JOBS = [("a", PROMPT, PARAMS), ("b", [*PROMPT[:20], 9, 9, 9, 9, 9, 9], PARAMS)]
SMALL = {"max_model_len": 128, "kv_cache": {"block_size": 4, "num_blocks": 64}}
BROKEN = RuntimeError("the cable is out")


def started(scripted, script, *, clock=None, **connector):
    use(script)
    table = {"use": "support.core.scripted_connector:ScriptedConnector", **connector}
    return scripted_engine(scripted, {**SMALL, "kv_connector": table}, clock=clock)


@pytest.fixture(scope="module")
def wanted(scripted):
    engine = scripted_engine(scripted, SMALL)
    yield run(engine, JOBS)
    engine.close()


def bounded_run(engine, jobs, most=400):
    """Run jobs; fail if they take too many steps."""
    for name, prompt, params in jobs:
        engine.add_request(name, prompt, params)
    ended = {}
    for _ in range(most):
        if not engine.has_unfinished_requests():
            return ended
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = output
    raise AssertionError("a request waits for ever")


def tokens(outputs):
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


def settled(engine, most=400):
    """Step until nothing is left; return whether all blocks are free."""
    core = core_of(engine)
    for _ in range(most):
        if not core.has_requests():
            break
        core.step()
    cache = scheduler_of(engine).context.kv_cache
    return not core.has_requests() and cache.num_free_blocks == cache.num_usable_blocks


def faults(engine):
    report = engine.call_utility("plugin_report").health.fallbacks
    return {name: fault.message for name, fault in report.items()}


def twice(engine, wanted, script, *, jobs=JOBS):
    """Fill the connector, and run again from it; return the second outputs."""
    faulty, script.faults = script.faults, {}
    want = {name: result[0][0][1] for name, result in wanted.items()}
    assert tokens(bounded_run(engine, jobs)) == want
    core_of(engine).reset_prefix_cache()
    script.faults = faulty
    outputs = bounded_run(engine, jobs)
    assert tokens(outputs) == want
    return outputs


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("asks", [0, 3])
def test_what_was_loaded_gives_the_same_tokens_and_counts_as_cached(
    scripted, wanted, asynchronous, asks
):
    script = Script(asynchronous=asynchronous, asks=asks)
    engine = started(scripted, script)
    outputs = twice(engine, wanted, script)
    assert outputs["a"].num_cached_tokens == 32
    assert outputs["b"].num_cached_tokens >= 20
    assert faults(engine) == {}
    assert settled(engine)
    engine.close()
    assert script.calls[-2:] == ["scheduler.close", "connector.close"]
    assert script.calls.count("worker.close") == 1


def instead(value):
    """Return this whatever is called."""
    return lambda half, *args: value


SCHEDULER_FAULTS = {
    "check_request": [BROKEN],
    "get_num_new_matched_tokens": [
        BROKEN,
        *map(
            instead, (None, 7, "ab", (-4, True), (True, True), (8.0, True), ("8", True), (1, 2, 3))
        ),
    ],
    "update_state_after_alloc": [BROKEN],
    "build_connector_meta": [BROKEN, instead(object()), instead({"loads": 3}), instead(5)],
    "request_finished": [
        BROKEN,
        *map(instead, (None, 3, (False, [1]), (False, {1: 2}), (False, {"a": object()}))),
    ],
    "load_ended": [BROKEN],
    "receive": [BROKEN],
}
WORKER_FAULTS = {
    "start_load_kv": [BROKEN],
    "wait_for_layer_load": [BROKEN],
    "save_kv_layer": [BROKEN],
    "wait_for_save": [BROKEN],
    "get_finished": [
        BROKEN,
        *map(instead, (5, ("a",), ("a", "b"), ([3], ()), (["no such"], ["b"]))),
    ],
    "load_errors": [BROKEN, *map(instead, (5, ["x"], [[1]], [10**9, -1]))],
    "take_message": [BROKEN, instead(object()), instead({"a": 1})],
    "stats": [BROKEN, *map(instead, (5, {"a": 3}, {3: KVTierStats()}))],
}
HARMLESS = {
    ("load_errors", 4, True),
    ("load_errors", 4, False),
    ("take_message", 2, True),
    ("take_message", 2, False),
    ("get_finished", 5, False),
}
"""Nonsense that is plain data and that the engine has no reason to refuse; asynchronous or not."""


def cases(faults):
    return [(method, index) for method, kinds in faults.items() for index in range(len(kinds))]


@pytest.fixture(scope="module")
def lasting(scripted):
    """An engine that outlives the faults of many tests, and its script."""
    script = Script()
    engine = started(scripted, script, clock=ScriptedClock(tick=0.01), load_seconds=1.0)
    yield engine, script
    engine.close()


@pytest.fixture(params=[True, False], ids=["between_steps", "in_step"])
def faulty(lasting, request, monkeypatch):
    """The engine and its script, and the messages of faults."""
    engine, script = lasting
    messages = []
    note = StepFaults.note

    def noted(self, name, message, *args, **more):
        messages.append(message)
        note(self, name, message, *args, **more)

    monkeypatch.setattr(StepFaults, "note", noted)
    script.asynchronous = request.param
    script.faults = {}
    script.kept.clear()
    core_of(engine).reset_prefix_cache()
    return engine, script, messages


@pytest.mark.parametrize(("method", "index"), cases(SCHEDULER_FAULTS))
def test_a_scheduler_half_that_fails(faulty, wanted, method, index):
    engine, script, messages = faulty
    fault = SCHEDULER_FAULTS[method][index]
    script.faults = {f"scheduler.{method}": fault}
    if method == "receive":
        script.faults["worker.take_message"] = instead({"a": 1})
    twice(engine, wanted, script)
    if method != "load_ended" or script.asynchronous:
        message = messages[0]
        assert method in message or method == "build_connector_meta"  # its data fails in a worker
        assert "support.core.scripted_connector:ScriptedConnector" in message
        if fault is BROKEN:
            assert "RuntimeError: the cable is out" in messages[0]
    recovers(engine, wanted, script)


@pytest.mark.parametrize(("method", "index"), cases(WORKER_FAULTS))
def test_a_worker_half_that_fails(faulty, wanted, method, index):
    engine, script, messages = faulty
    fault = WORKER_FAULTS[method][index]
    script.faults = {f"worker.{method}": fault}
    twice(engine, wanted, script)
    assert bool(messages) is ((method, index, script.asynchronous) not in HARMLESS)
    if fault is BROKEN:
        assert f"{method}() failed: RuntimeError: the cable is out" in messages[0]
    recovers(engine, wanted, script)


def recovers(engine, wanted, script):
    """Once it works again, it loads."""
    script.faults = {}
    assert settled(engine)
    core_of(engine).reset_prefix_cache()
    assert twice(engine, wanted, script)["a"].num_cached_tokens == 32
    assert settled(engine)
