"""Folders of sentence-transformers: the same vectors as its own, or an error by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.builtins.checkpoint_harness import random_model
from support.cases import nightly_but

from hardpoint import LLM, ModelError, PoolingParams, RequestError
from hardpoint.testing import write_scripted_model

LIMIT = 48
TEXTS = ["a", "some text", "another one", "x" * LIMIT, "longer: " + "abc " * 9]
PROMPTS = {"query": "find: ", "document": ""}
TABLE = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": LIMIT,
    "kv_cache": {"block_size": 8, "num_blocks": 60},
}


def write_folder(folder, family="Llama", pooling="mean", dense=(), normalize=True, **config):
    """Write a folder; return the model of sentence-transformers.

    Args:
        dense: size and activation of each layer after the pooling.
        config: fields of `config.json`.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    model = random_model(family, max_position_embeddings=LIMIT, vocab_size=261).model
    plain = folder / "plain"
    write_scripted_model(plain)
    model.save_pretrained(plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = json.loads((plain / "tokenizer_config.json").read_text())
    tokenizer.pop("chat_template", None)
    tokenizer["pad_token"] = tokenizer["eos_token"]
    (plain / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    parts = [modules.Transformer(str(plain)), modules.Pooling(64, pooling)]
    size = 64
    torch.manual_seed(5)
    for out, activation in dense:
        parts.append(modules.Dense(size, out, activation_function=activation))
        size = out
    if normalize:
        parts.append(modules.Normalize())
    made = SentenceTransformer(modules=parts, prompts=PROMPTS, device="cpu").eval()
    made.save(str(folder / "model"))
    change(folder / "model" / "config.json", **config)
    return made


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def opened(folder, **tables):
    return LLM(config={"model": str(folder / "model"), **TABLE, **tables})


def same(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=1e-5)


CASES = {
    "mean": {"pooling": "mean"},
    "cls": {"pooling": "cls"},
    "last token": {"pooling": "lasttoken"},
    "not scaled": {"normalize": False},
    "a dense layer": {"dense": [(32, torch.nn.Tanh())]},
    "two dense layers": {
        "dense": [(96, torch.nn.GELU()), (16, torch.nn.Identity())],
        "pooling": "lasttoken",
    },
    "Qwen3": {"family": "Qwen3", "pooling": "lasttoken"},
    "Qwen2": {"family": "Qwen2"},
    "Mistral": {"family": "Mistral", "sliding_window": None},
}


@pytest.mark.parametrize(
    "case", nightly_but(CASES, "cls", "not scaled", "two dense layers", "Qwen3")
)
def test_vectors_are_those_of_sentence_transformers(tmp_path, case):
    oracle = write_folder(tmp_path, **CASES[case])
    expected = oracle.encode(TEXTS, convert_to_numpy=True)
    with opened(tmp_path) as llm:
        assert llm.model.supported_tasks == ("embed", "token_embed")
        embeddings = [output.outputs for output in llm.embed(TEXTS)]
        same(embeddings, expected)
        query = oracle.encode("some text", prompt_name="query")
        same(llm.embed("some text", prompt_name="query")[0].outputs, query)
        tokens = oracle.encode("some text", output_value="token_embeddings")
        raw = PoolingParams(task="token_embed", normalize=False)
        same(llm.encode("some text", raw)[0].outputs, tokens.numpy())
        with pytest.raises(RequestError, match="generate: this model cannot do it; it can: embed"):
            llm.generate("a")


def test_an_engine_process_and_ranks_give_the_same(tmp_path):
    oracle = write_folder(tmp_path, dense=[(32, torch.nn.Tanh())])
    expected = oracle.encode(TEXTS)
    for tables in (
        {"engine": {"in_process": False}},
        {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}},
        {"executor": {"use": "multiproc"}, "parallel": {"pipeline": 2}},
    ):
        with opened(tmp_path, **tables) as llm:
            same([output.outputs for output in llm.embed(TEXTS)], expected)


def test_vectors_are_cut_and_then_scaled(tmp_path):
    oracle = write_folder(tmp_path, matryoshka_dimensions=[8, 32])
    with opened(tmp_path) as llm:
        for size in (8, 32):
            expected = oracle.encode(TEXTS, truncate_dim=size)
            expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
            outputs = llm.embed(TEXTS, PoolingParams(dimensions=size))
            same([output.outputs for output in outputs], expected)
        with pytest.raises(RequestError, match="dimensions: expected one of 8, 32, for which the"):
            llm.embed("a", PoolingParams(dimensions=16))
    change(tmp_path / "model" / "config.json", matryoshka_dimensions=None, is_matryoshka=True)
    with opened(tmp_path) as llm:
        assert llm.embed("a", PoolingParams(dimensions=5))[0].outputs.shape == (5,)
        with pytest.raises(RequestError, match="dimensions: expected at most 64, got 65"):
            llm.embed("a", PoolingParams(dimensions=65))
    change(tmp_path / "model" / "config.json", is_matryoshka=False)
    with (
        opened(tmp_path) as llm,
        pytest.raises(RequestError, match="was not trained for shortened"),
    ):
        llm.embed("a", PoolingParams(dimensions=5))
    stated = {"pooling": {"matryoshka_dimensions": [5]}}
    with opened(tmp_path, plugin=stated) as llm:
        assert llm.embed("a", PoolingParams(dimensions=5))[0].outputs.shape == (5,)


def test_prompts_and_what_the_part_states(tmp_path):
    oracle = write_folder(tmp_path)
    path = tmp_path / "model" / "config_sentence_transformers.json"
    change(path, default_prompt_name="query")
    with opened(tmp_path) as llm:
        same(llm.embed("a")[0].outputs, oracle.encode("a", prompt_name="query"))
        same(llm.embed("a", prompt_name="document")[0].outputs, oracle.encode("a"))
        ids = llm.tokenizer.encode("a")
        same(llm.embed(ids)[0].outputs, oracle.encode("a"))
        described = llm.plugins.call_part("pooling", "describe")
        assert described == {
            "pooler": "mean",
            "normalize": True,
            "dimensions": 64,
            "matryoshka_dimensions": [],
            "prompts": PROMPTS,
            "default_prompt": "query",
            "labels": [],
        }
        with pytest.raises(RequestError, match="prompt_name: expected one of document, query, got"):
            llm.embed("a", prompt_name="que")
        with pytest.raises(RequestError, match="method: expected .describe. or .prompt., got 'x'"):
            llm.plugins.call_part("pooling", "x")


def test_older_configurations(tmp_path):
    oracle = write_folder(tmp_path, pooling="lasttoken")
    flags = {
        "word_embedding_dimension": 64,
        "pooling_mode_cls_token": False,
        "pooling_mode_lasttoken": True,
    }
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    with opened(tmp_path) as llm:
        same([output.outputs for output in llm.embed(TEXTS)], oracle.encode(TEXTS))


POOLING, MODULES, DENSE = "1_Pooling/config.json", "modules.json", "2_Dense/config.json"
PROMPTS_FILE = "config_sentence_transformers.json"
WRONG = [
    (POOLING, {"pooling_mode": "max"}, "pooling_mode: expected one of mean, cls, lasttoken, got"),
    (POOLING, {"pooling_mode": ["mean", "cls"]}, "pooling_mode: expected one of mean, cls"),
    (POOLING, {"include_prompt": False}, "include_prompt: expected true"),
    (POOLING, "{", "cannot be read"),
    (DENSE, {"activation_function": "torch.nn.modules.activation.Mish"}, "got .Mish"),
    (DENSE, {"activation_function": "os.system"}, "activation_function: expected one of Identity"),
    (DENSE, {"in_features": 63}, "in_features: expected 64, the size of its input, got 63"),
    (DENSE, {"out_features": 31}, "expected tensors of the shapes"),
    (DENSE, {"module_input_name": "token_embeddings"}, "module_input_name: expected"),
    (PROMPTS_FILE, {"prompts": {"query": 1}}, "prompts: expected texts by name"),
    (PROMPTS_FILE, {"default_prompt_name": "no"}, "default_prompt_name: expected one of doc"),
    (MODULES, "{}", "expected a list"),
    (MODULES, '[{"type": "a.Transformer", "path": ""}]', "expected the modules Transformer"),
    (MODULES, '[{"path": ""}]', "type: is missing"),
    (
        MODULES,
        '[{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "../../other"}]',
        "is outside",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    write_folder(folder, dense=[(32, torch.nn.Tanh())])
    return folder


@pytest.mark.parametrize(("file", "fields", "message"), WRONG)
def test_what_is_not_supported_is_refused_by_file_and_field(dense_folder, file, fields, message):
    path = dense_folder / "model" / file
    before = path.read_text()
    try:
        if isinstance(fields, str):
            path.write_text(fields)
        else:
            change(path, **fields)
        with pytest.raises(ModelError, match=message):
            opened(dense_folder)
    finally:
        path.write_text(before)


def test_weights_that_are_pickles_are_not_read(dense_folder):
    path = dense_folder / "model" / "2_Dense" / "model.safetensors"
    hidden = path.rename(path.with_suffix(".bin"))
    try:
        with pytest.raises(ModelError, match="expected the weights of the layer in model.safetens"):
            opened(dense_folder)
    finally:
        hidden.rename(path)
