"""Scenarios of a scheduler: drawn by hypothesis, played on the simulator, printed as code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from hardpoint.plugins import PauseState, RepetitionDetection, RequestError, Scheduler, StepCost
from hardpoint.plugins.requests import LoRARequest, MultiModalFeature
from hardpoint.plugins.requests.resumed import ResumedOutputs
from hardpoint.testing.scheduling.fakes.connector import Compile, Transfer
from hardpoint.testing.suite import ReplayableCase, exceptions_as_violations

from .features import FEATURES, UnsupportedFeatures
from .rules import REJECTION
from .simulator import SchedulerSimulator

EVENTS = (
    "abort",
    "abort_between",
    "advance",
    "lose",
    "lose_unexecuted",
    "reset",
    "reset_all",
    "swap",
    "pause_new",
    "pause_all",
    "resume",
)
"""Events other than arrivals and steps."""

_IDS = "abcdefgh"
_MAX_REQUESTS = 5
_POLICIES = ("fcfs", "priority")

Event = tuple[str, Any]


@dataclass(frozen=True)
class Scenario(ReplayableCase):
    """The settings, requests and events of a simulation.

    Attributes:
        settings: fields of SimulatorSettings.
        requests: arguments of `SchedulerSimulator.add`, without the id.
        events: (name, argument) pairs; the names are "add", "step" and the names in EVENTS.
        lines: the played calls, as Python.
    """

    settings: Mapping[str, Any]
    requests: tuple[Mapping[str, Any], ...]
    events: tuple[Event, ...]
    lines: list[str] = field(default_factory=list, compare=False)

    def code(self) -> str:
        """Return Python code that plays the scenario again."""
        return "\n".join(self.lines)

    def __repr__(self) -> str:
        return self.code() or f"<{len(self.requests)} requests, {len(self.events)} events>"


def play(scheduler: type[Scheduler], scenario: Scenario, **settings: Any) -> SchedulerSimulator:
    """Play a scenario, then run until every request has finished; return the simulator.

    A pause that lasts to the end of the events is resumed once the scheduler is idle.

    Args:
        scheduler: the class under test.
        scenario: the scenario.
        **settings: further fields of SimulatorSettings.

    Raises:
        Violation: a rule was broken.
    """
    values = {**scenario.settings, **settings}
    lines = scenario.lines
    lines[:] = [f"simulator = SchedulerSimulator(scheduler, {_arguments(values)})"]
    arrivals = list(scenario.requests)
    with exceptions_as_violations():
        simulator = SchedulerSimulator(scheduler, **values)
        for name, argument in (*scenario.events, *[("add", None)] * len(arrivals)):
            if name == "add" and arrivals:
                _add(simulator, arrivals.pop(0), lines)
            elif name in ("abort", "abort_between") and simulator.unfinished:
                names = sorted(simulator.unfinished)
                _act(simulator, name, names[argument % len(names)], lines)
            elif name == "resume":
                _resume(simulator, lines, complete=argument)
            elif name not in ("add", "abort", "abort_between"):
                _act(simulator, name, argument, lines)
        _resume(simulator, lines, complete=True)
        lines.append("simulator.run()")
        simulator.run()
    return simulator


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _add(simulator: SchedulerSimulator, fields: Mapping[str, Any], lines: list[str]) -> None:
    ident = _IDS[len(simulator.requests)]
    if fields.get("reuse_id"):
        ident = next((name for name in simulator.requests if simulator.can_reuse_id(name)), ident)
    values = {key: value for key, value in fields.items() if key != "reuse_id"}
    lines.append(f"simulator.add({ident!r}, {_arguments(values)})")
    try:
        simulator.add(ident, **values)
    except RequestError as error:
        if values.get("features") and not simulator.limits.chunked_prefill:
            lines.pop()  # a step may have to encode all features, beyond the encoder budget
            return
        raise REJECTION.violation(f"a request that can run is rejected: {error}") from error


def _act(simulator: SchedulerSimulator, name: str, argument: Any, lines: list[str]) -> None:
    lines.append(_LINES[name].format(argument))
    _ACTIONS[name](simulator, argument)


def _resume(simulator: SchedulerSimulator, lines: list[str], *, complete: bool) -> None:
    """Resume a paused scheduler; if `complete`, once it is idle."""
    if simulator.paused is PauseState.UNPAUSED:
        return
    if complete:
        _act(simulator, "run_until_idle", None, lines)
    _act(simulator, "resume", None, lines)


def _abort_between(simulator: SchedulerSimulator, argument: Any) -> None:
    simulator.start()
    simulator.abort(argument)
    while len(simulator.in_flight) > simulator.settings.asynchronous:
        simulator.deliver()


_ACTIONS: dict[str, Callable[[SchedulerSimulator, Any], Any]] = {
    "step": lambda simulator, _: simulator.step(),
    "abort": lambda simulator, name: simulator.abort(name),
    "abort_between": _abort_between,
    "advance": lambda simulator, seconds: simulator.clock.advance(seconds),
    "lose": lambda simulator, _: simulator.lose(),
    "lose_unexecuted": lambda simulator, _: simulator.lose(executed=False),
    "reset": lambda simulator, _: simulator.reset(),
    "reset_all": lambda simulator, _: simulator.reset(recompute_running=True),
    "swap": lambda simulator, name: simulator.swap(name),
    "pause_new": lambda simulator, _: simulator.pause(PauseState.PAUSED_NEW),
    "pause_all": lambda simulator, _: simulator.pause(PauseState.PAUSED_ALL),
    "run_until_idle": lambda simulator, _: simulator.run_until_idle(),
    "resume": lambda simulator, _: simulator.pause(PauseState.UNPAUSED),
}
_LINES = {
    "step": "simulator.step()",
    "abort": "simulator.abort({!r})",
    "abort_between": "simulator.start(); simulator.abort({!r}); simulator.deliver()",
    "advance": "simulator.clock.advance({!r})",
    "lose": "simulator.lose()",
    "lose_unexecuted": "simulator.lose(executed=False)",
    "reset": "simulator.reset()",
    "reset_all": "simulator.reset(recompute_running=True)",
    "swap": "simulator.swap({!r})",
    "pause_new": "simulator.pause(PauseState.PAUSED_NEW)",
    "pause_all": "simulator.pause(PauseState.PAUSED_ALL)",
    "run_until_idle": "simulator.run_until_idle()",
    "resume": "simulator.pause(PauseState.UNPAUSED)",
}


@st.composite
def scenarios(
    draw: st.DrawFn,
    unsupported: UnsupportedFeatures,
    always: tuple[str, ...] = (),
    sometimes: tuple[str, ...] = (),
    events: tuple[str, ...] = (),
    policies: tuple[Any, ...] = _POLICIES,
    ample_cache: bool = False,
    plugin_args: st.SearchStrategy[dict[str, Any]] | None = None,
) -> Scenario:
    """Draw a scenario.

    Args:
        draw: hypothesis' draw function.
        unsupported: features that the scheduler rejects, which are left out.
        always, sometimes: names of features.
        events: names of EVENTS that may occur.
        policies: the policies to draw from.
        ample_cache: whether the cache has room for all requests at once.
        plugin_args: plugin arguments of requests; None leaves them out.
    """
    drawn = [name for name in sometimes if draw(st.integers(0, 2)) == 0]
    features = unsupported.supported_subset([*always, *drawn])
    settings = draw(_settings(features, ample_cache))
    settings["policy"] = draw(st.sampled_from(policies))
    request = _requests(features, settings["max_model_len"])
    if plugin_args is not None:
        request = st.builds(
            lambda drawn, arguments: drawn | {"plugin_args": arguments}, request, plugin_args
        )
    requests = draw(st.lists(request, min_size=1, max_size=_MAX_REQUESTS))
    possible = [event for event in events if not _needs(event) & set(unsupported.single)]
    if "transfers" in features:  # the contract does not define loads of lost plans
        possible = [event for event in possible if not event.startswith("lose")]
    names = ["step"] * max(2, len(possible)) + ["add", *possible]  # one_of would drop the repeats
    event = st.sampled_from(names).flatmap(lambda name: _event(name, policies))
    drawn_events = draw(st.lists(event, max_size=14 if possible else 5))
    return Scenario(
        settings, tuple(requests), (*[("add", None)] * draw(_NUM_INITIAL), *drawn_events)
    )


@st.composite
def preemption_scenarios(draw: st.DrawFn) -> Scenario:
    """Draw long prompts in small chunks, each preempted by requests of higher priority.

    Blocks run out when a victim has tokens of the same step already, which must be withdrawn.
    """
    size, max_len = draw(st.sampled_from([2, 4])), draw(st.integers(8, 20))
    settings = {
        "block_size": size,
        "blocks": -(-max_len // size) + draw(st.integers(0, 2)),
        "max_model_len": max_len,
        "long_prefill_token_threshold": draw(st.integers(2, 5)),
        "policy": "priority",
    }
    long = st.integers(max_len // 2, max_len - 2)
    requests = [
        {"prompt": [place] * draw(long), "max_tokens": 2, "priority": -place}
        for place in range(draw(st.integers(2, 3)))
    ]
    events: list[Event] = []
    for _ in requests:
        events += [("add", None), *[("step", None)] * draw(st.integers(1, 4))]
    return Scenario(settings, tuple(requests), tuple(events))


@st.composite
def pause_scenarios(draw: st.DrawFn, unsupported: UnsupportedFeatures) -> Scenario:
    """Draw a pause that begins while requests load, and during which time passes."""
    features = unsupported.supported_subset(["pauses", "transfers", "timeouts"])
    settings = draw(_settings(features, ample_cache=False))
    settings["policy"] = draw(st.sampled_from(_POLICIES))
    request = _requests(features, settings["max_model_len"])
    requests = draw(st.lists(request, min_size=1, max_size=4))
    before = [("add", None), *[("step", None)] * draw(st.integers(0, 3))]
    during = st.sampled_from(["step", "add", "advance", "abort"])
    events = (
        *before * draw(st.integers(1, 2)),
        draw(st.sampled_from([("pause_all", None), ("pause_new", None)])),
        *draw(st.lists(during.flatmap(lambda name: _event(name, _POLICIES)), max_size=4)),
        ("resume", draw(st.booleans())),
    )
    return Scenario(settings, tuple(requests), events)


def _needs(event: str) -> set[str]:
    kinds = {"reset": "resets", "swap": "swaps", "pause": "pauses", "resume": "pauses"}
    kind = kinds.get(event.partition("_")[0])
    return {kind} if kind else set()


def _event(name: str, policies: tuple[Any, ...]) -> st.SearchStrategy[Event]:
    if name in ("abort", "abort_between"):
        return st.tuples(st.just(name), st.integers(0, 3))
    if name == "advance":
        return st.tuples(st.just(name), st.sampled_from([1.0, 4.0]))
    if name == "resume":
        return st.tuples(st.just(name), st.booleans())
    if name == "swap":
        return st.tuples(st.just(name), st.sampled_from(policies))
    return st.just((name, None))


@st.composite
def _settings(draw: st.DrawFn, features: set[str], ample_cache: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in sorted(features):
        settings |= FEATURES[name].settings
    size = draw(st.sampled_from([1, 2, 4]))
    max_len = draw(st.integers(5, 20))
    if "windows" in features:
        settings["windows"] = draw(st.sampled_from([(None, 3), (5,), (2, None)]))
    if "drafts" in features:
        settings["num_draft_tokens"] = draw(st.integers(1, 3))
    if "lookahead" in features:
        settings["num_lookahead_tokens"] = draw(st.integers(1, 3))
    ahead = settings.get("num_lookahead_tokens", 0) + settings.get("num_draft_tokens", 0)
    windows = settings.get("windows", (None,))
    fits = -(-(max_len + ahead) // size) * len(windows)
    spare = draw(st.sampled_from([0, 0, 1, fits // 2, fits, 2 * fits]))
    spare = fits * _MAX_REQUESTS if ample_cache else spare
    settings |= {
        "block_size": size,
        "blocks": fits + spare + (windows != (None,)),
        "max_model_len": max_len,
        "max_num_seqs": draw(st.sampled_from([1, 2, 3, 4])),
        "max_num_batched_tokens": draw(st.sampled_from([1, 2, 3, 5, 8, 12, 16])),
    }
    if "unchunked" in features:
        settings["max_num_batched_tokens"] = max_len + draw(st.integers(0, 6))
    if "threshold" in features:
        settings["long_prefill_token_threshold"] = draw(st.integers(1, 5))
    if "step_time" in features:
        settings["step_milliseconds"] = draw(st.sampled_from([0.001, 20.0, 1000.0]))
        settings["step_cost"] = draw(_STEP_COST)
    if "encoder" in features:
        settings["max_encoder_tokens"] = draw(st.integers(3, 5))
        spare = draw(st.sampled_from([0, 2, 4]))
        settings["encoder_cache_tokens"] = settings["max_encoder_tokens"] + spare
    return settings


@st.composite
def _requests(draw: st.DrawFn, features: set[str], max_len: int) -> dict[str, Any]:
    tail = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    head = draw(st.integers(0, max(max_len - 1 - len(tail), 0)))
    prompt = ([7, 8, 9] * max_len)[:head] + tail
    request: dict[str, Any] = {
        "prompt": prompt[: max_len - 1],
        "max_tokens": draw(st.integers(1, 8)),
    }
    for name, values in _OPTIONAL.items():
        if draw(st.booleans()):
            request[name] = draw(values)
    for name in sorted(features & set(_FIELDS)):
        if draw(st.booleans()):
            request |= draw(_FIELDS[name])
    if "encoder" in features and draw(st.integers(0, 3)):
        request["features"] = draw(_features(len(request["prompt"])))
    if "forks" in features and draw(st.booleans()):
        had = len(request["prompt"]) if "prompt_logprobs" in request else 0
        room = min(request["max_tokens"], max_len - len(request["prompt"])) - 1
        begun = draw(st.lists(st.sampled_from(_GOES_ON), max_size=room, unique=True))
        request["resumed"] = ResumedOutputs(begun, num_prompt_logprobs=had)
    return request


@st.composite
def _features(draw: st.DrawFn, length: int) -> list[MultiModalFeature]:
    """Draw features that do not overlap; equal identifiers are of equal length."""
    features, at = [], 0
    kinds = st.sampled_from([("cat", 2), ("dog", 3), ("owl", 1)])
    for identifier, size in draw(st.lists(kinds, max_size=3)):
        offset = at + draw(st.integers(0, 2))
        if offset + size <= length:
            features.append(MultiModalFeature(identifier, offset, size))
            at = offset + size
    return features


_MILLISECONDS = st.sampled_from([0.0, 0.01, 1.0, 7.5, 1e6])
_STEP_COST = st.builds(
    StepCost,
    step=_MILLISECONDS,
    single_query=_MILLISECONDS,
    context_token=_MILLISECONDS,
    prompt=_MILLISECONDS,
    prompt_token=_MILLISECONDS,
    prompt_pair=_MILLISECONDS,
    is_trained=st.booleans(),
)
_NUM_INITIAL = st.integers(1, 3)
_OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "priority": st.integers(-1, 1),
    "tags": st.sampled_from([{"tenant": "acme"}, {"tenant": "zeta"}]),
    "reuse_id": st.just(True),
}
_TRANSFER = st.builds(
    Transfer,
    tokens=st.integers(0, 9),
    load_steps=st.none() | st.integers(1, 3),
    pending_lookups=st.sampled_from([0, 0, 1, 2]),
    failed_block=st.none() | st.integers(0, 2),
    save_steps=st.sampled_from([0, 0, 1, 3]),
)
_GOES_ON = (2, 3, 5, 6, 7, 9, 10)
"""Tokens with which no drawn request ends, unless one is repeated."""
_FIELDS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "transfers": st.fixed_dictionaries({"transfer": _TRANSFER}),
    "grammars": st.fixed_dictionaries(
        {"compile": st.builds(Compile, pending_polls=st.integers(0, 3), fails=st.booleans())}
    ),
    "loras": st.fixed_dictionaries(
        {"lora": st.sampled_from([LoRARequest("poet", 1), LoRARequest("cook", 2)])}
    ),
    "drafts": st.fixed_dictionaries({"drafts": st.sampled_from(["wrong", "mixed", ""])}),
    "timeouts": st.fixed_dictionaries({"timeout": st.sampled_from([0.5, 4.5])}),
    "salts": st.fixed_dictionaries({"cache_salt": st.sampled_from(["s", "t"])}),
    "logprobs": st.sampled_from([{"logprobs": 1}, {"logprob_token_ids": [1]}]),
    "prompt_logprobs": st.just({"prompt_logprobs": 1}),
    "repetition": st.just(
        {"repetition_detection": RepetitionDetection(max_pattern=2, min_count=2)}
    ),
    "stops": st.fixed_dictionaries(
        {
            "stop_token_ids": st.just([*range(0, 29, 4)]),
            "eos_token_ids": st.just([*range(1, 29, 7)]),
            "min_tokens": st.sampled_from([0, 0, 1, 4]),
        }
    ),
    "clients": st.fixed_dictionaries({"client_index": st.integers(0, 1)}),
    "faults": st.fixed_dictionaries({"fails_after": st.integers(0, 2)}),
}
