"""Requests that last until something happens to them, with the plugin `slow`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hardpoint import LLM, SamplingParams
from support.waiting import PATIENCE_S, HeldSteps, wait_until

SLOW = {"plugins": {"enable": ["support.plugins.slow:Slow"]}}

UNFINISHED = SamplingParams(
    temperature=0.0, max_tokens=450, ignore_eos=True, plugin_args={"slow": {"seconds": 0.07}}
)
"""Parameters of a request of half a minute, because a busy machine may pause the program before it
aborts the request."""


def long() -> SamplingParams:
    """Parameters of a request that goes on, slowly enough to leave the processor to others."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=30_000,
        ignore_eos=True,
        plugin_args={"slow": {"seconds": 0.002}},
    )


def until_let_go(held: HeldSteps) -> SamplingParams:
    """Parameters of a request of 200 tokens, which take a minute, hardly any once let go."""
    args = held.slow(0.3)
    return SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, plugin_args=args)


def add(llm: LLM, count: int, params: SamplingParams) -> None:
    for index in range(count):
        llm.llm_engine.add_request(f"r{index}", [index + 1], params)


def begin(llm: LLM, count: int, params: SamplingParams) -> None:
    """Add requests and wait until each has tokens: a signal may overtake a new request."""
    add(llm, count, params)
    seen: set[str] = set()
    while len(seen) < count:
        seen.update(output.request_id for output in llm.llm_engine.step())


def finals(llm: LLM) -> list[str]:
    """Step to the end; return the finish reasons."""
    reasons = []
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            reasons += [each.finish_reason for each in output.outputs if output.finished]
    return reasons


def interrupted(
    run: Callable[..., Any], engine: Any, interrupt: Callable[[], object], folder: Path
) -> Any:
    """Run requests, interrupt them once an engine has given some tokens, and let them end.

    Args:
        run: runs them with the arguments `slow` of plugins, and returns the results.
        engine: the handle of the engine.
        folder: folder of the files of `HeldSteps`.
    """
    held = HeldSteps(folder)

    def has_tokens() -> bool:
        return sum(request.num_output_tokens for request in engine.live_requests()) > 10

    with ThreadPoolExecutor() as pool:
        results = pool.submit(run, slow=held.slow(0.2))
        try:
            wait_until(has_tokens, PATIENCE_S, "the requests")
            interrupt()
        finally:
            held.let_go()
        return results.result(2 * PATIENCE_S)
