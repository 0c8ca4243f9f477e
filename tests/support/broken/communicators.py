"""Communicators with one mistake each; the ranks are threads of one process."""

from __future__ import annotations

import threading
import time

import torch

from hardpoint.errors import CommunicationAbortedError, ModelError
from hardpoint.testing.model.rank_threads import ThreadCommunicator, ThreadExchange
from support.samples import Sample, leave_thread

_met = threading.Condition()
_exchanges: dict[object, tuple[ThreadExchange, set[int]]] = {}


def exchange_of(context, group):
    """Return the exchange of a group, once all its ranks have come."""
    key = (context.placement.folder, group, context.size)
    with _met:
        exchange, ranks = _exchanges.setdefault(key, (ThreadExchange(context.size), set()))
        ranks.add(context.rank)
        _met.notify_all()
        if not _met.wait_for(lambda: len(ranks) == context.size, context.timeout_seconds):
            missing = set(range(context.size)) - ranks
            del _exchanges[key]
            raise ModelError(f"ranks {sorted(missing)} did not come")
    return exchange


class Right(Sample, ThreadCommunicator, contract=1):
    """Makes no mistake."""

    def __init__(self, context):
        super().__init__(context, exchange_of(context, context.group))


class NoContract(Right, contract=None):
    pass


class Mute(Right):
    def describe(self):
        return ""


class RoundsEachTime(Right):
    def all_reduce(self, x):
        parts = self.all_gather(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


class SumsFromItself(Right):
    """Begins with its own x, so that the ranks get different sums."""

    def all_reduce(self, x):
        parts = self.all_gather(x).float()
        total = parts[self.rank].clone()
        for other in range(1, self.size):
            total += parts[(self.rank + other) % self.size]
        return total.to(x.dtype)


class SumsBackwards(Right):
    def all_reduce(self, x):
        return super().all_reduce(x) if not x.is_floating_point() else self._sum(x)

    def _sum(self, x):
        total = torch.zeros_like(x, dtype=torch.float32)
        for part in reversed(self.all_gather(x)):
            total += part
        return total.to(x.dtype)


class Flattens(Right):
    def all_gather(self, x):
        return super().all_gather(x).flatten()


class Transposes(Right):
    """Sends row i of the wrong rank."""

    def all_to_all(self, x):
        return self.all_gather(x)[self.rank]


class Widens(Right):
    def broadcast(self, x, source):
        return super().broadcast(x, source).double()


class NoCopy(Right):
    """Keeps x itself until it is received."""

    def send(self, x, destination):
        self._check_rank("destination", destination, is_other=True)
        _kept[id(self._exchange), self.rank, destination] = x
        super().send(x, destination)

    def recv(self, x, source):
        super().recv(x, source)
        message = _kept.pop((id(self._exchange), source, self.rank))
        return x.copy_(message)


_kept: dict[tuple[int, int, int], torch.Tensor] = {}


class Rendezvous(Right):
    """Waits in send until x has been received."""

    def __init__(self, context):
        super().__init__(context)
        self._answers = exchange_of(context, context.group + "/answers")

    def send(self, x, destination):
        super().send(x, destination)
        self._answers.pop(destination, self.rank)

    def recv(self, x, source):
        super().recv(x, source)
        self._answers.put(self.rank, source, x)
        return x

    def abort(self, reason):
        super().abort(reason)
        self._answers.abort(reason)


class NewestFirst(Right):
    def recv(self, x, source):
        self._check_rank("source", source, is_other=True)
        sent = self._exchange.sent[source, self.rank]
        if len(sent) > 1:
            sent.rotate(1)
        return super().recv(x, source)


class Mixes(Right):
    """Messages of any rank count as messages of the requested one."""

    def send(self, x, destination):
        self._check_rank("destination", destination, is_other=True)
        self._exchange.put(destination, destination, x)

    def recv(self, x, source):
        self._check_rank("source", source, is_other=True)
        return x.copy_(self._exchange.pop(self.rank, self.rank))


class OneForAll(Right):
    """Takes all groups for one."""

    def __init__(self, context):
        ThreadCommunicator.__init__(self, context, exchange_of(context, ""))


class AbortsLate(Right):
    def abort(self, reason):
        if self._exchange.failure is None:
            time.sleep(0.25)
        super().abort(reason)


class ForgetsAbort(Right):
    """Lets calls that wait fail, and later ones succeed."""

    def send(self, x, destination):
        try:
            super().send(x, destination)
        except CommunicationAbortedError:
            pass


class HidesAborts(Right):
    """Raises an error of its own library."""

    def recv(self, x, source):
        try:
            return super().recv(x, source)
        except CommunicationAbortedError as error:
            raise OSError("connection reset by peer") from error


class TakesAnyRank(Right):
    def broadcast(self, x, source):
        return super().broadcast(x, source % self.size)


class TakesItself(Right):
    def send(self, x, destination):
        if destination != self.rank:
            super().send(x, destination)


class RaisesAnother(Right):
    def all_to_all(self, x):
        if len(x) != self.size:
            raise IndexError("too many rows")
        return super().all_to_all(x)


class NeverWakes(Right):
    """Does not wake ranks that wait already."""

    def abort(self, reason):
        self._exchange.failure = self._exchange.failure or reason


class NeverWaits(Right):
    """Begins without the others."""

    def __init__(self, context):
        try:
            super().__init__(context)
        except ModelError:
            ThreadCommunicator.__init__(self, context, ThreadExchange(context.size))


class NamesNobody(Right):
    def __init__(self, context):
        try:
            super().__init__(context)
        except ModelError:
            raise ModelError("somebody did not come") from None


class WaitsLonger(Right):
    def __init__(self, context):
        try:
            super().__init__(context)
        except ModelError:
            time.sleep(0.6)
            raise


class LeaksThread(Right):
    def __init__(self, context):
        super().__init__(context)
        leave_thread()


class LeaksFile(Right):
    files: list[object] = []

    def __init__(self, context):
        super().__init__(context)
        self.files.append(open("/dev/null", "rb"))  # noqa: SIM115


class CloseFails(Right):
    def close(self):
        raise OSError("closed already")


class NoTensor(Right):
    def all_reduce(self, x):
        super().all_reduce(x)
