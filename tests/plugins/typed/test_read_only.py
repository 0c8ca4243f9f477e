"""Data for plugins cannot be written: the writer is named, and no other is disturbed."""

from __future__ import annotations

import msgspec
import pytest
from support.driving import run, summary
from support.fault_cases import jobs, run_all
from support.plugins.policies import LOAD
from support.plugins.writing import POLICY_WRITES, PROCESSOR_WRITES, WritingPolicy

from hardpoint import RequestError, SamplingParams
from hardpoint.host.boundary.policy import guarded_policy
from hardpoint.plugins import EngineCoreRequest, PolicyContext, Request
from hardpoint.plugins.server.hooks import hookimpl
from hardpoint.testing import scripted_engine

HERE = "support.plugins.writing"
COUNT = 8


@pytest.fixture(scope="module")
def expected(scripted):
    engine = scripted_engine(scripted, {})
    yield run(engine, jobs(COUNT))
    engine.close()


@pytest.mark.parametrize("write", ["output", "status", "progress", "identity"])
def test_a_policy_that_writes_disturbs_no_request(open_engine, expected, write):
    config = {
        "scheduler": {"policy": f"{HERE}:WritingPolicy"},
        "plugin": {"writing_policy": {"write": write}},
    }
    engine = open_engine(config)
    assert run(engine, jobs(COUNT)) == expected
    fault = engine.health().fallbacks["writing_policy"]
    assert fault.count > COUNT
    assert "plugin 'writing_policy'" in fault.message
    assert "added() of request" in fault.message
    assert "read-only" in fault.message


@pytest.mark.parametrize("write", POLICY_WRITES)
def test_no_part_of_a_request_can_be_written_by_a_policy(write):
    policy = WritingPolicy(PolicyContext(name="p", options=WritingPolicy.Options(write=write)))
    told = []
    guard = guarded_policy(policy, lambda message, cause: told.append((message, str(cause))))
    source = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], params=SamplingParams(), tags={"tenant": "a"}
    )
    live, before = Request(source), msgspec.msgpack.encode(source)
    guard.scheduled(live, 1)
    ((message, cause),) = told
    assert message == "scheduled() of request 'r' failed"
    assert "read-only" in cause or "immutable type: 'EngineCoreRequest'" in cause
    assert msgspec.msgpack.encode(source) == before
    assert (live.output_token_ids, live.draft_token_ids, live.events, live.order) == ([], [], [], 0)
    assert guard.victim([live], LOAD) is live


def test_a_processor_that_writes_ends_its_own_request_alone(open_engine, expected):
    """One request per kind of write, among eight that do nothing of the sort."""
    engine = open_engine({"plugins": {"enable": [f"{HERE}:WritingProcessor"]}})
    writes = [*PROCESSOR_WRITES, "in start"]
    guilty = [
        (write, [1, 2], SamplingParams(plugin_args={"writing_processor": {"write": write}}))
        for write in writes
    ]
    finals = run_all(engine, [*jobs(COUNT), *guilty])
    for write in writes:
        (completion,) = finals.pop(write).outputs
        assert completion.finish_reason == "error"
        assert "plugin 'writing_processor'" in completion.error
        method = "start" if write == "in start" else "apply"
        assert f"its {method} failed: " in completion.error
        assert completion.token_ids == []
    assert {name: [summary(final)] for name, final in finals.items()} == expected


def test_a_prompt_cannot_be_written_in_prepare(open_engine):
    engine = open_engine({"plugins": {"enable": [f"{HERE}:WritingProcessor"]}})
    params = SamplingParams(plugin_args={"writing_processor": {"write": "in prepare"}})
    with pytest.raises(RequestError, match="its prepare failed: TypeError: this list is read-only"):
        engine.add_request("r", "x", params)


def test_hooks_and_sinks_that_write_are_named(open_engine, expected):
    config = {
        "plugins": {"enable": [f"{HERE}:WritingHooks"]},
        "stats": {"sinks": [f"{HERE}:WritingSink"]},
    }
    engine = open_engine(config)
    finals = run_all(engine, jobs(COUNT))
    for name, final in finals.items():
        (completion,) = final.outputs
        words = "plugin 'writing_hooks' (support.plugins.writing:WritingHooks)"
        assert words in completion.error
        assert "its hook request_finished failed: TypeError: this list is" in completion.error
        assert completion.token_ids == expected[name][0][0][1]
    faults = engine.health().fallbacks
    assert "its hook step_planned failed: TypeError: this dict is" in faults["step_planned"].message
    assert "plugin 'writing_sink'" in faults["writing_sink"].message
    assert "immutable type: 'SchedulerStats'" in faults["writing_sink"].message


class Reader:
    """Keeps its inputs."""

    contract = 1
    seen: tuple = ()

    @hookimpl
    def request_finished(self, output):
        Reader.seen = (*Reader.seen, output)


def test_a_hook_reads_what_the_caller_gets(open_engine):
    engine = open_engine({"plugins": {"enable": [f"{__name__}:Reader"]}})
    finals = run_all(engine, jobs(2))
    assert {output.request_id: output for output in Reader.seen} == finals
    assert all(isinstance(output, type(finals["r0"])) for output in Reader.seen)
