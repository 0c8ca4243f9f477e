"""Frames of clients: which become messages, which are answered, which are dropped."""

from __future__ import annotations

import logging
import math
import queue

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core.engine_harness import request
from support.plugins.observing import Follows
from support.searching import examples

from hardpoint.core.engine.request_check import RequestCheck
from hardpoint.host.system.encoding import Encoder
from hardpoint.plugins import EngineCoreRequest, OverloadedError, RequestError, SamplingParams
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import LoRARequest, ResumedOutputs
from hardpoint.process.engine.loop import Abort, LoopQueues, Prepared, Rejection
from hardpoint.process.engine.receiver import MessageReader
from hardpoint.process.engine.sender import ClientSendQueues
from hardpoint.process.protocol import RequestType, UtilityCall

ADD, ABORT, UTILITY = RequestType.ADD, RequestType.ABORT, RequestType.UTILITY
ADD_ALL = RequestType.ADD_ALL


class Fixed(Follows):
    """Cannot go on elsewhere."""

    contract = 1
    supports_resume = False


PROCESSORS = {"follows": Follows, "fixed": Fixed}


class Desk:
    """A reader with the results of its messages."""

    def __init__(self, clients=2, check=lambda _request: None):
        self.queues = LoopQueues(output=ClientSendQueues(clients))
        self.reader = MessageReader(self.queues, check)

    def take(self, kind, message, client=0):
        frames = message if isinstance(message, list) else Encoder().encode(message)
        self.reader.receive(client, [bytes(kind), *frames])
        return self

    @property
    def queued(self):
        messages = []
        while True:
            try:
                message = self.queues.input.get_nowait()
                messages.append(message.request if isinstance(message, Prepared) else message)
            except queue.Empty:
                return messages

    @property
    def answers(self):
        self.queues.output.end(0)
        messages = []
        while (item := self.queues.output.pop(lambda _: True)) is not None:
            messages.append(item)
        return messages

    @property
    def refused(self):
        """Outputs of requests that were refused, with the client that is told."""
        return [(client, output) for client, message in self.answers for output in message.outputs]


def packed(*fields):
    return [msgspec.msgpack.encode(fields)]


def named(**fields):
    return [msgspec.msgpack.encode(fields)]


def of_call(*requests):
    return Encoder().encode(list(requests))


ID_KEY = msgspec.msgpack.encode("request_id")


class TestRequestsOfOneCall:
    def test_they_are_queued_together(self):
        (call,) = Desk().take(ADD_ALL, of_call(request("a"), request("b"))).queued
        assert [prepared.request.request_id for prepared in call.requests] == ["a", "b"]

    def test_one_that_is_wrong_refuses_all_and_comes_first(self):
        desk = Desk(check=RequestCheck(50))
        desk.take(ADD_ALL, of_call(request("a"), request("b", prompt=[99]), request("c")))
        assert desk.queued == []
        refused = [output for _, output in desk.refused]
        assert [output.request_id for output in refused] == ["b", "a", "c"]
        assert {output.error_kind for output in refused} == {"RequestError"}
        (error,) = {output.error for output in refused}
        assert "99" in error

    def test_wrong_types_and_equal_ids_refuse_all(self):
        for frames, message in [
            (of_call({"request_id": "a"}, {"request_id": "b", "params": 1}), "[0]: "),
            (of_call(request("a"), request("a")), "expected ids of their own of a call's requests"),
        ]:
            refused = Desk().take(ADD_ALL, frames).refused
            for _, output in refused:
                assert message in output.error
            assert len(refused) == 2

    def test_a_live_request_is_not_answered_in_place_of_the_new_one(self):
        desk = Desk(check=RequestCheck(50)).take(ADD, request("a"))
        desk.take(ADD_ALL, of_call(request("a", prompt=[99]), request("b")))
        assert [output.request_id for _, output in desk.refused] == ["b"]
        live, refusal = desk.queued
        assert (live.request_id, refusal.request_id) == ("a", "a")
        assert isinstance(refusal, Rejection)

    def test_what_cannot_be_read_is_logged(self, caplog):
        desk = Desk()
        (frame,) = Encoder().encode([request("a"), request("b")])
        for damaged in ([bytes(frame)[:-3]], [msgspec.msgpack.encode([{}, {}])], []):
            caplog.clear()
            desk.take(ADD_ALL, damaged)
            assert (desk.queued, desk.refused) == ([], [])
            assert "dropped a message of client 0" in caplog.text


