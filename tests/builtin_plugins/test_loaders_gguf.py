from __future__ import annotations

import math
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.builtins.checkpoint_harness import (
    finish,
    permute_as_llama_cpp,
    random_model,
    refused,
    write_gguf,
)
from support.builtins.model_harness import Runner, build_model, load_model, open_loader, scheme

from hardpoint.builtin_plugins.loaders.gguf import GGUFLoader
from hardpoint.builtin_plugins.loaders.gguf_architectures import ARCHITECTURES
from hardpoint.builtin_plugins.loaders.gguf_file import open_gguf
from hardpoint.builtin_plugins.models.cohere2 import Cohere2
from hardpoint.builtin_plugins.models.deepseek import DeepseekV2, DeepseekV3
from hardpoint.builtin_plugins.models.gemma.text import Gemma2, Gemma3
from hardpoint.builtin_plugins.models.glm4 import Glm4, Glm4Moe
from hardpoint.builtin_plugins.models.gpt_oss import GptOss
from hardpoint.builtin_plugins.models.granite import Granite
from hardpoint.builtin_plugins.models.llama import Llama, Mistral
from hardpoint.builtin_plugins.models.mixtral import Mixtral
from hardpoint.builtin_plugins.models.olmo import Olmo2, Olmo3
from hardpoint.builtin_plugins.models.phi3 import Phi3
from hardpoint.builtin_plugins.models.qwen import Qwen2, Qwen3
from hardpoint.builtin_plugins.models.qwen3_5 import Qwen35, Qwen35Moe
from hardpoint.builtin_plugins.models.qwen3_next import Qwen3Next
from hardpoint.builtin_plugins.models.qwen_moe import Qwen2Moe, Qwen3Moe
from hardpoint.builtin_plugins.models.smollm3 import SmolLM3
from hardpoint.plugins import Model, ModelError, ModelFiles, WeightFormat
from hardpoint.plugins.parallel import Communicator, Parallel
from hardpoint.testing.model.rank_threads import run_ranks


def list_of(tensor: gguf.ReaderTensor) -> list:
    return [tensor.name, tensor.tensor_type, tensor.shape.tolist(), *tensor[3:6]]


def test_demo_config(demo_loader: GGUFLoader) -> None:
    config = demo_loader.config()
    assert config.architecture == "LlamaForCausalLM"
    assert config.vocab_size == 49152
    assert config.max_position_embeddings == 8192
    assert config.eos_token_ids == (2, 0)  # <|im_end|>, and <|endoftext|> by its text
    assert config.dtype is None
    expected = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }
    assert expected.items() <= config.hf.items()


@pytest.mark.nightly  # the library takes seconds for a large vocabulary
def test_fast_reader_gives_what_the_library_gives(demo_gguf: Path) -> None:
    ours, theirs = open_gguf(demo_gguf), gguf.GGUFReader(demo_gguf)
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert ours.value(name) == field.contents(), name
    assert [t[:6] for t in map(list_of, ours.tensors)] == [
        t[:6] for t in map(list_of, theirs.tensors)
    ]


