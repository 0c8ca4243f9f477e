"""The comparison of a fork with a request that has sampled the fork's tokens itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager

from msgspec import structs

from hardpoint.plugins.requests.resumed import ResumedOutputs
from hardpoint.testing.running.request_scripts import RequestScript, with_id
from hardpoint.testing.suite import Rule

from .compared import compare
from .session import StepPartSession

__all__ = ["FORKS", "check_fork"]

FORKS = Rule(
    "forks: a request that starts with outputs gets the same as after sampling them",
    "begin with all of `output_token_ids` (a fork has some from the start), and keep the state "
    "you know by `request_id`: a request and its forks share `external_req_id`. If a request "
    "with outputs cannot be served, refuse it in check() or gate() by a RequestError",
)

_AFTER = 6
"""Steps of a source after the last one of its fork."""


def check_fork(
    opened: Callable[[], AbstractContextManager[StepPartSession]],
    script: RequestScript,
    begun: int,
    *,
    shares: bool,
) -> None:
    """Compare a fork with a request that has the same tokens, and its source with one without it.

    Args:
        opened: opens a session of new halves.
        script: life of the request.
        begun: steps of the request after which the fork begins. Requests that are preempted then
            have no drafts in the next step, and compute all of their tokens in it, as forks do.
        shares: whether the results of a request depend on others; then the fork is alone.

    Raises:
        Violation: it is not the same.
    """
    source = with_id(script, "r0", arrives=0, preempted_after=0, ends="finish")
    request = structs.replace(source.request, external_req_id="user's")
    source = dataclasses.replace(source, request=request, steps=begun + script.steps + _AFTER)
    copied = structs.replace(request, request_id="r1", child_index=1)
    steps = begun + script.steps
    twin = RequestScript(copied, 0, steps, script.seed, preempted_after=begun)
    with opened() as session:
        sampled = session.play([twin])["r1"]
    if len(sampled.tokens) <= begun:
        return  # it was refused, or has ended before
    outputs = list(itertools.chain.from_iterable(sampled.tokens[:begun]))
    copied = structs.replace(copied, resumed=ResumedOutputs(outputs))
    fork = RequestScript(copied, begun + 1, steps, script.seed, ends=script.ends, begun=begun)
    with opened() as session:
        traces = session.play([fork] if shares else [source, fork])
    if traces["r1"].ended != "refused":
        rest = dataclasses.replace(sampled, masks=sampled.masks[begun:], rows=sampled.rows[begun:])
        where = "of a request that has sampled its tokens", "of a fork"
        compare(fork, rest, traces["r1"], FORKS, *where)
    if not shares:
        with opened() as session:
            alone = session.play([source])["r0"]
        compare(source, alone, traces["r0"], FORKS, "of a source", "of a source with a fork")