class TestMessages:
    def test_requests_aborts_and_calls(self):
        desk = Desk()
        desk.take(ADD, request("a"))
        desk.take(ABORT, [msgspec.msgpack.encode(["a", "b"])])
        desk.take(UTILITY, UtilityCall(0, 4, "pause", ["keep"]))
        assert desk.queued == [
            request("a"),
            Abort(["a", "b"], 0),
            UtilityCall(0, 4, "pause", ["keep"]),
        ]

    def test_aborts_are_on_both_lanes(self):
        desk = Desk().take(ADD, request("a"), client=1)
        desk.take(ABORT, [msgspec.msgpack.encode(["a"])], client=1)
        abort = desk.queues.urgent_aborts.get_nowait()
        assert (abort.request_ids, abort.client_index) == (["a"], 1)
        assert desk.queued[1:] == [abort]

    def test_an_abort_reaches_a_request_that_has_the_id_of_an_ended_one(self):
        """The last output of the first one may be sent after the second one is read."""
        desk, ids = Desk(), msgspec.msgpack.encode(["a"])
        desk.take(ADD, request("a")).take(ABORT, [ids]).take(ADD, request("a"))
        desk.reader.request_ended(0, "a")
        desk.take(ABORT, [ids])
        assert desk.queued == [request("a"), Abort(["a"], 0), request("a"), Abort(["a"], 0)]

    def test_requests_are_looked_at_before_the_loop_gets_them(self):
        def check(request):
            raise OverloadedError(f"no room for {request.request_id}")

        desk = Desk(check=check).take(ADD, request("a", client_index=1), client=1)
        assert desk.queued == []
        ((client, refused),) = desk.refused
        assert (refused.request_id, client) == ("a", 1)
        assert refused.error_kind == "OverloadedError"
        assert refused.error == "no room for a"

    def test_with_an_id_in_use_the_loop_decides(self):
        desk = Desk(check=RequestCheck(100))
        desk.take(ADD, request("a"))
        desk.take(ADD, request("a", prompt=[100]))
        desk.take(ADD, request("a", prompt=[100], client_index=1), client=1)
        first, refusal = desk.queued
        assert first == request("a")
        assert isinstance(refusal, Rejection)
        assert (refusal.request_id, refusal.client_index) == ("a", 0)
        assert "got 100" in str(refusal.error)
        assert [client for client, _ in desk.refused] == [1]
        desk.reader.request_ended(0, "a")
        desk.take(ADD, request("a", prompt=[100]))
        assert [client for client, _ in desk.refused] == [0]


