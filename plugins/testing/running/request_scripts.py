"""Scripts of the lives of requests, and their drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from hardpoint.plugins import EngineCoreRequest, SchedulerOutput

__all__ = ["RequestScript", "drawn", "guessed", "with_id", "without_features"]

_NO_DRAFT = SchedulerOutput.NO_DRAFT


@dataclass(frozen=True)
class RequestScript:
    """The life of one request.

    Attributes:
        request: as it arrives.
        arrives: step in which it does.
        steps: tokens or drafts that it gets at most, then it ends.
        seed: seed of its drafts and of the choice among allowed tokens.
        preempted_after: number of its steps after which it is preempted; 0 is never.
        ends: "finish"; "refused", after its check; "aborted", in the step after its arrival.
        begun: steps in which the outputs that it comes with were sampled.
        outputs: its tokens if they are known, which its drafts guess, some of them wrong; empty
            for a request without drafts. Then each token depends on its index, `steps` is the
            number of tokens, and a draft is accepted if it is the token. None draws drafts.
    """

    request: EngineCoreRequest
    arrives: int = 0
    steps: int = 3
    seed: int = 0
    preempted_after: int = 0
    ends: str = "finish"
    begun: int = 0
    outputs: Sequence[int] | None = None


def with_id(script: RequestScript, request_id: str, **changes: Any) -> RequestScript:
    """Return a script with another request id and other changes."""
    request = msgspec.structs.replace(script.request, request_id=request_id)
    return RequestScript(**{**vars(script), **changes, "request": request})


def without_features(script: RequestScript) -> RequestScript:
    """Return a script with a request without features."""
    request = msgspec.structs.replace(script.request, features=())
    return replace(script, request=request)


def drawn(seed: str, vocab_size: int) -> list[int]:
    """Return up to two drafts."""
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(draw.choice([0, 0, 1, 2]))]


def guessed(outputs: Sequence[int], done: int, seed: int, vocab_size: int) -> list[int]:
    """Return drafts of a request with known tokens: right ones, and sometimes a wrong one.

    Some drafts do not exist, as if a proposer had no guess.

    Args:
        done: number of tokens that the request has.
    """
    draw = random.Random(f"{seed} {done} guesses")
    right = list(outputs[done:-1])[: draw.choice([0, 1, 2, 3])]
    left = len(outputs) - 1 - done - len(right)
    if left <= 0 or draw.random() < 0.5:
        return right
    wrong = (outputs[done + len(right)] + 1) % vocab_size
    return [*right, draw.choice([wrong, _NO_DRAFT])]
