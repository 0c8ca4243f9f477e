"""Images in conversations and prompts of a model that takes them, and of one that does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading

import numpy as np
import pytest
from support.gemma_images import IMAGE, SOFT_TOKENS
from support.image_model import settings, write_image_model
from support.pictures import data_url, encoded, gradient
from support.process.slow_requests import SLOW, UNFINISHED
from support.waiting import PATIENCE_S, until

from hardpoint import LLM, AsyncLLM, RequestError, SamplingParams
from hardpoint.chat import PartReader, read_messages
from hardpoint.errors import EngineClosedError, EngineDeadError
from hardpoint.host.boundary.parts.frontend_parts import FrontendParts
from hardpoint.testing import scripted_config, write_scripted_model

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
FIRST, SECOND = gradient(20, 10), gradient(9, 31)
URL = data_url(encoded(FIRST))
PLACEHOLDER, SOFT = 4, 6
READERS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_image_model(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def llm(folder, tmp_path_factory):
    permitted = tmp_path_factory.mktemp("permitted")
    (permitted / "a.png").write_bytes(encoded(FIRST))
    config = settings(images={"max_items": 3, "max_bytes": 5000, "folders": [str(permitted)]})
    with LLM(str(folder), config=config) as opened:
        opened.permitted = permitted
        yield opened


@pytest.fixture(scope="module")
def text_llm(tmp_path_factory):
    folder = write_scripted_model(tmp_path_factory.mktemp("scripted"))
    with LLM(config=scripted_config(folder)) as opened:
        yield opened


def by_url(url=URL):
    return {"type": "image_url", "image_url": {"url": url}}


def user(*content):
    return [{"role": "user", "content": list(content)}]


def text(words):
    return {"type": "text", "text": words}


def tokens(output):
    """Return the tokens of an answer and how likely they were, which differs for other images."""
    (completion,) = output.outputs
    return completion.token_ids, round(completion.cumulative_logprob, 4)


def test_an_image_is_a_part_wherever_it_stands(llm):
    """All forms of a part are the same prompt: the tokens of the text, and those of the image."""
    expected = llm.generate(
        {
            "prompt": f"user: see {IMAGE}here\nmodel:",
            "multi_modal_data": {"image": [np.asarray(FIRST)]},
        },
        GREEDY,
    )[0]
    assert expected.prompt_token_ids.count(SOFT) == SOFT_TOKENS
    for part in (
        by_url(),
        {"type": "image_url", "image_url": URL},
        {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
        {"type": "image_url", "image_url": URL, "detail": None},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "image": FIRST},
        {"type": "image", "image": np.asarray(FIRST)},
        {"type": "image", "image": encoded(FIRST)},
        {"type": "image", "url": URL},
        {"type": "image", "path": str(llm.permitted / "a.png")},
    ):
        (found,) = llm.chat(user(text("see "), part, text("here")), GREEDY)
        assert found.prompt_token_ids == expected.prompt_token_ids
        assert tokens(found) == tokens(expected)


def test_images_keep_their_order_among_texts_and_messages(llm):
    messages = [
        {"role": "user", "content": [{"type": "image", "image": SECOND}, text("first"), by_url()]},
        {"role": "assistant", "content": "two"},
        *user(text("and "), {"type": "image", "image": FIRST}),
    ]
    prompt = llm.model.apply_chat_template(messages)
    sizes = [(image.width, image.height) for image in prompt["multi_modal_data"]["image"]]
    assert sizes == [(9, 31), (20, 10), (20, 10)]
    assert prompt["prompt"] == (
        f"user: {IMAGE}first{IMAGE}\nassistant: two\nuser: and {IMAGE}\nmodel:"
    )
    (found,) = llm.chat(messages, GREEDY)
    assert found.prompt_token_ids.count(SOFT) == 3 * SOFT_TOKENS
    other = [*messages[:2], *user(text("and "), {"type": "image", "image": SECOND})]
    assert tokens(llm.chat(other, GREEDY)[0]) != tokens(found)


def test_a_text_that_spells_a_placeholder_is_a_text(llm):
    """Of users and of the assistant, whose other special tokens templates look for."""
    words = f"{IMAGE} <image_soft_token> <end_of_image>"
    plain = llm.model.apply_chat_template(user(by_url()))["prompt_token_ids"]
    assert plain.count(PLACEHOLDER) == 1
    for messages in (
        user(text(words), by_url()),
        [*user(words), {"role": "assistant", "content": words}, *user(by_url())],
    ):
        prompt = llm.model.apply_chat_template(messages)
        assert prompt["prompt_token_ids"].count(PLACEHOLDER) == 1
        assert not {SOFT, 5}.intersection(prompt["prompt_token_ids"])
        assert words in prompt["prompt"]
        assert llm.chat(messages, GREEDY)[0].finished
    alone = llm.model.apply_chat_template(user(words))
    assert not {PLACEHOLDER, SOFT, 5}.intersection(alone["prompt_token_ids"])
    assert "multi_modal_data" not in alone


REFUSED = {
    "video": (user({"type": "video_url", "video_url": {"url": "x"}}),
              r"messages\[0\].content\[0\].type: expected \"text\" or \"image_url\", got "
              "'video_url'; the model reads text and images alone"),
    "audio": (user(text("a"), {"type": "input_audio"}), r"content\[1\].type: .*'input_audio'; the"),
    "file": (user({"type": "file"}), "'file'; the model reads text and images alone"),
    "unknown": (user({"type": "image-url"}), "got 'image-url'$"),
    "none": (user({"type": "image_url"}), r"content\[0\]: expected image_url, got 0 of them"),
    "null": (user(by_url(None)), r"content\[0\].image_url.url: expected a string, got NoneType"),
    "several": (user({"type": "image", "image": FIRST, "url": URL}),
                r"content\[0\]: expected image or url or path, got 2 of them"),
    "more": (user(by_url() | {"file_id": "x"}), r"content\[0\].file_id: not supported"),
    "low": (user(text("a"), {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}),
            r"^messages\[0\].content\[1\].image_url.detail: expected \"auto\", got 'low'; the "
            "model reads every image in its own size"),
    "high": (user({"type": "input_image", "image_url": URL, "detail": "high"}),
             r"^messages\[0\].content\[0\].detail: expected \"auto\", got 'high'"),
    "high of a path": (user({"type": "image", "path": "x", "detail": "high"}),
                       r"content\[0\].detail: expected \"auto\", got 'high'"),
    "no detail": (user({"type": "image_url", "image_url": {"url": URL, "detail": ["low"]}}),
                  r"image_url.detail: expected \"auto\", got \['low'\]"),
    "another field": (user({"type": "image_url", "image_url": {"url": URL, "size": 4}}),
                      r"content\[0\].image_url: expected url and detail alone, got 'size'"),
    "an array of floats": (user({"type": "image", "image": np.zeros((2, 2, 3))}),
                           r"messages\[0\].content\[0\].image: expected a uint8 array"),
    "base64": (user(text("a"), by_url("data:;base64,?")),
               r"messages\[0\].content\[1\].image_url.url: expected base64"),
    "remote": (user(by_url("http://169.254.169.254/")),
               r"content\[0\].image_url.url: expected a data: URL, because images are not fetched"),
    "a file outside": (user(by_url("file:///etc/passwd")), "a path in one of images.folders$"),
    "damaged": (user(by_url(data_url(encoded(FIRST)[:60]))), "image is damaged or truncated"),
    "too many": (user(*[by_url()] * 4),
                 r"^messages\[0\].content\[3\].image_url.url: expected at most 3 images"),
    "hidden by the template": ([{"role": "system", "content": [by_url()]}, *user(text("x"))],
                               "messages: the chat template shows the model 0 of 1 images"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_are_refused(llm, name):
    messages, words = REFUSED[name]
    with pytest.raises(RequestError, match=words):
        llm.chat(messages, GREEDY)
    assert llm.chat(user(by_url()), GREEDY)[0].finished


@pytest.mark.parametrize("type_", ["image_url", "input_image", "image"])
def test_a_model_without_images_refuses_the_part_by_name(text_llm, type_):
    assert not text_llm.model.takes_images
    part = {"type": type_, "image_url": URL, "image": FIRST}
    words = (
        rf"messages\[0\].content\[1\].type: expected \"text\", got '{type_}'; the model reads text "
        "alone"
    )
    with pytest.raises(RequestError, match=words):
        text_llm.chat(user(text("a"), part), GREEDY)
    with pytest.raises(RequestError, match=words):
        read_messages(user(text("a"), part))
    with pytest.raises(RequestError, match="multi_modal_data"):
        text_llm.generate({"prompt": "x", "multi_modal_data": {"image": [FIRST]}}, GREEDY)


def test_images_of_several_prompts_name_their_place(llm):
    good = {"prompt": IMAGE, "multi_modal_data": {"image": URL}}
    assert [tokens(o) for o in llm.generate([good, good], GREEDY)] == [
        tokens(llm.generate(good, GREEDY)[0])
    ] * 2
    bad = {"prompt": IMAGE, "multi_modal_data": {"image": [b"no image"]}}
    with pytest.raises(RequestError, match=r"^multi_modal_data.image\[0\]: expected an image in"):
        llm.generate([good, bad], GREEDY)
    found = dict(llm.generate_unordered([(good, GREEDY), (bad, GREEDY), (good, GREEDY)]))
    assert tokens(found[0]) == tokens(found[2])
    assert isinstance(found[1], RequestError)
    assert str(found[1]).startswith("multi_modal_data.image[0]: expected an image in")


def test_an_event_loop_goes_on_while_images_are_decoded(folder, llm):
    messages = user(text("see "), by_url(), text("here"))
    expected = tokens(llm.chat(messages, GREEDY)[0])

    async def run():
        async with AsyncLLM(str(folder), config=settings()) as opened:
            assert opened.model.takes_images
            async for output in opened.chat(messages, GREEDY):
                found = output
            prompt = await opened.model.apply_chat_template(messages)
            counted = await opened.model.prompt_tokens(prompt)
            media = {"image": [encoded(FIRST)]}
            given = {"prompt": f"user: see {IMAGE}here\nmodel:", "multi_modal_data": media}
            async for output in opened.generate(given, GREEDY):
                again = output
            with pytest.raises(RequestError, match=r"multi_modal_data.image\[0\]: expected base64"):
                async for _ in opened.generate(
                    {**given, "multi_modal_data": {"image": "data:;base64,?"}}, GREEDY
                ):
                    pass
            return found, counted, again

    found, counted, again = asyncio.run(run())
    assert tokens(found) == tokens(again) == expected
    assert counted == found.prompt_token_ids == again.prompt_token_ids
    assert counted.count(SOFT) == SOFT_TOKENS


@contextlib.contextmanager
def held_reads():
    """Let reads of images wait; provide the images begun, and the event that ends the wait."""
    go_on, begun = threading.Event(), []

    def read_media(parts, modality, items):
        read = []
        for item in items:
            begun.append(item)
            assert go_on.wait(PATIENCE_S)
            read.append(item)
        return read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrontendParts, "read_media", read_media)
        try:
            yield begun, go_on
        finally:
            go_on.set()


def test_images_keep_no_text_waiting_and_are_read_no_longer_than_they_are_wanted(folder):
    pictured, plain = user(*[by_url()] * 3), user(text("hello"))

    async def run():
        async with AsyncLLM(str(folder), config=settings()) as opened:
            with held_reads() as (begun, go_on):
                tasks = [
                    asyncio.ensure_future(opened.model.apply_chat_template(pictured))
                    for _ in range(40)
                ]
                await until(lambda: len(begun) == READERS, "the reads")
                assert (await opened.model.apply_chat_template(plain))["prompt_token_ids"]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                go_on.set()
                media = {"image": [encoded(FIRST)]}
                given = {"prompt": f"{IMAGE}", "multi_modal_data": media}
                with pytest.raises(RequestError):  # what is read here is no image
                    async for _ in opened.generate(given, GREEDY):
                        pass
                assert len(begun) == READERS + 1

    asyncio.run(asyncio.wait_for(run(), 2 * PATIENCE_S))


def test_an_engine_that_is_closed_reads_no_further_images(folder):
    pictured = user(*[by_url()] * 3)

    async def run():
        opened = AsyncLLM(str(folder), config=settings())
        with held_reads() as (begun, go_on):
            tasks = [
                asyncio.ensure_future(opened.model.apply_chat_template(pictured)) for _ in range(20)
            ]
            await until(lambda: len(begun) == READERS, "the reads")
            await opened.aclose()
            go_on.set()
            for task in tasks:
                with pytest.raises(EngineClosedError):
                    await task
            assert len(begun) == READERS
        with pytest.raises(EngineClosedError):
            await opened.model.apply_chat_template(pictured)

    asyncio.run(asyncio.wait_for(run(), 2 * PATIENCE_S))


def test_a_dead_engine_reads_no_images(folder):
    prompt = {"prompt": IMAGE, "multi_modal_data": {"image": [encoded(FIRST)]}}
    with LLM(str(folder), config=settings(engine={"in_process": False}, **SLOW)) as opened:
        opened.generate(prompt, GREEDY)
        stream = opened.stream("x", UNFINISHED)
        os.kill(opened.llm_engine.pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            list(stream)
        with pytest.raises(EngineDeadError, match="was killed by signal 9"):
            opened.generate(prompt, GREEDY)


def test_messages_of_other_kinds_pass_unchanged():
    reader = PartReader(takes_images=True)
    odd = ["x", {"role": "user"}, {"role": "user", "content": 3}, {"role": "user", "content": "a"}]
    assert reader.without_images(odd) == odd
    assert reader.without_images("text") == "text"
    assert reader.found == []
