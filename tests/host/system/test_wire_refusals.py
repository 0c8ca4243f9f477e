"""Values that cannot travel, and frames that are no message, are refused with a reason."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import msgpack

from hardpoint.host.system.encoding import Decoder, Encoder, WireError
from hardpoint.plugins import (
    EngineCoreOutputs,
    EngineCoreRequest,
    HardpointError,
    SamplingParams,
)

TENSOR, ARRAY, SLICE = 1, 2, 3


def extension(code, *parts):
    return msgpack.Ext(code, msgpack.encode(parts))


def refusal(message, type_=Any, extra=(), **options):
    with pytest.raises(WireError) as caught:
        Decoder(type_, **options).decode([msgpack.encode(message), *extra])
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "a builtins.object cannot travel"),
        ([lambda: 1], "list: a builtins.function cannot travel"),
        ({"a": np.array([object()])}, "an array of this dtype cannot travel: object"),
        (np.array(["x"]), "an array of this dtype cannot travel: <U1"),
        (np.zeros(2, "i4,f4"), "an array of this dtype cannot travel"),
        (np.ma.masked_array([1, 2], [0, 1]), "a numpy.ma.MaskedArray cannot travel"),
        (torch.eye(2).to_sparse(), "a tensor of this kind cannot travel: torch.float32, torch.sp"),
        (torch.zeros(2, device="meta"), "a tensor of this kind cannot travel: .* on meta"),
        (slice("a"), "a slice travels only with whole numbers"),
        (2**64, "int: can't serialize ints"),
        ("\ud800", "str: .*surrogates not allowed"),
        (SamplingParams(logits_processors=[print]), "SamplingParams: a builtins.builtin_function"),
    ],
)
def test_unsendable(value, words):
    with pytest.raises(WireError, match=words):
        Encoder().encode(value)
    with pytest.raises(WireError, match=words):
        Encoder().encode_into(value, bytearray())


def test_a_circle_cannot_be_sent():
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(WireError, match="list: nested too deeply"):
        Encoder().encode(circle)


def test_the_error_is_one_of_ours():
    assert issubclass(WireError, HardpointError)
    assert issubclass(WireError, ValueError)


def test_pickles_are_only_bytes():
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    pickled = pickle.dumps(Trap())
    assert Decoder().decode(Encoder().encode(pickled)) == pickled
    for code in range(128):
        if code not in (TENSOR, ARRAY, SLICE):
            message = refusal([msgpack.Ext(code, pickled)])
            assert message == f"message[0]: expected extension 1, 2 or 3, got {code}"


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (["int8", [3], b"ab"], "data: expected 3 bytes for shape [3] of int8, got 2"),
        (["int8", [], b""], "data: expected 1 bytes for shape [] of int8, got 0"),
        (["int8", [-3], b""], "tensor.shape[0]: expected a whole number >= 0"),
        (["int8", [2**40] * 3, b"x"], "shape: expected a shape that memory can hold"),
        (["int8", [0, 2**40, 2**40], b""], "shape: expected a shape that memory can hold"),
        (["int8", [2**40], b"x"], "data: expected 1099511627776 bytes for shape"),
        (["int8", [1] * 65, b"x"], "tensor.shape: expected a list of length <= 64"),
        (["int8", [2.5], b"x"], "tensor.shape[0]: expected a whole number"),
        (["object", [1], b"12345678"], "got 'object'"),
        (["load", [1], b"1"], "got 'load'"),
        (["", [1], b"1"], "got ''"),
        (["int8", [1], 1], "data: expected the number of one of the 0 extra frames, got 1"),
        (["int8", [1], 0], "extra frames, got 0"),
        (["int8", [1], -1], "extra frames, got -1"),
        (["int8", [1], 2**63], "extra frames, got 9223372036854775808"),
        (["int8", [1], None], "tensor.data: expected"),
        (["int8", [1]], "tensor: expected a list of at least length 3, got 2"),
        (["int8", [1], b"x", 4], "tensor: expected a list of at most length 3, got 4"),
        (["int8", 1, b"x"], "tensor.shape: expected a list, got a whole number"),
        ([8, [1], b"x"], "tensor.dtype: expected a string, got a whole number"),
    ],
)
def test_malformed_tensors(payload, words):
    message = refusal({"a": [0, extension(TENSOR, *payload)]})
    assert message.startswith("message.a[1]: ")
    assert words in message
    if payload[0] == "int8":
        payload, words = ["|i1", *payload[1:]], words.replace("int8", "|i1")
    assert words in refusal({"a": [0, extension(ARRAY, *payload)]})


def test_a_frame_of_the_wrong_size():
    message = [extension(TENSOR, "float32", [2], 1)]
    assert "expected 8 bytes for shape [2] of float32, got 7" in refusal(
        message, extra=[b"1234567"]
    )


def test_bools_are_zero_or_one():
    assert "bytes 0 and 1 for bool, got 7" in refusal(extension(TENSOR, "bool", [2], b"\0\7"))
    assert "bytes 0 and 1 for bool, got 2" in refusal(extension(ARRAY, "|b1", [2], b"\1\2"))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02", b"\x93\xa1a\xc0\xc0", b"\x92"])
def test_malformed_slices(payload):
    with pytest.raises(WireError, match=r"message\[0\]: slice"):
        Decoder().decode(msgpack.encode([msgpack.Ext(SLICE, payload)]))


REQUEST = EngineCoreRequest(request_id="a", prompt_token_ids=[1, 2], params=SamplingParams())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("request_id", 5, "EngineCoreRequest.request_id: expected a string, got a whole number"),
        (
            "prompt_token_ids",
            [1, "x"],
            "EngineCoreRequest.prompt_token_ids[1]: expected a whole number, got a str",
        ),
        (
            "params",
            {"top_p": "x"},
            "EngineCoreRequest.params.top_p: expected a number, got a string",
        ),
        ("params", {"top_p": 7}, "EngineCoreRequest.params.top_p: expected a number <= 1.0"),
        ("params", {"topp": 1}, "EngineCoreRequest.params: unknown field topp"),
        ("tags", {"t": 5}, "EngineCoreRequest.tags[...]: expected a string, got a whole number"),
        ("tags", {5: "t"}, "EngineCoreRequest.tags, a key: expected a string, got a whole number"),
        (
            "lora",
            {"name": "x", "id": "y"},
            "EngineCoreRequest.lora.id: expected a whole number, got a string",
        ),
        ("features", [["x", 1]], "EngineCoreRequest.features[0]: expected a table, got a list"),
    ],
)
def test_a_wrong_field_is_named(field, value, words):
    plain = msgspec.msgpack.decode(Encoder().encode(REQUEST)[0])
    plain[field] = value
    assert refusal(plain, EngineCoreRequest).startswith(words)


def test_a_wrong_tensor_in_a_field_is_named():
    plain = msgspec.msgpack.decode(Encoder().encode(REQUEST)[0])
    plain["kv_transfer_params"] = {
        "blocks": [extension(SLICE, 1, 2, 3), extension(TENSOR, "int8", [2], b"x")]
    }
    assert refusal(plain, EngineCoreRequest) == (
        "EngineCoreRequest.kv_transfer_params.blocks[1]: "
        "data: expected 2 bytes for shape [2] of int8, got 1"
    )


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "message: expected at least one frame, got none"),
        (b"", "message: the frame is truncated"),
        ([b"\x92\x01"], "message: the frame is truncated"),
        ([b"\x01\x01"], "message: the frame is damaged: trailing characters"),
        ([b"\xc1"], "message: the frame is damaged: invalid opcode"),
        ([b"\xa2\xff\xff"], "message: a string is no UTF-8"),
        ([b"\x81\x80\x01"], "message: the frame is damaged: map keys must be hashable"),
        ([b"\x91" * 100_000], "message: nested too deeply"),
        ([b"\xd7\xff" + b"\xff" * 8], "message: invalid"),
    ],
)
def test_damaged_frames(frames, words):
    with pytest.raises(WireError) as caught:
        Decoder().decode(frames)
    assert str(caught.value).startswith(words)


def test_errors_stay_short():
    message = {"k" * 10_000: extension(TENSOR, "d" * 10_000, [1], b"x")}
    assert len(refusal(message)) < 600
    assert len(refusal({"params": {"k" * 10_000: 1}}, EngineCoreRequest)) < 600


@pytest.mark.parametrize("type_", [Any, list[int], EngineCoreRequest, EngineCoreOutputs])
@pytest.mark.parametrize(
    "claim",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdd\x7f\xff\xff\xff" * 300,
        b"\xdc\xff\xff" * 900,
        b"\xdf\xff\xff\xff\xff" * 300,
        b"\x91\xdb\xff\xff\xff\xffabc",
        b"\x91\xc6\xff\xff\xff\xff",
        b"\x91\xc9\xff\xff\xff\xff\x01",
    ],
)
def test_claimed_sizes_cost_nothing(type_, claim):
    decoder = Decoder(type_)
    tracemalloc.start()
    try:
        began = time.thread_time()
        with pytest.raises(WireError):
            decoder.decode(claim)
        assert time.thread_time() - began < 10  # a collection of garbage may come
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
