"""Small random models with drafting heads, and plain references of the heads in torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from hardpoint.builtin_plugins.speculators.trained_head import TrainedHead
from hardpoint.builtin_plugins.step_parts.speculation import draft_planner
from hardpoint.plugins import StepCost

from .builtins.checkpoint_harness import random_model

VOCAB, HIDDEN = 97, 64
DRAFT_VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}
DEEPSEEK = SIZES | {
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 18,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
QWEN = SIZES | {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
LLAMA = SIZES | {"num_key_value_heads": 4, "num_hidden_layers": 8}


class Reference:
    """A head, computed over all positions for each draft.

    Attributes:
        target: the model, of transformers.
    """

    def __init__(
        self,
        target: torch.nn.Module,
        hidden: Callable[[torch.Tensor], torch.Tensor],
        layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        following: Callable[[torch.Tensor], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Describe the head.

        Args:
            hidden: returns its inputs [tokens, hidden] for token ids.
            layer: returns its results for embeddings and inputs.
            following: returns the next inputs for results.
            logits: returns logits for results.
        """
        self.target, self._hidden, self._layer = target, hidden, layer
        self._following, self._logits = following, logits

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], count: int) -> torch.Tensor:
        """Return the logits of greedy drafts after some tokens, [count, vocab]."""
        hidden = self._hidden(torch.tensor(tokens[:-1]))
        following, rows = list(tokens[1:]), []
        for _ in range(count):
            embedded = self.target.model.embed_tokens(torch.tensor(following))
            last = self._layer(embedded, hidden)[-1:]
            rows.append(self._logits(last))
            following.append(int(rows[-1].argmax()))
            hidden = torch.cat([hidden, self._following(last)])
        return torch.cat(rows)

    def check(self, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        """Compare greedy drafts after some tokens, up to one that rounding decides."""
        for row, draft in zip(self.logits(tokens, len(drafts)), drafts, strict=True):
            best = row.topk(2).values
            if best[0] - best[1] < 1e-3:
                return
            assert int(row.argmax()) == draft


def _random(*shape: int, seed: int, mean: float = 0.0) -> torch.Tensor:
    return mean + 0.2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _write(folder: Path, weights: dict[str, torch.Tensor], **fields: object) -> None:
    file, config = folder / "model.safetensors", folder / "config.json"
    weights = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    save_file((load_file(file) if file.exists() else {}) | weights, file, {"format": "pt"})
    before = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps(before | fields))


def write_mtp(folder: Path, family: str) -> Reference:
    """Write a model with a layer for multi-token prediction; return the reference of it.

    Args:
        family: "DeepseekV3" or "Qwen3Next".
    """
    is_deepseek = family == "DeepseekV3"
    if is_deepseek:
        target = random_model(family, **DEEPSEEK, num_hidden_layers=2, first_k_dense_replace=1)
        single = random_model(family, **DEEPSEEK, num_hidden_layers=1, first_k_dense_replace=0)
        prefix, norm = "model.layers.2.", "model.layers.2.shared_head.norm."
        names = [f"{prefix}{name}.weight" for name in ("enorm", "hnorm", "eh_proj")]
    else:
        full = ["full_attention"]
        target = random_model(family, **QWEN, num_hidden_layers=2, layer_types=full * 2)
        single = random_model(family, **QWEN, num_hidden_layers=1, layer_types=full)
        prefix, norm = "mtp.layers.0.", "mtp.norm."
        parts = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc")
        names = [f"mtp.{name}.weight" for name in parts]
    offset = 0.0 if is_deepseek else 1.0  # of the weights of norms
    with torch.no_grad():
        for index, parameter in enumerate(single.parameters()):
            parameter += _random(*parameter.shape, seed=index)
        for parameter in (*target.parameters(), *single.parameters()):
            if parameter.dim() == 1:
                parameter -= offset
    target.save_pretrained(folder)
    single.save_pretrained(folder / "single")
    weights = {
        name.replace("model.layers.0.", prefix).replace("model.norm.", norm): tensor
        for name, tensor in load_file(folder / "single" / "model.safetensors").items()
        if name.startswith(("model.layers.0.", "model.norm."))
    }
    joined = [_random(HIDDEN, seed=7, mean=1 - offset), _random(HIDDEN, seed=8, mean=1 - offset)]
    joined.append(_random(HIDDEN, 2 * HIDDEN, seed=9))
    fields = {"num_nextn_predict_layers": 1} if is_deepseek else {}
    _write(folder, weights | dict(zip(names, joined, strict=True)), **fields)
    final, single.model.norm = single.model.norm, torch.nn.Identity()

    def layer(embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        parts = _norm(embedded, joined[0] + offset), _norm(hidden, joined[1] + offset)
        inputs = torch.cat(parts, -1) @ joined[2].T
        return single.model(inputs_embeds=inputs[None]).last_hidden_state[0]

    return Reference(
        target,
        lambda ids: target.model(ids[None]).last_hidden_state[0],
        layer,
        (lambda last: last) if is_deepseek else final,
        lambda last: target.lm_head(final(last)),
    )


def write_eagle3(
    folder: Path, target: torch.nn.Module | None = None, **fields: object
) -> Reference:
    """Write a model and an EAGLE-3 head, in `model` and `head`; return the reference of the head.

    Args:
        target: the model; None is a random one.
        fields: more fields of the head's config.
    """
    target = target or random_model("Llama", **LLAMA)
    target.save_pretrained(folder / "model")
    return eagle3_reference(target, write_random_head(folder / "head", VOCAB, **fields), **fields)


def write_random_head(folder: Path, vocab_size: int, **fields: object) -> dict[str, torch.Tensor]:
    """Write a random EAGLE-3 head for models with the hidden size 64, and return its weights.

    Args:
        vocab_size: number of tokens of the model.
        fields: more fields of the config.
    """
    size, heads, kv_heads = HIDDEN // 8, 8, 4
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj": (heads * size, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (kv_heads * size, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (kv_heads * size, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, heads * size),
        "midlayer.mlp.gate_proj": (48, HIDDEN),
        "midlayer.mlp.up_proj": (48, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, 48),
        "lm_head": (DRAFT_VOCAB, HIDDEN),
    }
    norms = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm")
    shapes |= dict.fromkeys((*norms, "midlayer.post_attention_layernorm"), (HIDDEN,))
    weights = {
        f"{name}.weight": _random(*shape, seed=seed, mean=float(len(shape) == 1))
        for seed, (name, shape) in enumerate(shapes.items())
    }
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randperm(vocab_size, generator=generator)[:DRAFT_VOCAB].sort().values
    weights["d2t"] = tokens - torch.arange(DRAFT_VOCAB)
    weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    table = {name: value for name, value in LLAMA.items() if name != "num_hidden_layers"}
    write_head(folder, weights, table | {"vocab_size": vocab_size} | fields)
    return weights


