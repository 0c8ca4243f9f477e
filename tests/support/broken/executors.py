"""Executors with one mistake each."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from hardpoint.plugins import Executor, ModelRunnerOutput, Wrapper


class Kept(Wrapper[Executor], Executor):
    """Keeps all of uniproc."""

    contract = 1

    class Options(Wrapper.Options):
        wraps: str = "uniproc"


class NoContract(Kept):
    pass


class Changed(Kept):
    contract = 1

    def sample_tokens(self, plan, bitmask=None):
        result = self.wrapped.sample_tokens(plan, bitmask).result()
        self.change(result.sampled_token_ids)
        future = Future()
        future.set_result(result)
        return future

    def change(self, tokens):
        pass


class Drops(Changed):
    contract = 1

    def change(self, tokens):
        tokens.popitem()


class Doubles(Changed):
    contract = 1

    def change(self, tokens):
        for ids in tokens.values():
            ids *= 2


class OffByOne(Changed):
    contract = 1

    def change(self, tokens):
        for ids in tokens.values():
            ids[0] = (ids[0] + 1) % 257


class NoFuture(Kept):
    contract = 1

    def execute_model(self, plan):
        return self.wrapped.execute_model(plan).result()


class IgnoresGrammars(Kept):
    contract = 1

    def sample_tokens(self, plan, bitmask=None):
        return self.wrapped.sample_tokens(plan)


class NeverEnds(Kept):
    contract = 1

    def sample_tokens(self, plan, bitmask=None):
        return Future()


class RunsTwice(Kept):
    contract = 1

    def execute_model(self, plan):
        self.wrapped.execute_model(plan)
        return self.wrapped.execute_model(plan)


class Late(Kept):
    """Runs each step when the next one comes."""

    contract = 1
    last = None

    def execute_model(self, plan):
        last, self.last = self.last, plan
        if last is not None:
            self.wrapped.execute_model(last)
        future = Future()
        future.set_result(None if plan.total_num_scheduled_tokens else ModelRunnerOutput())
        return future


class NoResults(Kept):
    contract = 1

    def collective_rpc(self, method, args=(), timeout=None):
        self.wrapped.collective_rpc(method, args, timeout)
        return []


class CallsTwice(Kept):
    contract = 1

    def collective_rpc(self, method, args=(), timeout=None):
        return self.wrapped.collective_rpc(method, args, timeout) * 2


class SwallowsErrors(Kept):
    contract = 1

    def execute_model(self, plan):
        future = self.wrapped.execute_model(plan)
        if future.exception() is None:
            return future
        future = Future()
        future.set_result(ModelRunnerOutput())
        return future


class RenamesErrors(Kept):
    contract = 1

    def collective_rpc(self, method, args=(), timeout=None):
        try:
            return self.wrapped.collective_rpc(method, args, timeout)
        except Exception:
            raise RuntimeError("a worker failed") from None


class NeverSleeps(Kept):
    contract = 1

    def collective_rpc(self, method, args=(), timeout=None):
        if method in ("sleep", "wake_up"):
            return [None]
        return self.wrapped.collective_rpc(method, args, timeout)


class ClaimsTwo(Kept):
    contract = 1
    max_concurrent_batches = 2


class ClaimsNone(Kept):
    contract = 1
    max_concurrent_batches = 0


class LeaksThread(Kept):
    contract = 1

    def start(self):
        self.ended = threading.Event()
        threading.Thread(target=self.ended.wait, args=(20,), daemon=True).start()
        return self.wrapped.start()


class LeaksFile(Kept):
    contract = 1

    def start(self):
        self.descriptors = os.pipe()
        return self.wrapped.start()


class ClosesOnce(Kept):
    contract = 1
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True
        super().close()


class KeepsWorkers(Kept):
    contract = 1

    def close(self):
        pass


class ReportsClose(Kept):
    contract = 1

    def on_failure(self, callback):
        self.callback = callback

    def close(self):
        super().close()
        if hasattr(self, "callback"):
            self.callback(RuntimeError("lost"))


class Threaded(Kept):
    """Correct: one thread runs all steps; `lose` stands for the loss of it."""

    contract = 1
    max_concurrent_batches = 2

    def __init__(self, context):
        super().__init__(context)
        self.thread = ThreadPoolExecutor(1)

    def execute_model(self, plan):
        return self.thread.submit(lambda: self.wrapped.execute_model(plan).result())

    def sample_tokens(self, plan, bitmask=None):
        return self.thread.submit(lambda: self.wrapped.sample_tokens(plan, bitmask).result())

    def on_failure(self, callback):
        self.callback = callback

    def lose(self):
        self.callback(RuntimeError("a worker was lost"))

    def close(self):
        self.thread.shutdown()
        super().close()


class Silent(Threaded):
    contract = 1

    def lose(self):
        pass
