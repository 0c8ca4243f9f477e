"""With a model of several layers, loaded blocks give the same tokens."""

import json
import time
from contextlib import contextmanager

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.testing import write_scripted_model

PROMPT = "The quick brown fox jumps over the lazy dog. " * 3
LAYERS = 3
WHOLE = 128  # tokens of the prompt in whole blocks, without the last one


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Llama of random weights."""
    folder = write_scripted_model(tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def answering(model, path):
    """Yield a function that gives the tokens of the prompt, and how many of its own were cached."""
    config = {"dtype": "float32", "load": {"use": "dummy"}, "kv_cache": {"num_blocks": 64}}
    if path is not None:
        config["kv_connector"] = {"use": "acme_kv_connector:LayeredFiles"}
        config["plugin"] = {"layered_files": {"path": str(path)}}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(str(model), config=config) as llm:

        def answer(*prompts):
            llm.reset_prefix_cache()
            output = llm.generate(list(prompts) or [PROMPT], params)[0]
            return output.outputs[0].token_ids, output.num_cached_tokens

        yield answer
        assert not llm.plugins.health().fallbacks


def until_loaded(answer, expected):
    """Ask until all blocks are loaded, which threads write; every answer is right."""
    for _ in range(100):
        tokens, cached = answer()
        assert tokens == expected
        if cached == WHOLE:
            return
        time.sleep(0.02)
    pytest.fail(f"{cached} tokens were loaded, expected {WHOLE}")


@pytest.fixture(scope="module")
def expected(model):
    """The tokens without a connector."""
    with answering(model, None) as answer:
        return answer()[0]


def test_loaded_blocks_give_the_same_tokens(model, expected, tmp_path):
    with answering(model, tmp_path) as answer:
        assert answer() == (expected, 0)
        until_loaded(answer, expected)
    with answering(model, tmp_path) as answer:  # close has written them all
        assert answer() == (expected, WHOLE)


def test_equal_blocks_of_one_step_are_kept_once(model, expected, tmp_path):
    with answering(model, tmp_path) as answer:
        answer(PROMPT[:WHOLE], PROMPT[:WHOLE])
    with answering(model, tmp_path) as answer:
        assert answer() == (expected, WHOLE)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_damaged_layer_is_computed(model, expected, tmp_path, layer):
    with answering(model, tmp_path) as answer:
        until_loaded(answer, expected)
    for path in tmp_path.iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) * layer // LAYERS + 40] ^= 1
        path.write_bytes(content)
    with answering(model, tmp_path) as answer:
        assert answer() == (expected, 0)
        until_loaded(answer, expected)
