"""Measurement of step times of a model, in an engine as it is used."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hardpoint import plugins
from hardpoint.host.registry.discovery import installed_version
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    HardpointError,
    SamplingParams,
    hookimpl,
)
from hardpoint.plugins.commands import ConfigSources, Generator
from hardpoint.plugins.config_tables import PluginUse
from hardpoint.plugins.scheduling.step_record import StepRecord

from .step_costs import CostFile, TimedStep, batch_sizes, fit_cost, powers

_NAME = "calibration"
_LONGEST = 2048  # tokens of a prompt; what is beyond is extrapolated
_SMALLEST = 16
_BATCH_TOKENS = 2048  # tokens of the prompts of a batch
_LATE = (16, 64, 256, 32, 128, 24, 96, 48)  # tokens of the prompts that begin while others decode
_LATE_BATCHES = 4  # for a step takes longer after one with a prompt
_OUTPUTS = 24  # tokens after the first one of the longest request of a batch
_WARM_LENGTH = 32  # tokens of the prompts of batches that are not counted, at most
_WARM_BATCHES = 2  # of each number of requests, which are not counted
_WARM_PROMPTS = 24  # of each length, which are not counted
_WARM_SHARE = 0.25  # of the time that all these may take
_MOST_SECONDS = 86_400

OpenModel = Callable[[EngineConfig, ConfigSources], Generator]


class StepWatch:
    """Hooks of the engine: write the begin and the plan of each step."""

    contract = 1

    class Options(plugins.Options):
        """Options of `StepWatch`.

        Attributes:
            file: where to write, a line of JSON per step.
        """

        file: str

    def __init__(self, context: Any) -> None:
        # Written at once: the engine's process may end in any way.
        self._file = Path(context.options.file).open("ab", buffering=0)  # noqa: SIM115
        self._encoder = msgspec.json.Encoder()

    @hookimpl
    def step_planned(self, record: StepRecord) -> None:
        """Write a step."""
        line = _Line(record.timestamp, dict(record.scheduled), [*record.preempted])
        self._file.write(self._encoder.encode(line) + b"\n")


class _Line(msgspec.Struct, array_like=True):
    """A step as it is written."""

    timestamp: float
    scheduled: dict[str, int]
    preempted: list[str]


class _Batch(NamedTuple):
    """Requests that are sent together: the lengths of their prompts and of each one's output.

    After those come others with prompts of the lengths `late`, which begin while they decode.
    """

    prompt: int
    outputs: list[int]
    late: tuple[int, ...] = ()


def calibrate(
    open_model: OpenModel,
    config: EngineConfig,
    config_sources: ConfigSources,
    *,
    seconds: float = 60.0,
    seed: int = 0,
) -> Iterator[Mapping[str, Any]]:
    """Measure the configured model; yield records.

    The engine has a process of its own, as behind a server. It runs batches of many sizes, with
    short and long prompts, in a random order, again and again. The time of a step is that until the
    next one begins, so that planning, sampling and sending are part of it.

    Args:
        open_model: opens the model.
        config: the configuration of the engine.
        config_sources: sources of its values.
        seconds: for how long; each batch runs at least once.
        seed: seed of the order, and of the tokens of prompts.

    Yields:
        `{"record": "progress", "seconds": ..., "of": ..., "steps": ...}`, and at last
        `{"record": "result", "cost": CostFile as plain data}`.

    Raises:
        ConfigError: `seconds` is not above 0 or more than a day, or a setting cannot be measured.
        HardpointError: as for opening the model.
    """
    if not 0 < seconds <= _MOST_SECONDS:
        raise ConfigError(f"seconds: expected a number > 0 and <= {_MOST_SECONDS}, got {seconds}")
    _check(config)
    with tempfile.TemporaryDirectory(prefix="hardpoint-calibrate-") as folder:
        file = Path(folder) / "steps.jsonl"
        file.touch()
        with contextlib.closing(open_model(_watched(config, file), config_sources)) as model:
            chance = random.Random(seed)
            _warm_up(model, seconds * _WARM_SHARE, chance)
            num_warm = _count_lines(file)
            began = time.perf_counter()
            for _ in _run_batches(model, seconds, chance):
                yield {
                    "record": "progress",
                    "seconds": min(time.perf_counter() - began, seconds),
                    "of": seconds,
                    "steps": _count_lines(file) - num_warm,
                }
            opened = model.config
        steps = timed_steps(file, after=num_warm)
    cost = _cost_of(steps, opened)
    yield {"record": "result", "cost": msgspec.to_builtins(cost)}


def _check(config: EngineConfig) -> None:
    """Refuse configurations that are not measured: overlapping steps and drafts."""
    for path, value, right in (
        ("scheduler.asynchronous", config.scheduler.asynchronous is True, False),
        ("parallel.pipeline", config.parallel.pipeline, 1),
        ("parallel.data", config.parallel.data, 1),
        ("speculation.use", list(config.speculation.use), []),
    ):
        if value != right:
            raise ConfigError(f"{path}: expected {right!r}, which alone is measured, got {value!r}")


def _watched(config: EngineConfig, file: Path) -> EngineConfig:
    replace = msgspec.structs.replace
    use = PluginUse(use=f"{__name__}:{StepWatch.__name__}", name=_NAME)
    return replace(
        config,
        plugins=replace(config.plugins, enable=[*config.plugins.enable, use]),
        plugin={**config.plugin, _NAME: {"file": str(file)}},
        kv_cache=replace(config.kv_cache, prefix_caching=False),
        scheduler=replace(config.scheduler, step_milliseconds=0.0),
        engine=replace(config.engine, in_process=False),
    )


def _warm_up(model: Generator, seconds: float, chance: random.Random) -> None:
    """Run steps of few tokens, at most for so long: an engine may record them the first times."""
    ends = time.perf_counter() + seconds
    for batch in _batches_of(model):
        if batch.prompt <= _WARM_LENGTH:
            for _ in range(_WARM_PROMPTS if batch.outputs == [2] else _WARM_BATCHES):
                if time.perf_counter() > ends:
                    return
                _run(model, batch, chance)


def _run_batches(model: Generator, seconds: float, chance: random.Random) -> Iterator[None]:
    batches = _batches_of(model)
    ends = time.perf_counter() + seconds
    for number in itertools.count():
        for batch in chance.sample(batches, len(batches)):
            if number and time.perf_counter() > ends:
                return
            _run(model, batch, chance)
            yield
        if time.perf_counter() > ends:
            return


def _batches_of(model: Generator) -> list[_Batch]:
    length = model.config.max_model_len
    assert isinstance(length, int), "an engine that runs has a length"
    return _batches(model.config.scheduler.max_num_seqs, length - 1 - _OUTPUTS)


def _batches(max_num_seqs: int, longest: int) -> list[_Batch]:
    longest = max(1, min(longest, _LONGEST))
    counts = [*powers(1, max_num_seqs), max_num_seqs]
    batches = []
    for count in dict.fromkeys(counts):
        outputs = _falling(count)
        batches.append(_Batch(min(_SMALLEST, longest), outputs))
        if (longer := min(_BATCH_TOKENS // count, longest)) > 2 * _SMALLEST:
            batches.append(_Batch(longer, outputs))
    outputs = [1 + number % _OUTPUTS for number in range(2, 2 * max_num_seqs + 2, 2)]
    late = tuple(min(length, longest) for length in _LATE)
    batches += [_Batch(min(_SMALLEST, longest), outputs, late)] * _LATE_BATCHES
    for length in dict.fromkeys([*powers(_SMALLEST, longest), longest]):
        batches += [_Batch(length, [2]), _Batch(max(1, 3 * length // 4), [2])]
    return batches


def _falling(count: int) -> list[int]:
    """Return lengths of outputs with which so many requests become half as many, size by size."""
    sizes = {size for size in [*batch_sizes(count), count] if 2 * size > count}
    steps = max(1, _OUTPUTS // len(sizes))
    return [1 + steps * sum(size > number for size in sizes) for number in range(count)]


def _run(model: Generator, batch: _Batch, chance: random.Random) -> None:
    def requests() -> Iterable[tuple[Any, SamplingParams]]:
        sizes = [(batch.prompt, output) for output in batch.outputs]
        for length, output in [*sizes, *((length, 2) for length in batch.late)]:
            prompt = [chance.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(length)]
            params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
            yield {"prompt_token_ids": prompt}, params

    for _, output in model.generate_unordered(list(requests())):
        if isinstance(output, Exception):
            raise output


_FIRST_TOKEN, _LAST_TOKEN = 32, 256
"""Ids that every vocabulary has, and that are rarely special."""


def _count_lines(file: Path) -> int:
    with file.open("rb") as lines:
        return sum(1 for _ in lines)


def timed_steps(file: Path, after: int = 0) -> list[TimedStep]:
    """Return the steps that `StepWatch` wrote, but for the last ones before idle times.

    Args:
        file: where it wrote them.
        after: number of the first ones, which are left out.
    """
    with file.open("rb") as lines:
        records = [msgspec.json.decode(line, type=_Line) for line in lines]
    computed: dict[str, int] = {}
    timed = []
    for number, (record, following) in enumerate(itertools.pairwise(records)):
        for name in record.preempted:
            computed.pop(name, None)
        milliseconds = 1e3 * (following.timestamp - record.timestamp)
        # Without a request that goes on, the engine may have waited for one.
        goes_on = record.scheduled.keys() & following.scheduled.keys()
        if number >= after and milliseconds > 0 and goes_on:
            timed.append(_timed(record.scheduled, computed, milliseconds))
        for name, count in record.scheduled.items():
            computed[name] = computed.get(name, 0) + count
    return timed


def _timed(
    scheduled: Mapping[str, int], computed: Mapping[str, int], milliseconds: float
) -> TimedStep:
    single = context = prompts = tokens = 0
    pairs = 0.0
    for name, count in scheduled.items():
        before = computed.get(name, 0)
        if count == 1:
            single += 1
            context += before + 1
        else:
            prompts += 1
            tokens += count
            pairs += count * (before + count / 2)
    return TimedStep(
        single_queries=single,
        context=context,
        prompts=prompts,
        prompt_tokens=tokens,
        prompt_pairs=pairs,
        milliseconds=milliseconds,
    )


def _cost_of(steps: Sequence[TimedStep], config: EngineConfig) -> CostFile:
    if not steps:
        raise HardpointError("calibrate: expected steps to measure, the engine ran none")
    num_blocks, length = config.kv_cache.num_blocks, config.max_model_len
    assert num_blocks is not None
    assert isinstance(length, int)
    return fit_cost(
        steps,
        model=config.model,
        machine=f"{platform.machine()}, {os.cpu_count()} processors, {config.device}",
        hardpoint=installed_version(),
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        max_model_len=length,
        num_blocks=num_blocks,
        block_size=config.kv_cache.block_size,
    )
