"""Prompts with images: equal to transformers', and the same however they are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cases import nightly_but
from support.gemma_images import SOFT_TOKENS, distance, prompt, reference, write_model

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.models.gemma.images import Gemma3WithImages

PROMPTS = {
    "one": prompt("see ", 0, " what is it?"),
    "begins": prompt(1, "and then"),
    "newlines": prompt("a\n\n", 0, "\n", 3, "\nb"),
    "two beside": prompt("x", 2, 1, "y"),
    "four": prompt("first ", 0, " second ", 1, " third ", 2, " fourth ", 3, " all?"),
    "twice": prompt("the same ", 3, " and the same ", 3, " again"),
}
TEXT = [prompt("only text here, some of it"), prompt("abc abc abc abc abc")]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma3"))


def open_llm(folder: Path, **tables: Any) -> LLM:
    config = {"dtype": "float32", "max_model_len": 256, "kv_cache": {"block_size": 8}}
    for name, table in tables.items():
        defaults = config.get(name, {})
        config[name] = {**defaults, **table} if isinstance(table, dict) else table
    return LLM(str(folder), config=config)


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, Any]:
    """Each prompt computed alone, whole, without a cache."""
    with open_llm(folder, kv_cache={"prefix_caching": False}) as llm:
        return {name: results(llm.generate([item], GREEDY)[0]) for name, item in ALL.items()}


ALL = {**PROMPTS, **{f"text {i}": text for i, text in enumerate(TEXT)}}


def results(output) -> tuple[list[int], list[dict[int, float]]]:
    completion = output.outputs[0]
    assert completion.finish_reason == "length", completion.error
    values = [{t: logprob.logprob for t, logprob in entry.items()} for entry in completion.logprobs]
    return completion.token_ids, values


@pytest.mark.parametrize("attention", nightly_but(["torch", "native_cpu"], "native_cpu"))
def test_logits_and_greedy_tokens_are_those_of_transformers(folder, attention):
    params = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=120, detokenize=False
    )
    known = reference(folder)
    with open_llm(folder, attention={"use": attention}) as llm:
        outputs = llm.generate(list(PROMPTS.values()), params)
    for (name, item), output in zip(PROMPTS.items(), outputs, strict=True):
        token_ids, expected = known.logprobs(item)
        assert output.prompt_token_ids == token_ids, name
        assert distance(output.prompt_logprobs, expected) < 1e-4, name
        assert output.outputs[0].token_ids == known.greedy(item, 8), name


def test_each_image_changes_what_follows(folder):
    with open_llm(folder) as llm:
        outputs = llm.generate([prompt("see ", i, " what?") for i in range(4)], GREEDY)
    logprobs = [results(output)[1][0] for output in outputs]
    assert len({tuple(sorted(entry.items())) for entry in logprobs}) == 4


@pytest.mark.parametrize(
    "tables",
    [
        {"scheduler": {"max_num_batched_tokens": 24}},
        {"scheduler": {"max_num_batched_tokens": SOFT_TOKENS}},
        pytest.param({"scheduler": {"long_prefill_token_threshold": 5}}, marks=pytest.mark.nightly),
        pytest.param({"scheduler": {"max_num_seqs": 8}}, marks=pytest.mark.nightly),
        pytest.param(
            {"scheduler": {"chunked_prefill": False, "max_num_batched_tokens": 256}},
            marks=pytest.mark.nightly,
        ),
        {"plugin": {"encoders": {"budget_tokens": SOFT_TOKENS}}},
        {"speculation": {"use": ["ngram"]}},
        {"scheduler": {"asynchronous": True}},
        pytest.param(
            {"parallel": {"pipeline": 2}, "executor": {"use": "multiproc"}},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=lambda tables: ", ".join(f"{name}.{next(iter(tables[name]))}" for name in tables),
)
def test_a_batch_is_the_same_as_each_alone(folder, alone, tables):
    with open_llm(folder, **tables) as llm:
        outputs = llm.generate(list(ALL.values()), GREEDY)
        again = llm.generate(list(ALL.values()), GREEDY)
    for name, first, second in zip(ALL, outputs, again, strict=True):
        assert results(first) == alone[name], name
        assert results(second) == alone[name], name


@pytest.mark.nightly
def test_preempted_requests_are_the_same_as_alone(folder):
    prompts = [prompt("abcdefg", index, "xyz") for index in range(4)] * 2
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=3)
    cache = {"prefix_caching": False, "window_groups": False}
    with open_llm(folder, kv_cache=cache) as llm:
        alone = [results(llm.generate([item], params)[0]) for item in prompts]
    few = {**cache, "num_blocks": 37, "watermark": 0.0}
    with open_llm(folder, kv_cache=few, max_model_len=128) as llm:
        together = llm.generate(prompts, params)
        assert llm.engines.scheduler_stats().num_preemptions > 0
    assert [results(output) for output in together] == alone


def test_ranks_that_share_the_layers_give_the_same_in_a_batch_and_alone(folder):
    known = reference(folder)
    tables = {"executor": {"use": "multiproc"}, "engine": {"in_process": False}}
    with open_llm(folder, parallel={"tensor": 2}, **tables) as llm:
        each = {name: results(llm.generate([item], GREEDY)[0]) for name, item in ALL.items()}
        llm.reset_prefix_cache()
        together = llm.generate(list(ALL.values()), GREEDY)
    for name, output in zip(ALL, together, strict=True):
        assert results(output) == each[name], name
        assert each[name][0] == known.greedy(ALL[name], 8), name


def test_completions_and_grammars_are_the_same_in_a_batch_and_alone(folder):
    sampled = SamplingParams(max_tokens=6, seed=7, n=3, ignore_eos=True)
    digits = SamplingParams(max_tokens=6, temperature=0.0, structured={"regex": "[0-9]{6}"})
    prompts = [prompt("of ", 1, " and ", 0, ": ")] * 2
    with open_llm(folder) as llm:
        alone = [llm.generate([prompts[0]], params)[0] for params in (sampled, digits)]
    with open_llm(folder, scheduler={"max_num_batched_tokens": 24}) as llm:
        together = llm.generate(prompts + TEXT, [sampled, digits, GREEDY, GREEDY])
    for single, other in zip(alone, together, strict=False):
        tokens = [completion.token_ids for completion in single.outputs]
        assert [completion.token_ids for completion in other.outputs] == tokens
    assert len({tuple(completion.token_ids) for completion in alone[0].outputs}) == 3
    assert alone[1].outputs[0].text.isdigit()


def test_no_cached_prefix_ends_inside_an_image(folder):
    # Blocks of 8 tokens: the fourth has the end of the image, and the texts differ in it.
    first, second = (prompt("1234567", 0, f"{word} of the images") for word in ("one", "two"))
    with open_llm(folder, kv_cache={"prefix_caching": False}) as llm:
        expected = [results(llm.generate([item], GREEDY)[0]) for item in (first, second)]
    with open_llm(folder) as llm:
        outputs = [llm.generate([item], GREEDY)[0] for item in (first, second, first, second)]
    assert [results(output) for output in outputs] == expected * 2
    # After seven letters, newlines and the token that begins an image.
    assert outputs[0].prompt_token_ids[9:25] == [6] * SOFT_TOKENS
    assert [output.num_cached_tokens for output in outputs] == [0, 8, 40, 40]


def test_equal_images_are_encoded_once_and_kept_while_there_is_room(folder, monkeypatch):
    encoded = []
    encode = Gemma3WithImages.encode_media

    def counting(self, modality, items):
        encoded.extend(items)
        return encode(self, modality, items)

    monkeypatch.setattr(Gemma3WithImages, "encode_media", counting)
    repeated = [prompt("a", 0, "b", 0), prompt("c", 0), prompt("d", 1)]
    with open_llm(folder, kv_cache={"prefix_caching": False}) as llm:
        llm.generate(repeated, GREEDY)
        assert len(encoded) == 2
        llm.generate(repeated, GREEDY)
        assert len(encoded) == 2
        llm.engines.reset_encoder_cache()
        llm.generate(repeated, GREEDY)
        assert len(encoded) == 4
    encoded.clear()
    room = {"encoders": {"budget_tokens": SOFT_TOKENS}}
    with open_llm(folder, plugin=room, kv_cache={"prefix_caching": False}) as llm:
        for prompts in (repeated[1:2], repeated[2:], repeated[1:2]):
            llm.generate(prompts, GREEDY)
        assert len(encoded) == 3


def test_a_reset_of_the_encoder_cache_changes_no_request_that_runs(folder, alone):
    tables = {"scheduler": {"max_num_batched_tokens": 24}, "kv_cache": {"prefix_caching": False}}
    outputs, num_resets = {}, 0
    with open_llm(folder, **tables) as llm:
        engine = llm.llm_engine
        for name in ("four", "twice", "text 0"):
            engine.add_request(name, ALL[name], GREEDY)
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
            llm.engines.reset_encoder_cache()
            num_resets += 1
    assert num_resets > 8  # while prompts are computed, and afterwards
    assert {name: output.outputs[0].token_ids for name, output in outputs.items()} == {
        name: alone[name][0] for name in outputs
    }
    assert len(outputs) == 3
