"""Mixtures of experts: equal to transformers', alone, in batches, in ranks and in stages."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from support.builtins.model_harness import Runner, build_model, load_model, open_loader

from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.deepseek import DeepseekV2, DeepseekV3
from hardpoint.builtin_plugins.models.glm4 import Glm4Moe
from hardpoint.builtin_plugins.models.gpt_oss import GptOss
from hardpoint.builtin_plugins.models.llama import Llama
from hardpoint.builtin_plugins.models.mixtral import Mixtral
from hardpoint.builtin_plugins.models.qwen3_next import Qwen3Next
from hardpoint.builtin_plugins.models.qwen_moe import Qwen2Moe, Qwen3Moe
from hardpoint.plugins import Model, ModelError
from hardpoint.plugins.parallel import Communicator, Cut, Parallel
from hardpoint.testing import load_ops
from hardpoint.testing.model.rank_threads import run_ranks
from hardpoint.toolkit.layers import load_weights, weight_shapes

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
    "head_dim": 16,
    "use_qk_norm": True,
}
GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "sliding_window": 9,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
LATENT = {
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
NEXT = EIGHT | {
    "shared_expert_intermediate_size": 40,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
VARIANTS = {
    "mixtral": ("Mixtral", Mixtral, {"num_local_experts": 4, "sliding_window": 30}),
    "qwen2": ("Qwen2Moe", Qwen2Moe, EIGHT | {"shared_expert_intermediate_size": 40}),
    "qwen2-dense-layers": (
        "Qwen2Moe",
        Qwen2Moe,
        EIGHT
        | {
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    "qwen3": ("Qwen3Moe", Qwen3Moe, EIGHT | {"norm_topk_prob": True, "head_dim": 16}),
    "glm4": ("Glm4Moe", Glm4Moe, GLM),
    "glm4-groups": (
        "Glm4Moe",
        Glm4Moe,
        GLM
        | {
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "use_qk_norm": False,
        },
    ),
    "gpt-oss": ("GptOss", GptOss, GPT_OSS),
    "deepseek2": ("DeepseekV2", DeepseekV2, LATENT | {"q_lora_rank": None}),
    "deepseek2-groups": (
        "DeepseekV2",
        DeepseekV2,
        LATENT
        | {
            "q_lora_rank": 18,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "rope_parameters": YARN,
        },
    ),
    "deepseek3": (
        "DeepseekV3",
        DeepseekV3,
        LATENT | {"q_lora_rank": 18, "n_group": 2, "topk_group": 1, "rope_parameters": YARN},
    ),
    "deepseek3-halves": (
        "DeepseekV3",
        DeepseekV3,
        LATENT
        | {
            "q_lora_rank": None,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
    ),
    "qwen3-dense-layers": ("Qwen3Moe", Qwen3Moe, EIGHT | {"mlp_only_layers": [1], "head_dim": 8}),
    "qwen3-next": ("Qwen3Next", Qwen3Next, NEXT),
    "qwen3-next-dense-layers": (
        "Qwen3Next",
        Qwen3Next,
        NEXT | {"linear_num_value_heads": 2, "mlp_only_layers": [0], "linear_conv_kernel_dim": 2},
    ),
}
TOKENS = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tmp_path_factory):
    """A random model of transformers, saved: the model, our class, and the folder."""
    import transformers

    family, kind, fields = VARIANTS[request.param]
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**TINY | fields)
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    for name, parameter in reference.named_parameters():
        mean = 1.0 if parameter.dim() == 1 else 0.0
        parameter.data.normal_(-2.0 if name.endswith(("A_log", "dt_bias")) else mean, 0.2)
    for name, buffer in reference.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    return reference, kind, folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """The configuration of a small Mixtral."""
    import transformers

    folder = tmp_path_factory.mktemp("mixtral")
    config = transformers.MixtralConfig(**TINY, num_local_experts=4)
    transformers.MixtralForCausalLM(config).save_pretrained(folder)
    return open_loader(SafetensorsLoader, folder)


@torch.inference_mode()
def test_logits_and_greedy_tokens_equal_transformers(variant) -> None:
    reference, kind, folder = variant
    model = load_model(kind, open_loader(SafetensorsLoader, folder), dtype=torch.float32)
    expected = reference(torch.tensor([TOKENS])).logits[0]
    runner = Runner(model, dtype=torch.float32, block_size=4)
    parts = [runner.logits([("a", TOKENS[:41])]), runner.logits([("a", TOKENS[41:])])]
    assert (torch.cat(parts) - expected).abs().max() < 1e-4
    history = [*TOKENS[:9], int(runner.last([("b", TOKENS[:9])]).argmax())]
    for _ in range(12):
        history.append(int(runner.last([("b", history[-1:])]).argmax()))
    best = reference(torch.tensor([history[:-1]])).logits[0].argmax(-1)
    assert history[9:] == best[8:].tolist()


@pytest.mark.nightly
@torch.inference_mode()
def test_triton_gives_the_logits_of_transformers(variant, monkeypatch) -> None:
    reference, kind, folder = variant
    with_triton = functools.partial(load_ops, use="triton")
    monkeypatch.setattr("support.builtins.model_harness.load_ops", with_triton)
    model = load_model(kind, open_loader(SafetensorsLoader, folder), dtype=torch.float32)
    assert model.context.ops.name == "triton"
    runner = Runner(model, dtype=torch.float32, block_size=4)
    parts = [runner.logits([("a", TOKENS[:19])]), runner.logits([("a", TOKENS[19:20])])]
    expected = reference(torch.tensor([TOKENS[:20]])).logits[0]
    assert (torch.cat(parts) - expected).abs().max() < 1e-4


@torch.inference_mode()
def test_the_experts_of_each_token_are_those_of_transformers(variant) -> None:
    reference, kind, folder = variant
    model = load_model(kind, open_loader(SafetensorsLoader, folder), dtype=torch.float32)
    layers, per_token = model.routed_experts
    assert (layers, per_token) == (3, reference.config.num_experts_per_tok)
    runner = Runner(model, dtype=torch.float32)
    routed = torch.full((len(TOKENS), layers, per_token), -1, dtype=torch.int32)
    hidden = runner.hidden([("a", TOKENS)], routed_experts=routed)
    assert torch.equal(hidden, Runner(model, dtype=torch.float32).hidden([("a", TOKENS)]))
    chosen = {}
    for layer, block in enumerate(reference.model.layers):
        if hasattr(block.mlp, "experts"):
            block.mlp.experts.register_forward_pre_hook(
                lambda _, args, layer=layer: chosen.update({layer: args[1]})
            )
    reference(torch.tensor([TOKENS]))
    for layer in range(layers):
        experts = routed[:, layer].long()
        if layer in chosen:
            assert torch.equal(experts.sort().values, chosen[layer].sort().values)
        else:
            assert (experts == -1).all()


@pytest.mark.parametrize("limit", [None, 0, 2, 5])
def test_a_qwen2_without_layer_types_has_the_windows_of_transformers(mixtral, limit) -> None:
    import transformers

    fields = EIGHT | {"shared_expert_intermediate_size": 40, "num_hidden_layers": 5}
    fields |= {"use_sliding_window": True, "sliding_window": 9}
    fields |= {} if limit is None else {"max_window_layers": limit}
    types = transformers.Qwen2MoeConfig(**TINY | fields).layer_types
    config = mixtral.config()
    hf = {name: value for name, value in config.hf.items() if name != "sliding_window"}
    config = dataclasses.replace(config, hf=hf | fields)
    model = build_model(Qwen2Moe, config, dtype=torch.float32)
    windows = [spec.window for spec in model.kv_specs()]
    assert windows == [9 if kind == "sliding_attention" else None for kind in types]


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(variant) -> None:
    _, kind, folder = variant
    loader = open_loader(SafetensorsLoader, folder)
    model = build_model(kind, loader.config(), dtype=torch.float32)
    x = torch.randn(37, 64)
    for layer in range(3):
        mlp = model.mlp(layer)
        shapes = weight_shapes(mlp.layers())
        weights = loader.weights(shapes)
        load_weights(mlp.layers(), ((name, w) for name, w in weights if name in shapes))
        together = mlp(x)
        for rows in (slice(0, 1), slice(5, 22), slice(36, 37)):
            assert torch.equal(mlp(x[rows]), together[rows])


def staged(kind, loader, communicator: Communicator, *, stages: int, expert: bool) -> torch.Tensor:
    """Return the logits of TOKENS of a model cut into ranks and stages."""
    hidden = None
    with torch.inference_mode():
        for stage in range(stages):
            parallel = Parallel(communicator, stage, stages, expert)
            model = build_model(kind, loader.config(), dtype=torch.float32, parallel=parallel)
            model.load_weights(loader.cut_weights(model.weight_shapes(), model.weight_cuts()))
            runner = Runner(model, dtype=torch.float32)
            hidden = runner.hidden([("a", TOKENS)], hidden=hidden)
        return model.compute_logits(hidden)


@pytest.mark.parametrize(("stages", "expert"), [(1, False), (1, True), (2, True)])
def test_parts_equal_the_whole(variant, stages: int, expert: bool) -> None:
    _, kind, folder = variant
    loader = open_loader(SafetensorsLoader, folder)
    with torch.inference_mode():
        whole = Runner(load_model(kind, loader, dtype=torch.float32), dtype=torch.float32)
        expected = whole.logits([("a", TOKENS)])
    results = run_ranks(2, lambda rank: staged(kind, loader, rank, stages=stages, expert=expert))
    assert torch.equal(*results)
    assert (results[0] - expected).abs().max() < 1e-4


def test_a_rank_has_the_weights_of_its_experts(mixtral) -> None:
    def parts(communicator: Communicator) -> tuple[set[str], dict[str, Cut]]:
        parallel = Parallel(communicator, expert=True)
        model = build_model(Mixtral, mixtral.config(), dtype=torch.float32, parallel=parallel)
        names = {name for name in model.weight_shapes() if ".experts." in name}
        return {name.split(".")[5] for name in names}, model.weight_cuts()

    (first, cuts), (second, _) = run_ranks(2, parts)
    assert (first, second) == ({"0", "1"}, {"2", "3"})
    assert not any(".experts." in name or "block_sparse_moe.gate" in name for name in cuts)


def test_experts_that_do_not_divide_are_refused(mixtral) -> None:
    def build(communicator: Communicator) -> Model:
        config = mixtral.config()
        hf = dict(config.hf) | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
        config = dataclasses.replace(config, hf=hf)
        parallel = Parallel(communicator, expert=True)
        return build_model(Mixtral, config, dtype=torch.float32, parallel=parallel)

    message = "parallel.tensor: 4 experts cannot be divided among 3 ranks; 1, 2, 4 would do"
    with pytest.raises(ModelError, match=message):
        run_ranks(3, build)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Mixtral, {"num_experts_per_tok": 5}, r"num_experts_per_tok: expected at most num_local_e"),
        (Mixtral, {"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
        (Mixtral, {"num_local_experts": 0}, "num_local_experts: "),
        (Qwen3Moe, {"mlp_only_layers": "1"}, "mlp_only_layers: expected a list of layers' numbers"),
        (Qwen3Moe, {"decoder_sparse_step": 0}, "decoder_sparse_step: "),
        (Qwen2Moe, {"moe_intermediate_size": 8}, "shared_expert_intermediate_size: "),
        (Qwen3Moe, {}, "moe_intermediate_size: "),
        (Glm4Moe, GLM | {"n_group": 3}, "n_group: expected a divisor of n_routed_experts 8 .* 3"),
        (Glm4Moe, GLM | {"n_group": 8}, "n_group: expected .* that leaves 2 of them in a group"),
        (Glm4Moe, GLM | {"topk_group": 2}, r"topk_group: expected at most n_group \(1\), .* got 2"),
        (Glm4Moe, GLM | {"n_group": 4}, "topk_group: expected .* room for 3 experts .* got 1"),
        (Glm4Moe, GLM | {"first_k_dense_replace": -1}, "first_k_dense_replace: expected a whole"),
    ],
)
def test_wrong_fields_are_named(mixtral, kind, fields: dict, message: str) -> None:
    config = mixtral.config()
    config = dataclasses.replace(config, hf=dict(config.hf) | fields)
    with pytest.raises(ModelError, match=message):
        build_model(kind, config, dtype=torch.float32)


def test_a_dense_model_has_no_experts(mixtral) -> None:
    assert "expert" not in Llama.parallelism
    assert build_model(Llama, mixtral.config(), dtype=torch.float32).routed_experts is None
