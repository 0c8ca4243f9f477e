"""Tokens and log-probabilities of an engine, compared with a reference."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hardpoint import LLM, SamplingParams

from .recorder import Check

TIE = 1e-4
"""Two logits that are closer may change places with the order of sums, in float32."""

LOGPROB = 1e-3
"""How far log-probabilities of float32 may be apart."""

REFERENCE = Path(__file__).parents[2] / "tests" / "support" / "demo_reference.json"


@dataclass(frozen=True)
class Continuation:
    """A prompt's greedy continuation.

    Attributes:
        prompt: token ids.
        tokens: tokens that follow it.
        logprobs: log-probability of each of them.
        gaps: between the two best logits, at each.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]

    def first(self, count: int) -> Continuation:
        """Return the continuation by at most `count` tokens."""
        parts = self.tokens[:count], self.logprobs[:count], self.gaps[:count]
        return Continuation(self.prompt, *parts)


@dataclass(frozen=True)
class Forced:
    """A text, and the choice of a reference after each of its tokens.

    Attributes:
        tokens: token ids of the text.
        best: after item token but the last, in float32.
        bf16_equal: how many of these transformers chooses in bf16.
    """

    tokens: list[int]
    best: list[int]
    bf16_equal: int


def demo_references(count: int | None, new_tokens: int) -> list[Continuation]:
    """Return the results that transformers computed with the demo model in float32."""
    items = _reference()["greedy"][:count]
    return [
        Continuation(e["prompt_ids"], e["tokens"], e["logprobs"], e["gaps"]).first(
            new_tokens - index % 7 if new_tokens > 7 else new_tokens
        )
        for index, e in enumerate(items)
    ]


def demo_texts(count: int | None, length: int | None) -> list[Forced]:
    """Return texts with each position computed by transformers, in float32 and bf16.

    Args:
        count: number of texts; None is all.
        length: length of each, in positions; None is all.
    """
    items = [item for item in _reference()["greedy"] if item.get("best")][:count]
    texts = []
    for item in items:
        best = item["best"][:-1][:length]
        tokens = (item["prompt_ids"] + item["tokens"])[: len(best) + 1]
        texts.append(Forced(tokens, best, min(item["bf16_equal"], len(best))))
    return texts


def _reference() -> dict[str, Any]:
    reference: dict[str, Any] = msgspec.json.decode(REFERENCE.read_bytes())
    return reference


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def continued(llm: LLM, prompts: list[list[int]], counts: Sequence[int]) -> list[Continuation]:
    """Return the greedy continuation of each prompt by so many tokens, all in one batch."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=2, detokenize=False)
        for n in counts
    ]
    continuations = []
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        completion = output.outputs[0]
        entries = list(zip(completion.token_ids, completion.logprobs or [], strict=True))
        best = [sorted((e.logprob for e in known.values()), reverse=True) for _, known in entries]
        continuations.append(
            Continuation(
                prompt,
                [token for token, _ in entries],
                [known[token].logprob for token, known in entries],
                [values[0] - values[1] for values in best],
            )
        )
    return continuations


def compare_greedy(llm: LLM, references: Sequence[Continuation], check: Check) -> None:
    """Check that an engine continues prompts as the references, in float32.

    Where the reference's two best logits are a tie and the engine chooses another token, the
    reference's one is appended, and the comparison goes on behind it.
    """
    pending = [(item, 0) for item in references]
    ties, compared, largest = 0, 0, 0.0
    while pending:
        prompts = [item.prompt + item.tokens[:start] for item, start in pending]
        counts = [len(item.tokens) - start for item, start in pending]
        outputs, again = continued(llm, prompts, counts), list[tuple[Continuation, int]]()
        for (item, start), ours in zip(pending, outputs, strict=True):
            equal = _num_equal(ours.tokens, item.tokens[start:])
            compared += equal
            pairs = zip(ours.logprobs[:equal], item.logprobs[start:], strict=False)
            largest = max([largest, *(abs(a - b) for a, b in pairs)])
            place = start + equal
            if place == len(item.tokens):
                continue
            compared += 1
            if item.gaps[place] >= TIE:
                check.problems.append(
                    f"prompt of {len(item.prompt)} tokens, output token {place}: got "
                    f"{ours.tokens[equal]}, the reference has {item.tokens[place]}, with a logit "
                    f"{item.gaps[place]:.1e} larger than the next one"
                )
                continue
            ties += 1
            if place + 1 < len(item.tokens):
                again.append((item, place + 1))
        pending = again
    check.expect(
        largest <= LOGPROB,
        f"log-probabilities are {largest:.1e} apart, expected at most {LOGPROB:.0e}",
    )
    facts = check.facts
    facts["tokens"] = facts.get("tokens", 0) + compared
    facts["ties"] = facts.get("ties", 0) + ties
    facts["largest_difference"] = max(facts.get("largest_difference", 0.0), largest)
    check.set_detail(
        f"{facts['tokens']} tokens, {facts['ties']} of them ties that were taken from the "
        f"reference; log-probabilities at most {facts['largest_difference']:.1e} apart"
    )


def _num_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many tokens are the same, from the first."""
    pairs = zip(ours, theirs, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(ours))


def read(llm: LLM, texts: list[list[int]]) -> tuple[list[int], list[float]]:
    """Return the likeliest token after each token but the last, and the logprobs of the texts."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate(texts, params)
    choices, logprobs = [], []
    for text, output in zip(texts, outputs, strict=True):
        for token, entries in zip(text[1:], (output.prompt_logprobs or [])[1:], strict=True):
            assert entries is not None
            choices.append(next(t for t, entry in entries.items() if entry.rank == 1))
            logprobs.append(entries[token].logprob)
    return choices, logprobs


def compare_forced(llm: LLM, texts: Sequence[Forced], positions: int, check: Check) -> None:
    """Check that an engine in bf16 chooses float32's tokens as often as transformers in bf16."""
    choices, _ = read(llm, [item.tokens for item in texts])
    expected = [token for item in texts for token in item.best]
    ours = sum(a == b for a, b in zip(choices, expected, strict=True))
    theirs = sum(item.bf16_equal for item in texts)
    check.facts |= {"positions": len(expected), "equal": ours, "transformers_equal": theirs}
    check.expect(len(expected) >= positions, f"{len(expected)} positions, expected {positions}")
    check.expect(
        ours >= theirs - 2,
        f"{ours} of {len(expected)} choices equal float32, transformers has {theirs}",
    )
    check.detail = (
        f"{ours} of {len(expected)} choices equal float32, transformers' in bf16 {theirs}"
    )


def mean_distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the mean difference of log-probabilities."""
    return statistics.fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True))
