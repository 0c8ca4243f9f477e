"""Blocks of prompts with images in KV stores: found again, never for another image."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.builtins.split import DECODE, Split
from support.cases import nightly_but
from support.gemma_images import prompt, write_model
from support.waiting import wait_until

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.models.gemma.images import Gemma3WithImages

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3)
PATIENT = {"timeout_seconds": 60.0}
MEMORY = {"memory": {"size_bytes": 1 << 22}}
TEXT = "1234567"  # two tokens follow it before those of the image, which begin in the second block


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma3"))


def open_llm(folder: Path, stores: list[str], **plugin: Any) -> LLM:
    connector = {"kv_connector": {"stores": stores, "load_seconds": 120.0}} if stores else {}
    tables = {"stores": PATIENT, **plugin} if stores else plugin
    config = {"dtype": "float32", "max_model_len": 256, **connector, "plugin": tables}
    cache = {"block_size": 8, "window_groups": False}
    return LLM(str(folder), config=config | {"kv_cache": cache})


def results(output: Any) -> tuple[list[int], list[dict[int, float]]]:
    (completion,) = output.outputs
    assert completion.finish_reason == "length", completion.error
    values = [{t: logprob.logprob for t, logprob in entry.items()} for entry in completion.logprobs]
    return completion.token_ids, values


def asked(llm: LLM, prompt: Any, expected: int) -> Any:
    """Return the output of a prompt after a reset of the caches.

    Blocks are stored in threads: it is asked again until the stores have this many of its tokens.
    """
    deadline = time.monotonic() + 60
    while True:
        llm.reset_prefix_cache()
        llm.engines.reset_encoder_cache()
        (output,) = llm.generate([prompt], GREEDY)
        if output.num_cached_tokens >= expected or time.monotonic() > deadline:
            return output


def whole_blocks(output: Any) -> int:
    """Return how many tokens of a prompt may be loaded."""
    return (len(output.prompt_token_ids) - 1) // 8 * 8


PROMPTS = {
    "one": prompt(TEXT, 0, " of the images"),
    "two": prompt(TEXT, 0, " and then ", 1, " what is there?"),
    "twice": prompt("the same ", 3, " and the same ", 3, " again"),
}
OTHERS = {  # the same text and placeholders
    "one": prompt(TEXT, 1, " of the images"),
    "two": prompt(TEXT, 0, " and then ", 2, " what is there?"),
    "twice": prompt("the same ", 3, " and the same ", 2, " again"),
}


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, Any]:
    """Return the results of each prompt without stores and without a prefix cache."""
    config = {"dtype": "float32", "max_model_len": 256}
    cache = {"block_size": 8, "window_groups": False, "prefix_caching": False}
    with LLM(str(folder), config=config | {"kv_cache": cache}) as llm:
        every = [*PROMPTS.values(), *OTHERS.values()]
        outputs = [results(llm.generate([prompt], GREEDY)[0]) for prompt in every]
    names = [*PROMPTS, *(f"other {name}" for name in OTHERS)]
    return dict(zip(names, outputs, strict=True))


@pytest.mark.parametrize("name", nightly_but(PROMPTS, "two"))
def test_another_image_at_the_same_placeholders_shares_no_block(folder, alone, name):
    begin = {"one": 8, "two": 32, "twice": 40}[name]  # whole blocks before the other image
    with open_llm(folder, ["memory"], **MEMORY) as llm:
        first = asked(llm, PROMPTS[name], 0)
        again = asked(llm, PROMPTS[name], whole_blocks(first))
        other = asked(llm, OTHERS[name], begin)
        both = [asked(llm, prompt, whole_blocks(first)) for prompt in (OTHERS[name], PROMPTS[name])]
    assert first.prompt_token_ids == other.prompt_token_ids
    counts = [output.num_cached_tokens for output in (first, again, other, *both)]
    assert counts == [0, whole_blocks(first), begin, *[whole_blocks(first)] * 2]
    assert results(first) == results(again) == results(both[1]) == alone[name]
    assert results(other) == results(both[0]) == alone[f"other {name}"]


@pytest.mark.parametrize(
    "stores",
    nightly_but([["memory"], ["disk"], ["memory", "disk"]], ["memory", "disk"], name=" and ".join),
)
def test_stored_blocks_of_images_are_found_again(folder, alone, tmp_path, monkeypatch, stores):
    encoded = []
    encode = Gemma3WithImages.encode_media

    def counting(self, modality, items):
        encoded.extend(items)
        return encode(self, modality, items)

    monkeypatch.setattr(Gemma3WithImages, "encode_media", counting)
    tables = {**MEMORY, "disk": {"path": str(tmp_path / "blocks"), "size_bytes": 1 << 24}}
    tables = {name: tables[name] for name in stores}
    with open_llm(folder, stores, **tables) as llm:
        for name, prompt in PROMPTS.items():
            first = asked(llm, prompt, 0)
            asked(llm, prompt, whole_blocks(first))
            encoded.clear()
            again = asked(llm, prompt, whole_blocks(first))
            assert results(first) == results(again) == alone[name]
            assert again.num_cached_tokens == whole_blocks(again)
            assert not encoded  # what is loaded needs no embeddings
    if "disk" not in stores:
        return
    with open_llm(folder, stores, **tables) as llm:  # which has them from the disk alone
        (later,) = llm.generate([PROMPTS["two"]], GREEDY)
    assert results(later) == alone["two"]
    assert later.num_cached_tokens == whole_blocks(later)


def test_the_tokens_of_an_image_without_it_share_no_block(folder):
    with open_llm(folder, ["memory"], **MEMORY) as llm:
        first = asked(llm, PROMPTS["one"], 0)
        asked(llm, PROMPTS["one"], whole_blocks(first))
        # Without images these are ordinary tokens; the block before them is the same.
        assert asked(llm, first.prompt_token_ids, 8).num_cached_tokens == 8


@pytest.mark.nightly
@pytest.mark.parametrize(
    "in_step",
    nightly_but(
        [False, True], False, name=lambda is_in: "in the step" if is_in else "between steps"
    ),
)
def test_another_engine_goes_on_with_the_same_images_alone(folder, alone, tmp_path, in_step):
    cache = {"block_size": 8, "window_groups": False}
    base = {"dtype": "float32", "max_model_len": 256, "kv_cache": cache}
    split = Split(folder, tmp_path, base)
    split.both(
        load_in_step=in_step,
        timeout_seconds=60.0,
        p2p={"wait_seconds": 1.0, "connect_seconds": 60.0},
        kv_connector={"load_seconds": 120.0},
    )

    def has_all_blocks():
        """Go on; the blocks of another engine are waited for a second, and computed otherwise."""
        transfer = split.compute(PROMPTS["two"])
        output = split.go_on(PROMPTS["two"], transfer, max_tokens=6, logprobs=3)
        assert results(output) == alone["two"]
        split.engines[DECODE].reset_prefix_cache()
        return output.num_cached_tokens == whole_blocks(output)

    try:
        wait_until(has_all_blocks, what="the blocks of the other engine")
        transfer = split.compute(PROMPTS["two"])
        other = split.go_on(OTHERS["two"], transfer, max_tokens=6, logprobs=3)
        assert results(other) == alone["other two"]
        assert other.num_cached_tokens <= 32
    finally:
        split.close_all()
