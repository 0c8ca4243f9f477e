"""A hook: count finished requests by their reason, and log the counts at the end."""

from __future__ import annotations

import logging
from collections import Counter

from hardpoint.plugins import RequestOutput, hookimpl


class Audit:
    """Counts finished requests, one instance per engine."""

    contract = 1

    def __init__(self) -> None:
        """Create empty counters."""
        self.finished: Counter[str] = Counter()

    @hookimpl
    def request_finished(self, output: RequestOutput) -> None:
        """Count each completion of the request."""
        self.finished.update(str(completion.finish_reason) for completion in output.outputs)

    @hookimpl
    def engine_closing(self) -> None:
        """Log the counts."""
        counts = ", ".join(f"{reason} {n}" for reason, n in sorted(self.finished.items()))
        logging.getLogger("acme_audit").info("finished: %s", counts or "none")
