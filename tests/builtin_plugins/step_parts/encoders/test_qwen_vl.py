"""Qwen2.5-VL and Qwen3-VL: equal to transformers, and the same in a batch as alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import nightly_but
from support.gemma_images import distance
from support.qwen_images import IMAGE, image, prompt, reference, write_model

from hardpoint import LLM, ModelError, RequestError, SamplingParams
from hardpoint.plugins.requests.media import ProcessedImage

PROMPTS = {
    "one": prompt("see ", 0, " what is it?"),
    "begins": prompt(1, "and then"),
    "ends": prompt("it is ", 4),
    "two beside": prompt("x", 2, 1, "y"),
    "four": prompt("first ", 0, " second ", 1, " third ", 2, " fourth ", 3, " all?"),
    "twice": prompt("the same ", 3, " and the same ", 3, " again"),
    "text": prompt("only text here, some of it"),
}
KINDS = ["2.5", "3", "3-moe"]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module", params=nightly_but(KINDS, "2.5"))
def folder(request, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen_vl"), request.param)


def open_llm(folder: Path, **tables: Any) -> LLM:
    config = {"dtype": "float32", "max_model_len": 512, "kv_cache": {"block_size": 8}}
    for name, table in tables.items():
        default = config.get(name, {})
        config[name] = {**default, **table} if isinstance(table, dict) else table
    return LLM(str(folder), config=config)


def results(output) -> tuple[list[int], list[dict[int, float]]]:
    completion = output.outputs[0]
    assert completion.finish_reason == "length", completion.error
    values = [{t: each.logprob for t, each in entry.items()} for entry in completion.logprobs]
    return completion.token_ids, values


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, Any]:
    """Each prompt computed alone, whole, without a cache."""
    with open_llm(folder, kv_cache={"prefix_caching": False}) as llm:
        return {name: results(llm.generate([each], GREEDY)[0]) for name, each in PROMPTS.items()}


@pytest.mark.parametrize("folder", nightly_but(KINDS, "2.5", "3"), indirect=True)
def test_logits_and_greedy_tokens_are_those_of_transformers(folder):
    params = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=120, detokenize=False
    )
    known = reference(folder)
    with open_llm(folder) as llm:
        outputs = llm.generate(list(PROMPTS.values()), params)
    for (name, each), output in zip(PROMPTS.items(), outputs, strict=True):
        token_ids, expected = known.logprobs(each)
        assert output.prompt_token_ids == token_ids, name
        assert distance(output.prompt_logprobs, expected) < 1e-4, name
        assert output.outputs[0].token_ids == known.greedy(each, 8), name


@pytest.mark.parametrize(
    "tables",
    [
        {"scheduler": {"max_num_batched_tokens": 24}},
        pytest.param({"scheduler": {"long_prefill_token_threshold": 5}}, marks=pytest.mark.nightly),
        pytest.param({"scheduler": {"max_num_seqs": 8}}, marks=pytest.mark.nightly),
        pytest.param({"plugin": {"encoders": {"budget_tokens": 64}}}, marks=pytest.mark.nightly),
        {"speculation": {"use": ["ngram"]}},
        pytest.param({"scheduler": {"asynchronous": True}}, marks=pytest.mark.nightly),
        pytest.param(
            {"parallel": {"pipeline": 2}, "executor": {"use": "multiproc"}},
            marks=pytest.mark.nightly,
        ),
        pytest.param({"attention": {"use": "native_cpu"}}, marks=pytest.mark.nightly),
        {"debug": {"kv_canary": True}},
    ],
    ids=lambda tables: ", ".join(f"{name}.{next(iter(tables[name]))}" for name in tables),
)
def test_a_batch_is_the_same_as_each_alone(folder, alone, tables):
    with open_llm(folder, **tables) as llm:
        outputs = llm.generate(list(PROMPTS.values()), GREEDY)
        again = llm.generate(list(PROMPTS.values()), GREEDY)
    for name, first, second in zip(PROMPTS, outputs, again, strict=True):
        assert results(first) == alone[name], name
        assert results(second) == alone[name], name


def test_preempted_requests_are_the_same_as_alone(folder):
    requests = [prompt("abcdefg", index, "xyz") for index in range(4)] * 2
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=3)
    cache = {"prefix_caching": False}
    with open_llm(folder, kv_cache=cache) as llm:
        alone = [results(llm.generate([request], params)[0]) for request in requests]
    few = {**cache, "num_blocks": 40, "watermark": 0.0}
    with open_llm(folder, kv_cache=few, max_model_len=128) as llm:
        together = llm.generate(requests, params)
        assert llm.engines.scheduler_stats().num_preemptions > 0
    assert [results(output) for output in together] == alone


@pytest.mark.nightly
def test_completions_of_a_prompt_are_the_same_in_a_batch(folder):
    params = SamplingParams(max_tokens=6, seed=7, n=3, ignore_eos=True)
    request = prompt("of ", 1, " and ", 0, ": ")
    with open_llm(folder) as llm:
        (alone,) = llm.generate([request], params)
        together = llm.generate([request, prompt("text"), prompt(2, "x")], params)
    tokens = [completion.token_ids for completion in alone.outputs]
    assert [completion.token_ids for completion in together[0].outputs] == tokens
    assert len({tuple(each) for each in tokens}) == 3


TEMPLATE = """{% for message in messages %}{{ message.role }}: {% for part in message.content %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %} {% endfor %}model:"""


def test_conversations_have_images_and_text_of_users_has_none(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    parts = [{"type": "image", "image": image(0)}, {"type": "text", "text": f"what is {IMAGE}?"}]
    with open_llm(folder) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY)
        (expected,) = llm.generate([prompt("user: ", 0, "what is ? model:")], GREEDY)
    token = expected.prompt_token_ids[7]
    assert output.prompt_token_ids.count(token) == expected.prompt_token_ids.count(token) > 1
    assert len(output.prompt_token_ids) > len(expected.prompt_token_ids)


REFUSED = {
    "fewer images": (
        {"prompt": IMAGE * 2, "multi_modal_data": {"image": [image(0)]}},
        r"multi_modal_data.image: expected one image for each <\|image_pad\|> of the prompt, got 1 "
        r"images and 2 placeholders",
    ),
    "a damaged file": (
        {"prompt": IMAGE, "multi_modal_data": {"image": [b"\x89PNG\r\n\x1a\n1234"]}},
        r"multi_modal_data.image\[0\]: expected a whole image",
    ),
    "too long a side": (
        {"prompt": IMAGE, "multi_modal_data": {"image": [np.zeros((1, 300, 3), np.uint8)]}},
        r"multi_modal_data.image\[0\]: expected an image with a longer side of at most 200 times",
    ),
    "too many tokens": (
        {"prompt": IMAGE * 16, "multi_modal_data": {"image": [image(3)] * 16}},
        r"the prompt is too long: 1024 tokens; this model's maximum context length is 512 tokens",
    ),
    "processed for another model": (
        {
            "prompt": IMAGE,
            "multi_modal_data": {"image": [ProcessedImage(8, 8, "0", "x", bytes(192), (8, 8, 3))]},
        },
        r"multi_modal_data.image\[0\]: expected an image that this model's processor has made",
    ),
    "audio": (
        {"prompt": "x", "multi_modal_data": {"audio": [b"sound"]}},
        r"multi_modal_data: 'audio': the model Qwen\w+ takes image",
    ),
}


def test_prompts_that_are_refused_by_name_disturb_no_other(folder, alone):
    with open_llm(folder) as llm:
        for request, message in REFUSED.values():
            with pytest.raises(RequestError, match=message):
                llm.generate([PROMPTS["one"], request], GREEDY)
        assert results(llm.generate([PROMPTS["one"]], GREEDY)[0]) == alone["one"]


CONFIGS = {
    "sections": (
        "config.json",
        lambda hf: hf["text_config"]["rope_parameters"].update(mrope_section=[1, 1, 1]),
        r"rope_parameters.mrope_section: expected three whole numbers with the sum 8",
    ),
    "width": (
        "config.json",
        lambda hf: hf["vision_config"].update(out_hidden_size=32),
        r"vision_config: out_hidden_size: expected 64, got 32",
    ),
    "patches": (
        "preprocessor_config.json",
        lambda fields: fields.update(patch_size=7),
        r"image processor: patch_size: expected 4 as in the config",
    ),
    "interpolation": (
        "preprocessor_config.json",
        lambda fields: fields.update(resample=2),
        r"image processor: resample: expected 3 \(bicubic\), got 2",
    ),
    "pixels": (
        "preprocessor_config.json",
        lambda fields: fields.update(size={"shortest_edge": 64, "longest_edge": 32}),
        r"image processor: size.longest_edge: expected at least 64 pixels, got 32",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_files_that_are_not_supported_are_refused_by_field(folder, tmp_path, name):
    file, change, message = CONFIGS[name]
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    fields = json.loads((copy / file).read_text())
    change(fields)
    (copy / file).write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=message):
        open_llm(copy).close()


def test_names_of_published_checkpoints_are_read(folder, alone, tmp_path):
    """Qwen2.5-VL is also stored as transformers names its modules, with `model.language_model`."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("visual."):
            name = f"model.{name}"
        elif name.startswith("model.") and not name.startswith(("model.vis", "model.lang")):
            name = f"model.language_model.{name.removeprefix('model.')}"
        renamed[name] = tensor
    save_file(renamed, copy / "model.safetensors")
    with open_llm(copy) as llm:
        assert results(llm.generate([PROMPTS["four"]], GREEDY)[0]) == alone["four"]


