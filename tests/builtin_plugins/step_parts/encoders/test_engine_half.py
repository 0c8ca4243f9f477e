"""The engine's half of encoders: data for workers, of images to encode and of where they belong."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hardpoint.builtin_plugins.step_parts.encoders.engine_half import EncodedRequests
from hardpoint.builtin_plugins.step_parts.encoders.messages import EncoderItem, EncoderStep, Span
from hardpoint.host.boundary.parts.hooks import selects
from hardpoint.plugins import ModelRunnerOutput, SamplingParams, SchedulerOutput
from hardpoint.plugins.requests import EngineCoreRequest, MultiModalFeature
from hardpoint.plugins.requests.media_format import MediaFormat
from hardpoint.plugins.requests.plan import CachedRequests, NewRequest

PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
ITEM = EncoderItem("x", "image", (2, 2, 3), PIXELS.tobytes())


class Four(MediaFormat):
    num_tokens, token_id, item_shape, sees_itself = 4, 6, (2, 2, 3), False


@pytest.fixture
def half():
    return EncodedRequests("encoders", Four(), 16)


@pytest.fixture
def request_(half):
    feature = MultiModalFeature("x", 2, 4, data=PIXELS)
    request = EngineCoreRequest(
        request_id="a",
        prompt_token_ids=[1, 1, *[6] * 4, 1, 1],
        params=SamplingParams(),
        features=[feature],
    )
    assert selects(half, request)
    half.check(request)
    return request


def plan(request, step, computed, count, **fields):
    """Return a plan of `count` tokens of the request, new if none was computed."""
    if computed == 0:
        fields["new_requests"] = [NewRequest(request, (), ((0,),), 0)]
    else:
        fields["cached_requests"] = CachedRequests(("a",), (computed,))
    return SchedulerOutput(step=step, num_scheduled_tokens={"a": count}, **fields)


def sent(half, plan):
    data = half.begin(plan)
    return None if data is None else msgspec.msgpack.decode(data, type=EncoderStep)


def test_pixels_ride_on_the_plan_that_encodes_them(half, request_):
    first = sent(half, plan(request_, 1, 0, 4, encoder_inputs={"a": [0]}))
    assert first == EncoderStep([], [ITEM], {"a": [Span("x", 2, 0, 2)]})
    second = sent(half, plan(request_, 2, 4, 3))
    assert second == EncoderStep([], [], {"a": [Span("x", 0, 2, 2)]})
    assert sent(half, plan(request_, 3, 7, 1)) is None
    assert sent(half, SchedulerOutput(step=4, freed_encoder_inputs=("x",))) == EncoderStep(["x"])


@pytest.mark.parametrize("reason", ["lost", "failed", "weights", "freed"])
def test_what_workers_do_not_have_is_sent_again(half, request_, reason):
    first = plan(request_, 1, 0, 4, encoder_inputs={"a": [0]})
    assert sent(half, first).items == [ITEM]
    result, fields = ModelRunnerOutput(), {}
    if reason == "lost":
        half.lost(first)
    elif reason == "failed":
        result.part_faults["encoders"] = "it failed"
    elif reason == "weights":
        half.weights_changed()
    else:
        fields["freed_encoder_inputs"] = ("x",)
    if reason != "lost":
        assert half.result(first, result) == {}
    assert sent(half, plan(request_, 2, 4, 3, **fields)).items == [ITEM]


def test_a_request_that_has_ended_is_forgotten(half, request_):
    half.ended("a")
    assert sent(half, plan(request_, 1, 0, 4)) is None
