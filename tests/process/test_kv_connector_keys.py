"""Blocks are found again by the inputs of their bytes, and by nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.parallel import open_llm, parallel_config, write_random_model

from hardpoint import SamplingParams

PROMPT = [index * 7 % 250 for index in range(60)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FOLDER = {"use": "support.plugins.kv_stores:FolderStore", "name": "folder"}
HITS = 56  # of the prompt's tokens, in blocks of 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("random") / "llama"
    return write_random_model(path, "LlamaForCausalLM", num_hidden_layers=2)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory, model):
    """A folder with the blocks of the prompt, and the tokens that follow it."""
    path = tmp_path_factory.mktemp("blocks")
    cached, tokens = generate(model, path)
    assert cached == 0
    return path, tokens


def generate(model: Path, blocks: Path, **settings: Any) -> tuple[int, list[int]]:
    """Return how many tokens a new engine finds in a folder, and which it generates."""
    salt = settings.pop("cache_salt", None)
    settings = {"load": {"use": "dummy"}, **settings}
    plugin = {"folder": {"path": str(blocks)}, **settings.pop("plugin", {})}
    ranks = settings.pop("ranks", (1, 1))
    stores = {"kv_connector": {"stores": [FOLDER]}, "plugin": plugin}
    with open_llm(parallel_config(*ranks, model=str(model), **stores, **settings)) as llm:
        (output,) = llm.generate([PROMPT], GREEDY, cache_salt=salt)
        stats = llm.engines.scheduler_stats().kv_tiers["folder"]
        assert stats.failures == 0
        if settings.get("kv_cache", {}).get("block_size", 8) == 8:
            parts = plugin.get("stores", {}).get("layer_groups", 1) * ranks[0] * ranks[1]
            assert stats.loaded_blocks * 8 == output.num_cached_tokens * parts
        return output.num_cached_tokens, list(output.outputs[0].token_ids)


CHANGES = {
    "dtype": {"dtype": "bfloat16"},
    "dtype of keys and values": {"kv_cache": {"dtype": "int8"}},
    "block size": {"kv_cache": {"block_size": 16, "num_blocks": 45}},
    "hash algorithm": {"kv_cache": {"block_size": 8, "hash_algorithm": "blake2b"}},
    "attention backend": {"attention": {"use": "support.plugins.kv_stores:OtherAttention"}},
    "seed of the weights": {"plugin": {"dummy": {"seed": 1}}},
    "salt": {"cache_salt": "tenant 7"},
    "groups of layers": {"plugin": {"stores": {"layer_groups": 2}}},
    "tensor size": {"ranks": (2, 1)},
    "stages": {"ranks": (1, 2)},
}
SHORT = {
    *("dtype of keys and values", "attention backend", "salt"),
}


@pytest.mark.parametrize(
    "change",
    [pytest.param(name, marks=[] if name in SHORT else pytest.mark.nightly) for name in CHANGES],
)
def test_one_thing_is_different(model, blocks, tmp_path, change):
    """No block is found; later blocks are found by an engine with the same change only."""
    path, expected = blocks
    copy = shutil.copytree(path, tmp_path / "copy")
    settings = CHANGES[change]
    num_cached, tokens = generate(model, copy, **settings)
    assert num_cached == 0
    num_cached, again = generate(model, copy, **settings)
    assert num_cached >= HITS - 8
    assert again == tokens
    assert generate(model, copy) == (HITS, expected)


@pytest.mark.nightly
def test_codes_of_as_many_bytes_are_not_taken_for_others(model, tmp_path):
    for cache_dtype in ("int8", "fp8"):
        settings = {"kv_cache": {"dtype": cache_dtype}}
        num_cached, tokens = generate(model, tmp_path / "blocks", **settings)
        assert num_cached == 0
        assert generate(model, tmp_path / "blocks", **settings) == (HITS, tokens)


def test_the_same_is_found_again(model, blocks):
    path, expected = blocks
    for settings in (
        {},
        {"kv_cache": {"block_size": 8, "num_blocks": 100}},
        {"scheduler": {"max_num_batched_tokens": 16}},
    ):
        assert generate(model, path, **settings) == (HITS, expected)


@pytest.mark.nightly
def test_another_process_finds_the_blocks(model, blocks):
    path, expected = blocks
    assert generate(model, path, engine={"in_process": False}) == (HITS, expected)


def test_a_copy_of_the_model_finds_the_blocks(model, blocks, tmp_path):
    """The name and the place of a model are not part of the key."""
    path, expected = blocks
    copy = shutil.copytree(model, tmp_path / "other name")
    assert generate(copy, path) == (HITS, expected)


CONFIG_CHANGES = {
    "rope": {"rope_theta": 500.0},
    "norm": {"rms_norm_eps": 1e-3},
    "architecture": {"architectures": ["Qwen2ForCausalLM"]},
    "heads": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64},
}


@pytest.mark.parametrize(
    "change",
    ["rope", *(pytest.param(n, marks=pytest.mark.nightly) for n in [*CONFIG_CHANGES][1:])],
)
def test_the_configuration_of_the_model_is_different(model, blocks, tmp_path, change):
    path, expected = blocks
    other = shutil.copytree(model, tmp_path / "other")
    fields = json.loads((other / "config.json").read_text()) | CONFIG_CHANGES[change]
    (other / "config.json").write_text(json.dumps(fields))
    assert generate(other, shutil.copytree(path, tmp_path / "copy"))[0] == 0
    assert generate(model, path) == (HITS, expected)


@pytest.mark.nightly
def test_the_factors_of_longrope_are_part_of_the_key(tmp_path):
    """max_model_len, which is no part of the key, chooses them."""
    rope = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    fields = {"rope_scaling": rope, "original_max_position_embeddings": 100, "head_dim": 32}
    path = write_random_model(tmp_path / "phi", "Phi3ForCausalLM", num_hidden_layers=2, **fields)
    num_cached = [generate(path, tmp_path / "b", max_model_len=n)[0] for n in (100, 90, 101, 120)]
    assert num_cached == [0, HITS, 0, HITS]


def write_weights(model: Path, folder: Path, number: float) -> None:
    """Copy a model, with random weights and one stated number."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"embed_tokens": (config["vocab_size"], hidden), "norm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (middle, hidden),
                "mlp.up_proj": (middle, hidden),
                "mlp.down_proj": (hidden, middle),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items()
        }
    generator = torch.Generator().manual_seed(3)
    weights = {
        f"model.{name}.weight": torch.randn(shape, generator=generator) * 0.1
        for name, shape in shapes.items()
    }
    weights["lm_head.weight"] = torch.randn(config["vocab_size"], hidden, generator=generator)
    weights["model.norm.weight"][7] = number
    save_file(weights, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", (1e9, 1e9))


def test_the_weights_are_different(model, tmp_path):
    """Files of the same name, size and time, with one different number."""
    files = {"load": {"use": "safetensors"}}
    folder, other = tmp_path / "model", tmp_path / "elsewhere" / "model"
    write_weights(model, folder, 0.0)
    write_weights(model, other, 0.5)
    blocks = tmp_path / "blocks"
    num_cached, tokens = generate(folder, blocks, **files)
    assert num_cached == 0
    assert generate(folder, blocks, **files) == (HITS, tokens)
    assert generate(other, blocks, **files)[0] == 0
    shutil.copytree(folder, other, dirs_exist_ok=True)
    assert generate(other, blocks, **files) == (HITS, tokens)