@pytest.mark.nightly
def test_experts_of_published_checkpoints_are_read(tmp_path):
    folder = write_model(tmp_path / "written", "3-moe")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    swapped = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(swapped, copy / "model.safetensors")
    request = PROMPTS["four"]
    with open_llm(folder) as llm:
        expected = results(llm.generate([request], GREEDY)[0])
    with open_llm(copy) as llm:
        assert results(llm.generate([request], GREEDY)[0]) == expected


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param({"quantization": {"use": "int8"}}, marks=pytest.mark.nightly),
        pytest.param({"kv_cache": {"block_size": 8, "dtype": "int8"}}, marks=pytest.mark.nightly),
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.nightly),
    ],
    ids=["int8 weights", "int8 cache", "bfloat16"],
)
def test_quantized_models_give_the_same_in_a_batch_as_alone(folder, tables):
    requests = [PROMPTS[name] for name in ("one", "four", "text")]
    with open_llm(folder, **tables) as llm:
        alone = [results(llm.generate([request], GREEDY)[0]) for request in requests]
        llm.reset_prefix_cache()
        assert [results(output) for output in llm.generate(requests, GREEDY)] == alone


def test_a_quantized_tower_is_refused_by_its_tensor(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    name = next(name for name in tensors if name.endswith("visual.blocks.0.attn.qkv.weight"))
    stem = name.removesuffix(".weight")
    weight = tensors.pop(name)
    tensors[f"{stem}.qweight"] = torch.zeros(
        weight.shape[1], weight.shape[0] // 8, dtype=torch.int32
    )
    tensors[f"{stem}.scales"] = torch.ones(1, weight.shape[0], dtype=torch.float16)
    save_file(tensors, copy / "model.safetensors")
    fields = json.loads((copy / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128}
    (copy / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=r"visual\.blocks\.0\.attn\.qkv\.weight"):
        open_llm(copy).close()
