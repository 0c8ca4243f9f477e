"""Messages survive encoding and decoding, tensors in them too, without needless copies."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec import msgpack
from support.core.wire_strategies import BATCHES, FIELDS, PLAIN, REQUESTS
from support.searching import examples

from hardpoint.host.system.encoding import Decoder, Encoder, WireError
from hardpoint.plugins import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutputs,
    EngineCoreRequest,
    SamplingParams,
)

TENSOR, ARRAY, SLICE = 1, 2, 3
FEW = examples(60)
DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2"),
]


class Holder(msgspec.Struct, array_like=True):
    name: str
    tensor: torch.Tensor
    arrays: dict[str, np.ndarray] = {}
    where: slice | None = None


def cross(value, type_=Any, *, inline_below=256, **options):
    """Encode, let the frames become bytes, decode."""
    frames = [bytes(frame) for frame in Encoder(inline_below=inline_below).encode(value)]
    return Decoder(type_, **options).decode(frames)


def same_tensor(one, other):
    assert type(other) is torch.Tensor
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert raw(one) == raw(other)


def raw(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""


def some_tensor(dtype, shape):
    count = int(np.prod(shape))
    if dtype == "bool":
        return torch.arange(count).remainder(3).eq(0).reshape(shape)
    size = getattr(torch, dtype).itemsize
    data = torch.arange(count * size).remainder(251).to(torch.uint8)
    return data.view(getattr(torch, dtype)).reshape(shape)


def extension(code, *parts):
    return msgpack.Ext(code, msgpack.encode(parts))


def refusal(message, type_=Any, extra=(), **options):
    with pytest.raises(WireError) as caught:
        Decoder(type_, **options).decode([msgpack.encode(message), *extra])
    return str(caught.value)


# Tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (0, 4), (40, 3), (700,)])
def test_tensor_round_trip(dtype, shape):
    tensor = some_tensor(dtype, shape)
    same_tensor(tensor, cross({"deep": [tensor]})["deep"][0])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(600.0).reshape(20, 30).t(),
        torch.arange(600.0)[::2],
        torch.ones(1).expand(300),
        torch.arange(600.0).bfloat16().reshape(2, 3, 100)[:, 1],
        torch.view_as_complex(torch.ones(100, 2)).conj(),
        torch.nn.Parameter(torch.arange(5.0)),
        torch.arange(600.0).as_strided((300, 1), (1, 5)),
    ],
    ids=[
        *("transposed", "strided", "expanded", "sliced", "conjugate", "parameter"),
        "column of any stride",
    ],
)
def test_unusual_tensors(tensor):
    same_tensor(tensor, cross(tensor))
    assert not cross(tensor).requires_grad


NUMBERS = st.sampled_from("?bBhHiIqQefdFD").map(np.dtype)
SWAPPED = NUMBERS.map(lambda dtype: dtype.newbyteorder())


@FEW
@given(hnp.arrays(NUMBERS | SWAPPED, hnp.array_shapes(min_dims=0, min_side=0)), st.integers(0, 64))
def test_array_round_trip(array, below):
    back = cross([array], inline_below=below)[0]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()


def test_arrays_that_are_not_contiguous():
    array = np.arange(3000, dtype=">i4").reshape(30, 100)[::3, ::7]
    back = cross(array)
    assert back.dtype == np.dtype(">i4")
    assert (back == array).all()


@FEW
@given(*[st.none() | st.integers(-(2**63), 2**63 - 1)] * 3)
def test_slices(start, stop, step):
    assert cross({"s": slice(start, stop, step)}) == {"s": slice(start, stop, step)}


@pytest.mark.parametrize("number", [np.int64(-3), np.bool_(True), np.float32(0.5), np.float64(2)])
def test_numpy_numbers_become_plain_ones(number):
    (back,) = cross([number])
    assert back == number
    assert type(back) in (int, bool, float)


def test_strictly_smaller_tensors_are_inline():
    for count, frames in ((255, 1), (256, 2), (257, 2)):
        for data in (torch.zeros(count, dtype=torch.uint8), np.zeros(count, np.uint8)):
            assert len(Encoder().encode([data])) == frames
    assert len(Encoder(inline_below=1000).encode(torch.zeros(999, dtype=torch.uint8))) == 1
    assert len(Encoder(inline_below=0).encode(torch.zeros(1))) == 2


def test_the_limit_is_per_tensor():
    assert len(Encoder().encode([torch.zeros(63)] * 50)) == 1


def test_large_tensors_are_not_copied_on_either_side():
    tensor = torch.zeros(100)
    frames = Encoder().encode([tensor, np.ones(100)])
    tensor[3] = 7.0
    assert len(frames) == 3
    back = Decoder().decode([bytes(frames[0]), *frames[1:]])[0]
    assert back.data_ptr() == tensor.data_ptr()
    assert back[3] == 7.0


def test_inline_tensors_outlive_the_buffer():
    buffer = bytearray(Encoder().encode([torch.arange(5), np.arange(5)])[0])
    tensor, array = Decoder().decode(buffer)
    buffer[:] = bytes(len(buffer))
    assert tensor.tolist() == array.tolist() == [0, 1, 2, 3, 4]
    tensor += 1
    array += 1


def test_read_only_frames_are_shared():
    main, data = (bytes(frame) for frame in Encoder().encode(torch.arange(100)))
    back = Decoder(torch.Tensor).decode([main, data])
    assert back.data_ptr() == np.frombuffer(data, np.uint8).ctypes.data
    del data
    gc.collect()
    assert back.tolist() == list(range(100))


def test_read_only_frames_give_no_warning():
    frames = [bytes(frame) for frame in Encoder().encode([torch.ones(100), torch.ones(3)])]
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # otherwise torch warns only once in each process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            first, _ = Decoder(list[torch.Tensor]).decode(frames)
    finally:
        torch.set_warn_always(always)
    assert first.sum().item() == 100.0


def test_a_shared_tensor_keeps_its_frame_alive_and_no_longer():
    class Frame(bytearray):
        pass

    main, data = Encoder().encode(torch.arange(100))
    frame = Frame(data)
    alive = weakref.ref(frame)
    back = Decoder().decode([main, frame])
    del frame
    assert alive() is not None
    assert back[99] == 99
    del back
    gc.collect()
    assert alive() is None


def test_shared_arrays_are_read_only():
    main, data = Encoder().encode(np.arange(100))
    back = Decoder().decode([main, bytearray(data)])
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 1


def test_frames_can_be_copied():
    frames = [bytearray(frame) for frame in Encoder().encode([torch.ones(100), np.ones(100)])]
    tensor, array = Decoder(share_frames=False).decode(frames)
    for frame in frames:
        frame[:] = bytes(len(frame))
    assert tensor.sum() == array.sum() == 100
    array[0] = 5


@pytest.mark.parametrize("code", [TENSOR, ARRAY])
def test_a_table_is_no_data_of_a_tensor(code):
    assert refusal(extension(code, "<i4", [1], {})).startswith("message: tensor")


def test_a_frame_that_lies_askew_is_copied():
    main, data = Encoder().encode(torch.arange(100))
    askew = memoryview(b"x" + bytes(data))[1:]
    for frame in (askew, memoryview(bytearray(b"x" + bytes(data)))[1:]):
        back = Decoder().decode([main, frame])
        assert back.data_ptr() % 8 == 0
        assert back.tolist() == list(range(100))


def test_received_zmq_frames():
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        one.bind("inproc://frames")
        two.connect("inproc://frames")
        value = [torch.arange(300), np.arange(4), "word"]
        one.send_multipart(Encoder().encode(value), copy=False)
        tensor, array, word = Decoder().decode(two.recv_multipart(copy=False))
        assert tensor.tolist() == list(range(300))
        assert (array.tolist(), word) == ([0, 1, 2, 3], "word")
        one.send(Encoder().encode([1])[0])
        assert Decoder().decode(two.recv(copy=False)) == [1]


def test_typed_tensors():
    holder = Holder("a", torch.arange(3), {"x": np.ones(200)}, slice(1, 2))
    back = cross(holder, Holder)
    assert (back.name, back.where) == ("a", slice(1, 2))
    same_tensor(back.tensor, holder.tensor)
    assert (back.arrays["x"] == 1).all()
    assert refusal(["a", 5], Holder) == "Holder.tensor: expected Tensor, got a whole number"


# Typed messages


@pytest.mark.parametrize("cls", FIELDS, ids=lambda cls: cls.__name__)
def test_strategies_have_every_field(cls):
    assert set(FIELDS[cls]) == set(cls.__struct_fields__)


@FEW
@given(REQUESTS)
def test_requests_are_lossless(request):
    back = cross(request, EngineCoreRequest)
    assert back == request
    assert type(back.params) is SamplingParams


@FEW
@given(BATCHES)
def test_outputs_are_lossless(batch):
    assert cross(batch, EngineCoreOutputs) == batch


def test_a_batch_without_a_time_is_of_now():
    before = time.monotonic()
    batches = [EngineCoreOutputs(), EngineCoreOutputs(timestamp=0.0)]
    assert all(before <= batch.timestamp <= time.monotonic() for batch in batches)
    assert EngineCoreOutputs(timestamp=0.5).timestamp == 0.5
    assert cross(batches[0], EngineCoreOutputs).timestamp == batches[0].timestamp


def test_an_event_without_a_time_is_of_now():
    before = time.monotonic()
    event = EngineCoreEvent(EngineCoreEventType.QUEUED)
    assert before <= event.timestamp <= time.monotonic()
    assert cross(event, EngineCoreEvent) == event


def test_tensors_in_untyped_fields():
    params = {"blocks": [torch.arange(100), slice(0, 3)], "small": np.arange(2)}
    request = EngineCoreRequest(
        request_id="a", prompt_token_ids=[1], params=SamplingParams(), kv_transfer_params=params
    )
    back = cross(request, EngineCoreRequest).kv_transfer_params
    same_tensor(back["blocks"][0], params["blocks"][0])
    assert back["blocks"][1] == slice(0, 3)


@FEW
@given(PLAIN)
def test_plain_data_is_lossless(value):
    assert cross(value) == value


def test_encode_into_reuses_the_buffer():
    encoder, buffer = Encoder(), bytearray(b"old" * 100)
    frames = encoder.encode_into([1, torch.zeros(100)], buffer)
    assert frames[0] is buffer
    assert Decoder().decode(frames)[0] == 1
    assert bytes(encoder.encode_into([2], buffer)[0]) == msgpack.encode([2])


def test_no_state_stays_behind():
    encoder, decoder = Encoder(), Decoder()
    with pytest.raises(WireError):
        encoder.encode([torch.zeros(100), object()])
    frames = encoder.encode(torch.ones(100))
    assert len(frames) == 2
    with pytest.raises(WireError):
        decoder.decode([msgpack.encode(extension(TENSOR, "int8", [3], 1)), b"ab"])
    with pytest.raises(WireError, match="one of the 0 extra frames, got 1"):
        decoder.decode(frames[0])
    held = weakref.ref(held_frames := Frames(frames))
    decoder.decode(held_frames)
    del held_frames
    assert held() is None


class Frames(list):
    """A list that can be referred to weakly."""
