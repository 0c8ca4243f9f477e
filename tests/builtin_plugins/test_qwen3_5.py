"""Qwen3.5: as transformers computes it, and read from checkpoints that have images as well."""

from __future__ import annotations

import json

import pytest
import torch
from support.builtins.model_harness import Runner, load_model, open_loader
from support.builtins.transformers_parity import (
    TOKENS,
    check_logits_and_greedy_tokens,
    check_parts,
)

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.qwen3_5 import Qwen35, Qwen35Moe
from hardpoint.cli import main
from hardpoint.plugins import RequestError

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
SECTIONS = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
VARIANTS = {
    "dense": ("Qwen3_5", Qwen35, {}),
    "tied": ("Qwen3_5", Qwen35, {"tie_word_embeddings": True, "rope_parameters": SECTIONS}),
    "experts": ("Qwen3_5Moe", Qwen35Moe, EXPERTS | {"linear_num_value_heads": 2}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tmp_path_factory):
    """A random model of transformers, saved: the model, our class, and the folder."""
    import transformers

    family, kind, fields = VARIANTS[request.param]
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}TextConfig")(**TINY | fields)
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    for name, parameter in reference.named_parameters():
        mean = 1.0 if parameter.dim() == 1 else 0.0
        parameter.data.normal_(-2.0 if name.endswith(("A_log", "dt_bias")) else mean, 0.1)
    folder = tmp_path_factory.mktemp("qwen3-5")
    reference.save_pretrained(folder)
    return reference, kind, folder


def test_logits_and_greedy_tokens_equal_transformers(variant) -> None:
    check_logits_and_greedy_tokens(variant)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_a_divided_model_equals_transformers(variant, ranks: int, stages: int) -> None:
    check_parts(variant, ranks, stages)


def write_as_published(variant, folder) -> None:
    """Write a checkpoint as published for images: its names, config, and other tensors."""
    from safetensors.torch import load_file, save_file

    reference, kind, source = variant
    state = reference.state_dict() if kind is Qwen35Moe else load_file(source / "model.safetensors")
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor.clone().contiguous()
        for name, tensor in state.items()
    }
    tensors["model.visual.blocks.0.norm1.weight"] = torch.zeros(8)
    tensors["mtp.layers.0.mlp.up_proj.weight"] = torch.zeros(8, 8)
    if kind is Qwen35Moe:
        name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
        assert tensors[name].shape == (4, 48, 64)
    save_file(tensors, folder / "model.safetensors")
    index = dict.fromkeys(tensors, "model.safetensors")
    size = sum(tensor.nbytes for tensor in tensors.values())
    written = {"metadata": {"total_size": size}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(written))
    text = json.loads((source / "config.json").read_text())
    (name,) = text.pop("architectures")
    outer = {
        "architectures": [name.replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": text["model_type"].removesuffix("_text"),
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": 90,
        "text_config": text,
        "vision_config": {"hidden_size": 8},
    }
    (folder / "config.json").write_text(json.dumps(outer))


@torch.inference_mode()
def test_the_text_model_of_a_checkpoint_with_images_runs(variant, tmp_path, capsys) -> None:
    reference, kind, _ = variant
    write_as_published(variant, tmp_path)
    loader = open_loader(SafetensorsLoader, tmp_path)
    runner = Runner(load_model(kind, loader, dtype=torch.float32), dtype=torch.float32)
    expected = reference(torch.tensor([TOKENS])).logits[0]
    assert (runner.logits([("a", TOKENS)]) - expected).abs().max() < 1e-4

    tokens = reference.generate(torch.tensor([TOKENS]), max_new_tokens=9, do_sample=False)
    config = {"dtype": "float32", "tokenizer": {"use": "none"}, "kv_cache": {"num_blocks": 64}}
    params = SamplingParams(max_tokens=9, temperature=0, detokenize=False)
    with LLM(str(tmp_path), config=config) as llm:
        for _ in range(2):  # the second time with a prefix of the cache
            (output,) = llm.generate([{"prompt_token_ids": TOKENS}], params)
            assert list(output.outputs[0].token_ids) == tokens[0, len(TOKENS) :].tolist()
        assert output.num_cached_tokens
        image = {"prompt_token_ids": TOKENS, "multi_modal_data": {"image": [b"GIF89a"]}}
        with pytest.raises(RequestError, match="multi_modal_data: .*Qwen3_5.* text"):
            llm.generate([image], params)
    assert main(["models", str(tmp_path)]) == 0
    assert "layers         4: 1 see all tokens, 3 keep a state" in capsys.readouterr().out


def test_a_folder_without_weights_is_described(variant, tmp_path, capsys) -> None:
    write_as_published(variant, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert main(["models", str(tmp_path)]) == 0
    assert "layers         4: 1 see all tokens, 3 keep a state" in capsys.readouterr().out
