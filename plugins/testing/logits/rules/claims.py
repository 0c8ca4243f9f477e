"""Checks of a processor's declarations: types, inputs and cost."""

from __future__ import annotations

import contextlib
import gc
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import msgspec
import torch

from hardpoint import typed
from hardpoint.errors import PluginContractError
from hardpoint.plugins import Reads, SamplingParams
from hardpoint.plugins.sampling.logits import LogitsPlugin
from hardpoint.testing.engine_access import check_plugin_class
from hardpoint.testing.logits.batch import BatchFixture, make_logits
from hardpoint.testing.logits.histories import HistoryStep, SimulatedBatch
from hardpoint.testing.logits.host_sync import META, HostSyncError, UndecidableError, no_values
from hardpoint.testing.logits.subject import (
    MAX_ROWS,
    RequestCase,
    RequestRejectedError,
    Subject,
)
from hardpoint.testing.pace import TENSORS, cost_of, own_seconds
from hardpoint.testing.snapshots import count_elements
from hardpoint.testing.suite import Violation, short_repr
from hardpoint.typed import prepared_type


def check_contract(subject: Subject) -> None:
    """Check that the loader accepts the class, and that it can be built."""
    try:
        check_plugin_class(subject.cls, "logits_processors", subject.name)
    except PluginContractError as error:
        raise Violation(str(error), "add the members in the message") from None
    _check_round_trip("the options", subject.checked_options(), subject.cls.Options)
    subject.build().processor.close()


def check_uses(subject: Subject) -> None:
    """Check `uses` of a request that neither gives arguments nor sets a parameter."""
    with contextlib.suppress(RequestRejectedError):
        tokenizer = subject.tokenizer or subject.default_tokenizer
        subject.case(None, SamplingParams(), tokenizer=tokenizer)


def check_round_trip(subject: Subject, case: RequestCase) -> None:
    """Check that arguments survive pickling and conversion from plain data."""
    _check_round_trip(
        "the arguments that prepare returned", case.arguments, prepared_type(subject.cls)
    )


def check_reads(subject: Subject, cases: list[RequestCase], seed: int) -> None:
    """Check that a processor that declares no host ids does not read them."""
    reads, cls = subject.cls.reads, subject.cls
    if reads is Reads.HOST_IDS:
        return
    advice = "declare reads = Reads.HOST_IDS, or do not use the ids"
    if cls.advance is not LogitsPlugin.advance:
        raise Violation(
            f"it declares {reads} but defines advance, which gets ids on the host", advice
        )
    if reads is Reads.LOGITS and cls.advance_rows is not LogitsPlugin.advance_rows:
        raise Violation(
            "it declares Reads.LOGITS but defines advance_rows, which gets ids on the device",
            "declare reads = Reads.DEVICE_IDS",
        )
    batch = BatchFixture(subject, cases)
    guarded = []
    for request in batch.requests:
        for name in ("output_token_ids", "prompt_token_ids"):
            ids = GuardedTokenIds(getattr(request, name), f"{reads} is declared, but {name}")
            object.__setattr__(request, name, ids)  # processors get a frozen request
            guarded.append(ids)
    batch.add_rows()
    for ids in guarded:
        ids.armed = True
    try:
        batch.update(None)
        batch.process(make_logits(seed, len(cases), subject.vocab_size))
    except Violation as violation:
        if isinstance(violation.__cause__, TokenIdsReadError):
            raise Violation(str(violation.__cause__), advice) from None
        raise


def check_no_sync(subject: Subject, cases: list[RequestCase]) -> None:
    """Check that a step reads no device values on the host.

    Raises:
        UndecidableError: an operation of the processor does not run on tensors without values.
    """
    try:
        batch = BatchFixture(subject, cases, pipeline=subject.build(device=META))
    except Violation as violation:
        raise UndecidableError(violation.observed) from violation
    logits = torch.empty(len(cases), subject.vocab_size, device=META)
    try:
        with no_values():
            batch.pipeline.call(logits, batch.requests)
    except HostSyncError as error:
        raise Violation(
            f"it declares {subject.cls.reads}, so the host must never wait, but {error}",
            "use operations with a result of known shape (masked_fill, where, gather, topk), "
            "create constants on logits.device, and compute values of the arguments alone from "
            "rows.arguments(); or declare reads = Reads.HOST_IDS",
        ) from None


