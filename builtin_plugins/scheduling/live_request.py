"""A live request with what the default scheduler looks at in every step."""

from __future__ import annotations

from hardpoint.plugins import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreRequest,
    FinishReason,
    Request,
)

from .repetition import repeats


class LiveRequest(Request):
    """A request with its stop conditions at hand.

    Attributes:
        loading: tokens that a connector was last asked to load beside the steps.
        no_loading: whether a load of it was in vain, so that it computes everything itself.
        num_external_tokens: of the cached ones, those that a connector brought.
        told_prefill: whether an output told how its prompt was computed.
        longest: prompt and output tokens at which it ends.
    """

    __slots__ = (
        "_eos",
        "_repetition",
        "_stops",
        "client_index",
        "features",
        "loading",
        "longest",
        "lora",
        "no_loading",
        "num_external_tokens",
        "told_prefill",
    )

    def __init__(self, source: EngineCoreRequest, order: int, max_model_len: int) -> None:
        """Begin with nothing computed."""
        super().__init__(source, order)
        params = source.params
        self.client_index = source.client_index
        self.features = source.features
        self.lora = source.lora
        self.loading = 0
        self.no_loading = False
        self.num_external_tokens = 0
        self.told_prefill = False
        room = params.max_tokens if params.max_tokens is not None else max_model_len
        self.longest = min(self.num_prompt_tokens + room, max_model_len)
        self._eos = frozenset(source.eos_token_ids)
        self._stops = frozenset(source.stop_token_ids)
        self._repetition = params.repetition_detection

    def note(self, event: EngineCoreEventType, now: float) -> None:
        """Remember an event for the next output."""
        self.events.append(EngineCoreEvent(event, now))

    def count_as_computed(self, valid: int) -> None:
        """Take it that of what was cached or brought, only the first `valid` tokens were there."""
        lost = max(self.num_cached_tokens - valid, 0)
        self.num_cached_tokens -= lost
        self.num_external_tokens = max(self.num_external_tokens - lost, 0)

    def ends_with(self, token: int) -> FinishReason | None:
        """Return why the request ends with the token that was just appended, if it does."""
        if token in self._stops:
            return FinishReason.STOP
        if self._repetition is not None and repeats(self.output_token_ids, self._repetition):
            return FinishReason.REPETITION  # before the length: a larger one would not have helped
        if self.num_tokens >= self.longest:
            return FinishReason.LENGTH
        return None

    def stop_reason(self, token: int) -> int | None:
        """Return the token that ended it, if it was one of `stop_token_ids`."""
        return None if token in self._eos else token
