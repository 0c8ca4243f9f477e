"""Simulations of one load under several configurations, and their comparison."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import msgspec

from hardpoint.errors import ConfigError, HardpointError
from hardpoint.plugins import EngineConfig, StepCost
from hardpoint.plugins.config_tables import STREAMING_STEP_MILLISECONDS
from hardpoint.typed import convert

from .fleet import Fleet
from .loads import SimulatedLoad
from .reports import Objective
from .step_costs import CostFile, read_cost
from .workload import SimulatedRequest

_PROGRESS_SECONDS = 0.2


@dataclass(frozen=True)
class _Job:
    """A simulation, as plain data."""

    variant: str
    config: Mapping[str, Any]
    load: SimulatedLoad
    cost: CostFile | StepCost
    objective: Objective


def simulate(
    variants: Mapping[str, EngineConfig],
    load: SimulatedLoad | Mapping[str, Any],
    *,
    cost: CostFile | StepCost | str | Path,
    objective: Objective | Mapping[str, Any] | None = None,
    processes: int = 1,
) -> Iterator[dict[str, Any]]:
    """Run a load under several configurations; yield records.

    Where a configuration leaves `kv_cache.num_blocks` or `max_model_len` open, they are those of
    the engine that was calibrated; `scheduler.step_milliseconds` is that of a server.

    Args:
        variants: configurations by names, of which the first one is what others are compared with.
        load: the requests, or the fields of `SimulatedLoad`.
        cost: cost of steps, or a file of `hardpoint calibrate`; with a `StepCost`, configurations
            have to state the size of the KV cache.
        objective: the service level objective, or its fields.
        processes: how many run at the same time; with 1, in this process.

    Yields:
        `{"record": "progress", "variant", "requests", "of", "seconds"}`, the last one of which is
        the virtual time; per variant, in the order in which they end, `{"record": "result",
        "variant", "report": FleetReport, "curves", "real_seconds"}`; and at last `{"record":
        "comparison", "with": first variant, "changes": by variant and figure}`, where 0.1 is 10 %
        more.

    Raises:
        ConfigError, PluginError, TraceError: something given is wrong; names it.
        HardpointError: a process ended early.
    """
    if not variants:
        raise ConfigError("variants: expected at least one, got none")
    if processes < 1:
        raise ConfigError(f"processes: expected at least 1, got {processes}")
    made = (
        load if isinstance(load, SimulatedLoad) else convert(dict(load), SimulatedLoad, path="load")
    )
    wanted = convert(msgspec.to_builtins(objective or {}), Objective, path="objective")
    costs = read_cost(cost) if isinstance(cost, str | Path) else cost
    made.requests()  # refuses what is wrong before a process starts
    jobs = [
        _Job(name, _plain(config, costs), made, costs, wanted) for name, config in variants.items()
    ]
    reports: dict[str, dict[str, Any]] = {}
    in_processes = processes > 1 and len(jobs) > 1
    for record in _run_in_processes(jobs, processes) if in_processes else _run_here(jobs):
        if record["record"] == "result":
            reports[record["variant"]] = record["report"]
        yield record
    yield {"record": "comparison", **_compared({name: reports[name] for name in variants})}


def _plain(config: EngineConfig, cost: CostFile | StepCost) -> Mapping[str, Any]:
    cache, scheduler, length = config.kv_cache, config.scheduler, config.max_model_len
    if isinstance(cost, CostFile) and not isinstance(length, int):
        length = cost.max_model_len
    if isinstance(cost, CostFile) and cache.num_blocks is None:
        blocks = cost.num_blocks * cost.block_size // cache.block_size
        cache = msgspec.structs.replace(cache, num_blocks=max(blocks, 1))
    if scheduler.step_milliseconds is None:
        limit = STREAMING_STEP_MILLISECONDS
        scheduler = msgspec.structs.replace(scheduler, step_milliseconds=limit)
    changed = msgspec.structs.replace(
        config, kv_cache=cache, scheduler=scheduler, max_model_len=length
    )
    plain: Mapping[str, Any] = msgspec.to_builtins(changed)
    return plain


def _run(job: _Job) -> Iterator[dict[str, Any]]:
    """Run a simulation; yield its progress and its result."""
    count, requests = job.load.requests()
    progress: deque[dict[str, Any]] = deque()
    with Fleet(job.config, step_cost=job.cost, objective=job.objective, is_fixed=True) as fleet:
        began = time.perf_counter()

        def watched() -> Iterator[SimulatedRequest]:
            reported = began
            for number, request in enumerate(requests):
                if (now := time.perf_counter()) - reported > _PROGRESS_SECONDS:
                    reported = now
                    progress.append(
                        {
                            "record": "progress",
                            "variant": job.variant,
                            "requests": number,
                            "of": count,
                            "seconds": fleet.clock(),
                        }
                    )
                yield request

        for _ in fleet.steps(watched()):
            while progress:
                yield progress.popleft()
        yield {
            "record": "result",
            "variant": job.variant,
            "report": msgspec.to_builtins(fleet.report()),
            "curves": fleet.curves(),
            "real_seconds": time.perf_counter() - began,
        }


def _run_here(jobs: Sequence[_Job]) -> Iterator[dict[str, Any]]:
    for job in jobs:
        yield from _run(job)


def _run_in_processes(jobs: Sequence[_Job], processes: int) -> Iterator[dict[str, Any]]:
    """Run each simulation in a process of its own, so many at the same time."""
    context = get_context("spawn")
    waiting = deque(jobs)
    running: dict[Connection[Any, Any], tuple[str, SpawnProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                job = waiting.popleft()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(job, sender), daemon=True)
                process.start()
                sender.close()
                running[receiver] = job.variant, process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                variant, process = running[ready]
                record = _received(ready, variant, process)
                yield record
                if record["record"] == "result":
                    del running[ready]
                    ready.close()
                    process.join()
    finally:
        for connection, (_, process) in running.items():
            process.terminate()
            process.join()
            connection.close()


def _child(job: _Job, connection: Connection[Any, Any]) -> None:
    try:
        for record in _run(job):
            connection.send(record)
    except HardpointError as error:
        connection.send({"record": "error", "message": str(error)})


def _received(
    connection: Connection[Any, Any], variant: str, process: SpawnProcess
) -> dict[str, Any]:
    try:
        record: dict[str, Any] = connection.recv()
    except EOFError:
        process.join()
        raise HardpointError(
            f"{variant}: its process ended early, with exit code {process.exitcode}"
        ) from None
    if record["record"] == "error":
        raise HardpointError(f"{variant}: {record['message']}")
    return record


_COMPARED = ("reuse", "preemptions", "goodput", "goodput_share", "imbalance", "virtual_seconds")


def _compared(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    first, *others = [(name, _figures(report)) for name, report in reports.items()]
    return {
        "with": first[0],
        "changes": {
            name: {
                key: value / first[1][key] - 1 if first[1][key] else None
                for key, value in figures.items()
            }
            for name, figures in others
        },
    }


def _figures(report: Mapping[str, Any]) -> dict[str, float]:
    figures = {name: report[name] for name in _COMPARED}
    for time_ in ("ttft", "tpot", "e2e"):
        figures |= {f"{time_}.{name}": value for name, value in report[time_].items()}
    return figures
