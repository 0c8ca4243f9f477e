"""Components of third parties: each delegates to another of its kind, and logs it."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import torch

from hardpoint.plugins import (
    Executor,
    ModelRunnerOutput,
    Sampler,
    SamplingRows,
    Scheduler,
    SchedulerOutput,
    SchedulingPolicy,
    Tokenizer,
    Wrapper,
)
from support.samples import Sample


def write(path: str, line: str) -> None:
    with Path(path).open("a", encoding="utf-8") as log:
        log.write(f"{line}\n")


class LoggedScheduler(Sample, Wrapper[Scheduler], Scheduler, contract=1):
    """Delegates to another scheduler, and logs each plan."""

    class Options(Wrapper.Options):
        wraps: str = "default"
        log: str

    def schedule(self) -> SchedulerOutput:
        plan = self.wrapped.schedule()
        write(self.options.log, f"schedule {plan.total_num_scheduled_tokens}")
        return plan

    def close(self) -> None:
        super().close()
        write(self.options.log, "close scheduler")


class LoggedExecutor(Sample, Wrapper[Executor], Executor, contract=1):
    """Delegates to another executor, and logs each step."""

    class Options(Wrapper.Options):
        wraps: str = "uniproc"
        log: str

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        write(self.options.log, f"execute {plan.step}")
        return self.wrapped.execute_model(plan)


class LoggedTokenizer(Sample, Wrapper[Tokenizer], Tokenizer, contract=1):
    """Delegates to another tokenizer, and logs the encoded texts."""

    class Options(Wrapper.Options):
        wraps: str = "transformers"
        log: str

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        write(self.options.log, f"encode {text}")
        return self.wrapped.encode(text, add_special_tokens=add_special_tokens)


class LoggedSampler(Sample, Wrapper[Sampler], Sampler, contract=1):
    """Delegates to another sampler, and logs the tokens."""

    class Options(Wrapper.Options):
        wraps: str = "default"
        log: str

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        chosen = self.wrapped.sample(logits, rows)
        write(self.options.log, f"sample {chosen.tolist()}")
        return chosen


class Chained(Sample, Wrapper[Executor], Executor, contract=1):
    """Wraps a third-party wrapper by its FQCN."""

    class Options(Wrapper.Options):
        wraps: str = f"{__name__}:LoggedExecutor"


class ByHand(Sample, Sampler, contract=1):
    """Wraps two others without the mixin: greedy rows go to one, the rest to the other."""

    @classmethod
    def wraps(cls, options: object) -> tuple[str, ...]:
        return ("default", f"{__name__}:LoggedSampler")

    def __init__(self, context):
        super().__init__(context)
        self.greedy, self.random = map(context.create, self.wraps(self.options))

    def sample(self, logits, rows):
        return (self.greedy if rows.all_greedy else self.random).sample(logits, rows)

    def close(self):
        self.greedy.close()
        self.random.close()


class FailingSampler(Sample, Sampler, contract=1):
    """Fails in a method that `sample` calls."""

    def sample(self, logits, rows):
        return self.draw()

    def draw(self):
        raise KeyError("no race")


class FailingTokenizer(Sample, Wrapper[Tokenizer], Tokenizer, contract=1):
    class Options(Wrapper.Options):
        wraps: str = "transformers"

    def encode(self, text, *, add_special_tokens=True):
        if text == "fail":
            raise KeyError("no such text")
        return self.wrapped.encode(text, add_special_tokens=add_special_tokens)


class FailingPolicy(Sample, SchedulingPolicy, contract=1):
    def key(self, request):
        return request.arrival_time

    def scheduled(self, request, tokens):
        raise KeyError("no books")


class WrappedPolicy(Sample, Wrapper[SchedulingPolicy], SchedulingPolicy, contract=1):
    class Options(Wrapper.Options):
        wraps: str = f"{__name__}:FailingPolicy"


class Undeclared(ByHand):
    """Builds a component that its `wraps` does not return."""

    @classmethod
    def wraps(cls, options):
        return ("default",)

    def __init__(self, context):
        Sampler.__init__(self, context)
        self.greedy = context.create("default")
        self.random = context.create("other")


class Unbuilt(Sample, Wrapper[Executor], Executor, contract=1):
    """Fails after it has built its wrapped component."""

    class Options(Wrapper.Options):
        wraps: str = f"{__name__}:ClosedExecutor"

    def __init__(self, context):
        super().__init__(context)
        raise KeyError("no room")


class ClosedExecutor(Wrapper[Executor], Executor):
    contract = 1
    closed = 0

    class Options(Wrapper.Options):
        wraps: str = "uniproc"

    def close(self):
        super().close()
        ClosedExecutor.closed += 1


class KeptPolicy(Sample, Wrapper[SchedulingPolicy], SchedulingPolicy, contract=1):
    """Keeps all of another policy."""

    class Options(Wrapper.Options):
        wraps: str = "priority"
