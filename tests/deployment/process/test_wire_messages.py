"""The wire form of messages, the values they refuse, and how versions are recognised."""

from __future__ import annotations

import gc
import weakref

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack
from support.searching import examples

from hardpoint.core.engine.pause import PauseMode
from hardpoint.host.system.encoding import Decoder, Encoder, WireError
from hardpoint.plugins import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PrefillStats,
    SamplingParams,
    SchedulerStats,
)
from hardpoint.plugins.requests import (
    LoRARequest,
    MultiModalFeature,
    ResumedOutputs,
    TokenLogprobs,
)
from hardpoint.plugins.requests.stats import PrefixCacheStats
from hardpoint.process import protocol
from hardpoint.process.protocol import (
    END_MARKERS,
    PROTOCOL_VERSION,
    EngineAddresses,
    EngineCoreReadyResponse,
    RequestType,
    ShutdownState,
    UtilityCall,
    UtilityOutput,
    UtilityResult,
    decode_handshake,
)

TEXT = st.text(max_size=9)
COUNT = st.integers(0, 2**40)
PLAIN = st.none() | st.booleans() | st.integers(-9, 9) | TEXT | st.lists(TEXT, max_size=2)
ADDRESSES = st.builds(
    EngineAddresses,
    inputs=st.lists(TEXT, max_size=2),
    outputs=st.lists(TEXT, max_size=2),
)
EVERYTHING = st.one_of(
    ADDRESSES,
    st.builds(UtilityCall, st.integers(-1, 9), COUNT, TEXT, st.lists(PLAIN, max_size=3)),
    st.builds(UtilityOutput.succeeded, COUNT, PLAIN),
    st.builds(UtilityOutput.failed, COUNT, TEXT),
    st.builds(
        EngineCoreReadyResponse,
        manifest_hash=TEXT,
        max_model_len=COUNT.map(lambda n: n + 1),
        num_gpu_blocks=COUNT,
    ),
)


def encoded(message):
    (frame,) = Encoder().encode(message)
    return frame


def refusal(call, *args):
    with pytest.raises(WireError) as caught:
        call(*args)
    return str(caught.value)


def decode_plain(type_, plain):
    return Decoder(type_).decode(msgpack.encode(plain))


@examples(200)
@given(EVERYTHING)
def test_messages_are_lossless(message):
    assert Decoder(type(message)).decode(encoded(message)) == message


def test_request_types():
    assert {kind.name: bytes(kind) for kind in RequestType} == {
        "ADD": b"\x00",
        "ABORT": b"\x01",
        "UTILITY": b"\x03",
        "ADD_ALL": b"\x06",
    }
    for kind in RequestType:
        assert RequestType.from_wire(bytes(kind)) is kind
        assert RequestType.from_wire(memoryview(kind)) is kind


@pytest.mark.parametrize(
    ("frame", "got"),
    [
        (b"\x02", "02"),
        (b"\x04", "04"),
        (b"\x05", "05"),
        (b"\x07", "07"),
        (b"", "nothing"),
        (b"\x00\x00", "0000"),
        (b"\x01" * 1000, "0101010101010101..."),
    ],
)
def test_request_types_that_may_not_arrive(frame, got):
    known = "00 (ADD), 01 (ABORT), 03 (UTILITY), 06 (ADD_ALL)"
    assert refusal(RequestType.from_wire, frame) == (
        f"request type: expected one of {known}, got {got}"
    )


def test_constants():
    assert END_MARKERS == (b"ENGINE_CORE_DEAD", b"ENGINE_CORE_EXITED")
    assert PROTOCOL_VERSION == 5
    assert [(state.name, int(state)) for state in ShutdownState] == [
        ("RUNNING", 0),
        ("REQUESTED", 1),
        ("SHUTTING_DOWN", 2),
    ]


@pytest.mark.parametrize("marker", END_MARKERS)
def test_an_end_marker_is_not_a_message(marker):
    """A client that does not look for it cannot decode it as outputs."""
    with pytest.raises(WireError):
        Decoder().decode(marker)


def test_pause_modes():
    assert [str(mode) for mode in PauseMode] == ["abort", "wait", "keep"]
    assert PauseMode("keep") is PauseMode.KEEP
    with pytest.raises(ValueError, match="'stop' is not a valid PauseMode"):
        PauseMode("stop")
    assert decode_plain(PauseMode, "wait") is PauseMode.WAIT
    assert refusal(decode_plain, PauseMode, "stop") == "PauseMode: invalid enum value 'stop'"


