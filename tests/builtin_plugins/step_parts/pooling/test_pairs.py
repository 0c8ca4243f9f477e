"""Pairs of texts: cross-encoders as in sentence-transformers, and several classes."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from support.cases import nightly_but
from support.encoders import LIMIT, TABLE, write_encoder
from support.pairs import PAIRS, TOO_LONG, change, write_classifier, write_cross_encoder

from hardpoint import LLM, ModelError, PoolingParams, RequestError, SamplingParams
from hardpoint.builtin_plugins.step_parts.pooling.folder import ModelPooling
from hardpoint.builtin_plugins.step_parts.pooling.requests import PooledResults
from hardpoint.errors import PromptTooLongError
from hardpoint.host.boundary.parts.hooks import selects
from hardpoint.plugins import EngineCoreRequest

FAMILIES = ["Bert", "Roberta", "XLMRoberta", "ModernBert"]
RAW = PoolingParams(task="score", use_activation=False)


def opened(folder, **tables):
    return LLM(config={"model": str(folder), **TABLE, **tables})


def same(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=1e-5)


def numbers(outputs):
    return [output.outputs for output in outputs]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder of a CrossEncoder, and the model of sentence-transformers."""
    folder = tmp_path_factory.mktemp("bert")
    return folder / "model", write_cross_encoder(folder, "Bert")


@pytest.mark.parametrize("family", nightly_but(FAMILIES, "XLMRoberta", "ModernBert"))
def test_scores_are_those_of_sentence_transformers(tmp_path, family):
    oracle = write_cross_encoder(tmp_path, family)
    firsts, seconds = zip(*PAIRS, strict=True)
    with opened(tmp_path / "model") as llm:
        assert llm.model.supported_tasks == ("classify", "score")
        outputs = llm.score(firsts, seconds)
        scores = numbers(outputs)
        same(scores, oracle.predict(PAIRS))
        assert np.ptp(scores) > 1e-3
        tokens = oracle.tokenizer(firsts, seconds)["input_ids"]
        assert [output.prompt_token_ids for output in outputs] == tokens
        one_with_all = oracle.predict([("which?", second) for second in seconds])
        same(numbers(llm.score("which?", seconds)), one_with_all)
        for (first, second), score in zip(PAIRS, scores, strict=True):  # alone, bit for bit
            assert numbers(llm.score(first, second)) == [score]
        mixed = [{"text": a, "text_pair": b} for a, b in PAIRS]
        classified = llm.classify([*mixed, "one text"])
        assert [float(output.outputs[0]) for output in classified[:-1]] == scores
        assert classified[-1].prompt_token_ids == oracle.tokenizer("one text")["input_ids"]


def test_the_order_of_texts_and_their_types_matter(bert):
    folder, oracle = bert
    with opened(folder) as llm:
        pair, turned = llm.score(["ab", "ba"], ["ba", "ab"])
        same([pair.outputs, turned.outputs], oracle.predict([("ab", "ba"), ("ba", "ab")]))
        assert abs(pair.outputs - turned.outputs) > 1e-4
        (ids,) = llm.classify(pair.prompt_token_ids)  # the same tokens, all of the first type
        assert abs(pair.outputs - ids.outputs[0]) > 1e-4


def test_a_process_of_its_own_gives_the_same_bits(bert):
    folder, _ = bert
    firsts, seconds = zip(*PAIRS, strict=True)
    with opened(folder) as llm:
        expected = numbers(llm.score(firsts, seconds))
    for tables in ({"engine": {"in_process": False}}, {"executor": {"use": "multiproc"}}):
        with opened(folder, **tables) as llm:
            assert numbers(llm.score(firsts, seconds)) == expected


ACTIVATIONS = {
    "sigmoid, the default": {},
    "none": {"activation_fn": "Identity"},
    "tanh": {"activation_fn": "Tanh"},
}


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_activations_of_folders(tmp_path, case):
    name = ACTIVATIONS[case].get("activation_fn")
    oracle = write_cross_encoder(
        tmp_path, "XLMRoberta", activation_fn=getattr(torch.nn, name)() if name else None
    )
    firsts, seconds = zip(*PAIRS, strict=True)
    logits = oracle.predict(PAIRS, activation_fn=torch.nn.Identity())
    with opened(tmp_path / "model") as llm:
        same(numbers(llm.score(firsts, seconds)), oracle.predict(PAIRS))
        same(numbers(llm.score(firsts, seconds, RAW)), logits)
        activated = PoolingParams(task="score", use_activation=True)
        expected = np.tanh(logits) if case == "tanh" else 1 / (1 + np.exp(-logits))
        same(numbers(llm.score(firsts, seconds, activated)), expected)


