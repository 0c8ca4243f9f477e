"""Helpers that drive an engine in tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hardpoint import RequestOutput, RequestOutputKind, SamplingParams
from hardpoint.core.frontend.llm_engine import LLMEngine

Job = tuple[str, list[int] | str, SamplingParams]
FINAL = {"output_kind": RequestOutputKind.FINAL_ONLY}


def varied_jobs(count: int = 40) -> list[Job]:
    """Requests of many lengths that use every feature of SamplingParams in some mixture.

    Every third prompt begins like the others of its kind.
    """
    rng = random.Random(7)
    shared = [rng.randrange(256) for _ in range(24)]
    features = [
        {"temperature": 0.0},
        {"temperature": 0.0, "min_tokens": 8, "repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 5, "logprob_token_ids": [200, 3, 65]},
        {"temperature": 0.7, "seed": 6, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.3, "seed": 7, "min_p": 0.05, "n": 3},
        {"temperature": 0.0, "logit_bias": {65: 3.0, 66: -2.0}, "logprobs": 2},
        {"temperature": 1.0, "seed": 8, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 0.0, "allowed_token_ids": [70, 71, 72, 256], "min_tokens": 3},
        {
            **{"temperature": 1.0, "seed": -9, "bad_words": ["a", "bc"]},
            **{"logprobs": 1, "logprob_token_ids": [66, 97]},
        },
        {"temperature": 0.0, "stop_token_ids": list(range(0, 256, 9))},
    ]
    jobs: list[Job] = []
    for index in range(count):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        if index % 3 == 0:
            prompt = shared + prompt[:30]
        params = SamplingParams(
            max_tokens=rng.randint(8, 40), **features[index % len(features)], **FINAL
        )
        jobs.append((f"r{index}", prompt, params))
    return jobs


def drafting(
    jobs: Sequence[Job], expected: dict[str, list], enable: Sequence[str] = (), **options: object
) -> dict[str, dict]:
    """Settings with a step part that drafts the expected tokens of each job with some errors."""
    replies = [
        [prompt, tokens]
        for request_id, prompt, _ in jobs
        for _, tokens, *_ in expected[request_id][0]
    ]
    return {
        "plugins": {"enable": [*enable, "hardpoint.testing:ScriptedDrafts"]},
        "plugin": {"scripted_drafts": {"right": 0.8, "count": 4, "replies": replies} | options},
    }


def run(engine: LLMEngine, jobs: Sequence[Job], per_step: int | None = None) -> dict[str, list]:
    """Run jobs and return the result of each completion.

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
    """The results that must be equal between two runs of a request."""
    return [
        (c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason, _logprobs(c))
        for c in output.outputs
    ]


def _logprobs(completion) -> list | None:
    if completion.logprobs is None:
        return None
    return [{t: (v.logprob, v.rank) for t, v in entry.items()} for entry in completion.logprobs]
