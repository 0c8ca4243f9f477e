"""How many drafts of a draft model are accepted: `speculation.py --acceptance`.

`draft_model` draws its drafts with the noise of the request. It is compared with a drafter that
takes the most likely token, and with the most that any rejection sampling could accept of the
draft model's distribution q where the model's is p: the sum of min(p, q) over all tokens
(Y. Leviathan et al., 2023), the mean of the positions that were drafted. The models have random
weights; the draft model is the other one without its last layer.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from loads import random_ids
from options import show_table
from scenarios import write_llama

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.speculators.draft_model import DraftModel
from hardpoint.plugins import DraftRequest

TEMPERATURES = (0.0, 0.7, 1.0)
DRAFTERS = ("coupled", "greedy")
_SIZES = {"hidden_size": 256, "intermediate_size": 352, "initializer_range": 0.12}
_LAYERS = {"target": 4, "drafter": 3}
Text = tuple[tuple[int, ...], int]

verified: list[tuple[Text, bool]] = []
"""Prompt and output position of each draft whose predecessors were right; whether it was, too."""


class Coupled(DraftModel):
    """`draft_model`, which records the drafts that were verified."""

    contract = 1

    def verified(self, request: DraftRequest, drafts: Sequence[int], accepted: int) -> None:
        """Record the drafts up to the first wrong one."""
        prompt = tuple(request.prompt_token_ids)
        first = len(request.output_token_ids) - accepted - 1
        for place in range(min(len(drafts), accepted + 1)):
            verified.append(((prompt, first + place), place < accepted))


class Greedy(Coupled):
    """The same, which drafts the most likely token at any temperature."""

    contract = 1

    def propose(self, requests: Sequence[DraftRequest], budget: int) -> list[list[int]]:
        """Return drafts as if the requests were greedy."""
        greedy = [
            dataclasses.replace(r, params=msgspec.structs.replace(r.params, temperature=0.0))
            for r in requests
        ]
        return super().propose(greedy, budget)


def opened(folder: Path, drafter: str | None = None) -> LLM:
    """Return an engine with drafts of the class that `drafter` names."""
    config: dict[str, Any] = {"load": {"use": "dummy"}, "engine": {"in_process": True}}
    if drafter:
        name = f"{__name__}:{drafter.capitalize()}"
        config["speculation"] = {"use": [name], "num_draft_tokens": 3, "adaptive": False}
        config["plugin"] = {drafter: {"model": str(folder / "drafter")}}
    model, limits = folder / ("target" if drafter else "drafter"), {"max_model_len": 256}
    return LLM(str(model), dtype="float32", config=config, progress=False, **limits)


def log_probabilities(llm: LLM, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    """Return log-probabilities of all tokens but first ones, by text: [tokens - 1, vocab]."""
    params = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=-1, detokenize=False, speculator="none"
    )
    return [
        torch.tensor(
            [[entry[token].logprob for token in sorted(entry)] for entry in entries if entry]
        )
        for entries in (output.prompt_logprobs for output in llm.generate(list(texts), params))
    ]


def overlaps(p: torch.Tensor, q: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the sum of min(p, q) of each row of log-probabilities, at a temperature."""
    if temperature == 0:
        return (p.argmax(-1) == q.argmax(-1)).float()
    at = [(logprobs / temperature).softmax(-1) for logprobs in (p, q)]
    return torch.minimum(*at).sum(-1)


def compare(prompts: int, tokens: int) -> list[dict[str, Any]]:
    """Show and return the acceptance by temperature and drafter."""
    rng = random.Random(0)
    texts = [random_ids(rng, 8, (0, 256)) for _ in range(prompts)]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, layers in _LAYERS.items():
            fields = {**_SIZES, "num_hidden_layers": layers, "tie_word_embeddings": False}
            write_llama(folder / model, **fields)
        with opened(folder) as other:
            for drafter in DRAFTERS:
                with opened(folder, drafter) as llm:
                    for temperature in TEMPERATURES:
                        acceptance = _accepted(llm, other, texts, temperature, tokens)
                        about = {"temperature": temperature, "drafter": drafter}
                        results.append(about | acceptance)
    rows = [
        [r["temperature"], r["drafter"], r["drafts"], f"{r['accepted']:.1%}", f"{r['optimum']:.1%}"]
        for r in sorted(results, key=lambda result: result["temperature"])
    ]
    heads = ("temperature", "drafter", "drafts", "accepted", "optimum of rejection sampling")
    show_table("drafts of a draft model", heads, rows)
    return results


def _accepted(
    llm: LLM, other: LLM, prompts: list[list[int]], temperature: float, tokens: int
) -> dict[str, Any]:
    """Return how many drafts of `other` were accepted, and how many could be."""
    verified.clear()
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    outputs = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    whole = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    both = zip(log_probabilities(llm, whole), log_probabilities(other, whole), strict=True)
    optimum = {
        tuple(prompt): overlaps(p, q, temperature)[len(prompt) - 1 :]
        for prompt, (p, q) in zip(prompts, both, strict=True)
    }
    counted = [
        draft for draft in verified if draft[0][1] < tokens
    ]  # others are beyond the last token
    best = sum(float(optimum[prompt][position]) for (prompt, position), _ in counted)
    return {
        "drafts": len(counted),
        "accepted": sum(right for _, right in counted) / len(counted),
        "optimum": best / len(counted),
    }
