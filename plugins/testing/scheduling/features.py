"""Optional scheduler features, and which of them a scheduler rejects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hardpoint.plugins import HardpointError, PauseState, RepetitionDetection, Scheduler
from hardpoint.plugins.requests import LoRARequest, MultiModalFeature
from hardpoint.plugins.requests.resumed import ResumedOutputs
from hardpoint.testing.scheduling.fakes.connector import Compile, Transfer

from .simulator import SchedulerSimulator


@dataclass(frozen=True)
class Feature:
    """An optional feature, requested by limits, context, a request or a call.

    Attributes:
        settings: fields of SimulatorSettings that request it.
        request: fields of a request that request it.
        method: the method of Scheduler that has to be overridden.
        call: a call that must not raise NotImplementedError.
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
    "loras": Feature(request={"lora": LoRARequest("poet", 1)}),
    "windows": Feature({"windows": (None, 3), "blocks": 33}),
    "unchunked": Feature({"chunked_prefill": False, "max_num_batched_tokens": 256}),
    "threshold": Feature({"long_prefill_token_threshold": 2}),
    "step_time": Feature({"step_milliseconds": 20.0}),
    "no_prefix_cache": Feature({"prefix_caching": False}),
    "watermark": Feature({"watermark": 0.2}),
    "timeouts": Feature(request={"timeout": 5.5}),
    "salts": Feature(request={"cache_salt": "s"}),
    "logprobs": Feature(request={"logprobs": 1}),
    "prompt_logprobs": Feature(request={"prompt_logprobs": 1}),
    "repetition": Feature(
        request={"repetition_detection": RepetitionDetection(max_pattern=2, min_count=2)}
    ),
    "forks": Feature(request={"resumed": ResumedOutputs([1])}),
    "stops": Feature(request={"stop_token_ids": [1, 2], "eos_token_ids": [3]}),
    "clients": Feature({"report_finished": True, "log_stats": True}, {"client_index": 1}),
    "faults": Feature(),
    "resets": Feature(method="reset_prefix_cache"),
    "swaps": Feature(method="set_policy"),
    "pauses": Feature(call=_pause),
}


@dataclass(frozen=True)
class UnsupportedFeatures:
    """The features that a scheduler rejects.

    Attributes:
        single: by feature, the scheduler's message.
        pairs: features that it accepts alone, but not together.
    """

    single: Mapping[str, str]
    pairs: frozenset[frozenset[str]]

    def message(self, features: set[str]) -> str | None:
        """Return the scheduler's message on the first of `features` that it rejects."""
        return next((self.single[name] for name in sorted(features) if name in self.single), None)

    def supported_subset(self, features: list[str]) -> set[str]:
        """Return the features that it accepts together; earlier ones take precedence."""
        accepted: set[str] = set()
        for name in features:
            supported = name not in self.single
            if supported and not any(frozenset((name, other)) in self.pairs for other in accepted):
                accepted.add(name)
        return accepted


def find_unsupported(scheduler: type[Scheduler], options: Mapping[str, Any]) -> UnsupportedFeatures:
    """Request every feature of a scheduler, alone and with every other one."""
    single = {
        name: message
        for name in FEATURES
        if (message := _rejection_message(scheduler, options, name)) is not None
    }
    rest = [name for name in FEATURES if name not in single]
    pairs = {
        frozenset((first, second))
        for index, first in enumerate(rest)
        for second in rest[index + 1 :]
        if _rejection_message(scheduler, options, first, second) is not None
    }
    return UnsupportedFeatures(single, frozenset(pairs))


def _rejection_message(
    scheduler: type[Scheduler], options: Mapping[str, Any], *names: str
) -> str | None:
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
        simulator = SchedulerSimulator(scheduler, **settings)
        simulator.add("a", [1, 2, 3], **request)
        return _unimplemented_call(simulator.scheduler, names)
    except HardpointError as error:
        return str(error)


def _unimplemented_call(scheduler: Scheduler, names: tuple[str, ...]) -> str | None:
    calls = [call for name in names if (call := FEATURES[name].call) is not None]
    try:
        for call in calls:
            call(scheduler)
    except NotImplementedError as error:
        return str(error)
    return None
