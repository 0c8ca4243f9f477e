"""Encoders without a plugin of their own: hidden states and classes of transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.adapters import lora, write_adapter
from support.cases import nightly_but
from support.encoders import LIMIT, PROMPTS, SIZES, TABLE, write_encoder
from support.pairs import PAIRS, write_cross_encoder

from hardpoint import LLM, ModelError, PoolingParams
from hardpoint.cli import main

RAW = PoolingParams(task="token_embed", normalize=False)
CLASSES = {"id2label": {0: "no", 1: "perhaps", 2: "yes"}}
STEP = "scheduler.max_num_batched_tokens=64"
DISTIL = {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4}
ESM = {"token_dropout": True, "position_embedding_type": "rotary"}
FAMILIES = {
    "DistilBert": DISTIL,
    "Electra": {"embedding_size": 32},
    "Albert": {"embedding_size": 32},  # one layer, several times
    "Camembert": {"max_position_embeddings": LIMIT + 2},  # from the position after padding on
    "ModernBert": {"local_attention": 8},  # windows in both directions
    "Esm": ESM | {"mask_token_id": PROMPTS[5][1]},  # one prompt after another, as the next
    "MobileBert": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
}
REFUSED = {
    "DebertaV2Model": "attention of DebertaV2Model does not call the attention interface",
    "DebertaV2ForSequenceClassification": "attention of DebertaV2Model does not call",
    "MPNetModel": r"adds biases of positions to its scores \(position_bias\), so that it c",
    "FNetModel": "has 3 layers, of which 0 call the attention interface of transformers; encoder",
    "LayoutLMModel": r"layer\.0\.attention\.self: attention_mask: made by the model itself",
    "EuroBertForSequenceClassification": r"its head reads \[1, 3, 64\] of .* is 'late': expected",
    "BartModel": "is_encoder_decoder: expected false, got true",
    "NeoMMEModel": "has inputs besides text, as no encoder here has",
}


def write(folder, family, head="Model", **fields):
    settings = {"max_position_embeddings": LIMIT} | FAMILIES[family] | fields
    return write_encoder(folder, family, head, **settings)


def opened(folder, use="auto", **tables):
    return LLM(config={"model": str(folder), "models": {"use": use}, **TABLE, **tables})


def use_of(family):
    return "transformers" if family == "ModernBert" else "auto"


def same(actual, expected):
    largest = float(np.abs(expected).max())  # about 1e5 of MobileBERT's
    np.testing.assert_allclose(actual, expected, atol=1e-5 * max(1.0, largest), rtol=1e-5)


@pytest.mark.parametrize("family", nightly_but(FAMILIES, "Electra", "Esm", "MobileBert"))
def test_hidden_states_are_those_of_transformers_alone_and_in_batches(tmp_path, family):
    model = write(tmp_path, family)
    with opened(tmp_path, use_of(family)) as llm, torch.inference_mode():
        assert llm.config.max_model_len == LIMIT
        assert llm.model.supported_tasks == ("embed", "token_embed")
        for output in llm.encode(PROMPTS * 2, RAW):
            prompt = output.prompt_token_ids
            same(output.outputs, model(torch.tensor([prompt])).last_hidden_state[0].numpy())
            same(llm.encode(prompt, RAW)[0].outputs, output.outputs)
        vectors = llm.embed(PROMPTS, PoolingParams(normalize=False))
        for vector, tokens in zip(vectors, llm.encode(PROMPTS, RAW), strict=True):
            same(vector.outputs, tokens.outputs[0])  # "cls", by default


@pytest.mark.parametrize("family", nightly_but(FAMILIES, "DistilBert", "ModernBert"))
def test_classes_are_those_of_transformers_alone_and_in_batches(tmp_path, family):
    model = write(tmp_path, family, "ForSequenceClassification", **CLASSES)
    raw = PoolingParams(task="classify", use_activation=False)
    with opened(tmp_path, use_of(family)) as llm, torch.inference_mode():
        assert llm.model.supported_tasks == ("classify",)
        both = zip(llm.classify(PROMPTS, raw), llm.classify(PROMPTS), strict=True)
        for output, probabilities in both:
            prompt = output.prompt_token_ids
            expected = model(torch.tensor([prompt])).logits[0]
            same(output.outputs, expected.numpy())
            same(probabilities.outputs, expected.softmax(-1).numpy())
            same(llm.classify(prompt, raw)[0].outputs, output.outputs)


def test_a_head_may_read_the_mean(tmp_path):
    fields = CLASSES | {"classifier_pooling": "mean"}
    model = write(tmp_path, "ModernBert", "ForSequenceClassification", **fields)
    with opened(tmp_path, "transformers") as llm, torch.inference_mode():
        for output in llm.classify(PROMPTS):
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0]
            same(output.outputs, logits.softmax(-1).numpy())


def test_pairs_have_types_of_tokens(tmp_path):
    oracle = write_cross_encoder(tmp_path, "Bert")
    with opened(tmp_path / "model", "transformers") as llm:
        outputs = llm.score(*map(list, zip(*PAIRS, strict=True)))
        same([output.outputs for output in outputs], oracle.predict(PAIRS))
        (ids,) = llm.classify(outputs[1].prompt_token_ids)  # all of the first type
        assert abs(outputs[1].outputs - ids.outputs[0]) > 1e-4


ADAPTED = {
    "DistilBert": ["q_lin", "v_lin", "lin1"],
    "Bert": ["query", "value", "output.dense"],
    "ModernBert": ["Wqkv", "Wo"],
}
"""Layers that adapters change, by family; the second one runs natively."""


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_change_the_prompts_that_name_them(tmp_path, family):
    folder = tmp_path / "model"
    fields = {"max_position_embeddings": LIMIT} | FAMILIES.get(family, {})
    model = write_encoder(folder, family, **fields)
    layers = {"target_modules": ADAPTED[family]}
    merged = write_adapter(tmp_path / "adapter", model, size=0.1, **layers)
    adapter = lora("a", 1, tmp_path / "adapter")
    chosen = [adapter if index % 2 else None for index in range(len(PROMPTS))]
    with opened(folder, adapters={"max_loras": 1}) as llm, torch.inference_mode():
        outputs = llm.encode(PROMPTS, RAW, lora_request=chosen)
        for output, lora_request in zip(outputs, chosen, strict=True):
            reference = model if lora_request is None else merged
            ids = torch.tensor([output.prompt_token_ids])
            same(output.outputs, reference(ids).last_hidden_state[0].numpy())


def test_matrices_of_few_bits_are_near(tmp_path):
    write(tmp_path, "DistilBert")
    embeddings = []
    for use in ("none", "int8"):
        with opened(tmp_path, quantization={"use": use}) as llm:
            embeddings.append(np.stack([o.outputs for o in llm.embed(PROMPTS)]))
    assert 1e-6 < np.abs(embeddings[0] - embeddings[1]).max() < 0.05


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_name_before_weights_are_read(tmp_path, name):
    import transformers

    config = getattr(transformers, name).config_class(**SIZES, max_position_embeddings=LIMIT)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=REFUSED[name]):
        opened(tmp_path, load={"use": "outline"}, tokenizer={"use": "none"}, max_model_len=LIMIT)


def test_a_table_without_the_last_position_is_refused(tmp_path):
    write(tmp_path, "Esm", position_embedding_type="absolute", token_dropout=False)
    message = f"has no row for the position {LIMIT + 1} of the last token: expected a smaller max_m"
    with pytest.raises(ModelError, match=message):
        opened(tmp_path)
    with opened(tmp_path, max_model_len=LIMIT - 2) as llm:
        assert len(llm.embed(PROMPTS[3])) == 1


def test_a_head_that_reads_something_besides_is_found_when_weights_are_loaded(
    tmp_path, monkeypatch
):
    from transformers.models.electra.modeling_electra import ElectraClassificationHead

    forward = ElectraClassificationHead.forward

    def longer(self, features, **kwargs):
        return forward(self, features, **kwargs) * features.shape[1]

    write(tmp_path, "Electra", "ForSequenceClassification", **CLASSES)
    monkeypatch.setattr(ElectraClassificationHead, "forward", longer)
    message = "the logits of its classes differ from transformers by .* its head reads som"
    with pytest.raises(ModelError, match=message):
        opened(tmp_path)


def test_models_lists_the_plugin_of_an_encoder(tmp_path, capsys):
    for head, plugin in (("Model", "encoder"), ("ForSequenceClassification", "classifier")):
        folder = tmp_path / plugin
        write(folder, "DistilBert", head)
        assert main(["models", str(folder), "--json", "--set", STEP]) == 0
        assert json.loads(capsys.readouterr().out)["implementation"] == f"transformers_{plugin}"
        assert main(["models", str(folder), "--set", STEP]) == 0
        text = f"by the plugin transformers_{plugin}: it has no plugin of its own, or models.use\n"
        assert text in capsys.readouterr().out