def test_q_and_k_are_unpermuted(demo_loader: GGUFLoader) -> None:
    raw = {t.name: t for t in open_gguf(demo_loader.context.files.path).tensors}
    wanted = {
        "model.layers.3.self_attn.q_proj.weight": ("blk.3.attn_q.weight", 9),
        "model.layers.3.self_attn.k_proj.weight": ("blk.3.attn_k.weight", 3),
    }
    weights = demo_loader.weights(dict.fromkeys(wanted, ()))
    got = {name: scheme(w.scheme).read(w).dequantize().numpy() for name, w in weights}
    assert set(got) == set(wanted)
    for name, (source, heads) in wanted.items():
        stored = gguf.quants.dequantize(raw[source].data, raw[source].tensor_type)
        assert not np.array_equal(got[name], stored)
        assert np.array_equal(permute_as_llama_cpp(got[name], heads), stored)


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 7}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
FACTORS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
GLM = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
    "head_dim": 16,
    "use_qk_norm": True,
}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 2,
    "topk_group": 1,
}
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}
NEXT = EXPERTS | DELTA | {"shared_expert_intermediate_size": 40}
NEXT_NEAR = 3e-4
"""On some processors, transformers' own float32 logits are 2e-4 from those in float64."""
FAMILIES = {
    "llama": ("llama", "Llama", Llama, {}),
    "mistral": ("llama", "Mistral", Mistral, {"sliding_window": 9}),
    "mixtral": (
        "llama",
        "Mixtral",
        Mixtral,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "qwen2": ("qwen2", "Qwen2", Qwen2, {}),
    "qwen3": ("qwen3", "Qwen3", Qwen3, {"head_dim": 16}),
    "qwen2moe": (
        "qwen2moe",
        "Qwen2Moe",
        Qwen2Moe,
        EXPERTS | {"shared_expert_intermediate_size": 40},
    ),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3Moe",
        Qwen3Moe,
        EXPERTS | {"norm_topk_prob": True, "head_dim": 16},
    ),
    "qwen3next": ("qwen3next", "Qwen3Next", Qwen3Next, NEXT),
    "qwen3next-rotated": (
        "qwen3next",
        "Qwen3Next",
        Qwen3Next,
        NEXT | {"rope_parameters": PARTIAL | {"partial_rotary_factor": 1.0}},
    ),
    "qwen35": ("qwen35", "Qwen3_5", Qwen35, DELTA | {"linear_num_value_heads": 6}),
    "qwen35moe": ("qwen35moe", "Qwen3_5Moe", Qwen35Moe, NEXT),
    "gemma2": ("gemma2", "Gemma2", Gemma2, GEMMA | CAPS),
    "gemma3": ("gemma3", "Gemma3", Gemma3, GEMMA),
    "granite": ("granite", "Granite", Granite, FACTORS | {"tie_word_embeddings": True}),
    "olmo2": ("olmo2", "Olmo2", Olmo2, {}),
    "olmo3": ("olmo2", "Olmo3", Olmo3, {"sliding_window": 9, "num_hidden_layers": 4}),
    "cohere2": ("cohere2", "Cohere2", Cohere2, {"sliding_window": 9, "num_hidden_layers": 4}),
    "glm4": ("glm4", "Glm4", Glm4, {"head_dim": 16}),
    "glm4moe": ("glm4moe", "Glm4Moe", Glm4Moe, GLM),
    "glm4moe-groups": (
        "glm4moe",
        "Glm4Moe",
        Glm4Moe,
        GLM | {"n_group": 2, "first_k_dense_replace": 0, "use_qk_norm": False},
    ),
    "gpt-oss": (
        "gpt-oss",
        "GptOss",
        GptOss,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9},
    ),
    "deepseek2": (
        "deepseek2",
        "DeepseekV2",
        DeepseekV2,
        LATENT | {"topk_method": "group_limited_greedy", "rope_parameters": LATENT_YARN},
    ),
    "deepseek2-whole": (
        "deepseek2",
        "DeepseekV2",
        DeepseekV2,
        LATENT | {"q_lora_rank": None, "n_group": None, "kv_b_by_head": False},
    ),
    "deepseek3": ("deepseek2", "DeepseekV3", DeepseekV3, LATENT | {"rope_parameters": LATENT_YARN}),
    "phi3": ("phi3", "Phi3", Phi3, {"sliding_window": 9}),
    "phi4": ("phi3", "Phi3", Phi3, {"rope_parameters": PARTIAL, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", "SmolLM3", SmolLM3, {"num_hidden_layers": 4}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_architectures_equal_transformers(family: str, tmp_path: Path) -> None:
    architecture, name, kind, fields = FAMILIES[family]
    reference = random_model(name, **fields)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, architecture)
    loader = open_loader(GGUFLoader, path)
    config = loader.config()
    assert config.architecture == f"{name}ForCausalLM" == loader.architecture()
    assert config.eos_token_ids == (2, 5)
    assert config.dtype == "float32"
    model = load_model(kind, loader, dtype=torch.float32, max_model_len=64)
    formats = loader.formats(model.weight_shapes())
    assert formats.keys() == model.weight_shapes().keys()
    for weight, shape in model.weight_shapes().items():
        assert formats[weight] == WeightFormat("float32", 4 * math.prod(shape))
    tokens = list(range(40))
    got = Runner(model, dtype=torch.float32).logits([("a", tokens)])
    near = NEXT_NEAR if architecture.startswith(("qwen3next", "qwen35")) else 1e-4
    assert (got - reference(torch.tensor([tokens])).logits[0]).abs().max() < near


@torch.inference_mode()
def test_ranks_have_parts_of_the_delta_rule(tmp_path: Path) -> None:
    reference = random_model("Qwen3Next", **NEXT)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, "qwen3next")
    loader = open_loader(GGUFLoader, path)
    tokens = list(range(40))

    def logits(communicator: Communicator) -> torch.Tensor:
        model = load_model(
            Qwen3Next,
            loader,
            dtype=torch.float32,
            max_model_len=64,
            parallel=Parallel(communicator),
        )
        return Runner(model, dtype=torch.float32).logits([("a", tokens)])

    expected = reference(torch.tensor([tokens])).logits[0]
    for rank_logits in run_ranks(2, logits):
        assert (rank_logits - expected).abs().max() < NEXT_NEAR


