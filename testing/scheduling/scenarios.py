"""What happens to a scheduler: drawn by hypothesis, played on a rig, told as code."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from hardpoint.plugins import PauseState, RepetitionDetection, RequestError, Scheduler
from hardpoint.plugins.requests import LoRARequest, MultiModalFeature
from hardpoint.testing.scheduling.checks.names import CRASH, REFUSAL
from hardpoint.testing.scheduling.fakes.connector import Compile, Transfer
from hardpoint.testing.suite import Violation

from .features import FEATURES, Refusals
from .simulator import SchedulerRig

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
"""What may happen beside arrivals and steps."""

_IDS = "abcdefgh"
_MOST_REQUESTS = 5
_POLICIES = ("fcfs", "priority")

Event = tuple[str, Any]


@dataclass(frozen=True)
class Scenario:
    """A setting, requests, and what happens.

    Attributes:
        settings: fields of RigSettings.
        requests: arguments of `SchedulerRig.add`, without the id.
        events: (name, argument) pairs; see `play`.
        lines: what happened when it was played, as Python.
    """

    settings: Mapping[str, Any]
    requests: tuple[Mapping[str, Any], ...]
    events: tuple[Event, ...]
    lines: list[str] = field(default_factory=list, compare=False)

    def code(self) -> str:
        """Return what happened as lines of Python that play it again."""
        return "\n".join(self.lines)

    def __repr__(self) -> str:
        return self.code() or f"<{len(self.requests)} requests, {len(self.events)} events>"


def play(scheduler: type[Scheduler], scenario: Scenario, **settings: Any) -> SchedulerRig:
    """Let it all happen, then run until everything has ended; return the rig.

    A pause that lasts to the end of the events is complete, nothing left to do, before it is over.

    Args:
        scheduler: the class.
        scenario: what happens.
        **settings: further fields of RigSettings.

    Raises:
        Violation: a rule was broken.
    """
    given = {**scenario.settings, **settings}
    lines = scenario.lines
    lines[:] = [f"rig = SchedulerRig(scheduler, {_arguments(given)})"]
    coming = list(scenario.requests)
    with crashes():
        rig = SchedulerRig(scheduler, **given)
        for name, argument in (*scenario.events, *[("add", None)] * len(coming)):
            if name == "add" and coming:
                _arrive(rig, coming.pop(0), lines)
            elif name in ("abort", "abort_between") and rig.live:
                names = sorted(rig.live)
                _act(rig, name, names[argument % len(names)], lines)
            elif name == "resume":
                _resume(rig, lines, complete=argument)
            elif name not in ("add", "abort", "abort_between"):
                _act(rig, name, argument, lines)
        _resume(rig, lines, complete=True)
        lines.append("rig.run()")
        rig.run()
    return rig


@contextmanager
def crashes() -> Iterator[None]:
    """Turn what nobody expected into the finding that it is.

    Raises:
        Violation: a rule was broken, or something was raised.
    """
    try:
        yield
    except Violation:
        raise
    except Exception as cause:
        place = traceback.extract_tb(cause.__traceback__)[-1]
        raise CRASH.broken(
            f"{type(cause).__name__}: {cause} (in {place.name}, line {place.lineno} of "
            f"{place.filename.rpartition('/')[2]})"
        ) from cause


def _arguments(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def _arrive(rig: SchedulerRig, fields: Mapping[str, Any], lines: list[str]) -> None:
    """Add a request; some take the id of one that has ended."""
    ident = _IDS[len(rig.lives)]
    if fields.get("again"):
        ident = next((name for name in rig.lives if rig.is_free(name)), ident)
    given = {key: value for key, value in fields.items() if key != "again"}
    lines.append(f"rig.add({ident!r}, {_arguments(given)})")
    try:
        rig.add(ident, **given)
    except RequestError as refusal:
        if given.get("features") and not rig.limits.chunked_prefill:
            lines.pop()  # a step may have to encode them all, which is more than it can
            return
        raise REFUSAL.broken(f"a request that can run is refused: {refusal}") from refusal


def _act(rig: SchedulerRig, name: str, argument: Any, lines: list[str]) -> None:
    lines.append(_LINES[name].format(argument))
    _ACTIONS[name](rig, argument)


def _resume(rig: SchedulerRig, lines: list[str], *, complete: bool) -> None:
    """End a pause, if there is one; if `complete`, once nothing is left to do."""
    if rig.paused is PauseState.UNPAUSED:
        return
    if complete:
        _act(rig, "settle", None, lines)
    _act(rig, "resume", None, lines)


def _abort_between(rig: SchedulerRig, argument: Any) -> None:
    rig.start()
    rig.abort(argument)
    while len(rig.in_flight) > rig.settings.asynchronous:
        rig.deliver()


_ACTIONS: dict[str, Callable[[SchedulerRig, Any], Any]] = {
    "step": lambda rig, _: rig.step(),
    "abort": lambda rig, name: rig.abort(name),
    "abort_between": _abort_between,
    "advance": lambda rig, seconds: rig.clock.advance(seconds),
    "lose": lambda rig, _: rig.lose(),
    "lose_unexecuted": lambda rig, _: rig.lose(executed=False),
    "reset": lambda rig, _: rig.reset(),
    "reset_all": lambda rig, _: rig.reset(recompute_running=True),
    "swap": lambda rig, name: rig.swap(name),
    "pause_new": lambda rig, _: rig.pause(PauseState.PAUSED_NEW),
    "pause_all": lambda rig, _: rig.pause(PauseState.PAUSED_ALL),
    "settle": lambda rig, _: rig.settle(),
    "resume": lambda rig, _: rig.pause(PauseState.UNPAUSED),
}
_LINES = {
    "step": "rig.step()",
    "abort": "rig.abort({!r})",
    "abort_between": "rig.start(); rig.abort({!r}); rig.deliver()",
    "advance": "rig.clock.advance({!r})",
    "lose": "rig.lose()",
    "lose_unexecuted": "rig.lose(executed=False)",
    "reset": "rig.reset()",
    "reset_all": "rig.reset(recompute_running=True)",
    "swap": "rig.swap({!r})",
    "pause_new": "rig.pause(PauseState.PAUSED_NEW)",
    "pause_all": "rig.pause(PauseState.PAUSED_ALL)",
    "settle": "rig.settle()",
    "resume": "rig.pause(PauseState.UNPAUSED)",
}


@st.composite
def scenarios(
    draw: st.DrawFn,
    refusals: Refusals,
    always: tuple[str, ...] = (),
    sometimes: tuple[str, ...] = (),
    events: tuple[str, ...] = (),
    policies: tuple[Any, ...] = _POLICIES,
    roomy: bool = False,
) -> Scenario:
    """Draw a scenario.

    Args:
        draw: hypothesis'.
        refusals: what the scheduler cannot do, which is left out.
        always, sometimes: features.
        events: those of EVENTS that may happen.
        policies: from which one is drawn.
        roomy: whether there is always room for all.
    """
    drawn = [name for name in sometimes if draw(st.integers(0, 2)) == 0]
    features = refusals.without([*always, *drawn])
    settings = draw(_settings(features, roomy))
    settings["policy"] = draw(st.sampled_from(policies))
    longest = settings["max_model_len"]
    request = _requests(features, longest)
    requests = draw(st.lists(request, min_size=1, max_size=_MOST_REQUESTS))
    happens = [event for event in events if not _needs(event) & set(refusals.single)]
    if "transfers" in features:  # what becomes of a load whose plan was lost, nobody has said
        happens = [event for event in happens if not event.startswith("lose")]
    names = ["step"] * max(2, len(happens)) + ["add", *happens]  # one_of would drop the repeats
    event = st.sampled_from(names).flatmap(lambda name: _event(name, policies))
    drawn_events = draw(st.lists(event, max_size=14 if happens else 5))
    return Scenario(settings, tuple(requests), (*[("add", None)] * draw(_FIRST), *drawn_events))


@st.composite
def victims(draw: st.DrawFn) -> Scenario:
    """Draw long prompts in small chunks, of which more important ones take the blocks.

    Blocks run out while somebody has tokens of the same step already, and must give them back.
    """
    size, longest = draw(st.sampled_from([2, 4])), draw(st.integers(8, 20))
    settings = {
        "block_size": size,
        "blocks": -(-longest // size) + draw(st.integers(0, 2)),
        "max_model_len": longest,
        "long_prefill_token_threshold": draw(st.integers(2, 5)),
        "policy": "priority",
    }
    long = st.integers(longest // 2, longest - 2)
    requests = [
        {"prompt": [place] * draw(long), "max_tokens": 2, "priority": -place}
        for place in range(draw(st.integers(2, 3)))
    ]
    events: list[Event] = []
    for _ in requests:
        events += [("add", None), *[("step", None)] * draw(st.integers(1, 4))]
    return Scenario(settings, tuple(requests), tuple(events))


@st.composite
def pauses(draw: st.DrawFn, refusals: Refusals) -> Scenario:
    """Draw a pause that comes while requests load, and during which time passes."""
    features = refusals.without(["pauses", "transfers", "timeouts"])
    settings = draw(_settings(features, roomy=False))
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
def _settings(draw: st.DrawFn, features: set[str], roomy: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in sorted(features):
        settings |= FEATURES[name].settings
    size = draw(st.sampled_from([1, 2, 4]))
    longest = draw(st.integers(5, 20))
    if "windows" in features:
        settings["windows"] = draw(st.sampled_from([(None, 3), (5,), (2, None)]))
    if "drafts" in features:
        settings["num_draft_tokens"] = draw(st.integers(1, 3))
    if "lookahead" in features:
        settings["num_lookahead_tokens"] = draw(st.integers(1, 3))
    ahead = settings.get("num_lookahead_tokens", 0) + settings.get("num_draft_tokens", 0)
    windows = settings.get("windows", (None,))
    fits = -(-(longest + ahead) // size) * len(windows)
    spare = draw(st.sampled_from([0, 0, 1, fits // 2, fits, 2 * fits]))
    spare = fits * _MOST_REQUESTS if roomy else spare
    settings |= {
        "block_size": size,
        "blocks": fits + spare + (windows != (None,)),
        "max_model_len": longest,
        "max_num_seqs": draw(st.sampled_from([1, 2, 3, 4])),
        "max_num_batched_tokens": draw(st.sampled_from([1, 2, 3, 5, 8, 12, 16])),
    }
    if "whole" in features:
        settings["max_num_batched_tokens"] = longest + draw(st.integers(0, 6))
    if "threshold" in features:
        settings["long_prefill_token_threshold"] = draw(st.integers(1, 5))
    if "loras" in features:
        settings["max_loras"] = draw(st.integers(1, 2))
    if "encoder" in features:
        settings["max_encoder_tokens"] = draw(st.integers(3, 5))
        more = draw(st.sampled_from([0, 2, 4]))
        settings["encoder_cache_tokens"] = settings["max_encoder_tokens"] + more
    return settings


@st.composite
def _requests(draw: st.DrawFn, features: set[str], longest: int) -> dict[str, Any]:
    tail = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    head = draw(st.integers(0, max(longest - 1 - len(tail), 0)))
    prompt = ([7, 8, 9] * longest)[:head] + tail
    request: dict[str, Any] = {
        "prompt": prompt[: longest - 1],
        "max_tokens": draw(st.integers(1, 8)),
    }
    for name, values in _ANY.items():
        if draw(st.booleans()):
            request[name] = draw(values)
    for name in sorted(features & set(_FIELDS)):
        if draw(st.booleans()):
            request |= draw(_FIELDS[name])
    if "encoder" in features and draw(st.integers(0, 3)):
        request["features"] = draw(_features(len(request["prompt"])))
    return request


@st.composite
def _features(draw: st.DrawFn, length: int) -> list[MultiModalFeature]:
    """Draw features that do not overlap; equal identifiers are of equal length."""
    found, at = [], 0
    kinds = st.sampled_from([("cat", 2), ("dog", 3), ("owl", 1)])
    for identifier, size in draw(st.lists(kinds, max_size=3)):
        offset = at + draw(st.integers(0, 2))
        if offset + size <= length:
            found.append(MultiModalFeature(identifier, offset, size))
            at = offset + size
    return found


_FIRST = st.integers(1, 3)
_ANY: dict[str, st.SearchStrategy[Any]] = {
    "priority": st.integers(-1, 1),
    "tags": st.sampled_from([{"tenant": "acme"}, {"tenant": "zeta"}]),
    "again": st.just(True),
}
_TRANSFERS = st.builds(
    Transfer,
    tokens=st.integers(0, 9),
    steps=st.none() | st.integers(1, 3),
    asks=st.sampled_from([0, 0, 1, 2]),
    fails=st.none() | st.integers(0, 2),
    keeps=st.sampled_from([0, 0, 1, 3]),
)
_FIELDS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "transfers": st.fixed_dictionaries({"transfer": _TRANSFERS}),
    "grammars": st.fixed_dictionaries(
        {"compile": st.builds(Compile, asks=st.integers(0, 3), fails=st.booleans())}
    ),
    "loras": st.fixed_dictionaries(
        {"lora": st.sampled_from([LoRARequest("poet", 1), LoRARequest("cook", 2)])}
    ),
    "drafts": st.fixed_dictionaries({"drafts": st.sampled_from(["wrong", "mixed", ""])}),
    "timeouts": st.fixed_dictionaries({"timeout": st.sampled_from([0.5, 4.5])}),
    "salts": st.fixed_dictionaries({"cache_salt": st.sampled_from(["s", "t"])}),
    "logprobs": st.just({"logprobs": 1}),
    "prompt_logprobs": st.just({"prompt_logprobs": 1}),
    "repetition": st.just(
        {"repetition_detection": RepetitionDetection(max_pattern=2, min_count=2)}
    ),
    "stops": st.just({"stop_token_ids": [*range(0, 29, 4)], "eos_token_ids": [*range(1, 29, 7)]}),
    "clients": st.fixed_dictionaries({"client_index": st.integers(0, 1)}),
    "faults": st.fixed_dictionaries({"fails_after": st.integers(0, 2)}),
}
