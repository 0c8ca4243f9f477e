"""Models with a head that classifies: the logits and probabilities of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cases import nightly_but
from support.encoders import FAMILIES, LIMIT, PROMPTS, TABLE, write_encoder
from support.http_server import running

from hardpoint import LLM, AsyncLLM, PoolingParams, RequestError

LABELS = {0: "no", 1: "perhaps", 2: "yes"}


def write(folder, family, labels=LABELS, **fields):
    """Write a random classifier; return the model of transformers."""
    return write_encoder(folder, family, "ForSequenceClassification", id2label=labels, **fields)


def logits_of(model, prompt):
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


def opened(folder, **tables):
    return LLM(config={"model": str(folder), **TABLE, **tables})


CASES = {
    **{family: (family, {}) for family in FAMILIES},
    "ModernBert of the mean": ("ModernBert", {"classifier_pooling": "mean"}),
    "ModernBert with biases": ("ModernBert", {"classifier_bias": True, "norm_bias": True}),
}


@pytest.mark.parametrize("case", nightly_but(CASES, "Bert", "XLMRoberta", "ModernBert with biases"))
def test_probabilities_and_logits_are_those_of_transformers(tmp_path, case):
    family, fields = CASES[case]
    model = write(tmp_path, family, **fields)
    with opened(tmp_path) as llm:
        assert llm.model.supported_tasks == ("classify",)
        raw = PoolingParams(task="classify", use_activation=False)
        both = zip(PROMPTS, llm.classify(PROMPTS), llm.classify(PROMPTS, raw), strict=True)
        for prompt, probabilities, logits in both:
            expected = logits_of(model, prompt)
            np.testing.assert_allclose(logits.outputs, expected, atol=1e-5, rtol=1e-5)
            softmax = expected.softmax(-1)
            np.testing.assert_allclose(probabilities.outputs, softmax, atol=1e-5)
            (alone,) = llm.classify(prompt)
            np.testing.assert_array_equal(alone.outputs, probabilities.outputs)
        assert llm.plugins.call_part("pooling", "describe")["labels"] == list(LABELS.values())
        with pytest.raises(RequestError, match="embed: this model cannot do it; it can: classify"):
            llm.embed("a")
        with pytest.raises(RequestError, match="generate: this model cannot do it"):
            llm.generate("a")
        with pytest.raises(RequestError, match='dimensions: expected none for the task "classify"'):
            llm.classify("a", PoolingParams(task="classify", dimensions=2))


ACTIVATIONS = {
    "one class": ({0: "good"}, {}, torch.sigmoid),
    "classes that do not exclude each other": (
        LABELS,
        {"problem_type": "multi_label_classification"},
        torch.sigmoid,
    ),
    "a cross-encoder without an activation": (
        {0: "good"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        lambda logits: logits,
    ),
    "an older one": (
        {0: "good"},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        lambda logits: logits,
    ),
}


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_activations(tmp_path, case):
    labels, fields, activation = ACTIVATIONS[case]
    model = write(tmp_path, "XLMRoberta", labels, **fields)
    with opened(tmp_path) as llm:
        for output in llm.classify(PROMPTS):
            expected = activation(logits_of(model, output.prompt_token_ids))
            np.testing.assert_allclose(output.outputs, expected, atol=1e-5)


def test_over_http(tmp_path):
    model = write(tmp_path, "Bert")
    config = {"model": str(tmp_path), **TABLE, "stats": {"sinks": []}}
    config["server"] = {"port": 0, "access_log": "off"}
    with running(AsyncLLM(config=config)) as server:
        response = server.post("/v1/classify", {"input": PROMPTS[1:]})
        assert response.status_code == 200, response.text
        answer = response.json()
        for entry, prompt in zip(answer["data"], PROMPTS[1:], strict=True):
            expected = logits_of(model, prompt).softmax(-1)
            np.testing.assert_allclose(entry["probs"], expected, atol=1e-5)
            assert entry["label"] == LABELS[int(expected.argmax())]
            assert entry["num_classes"] == 3
        assert answer["usage"]["total_tokens"] == sum(map(len, PROMPTS[1:]))
        too_long = server.post("/v1/classify", {"input": [[5], [5] * (LIMIT + 1)]})
        assert "input[1]: the prompt is too long" in too_long.json()["error"]["message"]
        wrong = server.post("/v1/embeddings", {"input": "a"})
        assert "embed: this model cannot do it; it can: classify" in wrong.text