def test_older_settings_stand_in_config_json(tmp_path):
    oracle = write_cross_encoder(tmp_path, "Bert")
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (tmp_path / "model" / name).unlink()
    identity = "torch.nn.modules.linear.Identity"
    change(tmp_path / "model" / "config.json", sentence_transformers={"activation_fn": identity})
    expected = oracle.predict(PAIRS, activation_fn=torch.nn.Identity())
    with opened(tmp_path / "model") as llm:
        same(numbers(llm.score(*zip(*PAIRS, strict=True))), expected)


def test_several_classes_of_pairs(tmp_path):
    oracle = write_cross_encoder(tmp_path, "Bert", 3)
    pairs = [{"text": first, "text_pair": second} for first, second in PAIRS]
    with opened(tmp_path / "model") as llm:
        assert llm.model.supported_tasks == ("classify",)
        same(numbers(llm.classify(pairs)), oracle.predict(PAIRS))  # logits, as the folder has it
        activated = PoolingParams(task="classify", use_activation=True)
        softmax = oracle.predict(PAIRS, activation_fn=torch.nn.Identity(), apply_softmax=True)
        same(numbers(llm.classify(pairs, activated)), softmax)
        with pytest.raises(RequestError, match="score: this model cannot do it; it can: classify"):
            llm.score("a", "b")


def test_prompts_are_put_before_the_first_text(tmp_path):
    oracle = write_cross_encoder(
        tmp_path, "Roberta", prompts={"rank": "rank: "}, default_prompt_name="rank"
    )
    with opened(tmp_path / "model") as llm:
        (output,) = llm.score("ab", "ba")
        same(output.outputs, oracle.predict(("ab", "ba")))
        same(output.outputs, oracle.predict(("rank: ab", "ba"), prompt=""))


@pytest.mark.parametrize(
    ("limit", "family"),
    nightly_but(
        itertools.product((-1, LIMIT - 1, 9, 6), ("Bert", "Roberta")), (-1, "Bert"), (9, "Roberta")
    ),
)
def test_long_pairs_are_cut_as_sentence_transformers_does(tmp_path, family, limit):
    oracle = write_cross_encoder(tmp_path, family)
    oracle.tokenizer.model_max_length = LIMIT if limit == -1 else limit
    pairs = [TOO_LONG, TOO_LONG[::-1], ("a", TOO_LONG[1]), (TOO_LONG[0], "b"), ("a", "b")]
    firsts, seconds = zip(*pairs, strict=True)
    with opened(tmp_path / "model") as llm:
        outputs = llm.score(firsts, seconds, truncate_prompt_tokens=limit)
        same(numbers(outputs), oracle.predict(pairs))


