"""Engines with both plugins: exits change tokens as configured, drafts change none."""

from __future__ import annotations

import json

import pytest

from hardpoint import LLM, ConfigError, SamplingParams

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPTS = [[1, 2, 3], list(range(4, 40)), [9] * 11, [5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model, which the loader `dummy` fills with numbers."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return str(folder)


def opened(folder, **tables):
    config = {"load": {"use": "dummy"}, "tokenizer": {"use": "none"}, "dtype": "float32", **tables}
    return LLM(folder, config=config, max_model_len=128)


def tokens_of(llm, *, with_exits=False, **arguments):
    plugin_args = {"confidence_exit": arguments} if with_exits else {}
    params = [
        SamplingParams(
            max_tokens=20,
            ignore_eos=True,
            detokenize=False,
            temperature=t,
            seed=3,
            plugin_args=plugin_args,
        )
        for t in (0.0, 0.7, 1.0, 0.0)
    ]
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def plain(folder):
    with opened(folder) as llm:
        return tokens_of(llm)


def test_confident_tokens_leave(folder, plain):
    with opened(folder, plugins={"enable": ["confidence_exit"]}) as llm:
        assert tokens_of(llm) == plain
        assert tokens_of(llm, with_exits=True, layers=[0, 2], threshold=1.1) == plain
        left = tokens_of(llm, with_exits=True, layers=[0], threshold=0.0)
        later = tokens_of(llm, with_exits=True, layers=[2], threshold=0.0)
    assert [tokens[0] for tokens in left] == [tokens[0] for tokens in plain]  # of the prompt
    assert plain != left != later != plain


@pytest.mark.parametrize("num_layers", [1, 3, 4])
def test_drafts_change_no_token(folder, plain, num_layers):
    with opened(
        folder,
        speculation={"use": ["self_speculation"], "adaptive": False},
        plugin={"self_speculation": {"num_layers": num_layers}},
    ) as llm:
        assert tokens_of(llm) == plain
        stats = llm.engines.scheduler_stats()
        assert stats.num_drafts > 0
        if num_layers == 4:
            assert stats.num_accepted_drafts == stats.num_drafts
        llm.sleep(1)
        llm.wake_up()
        assert tokens_of(llm) == plain


def test_drafts_of_requests_with_exits(folder):
    tables = {"plugins": {"enable": ["confidence_exit"]}}
    drafts = {
        "speculation": {"use": ["self_speculation"], "adaptive": False},
        "plugin": {"self_speculation": {"num_layers": 2}},
    }
    arguments = {"with_exits": True, "layers": [0, 2], "threshold": 0.02}
    with opened(folder, **tables) as llm:
        expected = tokens_of(llm, **arguments)
    with opened(folder, **tables, **drafts) as llm:
        assert tokens_of(llm, **arguments) == expected
        assert llm.engines.scheduler_stats().num_drafts > 0


def test_more_layers_than_the_model_has_are_refused(folder):
    with pytest.raises(ConfigError, match=r"plugin\.self_speculation.num_layers: expected 1\.\.4"):
        opened(
            folder,
            speculation={"use": ["self_speculation"]},
            plugin={"self_speculation": {"num_layers": 5}},
        )


def test_ranks_that_share_the_output_layer_are_refused(folder):
    tables = {"executor": {"use": "multiproc"}, "parallel": {"tensor": 2}}
    with pytest.raises(ConfigError, match="confidence_exit: expected a model on one rank"):
        opened(folder, plugins={"enable": ["confidence_exit"]}, **tables)


def test_exits_that_keys_do_not_show_share_no_blocks(folder):
    prompt = [7, 9, 11, 13] * 16
    with opened(folder, plugins={"enable": ["confidence_exit"]}) as llm:

        def cached(**arguments):
            plugin_args = {"confidence_exit": arguments} if arguments else {}
            params = SamplingParams(max_tokens=1, detokenize=False, plugin_args=plugin_args)
            (output,) = llm.generate([prompt], params)
            return output.num_cached_tokens

        assert cached() == 0
        assert cached(layers=[0]) == 0
        assert cached(layers=[0]) == cached() > 0
