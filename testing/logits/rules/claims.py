"""Rules on what a class says of itself: its types, what it reads, what it costs."""

from __future__ import annotations

import gc
import pickle
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import msgspec
import torch

from hardpoint.core.worker.sampling.processor_runner import ProcessorRunner
from hardpoint.core.worker.sampling.rows import ProcessorRows
from hardpoint.plugins import (
    BatchLogitsProcessor,
    LogitsProcessor,
    Reads,
    SparseLogitsProcessor,
    typed,
)
from hardpoint.plugins.errors import PluginContractError
from hardpoint.plugins.kinds import KINDS
from hardpoint.plugins.logits import LogitsPlugin
from hardpoint.registry.loading import check_component
from hardpoint.testing.logits.batch import Desk, make_logits
from hardpoint.testing.logits.histories import Floor, Step
from hardpoint.testing.logits.host_sync import META, HostSyncError, Unknown, no_values
from hardpoint.testing.logits.subject import MAX_ROWS, Case, Subject
from hardpoint.testing.snapshots import weigh
from hardpoint.testing.suite import Violation, short


def check_contract(subject: Subject) -> None:
    """The class states what the loader wants, and can be built."""
    try:
        check_component(subject.cls, KINDS["logits_processors"], subject.source())
    except PluginContractError as error:
        raise Violation(str(error), "add what the message names") from None
    _round_trip("the options", subject.checked_options(), subject.cls.Options)
    subject.build().processor.close()


def check_round_trip(subject: Subject, case: Case) -> None:
    """Arguments survive the way to another process, as plain data and pickled."""
    _round_trip("the arguments that prepare returned", case.arguments, subject.cls.Arguments)


def check_reads(subject: Subject, cases: list[Case], seed: int) -> None:
    """What says that it reads no ids on the host does not look at them there."""
    reads, cls = subject.cls.reads, subject.cls
    if reads is Reads.HOST_IDS:
        return
    advice = "declare reads = Reads.HOST_IDS, or do without the ids"
    if cls.advance is not LogitsPlugin.advance:
        raise Violation(f"it declares {reads} but has advance, which gets ids on the host", advice)
    if reads is Reads.LOGITS and cls.advance_rows is not LogitsPlugin.advance_rows:
        raise Violation(
            "it declares Reads.LOGITS but has advance_rows, which gets ids on the device",
            "declare reads = Reads.DEVICE_IDS",
        )
    desk = Desk(subject, cases)
    watched = []
    for request in desk.requests:
        for name in ("output_token_ids", "prompt_token_ids"):
            ids = WatchedIds(getattr(request, name), f"{reads} is declared, but {name}")
            setattr(request, name, ids)
            watched.append(ids)
    desk.take_rows()
    for ids in watched:
        ids.armed = True
    try:
        desk.update(None)
        desk.process(make_logits(seed, len(cases), subject.vocab_size))
    except Violation as violation:
        if isinstance(violation.__cause__, TouchedError):
            raise Violation(str(violation.__cause__), advice) from None
        raise


def check_no_sync(subject: Subject, cases: list[Case]) -> None:
    """What says that it never waits for the device asks it for no values.

    Raises:
        Unknown: it cannot be told, because an operation runs only on tensors with values.
    """
    try:
        desk = Desk(subject, cases, stage=subject.build(device=META))
    except Violation as violation:
        raise Unknown(violation.saw) from violation
    stage = desk.stage
    rows = ProcessorRows(subject.name, desk.requests, 0, META, stage.device_state)
    logits = torch.empty(len(cases), subject.vocab_size, device=META)
    try:
        with no_values():
            _call(stage, rows, logits)
            if stage.device_state:
                tokens = torch.empty(len(cases), dtype=torch.int64, device=META)
                stage.device_state.advance(
                    desk.requests, lambda t: stage.processor.advance_rows(rows, tokens, t)
                )
    except HostSyncError as error:
        raise Violation(
            f"it declares {subject.cls.reads}, so that the host never waits, but {error}",
            "stay with operations whose result has a known shape (masked_fill, where, gather, "
            "topk), make constants on logits.device, and compute what depends on arguments alone "
            "from rows.arguments(); or declare reads = Reads.HOST_IDS",
        ) from None


