"""Checks of the values that methods of step parts return, made before the engine uses them.

`EngineHalves` and the objects of `gates` call them, and report a defect as a fault of the part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hardpoint.errors import shown
from hardpoint.plugins import (
    Finish,
    GrammarBitmask,
    RequestFault,
    SchedulerOutput,
    WaitingFor,
    WaitReason,
)


def _form(is_right: Callable[[Any], bool], expected: str) -> Callable[[Any], str | None]:
    """Return the check of a form: it returns the end of a sentence, or None for a right value."""
    return lambda value: None if is_right(value) else f"gave {shown(value)}, expected {expected}"


def _is_cost(cost: Any) -> bool:
    return isinstance(cost, Mapping) and all(
        isinstance(name, str) and isinstance(amount, int) and amount >= 0
        for name, amount in cost.items()
    )


def _is_match(matched: Any) -> bool:
    count = matched[0] if isinstance(matched, tuple) and len(matched) == 2 else ""
    return count is None or (type(count) is int and count >= 0)


def _is_kept(answer: Any) -> bool:
    keep, params = answer if isinstance(answer, tuple) and len(answer) == 2 else (None, None)
    return isinstance(keep, bool) and (params is None or isinstance(params, Mapping))


def _are_names(names: Any) -> bool:
    return isinstance(names, Collection | None) and not isinstance(names, str)


# The results of begin, cost, get_num_new_matched_tokens, request_finished, needs_results and gate.
data_defect = _form(lambda data: isinstance(data, bytes | None), "bytes")
cost_defect = _form(_is_cost, "an amount of each resource")
matched_defect = _form(_is_match, "tokens >= 0 or None, and whether between steps")
kept_defect = _form(_is_kept, "whether blocks are kept, and a mapping or None")
names_defect = _form(_are_names, "request ids")
reason_defect = _form(
    lambda reason: isinstance(reason, str | WaitReason | Finish | None),
    "a reason, a Finish or None",
)


def limit_defect(limit: Any) -> str | None:
    """Return the defect of a limit of drafts, as the text after "its "; None if it has none."""
    if not isinstance(limit, int) or limit < 0:
        return f"num_draft_tokens is {shown(limit)}, expected a number of tokens"
    return None


def mask_defect(mask: Any, users: Collection[str], plan: SchedulerOutput) -> str | None:
    """Return the defect of a mask, as the end of a sentence; None if it has none."""
    if mask is None:
        return None
    if not isinstance(mask, GrammarBitmask):
        return f"gave {shown(mask)}, expected a GrammarBitmask"
    names, bits = mask.request_ids, mask.bitmask
    if foreign := set(names) - set(users):
        named = ", ".join(map(repr, sorted(foreign)))
        return f"has rows of {named}, which do not use it"
    if not isinstance(bits, np.ndarray) or bits.dtype != np.int32 or bits.ndim != 2:
        return "has a bitmask that is no int32 array of two dimensions"
    if len(bits) != len(names):
        return f"has {len(bits)} rows for {len(names)} request ids"
    drafts = plan.draft_token_ids
    for name, count in Counter(names).items():
        if name in plan.num_scheduled_tokens and count != 1 + len(drafts.get(name, ())):
            return f"has {count} rows of {name!r}, expected {1 + len(drafts.get(name, ()))}"
    return None


def drafts_defect(drafts: Any, users: Collection[str], limit: int, vocab_size: int) -> str | None:
    """Return the defect of drafts, as the end of a sentence; None if they have none.

    Args:
        users: requests that use the part.
        limit: the part's num_draft_tokens.
    """
    if not isinstance(drafts, Mapping):
        return f"gave {shown(drafts)}, expected token ids by request id"
    for name, tokens in drafts.items():
        if name not in users:
            return f"gave drafts of {shown(name)}, which does not use it"
        if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes):
            return f"gave {shown(tokens)} for {name!r}, expected token ids"
        if len(tokens) > limit:
            return f"gave {len(tokens)} drafts of {name!r}, expected at most {limit}"
        for token in tokens:
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                expected = f"token ids in 0..{vocab_size - 1}"
                return f"gave the draft {shown(token)} of {name!r}, expected {expected}"
    return None


def draft_limits_defect(limits: Any, drafts: Mapping[str, Sequence[int]]) -> str | None:
    """Return the defect of numbers of drafts, as the end of a sentence; None if they have none.

    Args:
        drafts: its argument.
    """
    if not isinstance(limits, Mapping):
        return f"gave {shown(limits)}, expected a number of drafts by request id"
    for name, limit in limits.items():
        if name not in drafts:
            return f"gave a limit of {shown(name)}, which has no drafts that it was given"
        if not isinstance(limit, int) or not 0 <= limit <= len(drafts[name]):
            return f"gave {shown(limit)} for {name!r}, expected 0 to {len(drafts[name])} drafts"
    return None


def result_defect(faults: Any, users: Collection[str]) -> str | None:
    """Return the defect of a part's answer to a result, as the end of a sentence; None if none.

    Args:
        users: requests that use the part, also the ones that have ended since their plan.
    """
    if faults is None:
        return None
    if not isinstance(faults, Mapping):
        return f"gave {shown(faults)}, expected a mapping"
    for name, fault in faults.items():
        if name not in users or not isinstance(fault, RequestFault | Finish):
            return f"gave {shown(fault)} for request {name!r}"
    return None


def faults_defect(faults: Any, users: Collection[str]) -> str | None:
    """Return the defect of faults by request, as the end of a sentence; None if they have none.

    Args:
        users: requests that use the part.
    """
    if isinstance(faults, Mapping) and all(
        name in users and isinstance(fault, RequestFault) for name, fault in faults.items()
    ):
        return None
    return f"gave {shown(faults)}, expected faults of requests that use the part"


def shown_reason(part: str, reason: WaitReason | str | None) -> WaitReason | None:
    """Return a reason as requests show it: a text with the name of its part."""
    if isinstance(reason, str):
        return WaitReason(WaitingFor.PART, f"{part}: {reason}")
    return reason
