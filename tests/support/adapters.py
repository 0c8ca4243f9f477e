"""Small models of transformers with random weights, their adapters by PEFT, and merged models."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hardpoint import LoRARequest, SamplingParams
from hardpoint.testing import write_scripted_model

VOCAB = 257
_TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 256,
    "tie_word_embeddings": False,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Gemma3": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
    "Phi3": {},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
PHI3 = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def write_model(folder: Path, family: str = "Llama", **fields: Any) -> torch.nn.Module:
    """Write a checkpoint with random weights; return transformers' model of it, float32."""
    import transformers

    write_scripted_model(folder)
    torch.manual_seed(5)
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**_TINY | FAMILIES[family] | fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    for parameter in model.parameters():
        centre = 1.0 if parameter.dim() == 1 and family != "Gemma3" else 0.0
        parameter.data.normal_(centre, 0.15)
    model.save_pretrained(folder)
    return model


def write_two_models(base: Path) -> tuple[Path, Path]:
    """Write two checkpoints that differ in their matrices alone; return their folders."""
    folders = base / "first", base / "second"
    for folder in folders:
        write_model(folder)
    file = folders[1] / "model.safetensors"
    changed = {
        name: tensor.flip(0).contiguous() if tensor.dim() == 2 else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(changed, file, {"format": "pt"})
    return folders


def write_adapter(
    folder: Path, model: torch.nn.Module, seed: int = 0, size: float = 0.3, **fields: Any
) -> torch.nn.Module:
    """Write an adapter with random weights; return the model with it merged, by PEFT.

    Args:
        size: standard deviation of its matrices.
        fields: those of PEFT's LoraConfig.
    """
    import peft

    settings = {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR} | fields
    wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * size)
    wrapped.save_pretrained(folder)
    return wrapped.merge_and_unload().eval()


def write_tensors(folder: Path, module: str, rank: int, *, rows: int, columns: int = 16) -> None:
    """Write an adapter of one matrix, without a model."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = f"base_model.model.{module}.lora_{{}}.weight"
    tensors = {
        name.format("A"): torch.ones(rank, columns),
        name.format("B"): torch.ones(rows, rank),
    }
    save_file(tensors, folder / "adapter_model.safetensors")


def change_config(folder: Path, **fields: Any) -> None:
    """Set fields of an adapter's configuration."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def lora(name: str, number: int, folder: Path | str = "") -> LoRARequest:
    """Return an adapter as requests name it."""
    return LoRARequest(name, number, str(folder))


def all_logprobs(count: int = 6, **fields: Any) -> SamplingParams:
    """Return parameters by which outputs have the logprobs of the whole vocabulary."""
    fields = {
        "max_tokens": count,
        "logprobs": VOCAB,
        "temperature": 0.0,
        "ignore_eos": True,
    } | fields
    return SamplingParams(**fields)


@torch.no_grad()
def difference(output: Any, prompt: Sequence[int], model: torch.nn.Module) -> float:
    """Return the largest difference of an output's logprobs to the logprobs of a model.

    The model computes in double precision: in single, its own error is as large as what is allowed.
    """
    completion = output.outputs[0]
    tokens = torch.tensor([[*prompt, *completion.token_ids]])
    logits = copy.deepcopy(model).double()(tokens).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1)
    logprobs = torch.tensor([[at[t].logprob for t in range(VOCAB)] for at in completion.logprobs])
    return float((logprobs - expected).abs().max())
