"""Records of a traced completion: its tokens, and its steps. A logit that is None is -inf."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

__all__ = ["Candidate", "Change", "Draw", "StepTrace", "TokenChange", "TokenTrace"]

PhaseName = Literal["mask", "bias", "penalty", "temperature", "truncate", "force"]


class Candidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token that could have been chosen.

    Attributes:
        text: text of the token alone; None without a tokenizer.
        logit: the model's.
        logits: after each of `TokenTrace.changes`.
        probability: in the end, 0 to 1.
        noise: noise of the draw added to the last logit, if known: the candidate with the
            largest sum of all tokens is chosen.
    """

    token_id: int
    text: str | None = None
    logit: float | None
    logits: list[float | None] = []
    probability: float
    noise: float | None = None


class TokenChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token before and after a change."""

    token_id: int
    text: str | None = None
    before: float | None
    after: float | None


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The changes of a plugin at one position.

    Attributes:
        phase: when it ran.
        plugin: name of the plugin; empty for masks of steps with unknown makers.
        package: distribution and version that it came from.
        num_changed: tokens with changed logits, removed ones included.
        num_removed: tokens that it made impossible.
        num_restored: impossible tokens that it made possible.
        num_left: tokens that are possible after it.
        num_bad: logits that are NaN or +inf after it.
        log_total: logarithm of the sum of the exponentials of the logits after it, so that a token
            has the probability exp(logit - log_total); None if no token is possible.
        tokens: the most changed tokens: by how much a logit moved, or, for removed and restored
            tokens, the likeliest.
    """

    phase: PhaseName
    plugin: str
    package: str = ""
    num_changed: int
    num_removed: int = 0
    num_restored: int = 0
    num_left: int
    num_bad: int = 0
    log_total: float | None = None
    tokens: list[TokenChange] = []


class Draw(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the token was chosen from the last logits.

    Attributes:
        sampler: name of the sampler.
        greedy: whether the likeliest token is taken.
        seed: seed of the request; None if it is greedy.
    """

    sampler: str
    greedy: bool
    seed: int | None = None


class TokenTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of one output position.

    Attributes:
        position: output position, from 0.
        step: the step that sampled it, see `StepTrace.step`.
        token_id: the chosen token; None if none was, because the request ended with an error.
        rank: its place in the model's logits, from 1.
        draft: the drafted token of this position, if there was one; it was accepted if it is
            `token_id`.
        worker: rank of the worker that sampled.
        log_total: see `Change`; of the model's logits.
        candidates: the likeliest in the end first. They are the chosen token, and the likeliest
            ones before and after the changes.
        changes: in their order; plugins that changed nothing here are left out.
    """

    position: int
    step: int
    token_id: int | None = None
    text: str | None = None
    rank: int | None = None
    draft: int | None = None
    worker: int = 0
    log_total: float | None = None
    candidates: list[Candidate] = []
    changes: list[Change] = []
    draw: Draw | None = None


class StepTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of the request, or several in which it waited for the same.

    Attributes:
        step: number of the first step.
        num_steps: number of the steps.
        num_requests: requests in the step, this one included.
        num_tokens: tokens of it that were planned; 0 if it waited.
        num_computed: its tokens that were computed before the step.
        num_cached: tokens of the prompt that the cache had, in the first step that computed any.
        waits_for: kind of the reason, see `WaitingFor`.
        reason: reason of the wait, as text.
        is_preempted: whether it had to leave the batch before this step.
        is_resumed: whether it came back to it.
        is_lost: whether the step was not executed to its end, so that it was planned again.
        drafts: drafts that the step verified.
        num_accepted: how many of them were right; None if the result is not known.
        masks: parts with masks that forbade tokens of it, with their packages.
    """

    step: int
    num_steps: int = 1
    num_requests: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    num_cached: int | None = None
    waits_for: str | None = None
    reason: str | None = None
    is_preempted: bool = False
    is_resumed: bool = False
    is_lost: bool = False
    drafts: list[int] = []
    num_accepted: int | None = None
    masks: list[tuple[str, str]] = []


class CompletionTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of one completion.

    Attributes:
        index: among the `n` completions of the prompt.
        text: the output.
        token_ids: tokens of the output.
        finish_reason: see `CompletionOutput`.
        tokens: records of the output positions.
        steps: records of the request's steps, in order.
        error: why the request ended, if a plugin or the model failed.
        notes: missing parts of the trace.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    tokens: list[TokenTrace] = []
    steps: list[StepTrace] = []
    error: str | None = None
    notes: list[str] = []


class TraceRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A traced completion as the engine reports it.

    Attributes:
        token_ids: the output.
        tokens: `TokenTrace` as JSON, of each output position.
        error: why the request ended, if a plugin or the model failed.
        notes: missing parts of the record.
    """

    token_ids: list[int]
    tokens: list[msgspec.Raw]
    steps: list[StepTrace]
    error: str | None = None
    notes: list[str] = []


def probability(logit: float | None, log_total: float | None) -> float:
    """Return the probability of a token, see `Change.log_total`."""
    if logit is None or log_total is None:
        return 0.0
    return math.exp(min(logit - log_total, 0.0))
