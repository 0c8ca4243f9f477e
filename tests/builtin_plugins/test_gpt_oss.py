"""gpt-oss equals transformers': its variants, its checkpoints in MXFP4, alone and divided."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.builtins.model_harness import build_model, open_loader
from support.builtins.quantized_checkpoints import build_scheme
from support.builtins.transformers_parity import check_logits_and_greedy_tokens, check_parts

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.loaders.safetensors import SafetensorsLoader
from hardpoint.builtin_plugins.models.gpt_oss import GptOss
from hardpoint.builtin_plugins.quantizations.mxfp4 import MXFP4
from hardpoint.plugins import ModelError, Ops, Wrapper
from hardpoint.plugins.quantization import QuantizedWeight
from hardpoint.testing import write_scripted_model

TINY = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
VARIANTS = {
    "as-released": {},
    "tied": {"tie_word_embeddings": True, "attention_bias": False, "swiglu_limit": 0.5},
}
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 64,
    "weight_cache": {"path": "off"},
    "kv_cache": {"num_blocks": 60, "block_size": 4},
}
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
PROMPTS = [[5, 77, 200, 13, 8, 91] * 4, [5, 77, 200, 13, 8, 91] * 2 + [3], [9]]


def random_gpt_oss(folder, **fields):
    """Write a random model of transformers with a tokenizer; return it."""
    import transformers

    write_scripted_model(folder)
    torch.manual_seed(5)
    config = transformers.GptOssConfig(**TINY | fields)
    model = transformers.GptOssForCausalLM(config).eval().float()
    for name, parameter in model.named_parameters():
        is_norm = name.endswith("norm.weight")
        parameter.data.normal_(1.0 if is_norm else 0.0, 0.2)
        if name.endswith("sinks"):
            parameter.data.mul_(10)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "m"
    model = random_gpt_oss(folder, **VARIANTS[request.param])
    if request.param == "as-released":  # without parameters of RoPE, as a config may be
        hf = json.loads((folder / "config.json").read_text())
        assert hf.pop("rope_parameters")["rope_type"] == "yarn"
        (folder / "config.json").write_text(json.dumps(hf))
    return model, GptOss, folder


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    """A checkpoint in MXFP4, and the model of transformers with the numbers of its own reading."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = tmp_path_factory.mktemp("mxfp4") / "m"
    model = random_gpt_oss(folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = parameter.shape
            groups = (experts, rows, columns // 32)
            blocks = torch.randint(256, (*groups, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 126, groups, generator=generator, dtype=torch.uint8)
            parameter.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    describe(folder, CONFIG)
    return model, folder


def describe(folder, config):
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | {"quantization_config": config}))


@torch.inference_mode()
def expected_tokens(model, prompt, count):
    history = list(prompt)
    for _ in range(count):
        history.append(int(model(torch.tensor([history])).logits[0, -1].argmax()))
    return history[len(prompt) :]


def tokens(folder, prompts=PROMPTS, count=12, **settings):
    with LLM(str(folder), config={**SETTINGS, **settings}, progress=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_new_sinks_count_from_the_next_step_on(variant, attention):
    """Attention reads them from the specs, not as the other weights."""
    model, _, folder = variant
    before = {n: p.data.clone() for n, p in model.named_parameters() if n.endswith("sinks")}
    after = {name: 5 * torch.randn_like(sinks) for name, sinks in before.items()}
    prompt, tokens = PROMPTS[0], []
    with LLM(str(folder), config=SETTINGS | {"attention": {"use": attention}}) as llm:
        for sinks in (None, after, before):
            if sinks is not None:
                llm.weights.update(sinks)
                for name, value in sinks.items():
                    model.get_parameter(name).data.copy_(value)
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
            tokens.append(output.outputs[0].token_ids)
            assert tokens[-1] == expected_tokens(model, prompt, 12)
    assert tokens[0] == tokens[2] != tokens[1]


def test_logits_and_tokens_equal_transformers(variant):
    check_logits_and_greedy_tokens(variant)


@pytest.mark.parametrize(
    ("ranks", "stages"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.nightly)]
)
def test_parts_equal_transformers(variant, ranks, stages):
    check_parts(variant, ranks, stages)


def test_windows_alternate_and_each_rank_has_the_sinks_of_its_heads(variant):
    _, _, folder = variant
    model = build_model(
        GptOss, open_loader(SafetensorsLoader, folder).config(), dtype=torch.float32
    )
    assert [spec.window for spec in model.kv_specs()] == [9, None, 9, None]
    assert all(spec.sinks.shape == (8,) for spec in model.kv_specs())


def test_experts_are_those_that_transformers_dequantises(mxfp4):
    model, folder = mxfp4
    loader = open_loader(SafetensorsLoader, folder)
    assert loader.config().quantization == "mxfp4"
    scheme, weights = build_scheme(MXFP4, CONFIG), dict(model.named_parameters())
    shapes = build_model(GptOss, loader.config(), dtype=torch.float32).weight_shapes()
    read, formats = dict(loader.weights(shapes)), loader.formats(shapes)
    assert read.keys() == formats.keys() == shapes.keys()
    count = 0
    for name, stored in read.items():
        if not isinstance(stored, QuantizedWeight):
            continue
        module, expert, part, _ = name.rsplit(".", 3)
        stacked = "down_proj" if part == "down_proj" else "gate_up_proj"
        numbers = weights[f"{module}.{stacked}"][int(expert)].T
        rows = {"gate_proj": numbers[::2], "up_proj": numbers[1::2], "down_proj": numbers}[part]
        scheme.check(formats[name].stored)
        assert torch.equal(scheme.read(stored).dequantize(), rows)
        assert formats[name].num_bytes == rows.numel() * 17 // 32
        count += 1
    assert count == 4 * 4 * 3


def test_tokens_of_mxfp4_equal_transformers_however_they_are_computed(mxfp4, caplog):
    model, folder = mxfp4
    expected = [expected_tokens(model, prompt, 12) for prompt in PROMPTS]
    with caplog.at_level(logging.INFO, logger="hardpoint"):
        assert tokens(folder) == expected
    assert "quantized weights: 48 in mxfp4" in caplog.text
    chunks = {"max_num_batched_tokens": 7, "max_num_seqs": 4}
    few = {"num_blocks": 22, "block_size": 4}  # some are preempted
    assert tokens(folder, [*PROMPTS, *PROMPTS], scheduler=chunks, kv_cache=few) == expected * 2
    assert tokens(folder, backend="torch", quantization={"use": "none"}) == expected


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}])
def test_tokens_of_mxfp4_in_processes_equal_transformers(mxfp4, parallel):
    model, folder = mxfp4
    expected = [expected_tokens(model, prompt, 12) for prompt in PROMPTS]
    assert tokens(folder, parallel=parallel, executor={"use": "multiproc"}) == expected


