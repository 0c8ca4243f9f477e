"""The programs of the communicator suite's ranks, and their expected results."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from hardpoint.errors import CommunicationAbortedError
from hardpoint.plugins.parallel import Communicator
from hardpoint.testing.suite import Violation, short_repr

_NAMES = ("all_reduce", "all_gather", "all_to_all", "broadcast", "send and recv")
_LARGE = (40, 4000)
_SHAPES = ((), (0, 3), (1,), (7,), (3, 5), (33, 64), _LARGE)
_DELAY_SECONDS = 0.03
ABORT_SECONDS = 1.0
"""Maximum time of a call after an abort."""

WAITS = ("all_reduce", "all_gather", "all_to_all", "broadcast", "recv", "all_reduce of rank 0 too")
"""Calls in which ranks wait when rank 0 aborts."""


@dataclass
class RankLog:
    """The communicators of a rank, and where it is."""

    groups: Mapping[str, Communicator]
    where: str = "its constructor"


Program = Callable[[Communicator, RankLog], Any]
"""Runs in each rank; its value is the outcome's. It can be pickled."""


@dataclass
class Outcome:
    """How a rank has ended.

    Attributes:
        value: result of the program.
        error: class and message of its exception.
        violation: the arguments of its Violation.
        where: its last action.
        ended: when, in seconds of the monotonic clock.
        is_late: whether it waited for longer than it may.
    """

    value: Any = None
    error: str | None = None
    violation: tuple[str, str, str | None] | None = None
    where: str = "its constructor"
    ended: float = 0.0
    is_late: bool = False


@dataclass(frozen=True)
class RankRun:
    """Runs a program as one of several ranks; can be pickled.

    Attributes:
        suite: the test class, which makes communicators.
        size: number of ranks.
        folder: folder of the placement.
        program: what to run.
        groups: names of the groups to build; the first one's communicator is the program's.
        seconds: after which waits are ended.
    """

    suite: type[Any]
    size: int
    folder: str
    program: Program
    groups: tuple[str, ...]
    seconds: float

    def __call__(self, rank: int) -> Outcome:
        """Build the communicators, run the program, close them."""
        groups: dict[str, Communicator] = {}
        log, outcome, late = RankLog(groups), Outcome(), threading.Event()

        def end() -> None:
            late.set()
            for communicator in groups.values():
                communicator.abort("the suite has waited for long enough")

        timer = threading.Timer(self.seconds, end)
        timer.daemon = True
        timer.start()
        try:
            for group in self.groups:
                groups[group] = self.suite().make(rank, self.size, self.folder, group)
            outcome.value = self.program(groups[self.groups[0]], log)
        except Violation as violation:
            outcome.violation = (violation.observed, violation.fix, violation.rule)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
        timer.cancel()
        timer.join()
        outcome.where, outcome.ended, outcome.is_late = log.where, time.monotonic(), late.is_set()
        for communicator in groups.values():
            _close(communicator, outcome)
        return outcome


def _close(communicator: Communicator, outcome: Outcome) -> None:
    """Close the communicator of a rank; let the others fail if this one has."""
    try:
        if outcome.error is not None or outcome.violation is not None:
            communicator.abort("a rank failed")
        communicator.close()
    except Exception as error:
        if outcome.error is None:
            outcome.error, outcome.where = f"{type(error).__name__}: {error}", "close"


