"""Multi-head latent attention in an engine: one latent per token in the cache, for all heads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from support.builtins.checkpoint_harness import random_model, write_gguf
from support.builtins.model_harness import (
    Runner,
    build_backend,
    build_model,
    load_model,
    open_loader,
)

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.attention.native_cpu import NativeAttention
from hardpoint.builtin_plugins.attention.torch import TorchAttention
from hardpoint.builtin_plugins.loaders.gguf import GGUFLoader
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.deepseek import DeepseekV2, DeepseekV3
from hardpoint.plugins import AttentionBackend, KVSpec, ModelError
from hardpoint.plugins.parallel import Communicator, Parallel
from hardpoint.testing.model.rank_threads import run_ranks

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 144,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 18,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
SPEC = KVSpec(num_heads=8, num_kv_heads=1, head_size=28, scale=20**-0.5, value_size=20)
LENGTHS = (40, 3, 60, 17)
PARAMS = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, detokenize=False)
CONFIG = {"dtype": "float32", "tokenizer": {"use": "none"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of random weights."""
    path = tmp_path_factory.mktemp("deepseek")
    random_model("DeepseekV3", **TINY).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts, the last with a prefix of another, and the greedy tokens of transformers."""
    import transformers

    reference = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in LENGTHS]
    prompts.append([*prompts[2][:48], *prompts[1]])
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    results = [reference.generate(torch.tensor([prompt]), **options) for prompt in prompts]
    return [(p, r[0, len(p) :].tolist()) for p, r in zip(prompts, results, strict=True)]


def check_engine(folder: Path, expected: list[tuple[list[int], list[int]]], **config) -> None:
    """Compare an engine's outputs for the prompts together, twice."""
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in expected]
    with LLM(folder, config=CONFIG | config) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, PARAMS)
            for output, (_, tokens) in zip(outputs, expected, strict=True):
                assert list(output.outputs[0].token_ids) == tokens
        assert outputs[2].num_cached_tokens >= 48


@pytest.mark.parametrize("use", ["torch", "auto"])
def test_chunks_and_prefixes_equal_transformers(folder: Path, expected, use: str) -> None:
    check_engine(folder, expected, attention={"use": use}, scheduler={"max_num_batched_tokens": 24})


def test_preempted_requests_equal_transformers(folder: Path, expected) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in expected]
    small = {
        "kv_cache": {"num_blocks": 9, "block_size": 16, "watermark": 0.0},
        "stats": {"request_metrics": True},
        "attention": {"use": "torch"},
    }
    with LLM(folder, config=CONFIG | small) as llm:
        outputs = llm.generate(prompts, PARAMS)
    assert sum(output.metrics.num_preemptions for output in outputs)
    for output, (_, tokens) in zip(outputs, expected, strict=True):
        assert list(output.outputs[0].token_ids) == tokens


@pytest.mark.nightly
@pytest.mark.parametrize(
    "parallel", [{"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "expert": True}]
)
def test_several_processes_equal_transformers(folder: Path, expected, parallel: dict) -> None:
    check_engine(folder, expected, parallel=parallel, executor={"use": "multiproc"})


@pytest.mark.parametrize(
    ("kind", "elements"),
    [(TorchAttention, 28), (NativeAttention, 28 + 32)],  # of these values are padded to 16
)
def test_a_cache_has_one_key_of_a_token(kind: type[AttentionBackend], elements: int) -> None:
    backend = build_backend(torch.float32, 16, kind)
    spec = SPEC if backend.shares_values else dataclasses.replace(SPEC, value_size=None)
    assert backend.bytes_per_block(spec) == 16 * elements * 4


def test_codes_are_of_keys_and_of_values() -> None:
    assert build_backend(torch.float32, 16).shares_values
    assert not build_backend(torch.float32, 16, cache_dtype="int8").shares_values


def test_ranks_have_the_same_latents(folder: Path) -> None:
    config = open_loader(SafetensorsLoader, folder).config()

    def specs(communicator: Communicator) -> list[KVSpec]:
        parallel = Parallel(communicator)
        return build_model(DeepseekV3, config, dtype=torch.float32, parallel=parallel).kv_specs()

    for rank_specs in run_ranks(2, specs):
        assert rank_specs == [dataclasses.replace(SPEC, num_heads=4)] * 2


def test_matrices_of_heads_in_few_bits_are_those_of_transformers(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 32}
    reference = random_model("DeepseekV3", **TINY | sizes)
    path = tmp_path / "tiny.gguf"
    write_gguf(
        path, reference, "deepseek2",
        kinds=lambda name: "Q8_0" if name.endswith(("_k_b", "_v_b")) else "F32",
    )  # fmt: skip
    tokens = list(range(40))
    expected = reference(torch.tensor([tokens])).logits[0]

    def logits(communicator: Communicator) -> torch.Tensor:
        loader, parallel = open_loader(GGUFLoader, path), Parallel(communicator)
        model = load_model(DeepseekV3, loader, dtype=torch.float32, parallel=parallel)
        formats = loader.formats(model.weight_shapes())
        assert formats["model.layers.1.self_attn.k_b_proj.7.weight"].name == "q8_0"
        with torch.inference_mode():
            return Runner(model, dtype=torch.float32).logits([("a", tokens)])

    for rank_logits in run_ranks(1, logits):
        assert (rank_logits - expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (DeepseekV3, {"kv_lora_rank": None}, "kv_lora_rank: missing, and it has no default"),
        (DeepseekV3, {"qk_nope_head_dim": 0}, "qk_nope_head_dim: expected a whole number >= 1"),
        (DeepseekV3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim: expected an even number .* got 7"),
        (DeepseekV3, {"v_head_dim": 1 << 20}, "v_head_dim: expected at most 65536, got 1048576"),
        (DeepseekV3, {"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', got 'softmax"),
        (DeepseekV3, {"topk_method": "greedy"}, "topk_method: expected 'noaux_tc', got 'greedy'"),
        (DeepseekV3, {"moe_layer_freq": 2}, "moe_layer_freq: expected 1, got 2"),
        (DeepseekV3, {"n_group": 8}, "n_group: expected a divisor .* that leaves 2 of them"),
        (
            DeepseekV3,
            {"q_lora_rank": None, "attention_bias": True},
            "attention_bias: expected false where q_lora_rank is null",
        ),
        (
            DeepseekV3,
            {"rope_scaling": {"type": "yarn", "factor": 0, "mscale_all_dim": 1.0}},
            "factor: expected a number > 0, got 0",
        ),
        (DeepseekV2, {"norm_topk_prob": True}, "norm_topk_prob: expected false, got True"),
        (DeepseekV2, {"topk_method": "noaux_tc"}, "topk_method: expected 'greedy' or 'group_lim"),
    ],
)
def test_wrong_fields_are_named(folder: Path, kind, fields: dict, message: str) -> None:
    config = open_loader(SafetensorsLoader, folder).config()
    hf = {name: value for name, value in config.hf.items() if name != "rope_parameters"}
    config = dataclasses.replace(config, hf=hf | {"norm_topk_prob": False} | fields)
    with pytest.raises(ModelError, match=message):
        build_model(kind, config, dtype=torch.float32)
