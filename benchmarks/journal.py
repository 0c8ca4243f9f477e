"""Cost of a journal: processor time and bytes per step.

    python benchmarks/journal.py --model smollm2 --requests 16 --tokens 128 --rounds 5

The program prints the processor time of a step without the journal, the time that the engine's
thread takes for the journal in a step, their ratio, and the size of the file.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from options import options_of, save

import hardpoint.journal.recording as recording
from hardpoint import LLM, SamplingParams


class Stopwatch:
    """Adds up the processor time of calls."""

    seconds = 0.0

    def watch(self, owner: Any, name: str) -> None:
        """Time a function or method."""
        setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def main() -> None:
    """Measure, and print the figures."""
    options = options_of(__doc__, model="smollm2", requests=16, tokens=128, rounds=5)
    watch = Stopwatch()
    # The work of the journal in the engine's thread, except the readings of clocks.
    for name in ("plan_record", "result_record"):
        watch.watch(recording, name)
    for name in ("_write", "_ended"):
        watch.watch(recording.RecordedCore, name)
    params = SamplingParams(temperature=1.0, max_tokens=options.tokens, ignore_eos=True, seed=1)
    prompts = [[7 + index] * 32 for index in range(options.requests)]
    steps = options.rounds * options.tokens
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        config = {"engine": {"journal": str(path), "in_process": True}}
        with LLM(options.model, config=config) as llm:
            llm.generate(prompts, params)  # warm up
            watch.seconds, began = 0.0, time.process_time()
            for _ in range(options.rounds):
                llm.generate(prompts, params)
            journal = watch.seconds / steps
            step = (time.process_time() - began) / steps - journal
        size = path.stat().st_size / (steps + options.tokens)
    print(f"{options.model}, {options.requests} requests of {options.tokens} tokens, per step:")
    print(f"  without the journal  {step * 1e6:9.1f} us")
    print(f"  journal              {journal * 1e6:9.1f} us  ({journal / step:.2%})")
    print(f"  file                 {size:9.0f} bytes")
    save(options.json, {"step": step, "journal": journal, "bytes": size})


if __name__ == "__main__":
    main()