@dataclass(frozen=True)
class Operation:
    """An operation that all ranks run.

    Attributes:
        name: name of the method.
        shape: shape of x, or of a row of it.
        dtype: dtype of x.
        seed: seed of the values.
        source: rank of a broadcast, modulo the number of ranks; distance of a message.
        values: the x of each rank, instead of random ones.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int = 0
    source: int = 0
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        values = f", x = {list(self.values)} by rank" if self.values else ""
        return f"{self.name} of {list(self.shape)} {self.dtype}{values}"

    def x(self, rank: int, size: int) -> torch.Tensor:
        """Return the tensor that a rank gives."""
        shape = (size, *self.shape) if self.name == "all_to_all" else self.shape
        if self.values:
            value = self.values[rank] if rank < len(self.values) else 0.0
            return torch.full(shape, value).to(self.dtype)
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        if self.dtype.is_floating_point:
            exponents = torch.randint(-8, 8, shape, generator=generator)
            return (torch.randn(shape, generator=generator) * 2.0**exponents).to(self.dtype)
        return torch.randint(-(2**30), 2**30, shape, generator=generator).to(self.dtype)

    def run(self, communicator: Communicator) -> torch.Tensor:
        """Run it in a rank."""
        rank, size = communicator.rank, communicator.size
        x = self.x(rank, size).to(communicator.context.device)
        if self.name == "broadcast":
            return communicator.broadcast(x, self.source % size)
        if self.name == "send and recv":
            step = 1 + self.source % (size - 1)
            communicator.send(x, (rank + step) % size)
            return communicator.recv(torch.empty_like(x), (rank - step) % size)
        result: torch.Tensor = getattr(communicator, self.name)(x)
        return result

    def expected(self, rank: int, size: int) -> list[torch.Tensor]:
        """Return the results that a rank may get; several where a sum's precision is left open."""
        tensors = [self.x(other, size) for other in range(size)]
        if self.name == "all_reduce":
            return _sums(tensors)
        if self.name == "all_gather":
            return [torch.stack(tensors)]
        if self.name == "all_to_all":
            return [torch.stack([x[rank] for x in tensors])]
        if self.name == "broadcast":
            return [tensors[self.source % size]]
        return [tensors[(rank - 1 - self.source % (size - 1)) % size]]