def check_memory(subject: Subject, cases: list[Case], waves: int) -> None:
    """Requests that are gone leave nothing behind.

    Args:
        subject: the processor.
        cases: requests that come and go, over and over.
        waves: how often; each wave is a batch that is filled, takes two steps and is left.
    """
    floor = Floor(subject)
    fill = Step(tuple(("add", i) for i in range(MAX_ROWS)), 0, False)
    stay = Step((), 0, False)
    leave = Step(tuple(("finish", 0) for _ in range(MAX_ROWS)), 0, False)
    gone: list[weakref.ref[Any]] = []
    weights = []
    for wave in range(2 * waves):
        for step in (fill, stay):
            floor.arrange(step, cases)
            lives = floor.sampled(step)
            floor.process(lives, make_logits(wave, len(lives), subject.vocab_size))
            floor.advance(lives)
        gone += [weakref.ref(life.request) for life in lives if life.request is not None]
        floor.arrange(leave, cases)
        if wave in (waves - 1, 2 * waves - 1):
            weights.append(_weight(floor.stage.processor))
        del lives
    gc.collect()
    # What a processor keeps of the newest rows, as a cache, it may keep.
    held = [ref() for ref in gone[:-MAX_ROWS] if ref() is not None]
    if held:
        raise Violation(
            f"{len(held)} of {len(gone)} requests that ended are still held, by "
            f"{_holders(held[0], subject)}",
            "keep what belongs to a request in its state, never the request itself; in the batch "
            "form drop a row's entry when it is removed or taken by another",
        )
    passed = waves * MAX_ROWS
    if weights[1] - weights[0] >= passed // 2:
        raise Violation(
            f"what hangs on the instance grew from {weights[0]} to {weights[1]} elements while "
            f"{passed} requests came and went",
            "let nothing grow with the number of requests: bound every cache, and key it by what "
            "is running",
        )


def microseconds_per_row(subject: Subject, cases: list[Case], rounds: int) -> float:
    """Return what one row costs, in microseconds: the median of the best round's steps."""
    desk = Desk(subject, cases)
    logits = make_logits(0, len(cases), subject.vocab_size)
    best = float("inf")
    for _ in range(rounds):
        taken = []
        for _ in range(5):
            copy = logits.clone()
            began = time.perf_counter()
            desk.pipeline.apply(copy, desk.requests)
            taken.append(time.perf_counter() - began)
        best = min(best, median(taken))
    return best * 1e6 / len(cases)


class TouchedError(Exception):
    """Token ids were looked at by somebody who said that he would not."""


class WatchedIds(Sequence[int]):
    """Token ids that, once armed, tell whoever looks at them so."""

    def __init__(self, ids: Sequence[int], whose: str) -> None:
        """`whose` begins the message."""
        self.armed = False
        self._ids = ids
        self._whose = whose

    def __getitem__(self, index: Any) -> Any:
        """Return items, or refuse."""
        return self._looked_at()[index]

    def __len__(self) -> int:
        """Return the length, or refuse."""
        return len(self._looked_at())

    def __iter__(self) -> Iterator[int]:
        """Iterate, or refuse."""
        return iter(self._looked_at())

    def _looked_at(self) -> Sequence[int]:
        if self.armed:
            raise TouchedError(f"{self._whose} was looked at")
        return self._ids


def _call(stage: ProcessorRunner, rows: ProcessorRows, logits: torch.Tensor) -> None:
    processor = stage.processor
    if isinstance(processor, SparseLogitsProcessor):
        processor.edits(rows)
    elif isinstance(processor, LogitsProcessor):
        processor.apply(logits, rows)
    elif isinstance(processor, BatchLogitsProcessor):
        processor.apply(logits)


def _round_trip(what: str, value: msgspec.Struct, type_: type[Any]) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "plain data": lambda: typed.convert(
            msgspec.to_builtins(value, str_keys=False), type_, path=""
        ),
        "pickle": lambda: pickle.loads(pickle.dumps(value)),
    }
    for way, travel in ways.items():
        try:
            arrived = travel()
        except Exception as cause:
            raise Violation(
                f"{what} do not survive {way}: {type(cause).__name__}: {cause}",
                "Options and Arguments hold plain data and stand where pickle finds them: in a "
                "module or in a class of one, under the name that they were made with",
            ) from cause
        if arrived != value:
            raise Violation(
                f"{what} come back from {way} as {short(arrived)} instead of {short(value)}",
                "hold plain data only: numbers, strings, lists, dicts and structs of them",
            )


def _weight(processor: LogitsPlugin) -> int:
    own = {name: value for name, value in vars(processor).items() if name != "context"}
    shared = [v for v in vars(type(processor)).values() if isinstance(v, dict | list | set)]
    return weigh([own, shared])


def _holders(thing: Any, subject: Subject) -> str:
    kinds = Counter(type(holder).__name__ for holder in gc.get_referrers(thing))
    kinds.pop("frame", None)
    return ", ".join(kinds) or f"{subject.cls.__name__}"
