"""Log lines of steps: a line per step where that is on, and a report of a failed step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from hardpoint.host.registry.blame import describe
from hardpoint.plugins import EngineConfig, SchedulerOutput, SchedulerStats

_log = logging.getLogger("hardpoint")


class StepLog:
    """Logs the requests and tokens of each step, and the time from its start to its results.

    A request that computes tokens of its prompt, or recomputes tokens after preemption, counts as
    context; a request that computes only its newest token counts as generation.
    """

    def __init__(self) -> None:
        self._known: dict[str, int] = {}  # number of tokens at admission, by request id

    def ends(self, plan: SchedulerOutput, seconds: float) -> None:
        """Log a step after its results were processed."""
        context = self._in_context(plan)
        num_tokens = plan.num_scheduled_tokens
        num_context_tokens = sum(num_tokens[name] for name in context)
        _log.info(
            "step %d: %d context requests with %d tokens, %d generation requests with %d tokens, "
            "%.2f ms",
            plan.step,
            len(context),
            num_context_tokens,
            len(num_tokens) - len(context),
            plan.total_num_scheduled_tokens - num_context_tokens,
            seconds * 1000,
        )

    def _in_context(self, plan: SchedulerOutput) -> set[str]:
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
    states: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Log a failed step with its plan, the configuration and statistics. Never raises.

    Prompts, outputs and options of plugins, which may be secrets, are left out.
    """
    with contextlib.suppress(Exception):
        _log.error(
            "step %s failed: %s\n  configuration: %s\n  plan: %s\n  statistics: %s\n  plugins: %s",
            getattr(plan, "step", "?"),
            describe(error),
            _describe(lambda: _settings(config)),
            _describe(lambda: _outline(plan)),
            _describe(stats),
            _describe(states),
        )


def _describe(value: Callable[[], Any]) -> str:
    try:
        return str(value())
    except Exception as cause:
        return f"cannot be shown ({describe(cause)})"


def _settings(config: EngineConfig | None) -> dict[str, Any]:
    settings: dict[str, Any] = msgspec.to_builtins(config) if config is not None else {}
    settings["plugin"] = sorted(settings.get("plugin", ()))
    return settings


def _outline(plan: SchedulerOutput) -> dict[str, Any]:
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