class TestWhatIsNone:
    @pytest.mark.parametrize(
        ("frames", "words"),
        [
            (
                named(request_id="a", prompt_token_ids="no list"),
                "EngineCoreRequest.prompt_token_ids: expected a list",
            ),
            (
                named(request_id="a", prompt_token_ids=[1, "x"]),
                "EngineCoreRequest.prompt_token_ids[1]: expected a whole",
            ),
            (named(request_id="a"), "EngineCoreRequest: missing required field prompt_token_ids"),
            (named(prompt_token_ids=[1], request_id="a"), "EngineCoreRequest: missing required"),
            ([Encoder().encode(request("a" * 40))[0][:-3]], "truncated"),
            ([b"\xde\x00\x17" + ID_KEY + b"\xa1a\xa1b\xc1"], "damaged"),
            ([b"\x83" + ID_KEY + b"\xd9\x01a\xa1b\xc1"], "damaged"),
        ],
    )
    def test_a_request_is_refused_by_its_id(self, frames, words):
        desk = Desk().take(ADD, frames, client=1)
        assert desk.queued == []
        ((client, refused),) = desk.refused
        assert set(refused.request_id) == {"a"}
        assert client == 1
        assert str(refused.finish_reason) == "error"
        assert words in refused.error
        assert refused.error_kind == "RequestError"

    @pytest.mark.parametrize(
        "frames",
        [
            [],
            [b""],
            [b"\xc1"],
            [b"\x93\x01\x02\x03"],
            [b"\x83" + ID_KEY],
            [b"\x83" + ID_KEY + b"\xa1"],
            [b"\x83" + ID_KEY + b"\xa2\xff\xff\x01"],
            [b"\x83" + ID_KEY + b"\xda"],
            [b"\x83" + ID_KEY + b"\xda\xff\xffab"],
            [b"\x83\xa4name\xa1a\xc1"],
            named(request_id=7, prompt_token_ids=[1]),
            named(request_id=""),
            named(request_id="x" * 5000),
            named(),
            packed("a", [1]),
        ],
    )
    def test_a_request_without_an_id_is_dropped_and_logged(self, frames, caplog):
        desk = Desk().take(ADD, frames, client=1)
        assert desk.queued == []
        assert desk.answers == []
        assert "dropped a message of client 1: EngineCoreRequest" in caplog.text

    @pytest.mark.parametrize(
        ("frames", "words"),
        [
            (packed(0, 7, "pause", "keep"), "Call to pause method failed: WireError: UtilityCall"),
            (packed(0, 7), "Call to unknown method failed"),
            (packed("x", 7, 8), "Call to unknown method failed"),
        ],
    )
    def test_a_call_is_answered_by_its_number(self, frames, words):
        desk = Desk().take(UTILITY, frames)
        ((client, answer),) = desk.answers
        assert (client, answer.call_id) == (0, 7)
        assert words in answer.failure
        assert answer.kind == "RequestError"
        assert desk.queued == []

    @pytest.mark.parametrize("frames", [[], [b"\x92"], packed(0, "seven"), packed(0, True)])
    def test_a_call_without_a_number_is_dropped(self, frames, caplog):
        desk = Desk().take(UTILITY, frames)
        assert desk.queued == []
        assert desk.answers == []
        assert "dropped a message of client 0: UtilityCall" in caplog.text

    @pytest.mark.parametrize("kind", [b"", b"\x04", b"\x05", b"\x07", b"\x00\x00", b"ADD", b"\x02"])
    def test_unknown_and_inner_types_are_dropped(self, kind, caplog):
        desk = Desk().take(kind, request("a"))
        assert desk.queued == []
        assert desk.answers == []
        assert "dropped a message of client 0: request type" in caplog.text

    def test_an_abort_that_is_none_is_dropped(self, caplog):
        desk = Desk().take(ABORT, packed("a", 1))
        assert desk.queued == []
        assert desk.queues.urgent_aborts.empty()
        assert "dropped" in caplog.text

    def test_answers_go_to_the_client_of_the_connection_whatever_index_a_message_has(self):
        desk = Desk().take(ADD, request("a", client_index=1))
        desk.take(ADD_ALL, of_call(request("b"), request("c", client_index=1)))
        desk.take(UTILITY, UtilityCall(1, 4, "pause", ["keep"]))
        first, call, utility = desk.queued
        requests = [first, *(prepared.request for prepared in call.requests)]
        assert [request.client_index for request in requests] == [0, 0, 0]
        assert utility == UtilityCall(0, 4, "pause", ["keep"])