def write_head(folder: Path, weights: dict[str, torch.Tensor], table: dict[str, object]) -> None:
    """Write an EAGLE-3 head, with some fields of its config besides the architecture."""
    folder.mkdir()
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    sizes = {"num_hidden_layers": 1, "draft_vocab_size": len(weights["d2t"]), "rms_norm_eps": 1e-6}
    _write(folder, weights, **fields, **sizes, **table)


def eagle3_reference(
    target: torch.nn.Module, weights: dict[str, torch.Tensor], **fields: object
) -> Reference:
    """Return the reference of an EAGLE-3 head over a Llama model."""
    count = target.config.num_hidden_layers
    described = fields.get("eagle_config") or {}
    stated = described.get("eagle_aux_hidden_state_layer_ids")
    layers = stated or [1, count // 2 - 1, count - 4]

    def hidden(ids: torch.Tensor) -> torch.Tensor:
        states = target.model(ids[None], output_hidden_states=True).hidden_states
        return torch.cat([states[1 + n][0] for n in layers], -1) @ weights["fc.weight"].T

    def logits(last: torch.Tensor) -> torch.Tensor:
        rows = draft_logits(weights, last)
        whole = rows.new_full((len(rows), target.config.vocab_size), -1e30)
        whole[:, torch.arange(rows.shape[1]) + weights["d2t"]] = rows
        return whole

    def layer(embedded: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return eagle3_layer(target.config, weights, embedded, inputs)

    return Reference(target, hidden, layer, lambda last: last, logits)


def draft_logits(weights: dict[str, torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """Return the logits of a head over its own vocabulary."""
    return _norm(output, weights["norm.weight"]) @ weights["lm_head.weight"].T


def eagle3_layer(
    config: object, weights: dict[str, torch.Tensor], embedded: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Return the residual stream after the layer of an EAGLE-3 head, [tokens, hidden]."""
    w = {name.removeprefix("midlayer."): tensor for name, tensor in weights.items()}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = w["self_attn.q_proj.weight"].shape[0] // heads
    normed = (
        _norm(embedded, w["input_layernorm.weight"]),
        _norm(hidden, w["hidden_norm.weight"]),
    )
    x = torch.cat(normed, -1)
    q, k, v = (
        (x @ w[f"self_attn.{name}_proj.weight"].T).view(len(x), n, size).transpose(0, 1)
        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    places = torch.arange(len(x)).float()
    angles = torch.outer(places, 10_000.0 ** -(torch.arange(0, size, 2) / size))
    turned = []
    for part in (q, k):
        a, b = part.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        turned.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
    k, v = (part.repeat_interleave(heads // kv_heads, 0) for part in (turned[1], v))
    attended = F.scaled_dot_product_attention(turned[0], k, v, is_causal=True)
    residual = hidden + attended.transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
    h = _norm(residual, w["post_attention_layernorm.weight"])
    gated = F.silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
    return residual + gated @ w["mlp.down_proj.weight"].T


def record_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], bool]]:
    """Return a list that gets tokens, drafts and greediness of requests with drafts of heads."""
    recorded: list[tuple[list[int], list[int], bool]] = []
    propose = TrainedHead.propose

    def recording(self: TrainedHead, requests: Sequence, budget: int) -> list[list[int]]:
        drafts = propose(self, requests, budget)
        for request, tokens in zip(requests, drafts, strict=True):
            if tokens:
                text = [*request.prompt_token_ids, *request.output_token_ids]
                recorded.append((text, list(tokens), request.params.greedy))
        return drafts

    monkeypatch.setattr(TrainedHead, "propose", recording)
    return recorded


def fix_costs_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let adaptive lengths of drafts depend on their acceptance alone, not on measured times."""
    cost = StepCost(step=10.0, single_query=0.1, draft=0.05, is_trained=True)
    lengths = draft_planner.draft_lengths

    def of_cost(limits: Any, rates: Any, _measured: StepCost, *counts: int) -> dict[str, int]:
        return lengths(limits, rates, cost, *counts)

    monkeypatch.setattr(draft_planner, "draft_lengths", of_cost)
