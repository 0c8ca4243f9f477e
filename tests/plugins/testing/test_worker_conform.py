"""Every built-in sampler, attention backend, model and loader passes the public conformance kit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from support.builtins.checkpoint_harness import write_gguf
from support.kit_suites import assert_tests_builtins
from support.searching import kit_examples, searches_long
from support.triton import kernel_device

from hardpoint.builtin_plugins.attention.native_cpu import NativeAttention
from hardpoint.builtin_plugins.attention.torch import TorchAttention
from hardpoint.builtin_plugins.attention.triton import TritonAttention
from hardpoint.builtin_plugins.loaders.dummy import DummyLoader
from hardpoint.builtin_plugins.loaders.gguf import GGUFLoader
from hardpoint.builtin_plugins.loaders.outline import OutlineLoader
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.cohere2 import Cohere2
from hardpoint.builtin_plugins.models.deepseek import DeepseekV2, DeepseekV3
from hardpoint.builtin_plugins.models.gemma.images import Gemma3WithImages
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
from hardpoint.builtin_plugins.models.qwen_vl.model import Qwen2_5VL, Qwen3VL, Qwen3VLMoe
from hardpoint.builtin_plugins.models.smollm3 import SmolLM3
from hardpoint.builtin_plugins.models.transformers.model import ThroughTransformers
from hardpoint.builtin_plugins.ops.native_cpu import NativeOps
from hardpoint.builtin_plugins.ops.torch import TorchOps
from hardpoint.builtin_plugins.ops.triton import TritonOps
from hardpoint.builtin_plugins.sampler import DefaultSampler
from hardpoint.plugins import ModelConfig
from hardpoint.testing import (
    AttentionBackendSuite,
    HistoryAttention,
    ModelSuite,
    OpsSuite,
    SamplerSuite,
    ScriptedModel,
    WeightLoaderSuite,
    history_hash,
)

pytest_plugins = ["hardpoint.testing"]


class TestDefaultSampler(SamplerSuite):
    examples = kit_examples()
    sampler = DefaultSampler


class FewSizes(OpsSuite):
    """With few sizes, unless searches are long: each is run alone, too."""

    if not searches_long():
        sizes = (50,)
        rows = (3,)
        vocab_sizes = (999,)


class TestTorchOps(FewSizes):
    ops = TorchOps


class TestNativeOps(FewSizes):
    ops = NativeOps
    batch_invariant = True


class TestTritonOps(FewSizes):
    """Interpreted, where there is no GPU, which is slow: with fewer sizes in the long run, too."""

    ops = TritonOps
    device = kernel_device()
    if searches_long():
        sizes = (50, 130)
        rows = (1, 18)
        vocab_sizes = (1, 17, 4999)
    else:
        dtypes = (torch.bfloat16,)


class TestFewRowProducts(OpsSuite):
    """Triton's products of few rows replace torch's; the rest is as above, and takes few sizes."""

    ops = TritonOps
    options = {"few_row_products": "always"}
    device = kernel_device()
    dtypes = (torch.bfloat16,)
    sizes = (50,)
    rows = (1, 3)
    vocab_sizes = (999,)


class TestTorchAttention(AttentionBackendSuite):
    examples = kit_examples()
    backend = TorchAttention
    head_sizes = (8, 17)


class TestNativeAttention(AttentionBackendSuite):
    examples = kit_examples()
    backend = NativeAttention
    head_sizes = (8, 17)
    batch_invariant = True


class TestTritonAttention(AttentionBackendSuite):
    """Interpreted, where there is no GPU."""

    examples = kit_examples(0.04) if searches_long() else 0.03
    backend = TritonAttention
    heads = ((4, 4), (6, 2))
    head_sizes = (8, 17)
    block_sizes = (4, 16)
    softcaps = (2.0,)
    device = kernel_device()
    if not searches_long():

        @pytest.mark.skip(reason="takes long: scripts/test --all runs it")
        def test_memory(self):
            """A hundred steps of the interpreter; that nothing grows is tested of others."""


def hash_of_history(spec, query, keys, values):
    value = history_hash(keys[:, 0, 0].long().tolist())
    return torch.tensor([[value >> 16, value & 0xFFFF]], dtype=torch.float64)


class TestHistoryAttention(AttentionBackendSuite):
    """Attention of another function, over whole numbers."""

    examples = kit_examples(0.3)
    backend = HistoryAttention
    dtypes = (torch.float32,)
    heads = ((1, 1),)
    head_sizes = (2,)
    windows = (None,)
    tolerance = 1e-9

    def draw(self, generator, shape):
        return torch.randint(0, 257, shape[:2], generator=generator)[..., None].expand(shape)

    reference = staticmethod(hash_of_history)


DELTA = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}


def config(family, **fields):
    hf = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return ModelConfig(
        architecture=f"{family}ForCausalLM",
        hf=hf | fields,
        vocab_size=61,
        max_position_embeddings=64,
    )


def suite_of(model, share=0.1, *, family=None, nightly=False, **fields):
    """Return the suite of a model, with fields of its configuration.

    Args:
        share: share of the examples.
        family: name of the architecture if it is not that of the model.
    """
    attributes = {
        "examples": kit_examples(share),
        "model": model,
        "config": config(family or model.__name__, **fields),
    }
    suite = type(f"Test{model.__name__}", (ModelSuite,), {**attributes, "__module__": __name__})
    return pytest.mark.nightly(suite) if nightly else suite


DIVISIBLE = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6}
"""By 2 and 3; the vocabulary is not."""
LATENT = {
    "num_key_value_heads": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


# Families consist of the same layers. Each kind of layer is in one that is not nightly: Llama has
# the dense ones, Phi3 fused matrices and two rotations, Qwen2Moe experts, shared ones among them,
# DeepseekV2 latents.
TestLlama = suite_of(Llama, 1.0, attention_bias=True, mlp_bias=True, **DIVISIBLE)
TestMistral = suite_of(
    Mistral,
    0.3,
    nightly=True,
    sliding_window=7,
    tie_word_embeddings=True,
    **DIVISIBLE | {"num_key_value_heads": 1},  # which several ranks have
)
TestQwen2 = suite_of(Qwen2, 0.3, nightly=True)  # 4 heads, which three ranks cannot divide
TestMixtral = suite_of(Mixtral, nightly=True, num_local_experts=4, num_experts_per_tok=2)
TestQwen2Moe = suite_of(
    Qwen2Moe,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=24,
    mlp_only_layers=[1],
)
TestQwen3 = suite_of(Qwen3, 0.3, nightly=True, **DIVISIBLE, head_dim=16, tie_word_embeddings=True)
TestGranite = suite_of(
    Granite,
    nightly=True,
    **DIVISIBLE,
    embedding_multiplier=12.0,
    attention_multiplier=0.2,
    residual_multiplier=0.22,
    logits_scaling=8.0,
    tie_word_embeddings=True,
)
TestSmolLM3 = suite_of(SmolLM3, nightly=True, **DIVISIBLE, no_rope_layer_interval=2)
TestOlmo2 = suite_of(Olmo2, nightly=True, **DIVISIBLE)
TestOlmo3 = suite_of(Olmo3, nightly=True, **DIVISIBLE, sliding_window=7, num_hidden_layers=4)
TestCohere2 = suite_of(
    Cohere2, nightly=True, **DIVISIBLE, sliding_window=7, sliding_window_pattern=2
)
TestGlm4 = suite_of(Glm4, nightly=True, **DIVISIBLE | {"num_key_value_heads": 6}, head_dim=8)
TestGlm4Moe = suite_of(
    Glm4Moe,
    nightly=True,
    head_dim=16,
    n_routed_experts=4,
    n_group=2,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    use_qk_norm=True,
)
TestGptOss = suite_of(
    GptOss,
    nightly=True,
    **DIVISIBLE | {"num_key_value_heads": 6},
    head_dim=8,
    sliding_window=7,
    num_local_experts=4,
    num_experts_per_tok=2,
)
TestDeepseekV2 = suite_of(
    DeepseekV2,
    **DIVISIBLE | LATENT,
    q_lora_rank=None,
    topk_method="group_limited_greedy",
    n_group=2,
    topk_group=1,
)
TestDeepseekV3 = suite_of(
    DeepseekV3, nightly=True, **DIVISIBLE | LATENT, q_lora_rank=10, n_group=2, topk_group=1
)
TestQwen3Next = suite_of(
    Qwen3Next,
    nightly=True,
    **DELTA,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
)
TestQwen35 = suite_of(Qwen35, family="Qwen3_5", **DELTA)
TestQwen35Moe = suite_of(
    Qwen35Moe,
    family="Qwen3_5Moe",
    nightly=True,
    **DELTA,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
)
TestPhi3 = suite_of(
    Phi3,
    **DIVISIBLE | {"num_attention_heads": 6},
    partial_rotary_factor=0.75,
    original_max_position_embeddings=32,
    rope_scaling={
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2],
        "long_factor": [1.5, 2.5, 9.0],
    },
)
TestGemma2 = suite_of(
    Gemma2,
    nightly=True,
    **DIVISIBLE,
    head_dim=8,
    query_pre_attn_scalar=6,
    sliding_window=7,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
    tie_word_embeddings=False,
)
TestGemma3 = suite_of(
    Gemma3, nightly=True, **DIVISIBLE, head_dim=8, sliding_window=7, sliding_window_pattern=2
)
TestGemma3WithImages = suite_of(
    Gemma3WithImages,
    family="Gemma3",
    **DIVISIBLE,
    head_dim=8,
    sliding_window=7,
    sliding_window_pattern=2,
    boi_token_index=57,
    eoi_token_index=58,
    image_token_index=59,
    mm_tokens_per_image=4,
    vision_config={
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
)
TestQwen25VL = suite_of(
    Qwen2_5VL,
    nightly=True,
    family="Qwen2",
    **DIVISIBLE,
    head_dim=8,
    image_token_id=59,
    rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1]},
    vision_config={
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 2,
        "window_size": 8,
        "fullatt_block_indexes": [1],
    },
)
TestQwen3VL = suite_of(
    Qwen3VL,
    nightly=True,
    family="Qwen3",
    **DIVISIBLE,
    head_dim=8,
    image_token_id=59,
    rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1]},
    vision_config={
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
)
TestQwen3VLMoe = suite_of(
    Qwen3VLMoe,
    nightly=True,
    family="Qwen3Moe",
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=48,  # ranks divide experts, and not the tower
    image_token_id=59,
    rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1]},
    vision_config={
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
)
TestQwen3Moe = suite_of(
    Qwen3Moe,
    nightly=True,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
)


@pytest.mark.nightly
class TestThroughTransformers(ModelSuite):
    """One layer, of a family that has a plugin of its own, too."""

    examples = kit_examples(0.1)
    model = ThroughTransformers
    config = config("Llama", model_type="llama", num_hidden_layers=1)


class TestScriptedModel(ModelSuite):
    examples = kit_examples(0.3)
    model = ScriptedModel
    config = ModelConfig(
        architecture="ScriptedForCausalLM", hf={}, vocab_size=257, max_position_embeddings=64
    )
    dtypes = (torch.float32,)
    uses_positions = False
    tolerance = 1e-12
    attention = staticmethod(hash_of_history)


HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-6,
}


def random_weights():
    shapes = {
        "model.embed_tokens.weight": (61, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.self_attn.k_proj.weight": (32, 64),
        "model.norm.weight": (64,),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


class TestSafetensors(WeightLoaderSuite):
    loader = SafetensorsLoader

    def write(self, folder):
        (folder / "config.json").write_text(json.dumps(HF))
        save_file(random_weights(), folder / "model.safetensors")
        return folder, random_weights()


class TestShards(WeightLoaderSuite):
    loader = SafetensorsLoader

    def write(self, folder):
        (folder / "config.json").write_text(json.dumps(HF))
        (folder / "generation_config.json").write_text(json.dumps({"top_k": 20}))
        places = {}
        for number, name in enumerate(random_weights()):
            places[name] = f"model-{number % 2}.safetensors"
        for place in set(places.values()):
            part = {name: t for name, t in random_weights().items() if places[name] == place}
            save_file(part, folder / place)
        index = {"weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder, random_weights()


class TestGGUF(WeightLoaderSuite):
    loader = GGUFLoader

    def write(self, folder):
        config = SimpleNamespace(**HF, head_dim=16, rope_parameters={"rope_theta": 10000.0})
        config.tie_word_embeddings = True
        model = SimpleNamespace(config=config, state_dict=random_weights)
        write_gguf(folder / "tiny.gguf", model, "llama")
        return folder / "tiny.gguf", random_weights()


class TestDummy(WeightLoaderSuite):
    loader = DummyLoader
    recognised = False
    tolerance = None

    def write(self, folder):
        (folder / "config.json").write_text(json.dumps(HF))
        return folder, random_weights()


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [
        ("samplers", "sampler"),
        ("attention_backends", "backend"),
        ("ops", "ops"),
        ("models", "model"),
        ("loaders", "loader"),
    ],
)
def test_every_builtin_has_a_suite(kind, attribute):
    # Models that give vectors are compared in tests/builtin_plugins/step_parts/pooling; a loader
    # yields no weights.
    assert_tests_builtins(
        kind,
        attribute,
        globals(),
        lambda cls: getattr(cls, "generates", True) and cls is not OutlineLoader,
    )