def changed(mxfp4, tmp_path, change):
    """Return a copy of the checkpoint with tensors changed in place by `change`."""
    _, folder = mxfp4
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    write_scripted_model(tmp_path / "m")
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text((folder / "config.json").read_text())
    return tmp_path / "m"


STEM = "model.layers.1.mlp.experts.down_proj"


def not_a_number(tensors):
    tensors[f"{STEM}_scales"][2, 5, 1] = 255


def few_experts(tensors):
    tensors[f"{STEM}_blocks"] = tensors[f"{STEM}_blocks"][:3].contiguous()


def of_one_byte_less(tensors):
    tensors[f"{STEM}_blocks"] = tensors[f"{STEM}_blocks"][..., :15].contiguous()


def without_scales(tensors):
    del tensors[f"{STEM}_scales"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (not_a_number, r"experts\.2\.down_proj.*the scales have numbers that are not finite"),
        (few_experts, r"down_proj_blocks: expected 4 dimensions, .* at least 4 experts, got \[3, "),
        (of_one_byte_less, r"blocks: expected uint8 \[64, 2, 16\] .*got uint8 \[64, 2, 15\]"),
        (without_scales, r"lacks 4 weights.*model\.layers\.1\.mlp\.experts\.\d\.down_proj\.weight"),
    ],
)
def test_what_is_wrong_in_a_checkpoint_is_named(mxfp4, tmp_path, change, message):
    with pytest.raises(ModelError, match=message):
        tokens(changed(mxfp4, tmp_path, change))


def test_codes_without_a_scheme_are_refused(mxfp4, tmp_path):
    folder = changed(mxfp4, tmp_path, lambda tensors: None)
    describe(folder, None)
    with pytest.raises(ModelError, match=r"gate_proj.weight has codes .* such as mxfp4, got none"):
        tokens(folder)


def test_a_field_of_mxfp4_that_is_not_known_is_refused():
    with pytest.raises(ModelError, match="quantization_config: block_size: the field is unknown"):
        build_scheme(MXFP4, CONFIG | {"block_size": 16})


class EarlierOps(Wrapper[Ops], Ops):
    """Operations with experts without biases or another activation."""

    contract = 1
    devices = ("cpu",)

    class Options(Wrapper.Options):
        wraps: str = "torch"

    def experts(self, gate_up, down, shape):
        return self.wrapped.experts(gate_up, down, shape)


def test_operations_without_biases_of_experts_are_refused(variant):
    _, _, folder = variant
    message = r"ops\.use: the experts\(\) of 'earlier_ops' takes no biases and no clamped, which"
    with pytest.raises(ModelError, match=message):
        tokens(folder, ops={"use": f"{__name__}:EarlierOps"}, attention={"use": "torch"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"swiglu_limit": -1}, "swiglu_limit: expected a number > 0, got -1"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok: expected at most .* \(4\), got 5"),
        ({"layer_types": ["full"] * 4}, "layer_types: expected 4 of full_attention or sliding_att"),
    ],
)
def test_wrong_fields_of_gpt_oss_are_named(variant, fields, message):
    import dataclasses

    _, _, folder = variant
    config = open_loader(SafetensorsLoader, folder).config()
    with pytest.raises(ModelError, match=message):
        build_model(
            GptOss, dataclasses.replace(config, hf=dict(config.hf) | fields), dtype=torch.float32
        )
