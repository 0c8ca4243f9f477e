"""EAGLE-3 and multi-token prediction: drafts of plain references, and tokens as without heads."""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import lora, write_adapter
from support.builtins.checkpoint_harness import random_model
from support.cases import nightly_but
from support.drafting_heads import (
    LLAMA,
    VOCAB,
    fix_costs_of_drafts,
    record_drafts,
    write_eagle3,
    write_mtp,
)

from hardpoint import LLM, ConfigError, HardpointError, ModelError, SamplingParams
from hardpoint.builtin_plugins.speculators.eagle3 import Eagle3
from hardpoint.builtin_plugins.speculators.mtp import MTP

BASE = {"dtype": "float32", "device": "cpu", "tokenizer": {"use": "none"}, "max_model_len": 128}
GENERATOR = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(3, VOCAB, (n,), generator=GENERATOR).tolist() for n in (40, 3, 60, 17)]
PROMPTS.append([*PROMPTS[2][:48], 5, 6, 7])
PARAMS = [
    SamplingParams(max_tokens=30, temperature=t, seed=7, ignore_eos=True, detokenize=False)
    for t in (0.0, 0.8, 0.0, 1.0, 0.0)
]
HEADS = ("mtp DeepseekV3", "mtp Qwen3Next", "eagle3")
SITUATIONS = {
    "whole prompts": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24}},
    "preemptions": {"kv_cache": {"num_blocks": 22, "block_size": 8}},
    "preemptions of chunks": {
        "kv_cache": {"num_blocks": 22, "block_size": 8},
        "scheduler": {"max_num_batched_tokens": 24},
    },
    "uncached": {"kv_cache": {"prefix_caching": False}},
    "few drafts": {"speculation": {"adaptive": True}},
    "torch": {"attention": {"use": "torch"}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that gives the folder and the reference of a head."""
    written = {}

    def folder_of(head):
        if head not in written:
            path = tmp_path_factory.mktemp("head")
            name, _, family = head.partition(" ")
            reference = write_eagle3(path) if name == "eagle3" else write_mtp(path, family)
            written[head] = path, reference
        return written[head]

    return folder_of


def opened(folder, head, extra=None, **speculation):
    name = head.partition(" ")[0]
    config = {**BASE, **(extra or {})}
    if name == "eagle3":
        config["plugin"] = {"eagle3": {"model": str(folder / "head")}}
        folder = folder / "model"
    table = {"use": [name], "num_draft_tokens": 3, "adaptive": False}
    config["speculation"] = table | config.get("speculation", {}) | speculation
    return LLM(str(folder), config=config, progress=False)


def plain(folder, head, extra=None):
    path = folder / "model" if head == "eagle3" else folder
    return LLM(str(path), config=BASE | (extra or {}), progress=False)


def generate(llm, params=PARAMS):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    return [list(output.outputs[0].token_ids) for output in outputs], outputs


@pytest.mark.parametrize("head", HEADS)
def test_logits_of_drafts_are_those_of_the_reference(folders, head, monkeypatch):
    folder, reference = folders(head)
    recorded, rows = record_drafts(monkeypatch), []
    for kind in (Eagle3, MTP):
        monkeypatch.setattr(kind, "logits", recording_logits(kind.logits, rows))
    with opened(folder, head, num_draft_tokens=4) as llm:
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], PARAMS[0])
    assert len(recorded) > 5
    computed = iter(rows)
    for tokens, drafts, _ in recorded:
        expected = reference.logits(tokens, len(drafts))
        actual = torch.cat([next(computed) for _ in drafts])
        scale = float(expected[expected > -1e29].abs().max())  # of tokens that it may draft
        torch.testing.assert_close(actual, expected, atol=1e-4 * scale, rtol=1e-4)
    assert next(computed, None) is None


def recording_logits(logits, rows):
    def record(self, output):
        result = logits(self, output)
        rows.append(result.clone())
        return result

    return record


@pytest.mark.parametrize(
    ("situation", "head"),
    nightly_but(
        [(situation, head) for situation in SITUATIONS for head in HEADS],
        *[("preemptions of chunks", head) for head in HEADS],
        ("whole prompts", "eagle3"),
    ),
)
def test_drafts_are_those_of_the_reference_and_change_no_token(
    folders, situation, head, monkeypatch
):
    folder, reference = folders(head)
    with plain(folder, head) as llm:
        expected, _ = generate(llm)
    recorded = record_drafts(monkeypatch)
    fix_costs_of_drafts(monkeypatch)
    with opened(folder, head, SITUATIONS[situation]) as llm:
        for _ in range(2):  # the second time with cached prefixes
            tokens, outputs = generate(llm)
            assert tokens == expected
        stats = llm.engines.scheduler_stats()
        assert not llm.plugins.health().fallbacks
        assert stats.num_drafts > 0
    assert (stats.num_preemptions > 0) == ("preemptions" in situation)
    if situation in ("whole prompts", "chunks", "torch"):
        # Without the last block, because keys and values in it depend on the token that follows.
        assert [output.num_cached_tokens for output in outputs] == [16, 0, 32, 0, 32]
    assert len(recorded) > 50
    for text, drafts, is_greedy in recorded:
        if is_greedy:
            reference.check(text, drafts)


def test_requests_without_the_head_leave_blocks_that_it_does_not_read(folders, monkeypatch):
    folder, _ = folders("mtp DeepseekV3")
    starts = []
    propose = MTP.propose

    def recording(self, requests, budget):
        starts.extend((request.cache_start, request.hidden_start) for request in requests)
        return propose(self, requests, budget)

    monkeypatch.setattr(MTP, "propose", recording)
    with opened(folder, "mtp", use=["mtp", "ngram"]) as llm:
        for speculator, expected in (
            *(("none", []), ("ngram", [])),
            ("mtp", [(32, 32)]),  # after the blocks of others
            ("mtp", [(32, 32)]),
        ):
            starts.clear()
            params = SamplingParams(
                max_tokens=1, temperature=0.0, speculator=speculator, detokenize=False
            )
            (output,) = llm.generate([{"prompt_token_ids": PROMPTS[2]}], params)
            assert starts == expected
        assert output.num_cached_tokens == 32
        llm.reset_prefix_cache()
        for expected in ((0, 0), (0, 32)):
            starts.clear()
            llm.generate([{"prompt_token_ids": PROMPTS[2]}], params)
            assert starts == [expected]
        assert not llm.plugins.health().fallbacks


@pytest.mark.parametrize("head", [HEADS[0], pytest.param(HEADS[2], marks=pytest.mark.nightly)])
def test_a_head_works_in_an_engine_process(folders, head):
    folder, _ = folders(head)
    results = []
    for in_process in (True, False):
        with opened(folder, head, {"engine": {"in_process": in_process}}) as llm:
            tokens, _ = generate(llm)
            stats = llm.engines.scheduler_stats()
            assert not llm.plugins.health().fallbacks
            results.append((tokens, stats.num_drafts, stats.num_accepted_drafts))
    assert results[0] == results[1]
    assert results[0][1] > 0


@pytest.mark.parametrize("head", HEADS[1:])
def test_a_head_works_again_after_a_sleep(folders, head, monkeypatch):
    folder, reference = folders(head)
    recorded = record_drafts(monkeypatch)
    with opened(folder, head) as llm:
        expected, _ = generate(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            recorded.clear()
            assert generate(llm)[0] == expected
            assert recorded
            for text, drafts, is_greedy in recorded:
                if is_greedy:
                    reference.check(text, drafts)


def test_completions_and_statistics_of_a_request(folders):
    folder, _ = folders("eagle3")
    params = SamplingParams(
        **{"max_tokens": 20, "temperature": 0.9, "seed": 5, "n": 3, "ignore_eos": True},
        **{"include": ["speculation"], "detokenize": False},
    )
    prompt = {"prompt_token_ids": PROMPTS[0]}
    with plain(folder, "eagle3") as llm:
        (output,) = llm.generate([prompt], msgspec.structs.replace(params, include=[]))
        expected = [list(part.token_ids) for part in output.outputs]
    with opened(folder, "eagle3") as llm:
        (output,) = llm.generate([prompt], params)
        assert [list(part.token_ids) for part in output.outputs] == expected
        stats = llm.engines.scheduler_stats()
    figures = [part.part_figures["speculation"] for part in output.outputs]
    assert sum(f["num_drafts"] for f in figures) == stats.num_drafts > 0
    assert sum(f["num_accepted_drafts"] for f in figures) == stats.num_accepted_drafts


def test_layers_of_the_config_and_of_the_options(tmp_path, monkeypatch):
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}}
    reference = write_eagle3(tmp_path, norm_before_residual=False, **config)
    recorded = record_drafts(monkeypatch)
    with opened(tmp_path, "eagle3") as llm:
        generate(llm)
    for text, drafts, is_greedy in recorded:
        if is_greedy:
            reference.check(text, drafts)
    recorded.clear()
    plugin = {"eagle3": {"model": str(tmp_path / "head"), "layers": [0, 2, 8]}}
    with pytest.raises(
        ConfigError,
        match=r"plugin.eagle3.layers: expected three layers from 0 to 7, got .0, 2, 8",
    ):
        LLM(
            str(tmp_path / "model"),
            config=BASE | {"plugin": plugin, "speculation": {"use": ["eagle3"]}},
            progress=False,
        )


def change_config(folder, target, **fields):
    """Copy a folder with other fields of its config."""
    shutil.copytree(folder, target)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.fixture
def refused(folders, tmp_path):
    """Return the message of an engine with an EAGLE-3 head that is changed."""

    def message(weights=(), engine=None, **fields):
        folder, _ = folders("eagle3")
        shutil.copytree(folder / "model", tmp_path / "model")
        change_config(folder / "head", tmp_path / "head", **fields)
        file = tmp_path / "head" / "model.safetensors"
        save_file(load_file(file) | dict(weights), file, {"format": "pt"})
        with pytest.raises(HardpointError) as caught:
            opened(tmp_path, "eagle3", engine).close()
        return str(caught.value)

    return message


def test_heads_that_do_not_fit(refused):
    message = refused(vocab_size=107)
    assert message == (
        "plugin.eagle3.model: expected the vocabulary size 97 of the engine's model, got 107"
    )


def test_a_wrong_vocabulary_of_drafts(refused):
    message = refused({"d2t": torch.full((61,), 90)})
    assert "weight 'd2t': expected tokens from 0 to 96, got 90 to 150" in message


def test_missing_weights_of_a_head(refused):
    message = refused(draft_vocab_size=60)
    assert "weight 'lm_head.weight'" in message


def test_ranks_and_heads(refused):
    engine = {"parallel": {"tensor": 2}, "executor": {"use": "multiproc"}}
    assert "plugin.eagle3.model: expected one rank for a drafting head, got 2" in refused(
        engine=engine
    )


def test_a_head_is_no_model_of_an_engine(folders, tmp_path):
    folder, _ = folders("eagle3")
    with pytest.raises(ModelError, match="LlamaForCausalLMEagle3 is a drafting head; expected it"):
        LLM(str(folder / "head"), config=BASE, progress=False)


def test_models_without_a_layer_for_several_tokens(folders, tmp_path):
    folder, _ = folders("eagle3")
    with pytest.raises(
        ConfigError,
        match=r"plugin.mtp.model: expected a model with .* got LlamaForCausalLM",
    ):
        opened(folder / "model", "mtp")
    folder, _ = folders("mtp DeepseekV3")
    change_config(folder, tmp_path / "model", num_nextn_predict_layers=0)
    with pytest.raises(
        ConfigError, match=r"num_nextn_predict_layers: expected at least 1 .* got 0"
    ):
        opened(tmp_path / "model", "mtp")


def test_sliding_windows_and_heads(tmp_path):
    target = random_model("Gemma2", **LLAMA | {"num_hidden_layers": 8, "sliding_window": 16})
    write_eagle3(tmp_path, target)
    with pytest.raises(ConfigError, match=r"kv_cache.window_groups: expected false with drafting"):
        opened(tmp_path, "eagle3", {"kv_cache": {"window_groups": True, "block_size": 8}})


@pytest.mark.parametrize("head", [HEADS[2], pytest.param(HEADS[0], marks=pytest.mark.nightly)])
def test_blocks_from_a_store_change_no_token(folders, head):
    folder, _ = folders(head)
    with plain(folder, head) as llm:
        expected, _ = generate(llm)
    with opened(folder, head, {"kv_connector": {"stores": ["memory"]}}) as llm:
        for _ in range(3):
            assert generate(llm)[0] == expected
            llm.reset_prefix_cache()
        assert llm.engines.scheduler_stats().num_drafts > 0
        assert not llm.plugins.health().fallbacks


def test_adapters_with_a_head(folders, tmp_path):
    folder, reference = folders("eagle3")
    write_adapter(tmp_path / "adapter", reference.target, size=0.1)
    adapter = lora("adapter", 1, tmp_path / "adapter")
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    results = []
    for engine in (plain, opened):
        with engine(folder, "eagle3", {"adapters": {"max_loras": 2, "max_lora_rank": 4}}) as llm:
            base, _ = generate(llm)
            outputs = llm.generate(prompts, PARAMS, lora_request=adapter)
            results.append((base, [list(output.outputs[0].token_ids) for output in outputs]))
            assert not llm.plugins.health().fallbacks
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]
