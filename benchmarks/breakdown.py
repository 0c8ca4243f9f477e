"""Where a step goes: milliseconds of scheduler, products, attention and others.

    python benchmarks/breakdown.py [--running 1 32 256] [--prompt 128] [--steps 16] [--json FILE]

The engine runs in this process. Its methods are timed from outside: each is replaced, in its class,
by one that takes the time, less that of the timed methods which it calls. So the parts add up to
the step. Printed are means over steps in which each request gets one token. The parts are those of
an engine that runs the model's Python in every step; what a step takes without the timers is given
for that engine, and for one that repeats recorded steps.
"""

from __future__ import annotations

import functools
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from loads import VALID, random_ids
from options import options_of, save, show_table

from hardpoint import LLM, SamplingParams
from hardpoint.core.engine.core import EngineCore
from hardpoint.core.frontend.frontend import Frontend
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.worker.model_runner import ModelRunner
from hardpoint.core.worker.sampling.sampling_stage import SamplingStage
from hardpoint.host.boundary.checked_attention import CheckedAttention
from hardpoint.host.boundary.checked_model import CheckedModel
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineConfig
from hardpoint.toolkit.layers import Linear

_FIRST = 40  # steps until those of a size are recorded and checked

PARTS = {
    "scheduler": "schedule and update",
    "prepare": "rows, token ids, block tables, the attention's plan",
    "gemm": "matrix products, the head's among them",
    "attention": "KV write and attention",
    "small ops": "the rest of the model: embedding, norms, rotation, gates, residuals",
    "sampling": "float32 logits, logits processors, sampler",
    "output": "requests' outputs for the caller",
    "rest": "the engine between these parts",
}


class Timers:
    """Times methods while it is active, each without its calls of the other methods."""

    def __init__(self) -> None:
        """Start without methods, inactive."""
        self.seconds: dict[str, float] = defaultdict(float)  # by part
        self.active = False
        self._inner = 0.0  # seconds of the timed methods that the running one has called

    def watch(self, owner: type, method: str, part: str) -> None:
        """Time a method of a class."""
        setattr(owner, method, self._timed(getattr(owner, method), part))

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return call(*args, **kwargs)
            outer, self._inner = self._inner, 0.0
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                taken = time.perf_counter() - start
                self.seconds[part] += taken - self._inner
                self._inner = outer + taken

        return timed


def watch_engine(timers: Timers) -> None:
    """Time the methods of an engine that is made afterwards."""
    plugins = resolve_plugins(EngineConfig())
    scheduler = plugins.target(plugins.one("schedulers"))
    for owner, method, part in (
        (scheduler, "schedule", "scheduler"),
        (scheduler, "update", "scheduler"),
        (ModelRunner, "execute", "prepare"),
        (Linear, "__call__", "gemm"),
        (CheckedAttention, "attend", "attention"),
        (CheckedModel, "forward", "small ops"),
        (CheckedModel, "compute_logits", "small ops"),
        (ModelRunner, "sample", "sampling"),
        (SamplingStage, "run", "sampling"),
        (Frontend, "process_outputs", "output"),
        (EngineCore, "abort_requests", "rest"),
        (LLMEngine, "step", "rest"),
    ):
        timers.watch(owner, method, part)


def measure(llm: LLM, timers: Timers, running: int, prompt: int, steps: int) -> dict[str, float]:
    """Return the mean milliseconds of a step by part, and "untimed" of steps without timers."""
    engine = llm.llm_engine
    rng = random.Random(running)
    params = SamplingParams(
        temperature=0.0, max_tokens=2 * steps + _FIRST + 26, ignore_eos=True, detokenize=False
    )
    for index in range(running):
        engine.add_request(f"{running}, {index}", random_ids(rng, prompt, VALID), params)
    while len(engine.step()) < running:  # until all prompts are computed
        pass
    for _ in range(_FIRST):
        engine.step()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    untimed = time.perf_counter() - start
    timers.seconds.clear()
    timers.active = True
    for _ in range(steps):
        assert len(engine.step()) == running
    timers.active = False
    while engine.has_unfinished_requests():
        engine.step()
    milliseconds = {part: timers.seconds[part] / steps * 1e3 for part in PARTS}
    return {**milliseconds, "step": sum(milliseconds.values()), "untimed": untimed / steps * 1e3}


def main() -> None:
    """Measure, and print the table."""
    options = options_of(
        __doc__,
        model="smollm2",
        dtype="bfloat16",
        running=[1, 32, 256],
        prompt=(128, "tokens of each prompt"),
        steps=(16, "steps that are timed"),
    )
    timers = Timers()
    watch_engine(timers)
    length = options.prompt + 2 * options.steps + _FIRST + 26
    result: dict[str, dict[str, float]] = {}
    for eager in (True, False):
        config = {
            "scheduler": {"max_num_seqs": max(options.running)},
            "executor": {"enforce_eager": eager},
        }
        with LLM(options.model, config=config, dtype=options.dtype, max_model_len=length) as llm:
            for running in options.running:
                milliseconds = measure(llm, timers, running, options.prompt, options.steps)
                if eager:
                    result[str(running)] = milliseconds
                else:
                    result[str(running)]["repeated"] = milliseconds["untimed"]
    columns = list(result.values())
    rows = [
        [part, *(f"{f[part]:.2f} ({f[part] / f['step']:.0%})" for f in columns), meaning]
        for part, meaning in PARTS.items()
    ]
    sums = {"step": "their sum", "untimed": "steps without timers", "repeated": "repeated steps"}
    rows += [[key, *(f"{f[key]:.2f}" for f in columns), meaning] for key, meaning in sums.items()]
    title = "milliseconds of a step (share), by number of running requests"
    show_table(title, ("part", *result, "meaning"), rows)
    save(options.json, result)


if __name__ == "__main__":
    main()