def check_memory(subject: Subject, cases: list[RequestCase], waves: int) -> None:
    """Check that finished requests leave nothing behind.

    Args:
        subject: the processor.
        cases: the requests that are added and finished, over and over.
        waves: number of full batches; each takes a few steps and finishes.
    """
    batch = SimulatedBatch(subject)
    fill = HistoryStep(tuple(("add", i) for i in range(MAX_ROWS)), 0, False)
    stay = HistoryStep((), 0, False)
    leave = HistoryStep(tuple(("finish", 0) for _ in range(MAX_ROWS)), 0, False)
    finished: list[weakref.ref[Any]] = []
    sizes = []
    for wave in range(2 * waves):
        for step in (fill, stay, stay, stay):
            batch.apply_events(step, cases)
            sampled = batch.sampled_requests(step)
            logits = make_logits(wave, len(sampled), subject.vocab_size)
            batch.advance(sampled, logits, batch.process(sampled, logits))
        finished += [weakref.ref(entry.request) for entry in sampled if entry.request is not None]
        batch.apply_events(leave, cases)
        if wave in (waves - 1, 2 * waves - 1):
            sizes.append(_count_attributes(batch.pipeline.processor))
        del sampled
    gc.collect()
    # A processor may cache the newest rows.
    held = [ref() for ref in finished[:-MAX_ROWS] if ref() is not None]
    if held:
        raise Violation(
            f"{len(held)} of {len(finished)} finished requests are still referenced, by "
            f"{_holders(held[0], subject)}",
            "keep the data of a request in its state, never the request itself; in the batch "
            "form, drop a row's entry when the row is removed or reused",
        )
    num_finished = waves * MAX_ROWS
    if sizes[1] - sizes[0] >= num_finished // 2:
        raise Violation(
            f"the processor's attributes grew from {sizes[0]} to {sizes[1]} elements while "
            f"{num_finished} requests finished",
            "let nothing grow with the number of requests: bound every cache, and key it by the "
            "running requests",
        )


def check_speed(subject: Subject, cases: list[RequestCase], budget: float) -> None:
    """Check the cost of a row against a budget in microseconds."""
    cost = microseconds_per_row(subject, cases, budget)
    if cost > budget:
        raise Violation(
            f"a row of {subject.vocab_size} logits cost {cost:.0f} microseconds, the budget is "
            f"{budget:.0f}",
            "work on whole tensors instead of token by token, cache values of the rows "
            "alone by rows.version; or set budget_us_per_row to the cost that you accept",
        )


def microseconds_per_row(subject: Subject, cases: list[RequestCase], budget: float) -> float:
    """Return the cost of a row in microseconds: the median step of the best round."""
    batch = BatchFixture(subject, cases)
    logits = make_logits(0, len(cases), subject.vocab_size)

    def measure() -> float:
        times = []
        for _ in range(5):
            copy = logits.clone()
            began = own_seconds()
            batch.pipeline.apply(copy, batch.requests)
            times.append(own_seconds() - began)
        return median(times)

    enough = budget * len(cases) / 1e6
    return cost_of(measure, enough, rounds=20, reference=TENSORS) * 1e6 / len(cases)


class TokenIdsReadError(Exception):
    """Token ids were read by a processor that declares not to read them."""


class GuardedTokenIds(Sequence[int]):
    """Token ids that raise when they are read, once armed."""

    def __init__(self, ids: Sequence[int], description: str) -> None:
        """Wrap `ids`; the error message begins with `description`."""
        self.armed = False
        self._ids = ids
        self._description = description

    def __getitem__(self, index: Any) -> Any:
        """Return items, or raise."""
        return self._read()[index]

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[int]:
        return iter(self._read())

    def _read(self) -> Sequence[int]:
        if self.armed:
            raise TokenIdsReadError(f"{self._description} was read")
        return self._ids


def _check_round_trip(name: str, value: msgspec.Struct, type_: type[Any]) -> None:
    formats: dict[str, Callable[[], Any]] = {
        "plain data": lambda: typed.convert(
            msgspec.to_builtins(value, str_keys=False), type_, path=""
        ),
        "pickle": lambda: pickle.loads(pickle.dumps(value)),
    }
    for format_, convert in formats.items():
        try:
            result = convert()
        except Exception as cause:
            raise Violation(
                f"{name} do not survive {format_}: {type(cause).__name__}: {cause}",
                "let Options and Arguments hold plain data, and define them where pickle finds "
                "them: in a module, or in a class of a module, under their own name",
            ) from cause
        if result != value:
            raise Violation(
                f"{name} come back from {format_} as {short_repr(result)} instead of "
                f"{short_repr(value)}",
                "let them hold plain data only: numbers, strings, lists, dicts and structs of them",
            )


def _count_attributes(processor: LogitsPlugin) -> int:
    attributes = {name: value for name, value in vars(processor).items() if name != "context"}
    shared = [v for v in vars(type(processor)).values() if isinstance(v, dict | list | set)]
    return count_elements([attributes, shared])


def _holders(thing: Any, subject: Subject) -> str:
    types = Counter(type(holder).__name__ for holder in gc.get_referrers(thing))
    types.pop("frame", None)
    return ", ".join(types) or f"{subject.cls.__name__}"