def test_a_utility_call_without_arguments():
    assert decode_plain(UtilityCall, [0, 1, "resume"]) == UtilityCall(0, 1, "resume")
    assert refusal(decode_plain, UtilityCall, [0, 1, "resume", {"a": 1}]) == (
        "UtilityCall.args: expected a list, got a table"
    )
    assert refusal(decode_plain, UtilityCall, [0, "1", "resume"]) == (
        "UtilityCall.call_id: expected a whole number, got a string"
    )


def test_a_result_of_none_is_a_result():
    answer = UtilityOutput.succeeded(3, None)
    assert (answer.failure, answer.result) == (None, UtilityResult(None))
    back = Decoder(UtilityOutput).decode(encoded(answer))
    assert back.result is not None
    assert back.result.value is None


def test_a_failure():
    answer = UtilityOutput.failed(3, "")
    assert (answer.failure, answer.result) == ("", None)


def test_neither_and_both_are_refused():
    words = "a utility output has either a failure or a result, got"
    assert refusal(UtilityOutput, 3) == f"{words} neither"
    assert refusal(UtilityOutput, 3, "x", UtilityResult(1)) == f"{words} both"
    assert (
        refusal(decode_plain, UtilityOutput, {"type": "UtilityOutput", "call_id": 3})
        == f"UtilityOutput: {words} neither"
    )
    assert (
        refusal(
            decode_plain,
            UtilityOutput,
            {"type": "UtilityOutput", "call_id": 3, "failure": "x", "result": [1]},
        )
        == f"UtilityOutput: {words} both"
    )


def test_the_ready_response_has_defaults():
    plain = ["SERVING", 5, "abc", 4096]
    ready = EngineCoreReadyResponse(manifest_hash="abc", max_model_len=4096)
    assert decode_plain(EngineCoreReadyResponse, plain) == ready
    assert ready.num_gpu_blocks == 0
    plain[3] = 0
    assert refusal(decode_plain, EngineCoreReadyResponse, plain) == (
        "EngineCoreReadyResponse.max_model_len: expected a whole number >= 1"
    )


# The handshake

READY = EngineCoreReadyResponse(manifest_hash="abc", max_model_len=64)


def test_the_ready_response_begins_with_status_and_version():
    assert msgpack.decode(encoded(READY)) == ["SERVING", PROTOCOL_VERSION, "abc", 64, 0]
    assert decode_handshake(encoded(READY)) == READY


@pytest.mark.parametrize(
    "plain",
    [
        ["SERVING", 1, "abc", 64],
        ["SERVING", 1],
        ["SERVING", 0, {"other": "fields"}],
        ["GREETING", 4, True, False, "more"],
    ],
)
def test_another_version_is_named(plain):
    assert refusal(decode_handshake, msgpack.encode(plain)) == (
        f"protocol version: expected 5, got {plain[1]}; "
        "frontend and engine need the same version of Hardpoint"
    )


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "handshake: the frame is truncated"),
        (b"\x01", "handshake: expected a list, got a whole number"),
        (msgpack.encode(["SERVING"]), "handshake: expected a list of at least length 2, got 1"),
        (
            msgpack.encode(["SERVING", "1"]),
            "handshake.protocol: expected a whole number, got a str",
        ),
        (
            msgpack.encode(["READY", 5, "abc", 64]),
            "EngineCoreReadyResponse.status: invalid value 'READY'",
        ),
        (
            msgpack.encode(["SERVING", 5, "abc"]),
            "EngineCoreReadyResponse: expected a list of at least length 4, got 3",
        ),
        (encoded(READY) + b"\x00", "handshake: the frame is damaged"),
    ],
)
def test_malformed_handshakes(frame, words):
    assert refusal(decode_handshake, frame).startswith(words)


def test_messages_cannot_be_changed():
    for message in (READY, UtilityOutput.failed(1, "x")):
        field = message.__struct_fields__[0]
        with pytest.raises(AttributeError, match="immutable type"):
            setattr(message, field, 3)


def test_types_without_containers_of_anything_are_not_tracked():
    """gc=False is right only where no reference cycle can be made."""
    structs = [
        value
        for value in vars(protocol).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    ]
    untracked = {cls.__name__ for cls in structs if not cls.__struct_config__.gc}
    assert untracked == {"EngineAddresses", "EngineCoreReadyResponse"}


