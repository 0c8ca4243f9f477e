"""Groups of requests: the members that a part opens, and the logits that it combines."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hardpoint.plugins import EngineCoreRequest, FrontendHalf, RequestError, WorkerHalf
from hardpoint.plugins.step_part.part import GivenPrompt
from hardpoint.testing.suite import Rule, short_repr

OPENED = Rule(
    "groups: members gives the same prompts for equal requests, and combine the logits of a row",
    "return GivenPrompts with text or token ids, and a tensor [vocab_size] that depends on the "
    "logits and the arguments alone",
)


def check_group(
    halves: tuple[FrontendHalf, WorkerHalf | None],
    request: EngineCoreRequest,
    arguments: Mapping[str, Any],
    vocab_size: int,
) -> None:
    """Check the members of a request, and the combination of logits.

    Args:
        halves: half in the frontend; half in a worker, None without `combine`.
        request: prepared.
        arguments: its arguments for the part.
        vocab_size: size of the rows.

    Raises:
        Violation: a rule was broken.
    """
    frontend, worker = halves
    prompts = _members(frontend, request, arguments)
    if prompts != _members(frontend, request, arguments):
        raise OPENED.violation("members() gave other prompts for an equal request")
    if not prompts:
        return
    if worker is None:
        raise OPENED.violation(
            f"members() gave {len(prompts)} prompts, and no worker half has combine()"
        )
    generator = torch.Generator().manual_seed(len(prompts))
    logits = torch.randn(1 + len(prompts), vocab_size, generator=generator) * 4
    combined = _combined(worker, logits, arguments)
    if not torch.equal(combined, _combined(worker, logits, arguments)):
        raise OPENED.violation("combine() gave other logits for equal rows and arguments")


def _members(
    half: FrontendHalf, request: EngineCoreRequest, arguments: Mapping[str, Any]
) -> Sequence[GivenPrompt]:
    before = copy.deepcopy(request)
    try:
        prompts = list(half.members(request, arguments))
    except RequestError:
        return []
    except Exception as cause:
        raise OPENED.violation(f"members() raised {short_repr(cause)}") from cause
    if request != before:
        raise OPENED.violation("members() changed the request")
    for prompt in prompts:
        has_content = isinstance(prompt, GivenPrompt) and (prompt.text or prompt.token_ids)
        if not has_content or not prompt.fields.keys() <= {"lora"}:
            raise OPENED.violation(
                f"members() gave {short_repr(prompt)}, expected a GivenPrompt with text or token "
                "ids, and no fields but lora"
            )
    return prompts


def _combined(half: WorkerHalf, logits: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
    try:
        combined = half.combine(logits.clone(), arguments)
    except Exception as cause:
        raise OPENED.violation(f"combine() raised {short_repr(cause)}") from cause
    if not isinstance(combined, torch.Tensor) or combined.shape != logits.shape[1:]:
        got = list(combined.shape) if isinstance(combined, torch.Tensor) else short_repr(combined)
        raise OPENED.violation(f"combine() gave {got}, expected a tensor {list(logits.shape[1:])}")
    if combined.isnan().any() or combined.isposinf().any() or combined.isneginf().all():
        raise OPENED.violation(
            "combine() gave logits of which some are NaN or inf, or all are -inf"
        )
    return combined
