"""An EAGLE-3 head, trained for a minute on the demo model's outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.drafting_heads import write_head
from support.head_training import frequent_tokens, new_weights, read_examples, sizes_of, train

from hardpoint import LLM, SamplingParams

PROMPTS = [
    *("The history of", "In the morning", "Once upon a time", "Water is"),
    *("A good teacher", "The capital of France", "How to cook", "My favorite"),
]
PARAMS = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
CONFIG = {"dtype": "float32", "device": "cpu", "max_model_len": 256}
STEPS = 300


def generate(demo_gguf: Path, head: Path | None = None):
    """Return the texts of the prompts, and the share of accepted drafts."""
    config = dict(CONFIG)
    if head is not None:
        config["plugin"] = {"eagle3": {"model": str(head)}}
        table = {"use": ["eagle3"], "num_draft_tokens": 3, "adaptive": False}
        config["speculation"] = table
    with LLM(str(demo_gguf), config=config, progress=False) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        stats = llm.engines.scheduler_stats()
        assert not llm.plugins.health().fallbacks
    texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    return texts, stats.num_accepted_drafts / max(stats.num_drafts, 1)


@pytest.mark.nightly
def test_a_trained_head_drafts_far_better_than_a_random_one(demo_gguf, demo_model, tmp_path):
    texts, _ = generate(demo_gguf)
    sizes = sizes_of(demo_model)
    count = int(demo_model.context.config.hf["num_hidden_layers"])
    examples = read_examples(demo_model, texts, (1, count // 2 - 1, count - 4))
    weights = new_weights(sizes, frequent_tokens(texts, 1024))
    trained, share = train(sizes, weights, examples, steps=STEPS)
    assert share > 0.8
    accepted, vocab_size = {}, demo_model.context.config.vocab_size
    for name, tensors in (("random", weights), ("trained", trained)):
        fields = {"hidden_size": sizes.hidden_size, "intermediate_size": sizes.intermediate_size}
        fields |= {"num_attention_heads": sizes.num_attention_heads, "vocab_size": vocab_size}
        fields |= {"num_key_value_heads": sizes.num_key_value_heads}
        write_head(tmp_path / name, tensors, fields | {"max_position_embeddings": 2048})
        tokens, accepted[name] = generate(demo_gguf, tmp_path / name)
        assert tokens == texts
    assert accepted["random"] < 0.02
    assert accepted["trained"] > 0.3