def test_media_of_a_request_are_frames_of_its_message_and_not_copied():
    pixels = np.zeros((32, 32, 3), np.uint8)
    features = [MultiModalFeature("a", 0, 1, data=pixels), MultiModalFeature("b", 1, 1)]
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(), features=features
    )
    frames = Encoder().encode(request)
    pixels[3, 4, 1] = 7
    assert len(frames) == 2
    back = Decoder(EngineCoreRequest).decode([bytes(frames[0]), *frames[1:]]).features
    assert np.shares_memory(back[0].data, pixels)
    assert (back[0].data.dtype, back[0].data.shape) == (np.uint8, (32, 32, 3))
    assert back[0].data[3, 4, 1] == 7
    assert back[1] == features[1]


# What is part of the protocol

STRUCTS_OF_THE_CONTRACT = [
    EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="a", new_token_ids=[1])]),
    EngineCoreOutput(request_id="a", new_token_ids=[1]),
    TokenLogprobs([1], [0.0], 1),
    EngineCoreEvent(EngineCoreEventType.QUEUED),
    PrefillStats(3),
    LoRARequest("a", 1),
    MultiModalFeature("a", 0, 1),
    ResumedOutputs([1, 2], [-0.5, -(2.0**-40)], 3, 4, 2, {"part": {"count": 1}}),
    SchedulerStats(
        num_running=1, num_waiting=0, kv_cache_usage=0.5, prefix_cache=PrefixCacheStats()
    ),
]


def test_fields_of_a_call_and_their_order_belong_to_this_version_of_the_protocol():
    """Whoever changes them raises PROTOCOL_VERSION with it."""
    assert PROTOCOL_VERSION == 5
    assert UtilityCall.__struct_fields__ == ("client_index", "call_id", "method", "args")
    assert UtilityCall.__struct_config__.array_like


@pytest.mark.parametrize("message", STRUCTS_OF_THE_CONTRACT, ids=lambda m: type(m).__name__)
def test_structs_of_the_contract_travel_by_name_so_that_the_order_of_fields_is_free(message):
    plain = msgpack.decode(encoded(message))
    turned = dict(reversed(plain.items()))
    assert Decoder(type(message)).decode(msgpack.encode(turned)) == message


def test_defaults_do_not_travel():
    output = EngineCoreOutput(request_id="a", new_token_ids=[1])
    assert msgpack.decode(encoded(output)) == {"request_id": "a", "new_token_ids": [1]}
    request = EngineCoreRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams())
    plain = msgpack.decode(encoded(request))
    assert plain == {"request_id": "a", "prompt_token_ids": [1], "params": {}}


@pytest.mark.parametrize(
    ("member", "number", "word"),
    [
        (FinishReason.STOP, 0, "stop"),
        (FinishReason.LENGTH, 1, "length"),
        (FinishReason.ABORT, 2, "abort"),
        (FinishReason.ERROR, 3, "error"),
        (FinishReason.REPETITION, 4, "repetition"),
        (FinishReason.TIMEOUT, 5, "timeout"),
    ],
)
def test_finish_reasons(member, number, word):
    assert (int(member), str(member)) == (number, word)
    assert decode_plain(FinishReason, number) is member
    assert len(FinishReason) == 6


def test_event_types():
    names = [(event.name, int(event)) for event in EngineCoreEventType]
    assert names == [("QUEUED", 1), ("SCHEDULED", 2), ("PREEMPTED", 3)]


@pytest.mark.parametrize(
    "message", STRUCTS_OF_THE_CONTRACT, ids=lambda message: type(message).__name__
)
def test_messages_of_every_step_are_not_tracked_by_the_collector(message):
    assert not gc.is_tracked(message)
    assert not gc.is_tracked(Decoder(type(message)).decode(encoded(message)))


class Engine:
    """Holds a live request with parameters that hold the engine."""

    def __init__(self):
        params = SamplingParams(logits_processors=[lambda ids, logits: (self, logits)[1]])
        self.live = EngineCoreRequest(request_id="a", prompt_token_ids=[1], params=params)


def test_a_request_is_tracked_since_callables_in_it_may_refer_to_whoever_holds_it():
    gone = weakref.ref(Engine())
    gc.collect()
    assert gone() is None
