"""What is written to the log when a step fails: configuration, plan and statistics."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from hardpoint.plugins import EngineConfig, SchedulerOutput, SchedulerStats

__all__ = ["log_failure"]

_log = logging.getLogger("hardpoint")


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
