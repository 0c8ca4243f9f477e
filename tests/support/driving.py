"""Helpers that drive an engine in tests."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint import RequestOutput, SamplingParams
from hardpoint.core.frontend.llm_engine import LLMEngine

Job = tuple[str, list[int] | str, SamplingParams]


def run(engine: LLMEngine, jobs: Sequence[Job], per_step: int | None = None) -> dict[str, list]:
    """Run jobs and return what each completion came to.

    With `per_step`, so many join before each step, so that requests join and leave a running
    batch; else all join at once.
    """
    waiting = list(jobs)
    results: dict[str, list] = {}
    while waiting or engine.has_unfinished_requests():
        joining = len(waiting) if per_step is None else per_step
        for request_id, prompt, params in waiting[:joining]:
            engine.add_request(request_id, prompt, params)
        waiting = waiting[joining:]
        for output in engine.step():
            if output.finished:
                results[output.request_id] = [summary(output)]
    return results


def alone(engine: LLMEngine, jobs: Sequence[Job]) -> dict[str, list]:
    """Run jobs one after another."""
    results: dict[str, list] = {}
    for job in jobs:
        results.update(run(engine, [job]))
    return results


def summary(output: RequestOutput) -> list[tuple]:
    """What must be equal between two runs of a request."""
    return [
        (c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason, _logprobs(c))
        for c in output.outputs
    ]


def _logprobs(completion) -> list | None:
    if completion.logprobs is None:
        return None
    return [{t: (v.logprob, v.rank) for t, v in entry.items()} for entry in completion.logprobs]
