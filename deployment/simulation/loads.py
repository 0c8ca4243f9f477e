"""Loads: the requests of a trace, or synthetic ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from hardpoint.typed import Strict

from .synthetic import SyntheticLoad
from .traces import read_trace
from .workload import SimulatedRequest, sped_up


class SimulatedLoad(Strict):
    """Requests of a trace, or synthetic ones.

    Attributes:
        trace: path of a file; None is a synthetic load.
        form: its form, see `read_trace`.
        block_size: tokens that each of its `hash_ids` stands for; None is usual for the form.
        synthetic: what is made where there is no trace.
        speed: how many times as fast the requests come.
        limit: how many requests there are at most.
    """

    trace: str | None = None
    form: str = "auto"
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    synthetic: SyntheticLoad = SyntheticLoad()
    speed: Annotated[float, Meta(gt=0)] = 1.0
    limit: Annotated[int, Meta(ge=1)] | None = None

    def requests(self) -> tuple[int, Iterable[SimulatedRequest]]:
        """Return the number of requests, and the requests in the order of their times.

        Raises:
            TraceError, ConfigError: a line, or a field, is wrong.
        """
        if self.trace is None:
            load = self.synthetic
            if self.limit is not None:
                load = msgspec.structs.replace(load, requests=min(load.requests, self.limit))
            return load.requests, sped_up(load.generate(), self.speed)
        requests = read_trace(self.trace, self.form, block_size=self.block_size)[: self.limit]
        return len(requests), sped_up(requests, self.speed)
