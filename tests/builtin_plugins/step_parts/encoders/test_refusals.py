"""Prompts with media that are refused: one error each, and nothing else is disturbed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.gemma_images import IMAGE, SOFT_TOKENS, image, prompt, write_model

from hardpoint import LLM, AsyncLLM, RequestError, SamplingParams
from hardpoint.plugins.requests import EngineCoreRequest, MultiModalFeature
from hardpoint.plugins.requests.media import Image
from hardpoint.testing import scripted_config, write_scripted_model

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
IMAGES = [image(0), image(1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma3"), num_hidden_layers=1, layer_types=None)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), config=settings()) as llm:
        yield llm


def settings(**tables: Any) -> dict[str, Any]:
    return {"dtype": "float32", "max_model_len": 256, "kv_cache": {"block_size": 8}, **tables}


def media(*items: Any, text: str = f"see {IMAGE} here", **others: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(items), **others}}


REFUSED = {
    "no placeholder": (
        media(IMAGES[0], text="none"),
        r"multi_modal_data.image: expected one image for each <start_of_image> of the prompt, got "
        r"1 images and 0 placeholders",
    ),
    "more images": (media(*IMAGES), r"got 2 images and 1 placeholders"),
    "fewer images": (media(IMAGES[0], text=IMAGE * 3), r"got 1 images and 3 placeholders"),
    "too many": (
        media(*IMAGES * 2, text=IMAGE * 4),
        r"multi_modal_data.image\[3\]: expected at most 3 images in a prompt \(images.max_items\), "
        r"got 4",
    ),
    "audio": (
        media(IMAGES[0], audio=[b"sound"]),
        r"multi_modal_data: 'audio': the model Gemma3ForConditionalGeneration takes image",
    ),
    "a path": (
        media("photo.png"),
        r"multi_modal_data.image\[0\]: expected a path in one of images.folders, which is empty",
    ),
    "floats": (
        media(IMAGES[0].astype("float32")),
        r"multi_modal_data.image\[0\]: expected a uint8 array \[height, width, 3\], got float32 "
        r"\[13, 40, 3\]",
    ),
    "grey": (media(IMAGES[0][..., 0]), r"got uint8 \[13, 40\]"),
    "empty": (media(np.zeros((0, 4, 3), "uint8")), r"got uint8 \[0, 4, 3\]"),
    "too few pixels": (
        media(Image(4, 4, bytes(47))),
        r"image\[0\]: expected 3 \* width \* height bytes of pixels, got 47 for 4 x 4",
    ),
    "no mapping": (
        {"prompt": IMAGE, "multi_modal_data": [IMAGES[0]]},
        r"multi_modal_data: expected a mapping such as {'image': \[...\]}, got list",
    ),
    "soft tokens": (
        media(IMAGES[0], text=f"{IMAGE}<image_soft_token>"),
        r"prompt: expected no token 6, which stands for a part of an image, got one at position 1",
    ),
}


def test_media_stand_in_texts_and_token_ids_alone(folder):
    config = settings(plugin={"prompt_embeddings": {"enabled": True}})
    with LLM(str(folder), config=config) as llm:
        width = llm.llm_engine.parts.model_config.hf["text_config"]["hidden_size"]
        rows = np.zeros((2, width), "float32")
        for others in ({"text": "a", "text_pair": "b"}, {"prompt_embeds": rows}):
            words = f"multi_modal_data: expected none with {', '.join(others)}$"
            with pytest.raises(RequestError, match=words):
                llm.generate([others | {"multi_modal_data": {"image": IMAGES[:1]}}], GREEDY)
        words = r"prompt: expected a mapping with either .*, got the keys \[\]"
        with pytest.raises(RequestError, match=words):
            llm.generate([{"multi_modal_data": {"image": IMAGES[:1]}}], GREEDY)
        with pytest.raises(RequestError, match="text_pair: expected one prompt: texts are read in"):
            llm.generate([{"text": "a", "text_pair": "b"}], GREEDY)


@pytest.fixture(scope="module")
def of_three_images(folder):
    with LLM(str(folder), config=settings(images={"max_items": 3})) as llm:
        yield llm


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(of_three_images, name):
    bad_prompt, words = REFUSED[name]
    with pytest.raises(RequestError, match=words):
        of_three_images.generate([bad_prompt], GREEDY)


def test_a_refused_prompt_disturbs_no_other(llm):
    good = prompt("see ", 0, " here")
    (alone,) = llm.generate([good], GREEDY)
    with pytest.raises(RequestError, match="0 placeholders"):
        llm.generate([good, media(IMAGES[0], text="none")], GREEDY)
    (after,) = llm.generate([good], GREEDY)
    assert after.outputs[0].token_ids == alone.outputs[0].token_ids
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_placeholder_is_one_only_with_images(llm):
    prompts = [IMAGE, {"prompt": IMAGE, "multi_modal_data": {}}, {"prompt": IMAGE}]
    for output in llm.generate(prompts, GREEDY):
        assert output.prompt_token_ids == [4]
    (output,) = llm.generate([media(IMAGES[0], text=IMAGE)], GREEDY)
    assert output.prompt_token_ids == [8, 4, *[6] * SOFT_TOKENS, 5, 8]


def test_all_forms_of_an_image_are_the_same(llm):
    from PIL import Image as Pillow

    array = IMAGES[0]
    image = Image(array.shape[1], array.shape[0], array.tobytes())
    forms = [[array], array, [image], image, [Pillow.fromarray(array)], (array,)]
    prompts: list[Any] = [
        {"prompt": f"see {IMAGE}", "multi_modal_data": {"image": form}} for form in forms
    ]
    ids = llm.tokenizer.encode(f"see {IMAGE}", add_special_tokens=False)
    typed = {"type": "token", "prompt_token_ids": ids, "cache_salt": "its own"}
    for base in ({"prompt_token_ids": ids}, typed):
        prompts.append({**base, "multi_modal_data": {"image": array}})
    outputs = llm.generate(prompts, GREEDY)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == 1


def test_a_prompt_with_images_is_not_cut(llm):
    with pytest.raises(RequestError, match="truncate_prompt_tokens: expected at least 29, the tok"):
        llm.generate([media(IMAGES[0])], GREEDY, truncate_prompt_tokens=9)
    long = media(IMAGES[0], text=f"{IMAGE}{'a' * 250}")
    with pytest.raises(RequestError, match="prompt: .*270"):
        llm.generate([long], GREEDY)


def test_images_over_the_budget_of_a_step_are_refused(folder):
    config = settings(scheduler={"max_num_batched_tokens": SOFT_TOKENS - 1, "max_num_seqs": 4})
    with (
        LLM(str(folder), config=config) as llm,
        pytest.raises(
            RequestError,
            match=r"features\[0\]: expected at most 15 tokens, of one step "
            r"\(scheduler.max_num_batched_tokens\), as they see each other, got 16",
        ),
    ):
        llm.generate([media(IMAGES[0])], GREEDY)


def test_a_model_of_text_takes_no_images(tmp_path):
    with LLM(config=scripted_config(write_scripted_model(tmp_path), {})) as llm:
        words = r"multi_modal_data: 'image': the model \w+ takes text alone"
        with pytest.raises(RequestError, match=words):
            llm.generate([{"prompt": "a", "multi_modal_data": {"image": IMAGES}}], GREEDY)
        feature = MultiModalFeature("x", 0, 1)
        request = EngineCoreRequest(
            request_id="r", prompt_token_ids=[5], params=GREEDY, features=[feature]
        )
        with pytest.raises(RequestError, match="features: expected none, the model takes text"):
            llm.llm_engine.add_request("r", request)
        assert llm.generate(["a"], GREEDY)[0].finished


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modality": "audio"}, "modality: expected image, got 'audio'"),
        ({"offset": 3}, r"expected the token 6 at all of its positions"),
        ({"length": 9}, r"expected 16 tokens from position 0 on, got 9 from 2 on"),
        ({"sees_itself": False}, "sees_itself: expected True, got False"),
        ({"data": b"bytes"}, r"data: expected a uint8 array \[32, 32, 3\]"),
        ({"data": np.zeros((4, 4, 3), "uint8")}, r"data: expected a uint8 array"),
    ],
)
def test_features_of_prebuilt_requests_are_checked(llm, changes, words):
    data = np.zeros((32, 32, 3), "uint8")
    feature = MultiModalFeature("x", 2, SOFT_TOKENS, sees_itself=True, data=data)
    feature = msgspec.structs.replace(feature, **changes)
    ids = [8, 4, *[6] * SOFT_TOKENS, 5, 8]
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=ids, params=GREEDY, features=[feature]
    )
    with pytest.raises(RequestError, match=rf"features\[0\]: {words}"):
        llm.llm_engine.add_request("r", request)
    assert llm.generate([media(IMAGES[0])], GREEDY)[0].finished


def test_async_prompts_with_images_are_placed_beside_others(folder):
    async def run() -> list[list[int]]:
        async with AsyncLLM(str(folder), config=settings()) as llm:

            async def one(item: Any) -> list[int]:
                async for output in llm.generate(item, GREEDY):
                    last = output
                return last.outputs[0].token_ids

            with pytest.raises(RequestError, match="got 2 images and 1 placeholders"):
                await one(media(*IMAGES))
            return await asyncio.gather(*map(one, [media(IMAGES[0]), "abc", media(IMAGES[1])]))

    tokens = asyncio.run(run())
    with LLM(str(folder), config=settings()) as llm:
        outputs = llm.generate([media(IMAGES[0]), "abc", media(IMAGES[1])], GREEDY)
    assert tokens == [output.outputs[0].token_ids for output in outputs]
