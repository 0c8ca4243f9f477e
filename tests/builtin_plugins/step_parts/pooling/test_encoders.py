"""Models that attend in both directions: the hidden states of transformers, at every length."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from support.cases import nightly_but
from support.encoders import FAMILIES, LIMIT, PROMPTS, TABLE, write_encoder

from hardpoint import LLM, ConfigError, ModelError, PoolingParams, RequestError
from hardpoint.testing import write_scripted_model

RAW = PoolingParams(task="token_embed", normalize=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    by_family = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        by_family[family] = folder, write_encoder(folder, family)
    return by_family


def opened(folder, **tables):
    return LLM(config={"model": str(folder), **TABLE, **tables})


def hidden_states(model, prompt):
    with torch.inference_mode():
        return model(torch.tensor([prompt])).last_hidden_state[0].numpy()


@pytest.mark.parametrize(
    ("family", "backend"),
    nightly_but(
        itertools.product(FAMILIES, ("auto", "torch")),
        *((family, "auto") for family in FAMILIES),
        ("ModernBert", "torch"),
    ),
)
def test_hidden_states_are_those_of_transformers(models, family, backend):
    folder, model = models[family]
    with opened(folder, backend=backend) as llm:
        assert llm.config.max_model_len == LIMIT
        assert llm.model.supported_tasks == ("embed", "token_embed")
        for output, prompt in zip(llm.encode(PROMPTS, RAW), PROMPTS, strict=True):
            expected = hidden_states(model, prompt)
            np.testing.assert_allclose(output.outputs, expected, atol=1e-5, rtol=1e-5)


def test_a_scaling_of_rope_changes_both_types_of_layers(tmp_path):
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    model = write_encoder(tmp_path, "ModernBert", **scaling)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["rope_parameters"]
    path.write_text(json.dumps(fields | scaling))
    with opened(tmp_path, max_model_len=LIMIT) as llm:
        (output,) = llm.encode(PROMPTS[-1], RAW)
    expected = hidden_states(model, PROMPTS[-1])
    np.testing.assert_allclose(output.outputs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_a_batch_have_the_bits_that_they_have_alone(models, family):
    folder, _ = models[family]
    with opened(folder) as llm:
        together = llm.encode(PROMPTS * 3, RAW)
        for output in together:
            (alone,) = llm.encode(output.prompt_token_ids, RAW)
            np.testing.assert_array_equal(output.outputs, alone.outputs)
        vectors = {
            name: llm.embed(PROMPTS, PoolingParams(pooler=name, normalize=False))
            for name in ("cls", "mean", "last")
        }
        for index, output in enumerate(together[: len(PROMPTS)]):
            pooled = {name: outputs[index].outputs for name, outputs in vectors.items()}
            np.testing.assert_array_equal(pooled["cls"], output.outputs[0])
            np.testing.assert_array_equal(pooled["last"], output.outputs[-1])
            np.testing.assert_allclose(pooled["mean"], output.outputs.mean(0), atol=1e-6)
        default = llm.embed(PROMPTS[4], PoolingParams(normalize=False))[0].outputs
        np.testing.assert_array_equal(default, vectors["cls"][4].outputs)


def test_every_length_up_to_the_limit(models):
    folder, model = models["XLMRoberta"]
    with opened(folder, engine={"in_process": False}) as llm:
        prompts = [[5] * length for length in range(1, LIMIT + 1)]
        for output in llm.encode(prompts, RAW):
            expected = hidden_states(model, output.prompt_token_ids)
            np.testing.assert_allclose(output.outputs, expected, atol=1e-5, rtol=1e-5)
        with pytest.raises(RequestError, match=f"too long: {LIMIT + 1} tokens"):
            llm.embed([5] * (LIMIT + 1))


def test_padding_whose_token_is_the_first_one(tmp_path):
    model = write_encoder(tmp_path, "Roberta", pad_token_id=0)
    with opened(tmp_path) as llm:
        longest = [[5] * (LIMIT + 1)]
        for output in llm.encode([*PROMPTS, *longest], RAW):
            expected = hidden_states(model, output.prompt_token_ids)
            np.testing.assert_allclose(output.outputs, expected, atol=1e-5, rtol=1e-5)


def test_generating_is_refused_and_longer_steps_are_explained(models):
    folder, _ = models["Bert"]
    with opened(folder) as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(RequestError, match="generate: this model cannot do it; it can: em"):
                call("a")
    scheduler = {"max_num_batched_tokens": LIMIT - 1, "max_num_seqs": 8}
    message = "has no KV cache, so that a prompt is computed in one step: scheduler.max_num_batched"
    with pytest.raises(ConfigError, match=message):
        opened(folder, scheduler=scheduler)


def test_a_folder_of_sentence_transformers(tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from transformers import BertTokenizer

    plain = tmp_path / "plain"
    write_encoder(plain, "Bert", pad_token_id=0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters)]
    for path in [*plain.glob("token*"), *plain.glob("*.jinja")]:
        path.unlink()
    vocabulary = {word: index for index, word in enumerate(words)}
    BertTokenizer(vocab=vocabulary).save_pretrained(plain)
    parts = [modules.Transformer(str(plain)), modules.Pooling(64, "mean"), modules.Normalize()]
    oracle = SentenceTransformer(modules=parts, device="cpu").eval()
    oracle.save(str(tmp_path / "model"))
    texts = ["a", "some text", "x" * (LIMIT - 2), "another text", "?"]
    with opened(tmp_path / "model") as llm:
        embeddings = [output.outputs for output in llm.embed(texts)]
        np.testing.assert_allclose(embeddings, oracle.encode(texts), atol=1e-5, rtol=1e-5)


WRONG = [
    ("Bert", {"hidden_act": "swish2"}, "hidden_act: expected one of gelu"),
    ("Bert", {"num_attention_heads": 5}, "num_attention_heads: expected a divisor of hidden_size"),
    ("Bert", {"position_embedding_type": "relative_key"}, 'type: expected "absolute"'),
    ("Bert", {"is_decoder": True}, "is_decoder: expected false"),
    ("ModernBert", {"layer_types": ["full_attention"]}, "layer_types: expected 3 of"),
    ("ModernBert", {"hidden_activation": 3}, "hidden_activation: expected one of gelu"),
]


@pytest.mark.parametrize(("family", "fields", "message"), WRONG)
def test_configs_that_are_not_supported_are_refused_by_field(
    models, tmp_path, family, fields, message
):
    folder, _ = models[family]
    config = json.loads((folder / "config.json").read_text())
    write_scripted_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ModelError, match=message):
        opened(tmp_path, load={"use": "dummy"})