def test_ranks_cannot_divide_value_heads_that_alternate(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, random_model("Qwen3_5", **DELTA), "qwen35")
    loader = open_loader(GGUFLoader, path)

    def build(communicator: Communicator) -> Model:
        parallel = Parallel(communicator)
        return build_model(Qwen35, loader.config(), dtype=torch.float32, parallel=parallel)

    with pytest.raises(ModelError, match="parallel.tensor: the value heads .* expected 1, or"):
        run_ranks(2, build)


def test_linear_rope_scaling_is_read(tmp_path: Path) -> None:
    changes = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "tiny.gguf", random_model("Llama"), "llama", changes=changes)
    rope = open_loader(GGUFLoader, tmp_path / "tiny.gguf").config().hf["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def test_llama3_rope_factors_are_used(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    reference = random_model("Llama", rope_parameters=rope)
    scaled = reference.model.rotary_emb.inv_freq
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / scaled).numpy()
    assert not np.allclose(factors, 1)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, "llama", extra={"rope_freqs.weight": factors})
    model = load_model(Llama, open_loader(GGUFLoader, path), dtype=torch.float32)
    tokens = list(range(60))
    got = Runner(model, dtype=torch.float32).logits([("a", tokens)])
    assert (got - reference(torch.tensor([tokens])).logits[0]).abs().max() < 1e-4


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("length", [30, 60])
def test_long_rope_of_phi3_equals_transformers(length: int, tmp_path: Path) -> None:
    reference = random_model("Phi3", rope_parameters=LONG, original_max_position_embeddings=32)
    factors = {
        f"rope_factors_{name}.weight": np.array(LONG[f"{name}_factor"], np.float32)
        for name in ("long", "short")
    }
    changes = {"rope.scaling.original_context_length": 32}
    changes["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(4) / math.log(32))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, "phi3", changes=changes, extra=factors)
    loader = open_loader(GGUFLoader, path)
    model = load_model(Phi3, loader, dtype=torch.float32, max_model_len=length)
    tokens = list(range(length))
    got = Runner(model, dtype=torch.float32).logits([("a", tokens)])
    assert (got - reference(torch.tensor([tokens])).logits[0]).abs().max() < 1e-4


GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

YARN_METADATA = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_beta_slow": 2.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        (
            "gemma3",
            {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            {"rope_parameters": GEMMA3_ROPES, "sliding_window": 8},
        ),
        (
            "gemma3",
            {"attention.sliding_window": None},
            {"sliding_window": None, "layer_types": ["full_attention"] * 7},
        ),
        ("gemma3", {"attention.sliding_window_pattern": 3}, {"sliding_window_pattern": 3}),
        ("gemma2", {"attention.key_length": 20}, {"head_dim": 20, "query_pre_attn_scalar": 20}),
        ("granite", {"attention.scale": None}, {"attention_multiplier": 0.25}),
        ("qwen2", {"attention.head_count_kv": None}, {"num_key_value_heads": 4}),
        ("phi4", {}, {"rope_parameters": PARTIAL, "head_dim": 16, "use_sliding_window": False}),
        ("llama", {"rope.scaling.factor": 2.0}, {"rope_parameters": LINEAR}),
        ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 0.0}, {"head_dim": 16}),
        ("llama", {"logit_scale": 1.0, "embedding_scale": 0.0}, {"head_dim": 16}),
        ("llama", YARN_METADATA, {"rope_parameters": YARN}),
    ],
)
def test_fields_follow_from_the_metadata(family, changes, expected, tmp_path: Path) -> None:
    architecture, name, _, fields = FAMILIES[family]
    model = random_model(name, **fields)
    write_gguf(tmp_path / "tiny.gguf", model, architecture, changes=changes)
    hf = open_loader(GGUFLoader, tmp_path / "tiny.gguf").config().hf
    assert {key: hf[key] for key in expected} == expected