class TestRequestCheck:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"prompt": []}, "prompt_token_ids: expected at least one token, got none"),
            ({"prompt": [0, 99, 100]}, "prompt_token_ids: expected .* from 0 to 99, got 100"),
            ({"prompt": [5, -1]}, "prompt_token_ids: expected token ids from 0 to 99, got -1"),
            ({"pooling_params": PoolingParams(task="embed")}, "pooling_params: no model of this"),
            ({"prompt_embeds": [[0.5]]}, "prompt_embeds: expected token ids"),
            ({"lora": LoRARequest("poems", 1)}, "lora: expected none, .* adapters, got 'poems'"),
            ({"resumable": True}, "resumable: expected false, .* got true"),
            ({"prompt_is_token_ids": [True]}, r"prompt_is_token_ids: expected none.*got \[True\]"),
            (
                {"reasoning_parser_kwargs": {"a": 1}},
                "reasoning_parser_kwargs: expected none.*got {",
            ),
            ({"data_parallel_rank": 1}, "data_parallel_rank: expected 0, .* or none, got 1"),
        ],
    )
    def test_what_a_model_could_not_bear(self, fields, words):
        with pytest.raises(ValueError, match=words):
            RequestCheck(100)(request("a", **fields))

    @pytest.mark.parametrize(
        ("resumed", "fields", "words"),
        [
            ([100], {}, r"resumed\.output_token_ids\[0\]: expected .* from 0 to 99, got 100"),
            ([1, -1], {}, r"resumed\.output_token_ids\[1\]: expected .* from 0 to 99, got -1"),
            ([1, 2, 3, 4], {}, "output_token_ids: expected fewer than max_tokens, 4, .*, got 4"),
            ([1, 7], {"eos_token_ids": [7]}, r"ids\[1\]: expected no token that ends .*, got 7"),
            ([], {"pooling_params": PoolingParams()}, "resumed: expected none with pooling_params"),
            ([1], {"plugin_args": {"follows": {}}}, "observed_logprobs: expected .* 'follows' obs"),
            ([1], {"plugin_args": {"fixed": {}}}, "resumed: expected none: .* 'fixed' does not"),
        ],
    )
    def test_outputs_of_another_engine(self, resumed, fields, words):
        check = RequestCheck(100, used={"pooling_params"}, processors=PROCESSORS)
        with pytest.raises(RequestError, match=words):
            check(request("a", resumed=ResumedOutputs(resumed), **fields))

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ({"observed_logprobs": [-0.5]}, "expected one for each of the 2 tokens, got 1"),
            ({"observed_logprobs": [0.0, math.nan]}, r"logprobs\[1\]: expected a finite number"),
            ({"num_prompt_logprobs": 4}, "num_prompt_logprobs: expected at most 3, got 4"),
            ({"num_routed_positions": 6}, "num_routed_positions: expected at most 5, got 6"),
        ],
    )
    def test_what_came_with_outputs_of_another_engine(self, more, words):
        with pytest.raises(RequestError, match=words):
            RequestCheck(100)(request("a", resumed=ResumedOutputs([1, 2], **more)))

    def test_a_sampler_whose_states_no_other_engine_has(self):
        check = RequestCheck(100, processors={"": Fixed})
        with pytest.raises(RequestError, match="none: the sampler does not declare supports_res"):
            check(request("a", resumed=ResumedOutputs([1])))

    def test_outputs_that_have_not_ended(self):
        check = RequestCheck(100, processors=PROCESSORS)
        ends = {"eos_token_ids": [7], "plugin_args": {"follows": {}}}
        observed = ResumedOutputs([7, 1], [-0.5, -0.25])
        sent = request("a", resumed=observed, **ends)
        sent.params = SamplingParams(max_tokens=4, min_tokens=1)  # a plugin may force the first one
        check(sent)
        check(request("b", resumed=ResumedOutputs([]), **ends))

    def test_fields_that_a_part_uses(self):
        check = RequestCheck(100, used={"lora", "pooling_params"})
        check(request("a", lora=LoRARequest("poems", 1), pooling_params=PoolingParams()))

    def test_arguments_that_nobody_checked(self):
        sent = request("a")
        sent.params = SamplingParams(plugin_args={"a": {}})
        with pytest.raises(ValueError, match=r"params.plugin_args: expected none, .* {'a': {}}"):
            RequestCheck(100)(sent)

    def test_the_own_rank_may_be_asked_for(self):
        RequestCheck(100, 3)(request("a", data_parallel_rank=3))
        with pytest.raises(ValueError, match="data_parallel_rank: expected 3, .* got 0"):
            RequestCheck(100, 3)(request("a", data_parallel_rank=0))

    def test_the_whole_vocabulary_is_fine(self):
        RequestCheck(100)(request("a", prompt=[0, 99]))


GOOD = [
    [bytes(ADD), *map(bytes, Encoder().encode(request("some request", prompt=range(40))))],
    [bytes(ABORT), msgspec.msgpack.encode(["some request", "another"])],
    [bytes(UTILITY), *map(bytes, Encoder().encode(UtilityCall(0, 70, "pause", ["keep", True])))],
]


@examples(400)
@given(
    frames=st.one_of(
        st.sampled_from(GOOD), st.lists(st.binary(max_size=60), min_size=1, max_size=4)
    ),
    edits=st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=3)), max_size=4),
)
def test_whatever_comes_is_a_message_an_answer_or_a_line_in_the_log(frames, edits):
    frames = list(frames)
    for place, data in edits:
        which = place % len(frames)
        frame, at = frames[which], place // len(frames)
        frames[which] = frame[:at] + data + frame[at + len(data) + place % 2 :]
    desk, lines = Desk(check=RequestCheck(100)), []
    logger, handler = logging.getLogger("hardpoint"), logging.Handler()
    handler.emit = lines.append
    logger.addHandler(handler)
    try:
        desk.reader.receive(0, frames)
    finally:
        logger.removeHandler(handler)
    queued = desk.queued
    assert len(queued) + len(desk.answers) + len(lines) == 1
    assert all(isinstance(m, EngineCoreRequest | Abort | UtilityCall | Rejection) for m in queued)
