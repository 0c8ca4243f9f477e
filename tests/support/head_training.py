"""Training of EAGLE-3 heads on the outputs of a model, in plain torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from hardpoint.plugins import Model

from .builtins.model_harness import Runner
from .drafting_heads import draft_logits, eagle3_layer


@dataclass(frozen=True)
class Example:
    """A text and what a head reads of it.

    Attributes:
        tokens: token ids.
        hidden: hidden states after three layers side by side, [tokens, 3 * hidden].
        embedded: embedded tokens, [tokens, hidden].
    """

    tokens: Sequence[int]
    hidden: torch.Tensor
    embedded: torch.Tensor


def read_examples(
    model: Model, texts: Sequence[Sequence[int]], layers: Sequence[int]
) -> list[Example]:
    """Return the texts with their hidden states in a built-in model."""
    after: dict[int, torch.Tensor] = {}

    def added(layer: int, branch: str, residual: torch.Tensor, delta: torch.Tensor) -> None:
        if branch == "mlp" and layer in layers:
            after[layer] = residual + delta

    examples, runner = [], Runner(model, dtype=torch.float32, num_blocks=512)
    model.context.hooks.added = added
    with torch.inference_mode():
        for index, tokens in enumerate(texts):
            runner.hidden([(f"text {index}", tokens)])
            hidden = torch.cat([after[layer] for layer in layers], -1)
            examples.append(Example(tokens, hidden, model.embed(torch.tensor(tokens)).clone()))
    model.context.hooks.added = None
    return examples


def sizes_of(model: Model) -> SimpleNamespace:
    """Return the sizes of a head for a model: those of its own layers."""
    hf = model.context.config.hf
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return SimpleNamespace(**{name: int(hf[name]) for name in names})


def new_weights(config: SimpleNamespace, vocabulary: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the random weights of a head that drafts the tokens of a vocabulary."""
    generator = torch.Generator().manual_seed(4)
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = hidden // heads
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (heads * size, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * size),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (len(vocabulary), hidden),
    }
    weights = {
        f"{name}.weight": torch.randn(*shape, generator=generator) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"midlayer.{name}.weight"] = torch.ones(hidden)
    weights["norm.weight"] = torch.ones(hidden)
    weights["d2t"] = torch.tensor(sorted(vocabulary)) - torch.arange(len(vocabulary))
    return weights


def frequent_tokens(texts: Sequence[Sequence[int]], count: int) -> list[int]:
    """Return the most frequent tokens of some texts."""
    return [token for token, _ in Counter(t for text in texts for t in text).most_common(count)]


def train(
    config: SimpleNamespace,
    weights: Mapping[str, torch.Tensor],
    examples: Sequence[Example],
    *,
    steps: int,
    rate: float = 1e-3,
) -> tuple[dict[str, torch.Tensor], float]:
    """Return trained weights, and the share of next tokens that they predict at the end.

    Each step takes one text, and predicts the token after the next one at each position.
    """
    with torch.inference_mode(False), torch.enable_grad():
        trained = {
            name: tensor.clone().requires_grad_(tensor.is_floating_point())
            for name, tensor in weights.items()
        }
        rows = {int(token): row for row, token in enumerate(_tokens(trained["d2t"]))}
        parameters = [tensor for tensor in trained.values() if tensor.requires_grad]
        optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
        right: list[float] = []
        for step in range(steps):
            example = examples[step % len(examples)]
            targets = torch.tensor([rows.get(token, -1) for token in example.tokens[2:]])
            hidden = example.hidden.clone()[:-2] @ trained["fc.weight"].T
            output = eagle3_layer(config, trained, example.embedded.clone()[1:-1], hidden)
            logits = draft_logits(trained, output)
            loss = F.cross_entropy(logits, targets, ignore_index=-1)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            right.append(float((logits.argmax(-1) == targets).float().mean()))
        last = right[-len(examples) :]
        return {n: t.detach() for n, t in trained.items()}, sum(last) / len(last)


def _tokens(offsets: torch.Tensor) -> list[int]:
    return (torch.arange(len(offsets)) + offsets).tolist()
