"""Requests of a simulation: their times, lengths and common prefixes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from hardpoint.plugins import EngineCoreRequest, SamplingParams
from hardpoint.plugins.requests import Retention

TENANT = "tenant"
"""The tag by which reports divide requests, and the policy `fair` does by default."""
_RETENTION_S = 60.0
_MOST_IDS = 2**32 - 1  # a token is hashed as uint32


class Segment(NamedTuple):
    """A text of known length that requests may share.

    Two prompts have as many leading tokens in common as they have leading segments in common.

    Attributes:
        id: identity of the text, from 0 to 2**32 - 2.
        length: number of tokens, at least 1.
    """

    id: int
    length: int


class SimulatedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a trace.

    Attributes:
        at: when it is sent, in seconds since the start of the trace.
        prompt: segments of its prompt.
        output: the tokens that it generates; a later prompt may have them as a segment.
        session: name of its conversation, for balancers; None without one.
        tags: labels such as {"tenant": "acme"}, for policies.
        priority: smaller is more important, for policies.
        is_last: whether no later request of the load is of its conversation.
    """

    at: float
    prompt: tuple[Segment, ...]
    output: Segment
    session: str | None = None
    tags: dict[str, str] = {}
    priority: int = 0
    is_last: bool = False

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return sum(segment.length for segment in self.prompt)

    def for_engine(self, request_id: str) -> EngineCoreRequest:
        """Return the request as an engine gets it."""
        session = self.session
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=tokens_of(self.prompt),
            params=_params(self.output.length),
            retention=None if session is None else Retention(session, _RETENTION_S),
            tags=self.tags,
            priority=self.priority,
            arrival_time=self.at,
        )


def tokens_of(segments: Iterable[Segment]) -> list[int]:
    """Return the tokens of segments: of each its number, one more than its id, and then zeros.

    Block hashes cover all tokens before them, so that one token distinguishes texts.
    """
    tokens: list[int] = []
    for segment in segments:
        if not 0 <= segment.id < _MOST_IDS:
            raise ValueError(f"segment id: expected 0 to {_MOST_IDS - 1}, got {segment.id}")
        tokens.append(segment.id + 1)
        tokens += [0] * (segment.length - 1)
    return tokens


@functools.lru_cache(maxsize=4096)
def _params(max_tokens: int) -> SamplingParams:
    """Return the same parameters for equal lengths: engines only read them."""
    return SamplingParams(max_tokens=max_tokens)


def cut(segments: Iterable[Segment], length: int) -> tuple[Segment, ...]:
    """Return the first tokens of segments, at most so many."""
    cut_segments: list[Segment] = []
    for segment in segments:
        if length <= 0:
            break
        cut_segments.append(Segment(segment.id, min(segment.length, length)))
        length -= segment.length
    return tuple(cut_segments)


def sped_up(requests: Iterable[SimulatedRequest], factor: float) -> Iterator[SimulatedRequest]:
    """Yield requests `factor` times as fast.

    Raises:
        ValueError: a factor that is not above 0.
    """
    if not factor > 0:
        raise ValueError(f"factor: expected a number > 0, got {factor}")
    for request in requests:
        yield msgspec.structs.replace(request, at=request.at / factor)
