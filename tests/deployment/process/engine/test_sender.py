"""The queues of the sender: in order, merged where a client is behind, and bounded."""

from __future__ import annotations

import threading
import time

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples
from support.waiting import PATIENCE_S

from hardpoint.plugins import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from hardpoint.plugins.requests import PartArray, TokenLogprobs
from hardpoint.process.engine.sender import ClientSendQueues
from hardpoint.process.output_coalescer import _SET_ONCE, merge_into
from hardpoint.process.protocol import UtilityOutput


def batch(*outputs, **fields):
    return EngineCoreOutputs(outputs=list(outputs), **fields)


def output(name, tokens=(), **fields):
    return EngineCoreOutput(request_id=name, new_token_ids=list(tokens), **fields)


def taken(queues, client=0):
    """Everything that waits for a client."""
    queues.end(0)
    messages = []
    while (item := queues.pop(lambda number: number == client)) is not None:
        messages.append(item[1])
    return messages


class TestOrder:
    def test_a_client_that_keeps_up_gets_the_very_messages(self):
        queues, first = ClientSendQueues(), batch(output("a", [1]))
        queues.put(0, first)
        client, message = queues.pop(lambda _: True)
        assert client == 0
        assert message is first

    def test_outputs_come_before_answers_that_came_after_them(self):
        queues = ClientSendQueues()
        queues.put(0, batch(output("a", finish_reason=FinishReason.ABORT)))
        queues.put(0, UtilityOutput.succeeded(1, None))
        queues.put(0, UtilityOutput.succeeded(2, None))
        outputs, *answers = taken(queues)
        assert outputs.outputs[0].request_id == "a"
        assert [answer.call_id for answer in answers] == [1, 2]

    def test_nothing_is_held_up_by_outputs_that_keep_coming(self):
        queues = ClientSendQueues()
        order = []
        queues.put(0, batch(output("a", [0])))
        for number in range(4):
            queues.put(0, UtilityOutput.succeeded(number, None))
            order.append(type(queues.pop(lambda _: True)[1]))
            queues.put(0, batch(output("a", [number + 1])))
        assert order == [EngineCoreOutputs, UtilityOutput, EngineCoreOutputs, UtilityOutput]
        kinds = [getattr(message, "call_id", "outputs") for message in taken(queues)]
        assert kinds == [2, "outputs", 3]

    def test_clients_have_nothing_to_do_with_each_other(self):
        queues = ClientSendQueues(2)
        for token in range(3):
            queues.put(0, batch(output("a", [token])))
            queues.put(1, batch(output("a", [token + 10])))
        assert taken(queues, 1)[0].outputs[0].new_token_ids == [10, 11, 12]
        assert taken(queues, 0)[0].outputs[0].new_token_ids == [0, 1, 2]

    def test_a_client_that_there_is_not_gets_nothing(self, caplog):
        queues = ClientSendQueues(2)
        queues.put(2, batch(output("a", [1])))
        queues.put(-1, batch(output("a", [1])))
        assert taken(queues) == []
        assert "dropped a message for client 2: there are 2" in caplog.text


class TestMerging:
    def test_one_entry_per_request(self):
        queues = ClientSendQueues()
        for token in range(1000):
            queues.put(0, batch(output("a", [token]), output("b", [token])))
        (merged,) = taken(queues)
        assert [o.request_id for o in merged.outputs] == ["a", "b"]
        assert merged.outputs[0].new_token_ids == list(range(1000))

    def test_the_batch_of_the_engine_is_not_changed(self):
        queues, first = ClientSendQueues(), batch(output("a", [1]))
        queues.put(0, first)
        queues.put(0, batch(output("a", [2]), output("b", [3])))
        taken(queues)
        assert first.outputs == [output("a", [1])]

    def test_a_request_that_got_the_id_of_an_ended_one_is_another_one(self):
        queues = ClientSendQueues()
        queues.put(0, batch(output("a", [1], finish_reason=FinishReason.STOP)))
        queues.put(0, batch(output("a", [2])))
        queues.put(0, batch(output("a", [3], finish_reason=FinishReason.LENGTH)))
        (merged,) = taken(queues)
        assert [(o.new_token_ids, o.finish_reason) for o in merged.outputs] == [
            ([1], FinishReason.STOP),
            ([2, 3], FinishReason.LENGTH),
        ]

    def test_a_merged_output_has_all_fields_of_both(self):
        events = [EngineCoreEvent(EngineCoreEventType(kind), float(kind)) for kind in (1, 2, 3)]
        row = TokenLogprobs([7], [-0.5], 1)
        first = output(
            "a", [1], logprobs=[row], prompt_logprobs=[None, row], events=events[:2],
            num_cached_tokens=16, num_nans_in_logits=1,
        )  # fmt: skip
        later = output(
            "a", [2], logprobs=[row, row], prompt_logprobs=[row], events=events[2:],
            finish_reason=FinishReason.STOP, stop_reason=2, num_nans_in_logits=2,
            kv_transfer_params={"from": "there"},
        )  # fmt: skip
        merge_into(first, later)
        assert first == output(
            "a", [1, 2], logprobs=[row] * 3, prompt_logprobs=[None, row, row], events=events,
            num_cached_tokens=16, finish_reason=FinishReason.STOP, stop_reason=2,
            num_nans_in_logits=3, kv_transfer_params={"from": "there"},
        )  # fmt: skip

    def test_a_field_that_neither_has_stays_unset(self):
        held = output("a", [1])
        merge_into(held, output("a", [2]))
        assert held == output("a", [1, 2])

    def test_batches_are_merged_too(self):
        queues = ClientSendQueues()
        queues.put(0, batch(timestamp=1.0, finished_requests={"x"}))
        queues.put(0, batch(timestamp=2.0, finished_requests={"y"}))
        (merged,) = taken(queues)
        assert merged.timestamp == 2.0
        assert merged.finished_requests == {"x", "y"}


