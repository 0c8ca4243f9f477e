"""A line in the log for each step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hardpoint.plugins import EngineConfig, SchedulerOutput, SchedulerStats

_log = logging.getLogger("hardpoint")


class StepLog:
    """Says what each step computed, and how long it took from its start to its results.

    A request that has tokens of its prompt to compute, or computes anew what it lost, counts as
    context; one that only goes on counts as generation.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._known: dict[str, int] = {}  # tokens with which a request entered, by its id
        self._began: dict[int, float] = {}

    def begins(self, plan: SchedulerOutput) -> None:
        """Note that a step is given to the executor."""
        self._began[plan.step] = self._clock()

    def ends(self, plan: SchedulerOutput) -> None:
        """Log a step whose results were taken."""
        began = self._began[plan.step]
        # Results come in order, so nothing is heard any more of steps before this one.
        self._began = {step: start for step, start in self._began.items() if step > plan.step}
        context = self._in_context(plan)
        given = plan.num_scheduled_tokens
        num_context_tokens = sum(given[name] for name in context)
        _log.info(
            "step %d: %d context requests with %d tokens, %d generation requests with %d tokens, "
            "%.2f ms",
            plan.step,
            len(context),
            num_context_tokens,
            len(given) - len(context),
            plan.total_num_scheduled_tokens - num_context_tokens,
            (self._clock() - began) * 1000,
        )

    def _in_context(self, plan: SchedulerOutput) -> set[str]:
        """Return who computes what is known already."""
        for name in plan.finished_request_ids | plan.preempted_request_ids:
            self._known.pop(name, None)
        context = set()
        for new in plan.new_requests:
            name = new.source.request_id
            self._known[name] = len(new.source.prompt_token_ids) + len(new.output_token_ids)
            context.add(name)
        cached = plan.cached_requests
        for name, computed in zip(cached.request_ids, cached.num_computed_tokens, strict=True):
            if computed < self._known.get(name, 0):
                context.add(name)
        return context


def log_failure(
    error: BaseException,
    plan: SchedulerOutput,
    config: EngineConfig | None,
    stats: Callable[[], SchedulerStats],
) -> None:
    """Log what was going on when a step failed. Never raises.

    Prompts, outputs and options of plugins, which may be secrets, are not written.
    """
    with contextlib.suppress(Exception):
        _log.error(
            "step %s failed: %s: %s\n  configuration: %s\n  plan: %s\n  statistics: %s",
            getattr(plan, "step", "?"),
            type(error).__name__,
            error,
            _shown(lambda: _settings(config)),
            _shown(lambda: _outline(plan)),
            _shown(stats),
        )


def _shown(describe: Callable[[], Any]) -> str:
    try:
        return str(describe())
    except Exception as cause:
        return f"cannot be shown ({type(cause).__name__}: {cause})"


def _settings(config: EngineConfig | None) -> dict[str, Any]:
    settings: dict[str, Any] = msgspec.to_builtins(config) if config is not None else {}
    settings["plugin"] = sorted(settings.get("plugin", ()))
    return settings


def _outline(plan: SchedulerOutput) -> dict[str, Any]:
    """Return a plan with lengths in the place of contents."""
    return {
        "num_scheduled_tokens": plan.num_scheduled_tokens,
        "new": {
            new.source.request_id: {
                "prompt": len(new.source.prompt_token_ids),
                "outputs": len(new.output_token_ids),
                "computed": new.num_computed_tokens,
            }
            for new in plan.new_requests
        },
        "cached": dict(
            zip(
                plan.cached_requests.request_ids,
                plan.cached_requests.num_computed_tokens,
                strict=True,
            )
        ),
        "drafts": {name: len(drafts) for name, drafts in plan.draft_token_ids.items()},
        "finished": sorted(plan.finished_request_ids),
        "preempted": sorted(plan.preempted_request_ids),
    }
