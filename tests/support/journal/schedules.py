"""Random schedules: a configuration, and calls of an engine, drawn from a seed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardpoint import RequestOutputKind, SamplingParams, typed
from hardpoint.core.build import build_engine
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.journal import inputs_of
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.testing import ScriptedClock, scripted_config

POLICIES = ("fcfs", "priority", "fair", "shortest_first")
GRAMMARS = ("[a-f]{4,12}", "(yes|no|maybe)+", "[0-9]{3}-[0-9]{2,20}")


def drawn_config(draw: random.Random, folder: Path, **engine: Any) -> dict[str, Any]:
    """Return a configuration in which requests are preempted, and prompts computed in pieces."""
    tables: dict[str, Any] = {
        "max_model_len": 128,
        "kv_cache": {"block_size": 8, "num_blocks": draw.choice([20, 24, 40])},
        "scheduler": {
            "max_num_batched_tokens": draw.choice([24, 48, 96]),
            "policy": draw.choice(POLICIES),
            "asynchronous": draw.random() < 0.4,
        },
        "engine": engine,
        "seed": draw.randrange(1 << 30),
    }
    if draw.random() < 0.3:
        tables["scheduler"]["step_milliseconds"] = 5.0
    if draw.random() < 0.3:
        tables["speculation"] = {"use": ["ngram"], "num_draft_tokens": 3}
    if draw.random() < 0.3:
        tables["stats"] = {"request_metrics": True}
    return scripted_config(folder, tables)


def drawn_params(draw: random.Random) -> SamplingParams:
    """Return parameters of a request: greedy, sampled, with penalties, or with a grammar."""
    fields: dict[str, Any] = {
        "max_tokens": draw.randint(2, 24),
        "temperature": draw.choice([0.0, 0.8, 1.2]),
        "output_kind": RequestOutputKind.DELTA,
    }
    if fields["temperature"] and draw.random() < 0.5:
        fields["n"] = 2
    if draw.random() < 0.3:
        fields |= {"repetition_penalty": 1.2, "top_k": 30}
    if draw.random() < 0.3:
        fields["structured"] = StructuredOutputs(regex=draw.choice(GRAMMARS))
    return SamplingParams(**fields)


def open_recorded(config: Mapping[str, Any], clock: ScriptedClock | None = None) -> LLMEngine:
    """Open an engine with a journal, in this process."""
    converted = typed.convert(config, EngineConfig, path="")
    clock = clock or ScriptedClock(tick=1e-4)
    return build_engine(converted, clock=clock, open_inputs=inputs_of(converted))


class Schedule:
    """Calls an engine, as drawn from a seed."""

    def __init__(self, engine: LLMEngine, draw: random.Random, num_calls: int = 40) -> None:
        """Begin with no requests."""
        self._engine, self._draw, self._num_calls = engine, draw, num_calls
        self._shared = [draw.randrange(256) for _ in range(20)]
        self._live: list[str] = []
        self._count = 0

    def run(self) -> None:
        """Make all calls, then let the requests finish."""
        for _ in range(self._num_calls):
            self._call()
        self._engine.call_utility("resume")
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _call(self) -> None:
        draw, engine = self._draw, self._engine
        choice = draw.random()
        if choice < 0.3:
            self._add()
        elif choice < 0.36 and self._live:
            engine.abort_requests(self._live.pop(draw.randrange(len(self._live))))
        elif choice < 0.39:
            engine.set_policy(draw.choice(POLICIES))
        elif choice < 0.41:
            engine.call_utility("reset_prefix_cache", draw.random() < 0.5)
        elif choice < 0.43:
            engine.call_utility("pause", "keep", draw.random() < 0.5)
            engine.step()
            engine.call_utility("resume")
        elif choice < 0.45:
            engine.call_utility("live_requests")
        else:
            engine.step()

    def _add(self) -> None:
        draw = self._draw
        prompt = [draw.randrange(256) for _ in range(draw.randint(1, 60))]
        if draw.random() < 0.4:
            prompt = self._shared + prompt[:30]
        self._count += 1
        added = self._engine.add_request(f"r{self._count}", prompt, drawn_params(draw))
        self._live.append(added)


def record(seeds: range, folder: Path, path: Path, num_calls: int = 40, **engine: Any) -> None:
    """Record random schedules, one after another, in the journal of one engine."""
    draw = random.Random(seeds[0])
    with contextlib.closing(
        open_recorded(drawn_config(draw, folder, journal=str(path), **engine))
    ) as opened:
        for seed in seeds:
            Schedule(opened, random.Random(seed), num_calls).run()