class TestBounds:
    def test_what_is_held_grows_with_requests_and_not_with_steps(self):
        queues = ClientSendQueues()
        for token in range(20_000):
            queues.put(0, batch(output("a", [token])))
        assert not queues.is_full(0)

    def test_many_requests_that_a_client_does_not_read_are_many(self):
        queues = ClientSendQueues(2)
        for number in range(9000):
            queues.put(0, batch(output(f"r{number}", [1], finish_reason=FinishReason.LENGTH)))
        assert queues.is_full(0)
        assert not queues.is_full(1)
        queues.pop(lambda _: True)
        assert not queues.is_full(0)

    def test_so_are_answers(self):
        queues = ClientSendQueues()
        for number in range(9000):
            queues.put(0, UtilityOutput.succeeded(number, None))
        assert queues.is_full(0)


class TestWaiting:
    def test_a_message_wakes_who_waits(self):
        queues, got = ClientSendQueues(), []
        thread = threading.Thread(target=lambda: got.append(queues.pop(lambda _: True)))
        thread.start()
        time.sleep(0.05)
        assert got == []
        queues.put(0, UtilityOutput.succeeded(1, None))
        thread.join(PATIENCE_S)
        assert got == [(0, UtilityOutput.succeeded(1, None))]

    def test_a_client_that_can_take_nothing_holds_up_nobody(self):
        queues = ClientSendQueues(2)
        queues.put(0, batch(output("a", [1])))
        queues.put(1, batch(output("b", [2])))
        assert queues.pop(lambda client: client == 1)[0] == 1

    def test_once_it_can_it_is_asked_again(self):
        queues = ClientSendQueues()
        queues.put(0, batch(output("a", [1])))
        ready = threading.Event()
        threading.Timer(0.05, ready.set).start()
        assert queues.pop(lambda _: ready.is_set())[0] == 0

    def test_the_end_waits_until_everything_is_taken(self):
        queues = ClientSendQueues()
        queues.put(0, batch(output("a", [1])))
        queues.end(60)
        assert queues.pop(lambda _: True) is not None
        assert queues.pop(lambda _: True) is None

    def test_but_not_for_ever(self):
        queues = ClientSendQueues()
        queues.put(0, batch(output("a", [1])))
        began = time.monotonic()
        queues.end(0.1)
        assert queues.pop(lambda _: False) is None
        assert 0.1 <= time.monotonic() - began < PATIENCE_S


@examples(200)
@given(
    st.lists(
        st.one_of(
            st.none(),  # the client takes what there is
            st.lists(
                st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=3)),
                max_size=3,
                unique_by=lambda entry: entry[0],
            ),
        ),
        max_size=30,
    ),
    st.sets(st.integers(0, 29)),
)
def test_a_client_gets_the_same_tokens_whenever_it_reads(actions, ends):
    queues, sent, got = ClientSendQueues(), {}, {}

    def read():
        while len(queues._queues[0]):
            _, message = queues.pop(lambda _: True)
            for each in message.outputs:
                got.setdefault(each.request_id, []).append((each.new_token_ids, each.finished))

    for place, action in enumerate(actions):
        if action is None:
            read()
            continue
        reason = FinishReason.STOP if place in ends else None
        queues.put(0, batch(*(output(name, t, finish_reason=reason) for name, t in action)))
        for name, tokens in action:
            sent.setdefault(name, []).append((tokens, reason is not None))
    read()
    assert {name: lives(outputs) for name, outputs in got.items()} == {
        name: lives(outputs) for name, outputs in sent.items()
    }


def lives(outputs):
    """The tokens of the requests that bore a name, one after another."""
    result = [[]]
    for tokens, finished in outputs:
        result[-1] += tokens
        if finished:
            result.append([])
    return result


def test_observed_logprobs_follow_one_another():
    queues = ClientSendQueues()
    for token, logprob in ((1, -0.5), (2, -(2.0**-40)), (3, -1.5)):
        queues.put(0, batch(output("a", [token], observed_logprobs=[logprob])))
    (merged,) = queues.pop(lambda _: True)[1].outputs
    assert merged.new_token_ids == [1, 2, 3]
    assert merged.observed_logprobs == [-0.5, -(2.0**-40), -1.5]


def test_arrays_of_positions_follow_one_another():
    queues = ClientSendQueues()
    for number in range(3):
        arrays = {"taps": {"a": [PartArray([number], [number])]}}
        if number == 1:
            arrays = {"taps": {"b": [PartArray([7], [8])]}}
        queues.put(0, batch(output("x", [number], part_arrays=arrays)))
    (merged,) = queues.pop(lambda _: True)[1].outputs
    positions = {
        key: [array.positions for array in arrays]
        for key, arrays in merged.part_arrays["taps"].items()
    }
    assert positions == {"a": [[0], [2]], "b": [[7]]}


def test_no_field_of_an_output_is_forgotten():
    looked_at = {"request_id", "finish_reason", "stop_reason", "error", "error_kind"}
    looked_at |= {"faulty_plugin", "new_token_ids", "logprobs", "prompt_logprobs", "events"}
    looked_at |= {"num_nans_in_logits", "num_resumes", "routed_experts", "part_figures"}
    looked_at |= {*_SET_ONCE}
    looked_at |= {"observed_logprobs", "part_arrays"}
    assert {field.name for field in msgspec.structs.fields(EngineCoreOutput)} == looked_at
