"""Fields of config.json mean the same as in transformers, including defaults."""

from __future__ import annotations

import copy
import json
import logging
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from support.builtins.model_harness import build_model, load_model, open_loader
from support.builtins.transformers_parity import check_logits_and_greedy_tokens
from support.processes import ROOT

from hardpoint import LLM, ConfigError, SamplingParams
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.deepseek import DeepseekV3
from hardpoint.builtin_plugins.models.gemma.text import Gemma3
from hardpoint.builtin_plugins.models.glm4 import Glm4, Glm4Moe
from hardpoint.builtin_plugins.models.granite import Granite
from hardpoint.builtin_plugins.models.llama import Llama, Mistral
from hardpoint.builtin_plugins.models.mixtral import Mixtral
from hardpoint.builtin_plugins.models.olmo import Olmo2, Olmo3
from hardpoint.builtin_plugins.models.phi3 import Phi3
from hardpoint.builtin_plugins.models.qwen import Qwen2
from hardpoint.plugins import Model, ModelConfig
from hardpoint.toolkit.hf_config import ConfigFields, model_config

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
ORIGINAL = "original_max_position_embeddings"
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    ORIGINAL: 128,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.5, 9.0, 20.0],
}
TYPED = {"full_attention": PLAIN, "sliding_attention": PLAIN}
TYPES = ["full_attention", "sliding_attention", "full_attention"]
OLMO3 = {"sliding_window": 9, "layer_types": TYPES, "rope_scaling": YARN}
GEMMA3 = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9, "layer_types": TYPES}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 18,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.9}
CONFIGS: dict[str, tuple[str, type[Model], dict[str, Any]]] = {
    "scaling-hides-parameters": ("Llama", Llama, {"rope_parameters": PLAIN, "rope_scaling": YARN}),
    "scaling-and-theta": (
        "Qwen2",
        Qwen2,
        {"rope_parameters": PLAIN, "rope_scaling": YARN, "rope_theta": 900.0},
    ),
    "scaling-of-latents": (
        "DeepseekV3",
        DeepseekV3,
        LATENT | {"rope_parameters": PLAIN, "rope_scaling": YARN | MSCALE},
    ),
    "scaling-of-phi3": (
        "Phi3",
        Phi3,
        {ORIGINAL: 32, "rope_parameters": PLAIN, "rope_scaling": LONGROPE},
    ),
    "scaling-of-olmo3": ("Olmo3", Olmo3, OLMO3 | {"rope_parameters": TYPED}),
    "scaling-of-gemma3": (
        "Gemma3",
        Gemma3,
        GEMMA3
        | {
            "rope_parameters": TYPED,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "original-of-yarn": ("Llama", Llama, {"rope_scaling": YARN, ORIGINAL: 256}),
    "original-of-llama3": ("Llama", Llama, {"rope_scaling": LLAMA3, ORIGINAL: 32}),
    "original-of-typed-layers": ("Olmo3", Olmo3, OLMO3 | {ORIGINAL: 256}),
    "whole-heads": ("Llama", Llama, {"partial_rotary_factor": 0.5}),
    "whole-heads-of-parameters": (
        "Qwen2",
        Qwen2,
        {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "whole-heads-of-latents": ("DeepseekV3", DeepseekV3, LATENT | {"partial_rotary_factor": 0.5}),
    "no-window-llama": ("Llama", Llama, {"sliding_window": 9}),
    "no-window-granite": ("Granite", Granite, {"sliding_window": 9}),
    "no-window-glm4": ("Glm4", Glm4, {"sliding_window": 9, "head_dim": 8}),
    "no-window-glm4-moe": ("Glm4Moe", Glm4Moe, EXPERTS | {"sliding_window": 9}),
    "no-window-olmo2": ("Olmo2", Olmo2, {"sliding_window": 9}),
    "window-mistral": ("Mistral", Mistral, {"sliding_window": 9, "use_sliding_window": False}),
    "left-out-mixtral": (
        "Mixtral",
        Mixtral,
        {
            "num_key_value_heads": ...,
            "num_attention_heads": 16,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}


def written(family: str, fields: dict[str, Any], folder: Path) -> Any:
    """Write config.json as it is given, and random weights; return the model of transformers.

    Fields that are `...` are left out.
    """
    import transformers

    kind = getattr(transformers, f"{family}ForCausalLM")
    fields = {name: value for name, value in (TINY | fields).items() if value is not ...}
    fields |= {"architectures": [kind.__name__], "model_type": kind.config_class.model_type}
    text = json.dumps(fields)
    (folder / "config.json").write_text(text)
    torch.manual_seed(5)
    model = kind(transformers.AutoConfig.from_pretrained(folder)).eval().float()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_means_the_same_to_transformers(name: str, tmp_path: Path) -> None:
    family, kind, fields = CONFIGS[name]
    check_logits_and_greedy_tokens((written(family, fields, tmp_path), kind, tmp_path))


GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
NATIVE = {
    name: path
    for name, path in GROUPS["hardpoint.models"].items()
    if not name.startswith("transformers") and not name.endswith("ForConditionalGeneration")
    if EntryPoint(name, path, "").load().is_architecture
}
"""Built-in models with a class in transformers: no drafting heads, no wrappers."""
SIZES: dict[str, Any] = {
    **LATENT,
    "vocab_size": 97,
    "hidden_size": 1024,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 128,
    "max_position_embeddings": 256,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "shared_expert_intermediate_size": 40,
    "pad_token_id": 1,
}
for left_out in ("n_group", "topk_group", "first_k_dense_replace"):
    del SIZES[left_out]
WINDOWS = {"use_sliding_window": True, "max_window_layers": 2}


def facts(
    name: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that a native model reads, and its settings after all of them."""
    read: dict[str, Any] = {}

    def recorded(method: Any) -> Any:
        def call(self: ConfigFields, field: str, *args: Any, **limits: Any) -> Any:
            read[field] = method(self, field, *args, **limits)
            return read[field]

        return call

    for method in ("whole", "number", "flag"):
        monkeypatch.setattr(ConfigFields, method, recorded(getattr(ConfigFields, method)))
    hf = copy.deepcopy(fields)
    config = ModelConfig(architecture=name, hf=hf, vocab_size=97, max_position_embeddings=256)
    model: Any = build_model(EntryPoint(name, NATIVE[name], "").load(), config, dtype=torch.float32)
    monkeypatch.undo()
    plain = (int, float, str, bool, type(None))
    return read, {
        **{key: value for key, value in vars(model).items() if isinstance(value, plain)},
        "shapes": model.weight_shapes(),
        "specs": model.kv_specs(),
        "angles": [rope and angles(rope) for rope in ropes_of(model)],
    }


def ropes_of(model: Any) -> list[Any]:
    """Return the rotary embedding of each layer; none of encoders, which have other names."""
    return model.rotary_embeddings() if hasattr(model, "rotary_embeddings") else []


def angles(rope: Any) -> list[list[float]]:
    """Return the angles of some positions."""
    rope.allocate()
    return rope.at(torch.tensor([1, 99])).tolist()


@pytest.mark.parametrize("switch", [{}, WINDOWS], ids=["sizes", "windows"])
@pytest.mark.parametrize("name", NATIVE)
def test_what_a_config_leaves_out_is_as_in_transformers(
    name: str, switch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    stated = SIZES | switch
    whole = getattr(transformers, name).config_class(**copy.deepcopy(stated)).to_dict()
    (read, made), (read_whole, made_whole) = (
        facts(name, fields, monkeypatch) for fields in (stated, whole)
    )
    ropes = {field for field in read if field.startswith(("rope_", "global_", "local_rope"))}
    known = (read.keys() & read_whole.keys()) - ropes
    assert {field: read[field] for field in known} == {field: read_whole[field] for field in known}
    assert made == made_whole


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 256),
        ({"rope_scaling": YARN | {ORIGINAL: 256}}, 1024),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, 1024),
        ({"rope_parameters": YARN | {ORIGINAL: 100}}, 400),
        ({"rope_scaling": YARN | {ORIGINAL: 256}, ORIGINAL: 128}, 512),
        ({"rope_scaling": YARN}, 256),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, 640),
        ({"rope_parameters": {"full_attention": YARN | {ORIGINAL: 128}}}, 512),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8}, "model_type": "gemma3_text"}, 256),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 256),
        ({"rope_scaling": LLAMA3}, 256),
        ({"rope_scaling": LONGROPE | {"rope_type": "yarn", "factor": 4.0}}, 256),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, 256),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e30}}, 2**31 - 1),
        ({"rope_scaling": 7}, 256),
    ],
    ids=str,
)
def test_a_scaling_of_rope_extends_the_context(fields: dict[str, Any], expected: int) -> None:
    hf = TINY | {"architectures": ["LlamaForCausalLM"]} | fields
    config = model_config(hf, "config.json", eos_token_ids=[], dtype=None)
    assert config.max_position_embeddings == expected


def test_a_prompt_beyond_max_position_embeddings_runs_as_in_transformers(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, ORIGINAL: 32, "rope_theta": 10000.0}
    recipe = {"max_position_embeddings": 32, "rope_scaling": yarn}
    reference = written("Qwen2", recipe, tmp_path)
    prompt = [5, 9, 33, 7] * 20
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None
    )[0, len(prompt) :].tolist()
    config = {"dtype": "float32", "tokenizer": {"use": "none"}, "kv_cache": {"num_blocks": 64}}
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False)
    for length in ({"max_model_len": 100}, {}):
        with LLM(str(tmp_path), config=config | length) as llm:
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
            assert list(output.outputs[0].token_ids) == expected
    with pytest.raises(ConfigError, match="max_model_len: expected at most 128, the limit"):
        LLM(str(tmp_path), config=config | {"max_model_len": 129})


@pytest.mark.parametrize(
    ("family", "kind", "fields", "note"),
    [
        (
            "Phi3",
            Phi3,
            {ORIGINAL: 32, "rope_scaling": LONGROPE},
            "max_model_len 64 is above original_max_position_embeddings 32, so that LongRoPE's "
            "long factors rotate all sequences, short ones too; up to 32, the short factors do",
        ),
        (
            "Llama",
            Llama,
            {"rope_parameters": PLAIN, "rope_scaling": YARN},
            "rope_scaling replaces rope_parameters, so that rope_theta is 10000 and not 500.0; "
            "set rope_theta in rope_scaling for another one",
        ),
    ],
    ids=["longrope", "theta"],
)
def test_the_log_names_once_what_rope_does_unasked(
    family: str, kind: type[Model], fields: dict[str, Any], note: str, tmp_path: Path, caplog: Any
) -> None:
    written(family, fields, tmp_path)
    loader = open_loader(SafetensorsLoader, tmp_path)
    caplog.set_level(logging.WARNING, "hardpoint")
    load_model(kind, loader, dtype=torch.float32, max_model_len=64)
    assert own_messages(caplog) == [f"model: {note}"]
    caplog.clear()
    theta = fields["rope_scaling"] | {"rope_theta": 500.0}
    hf = dict(loader.config().hf) | {"rope_scaling": theta}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    quiet = open_loader(SafetensorsLoader, tmp_path)
    load_model(kind, quiet, dtype=torch.float32, max_model_len=32)
    assert not own_messages(caplog)


def own_messages(caplog: Any) -> list[str]:
    """Return the messages of this package; transformers may have some of its own."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("hardpoint")]