def test_older_files_of_gemma2_have_the_window_of_llama_cpp(tmp_path: Path) -> None:
    architecture, name, kind, fields = FAMILIES["gemma2"]
    changes = {"attention.sliding_window": None}
    write_gguf(tmp_path / "m.gguf", random_model(name, **fields), architecture, changes=changes)
    config = open_loader(GGUFLoader, tmp_path / "m.gguf").config()
    model = build_model(kind, config, dtype=torch.float32)
    windows = [spec.window for spec in model.kv_specs()]
    assert windows == [4096, None, 4096, None, 4096, None, 4096]


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_scores_by_the_hidden_size(name: str, layers: int) -> None:
    config = {"head_dim": 128, "hidden_size": 5376, "num_attention_heads": 32}
    derive = ARCHITECTURES[name].derive
    assert derive(config | {"num_hidden_layers": layers})["query_pre_attn_scalar"] == 168
    assert derive(config | {"num_hidden_layers": 26})["query_pre_attn_scalar"] == 128


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("smollm3", {"rope.dimension_count": 8}, "dimension_count: expected the head size 16"),
        ("qwen3", {"rope.dimension_count": 8}, "dimension_count: expected the head size 16"),
        ("phi4", {"rope.dimension_count": 18}, "dimension_count: expected the head size 16"),
        ("gemma2", {"final_logit_softcapping": "no"}, "softcapping: expected float, got 'no'"),
    ],
)
def test_what_an_architecture_does_not_have_is_refused(
    family, changes, message, tmp_path: Path
) -> None:
    architecture, name, _, fields = FAMILIES[family]
    model = random_model(name, **fields)
    write_gguf(tmp_path / "tiny.gguf", model, architecture, changes=changes)
    refused(open_loader(GGUFLoader, tmp_path / "tiny.gguf"), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "tiny.gguf: llama.block_count: missing"),
        ({"block_count": 0}, r"llama: block_count: expected a whole number >= 1, got 0"),
        ({"context_length": 0}, "context_length: expected a whole number >= 1, got 0"),
        ({"rope.dimension_count": 8}, "dimension_count: expected the head size 16 .* got 8"),
        ({"rope.scaling.type": "longrope"}, "expected none, linear or yarn, got 'longrope'"),
        ({"rope.scaling.factor": math.nan}, "llama.rope.scaling.factor: expected a number > 0, go"),
        ({"rope.scaling.factor": 0.0}, "rope.scaling.factor: expected a number > 0, got 0.0"),
        ({"rope.scaling.factor": -2.0}, "rope.scaling.factor: expected a number > 0, got -2.0"),
        ({"rope.scaling.type": "yarn"}, "llama.rope.scaling.factor: missing, yarn has one"),
        ({"rope.freq_base": 0.0}, "llama.rope.freq_base: expected a number > 0, got 0.0"),
        ({"rope.freq_base": math.inf}, "llama.rope.freq_base: expected a number > 0, got inf"),
        ({"attention.scale": 0.5}, "llama.attention.scale: expected 0, which LlamaForC.* got 0.5"),
        ({"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv: expected 0, .*got 8.0"),
        ({"embedding_scale": 3.0}, "llama.embedding_scale: expected 0 or 1, .*got 3.0"),
        ({"logit_scale": 7.0}, "llama.logit_scale: expected 0 or 1, .*got 7.0"),
        ({"final_logit_softcapping": 1.0}, "final_logit_softcapping: expected 0, .*got 1.0"),
        ({"rope.scaling.attn_factor": 3.0}, "attn_factor: expected 0 or 1, .*got 3.0"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor: expected 1 or -1, .*got 0.5"),
        ({"attention.value_length": 8}, "llama.attention.value_length: expected 16, .*got 8"),
    ],
)
def test_wrong_metadata_is_refused(changes, message, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", random_model("Llama"), "llama", changes=changes)
    refused(open_loader(GGUFLoader, tmp_path / "tiny.gguf"), message)


def test_experts_of_an_architecture_that_has_none_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_model("Qwen2"), "qwen2", changes={"expert_count": 8})
    refused(
        open_loader(GGUFLoader, tmp_path / "m.gguf"),
        "m.gguf: qwen2.expert_count: mixtures of experts are not supported, got 8",
    )


@pytest.mark.parametrize("shape", [(64,), (4, 64), (5, 2, 64), (4, 2, 2, 64), (3000, 1, 1)])
def test_experts_of_another_shape_are_refused_with_their_tensor(shape, tmp_path: Path) -> None:
    _, name, _, fields = FAMILIES["qwen3moe"]
    extra = {"blk.9.ffn_gate_exps.weight": np.zeros(shape, np.float32)}
    model = random_model(name, **fields)
    write_gguf(tmp_path / "m.gguf", model, "qwen3moe", extra=extra)
    loader = open_loader(GGUFLoader, tmp_path / "m.gguf")
    text = r"m.gguf: tensor blk.9.ffn_gate_exps.weight: expected \[6, rows, columns\] .*, got \["
    for call in (loader.formats, lambda shapes: list(loader.weights(shapes))):
        with pytest.raises(ModelError, match=text):
            call({"model.layers.9.mlp.experts.0.gate_proj.weight": (2, 64)})


