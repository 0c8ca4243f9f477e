"""Executors with one mistake each."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor

from hardpoint.plugins import ConfigError, Executor, HardpointError, ModelRunnerOutput, Wrapper
from hardpoint.plugins.executor import open_worker
from hardpoint.toolkit.workers.joining import are_out_of_step, first_error_or, results_of
from support.samples import Sample, leave_thread


class Kept(Sample, Wrapper[Executor], Executor, contract=1):
    """Keeps all of uniproc."""

    class Options(Wrapper.Options):
        wraps: str = "uniproc"


class NoContract(Kept, contract=None):
    pass


class Changed(Kept):
    def sample_tokens(self, plan, bitmask=None):
        result = self.wrapped.sample_tokens(plan, bitmask).result()
        self.change(result.sampled_token_ids)
        future = Future()
        future.set_result(result)
        return future

    def change(self, tokens):
        pass


class Drops(Changed):
    def change(self, tokens):
        tokens.popitem()


class Doubles(Changed):
    def change(self, tokens):
        for ids in tokens.values():
            ids *= 2


class OffByOne(Changed):
    def change(self, tokens):
        for ids in tokens.values():
            ids[0] = (ids[0] + 1) % 257


class NoFuture(Kept):
    def execute_model(self, plan):
        return self.wrapped.execute_model(plan).result()


class IgnoresGrammars(Kept):
    def sample_tokens(self, plan, bitmask=None):
        return self.wrapped.sample_tokens(plan)


class NeverEnds(Kept):
    def sample_tokens(self, plan, bitmask=None):
        return Future()


class RunsTwice(Kept):
    def execute_model(self, plan):
        self.wrapped.execute_model(plan)
        return self.wrapped.execute_model(plan)


class Late(Kept):
    """Runs each step when the next one comes."""

    last = None

    def execute_model(self, plan):
        last, self.last = self.last, plan
        if last is not None:
            self.wrapped.execute_model(last)
        future = Future()
        future.set_result(None if plan.total_num_scheduled_tokens else ModelRunnerOutput())
        return future


class NoResults(Kept):
    def collective_rpc(self, method, args=(), timeout=None):
        self.wrapped.collective_rpc(method, args, timeout)
        return []


class CallsTwice(Kept):
    def collective_rpc(self, method, args=(), timeout=None):
        return self.wrapped.collective_rpc(method, args, timeout) * 2


class SwallowsErrors(Kept):
    def execute_model(self, plan):
        future = self.wrapped.execute_model(plan)
        if future.exception() is None:
            return future
        future = Future()
        future.set_result(ModelRunnerOutput())
        return future


class RenamesErrors(Kept):
    def collective_rpc(self, method, args=(), timeout=None):
        try:
            return self.wrapped.collective_rpc(method, args, timeout)
        except Exception:
            raise RuntimeError("a worker failed") from None


class NeverSleeps(Kept):
    def collective_rpc(self, method, args=(), timeout=None):
        if method in ("sleep", "wake_up"):
            return [None]
        return self.wrapped.collective_rpc(method, args, timeout)


class ClaimsTwo(Kept):
    max_concurrent_batches = 2


class ClaimsNone(Kept):
    max_concurrent_batches = 0


class LeaksThread(Kept):
    def start(self):
        leave_thread()
        return self.wrapped.start()


class LeaksProcess(Kept):
    """Leaves a process of another thread."""

    started = []

    def start(self):
        def run():
            self.started.append(subprocess.Popen(["sleep", "60"]))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return self.wrapped.start()


class LeaksFile(Kept):
    def start(self):
        self.descriptors = os.pipe()
        return self.wrapped.start()


class ClosesOnce(Kept):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True
        super().close()


class KeepsWorkers(Kept):
    def close(self):
        pass


class ReportsClose(Kept):
    def on_failure(self, callback):
        self.callback = callback

    def close(self):
        super().close()
        if hasattr(self, "callback"):
            self.callback(RuntimeError("lost"))


class Threaded(Sample, Executor, contract=1):
    """Correct: a thread per rank; `lose` stands for the loss of one."""

    def __init__(self, context):
        super().__init__(context)
        self.ranks = range(context.parallel.world_size)
        self.workers = {}
        self.threads = [ThreadPoolExecutor(1) for _ in self.ranks]
        self.waiting = []
        self.error = None

    @property
    def max_concurrent_batches(self):
        return min(self.context.parallel.pipeline, self.MAX_CONCURRENT_BATCHES)

    def start(self):
        results_of([self.submit(rank, self.open, rank) for rank in self.ranks])
        return self.collective_rpc("load_model")

    def open(self, rank):
        self.workers[rank] = open_worker(self.context.launch(rank))

    def initialize_cache(self, num_blocks):
        self.collective_rpc("initialize_cache", (num_blocks,))

    def execute_model(self, plan):
        return self.output(self.call("execute_model", plan))

    def sample_tokens(self, plan, bitmask=None):
        return self.output(self.call("sample_tokens", plan, bitmask))

    def output(self, futures):
        return first_error_or(futures, self.context.parallel.output_rank)

    def collective_rpc(self, method, args=(), timeout=None):
        futures = self.call(method, *args)
        try:
            return results_of(futures, timeout)
        except Exception as error:
            if are_out_of_step(method, futures):
                self.out_of_step(error)
            raise

    def out_of_step(self, error):
        self.abort(str(error))
        self.fail(error)

    def call(self, method, *args):
        if self.error is not None:
            raise self.error
        return [
            self.submit(rank, getattr(self.workers[rank], method), *args) for rank in self.ranks
        ]

    def submit(self, rank, function, *args):
        future = Future()
        self.waiting.append(future)

        def run():
            try:
                result = function(*args)
            except BaseException as error:
                end(future, error=error)
            else:
                end(future, result)

        self.threads[rank].submit(run)
        return future

    def on_failure(self, callback):
        self.callback = callback

    def lose(self, rank):
        self.fail(HardpointError(f"rank {rank} was lost"))

    def fail(self, error):
        self.error = error
        for future in self.waiting:
            end(future, error=self.error)
        if hasattr(self, "callback"):
            self.callback(self.error)

    def abort(self, reason):
        for worker in self.workers.values():
            worker.abort(reason)

    def close(self):
        self.abort("closed")
        for rank, worker in self.workers.items():
            self.threads[rank].submit(worker.close)
        for thread in self.threads:
            thread.shutdown()
        self.workers = {}


def end(future, result=None, error=None):
    """Set a future's result or error, unless it has one."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


