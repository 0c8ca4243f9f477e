"""Images of models through transformers: equal to transformers, in chunks, cached, preempted."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.cases import nightly_but
from support.gemma_images import distance
from support.qwen_images import image
from support.vision_families import MODELS, Reference, prompt, write_model

from hardpoint import LLM, RequestError, SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
FAMILIES = nightly_but(list(MODELS), "idefics3")
NEEDS = {"pixtral": ["torchvision"], "smolvlm": ["torchvision", "num2words"]}
OPS = "support.plugins.plain_ops:PlainOps"
NEEDS["internvl"] = NEEDS["pixtral"]


def prompts(family: str) -> dict[str, dict[str, Any]]:
    return {
        "one": prompt(family, "see ", 0, " what is it?"),
        "begins": prompt(family, 1, "and then"),
        "ends": prompt(family, "it is ", 4),
        "two": prompt(family, "first ", 2, " and ", 3, " both?"),
        "text": prompt(family, "only text here"),
    }


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    for package in NEEDS.get(request.param, ()):
        pytest.importorskip(package, exc_type=Exception)
    folder = write_model(tmp_path_factory.mktemp(request.param), request.param)
    return folder, request.param


def open_llm(folder, **tables: Any) -> LLM:
    config = {"dtype": "float32", "max_model_len": 512, "kv_cache": {"block_size": 8}}
    for name, table in tables.items():
        config[name] = {**config.get(name, {}), **table} if isinstance(table, dict) else table
    return LLM(str(folder), config=config)


def results(output) -> tuple[list[int], list[dict[int, float]]]:
    completion = output.outputs[0]
    assert completion.finish_reason == "length", completion.error
    values = [{t: each.logprob for t, each in entry.items()} for entry in completion.logprobs]
    return completion.token_ids, values


def test_logits_and_greedy_tokens_are_those_of_transformers(model):
    folder, family = model
    params = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=140, detokenize=False
    )
    known, each = Reference(folder, family), prompts(family)
    with open_llm(folder) as llm:
        outputs = llm.generate(list(each.values()), params)
    for (name, request), output in zip(each.items(), outputs, strict=True):
        token_ids, expected = known.logprobs(request)
        assert output.prompt_token_ids == token_ids, name
        assert distance(output.prompt_logprobs, expected) < 1e-4, name
        assert output.outputs[0].token_ids == known.greedy(request, 8), name


def test_a_later_start_maps_the_packed_weights(model, tmp_path, caplog):
    folder, family = model
    outputs = []
    for action in ("wrote", "mapped"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "hardpoint"):
            cache = {"path": str(tmp_path), "max_bytes": 1 << 30}
            with open_llm(folder, weight_cache=cache, ops={"use": OPS}) as llm:
                outputs.append(
                    [results(o) for o in llm.generate([*prompts(family).values()], GREEDY)]
                )
        assert f"packed weights: {action}" in caplog.text
    assert outputs[0] == outputs[1]


@pytest.mark.nightly
def test_a_batch_is_the_same_as_each_alone(model):
    folder, family = model
    each = prompts(family)
    with open_llm(folder, kv_cache={"prefix_caching": False}) as llm:
        alone = [results(llm.generate([request], GREEDY)[0]) for request in each.values()]
    for tables in (
        {"scheduler": {"max_num_batched_tokens": 24}},
        {"speculation": {"use": ["ngram"]}},
    ):
        with open_llm(folder, **tables) as llm:
            for _ in range(2):  # the second time from the prefix cache
                together = llm.generate(list(each.values()), GREEDY)
                assert [results(output) for output in together] == alone, tables


@pytest.mark.nightly
def test_preempted_requests_are_the_same_as_alone(model):
    folder, family = model
    requests = [prompt(family, "abc", index, "xyz") for index in range(4)] * 2
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=3)
    with open_llm(folder, kv_cache={"prefix_caching": False}) as llm:
        alone = [results(llm.generate([request], params)[0]) for request in requests]
        outputs = llm.generate(requests, params)
        longest = max(len(output.prompt_token_ids) for output in outputs)
    blocks = 3 * (longest // 8 + 5)
    few = {"prefix_caching": False, "num_blocks": blocks, "watermark": 0.0}
    with open_llm(folder, kv_cache=few, max_model_len=8 * blocks) as llm:
        together = llm.generate(requests, params)
        assert llm.engines.scheduler_stats().num_preemptions > 0
    assert [results(output) for output in together] == alone


@pytest.fixture(scope="module")
def idefics(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("idefics3"), "idefics3")


def test_a_folder_without_a_processor_runs_as_text(idefics, tmp_path):
    copy = Path(shutil.copytree(idefics, tmp_path / "copy"))
    (copy / "processor_config.json").unlink()
    with open_llm(copy) as llm:
        assert not llm.model.takes_images
        with pytest.raises(RequestError, match=r"multi_modal_data: 'image': .* takes text alone"):
            llm.generate([prompt("idefics3", "see ", 0)], GREEDY)
        assert results(llm.generate([prompt("idefics3", "text")], GREEDY)[0])


def test_wrong_images_are_refused_by_name_and_disturb_no_other(idefics, tmp_path):
    broken = {"prompt": "<image>", "multi_modal_data": {"image": [b"\xff\xd8\xff1234"]}}
    few = {"prompt": "<image><image>", "multi_modal_data": {"image": [image(0)]}}
    long = prompt("idefics3", *range(5), *range(5), *range(5))
    with open_llm(idefics, max_model_len=128) as llm:
        for request, message in (
            (broken, r"multi_modal_data.image\[0\]: expected a whole image"),
            (few, r"one image for each <image> of the prompt, got 1 images and 2 placeholders"),
            (long, r"the prompt is too long: \d+ tokens"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.generate([prompt("idefics3", "text"), request], GREEDY)
        assert results(llm.generate([prompt("idefics3", "see ", 0)], GREEDY)[0])


def test_a_processor_that_cannot_start_is_named_with_the_first_image(idefics, tmp_path):
    copy = Path(shutil.copytree(idefics, tmp_path / "copy"))
    fields = json.loads((copy / "processor_config.json").read_text())
    fields["processor_class"] = fields["image_processor"]["image_processor_type"] = "Missing"
    (copy / "processor_config.json").write_text(json.dumps(fields))
    with open_llm(copy) as llm:
        message = r"multi_modal_data.image\[0\]: the model's image processor failed: \w+Error: "
        with pytest.raises(RequestError, match=message):
            llm.generate([prompt("idefics3", "see ", 0)], GREEDY)
        assert results(llm.generate([prompt("idefics3", "text")], GREEDY)[0])