def test_so_many_experts_are_refused_before_the_model_is_built(tmp_path: Path) -> None:
    _, name, _, fields = FAMILIES["qwen3moe"]
    changes = {"expert_count": 2_000_000}
    write_gguf(tmp_path / "m.gguf", random_model(name, **fields), "qwen3moe", changes=changes)
    text = "qwen3moe: expert_count: expected at most 1024, got 2000000"
    refused(open_loader(GGUFLoader, tmp_path / "m.gguf"), text)


def test_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    finish(gguf.GGUFWriter(tmp_path / "m.gguf", "mamba"))
    refused(
        open_loader(GGUFLoader, tmp_path / "m.gguf"),
        "m.gguf: general.architecture: 'mamba' is not supported; supported are llama, qwen2, .*"
        "smollm3. A plugin of the kind loaders adds one",
    )


def test_file_without_tensors_is_refused(tmp_path: Path) -> None:
    finish(gguf.GGUFWriter(tmp_path / "m.gguf", "llama"))
    refused(open_loader(GGUFLoader, tmp_path / "m.gguf"), "the tensor token_embd.weight is missing")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "empty file"),
        (b"hello, this is no model", "magic"),
        (b"GG", "truncated"),
        (b"GGUF" + struct.pack("<I", 99) + bytes(16), "version 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "truncated: the header refers to byte"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "truncated: the header refers"),
    ],
)
def test_other_files_are_refused(content: bytes, cause: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    refused(open_loader(GGUFLoader, path), f"broken.gguf is not a readable GGUF file: .*{cause}")


def test_a_type_of_another_version_of_ggml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    write_gguf(path, random_model("Llama"), "llama")
    content = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    kind = content.index(name) + len(name) + 4 + 2 * 8  # behind the dimensions
    content[kind : kind + 4] = struct.pack("<I", 42)
    path.write_bytes(content)
    refused(
        open_loader(GGUFLoader, path),
        "^new.gguf: blk.0.attn_q.weight: gguf-py .* does not know the type 42 of ggml, in which "
        "the tensor is stored; expected a type that it knows",
    )


def test_missing_file_is_refused(tmp_path: Path) -> None:
    refused(open_loader(GGUFLoader, tmp_path / "no.gguf"), "no.gguf .*No such file")


SHARES = [0.001, 0.01, 0.5, pytest.param(0.999, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("share", SHARES)
def test_truncated_file_is_refused(share: float, demo_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with demo_gguf.open("rb") as source, path.open("wb") as target:
        target.write(source.read(int(demo_gguf.stat().st_size * share)))
    refused(open_loader(GGUFLoader, path), "cut.gguf .* truncated: the header refers to byte")


def test_every_early_cut_is_a_model_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", random_model("Llama"), "llama")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for end in [*range(0, 1200, 23), len(whole) - 40]:
        path.write_bytes(whole[:end])
        refused(open_loader(GGUFLoader, path), "cut.gguf is not a readable GGUF file")


def test_recognises_by_suffix(demo_gguf: Path, tmp_path: Path) -> None:
    assert GGUFLoader.recognises(ModelFiles("demo", demo_gguf))
    assert not GGUFLoader.recognises(ModelFiles("folder", tmp_path))


def resident(path: Path) -> int:
    """Return how many KiB of a mapped file are in memory of this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.endswith(str(path))]
    sizes = [line for i in starts for line in lines[i : i + 8] if line.startswith("Rss:")]
    return sum(int(line.split()[1]) for line in sizes)


def test_the_file_does_not_stay_in_memory_behind_its_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = random_model("Llama", intermediate_size=4096, vocab_size=4096)
    write_gguf(path, model, "llama", kinds=lambda _: "Q8_0")
    loader = open_loader(GGUFLoader, path)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    most, read = 0, []
    for _, weight in loader.weights(shapes):
        read.append(weight)
        if not isinstance(weight, torch.Tensor):
            weight.tensors["blocks"].sum()
        most = max(most, resident(path))
    assert most > 200  # KiB
    assert resident(path) < most / 2
    sums = [w.tensors["blocks"].sum() for w in read if not isinstance(w, torch.Tensor)]
    assert all(sums)  # they are read again
