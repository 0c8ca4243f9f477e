"""The messages between the halves of speculation, as msgpack."""

from __future__ import annotations

import msgspec


class DraftData(msgspec.Struct, array_like=True):
    """The data of a plan for the worker.

    Attributes:
        limits: most drafts of each request after this step; requests without drafts have none.
        missed: output tokens of requests that the worker has not seen.
        started: names of the speculators of the plan's new requests.
        budget: most drafts of all requests after this step.
        observed: requests without a gain from drafts; quick speculators draft a token for each,
            which is not verified.
    """

    limits: dict[str, int]
    missed: dict[str, list[int]] = {}
    started: dict[str, str] = {}
    budget: int = 0
    observed: list[str] = []


class DraftReport(msgspec.Struct, array_like=True):
    """The drafts of the worker after a step.

    Attributes:
        drafts: token ids that may follow the output of requests.
        faults: name of the speculator and its fault.
        failed: requests that go on without drafts.
        observed: draft of each observed request that has one.
    """

    drafts: dict[str, list[int]]
    faults: list[tuple[str, str]] = []
    failed: list[str] = []
    observed: dict[str, int] = {}
