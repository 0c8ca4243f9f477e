"""The engines of a program: their number, state and load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

__all__ = ["LoadReport"]


@dataclass(frozen=True)
class EngineSet:
    """The engines after a change of their number.

    Attributes:
        epoch: number of changes so far.
        ranks: numbers of the engines.
    """

    epoch: int
    ranks: tuple[int, ...]


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one engine.

    Attributes:
        rank: its number.
        state: "serving"; "paused", also while it sleeps; "starting" after its death; "draining"
            before it is retired; or "dead".
        in_flight: requests that were sent there and have not ended.
        num_running, num_waiting: requests that run and wait there, by its last report.
        waiting_prompt_tokens: tokens of their prompts that are not computed yet.
        kv_cache_usage: share of the KV blocks that requests reference, from 0 to 1.
    """

    rank: int
    state: Literal["serving", "paused", "starting", "draining", "dead"]
    in_flight: int
    num_running: int
    num_waiting: int
    waiting_prompt_tokens: int
    kv_cache_usage: float


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Load of all engines, for programs that balance requests or add engines.

    Attributes:
        in_flight, num_running, num_waiting, waiting_prompt_tokens: sums over the engines.
        kv_cache_usage: mean of the engines that serve, from 0 to 1.
        prefill_tokens_per_second: rate of one engine, while it has prompts to compute; measured,
            None before the first one.
        waiting_prompt_seconds: how long the engines that serve take to compute the prompts that
            wait; None while it is unknown.
        engines: in the order of their ranks.
    """

    in_flight: int
    num_running: int
    num_waiting: int
    waiting_prompt_tokens: int
    kv_cache_usage: float
    prefill_tokens_per_second: float | None
    waiting_prompt_seconds: float | None
    engines: list[EngineStatus]

    @classmethod
    def of(cls, engines: list[EngineStatus], tokens_per_second: float | None) -> LoadReport:
        """Return the report of engines, with the measured rate at which one computes prompts."""
        serving = [engine for engine in engines if engine.state == "serving"]
        tokens = sum(engine.waiting_prompt_tokens for engine in engines)
        seconds = None if tokens else 0.0
        if tokens and tokens_per_second and serving:
            seconds = tokens / (tokens_per_second * len(serving))
        usage = sum(engine.kv_cache_usage for engine in serving)
        return cls(
            in_flight=sum(engine.in_flight for engine in engines),
            num_running=sum(engine.num_running for engine in engines),
            num_waiting=sum(engine.num_waiting for engine in engines),
            waiting_prompt_tokens=tokens,
            kv_cache_usage=usage / len(serving) if serving else 0.0,
            prefill_tokens_per_second=tokens_per_second,
            waiting_prompt_seconds=seconds,
            engines=engines,
        )