def _sums(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    dtype = tensors[0].dtype
    sums = []
    for wide in (torch.float32, torch.float64) if dtype.is_floating_point else (dtype,):
        total = tensors[0].to(wide)
        for x in tensors[1:]:
            total = total + x.to(wide)
        sums.append(total.to(dtype))
    return sums


def operations(dtypes: Sequence[torch.dtype]) -> st.SearchStrategy[Operation]:
    """Return a strategy for operations."""
    drawn = st.builds(
        Operation,
        name=st.sampled_from(_NAMES),
        shape=st.sampled_from(_SHAPES),
        dtype=st.sampled_from(list(dtypes)),
        seed=st.integers(0, 1000),
        source=st.integers(0, 5),
    )
    # All ranks send first, which needs room for what they send.
    return drawn.filter(
        lambda operation: operation.name != "send and recv" or operation.shape != _LARGE
    )


def sums(dtype: torch.dtype) -> list[Operation]:
    """Return sums that show in which order and precision they were added."""
    step = torch.finfo(dtype).eps * 256  # between numbers from 256 on
    few: tuple[float, ...] = (256.0, 0.375 * step, 0.375 * step)
    big = 2.0**25 if dtype != torch.float16 else 2.0**15
    cases = [few, few[::-1], (big, 1.0, -big), (1.0, big, -big)]
    small = [Operation("all_reduce", (3,), dtype, values=values) for values in cases]
    return [*small, Operation("all_reduce", _LARGE, dtype, values=few)]


def wrong_shape(operation: Operation, results: Sequence[Any]) -> str | None:
    """Return which result, by rank, is not of the expected shape and dtype; None if all are."""
    for rank, result in enumerate(results):
        wanted = operation.expected(rank, len(results))[0]
        if not isinstance(result, torch.Tensor):
            return f"rank {rank} got {short_repr(result)}, no tensor"
        if (result.shape, result.dtype) != (wanted.shape, wanted.dtype):
            return (
                f"rank {rank} got {list(result.shape)} of {result.dtype}, expected "
                f"{list(wanted.shape)} of {wanted.dtype}"
            )
    return None


def wrong_values(
    operation: Operation, results: Sequence[torch.Tensor], *, exact_sums: bool
) -> str | None:
    """Return which result, by rank, is not as expected; None if all are."""
    is_sum = operation.name == "all_reduce"
    is_free = is_sum and not exact_sums and operation.dtype.is_floating_point
    for rank, result in enumerate(results):
        if is_sum and not torch.equal(result, results[0]):
            return f"ranks 0 and {rank} got different sums ({_first(results[0], result)})"
        wanted = operation.expected(rank, len(results))
        if not is_free and not any(torch.equal(result, tensor) for tensor in wanted):
            return f"rank {rank} got wrong values ({_first(wanted[0], result)})"
    return None


def _first(wanted: torch.Tensor, got: torch.Tensor) -> str:
    index = int((wanted != got).flatten().nonzero()[0])
    return f"element {index}: {got.flatten()[index].item()}, not {wanted.flatten()[index].item()}"


def run_operations(
    steps: Sequence[Operation], communicator: Communicator, log: RankLog
) -> list[torch.Tensor]:
    """Return the result of each operation."""
    results = []
    for step in steps:
        log.where = str(step)
        result = step.run(communicator)
        results.append(result.clone().cpu() if isinstance(result, torch.Tensor) else result)
    _meet(communicator, log)
    return results


def one_of_each(communicator: Communicator, log: RankLog) -> None:
    """Use every operation."""
    run_operations([Operation(name, (5,), torch.float32) for name in _NAMES], communicator, log)


def describe(communicator: Communicator, log: RankLog) -> str:
    """Return the description."""
    log.where = "describe"
    text = communicator.describe()
    _meet(communicator, log)
    return text


def _meet(communicator: Communicator, log: RankLog) -> None:
    """Return when all ranks have come here: a rank that closes early fails the others."""
    log.where = "the last all_reduce"
    communicator.all_reduce(torch.zeros(1, device=communicator.context.device))


def _value(x: torch.Tensor) -> float:
    return float(x.flatten()[-1])


def ring(communicator: Communicator, log: RankLog, width: int = 4) -> str:
    """Send to the next rank, change x, receive from the previous rank; return the first mistake."""
    rank, size = communicator.rank, communicator.size
    x = torch.full((width,), float(rank), device=communicator.context.device)
    log.where = f"send to rank {(rank + 1) % size}, all ranks sending first"
    communicator.send(x, (rank + 1) % size)
    x.fill_(-1.0)
    log.where = f"recv from rank {(rank - 1) % size}"
    got = _value(communicator.recv(torch.empty_like(x), (rank - 1) % size))
    _meet(communicator, log)
    if got == (rank - 1) % size:
        return ""
    changed = "; x was changed after send had returned" if got == -1 else ""
    return f"rank {rank} got {got} from rank {(rank - 1) % size}, not {(rank - 1) % size}{changed}"


def in_order(communicator: Communicator, log: RankLog) -> str:
    """Send several messages of different sizes to the last rank, each after the other."""
    rank, last = communicator.rank, communicator.size - 1
    device = communicator.context.device
    sizes = (1, 50_000, 3, 20_000, 2, 1)
    wrong = ""
    log.where = "send or recv of several messages"
    if rank < last:
        for number, count in enumerate(sizes):
            communicator.send(torch.full((count,), 10.0 * rank + number, device=device), last)
    else:
        for source in range(last):
            for number, count in enumerate(sizes):
                got = _value(communicator.recv(torch.empty(count, device=device), source))
                if got != (sent := 10 * source + number):
                    wrong = wrong or f"message {number} of rank {source} was {got}, not {sent:.1f}"
    _meet(communicator, log)
    return wrong


def apart(communicator: Communicator, log: RankLog) -> str:
    """Run collectives while messages are under way, and receive from the last rank first."""
    rank, size = communicator.rank, communicator.size
    device = communicator.context.device
    total = 0.0
    for sender in range(1, size):  # one after the other, so that rank 0 could take them in order
        log.where = "send, before a collective operation"
        if rank == sender:
            communicator.send(torch.full((2,), float(rank), device=device), 0)
        log.where = "all_reduce, while messages are under way"
        total = _value(communicator.all_reduce(torch.full((2,), 1.0, device=device)))
    log.where = "recv, after a collective operation"
    got = {}
    if rank == 0:
        for source in range(size - 1, 0, -1):
            got[source] = _value(communicator.recv(torch.empty(2, device=device), source))
    _meet(communicator, log)
    if total != size:
        return f"all_reduce of ones gave {total} while messages were under way"
    wrong = [f"rank {source}: {value}" for source, value in got.items() if value != source]
    return f"messages of the rank's number arrived as {', '.join(wrong)}" if wrong else ""


def two_groups(communicator: Communicator, log: RankLog) -> str:
    """Use two groups in turn, each rank in another order."""
    rank, size = communicator.rank, communicator.size
    names = list(log.groups) if rank % 2 else list(log.groups)[::-1]
    for name in names:
        log.where = f"send in group {name}"
        number = float(len(name) * 100 + ord(name[0]))
        x = torch.full((3,), number, device=communicator.context.device)
        log.groups[name].send(x, (rank + 1) % size)
    wrong = ""
    for name in log.groups:
        log.where = f"recv in group {name}"
        x = torch.empty(3, device=communicator.context.device)
        got = _value(log.groups[name].recv(x, (rank - 1) % size))
        if got != (sent := len(name) * 100 + ord(name[0])):
            wrong = f"group {name} got {got}, sent was {sent:.1f}"
    for name in log.groups:
        _meet(log.groups[name], log)
    return wrong


@dataclass(frozen=True)
class Ending:
    """How a rank's wait ended.

    Attributes:
        wrong: which call did not raise CommunicationAbortedError, and what it did instead.
        ended: when, in seconds of the monotonic clock; in rank 0 when it called abort.
        later: seconds that a later call took to fail.
    """

    wrong: str = ""
    ended: float = field(default=0.0)
    later: float = 0.0


def abort(call: str, communicator: Communicator, log: RankLog) -> Ending:
    """Wait in a call that rank 0 never joins; it aborts instead."""
    _meet(communicator, log)
    log.where = f"{call}, after rank 0 called abort"
    if communicator.rank == 0 and "rank 0" not in call:
        time.sleep(_DELAY_SECONDS)
        ended = time.monotonic()
        communicator.abort("the suite aborts")
    elif communicator.rank == 0:
        ended = time.monotonic() + _DELAY_SECONDS
        timer = threading.Timer(_DELAY_SECONDS, communicator.abort, ["the suite aborts"])
        timer.start()
        wrong = _not_aborted("recv", communicator, communicator.size - 1)
        timer.join()
        if not wrong and (duration := time.monotonic() - ended) > ABORT_SECONDS:
            wrong = f"recv ended {duration:.1f} s after it"
        if wrong:
            return Ending(wrong, ended)
    else:
        wrong = _not_aborted(call.split()[0], communicator)
        ended = time.monotonic()
        if wrong:
            return Ending(wrong, ended)
    return _later(communicator, log, ended)


def _later(communicator: Communicator, log: RankLog, ended: float) -> Ending:
    log.where = "a call after the abort"
    began = time.monotonic()
    for call in ("all_reduce", "broadcast", "recv", "send"):
        if wrong := _not_aborted(call, communicator, int(communicator.rank == 0)):
            return Ending(f"a later {wrong}", ended)
    communicator.abort("once more")
    return Ending("", ended, time.monotonic() - began)


def _not_aborted(call: str, communicator: Communicator, source: int = 0) -> str:
    x = torch.zeros(communicator.size, device=communicator.context.device)
    arguments = (source,) if call in ("broadcast", "recv", "send") else ()
    try:
        getattr(communicator, call)(x, *arguments)
    except CommunicationAbortedError:
        return ""
    except Exception as error:
        return f"{call} raised {type(error).__name__}: {error}"
    return f"{call} returned"


def refusals(communicator: Communicator, log: RankLog) -> str:
    """Return the calls that were not refused as they should be."""
    rank, size = communicator.rank, communicator.size
    x = torch.zeros(2, device=communicator.context.device)
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        (name, (x, other))
        for name, others in (
            ("broadcast", (-1, size)),
            ("send", (-1, size, rank)),
            ("recv", (-1, size, rank)),
        )
        for other in others
    ]
    wrong.append(("all_to_all", (torch.zeros(size + 1, 2, device=x.device),)))
    problem = ""
    for name, arguments in wrong:
        argument = arguments[1] if len(arguments) > 1 else f"{size + 1} rows"
        log.where = f"{name} with {argument}"
        try:
            getattr(communicator, name)(*arguments)
        except ValueError:
            continue
        except Exception as error:
            problem = f"{log.where} raised {type(error).__name__}: {error}"
        else:
            problem = f"{log.where} was not refused"
        break
    _meet(communicator, log)
    return problem


_SEGMENTS = "files in /dev/shm"


def holdings() -> dict[str, set[Any]]:
    """Return the threads and open files of this process, as numbers, and all shared segments."""
    held: dict[str, set[Any]] = {"threads": set(range(threading.active_count()))}
    with suppress(OSError):
        held["open files"] = set(range(len(os.listdir("/proc/self/fd"))))
        held[_SEGMENTS] = set(os.listdir("/dev/shm"))
    return held


def more_than(before: Mapping[str, set[Any]]) -> list[str]:
    """Return the resources that this process holds more of than before, with the numbers."""
    grown = []
    for name, held in holdings().items():
        more = held - before.get(name, held)
        if name == _SEGMENTS and more:
            more -= _segments_of_others()
        if more:
            grown.append(f"{name} ({len(held)}, before {len(before[name])})")
    return grown


def _segments_of_others() -> set[str]:
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if maps.parent.name != str(os.getpid()):
            with suppress(OSError):  # it has ended, or is another user's
                names |= set(re.findall(r" /dev/shm/(\S+)", maps.read_text()))
    return names