WRONG = {
    "an embedding": (
        lambda llm: llm.encode({"text": "a", "text_pair": "b"}),
        "embed: this model cannot do it; it can: classify, score",
    ),
    "generation": (
        lambda llm: llm.generate({"text": "a", "text_pair": "b"}),
        "generate: this model cannot do it; it can: classify, score",
    ),
    "token ids": (
        lambda llm: llm.score("a", ["b", [1, 2]]),
        r"prompts\[1\]: text_pair: expected a text, got \[1, 2\]",
    ),
    "an empty text": (
        lambda llm: llm.score("", "b"),
        r"prompts\[0\]: text: expected a text that is not empty",
    ),
    "half a pair": (
        lambda llm: llm.classify({"text": "a"}),
        r"or a pair with 'text' and 'text_pair', got the keys \['text'\]",
    ),
    "one text for a score": (
        lambda llm: llm.encode(["a"], PoolingParams(task="score")),
        r"prompts\[0\]: prompt: expected a pair of texts, .* for the task \"score\"",
    ),
    "a number of texts": (
        lambda llm: llm.score(["a", "b"], ["c"] * 3),
        "texts_1: expected one text or 3, as texts_2 has, got 2",
    ),
    "dimensions": (
        lambda llm: llm.score("a", "b", PoolingParams(task="score", dimensions=2)),
        'dimensions: expected none for the task "score", got 2',
    ),
    "no room": (
        lambda llm: llm.score("a", "b", truncate_prompt_tokens=3),
        "truncate_prompt_tokens: expected more than 3, the special tokens of a pair, got 3",
    ),
    "another task": (
        lambda llm: llm.score("a", "b", PoolingParams()),
        "pooling_params.task: expected \"score\" in this call, got 'embed'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_pairs_are_one_error_each(bert, bert_engine, case):
    call, message = WRONG[case]
    with pytest.raises(RequestError, match=message):
        call(bert_engine)
    same(numbers(bert_engine.score(*PAIRS[1])), bert[1].predict([PAIRS[1]]))


@pytest.fixture(scope="module")
def bert_engine(bert):
    with opened(bert[0]) as llm:
        yield llm


def test_pairs_that_are_too_long_name_their_index(bert_engine):
    room = LIMIT - 3
    assert len(bert_engine.score("a", "b" * (room - 1))) == 1
    with pytest.raises(PromptTooLongError, match=rf"prompts\[1\]: .* {LIMIT + 1} tokens"):
        bert_engine.score("a", ["b", "b" * room])


def test_a_model_of_vectors_takes_no_pairs(tmp_path):
    write_encoder(tmp_path, "Bert")
    with opened(tmp_path) as llm:
        message = 'text_pair: expected one text for the task "embed", got a pair'
        with pytest.raises(RequestError, match=message):
            llm.embed({"text": "a", "text_pair": "b"})
        assert -1.0 <= llm.score("a", "b")[0].outputs <= 1.0


SETTINGS, READING = "config_sentence_transformers.json", "sentence_bert_config.json"
REFUSED = [
    (SETTINGS, {"activation_fn": "torch.nn.modules.activation.Mish"}, "activation_fn: expected Id"),
    (SETTINGS, {"keep_in_fp32_modules": ["0"]}, "keep_in_fp32_modules: expected none"),
    (READING, {"transformer_task": "text-generation"}, "transformer_task: expected .sequence-cla"),
    (READING, {"processing_kwargs": {"text": {}}}, "processing_kwargs: expected none"),
    (READING, {"modality_config": {"text": {}, "message": {}}}, "modality_config: expected text"),
    (
        "config.json",
        {"sbert_ce_default_activation_function": "os.system"},
        "expected Identity, Sig",
    ),
    (
        "modules.json",
        [{"type": "a.Transformer", "path": ""}, {"type": "b.LogitScore", "path": "1"}],
        "expected the module Transformer alone.* got Transformer, LogitScore",
    ),
]


@pytest.mark.parametrize(("file", "fields", "message"), REFUSED)
def test_folders_that_ask_for_more_are_refused_by_file_and_field(bert, file, fields, message):
    path = bert[0] / file
    before = path.read_text()
    settings = bert[0] / SETTINGS
    stated = settings.read_text()
    try:
        if file == "config.json":  # which the newer file overrides
            change(settings, activation_fn=None)
        if isinstance(fields, list):
            path.write_text(json.dumps(fields))
        else:
            change(path, **fields)
        with pytest.raises(ModelError, match=message):
            opened(bert[0])
    finally:
        path.write_text(before)
        settings.write_text(stated)


def test_types_of_tokens_are_only_for_models_that_have_them(tmp_path):
    write_classifier(tmp_path / "one", "Bert", type_vocab_size=1)
    model = write_classifier(tmp_path / "two", "Bert")
    assert model.config.type_vocab_size == 2
    with opened(tmp_path / "one") as llm:  # its table has no row for a second type
        (pair,) = llm.score("ab", "ba")
        (ids,) = llm.classify(pair.prompt_token_ids)
        assert pair.outputs == ids.outputs[0]


def test_requests_of_other_frontends_are_checked():
    def check(start, pooling, **model):
        request = EngineCoreRequest(
            request_id="a",
            prompt_token_ids=[1, 2, 3],
            params=SamplingParams(),
            pooling_params=pooling,
            second_type_start=start,
        )
        half = PooledResults("pooling", ["cls"], ModelPooling(labels=["a"], **model))
        assert selects(half, request)
        half.check(request)

    pooled = PoolingParams(task="score", pooler="cls")
    check(2, pooled, token_types=True)
    check(3, pooled)
    with pytest.raises(RequestError, match="second_type_start: expected 3, the length of the prom"):
        check(2, pooled)
    with pytest.raises(
        RequestError, match="second_type_start: expected none, because the request doe"
    ):
        check(3, None)
