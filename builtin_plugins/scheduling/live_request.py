"""The default scheduler's request: per-step state and stop conditions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hardpoint.plugins import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreRequest,
    FinishReason,
    RepetitionDetection,
    Request,
)

# Drafts and events of all requests that have none, because many may wait and the garbage
# collector visits each object. They are only ever replaced.
_NOTHING: list[Any] = []


class SchedulerRequest(Request):
    """A request that has not finished, with its stop conditions precomputed.

    Attributes:
        num_loading_tokens: tokens that were last to be loaded between steps.
        skip_transfer: whether all its tokens are computed locally, since a load failed or its
            result became invalid.
        num_external_tokens: the part of `num_cached_tokens` that a connector loaded.
        prefill_reported: whether an output has reported the prefill statistics.
        last_step: number of the step that scheduled it last, where several are under way at once.
        max_total_tokens: number of prompt and output tokens at which it ends.
        queue_key: while it is in the waiting queue, the policy's key.
        members: requests that run together with it.
        num_group_prompt_tokens: length of its prompt and of the prompts of its members.
        leader: the request that it is a member of; None of others.
        num_sent_blocks: blocks per KV cache group, of a request of a group, that
            workers know; 0 while they do not have the request.
        is_plain: whether it has neither members nor features.
    """

    __slots__ = (
        "_eos_token_ids",
        "_min_total_tokens",
        "_repetition",
        "_stop_token_ids",
        "client_index",
        "features",
        "is_plain",
        "last_step",
        "leader",
        "max_total_tokens",
        "members",
        "num_external_tokens",
        "num_group_prompt_tokens",
        "num_loading_tokens",
        "num_sent_blocks",
        "prefill_reported",
        "queue_key",
        "skip_transfer",
    )

    def __init__(self, source: EngineCoreRequest, order: int, max_model_len: int) -> None:
        super().__init__(source, order)
        self.draft_token_ids = self.events = _NOTHING
        params = source.params
        self.client_index = source.client_index
        self.features = source.features
        self.num_loading_tokens = 0
        self.skip_transfer = False
        self.num_external_tokens = 0
        self.prefill_reported = bool(self.output_token_ids)  # by the engine that it comes from
        self.queue_key: Any = None
        self.last_step = -1
        room = params.max_tokens if params.max_tokens is not None else max_model_len
        self.max_total_tokens = min(self.num_prompt_tokens + room, max_model_len)
        self._min_total_tokens = self.num_prompt_tokens + params.min_tokens
        self._eos_token_ids = _token_set(tuple(source.eos_token_ids))
        self._stop_token_ids = _token_set(tuple(source.stop_token_ids))
        self._repetition = params.repetition_detection
        self.leader: SchedulerRequest | None = None
        self.num_sent_blocks = 0
        self.members: list[SchedulerRequest] = []
        self.num_group_prompt_tokens = self.num_prompt_tokens
        for members in source.members.values():
            for member_source in members:
                member = SchedulerRequest(member_source, order, max_model_len)
                member.leader = self
                self.members.append(member)
                self.num_group_prompt_tokens += member.num_prompt_tokens
                room = max_model_len - member.num_prompt_tokens
                self.max_total_tokens = min(self.max_total_tokens, self.num_prompt_tokens + room)
        self.is_plain = not (self.members or self.features)

    @property
    def group(self) -> tuple[SchedulerRequest, ...]:
        """The request and its members."""
        return (self, *self.members)

    def record_event(self, event: EngineCoreEventType, now: float) -> None:
        """Record an event; the next output carries it."""
        self.events = [*self.events, EngineCoreEvent(event, now)]

    def limit_cached_tokens(self, num_valid: int) -> None:
        """Reduce the counts of cached and external tokens to the first `num_valid` tokens."""
        lost = max(self.num_cached_tokens - num_valid, 0)
        self.num_cached_tokens -= lost
        self.num_external_tokens = max(self.num_external_tokens - lost, 0)

    def append_sampled(self, token: int) -> FinishReason | None:
        """Append a sampled token; return why the request ends with it, None if it goes on."""
        list.append(self.output_token_ids, token)
        self.num_tokens = length = self.num_tokens + 1
        # Stop tokens are masked until there are enough tokens, but a plugin may force one.
        if token in self._stop_token_ids and length > self._min_total_tokens:
            return FinishReason.STOP
        # Before the length: a larger max_tokens would not have helped.
        if (
            self._repetition is not None
            and length >= self._min_total_tokens
            and has_repetition(self.output_token_ids, self._repetition)
        ):
            return FinishReason.REPETITION
        return FinishReason.LENGTH if length >= self.max_total_tokens else None

    def repeats_before(self) -> int | None:
        """Return the index of the output with which a repetition ended it; None if none did."""
        if (detection := self._repetition) is None:
            return None
        outputs, span = self.output_token_ids, detection.min_count * detection.max_pattern
        lengths = range(max(self.params.min_tokens, 1), len(outputs) + 1)
        repetitions = (
            n for n in lengths if has_repetition(outputs[max(n - span, 0) : n], detection)
        )
        return next((length - 1 for length in repetitions), None)

    def stop_reason(self, token: int) -> int | None:
        """Return the token that stopped the request; None if it was an end-of-sequence token."""
        return None if token in self._eos_token_ids else token


@functools.lru_cache(maxsize=64)
def _token_set(token_ids: tuple[int, ...]) -> frozenset[int]:
    """Return the same set for equal ids: most requests have the model's own, and may be many."""
    return frozenset(token_ids)


def has_repetition(tokens: Sequence[int], detection: RepetitionDetection) -> bool:
    """Return whether the last tokens are `min_count` copies of a pattern of an allowed length.

    It is called after every token, so it reads only the tail: usually two older tokens per pattern
    length, and never more than 2 * `min_count` * `max_pattern` tokens.
    """
    count = detection.min_count
    longest = min(detection.max_pattern, len(tokens) // count)
    if longest < detection.min_pattern:
        return False
    newest = tokens[-1]
    # The last token of a pattern ends every copy; the oldest copy rules out most lengths.
    candidates = [
        length
        for length in range(detection.min_pattern, longest + 1)
        if tokens[-1 - length * (count - 1)] == newest == tokens[-1 - length]
    ]
    if not candidates:
        return False
    return _has_period(tokens[: -1 - count * candidates[-1] : -1], candidates, count)


def _has_period(backwards: Sequence[int], candidates: Sequence[int], count: int) -> bool:
    """Return whether `backwards` begins with `count` copies of a pattern of a candidate length.

    Z algorithm (Gusfield, Algorithms on Strings, 1997): `z[n]` is the number of tokens from n on
    that equal the first ones; no token is compared twice.
    """
    z = [0]
    left = right = 0  # the matching segment that reaches furthest
    for position in range(1, candidates[-1] + 1):
        size = min(right - position, z[position - left]) if position < right else 0
        while position + size < len(backwards) and backwards[size] == backwards[position + size]:
            size += 1
        if position + size > right:
            left, right = position, position + size
        z.append(size)
    return any(z[length] >= length * (count - 1) for length in candidates)
