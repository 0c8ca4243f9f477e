"""What a scheduler may do without: features that it can refuse, and how to find out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hardpoint.plugins import HardpointError, PauseState, RepetitionDetection, Scheduler
from hardpoint.plugins.requests import LoRARequest, MultiModalFeature
from hardpoint.testing.scheduling.fakes.connector import Compile, Transfer

from .simulator import SchedulerRig


@dataclass(frozen=True)
class Feature:
    """Something that a scheduler is asked for by its limits, its context or a request.

    Attributes:
        settings: fields of RigSettings that ask for it.
        request: fields of a request that ask for it.
        method: of Scheduler, which it has to override.
        call: what it must do without a NotImplementedError.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    method: str | None = None
    call: Callable[[Scheduler], object] | None = None


def _pause(scheduler: Scheduler) -> None:
    for state in PauseState:
        scheduler.set_pause(state)


FEATURES: dict[str, Feature] = {
    "asynchronous": Feature({"asynchronous": True}),
    "drafts": Feature({"num_draft_tokens": 2}, method="update_drafts"),
    "lookahead": Feature({"num_lookahead_tokens": 1}),
    "transfers": Feature({"connector": True}, {"transfer": Transfer(tokens=2)}),
    "grammars": Feature({"grammars": True}, {"compile": Compile()}),
    "encoder": Feature(
        {"encoder_cache_tokens": 6, "max_encoder_tokens": 6},
        {"features": [MultiModalFeature("cat", 0, 2)]},
    ),
    "loras": Feature({"max_loras": 1}, {"lora": LoRARequest("poet", 1)}),
    "windows": Feature({"windows": (None, 3), "blocks": 33}),
    "whole": Feature({"chunked_prefill": False, "max_num_batched_tokens": 256}),
    "threshold": Feature({"long_prefill_token_threshold": 2}),
    "uncached": Feature({"prefix_caching": False}),
    "watermark": Feature({"watermark": 0.2}),
    "timeouts": Feature(request={"timeout": 5.5}),
    "salts": Feature(request={"cache_salt": "s"}),
    "logprobs": Feature(request={"logprobs": 1}),
    "prompt_logprobs": Feature(request={"prompt_logprobs": 1}),
    "repetition": Feature(
        request={"repetition_detection": RepetitionDetection(max_pattern=2, min_count=2)}
    ),
    "stops": Feature(request={"stop_token_ids": [1, 2], "eos_token_ids": [3]}),
    "clients": Feature({"report_finished": True, "log_stats": True}, {"client_index": 1}),
    "faults": Feature(),
    "resets": Feature(method="reset_prefix_cache"),
    "swaps": Feature(method="set_policy"),
    "pauses": Feature(call=_pause),
}


@dataclass(frozen=True)
class Refusals:
    """What a scheduler says that it cannot do.

    Attributes:
        single: by feature, its words.
        pairs: features that it takes one by one and not together.
    """

    single: Mapping[str, str]
    pairs: frozenset[frozenset[str]]

    def of(self, wanted: set[str]) -> str | None:
        """Return its words if it refuses one of these."""
        return next((self.single[name] for name in sorted(wanted) if name in self.single), None)

    def without(self, wanted: list[str]) -> set[str]:
        """Return those of these features that it takes together, the first ones first."""
        kept: set[str] = set()
        for name in wanted:
            alone = name not in self.single
            if alone and not any(frozenset((name, other)) in self.pairs for other in kept):
                kept.add(name)
        return kept


def find_refusals(scheduler: type[Scheduler], options: Mapping[str, Any]) -> Refusals:
    """Ask a scheduler for every feature, alone and with each other one."""
    single = {
        name: words
        for name in FEATURES
        if (words := _refusal(scheduler, options, name)) is not None
    }
    rest = [name for name in FEATURES if name not in single]
    pairs = {
        frozenset((first, second))
        for place, first in enumerate(rest)
        for second in rest[place + 1 :]
        if _refusal(scheduler, options, first, second) is not None
    }
    return Refusals(single, frozenset(pairs))


def _refusal(scheduler: type[Scheduler], options: Mapping[str, Any], *names: str) -> str | None:
    """Return with which words it refuses these features; None if it takes them."""
    settings: dict[str, Any] = {"blocks": 32, "options": options}
    request: dict[str, Any] = {}
    for name in names:
        feature = FEATURES[name]
        settings |= feature.settings
        request |= feature.request
        if feature.method and getattr(scheduler, feature.method) is getattr(
            Scheduler, feature.method
        ):
            return f"it has no {feature.method}"
    try:
        rig = SchedulerRig(scheduler, **settings)
        rig.add("a", [1, 2, 3], **request)
        return _refused_call(rig.scheduler, names)
    except HardpointError as refusal:
        return str(refusal)


def _refused_call(scheduler: Scheduler, names: tuple[str, ...]) -> str | None:
    calls = [call for name in names if (call := FEATURES[name].call) is not None]
    try:
        for call in calls:
            call(scheduler)
    except NotImplementedError as refusal:
        return str(refusal)
    return None
