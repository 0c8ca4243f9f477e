"""The comparison of requests with drafts with the same requests without any, row by row."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from hardpoint.testing.running.request_scripts import RequestScript, with_id
from hardpoint.testing.suite import Rule

from .compared import compare_by_place
from .session import CallTrace, StepPartSession

__all__ = ["DRAFT_ROWS", "check_draft_rows"]

DRAFT_ROWS = Rule(
    "draft rows: the row of a draft gets the same as without drafts",
    "treat all rows of a request alike: with drafts it has 1 + drafts rows in `mask` and `logits`, "
    "and the tokens between two of `rows.starts` in the other methods; let a row depend on the "
    "tokens before it and on its position alone, and keep nothing of a draft that is rejected",
)


def check_draft_rows(
    opened: Callable[[], AbstractContextManager[StepPartSession]],
    scripts: Sequence[RequestScript],
    *,
    shares: bool,
    seen: Callable[[], None],
) -> None:
    """Compare masks and changed rows of requests with drafts and without any.

    The drafts guess the tokens that the requests have without drafts; some are wrong.

    Args:
        opened: opens a session of new halves.
        scripts: lives of requests.
        shares: whether the results of a request depend on others; then each runs alone.
        seen: called if drafts were computed.

    Raises:
        Violation: they are not the same.
    """
    without: dict[str, CallTrace] = {}
    drafted: list[RequestScript] = []
    for script in scripts:
        name = script.request.request_id
        alone = with_id(script, name, arrives=0, preempted_after=0, ends="finish", outputs=())
        with opened() as session:
            without[name] = session.play([alone])[name]
        outputs = list(itertools.chain.from_iterable(without[name].tokens))
        if without[name].ended == "finished" and len(outputs) > 1:
            guessed = dataclasses.replace(alone, arrives=script.arrives, outputs=outputs)
            drafted.append(dataclasses.replace(guessed, steps=len(outputs)))
    for group in [[script] for script in drafted] if shares else [drafted]:
        with opened() as session:
            traces = session.play(group)
        for script in group:
            name = script.request.request_id
            where = "without drafts", "with drafts"
            compare_by_place(without[name], traces[name], DRAFT_ROWS, *where)
            if any(len(tokens) > 1 for tokens in traces[name].tokens):
                seen()
