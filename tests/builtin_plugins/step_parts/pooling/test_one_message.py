"""The prompts of a call travel in one message; if one is refused, none runs."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hardpoint import LLM, AsyncLLM, OverloadedError, PoolingParams, RequestError, SamplingParams
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.process.protocol import RequestType
from hardpoint.testing import scripted_config

TEXTS = [f"text {number % 7}" for number in range(40)]
MIXED = ["a text", [5, 6, 7], {"prompt": "another"}, {"prompt_token_ids": [8]}]


@pytest.fixture
def messages(monkeypatch):
    """Messages of requests and aborts to engine processes: kind, and the number of items."""
    sent = []

    def recorded(name):
        method = getattr(EngineSockets, name)

        def record(self, kind, message, *args):
            if kind is not RequestType.UTILITY:
                sent.append((kind, len(message) if isinstance(message, list) else 1))
            return method(self, kind, message, *args)

        monkeypatch.setattr(EngineSockets, name, record)

    recorded("attempt")
    recorded("post")
    return sent


def settings(folder, *, in_process=False, **scheduler):
    table = {"max_model_len": 64, "engine": {"in_process": in_process}, "scheduler": scheduler}
    return scripted_config(folder, table)


def test_the_prompts_of_a_call_are_one_message(scripted, messages):
    with LLM(config=settings(scripted)) as llm:
        outputs = llm.embed([*TEXTS, *MIXED])
        assert messages == [(RequestType.ADD_ALL, 44)]
        assert [len(output.prompt_token_ids) for output in outputs[-4:]] == [6, 3, 7, 1]
        for index, output in enumerate(outputs[:40]):  # in their order
            np.testing.assert_array_equal(output.outputs, outputs[index % 7].outputs)
        messages.clear()
        llm.generate(MIXED[:2], SamplingParams(max_tokens=2, n=3))  # each with its completions
        assert messages == [(RequestType.ADD_ALL, 3), (RequestType.ADD_ALL, 3)]
        messages.clear()
        llm.embed("a text")
        assert messages == [(RequestType.ADD, 1)]


def test_a_prompt_that_is_wrong_sends_nothing(scripted, messages):
    with LLM(config=settings(scripted)) as llm:
        with pytest.raises(RequestError, match=r"^prompts\[2\]: prompt_token_ids\[0\]: expected a"):
            llm.embed(["a", "b", [999_999], "c"])
        with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt: the prompt is too lo"):
            llm.embed(["a", [1] * 65])
        with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt: expected at least one tok"):
            llm.embed(["a", ""])
        assert messages == []
        assert llm.llm_engine.has_unfinished_requests() is False
        assert llm.embed([]) == []


@pytest.mark.parametrize("in_process", [True, False])
def test_a_prompt_that_the_engine_refuses_ends_the_call(scripted, in_process):
    with LLM(config=settings(scripted, in_process=in_process, max_waiting=3)) as llm:
        with pytest.raises(OverloadedError, match=r"^prompts\[3\]: "):
            llm.embed(["a", "b", "c", "d", "e"])
        assert llm.engines.live_requests() == []
        assert len(llm.embed(["a", "b", "c"])) == 3  # which had no room if some had stayed


async def test_an_event_loop_sends_one_message(scripted, messages):
    async with AsyncLLM(config=settings(scripted)) as llm:
        outputs = await llm.encode_batch([*TEXTS, *MIXED])
        assert messages == [(RequestType.ADD_ALL, 44)]
        for text, output in zip(TEXTS[:7], outputs, strict=False):
            async for alone in llm.encode(text):
                np.testing.assert_array_equal(output.outputs, alone.outputs)
                assert output.prompt_token_ids == alone.prompt_token_ids
        assert await llm.encode_batch([]) == []
        messages.clear()
        wrong = [
            (["a", [999_999]], {}, r"^prompts\[1\]\[0\]: expected a whole number"),
            (["a", ""], {}, r"^prompts\[1\]: expected at least one token"),
            (["a", ""], {"names": ["first", "second"]}, r"^second: expected at least one"),
            (["a", "b"], {"names": ["first"]}, "^names: expected 2, one per prompt, got 1"),
            (["a"], {"pooling_params": PoolingParams(pooler="men")}, "^pooler: expected one"),
            (["a"], {"pooling_params": SamplingParams()}, "^pooling_params: expected Pool"),
        ]
        for prompts, options, message in wrong:
            with pytest.raises(RequestError, match=message):
                await llm.encode_batch(prompts, **options)
        assert messages == []
        timed = await llm.encode_batch([[1] * 60] * 50, timeout=1e-6)
        assert {output.finish_reason for output in timed} == {"timeout"}
        assert await llm.engines.live_requests() == []


async def test_an_event_loop_gets_the_refusal_of_the_engine(scripted):
    async with AsyncLLM(config=settings(scripted, max_waiting=3)) as llm:
        with pytest.raises(OverloadedError):
            await llm.encode_batch(["a", "b", "c", "d", "e"])
        assert await llm.engines.live_requests() == []
        assert len(await llm.encode_batch(["a", "b", "c"])) == 3


async def test_a_task_that_is_cancelled_and_an_abort_end_all(scripted, messages):
    async with AsyncLLM(config=settings(scripted)) as llm:
        await llm.engines.pause("keep")
        task = asyncio.create_task(llm.encode_batch(TEXTS))
        while not messages:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert messages == [(RequestType.ADD_ALL, 40), (RequestType.ABORT, 40)]
        messages.clear()
        task = asyncio.create_task(llm.encode_batch(TEXTS, request_id="mine"))
        while not messages:
            await asyncio.sleep(0.01)
        await llm.abort("mine")
        assert {output.finish_reason for output in await task} == {"abort"}
        assert await llm.engines.live_requests() == []
