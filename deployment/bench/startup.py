"""Measures a start: from the beginning of a process to the first token, by stage."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hardpoint.configuration.loading import load_config
from hardpoint.host.registry.model_files import find_files
from hardpoint.plugins import ConfigError, EngineConfig, HardpointError
from hardpoint.typed import Strict, convert, shown

from . import first_token

STAGES = ("interpreter", "imports", "configuration", "engine", "first token")
TOTAL, CLOSE = "to the first token", "close"
_CALLER, _ENGINE = "caller", "largest other process"
_KEPT = 2000  # characters of an error

Caches = Literal["cold", "warm"]


class StartupPlan(Strict):
    """Starts of an engine.

    Attributes:
        model: its model; None is that of the configuration.
        config: path of the configuration; None is the usual one.
        settings: settings, such as "engine.in_process=true"; later ones win.
        runs: number of starts for each state of the caches.
        caches: "warm": files and caches are as an earlier start left them. "cold": the weight cache
            is an empty folder, those of compilers are too, and the system is asked to forget the
            content of the model's files.
        prompt: prompt of the first token.
    """

    model: str | None = None
    config: str | None = None
    settings: list[str] = []
    runs: Annotated[int, Meta(ge=1, le=1000)] = 5
    caches: tuple[Caches, ...] = ("cold", "warm")
    prompt: str = "The capital of France is"


class Spread(Strict):
    """A figure of several starts: median, and the least and the greatest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of values."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))


def measure_startup(plan: StartupPlan | Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Start an engine many times, each in a process of its own; report the stages.

    Cold and warm starts take turns, after one that is not counted. An interrupt (SIGINT) ends it.

    Args:
        plan: the starts, or the fields of `StartupPlan`.

    Yields:
        `{"record": "progress", "run", "of", "caches"}`; per start `{"record": "run", "caches",
        "seconds": by stage, "bytes": most resident memory by process}`; and at last `{"record":
        "result", "model", "caches": {state: {"runs", "seconds": Spread by stage, "bytes": Spread
        by process}}, "interrupted"}`.

    Raises:
        ConfigError: something given is wrong; names it.
        HardpointError: a start failed.
    """
    wanted = convert(msgspec.to_builtins(plan), StartupPlan, path="")
    if not wanted.caches or len(set(wanted.caches)) != len(wanted.caches):
        raise ConfigError(
            f"caches: expected cold, warm or both, each once, got {shown(list(wanted.caches))}"
        )
    config, _ = load_config(wanted.config, settings=wanted.settings, model=wanted.model)
    runs: dict[str, list[dict[str, dict[str, float]]]] = {cache: [] for cache in wanted.caches}
    is_interrupted = False
    try:
        yield {"record": "progress", "run": 0, "of": wanted.runs, "caches": "not counted"}
        _start(wanted, config, "warm")
        for number in range(wanted.runs):
            for caches in wanted.caches:
                yield {
                    "record": "progress",
                    "run": number + 1,
                    "of": wanted.runs,
                    "caches": caches,
                }
                runs[caches].append(_start(wanted, config, caches))
                yield {"record": "run", "caches": caches, **runs[caches][-1]}
    except KeyboardInterrupt:
        is_interrupted = True
    yield {
        "record": "result",
        "model": config.model,
        "caches": {cache: _spreads(cache_runs) for cache, cache_runs in runs.items() if cache_runs},
        "interrupted": is_interrupted,
    }


def _spreads(runs: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    spreads: dict[str, Any] = {"runs": len(runs)}
    for kind in ("seconds", "bytes"):
        spreads[kind] = {
            name: msgspec.to_builtins(Spread.of([run[kind][name] for run in runs]))
            for name in runs[0][kind]
        }
    return spreads


def _start(plan: StartupPlan, config: EngineConfig, caches: Caches) -> dict[str, dict[str, float]]:
    settings, environment = [*plan.settings], dict(os.environ)
    if plan.model is not None:
        settings.append(f"model={json.dumps(plan.model)}")
    if caches == "warm":
        return start_once(plan, settings, environment)
    with tempfile.TemporaryDirectory(prefix="hardpoint-cold-") as folder:
        if config.weight_cache.path != "off":
            settings.append(f"weight_cache.path={json.dumps(folder)}")
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            environment[name] = str(Path(folder, name.lower()))
        _forget(config.model)
        return start_once(plan, settings, environment)


def start_once(
    plan: StartupPlan, settings: Sequence[str], environment: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Start an engine in a process; return seconds by stage, and bytes by process.

    Args:
        plan: configuration and prompt.
        settings: settings.
        environment: environment of the process.

    Raises:
        HardpointError: it failed.
    """
    program = Path(first_token.__file__).read_text(encoding="utf-8")
    launched = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([plan.config, settings, plan.prompt]) + "\n",
        capture_output=True,
        text=True,
        env=dict(environment),
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise HardpointError(
            f"a start failed, with exit code {done.returncode}: {' '.join(lines[-1:])[-_KEPT:]}"
        )
    times, close, peaks = json.loads(done.stdout.splitlines()[-1])
    ends = [launched, *(times[stage] for stage in STAGES)]
    seconds = {
        stage: after - before for stage, before, after in zip(STAGES, ends, ends[1:], strict=False)
    }
    memory = {_CALLER: peaks[0]}
    if len(peaks) > 1:  # helpers of multiprocessing are small; an engine is the largest
        memory[_ENGINE] = max(peaks[1:])
    return {
        "seconds": {**seconds, TOTAL: ends[-1] - launched, CLOSE: close},
        "bytes": memory,
    }


def _forget(model: str) -> None:
    path = find_files(model).path
    files = [path] if path.is_file() else [entry for entry in path.rglob("*") if entry.is_file()]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
