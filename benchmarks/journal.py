"""Cost of a journal: the same requests with and without one, turn about, in one run.

python benchmarks/journal.py --model smollm2 --requests 16 --tokens 128 --rounds 5

It prints the median processor time of a step without a journal, that of the engine's thread for
the journal in a step, measured around its work, the ratio of both, and the ratio of the processor
times of whole runs, which is as uncertain as their spread.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from options import options_of, save

import hardpoint.journal.recording as recording
from hardpoint import LLM, SamplingParams
from hardpoint.testing import scripted_config, write_scripted_model


class Stopwatch:
    """Adds up the processor time of calls."""

    seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time added up."""

        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def main() -> None:
    """Run in turns, print the table."""
    model = "smollm2", "'scripted' is a model without weights"
    options = options_of(__doc__, model=model, requests=16, tokens=128, rounds=5)
    folder = Path(tempfile.mkdtemp(prefix="hardpoint-journal-"))
    path, watch = folder / "journal", Stopwatch()
    # What the journal adds to a step in the engine's thread, but for the readings of clocks.
    for name in ("plan_record", "result_record"):
        setattr(recording, name, watch.around(getattr(recording, name)))
    recording.RecordedCore._write = watch.around(recording.RecordedCore._write)  # type: ignore[method-assign]
    recording.RecordedCore._ended = watch.around(recording.RecordedCore._ended)  # type: ignore[method-assign]

    def opened(journal: str | None) -> LLM:
        settings = {"engine": {"journal": journal, "in_process": True}}
        if options.model == "scripted":
            model = write_scripted_model(folder / "scripted")
            return LLM(config=scripted_config(model, settings))
        return LLM(options.model, config=settings)

    params = SamplingParams(temperature=1.0, max_tokens=options.tokens, ignore_eos=True, seed=1)
    prompts = [[7 + index] * 32 for index in range(options.requests)]
    times: dict[bool, list[float]] = {False: [], True: []}
    with opened(None) as plain, opened(str(path)) as recorded:
        for _ in range(options.rounds + 1):
            for llm, has_journal in ((plain, False), (recorded, True)):
                began = time.process_time()
                llm.generate(prompts, params)
                times[has_journal].append(time.process_time() - began)
                if len(times[True]) == 1:
                    watch.seconds = 0.0  # the first round warms up
    journal_s = watch.seconds / options.rounds / options.tokens
    step = statistics.median(times[False][1:]) / options.tokens
    ratios = [b / a for a, b in zip(times[False][1:], times[True][1:], strict=True)]
    size = path.stat().st_size / (options.rounds + 1) / options.tokens
    print(f"{options.model}, {options.requests} requests of {options.tokens} tokens")
    print(f"  step without a journal    {step * 1e6:9.1f} us")
    print(f"  journal in that thread    {journal_s * 1e6:9.1f} us  ({journal_s / step:.2%})")
    print(f"  run with / without        {statistics.median(ratios):9.3f}")
    print(f"  spread of these ratios    {min(ratios):9.3f} to {max(ratios):.3f}")
    print(f"  file                      {size:9.0f} bytes per step")
    save(options.json, {"step": step, "journal": journal_s, "ratios": ratios, "bytes": size})


if __name__ == "__main__":
    main()
