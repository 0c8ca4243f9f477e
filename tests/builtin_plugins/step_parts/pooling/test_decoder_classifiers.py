"""Decoders with a head that classifies: the logits of transformers, also in chunks and cached."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.encoders import LIMIT, PROMPTS
from support.pairs import DECODERS, PAIRS, write_classifier, write_cross_encoder

from hardpoint import LLM, PoolingParams, RequestError

TABLE = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": LIMIT,
    "kv_cache": {"block_size": 4, "num_blocks": 60},
}
RAW = PoolingParams(task="classify", use_activation=False)


def opened(folder, **tables):
    return LLM(config={"model": str(folder), **TABLE, **tables})


def logits_of(model, prompt):
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].numpy()


def same(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", DECODERS)
def test_logits_are_those_of_transformers(tmp_path, family):
    model = write_classifier(tmp_path, family, 3)
    with opened(tmp_path) as llm:
        assert llm.model.supported_tasks == ("classify",)
        together = llm.classify(PROMPTS, RAW)
        for prompt, output in zip(PROMPTS, together, strict=True):
            same(output.outputs, logits_of(model, prompt))
        (alone,) = llm.classify(PROMPTS[-1])
        same(alone.outputs, torch.tensor(logits_of(model, PROMPTS[-1])).softmax(-1))
        with pytest.raises(RequestError, match="generate: this model cannot do it; it can: class"):
            llm.generate("a")


def test_chunks_caches_and_ranks_change_no_bit(tmp_path):
    model = write_classifier(tmp_path, "Qwen3", 3)
    same_start = [[*PROMPTS[-1][:20], *range(30, 30 + count)] for count in (1, 7, 20)]
    with opened(tmp_path) as llm:
        expected = [output.outputs for output in llm.classify(same_start, RAW)]
        again = [output.outputs for output in llm.classify(same_start, RAW)]
        np.testing.assert_array_equal(again, expected)
        for prompt, logits in zip(same_start, expected, strict=True):
            same(logits, logits_of(model, prompt))
    in_chunks = {"scheduler": {"max_num_batched_tokens": 8, "max_num_seqs": 4}}
    with opened(tmp_path, **in_chunks) as llm:
        same([output.outputs for output in llm.classify(same_start, RAW)], expected)
    ranks = {"executor": {"use": "multiproc"}, "parallel": {"pipeline": 2}}
    with opened(tmp_path, **ranks) as llm:
        same([output.outputs for output in llm.classify(same_start, RAW)], expected)


def test_pairs_are_scored_by_a_decoder(tmp_path):
    oracle = write_cross_encoder(tmp_path, "Qwen3")
    with opened(tmp_path / "model") as llm:
        assert llm.model.supported_tasks == ("classify", "score")
        scores = [output.outputs for output in llm.score(*zip(*PAIRS, strict=True))]
        same(scores, oracle.predict(PAIRS))
        (pair,) = llm.score("ab", "ba")
        (ids,) = llm.classify(pair.prompt_token_ids)  # which reads no types of tokens
        assert pair.outputs == ids.outputs[0]
