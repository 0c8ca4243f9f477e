"""A step part that answers calls of programs, by asking its worker halves."""

from __future__ import annotations

from concurrent.futures import Future

from hardpoint.plugins import EngineHalf, ModelError, StepPart, WorkerHalf


class Engine(EngineHalf):
    def __init__(self, context):
        self.context = context
        self.later: list[Future[str]] = []

    def call(self, method, arguments):
        if method == "later":
            self.later.append(Future())
            return self.later[-1]
        if method == "now":
            self.later.pop().set_result("answered")
            return None
        answers = self.context.call_workers(method.encode())
        return {"answers": [answer.decode() for answer in answers], **arguments}


class Worker(WorkerHalf):
    def __init__(self, rank):
        self.rank = rank

    def call(self, message):
        if message == b"refuse" and self.rank == 0:
            raise ModelError("its file is missing")
        if message == b"fail":
            raise KeyError("no seat")
        return b"%s in rank %d" % (message, self.rank)


class Answering(StepPart):
    contract = 1

    def engine_half(self, context):
        return Engine(context)

    def worker_half(self, context):
        return Worker(context.rank)
