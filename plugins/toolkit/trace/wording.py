"""Texts of traces, for the table and the page."""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Sequence

import msgspec

from .records import Candidate, Change, CompletionTrace, StepTrace, TokenTrace, probability

_SHOWN = 24
"""Characters of a token's text that are shown."""


def token_text(token_id: int | None, text: str | None, limit: int = _SHOWN) -> str:
    """Return a token's text in quotes, without characters that move the cursor, or its id."""
    if token_id is None:
        return "none"
    if text is None:
        return f"token {token_id}"
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(map(_visible, json.dumps(cut, ensure_ascii=False)))


def plain_text(text: str) -> str:
    """Return a text in one line, without characters that move the cursor."""
    return "".join(map(_visible, json.dumps(text, ensure_ascii=False)[1:-1]))


def _visible(char: str) -> str:
    hidden = char != " " and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    return f"\\u{ord(char):04x}" if hidden else char


def logit_text(logit: float | None) -> str:
    """Return a logit; "-inf" for a token that cannot be chosen."""
    return "-inf" if logit is None else f"{logit:.3f}"


def percent(probability: float) -> str:
    """Return a probability in percent."""
    return f"{probability:.2%}" if probability >= 0.0001 or not probability else "<0.01%"


def change_name(change: Change) -> str:
    """Return the name of the source of a change."""
    return change.plugin or "mask"


def change_text(change: Change) -> str:
    """Return the numbers of a change, in one line."""
    total = change.num_left + change.num_removed - change.num_restored
    parts = []
    if change.num_removed:
        parts.append(f"removed {change.num_removed} of {total} tokens, {change.num_left} left")
    if change.num_restored:
        parts.append(f"brought back {change.num_restored} removed tokens, {change.num_left} left")
    if moved := change.num_changed - change.num_removed - change.num_restored:
        parts.append(f"changed {moved} logit{'s' * (moved > 1)}")
    if change.num_bad:
        parts.append(f"left {change.num_bad} logit{'s' * (change.num_bad > 1)} NaN or +inf")
    return ", ".join(parts)


def moves_text(change: Change, count: int = 3) -> list[str]:
    """Return the most changed tokens of a change, with their logits before and after."""
    return [
        f"{token_text(token.token_id, token.text)} "
        f"{logit_text(token.before)} → {logit_text(token.after)}"
        for token in change.tokens[:count]
    ]


def draw_text(token: TokenTrace) -> str:
    """Return how the token of a position was chosen."""
    if token.token_id is None:
        return "no token was chosen"
    if token.draw is None:
        return ""
    if token.draw.greedy:
        return f"{token.draw.sampler} took the likeliest"
    known = any(candidate.noise is not None for candidate in token.candidates)
    how = "the largest sum of logit and noise" if known else "by a noise that is not known"
    return f"{token.draw.sampler} drew with seed {token.draw.seed}: {how}"


def draft_text(token: TokenTrace) -> str:
    """Return the outcome of the draft of a position; empty if there was none."""
    if token.draft is None:
        return ""
    if token.draft == token.token_id:
        return "its draft was accepted"
    return f"its draft, token {token.draft}, was rejected"


def step_lines(steps: Sequence[StepTrace]) -> list[str]:
    """Return a line for each step; like ones that follow each other are one line."""
    lines = []
    for _, same in itertools.groupby(enumerate(steps), lambda item: _likeness(*item)):
        run = [step for _, step in same]
        first, last = run[0], run[-1]
        end = last.step + last.num_steps - 1
        name = f"step {first.step}" if end == first.step else f"steps {first.step} to {end}"
        lines.append(f"{name}: {_step_text(first, len(run))}")
    return lines


def _likeness(index: int, step: StepTrace) -> tuple[object, ...]:
    plain = StepTrace(step=0, num_requests=step.num_requests, num_tokens=1)
    is_plain = msgspec.structs.replace(step, step=0, num_computed=0) == plain
    if not is_plain:
        return (index,)
    return -1, step.num_requests, step.step - index, step.num_computed - index


def _step_text(step: StepTrace, count: int) -> str:
    parts = []
    if step.is_preempted:
        parts.append("preempted before")
    if step.is_resumed:
        parts.append("admitted again")
    if step.num_tokens:
        tokens = f"{step.num_tokens} token{'s' * (step.num_tokens > 1)}"
        parts.append(f"{tokens} in each" if count > 1 else f"{tokens} planned")
        parts.append(f"{step.num_computed} were computed before")
    else:
        parts.append(f"waited: {plain_text(step.reason or 'the scheduler gives no reason')}")
    if step.num_cached is not None:
        parts.append(f"{step.num_cached} of them from the cache")
    if step.drafts:
        accepted = "?" if step.num_accepted is None else step.num_accepted
        parts.append(f"{accepted} of {len(step.drafts)} drafts accepted")
    if step.is_lost:
        parts.append("not executed, planned again")
    others = max(step.num_requests - bool(step.num_tokens), 0)
    parts.append(f"{others} other request{'s' * (others != 1)} in the batch")
    return ", ".join(parts)


def head_lines(completion: CompletionTrace) -> list[str]:
    """Return the lines about a completion as a whole."""
    count = len(completion.token_ids)
    finish = f", finish reason {completion.finish_reason}" if completion.finish_reason else ""
    lines = [f"{count} token{'s' * (count != 1)}{finish}"]
    if completion.error:
        lines.append(f"error: {plain_text(completion.error)}")
    return lines + [f"not shown: {plain_text(note)}" for note in completion.notes]


def chances(token: TokenTrace, candidate: Candidate) -> tuple[str, str]:
    """Return the probability of a candidate by the model's logits, and in the end."""
    before = probability(candidate.logit, token.log_total)
    return percent(before), percent(candidate.probability)


def score_text(candidate: Candidate) -> str:
    """Return the noise of a candidate in the draw; empty if it is not known."""
    return "" if candidate.noise is None else f"{candidate.noise:+.3f}"
