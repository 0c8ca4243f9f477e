"""Models without weights: reports of config.json and an index alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.builtins.transformers_models import FAMILIES, save

from hardpoint import LLM
from hardpoint.cli import main
from hardpoint.plugins import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
GPT_NEOX = LLAMA | {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
GATE = ("gpt2", "gpt_oss", "qwen3_moe", "granitemoe")
LINEAR = {
    **dict.fromkeys((f"self_attn.{name}_proj" for name in "qkvo"), 128 * 128),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), 128 * 256),
}
PLAIN = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
INDEX = "model.safetensors.index.json"


def write(folder: Path, fields: dict[str, Any], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(fields | changes))
    return folder


def write_index(folder: Path, parts: tuple[str, ...], size: int | None) -> None:
    names = list(PLAIN)
    for layer in (f"model.layers.{number}" for number in range(2)):
        names += [
            f"{layer}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")
        ]
        names += [f"{layer}.{module}.{part}" for module in LINEAR for part in parts]
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(names, "x.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))


def report(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> dict[str, Any]:
    assert main(["models", str(folder), "--json", *arguments]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def error(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    assert main(["models", str(folder)]) == 2
    return capsys.readouterr().err


def test_a_config_alone_gives_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    content = report(capsys, write(tmp_path, LLAMA))
    assert (content["loader"], content["implementation"]) == ("outline", "LlamaForCausalLM")
    assert content["heads"] == [[4, 4, 32]] * 2
    assert content["token_bytes"] == 2 * 2 * 4 * 32 * 2  # layers, keys and values, heads, size
    count = 2 * (sum(LINEAR.values()) + 2 * 128) + 128 + 2 * 1024 * 128
    assert content["num_params"] == count
    (group,) = content["weights"]
    assert (group["stored"], group["stored_bytes"]) == ("bfloat16", 2 * count)
    assert main(["models", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "described by its config.json and index: the folder has no weights\n" in text
    assert "4 heads, 4 of keys and values, of 32 elements\n" in text
    assert "1 KiB for a token that all layers see\n" in text
    assert "by the plugin" not in text


def test_a_model_through_transformers_is_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert report(capsys, write(tmp_path, GPT_NEOX))["implementation"] == "transformers"
    assert main(["models", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "by the plugin transformers: it has no plugin of its own, or models.use\n" in text


def test_quantised_matrices_are_those_of_the_index(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path, LLAMA, quantization_config=AWQ)
    plain = 2 * (2 * 1024 * 128 + 5 * 128)
    write_index(tmp_path, ("qweight", "qzeros", "scales"), plain + 150_000)
    groups = {group["stored"]: group for group in report(capsys, tmp_path)["weights"]}
    assert (groups["awq"]["count"], groups["bfloat16"]["count"]) == (14, 7)
    assert groups["awq"]["stored_bytes"] == pytest.approx(150_000, abs=14)
    assert groups["bfloat16"]["stored_bytes"] == plain


def test_matrices_of_bitsandbytes_have_their_codes_below_the_weight(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path, LLAMA, quantization_config=NF4)
    plain = 2 * (2 * 1024 * 128 + 5 * 128)
    parts = ("", ".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4")
    write_index(tmp_path, tuple(f"weight{part}" for part in parts), plain + 150_000)
    groups = {group["stored"]: group for group in report(capsys, tmp_path)["weights"]}
    assert (groups["bitsandbytes"]["count"], groups["bfloat16"]["count"]) == (14, 7)
    assert groups["bitsandbytes"]["stored_bytes"] == pytest.approx(150_000, abs=14)


def keep_outline(folder: Path, codes: int = 0) -> None:
    """Write the index of a folder's weights, and remove these.

    Args:
        folder: a model.
        codes: bytes of the codes of stacked experts, instead of matrices; 0 keeps these.
    """
    tensors, size = load_file(folder / "model.safetensors"), 0
    names: list[str] = []
    for name, tensor in tensors.items():
        is_stacked = codes and name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        names += [f"{name}_blocks", f"{name}_scales"] if is_stacked else [name]
        size += 0 if is_stacked else tensor.nbytes
    index = {
        "metadata": {"total_size": size + codes},
        "weight_map": dict.fromkeys(names, "model.safetensors"),
    }
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("use", ["auto", "transformers"])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in GATE else [pytest.mark.nightly]) for k in FAMILIES],
)
def test_an_index_gives_the_report_of_the_weights(
    kind: str, use: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save(kind, *FAMILIES[kind], tmp_path)
    capsys.readouterr()
    arguments = ["--set", f"models.use={use}"]
    expected = report(capsys, tmp_path, *arguments)
    keep_outline(tmp_path)
    content = report(capsys, tmp_path, *arguments)
    assert (expected["loader"], content["loader"]) == ("safetensors", "outline")
    assert content["num_params"] == expected["num_params"]
    assert content["weights"] == expected["weights"]


def test_stacked_experts_have_their_codes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name, fields = FAMILIES["gpt_oss"]
    save("gpt_oss", name, fields | {"intermediate_size": 64}, tmp_path)
    capsys.readouterr()
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path, config, quantization_config={"quant_method": "mxfp4"})
    keep_outline(tmp_path, codes=60_000)
    groups = {group["stored"]: group for group in report(capsys, tmp_path)["weights"]}
    assert groups["mxfp4"]["count"] == 2 * 4 * 3
    assert groups["mxfp4"]["stored_bytes"] == pytest.approx(60_000, abs=24)
    text = json.loads((tmp_path / INDEX).read_text())
    lost = "model.layers.0.mlp.experts.down_proj_scales"
    del text["weight_map"][lost]
    (tmp_path / INDEX).write_text(json.dumps(text))
    assert "lacks 4 weights: model.layers.0.mlp.experts.0.down_proj.weight" in error(
        capsys, tmp_path
    )


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (None, "metadata.total_size: expected the bytes of all tensors, .* got None"),
        (1000, "metadata.total_size: -524.* bytes would be left for 14 quantized matrices"),
        (10**9, "metadata.total_size: .* expected some, and fewer than in bfloat16"),
    ],
)
def test_a_size_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, size: int | None, message: str
) -> None:
    write(tmp_path, LLAMA, quantization_config=AWQ)
    write_index(tmp_path, ("qweight", "qzeros", "scales"), size)
    assert re.search(message, error(capsys, tmp_path))


def test_without_an_index_a_quantised_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path, LLAMA, quantization_config=AWQ)
    assert f"quantization_config: 'awq', but only weights or {INDEX} show" in error(
        capsys, tmp_path
    )


def test_an_index_that_lacks_weights_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path, LLAMA)
    write_index(tmp_path, (), 1000)
    assert "lacks 14 weights: model.layers.0.self_attn.q_proj.weight, " in error(capsys, tmp_path)


def test_what_is_refused_is_refused_without_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fields = {"architectures": ["JambaForCausalLM"], "model_type": "jamba"}
    text = error(capsys, write(tmp_path, LLAMA | fields))
    assert "(Conv1d), which keeps a state per sequence besides keys and values" in text


def test_an_engine_has_no_weights_to_read(tmp_path: Path) -> None:
    settings = {"load": {"use": "outline"}, "tokenizer": {"use": "none"}}
    message = "load.use = 'outline' describes a model .* and has none of its 21 weights"
    with pytest.raises(ModelError, match=message):
        LLM(str(write(tmp_path, LLAMA)), config=settings | {"weight_cache": {"path": "off"}})


def test_a_folder_with_some_weights_is_no_outline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path, LLAMA)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "is a pickle" in error(capsys, tmp_path)
