"""Outputs of an engine that do not belong to their requests are an error; others pass."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hardpoint.host.system.encoding import Encoder, WireError
from hardpoint.plugins import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
    SchedulerStats,
)
from hardpoint.plugins.requests import PartArray, TokenLogprobs, WeightRun
from hardpoint.plugins.requests.engine_state import EngineLoad, KVCacheChanges
from hardpoint.plugins.requests.stats import (
    EngineCoreEvent,
    EngineCoreEventType,
    PrefillStats,
    PrefixCacheStats,
)
from hardpoint.process.client import output_check
from hardpoint.process.client.output_check import OutputCheck
from hardpoint.process.client.process_client import RequestSockets

VOCABULARY, LENGTH = 300, 64


def checker(*, is_remote=False, **params):
    check = OutputCheck(VOCABULARY, LENGTH, is_remote=is_remote)
    sampling = SamplingParams(**{"max_tokens": 8} | params)
    check.add([EngineCoreRequest(request_id="r", prompt_token_ids=[1, 2, 3], params=sampling)])
    return check


def one(**fields):
    return EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="r", **fields)])


def stats(**fields):
    known = {"num_running": 1, "num_waiting": 0, "kv_cache_usage": 0.5}
    return SchedulerStats(**{**known, "prefix_cache": PrefixCacheStats(1, 2, 3)} | fields)


WRONG = {
    "NaN logits": one(new_token_ids=[5], num_nans_in_logits=-1),
    "statistics of other engines": EngineCoreOutputs(scheduler_stats=stats(engines={1: stats()})),
    "adapters without end": EngineCoreOutputs(
        scheduler_stats=stats(num_requests_by_adapter={f"a{i}": 1 for i in range(10_001)})
    ),
    "positions without end": EngineCoreOutputs(
        scheduler_stats=stats(num_accepted_by_position=[1] * 10_001)
    ),
    "the name of an adapter": EngineCoreOutputs(
        load=EngineLoad(num_running=1, num_waiting=0, kv_cache_usage=0.5, adapters=["a" * 2000])
    ),
    "many outputs of one request": EngineCoreOutputs(
        outputs=[EngineCoreOutput(request_id="r")] * 70_000
    ),
    "many outputs of others": EngineCoreOutputs(
        outputs=[EngineCoreOutput(request_id="x")] * 70_000
    ),
    "token out of the vocabulary": one(new_token_ids=[300]),
    "token negative": one(new_token_ids=[5, -1]),
    "more than max_tokens": one(new_token_ids=[5] * 9),
    "logprobs of other lengths": one(
        new_token_ids=[5], logprobs=[TokenLogprobs([5, 6], [-1.0], 1)]
    ),
    "logprobs empty": one(new_token_ids=[5], logprobs=[TokenLogprobs([], [], 1)]),
    "logprobs of no token": one(new_token_ids=[5], logprobs=[TokenLogprobs([999], [-1.0], 1)]),
    "logprobs for no tokens": one(logprobs=[TokenLogprobs([5], [-1.0], 1)]),
    "more logprobs than asked for": one(
        new_token_ids=[5], logprobs=[TokenLogprobs([1, 2, 3, 4], [-1.0] * 4, 1)]
    ),
    "prompt logprobs of other lengths": one(prompt_logprobs=[TokenLogprobs([1, 2], [], 1)]),
    "prompt logprobs beyond the prompt": one(prompt_logprobs=[None] * 4),
    "observed logprobs": one(new_token_ids=[5], observed_logprobs=[1.0] * 5),
    "routed experts a text": one(new_token_ids=[5], routed_experts="abc"),
    "routed experts of two dimensions": one(routed_experts=np.zeros((3, 4), np.int32)),
    "routed experts of real numbers": one(routed_experts=np.zeros((3, 1, 2))),
    "routed experts of too many positions": one(routed_experts=np.zeros((12, 1, 2), np.int32)),
    "part arrays of a part that it does not include": one(
        part_arrays={"z": {"y": [PartArray(np.arange(1), np.zeros(1))]}}
    ),
    "part arrays texts": one(part_arrays={"x": {"y": [PartArray("a", "b")]}}),
    "part arrays of two lengths": one(
        part_arrays={"x": {"y": [PartArray(np.arange(9), np.zeros(2))]}}
    ),
    "part arrays of two shapes": one(
        part_arrays={
            "x": {"y": [PartArray(np.arange(1), np.zeros((1, k))) for k in (2, 3)]},
        }
    ),
    "part arrays out of range": one(
        part_arrays={"x": {"y": [PartArray(np.array([99]), np.zeros(1))]}}
    ),
    "pooled, though it generates": one(pooling_output=np.zeros(3)),
    "num_cached_tokens": one(num_cached_tokens=-5),
    "weight runs": one(weight_runs=[WeightRun(3, "a", "a"), WeightRun(1, "b", "b")]),
    "events": one(events=[EngineCoreEvent(EngineCoreEventType.QUEUED, math.nan)]),
    "prefill statistics": one(num_cached_tokens=0, prefill_stats=PrefillStats(-5, 1, 1)),
    "a long error": one(finish_reason=FinishReason.ERROR, error="x" * 2_000_000),
    "statistics": EngineCoreOutputs(scheduler_stats=stats(num_running=-5)),
    "statistics below": EngineCoreOutputs(
        scheduler_stats=stats(prefix_cache=PrefixCacheStats(-1, 0, 0))
    ),
    "usage": EngineCoreOutputs(scheduler_stats=stats(kv_cache_usage=math.nan)),
    "load": EngineCoreOutputs(load=EngineLoad(num_running=0, num_waiting=-1, kv_cache_usage=0.0)),
    "cache changes": EngineCoreOutputs(cache_changes=KVCacheChanges(first=5, last=-9)),
    "names of blocks": EngineCoreOutputs(
        cache_changes=KVCacheChanges(first=0, last=0, stored={b"x" * 9})
    ),
    "timestamp": EngineCoreOutputs(timestamp=math.inf),
}

WRONG_ALONE = {
    "stop_reason": "x" * 2_000_000,
    "logprobs": [TokenLogprobs([], [], 1)],
    "prompt_logprobs": [TokenLogprobs([999], [-1.0], 1)],
    "error": "x" * 2_000_000,
    "error_kind": "x" * 2_000_000,
    "events": [EngineCoreEvent(EngineCoreEventType.QUEUED, math.nan)],
    "num_cached_tokens": 10_000,
    "pooling_output": np.zeros(3),
    "num_nans_in_logits": -1,
    "prefill_stats": PrefillStats(1, 1, -5),
    "routed_experts": "abc",
    "part_figures": {"z": {"count": 1}},
    "part_arrays": {"x": {"y": [PartArray("a", "b")]}},
    "weight_runs": [WeightRun(-3, "a", "a")],
    "num_resumes": -1,
    "observed_logprobs": [math.nan],
}
UNCHECKED = {"request_id", "new_token_ids", "finish_reason", "faulty_plugin"}
UNCHECKED |= {"kv_transfer_params", "trace_headers"}  # for the request's own client

WRONG_FIGURES = {
    "a table": {"count": {"deep": 1}},
    "a list of texts": {"count": ["a"]},
    "None": {"count": None},
    "numbers without end": {"count": [1] * 10_001},
    "names without end": {f"n{i}": 1 for i in range(10_001)},
    "a long name": {"n" * 2000: 1},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_belong_to_a_request_is_an_error(name):
    check = checker(logprobs=2, prompt_logprobs=1, include=["x"])
    with pytest.raises(WireError, match="expected"):
        check.check(WRONG[name])


def received(check, batch):
    """Encode, decode and check a message, as the reader of an engine does."""
    message = check.decoder.decode(Encoder().encode(batch))
    check.check(message, check.decoder.rare_fields)
    return message


@pytest.mark.parametrize("name", WRONG)
def test_what_is_an_error_is_one_as_received(name):
    """The decoder checks token ids, and tells which fields are to be checked."""
    with pytest.raises(WireError, match="expected"):
        received(checker(logprobs=2, prompt_logprobs=1, include=["x"]), WRONG[name])


@pytest.mark.parametrize("field", WRONG_ALONE)
def test_each_field_is_checked_as_received_among_plain_outputs(field):
    check = checker(include=["x"])
    check.add([request_of(1)])
    plain = EngineCoreOutput(request_id="r1", new_token_ids=[5])
    wrong = EngineCoreOutput(request_id="r", new_token_ids=[5], **{field: WRONG_ALONE[field]})
    with pytest.raises(WireError, match=f"output of 'r': {field}"):
        received(check, EngineCoreOutputs(outputs=[plain, wrong, plain]))


def test_a_received_message_equals_the_one_that_was_sent():
    """Nothing is lost where rare fields have values of their declared types."""
    check = checker(include=["x"], prompt_logprobs=1)
    rare = {
        "num_cached_tokens": 1,
        "events": [EngineCoreEvent(EngineCoreEventType.QUEUED, 1.5)],
        "prompt_logprobs": [None, TokenLogprobs([2, 3], [-1.0, -2.0], 1)],
        "prefill_stats": PrefillStats(1, 1, 5),
        "weight_runs": [WeightRun(0, "a", "a")],
        "part_figures": {"x": {"count": 3}},
        "finish_reason": FinishReason.LENGTH,
    }
    batch = one(new_token_ids=[5], **rare)
    message = received(check, batch)
    assert check.decoder.rare_fields == rare.keys() - {"prompt_logprobs"}
    assert message == batch
    assert batch == message
    assert message.outputs == batch.outputs
    assert message.outputs[0] != one(new_token_ids=[6], **rare).outputs[0]
    received(check, EngineCoreOutputs())
    assert check.decoder.rare_fields == set()


@pytest.mark.parametrize(
    ("field", "value"), [("finish_reason", 77), ("events", 5), ("error", 3), ("weight_runs", ["a"])]
)
def test_a_rare_field_of_another_type_is_an_error_that_names_it(field, value):
    batch = {"type": "EngineCoreOutputs", "outputs": [{"request_id": "r", field: value}]}
    with pytest.raises(WireError, match=rf"outputs\[0\]\.{field}: "):
        received(checker(), batch)


def test_a_token_out_of_the_vocabulary_is_an_error_that_names_its_place():
    with pytest.raises(WireError, match=r"outputs\[0\]\.new_token_ids\[1\]: expected .*299"):
        received(checker(), one(new_token_ids=[5, 300]))


@pytest.mark.parametrize("field", WRONG_ALONE)
def test_each_field_is_checked_if_it_is_the_only_one(field):
    with pytest.raises(WireError, match=f"output of 'r': {field}"):
        checker(include=["x"]).check(one(new_token_ids=[5], **{field: WRONG_ALONE[field]}))


def test_each_field_of_an_output_has_a_wrong_value_above():
    assert WRONG_ALONE.keys() | UNCHECKED == set(EngineCoreOutput.__struct_fields__)


@pytest.mark.parametrize("name", WRONG_FIGURES)
def test_figures_are_numbers_and_texts_by_name(name):
    """Another engine gets them if the request goes on there."""
    with pytest.raises(WireError, match="part_figures"):
        checker(include=["x"]).check(one(part_figures={"x": WRONG_FIGURES[name]}))


def test_figures_and_arrays_of_an_included_part_pass():
    output = one(
        new_token_ids=[5],
        part_figures={"x": {"count": 3, "share": 0.5, "by_position": [1, 2], "name": "ngram"}},
        part_arrays={"x": {"y": [PartArray(np.arange(1), np.zeros(1))]}},
    )
    checker(include=["x"]).check(output)


def test_the_error_names_request_and_field():
    with pytest.raises(WireError) as caught:
        checker().check(one(new_token_ids=[300]))
    assert str(caught.value) == "output of 'r': new_token_ids: expected token ids below 300"


def test_shapes_stay_the_same_for_a_request():
    check = checker()
    check.check(one(new_token_ids=[5], routed_experts=np.zeros((3, 1, 2), np.int32)))
    with pytest.raises(WireError, match="the shape and type of the outputs before"):
        check.check(one(new_token_ids=[5], routed_experts=np.zeros((1, 1, 4), np.int32)))


def test_right_outputs_pass_as_they_are():
    check = checker(logprobs=1, prompt_logprobs=0)
    for output in (
        one(num_cached_tokens=2, prompt_logprobs=[None, TokenLogprobs([2], [-1.0], 1)]),
        one(new_token_ids=[5], logprobs=[TokenLogprobs([5, 6], [-1.0, -2.0], 1)]),
        one(new_token_ids=[1, 2, 3, 4, 5, 6], observed_logprobs=[0.0] * 6),
        one(new_token_ids=[299], finish_reason=FinishReason.LENGTH),
    ):
        before = output.outputs[0]
        check.check(output)
        assert output.outputs == [before]


def test_outputs_of_other_requests_are_left_out():
    check = checker()
    check.check(one(new_token_ids=[5], finish_reason=FinishReason.LENGTH))
    late = one(new_token_ids=[5])
    check.check(late)
    assert late.outputs == []
    check = checker()
    check.forget(["r"])
    aborted = one(new_token_ids=[999])
    check.check(aborted)
    assert aborted.outputs == []


@pytest.mark.parametrize("step", ["_check_fields", "_ids_with"])
def test_an_abort_while_an_output_is_checked_is_no_error(monkeypatch, step):
    check = checker()
    run = getattr(output_check, step)

    def abort_first(*args):
        check.forget(["r"])
        return run(*args)

    monkeypatch.setattr(output_check, step, abort_first)
    check.check(one(new_token_ids=[5], finish_reason=FinishReason.LENGTH))
    assert check.num_requests == 0


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_remote_engine_quarantines_no_plugin(is_remote):
    check = checker(is_remote=is_remote)
    failed = one(finish_reason=FinishReason.ERROR, error="lie", faulty_plugin="min_p")
    check.check(failed)
    assert failed.outputs[0].faulty_plugin == (None if is_remote else "min_p")


def test_an_output_that_ends_nothing_quarantines_no_plugin():
    """Its text may end it in the frontend, with a stop string."""
    output = one(new_token_ids=[5], faulty_plugin="min_p")
    checker(is_remote=True).check(output)
    assert output.outputs[0].faulty_plugin is None


class UnsendableError(Exception):
    pass


class Sockets:
    """Sockets of an engine that encode or send nothing."""

    def __init__(self, *, encodes):
        self.encodes, self.accepts = encodes, False

    def send(self, _kind, _message):
        raise UnsendableError

    def attempt(self, _kind, _message):
        if not self.encodes:
            raise UnsendableError
        return lambda: self.accepts


class Client(RequestSockets):
    def __init__(self, *, encodes):
        self.check = self._check = OutputCheck(VOCABULARY, LENGTH)
        self.sockets = self._sockets = Sockets(encodes=encodes)


def request_of(number):
    params = SamplingParams(max_tokens=8)
    return EngineCoreRequest(request_id=f"r{number}", prompt_token_ids=[1], params=params)


@pytest.mark.parametrize("count", [1, 2])
def test_requests_that_cannot_be_sent_are_not_expected(count):
    """They would stay in the table for as long as the engine runs."""
    client = Client(encodes=False)
    calls = [client.offer_requests, client.add_requests, lambda sent: client.add_request(sent[0])]
    for number in range(1000):
        requests = [request_of(number * 2 + more) for more in range(count)]
        with pytest.raises(UnsendableError):
            calls[number % 3](requests)
    assert client.check.num_requests == 0


def test_requests_that_go_elsewhere_unsent_are_not_expected():
    client = Client(encodes=True)
    for number in range(1000):
        attempt = client.offer_requests([request_of(number)])
        assert not attempt()
        assert not attempt()
    assert client.check.num_requests == 0
    client.sockets.accepts = True
    assert attempt()
    assert client.check.num_requests == 1
    client.check.check(
        EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="r999", new_token_ids=[5])])
    )


def test_outputs_are_expected_before_the_engine_can_have_answered():
    check = checker()
    request, output = (
        request_of(1),
        EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="r1", new_token_ids=[5])]),
    )

    def send():
        check.check(output)
        return True

    assert check.expect([request], send)
    assert len(output.outputs) == 1  # unknown ones are removed


def test_the_size_of_a_message_follows_from_its_requests(monkeypatch):
    """A message takes many times its size once it is decoded, so its size is checked before."""
    monkeypatch.setattr(output_check, "_REPORT_BYTES", 1000)
    monkeypatch.setattr(output_check, "_ANSWER_BYTES", 5000)
    monkeypatch.setattr(output_check, "_OUTPUT_BYTES", 100)
    monkeypatch.setattr(output_check, "_LATE_BYTES", 0)
    plain = checker()
    room = 1000 + 100 + 64 * 11  # 3 tokens of the prompt, and 8 others
    plain.check_size(room, 0)
    plain.check_size(room + 5000, 1)
    for size, calls in ((room + 1, 0), (room + 5001, 1)):
        with pytest.raises(WireError, match=f"a message of {size} bytes, expected at most "):
            plain.check_size(size, calls)
    checker(logprobs=2).check_size(room + 24 * 3 * 11, 0)
    checker(logprobs=-1).check_size(room + 24 * VOCABULARY * 11, 0)
    checker(prompt_logprobs=2).check_size(room + 24 * 3 * 3, 0)
    plain.forget(["r"])  # its last outputs may be on their way
    plain.check_size(room, 0)
    monkeypatch.setattr(output_check, "_LATE_S", -1.0)
    plain.forget([])
    with pytest.raises(WireError, match="expected at most 1000 for its requests"):
        plain.check_size(1001, 0)
