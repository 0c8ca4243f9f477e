"""How requests are sent: streams, arrivals, or the times of a trace."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from hardpoint.plugins import ConfigError
from hardpoint.simulation import SimulatedLoad, SimulatedRequest
from hardpoint.typed import Strict

UNLIMITED = 1_000_000_000
_REQUESTS_PER_STREAM = 4
_SECONDS_OF_RATE = 30
_FEWEST = 16
_NO_PAUSE_S = 1e-9

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]


class Traffic(Strict):
    """How the requests of a load are sent.

    Attributes:
        concurrency: number of streams, each of which sends a request when its last one ended; the
            times of the load do not count.
        rate: requests per second that arrive whether or not others ended, at random times; without
            streams and rate, requests come at the times of the load.
        burstiness: squared coefficient of variation of the time between two arrivals of `rate`
            (gamma distribution): 1 is a Poisson process, 0 equal distances, above 1 are bursts.
        seconds: after which no request is sent any more.
        warm_up: requests before the load, which are in no figure; None: one per stream.
        timeout: seconds that a request may last.
        processes: number of client processes that share the load.
        seed: seed of the arrivals and of the texts.
    """

    concurrency: Count | None = None
    rate: Positive | None = None
    burstiness: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    seconds: Positive | None = None
    warm_up: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    timeout: Positive = 600.0
    processes: Annotated[int, Meta(ge=1, le=256)] = 1
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of a load that is sent so."""
        if self.concurrency is not None:
            return f"{self.concurrency} streams" if self.concurrency > 1 else "1 stream"
        if self.rate is not None:
            bursts = "" if self.burstiness == 1 else f", burstiness {self.burstiness:g}"
            return f"{self.rate:g} requests/s{bursts}"
        return "times of the load"

    @property
    def num_warm_up(self) -> int:
        """Number of requests before the load."""
        return (self.concurrency or 1) if self.warm_up is None else self.warm_up

    def check(self) -> None:
        """Refuse settings that exclude each other.

        Raises:
            ConfigError: names both.
        """
        if self.concurrency is not None and self.rate is not None:
            raise ConfigError(
                f"traffic: expected concurrency or rate, got concurrency {self.concurrency} and "
                f"rate {self.rate:g}"
            )
        if self.burstiness != 1 and self.rate is None:
            raise ConfigError(
                f"traffic.burstiness: expected a rate as well, got {self.burstiness:g} without one"
            )

    def limited(self, load: SimulatedLoad) -> SimulatedLoad:
        """Return a load with as many requests as are sent at most.

        A trace is sent whole. Of a synthetic load without a limit, streams send four requests
        each, and a rate those of half a minute, at least 16 of them; with `seconds`, it does not
        end before. In streams, where times do not count, the turns of a conversation follow each
        other.
        """
        if load.trace is not None:
            return load
        if load.limit is not None:
            count = load.limit
        elif self.seconds is not None:
            count = UNLIMITED
        elif self.concurrency is not None:
            count = max(_FEWEST, _REQUESTS_PER_STREAM * self.concurrency)
        elif self.rate is not None:
            count = max(_FEWEST, round(_SECONDS_OF_RATE * self.rate))
        else:
            return load
        synthetic = msgspec.structs.replace(load.synthetic, requests=count)
        if self.concurrency is not None:
            synthetic = msgspec.structs.replace(synthetic, think_seconds=_NO_PAUSE_S)
        return msgspec.structs.replace(load, synthetic=synthetic, limit=None)

    def num_requests(self, load: SimulatedLoad) -> int | None:
        """Return the number of requests of a load that is sent so; None if its time limits it."""
        count, _ = self.limited(load).requests()
        return None if count == UNLIMITED else count

    def arrivals(self) -> Iterator[float]:
        """Yield the seconds of the arrivals of `rate`, without end."""
        assert self.rate is not None
        rng = random.Random(f"{self.seed}, arrivals, {self.rate:g}")
        at, mean = 0.0, 1 / self.rate
        while True:
            if self.burstiness == 1:
                at += rng.expovariate(self.rate)
            elif self.burstiness:
                at += rng.gammavariate(1 / self.burstiness, mean * self.burstiness)
            else:
                at += mean
            yield at

    def timed(
        self, requests: Iterable[SimulatedRequest]
    ) -> Iterator[tuple[float, SimulatedRequest]]:
        """Yield the requests of a load, each with the second at which it is sent.

        Streams send each as soon as they can.
        """
        if self.rate is None:
            pairs: Iterator[tuple[float, SimulatedRequest]] = ((one.at, one) for one in requests)
        else:
            pairs = zip(self.arrivals(), requests, strict=False)
        if self.concurrency is None and self.seconds is not None:
            limit = self.seconds
            return itertools.takewhile(lambda pair: pair[0] <= limit, pairs)
        return pairs


class LoadPart(NamedTuple):
    """The part of a load that one of several processes sends.

    Attributes:
        process: index of the process.
        of: number of processes.
    """

    process: int = 0
    of: int = 1

    def streams(self, concurrency: int) -> int:
        """Return how many of the streams are of this part."""
        return len(range(self.process, concurrency, self.of))

    def chosen(
        self, timed: Iterable[tuple[float, SimulatedRequest]]
    ) -> Iterator[tuple[float, SimulatedRequest]]:
        """Yield the requests of this part: every `of`-th conversation, or request without one."""
        places: dict[Any, int] = {}
        alone = itertools.count()
        for at, request in timed:
            if request.session is None:
                place = next(alone)
            else:
                place = places.setdefault(request.session, len(places))
            if place % self.of == self.process:
                yield at, request
