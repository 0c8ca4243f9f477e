"""Outputs that come with a prompt: its completions go on after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hardpoint import typed
from hardpoint.plugins import EngineCoreRequest, RequestError
from hardpoint.plugins.requests import ResumedOutputs

from .prompts import OUTPUTS

_IN_ENGINE = "resumed.output_token_ids"


def with_outputs(
    children: list[EngineCoreRequest],
    given: Any,
    check: Callable[[EngineCoreRequest], None],
) -> list[EngineCoreRequest]:
    """Return those of a prompt's completions that go on, each with its outputs.

    Args:
        children: one request per completion.
        given: for each the token ids of its output so far, or None for one that has ended; None for
            a prompt without any.
        check: raises a RequestError for a request that cannot go on.

    Raises:
        RequestError: the outputs are of another form, of another number, or none can be gone on
            with.
    """
    if given is None:
        return children
    outputs: list[list[int] | None] = typed.convert(
        given, list[list[int] | None], path=OUTPUTS, error=RequestError
    )
    if len(outputs) != len(children):
        raise RequestError(
            f"{OUTPUTS}: expected a list of token ids, or none, for each of n ({len(children)}) "
            f"completions, got {len(outputs)}"
        )
    going_on = []
    for child, token_ids in zip(children, outputs, strict=True):
        if token_ids is None:
            continue
        child.resumed = ResumedOutputs(token_ids)
        try:
            check(child)
        except RequestError as error:
            own = f"{OUTPUTS}[{child.child_index}]"
            raise RequestError(str(error).replace(_IN_ENGINE, own)) from error
        going_on.append(child)
    if not going_on:
        raise RequestError(f"{OUTPUTS}: expected a list of token ids of a completion, got none")
    return going_on
