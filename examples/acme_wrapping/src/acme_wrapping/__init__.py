"""An executor for Hardpoint that runs another one and logs its steps."""

import time
from concurrent.futures import Future
from pathlib import Path

from hardpoint.plugins import Executor, ModelRunnerOutput, SchedulerOutput, Wrapper


class TimedExecutor(Wrapper[Executor], Executor):
    """Delegates to another executor, and logs the tokens and seconds of each step's model."""

    contract = 2

    class Options(Wrapper.Options):
        """Options: `wraps`, the executor that does the work, and `log`, the file."""

        wraps: str = "uniproc"
        log: str

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        """Start a step; its line is written when it is done."""
        began = time.perf_counter()
        future = self.wrapped.execute_model(plan)
        future.add_done_callback(lambda _: self._log(plan, time.perf_counter() - began))
        return future

    def _log(self, plan: SchedulerOutput, seconds: float) -> None:
        line = f"step {plan.step}: {plan.total_num_scheduled_tokens} tokens, {seconds:.6f} s\n"
        with Path(self.options.log).open("a") as log:
            log.write(line)
