"""Requests with members: their fields, and the checks that the engine makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from hardpoint.errors import shown
from hardpoint.plugins import EngineCoreRequest, RequestError, SamplingParams, Scheduler
from hardpoint.plugins.requests.resumed import ResumedOutputs
from hardpoint.plugins.step_part import GivenPrompt

_PARAMS = SamplingParams(temperature=0.0, seed=0)
"""Sampling parameters of members, which are not sampled."""


def read_members(
    part: str, prompts: Iterable[GivenPrompt], read: Callable[[GivenPrompt], GivenPrompt]
) -> list[EngineCoreRequest]:
    """Return the members with the prompts of a part; `read` tokenizes a prompt.

    Raises:
        RequestError: a prompt is malformed.
        TypeError: a prompt has other fields than those of members.
    """
    members = []
    for index, prompt in enumerate(prompts):
        try:
            members.append(_new_member(read(prompt)))
        except RequestError as error:
            raise RequestError(f"members.{part}[{index}].{error}") from error
    return members


def _new_member(prompt: GivenPrompt) -> EngineCoreRequest:
    if not prompt.fields.keys() <= {"lora"}:
        raise TypeError(f"expected fields among lora, got {shown(sorted(prompt.fields))}")
    return EngineCoreRequest(
        request_id="",
        prompt_token_ids=prompt.token_ids,
        params=_PARAMS,
        cache_salt=prompt.cache_salt,
        lora=prompt.fields.get("lora"),
    )


def members_of(request: EngineCoreRequest) -> Iterator[EngineCoreRequest]:
    """Yield the members of a request, in the order of the parts that opened them."""
    for members in request.members.values():
        yield from members


def check_members(request: EngineCoreRequest, check: Callable[[EngineCoreRequest], None]) -> None:
    """Check the members of a request as the engine checks requests.

    Raises:
        RequestError: the engine cannot run one, or not together with the request.
    """
    for part, members in request.members.items():
        for index, member in enumerate(members):
            if member.members or member.pooling_params is not None or member.features:
                raise RequestError(
                    f"members.{part}[{index}]: expected a request that generates, without media "
                    "and members"
                )
            try:
                check(member)
            except RequestError as error:
                raise RequestError(f"members.{part}[{index}].{error}") from error


def complete_members(request: EngineCoreRequest, scheduler: Scheduler, label: str) -> None:
    """Set the ids of the members of a request, and the fields that they share with it.

    Args:
        request: as it arrived in the engine.
        scheduler: has to keep groups.
        label: names it in messages.

    Raises:
        RequestError: it has media or pools, or the scheduler does not keep groups.
    """
    if request.pooling_params is not None or request.features:
        got = "media" if request.features else "pooling_params"
        raise RequestError(f"members: expected none of a request with {got}")
    if not scheduler.keeps_groups:
        raise RequestError(
            f"members: expected none, because {label} does not run a request and its members in "
            f"the same step (Scheduler.keeps_groups), got {sum(1 for _ in members_of(request))}"
        )
    resumed = request.resumed and ResumedOutputs(request.resumed.output_token_ids)
    request.members = {
        part: [
            msgspec.structs.replace(
                member,
                request_id=f"{request.request_id}/{part}/{index}",
                leader=request.request_id,
                arrival_time=request.arrival_time,
                client_index=request.client_index,
                tags=request.tags,
                cache_salt=member.cache_salt or request.cache_salt,
                resumed=resumed,
                generation=request.generation,
            )
            for index, member in enumerate(members)
        ]
        for part, members in request.members.items()
    }
