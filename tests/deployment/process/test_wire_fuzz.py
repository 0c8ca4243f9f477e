"""Whatever bytes arrive, the decoders give a message or a WireError, and cost little."""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples

from hardpoint.host.system.encoding import Decoder, Encoder, WireError
from hardpoint.plugins import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
)
from hardpoint.plugins.requests import LoRARequest, TokenLogprobs
from hardpoint.process.protocol import (
    EngineCoreReadyResponse,
    RequestType,
    UtilityCall,
    UtilityOutput,
    decode_handshake,
)

MUTATED = 100_000
FEW = examples(200)

MESSAGES = [
    EngineCoreRequest(
        request_id="a-12345678",
        prompt_token_ids=[1, 200, 70_000],
        params=SamplingParams(temperature=0.5, stop=["x"], logit_bias={3: 1.0}, seed=5),
        plugin_args={"dry": {"base": 1.5}},
        lora=LoRARequest("l", 1),
        tags={"tenant": "acme"},
        kv_transfer_params={
            "blocks": torch.arange(4),
            "large": torch.ones(80, dtype=torch.bfloat16),
            "mask": torch.ones(300, dtype=torch.bool),
            "array": np.arange(90.0),
            "rows": slice(0, 4),
        },
    ),
    EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id="a",
                new_token_ids=[5],
                finish_reason=FinishReason.STOP,
                logprobs=[TokenLogprobs([1], [-0.5], 1)],
                events=[EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0)],
            ),
            EngineCoreOutput(request_id="b", error="it broke", finish_reason=FinishReason.ERROR),
        ],
        finished_requests={"a", "b"},
    ),
    UtilityCall(0, 7, "sleep", [1, {"level": 2}, torch.zeros(2, 2)]),
    UtilityOutput.succeeded(7, [torch.zeros(70), None, 2.5]),
    EngineCoreReadyResponse(manifest_hash="abc", max_model_len=4096, num_gpu_blocks=100),
    {"any": [1, None, True, -5, 2.5, "text", b"bytes", 2**40], "t": torch.zeros(3)},
]


def attempt(call, *args):
    """Return 1 for a message, 0 for a refusal; anything else is raised."""
    try:
        call(*args)
    except WireError:
        return 0
    return 1


def mutated(rng, data):
    """Return bytes with a few of the accidents that befall frames."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 1 if place < len(data):
                data[place] = rng.choice(b"\x00\x01\x7f\x80\x81\x90\x91\xa1\xc0\xc1\xc4\xc7\xff")
            case 2:
                del data[place:]
            case 3:
                del data[place : place + rng.randrange(1, 9)]
            case 4:
                data[place:place] = rng.randbytes(rng.randrange(1, 9))
            case 5:  # claims a size
                head = rng.choice((0xC6, 0xC9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF))
                data[place : place + 5] = bytes([head]) + rng.choice((b"\xff" * 4, b"\0\0\1\0"))
            case _:
                other = rng.randrange(len(data) + 1)
                data[place:place] = data[min(place, other) : max(place, other)][:200]
    return bytes(data)


def mutated_frames(rng, frames):
    """Return the frames of a message with one of them, or their number, gone wrong."""
    frames = list(frames)
    chance = rng.random()
    if chance < 0.8 or len(frames) == 1:
        frames[0] = mutated(rng, frames[0])
    elif chance < 0.9:
        place = rng.randrange(1, len(frames))
        frames[place] = mutated(rng, frames[place])
    elif chance < 0.95:
        frames.pop(rng.randrange(1, len(frames)))
    else:
        rng.shuffle(frames)
    return frames


@pytest.mark.nightly
def test_a_hundred_thousand_mutated_messages():
    rng = random.Random(20)
    subjects = []
    for message in MESSAGES:
        frames = [bytes(frame) for frame in Encoder().encode(message)]
        decoders = [Decoder(type(message)), Decoder()] if type(message) is not dict else [Decoder()]
        subjects += [(frames, decoder) for decoder in decoders]
    assert all(attempt(decoder.decode, frames) for frames, decoder in subjects)
    num_accepted, began = 0, time.process_time()
    for number in range(MUTATED):
        frames, decoder = subjects[number % len(subjects)]
        num_accepted += attempt(decoder.decode, mutated_frames(rng, frames))
    assert 0.02 * MUTATED < num_accepted < 0.6 * MUTATED  # both happen, or nothing was tried
    assert time.process_time() - began < 600
    assert all(
        attempt(decoder.decode, frames) for frames, decoder in subjects
    )  # no state stays behind


def test_mutations_allocate_little():
    rng = random.Random(3)
    frames = [bytes(frame) for frame in Encoder().encode(MESSAGES[0])]
    decoder = Decoder(EngineCoreRequest)
    attempt(decoder.decode, frames)
    tracemalloc.start()
    try:
        for _ in range(500):
            attempt(decoder.decode, mutated_frames(rng, frames))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


DECODERS = [Decoder(type_) for type_ in (Any, EngineCoreRequest, EngineCoreOutputs, UtilityCall)]


@FEW
@given(st.lists(st.binary(max_size=200), max_size=4), st.sampled_from(DECODERS))
def test_random_frames(frames, decoder):
    attempt(decoder.decode, frames)


@FEW
@given(st.binary(max_size=60), st.sampled_from([1, 2, 3, 4]), st.sampled_from(DECODERS))
def test_random_payloads_of_extensions(payload, code, decoder):
    attempt(decoder.decode, [bytes([0x91, 0xC7, len(payload), code]) + payload, b"12345678"])


@FEW
@given(st.sampled_from(MESSAGES), st.data())
def test_truncated_messages(message, data):
    frames = [bytes(frame) for frame in Encoder().encode(message)]
    cut = data.draw(st.integers(0, len(frames[0]) - 1))
    with pytest.raises(WireError, match="truncated"):
        Decoder(type(message)).decode([frames[0][:cut], *frames[1:]])


@FEW
@given(st.binary(max_size=80))
def test_random_handshakes_and_request_types(frame):
    attempt(decode_handshake, frame)
    attempt(RequestType.from_wire, frame)


def test_mutated_handshakes():
    rng = random.Random(7)
    ready = EngineCoreReadyResponse(manifest_hash="abc", max_model_len=64, num_gpu_blocks=9)
    frame = Encoder().encode(ready)[0]
    tries = [attempt(decode_handshake, mutated(rng, frame)) for _ in range(3_000)]
    assert 0 < sum(tries) < 2_000
