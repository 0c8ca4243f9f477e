"""Requests that pool: the state that the frontend keeps of them, with scripted outputs."""

from __future__ import annotations

import pytest
from support.core.output_desk import ABORT, DELTA, ERROR, FINAL_ONLY, STOP, Desk

from hardpoint import RequestError, SamplingParams, typed
from hardpoint.builtin_plugins.step_parts.pooling.requests import PooledFormat
from hardpoint.host.boundary.parts.output_formats import BoundFormat, OutputFormats
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import PoolingRequestOutput
from hardpoint.process.output_collector import RequestOutputCollector

EMBED = {"pooling_params": PoolingParams(task="embed")}


@pytest.fixture
def desk(byte_tokenizer):
    pooled = BoundFormat("pooling", PooledFormat(), lambda method, cause: f"{method}: {cause}")
    return Desk(byte_tokenizer, formats=OutputFormats([pooled]))


def pooled(data=None, finish=None, **fields):
    return EngineCoreOutput(request_id="r", pooling_output=data, finish_reason=finish, **fields)


def one(desk, output):
    (shown,), aborts = desk.take(output)
    assert aborts == []
    assert isinstance(shown, PoolingRequestOutput)
    return shown


def test_the_result_comes_as_it_is(desk):
    desk.add("r", "prompt", fields=EMBED, output_kind=FINAL_ONLY, stop=["x"], logprobs=3)
    output = one(desk, pooled([0.25, 0.5], STOP))
    assert (output.outputs, output.finished, output.finish_reason) == ([0.25, 0.5], True, "stop")
    assert (output.request_id, output.error) == ("user's r", None)
    assert output.prompt_token_ids == desk.tokenizer.encode("prompt")
    assert desk.is_empty


def test_tokens_and_logprobs_are_not_looked_at(desk, monkeypatch):
    monkeypatch.setattr(desk.tokenizer, "decode", None)
    monkeypatch.setattr(desk.tokenizer, "decode_stream", None)
    desk.add("r", "p", fields=EMBED, logprobs=1)
    result = desk.output("abc", STOP, pooling_output="it", logprobs=desk.logprobs("abc"))
    assert one(desk, result).outputs == "it"


def test_parts_of_a_result_come_where_they_are_wanted(desk):
    desk.add("r", "p", fields=EMBED, output_kind=DELTA)
    assert desk.take(pooled()) == ([], [])
    assert (one(desk, pooled([1])).finished, one(desk, pooled([2])).outputs) == (False, [2])
    assert one(desk, pooled(finish=STOP)).outputs == [2]
    desk.add("r", "p", fields=EMBED, output_kind=FINAL_ONLY)
    assert desk.take(pooled([1])) == ([], [])
    assert one(desk, pooled(finish=STOP)).outputs == [1]


@pytest.mark.parametrize("reason", [ERROR, ABORT])
def test_without_a_result_the_reason_is_told(desk, reason):
    desk.add("r", "p", fields=EMBED)
    output = one(desk, pooled(finish=reason, error="it broke"))
    assert (output.outputs, output.finish_reason, output.error) == (None, str(reason), "it broke")
    assert desk.is_empty


def test_a_refusal_is_told(desk):
    desk.add("r", "p", fields=EMBED)
    output = one(desk, pooled(finish=ERROR, error="too many", error_kind="OverloadedError"))
    assert (output.finish_reason, output.error) == ("error", "too many")
    assert (output.error_kind, output.finished) == ("OverloadedError", True)


def test_it_can_be_aborted_here(desk):
    desk.add("r", "p", fields=EMBED)
    processed = desk.processor.abort(["r"])
    ((_, output),) = processed.request_outputs
    assert (output.finished, output.finish_reason) == (True, "abort")
    assert processed.aborts == ["r"]
    assert desk.is_empty


def test_through_a_frontend_it_is_one_request(open_engine, monkeypatch):
    """As it will be once an engine takes them."""
    engine = open_engine()
    frontend = engine._frontend
    monkeypatch.setattr(frontend.submitter._prebuilt, "_check", lambda request: None)
    request = EngineCoreRequest(
        request_id="x", prompt_token_ids=[1], params=SamplingParams(n=3), **EMBED
    )
    submission = frontend.submitter.submit("mine", request, None)
    (child,) = submission.children
    assert (child.request_id, child.child_index) == (submission.parent.internal_id, 0)
    result = EngineCoreOutput(request_id=child.request_id, pooling_output=[1.0], finish_reason=STOP)
    (output,) = frontend.process_outputs(EngineCoreOutputs(outputs=[result])).request_outputs
    assert (output.request_id, output.outputs) == ("mine", [1.0])
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_of_those_that_nobody_took_the_latest_stands(kind):
    collector = RequestOutputCollector(kind)
    for number in range(3):
        collector.put(
            PoolingRequestOutput(
                request_id="r", outputs=[number], prompt_token_ids=[1], finished=number == 2
            )
        )
    output = collector.get_nowait()
    assert (output.outputs, output.finished) == ([2], True)
    assert collector.get_nowait() is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"task": "sing"}, "task: expected .*embed.*, got 'sing'"),
        ({"task": "embed", "dimensions": 0}, "dimensions: expected a whole number >= 1, got 0"),
        ({"task": "embed", "normalize": "yes"}, "normalize: expected true or false .*'yes'"),
        ({"pooler": ""}, "pooler: expected"),
    ],
)
def test_params_are_checked(fields, words):
    with pytest.raises(RequestError, match=words):
        typed.convert(fields, PoolingParams, path="", error=RequestError)