class RefusesInRiddles(Threaded):
    def __init__(self, context):
        if context.parallel.pipeline > 1:
            raise ConfigError("this cannot be")
        super().__init__(context)


class RefusesAll(Threaded):
    def __init__(self, context):
        raise ConfigError("parallel: no size is right")


class OneInfo(Threaded):
    """Returns data of one worker only."""

    def start(self):
        return super().start()[:1]


class Backwards(Threaded):
    def start(self):
        return super().start()[::-1]


class LoadsOneByOne(Threaded):
    def start(self):
        results_of([self.submit(rank, self.open, rank) for rank in self.ranks])
        return [self.workers[rank].load_model() for rank in self.ranks]


class LoadsEarly(Threaded):
    """Loads the models when it is built."""

    def __init__(self, context):
        super().__init__(context)
        self.infos = super().start()

    def start(self):
        return self.infos


class WaitsForAll(Threaded):
    """Looks at the ranks one after the other, though one waits for another that has failed."""

    def collective_rpc(self, method, args=(), timeout=None):
        return [future.result(timeout) for future in self.call(method, *args)]


class FirstRankOnly(Threaded):
    """Uses the result of rank 0 for all ranks."""

    def output(self, futures):
        return futures[0]


class OutputRankOnly(Threaded):
    """Looks at nothing but the output rank."""

    def output(self, futures):
        return futures[self.context.parallel.output_rank]


class SkipsOthers(Threaded):
    """Lets the output rank alone sample."""

    def sample_tokens(self, plan, bitmask=None):
        rank = self.context.parallel.output_rank
        return self.submit(rank, self.workers[rank].sample_tokens, plan, bitmask)


class IgnoresTimeouts(Threaded):
    def collective_rpc(self, method, args=(), timeout=None):
        return super().collective_rpc(method, args)


class MixesUp(Threaded):
    """Gives a late result to the next call."""

    late = None

    def collective_rpc(self, method, args=(), timeout=None):
        late, self.late = self.late, None
        futures = self.call(method, *args)
        try:
            return results_of(late or futures, timeout)
        except TimeoutError:
            self.late = futures
            raise


class Silent(Threaded):
    def on_failure(self, callback):
        pass


class Repeats(Threaded):
    def lose(self, rank):
        super().lose(rank)
        self.callback(self.error)


class KeepsWaiting(Threaded):
    """Reports the loss of a worker, but not to calls that wait for it."""

    def lose(self, rank):
        self.waiting = []
        super().lose(rank)


class Vague(Threaded):
    """Does not report which rank was lost."""

    def lose(self, rank):
        self.fail(HardpointError("a worker was lost"))


class Forgets(Threaded):
    """Raises another error in calls after a loss."""

    def call(self, method, *args):
        if self.error is not None:
            raise HardpointError("there are no workers")
        return super().call(method, *args)


class GoesOn(Threaded):
    """Raises an error that one rank has raised in a joint call, and no more."""

    def out_of_step(self, error):
        pass


class LeavesWaiting(Threaded):
    """Reports ranks that are out of step, and lets them wait."""

    def out_of_step(self, error):
        self.fail(error)


class NeverAborts(Threaded):
    """Leaves workers that wait for others."""

    def close(self):
        for thread in self.threads:
            thread.shutdown(wait=False)
