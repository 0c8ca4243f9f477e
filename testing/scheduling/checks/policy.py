"""Rules on what a scheduling policy answers, asked of it directly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import msgspec
from hypothesis import strategies as st

from hardpoint.plugins import (
    EngineCoreRequest,
    Load,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulingPolicy,
)
from hardpoint.testing.scheduling.fakes.policy import ANSWERS, watched
from hardpoint.testing.scheduling.suite_base import best_of
from hardpoint.testing.snapshots import snapshot, weigh
from hardpoint.testing.suite import Violation, short

Make = Callable[[], SchedulingPolicy]

_NOW = 1000.0
_STATIC = "return what depends on the request alone; time and chance have no place in a key"


@st.composite
def _request(draw: st.DrawFn, tags: st.SearchStrategy[dict[str, str]]) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="",
        prompt_token_ids=[1] * draw(st.integers(1, 40)),
        params=SamplingParams(max_tokens=draw(st.none() | st.integers(1, 40))),
        arrival_time=_NOW + draw(st.sampled_from([0.0, 0.0, 1.5, 60.0])),
        priority=draw(st.sampled_from([0, 0, 1, -2])),
        timeout=draw(st.none() | st.just(9.0)),
        tags=draw(tags),
    )


def requests(
    tags: st.SearchStrategy[dict[str, str]], most: int
) -> st.SearchStrategy[list[EngineCoreRequest]]:
    """Return a strategy for up to `most` requests, in the order in which they come."""
    return st.lists(_request(tags), min_size=1, max_size=most).map(_named)


def check_keys(make: Make, sources: Sequence[EngineCoreRequest]) -> None:
    """Keys compare, make an order, and are the same when asked again."""
    policy, live = _policy(make), _live(sources)
    keys = [_enter(policy, request)[0] for request in live]
    _check_order("key", keys, live)
    for request, key in zip(live, keys, strict=True):
        again = policy.key(request)
        if _less("key", key, again) or _less("key", again, key):
            raise Violation(
                f"key({request!r}) returned {short(key)}, and asked again {short(again)}", _STATIC
            )
    other = _policy(make)
    for request, key in zip(live, keys, strict=True):
        again, _ = _enter(other, request)
        if _less("key", key, again) or _less("key", again, key):
            raise Violation(
                f"key({request!r}) is {short(key)} of one instance, and {short(again)} of another "
                "that was told the same",
                _STATIC,
            )


def check_groups(make: Make, sources: Sequence[EngineCoreRequest], tokens: Sequence[int]) -> None:
    """Groups stay what they are, and their keys make an order, whatever was scheduled."""
    policy, live = _policy(make), _live(sources)
    groups = [_enter(policy, request)[1] for request in live]
    for place, count in enumerate(tokens):
        _run(policy, live[place % len(live)], count)
    for request, group in zip(live, groups, strict=True):
        if policy.group(request) != group:
            raise Violation(
                f"group({request!r}) returned {short(group)}, and asked again "
                f"{short(policy.group(request))}",
                "return what depends on the request alone",
            )
    distinct = list(dict.fromkeys(groups))
    keys = [policy.group_key(group, _NOW + 5) for group in distinct]
    _check_order("group_key", keys, distinct)
    for group, key in zip(distinct, keys, strict=True):
        again = policy.group_key(group, _NOW + 5)
        if _less("group_key", key, again) or _less("group_key", again, key):
            raise Violation(
                f"group_key({short(group)}, now) returned {short(key)}, and asked again "
                f"{short(again)}, of the same now",
                "let it change by what was scheduled and by now, and by nothing else",
            )


def check_victim(make: Make, sources: Sequence[EngineCoreRequest]) -> None:
    """The victim runs, and is the same when asked again; also when only one runs."""
    policy, running = _policy(make), _live(sources)
    for request in running:
        _enter(policy, request)
        _run(policy, request, 3)
    while running:
        given = list(running)
        victim = policy.victim(given, _load(len(running)))
        if given != running:
            raise Violation("victim() changed the sequence that it was given", "copy it first")
        again = policy.victim(given, _load(len(running)))
        if again is not victim:
            raise Violation(
                f"victim({short(given)}) returned {victim!r}, and asked again {again!r}",
                "decide by the requests and by what was scheduled",
            )
        running.remove(victim)
        policy.preempted(victim)


def check_admit(make: Make, sources: Sequence[EngineCoreRequest], running: int) -> None:
    """It answers None or words."""
    policy, live = _policy(make), _live(sources)
    for request in live:
        _enter(policy, request)
    for request in live:
        policy.admit(request, _load(running))


def check_reads_only(make: Make, sources: Sequence[EngineCoreRequest]) -> None:
    """No method writes to a request."""
    policy, live = _policy(make), _live(sources)

    def unchanged(method: str, *given: Any) -> None:
        before = [_attributes(request) for request in live]
        getattr(policy, method)(*given)
        for request, values in zip(live, before, strict=True):
            now = _attributes(request)
            if changed := [name for name, value in values.items() if now[name] != value]:
                raise Violation(
                    f"{method}() changed {changed[0]} of {request!r}",
                    "a scheduler alone writes to requests; keep what you note in books of your own",
                )

    for request in live:
        for method in ("added", "key", "group"):
            unchanged(method, request)
        unchanged("admit", request, _load(0))
        unchanged("scheduled", request, 2)
    unchanged("victim", list(live), _load(len(live)))
    for request in live:
        unchanged("preempted", request)
        unchanged("finished", request)


def check_state(make: Make, sources: Sequence[EngineCoreRequest], tokens: Sequence[int]) -> None:
    """Books are plain data, and whoever takes them over orders groups and requests as before."""
    old, live = _policy(make), _live(sources)
    groups = {_enter(old, request)[1] for request in live}
    for place, count in enumerate(tokens):
        _run(old, live[place % len(live)], count)
    state = old.export_state()
    try:
        msgspec.msgpack.encode(state)
    except Exception as cause:
        raise Violation(
            f"export_state returned what is no plain data: {type(cause).__name__}: {cause}",
            "return numbers, strings, lists and dicts of them",
        ) from cause
    new = _policy(make)
    new.import_state(copy.deepcopy(state))
    for request in live:
        _enter(new, request)
    for first, second in permutations(sorted(groups, key=repr), 2):
        was = _less("group_key", *(old.group_key(g, _NOW) for g in (first, second)))
        now = _less("group_key", *(new.group_key(g, _NOW) for g in (first, second)))
        if was != now:
            raise Violation(
                f"after {short(state)} was taken over, group {first!r} goes before {second!r}: "
                f"{now}; before it was {was}",
                "export all that group_key depends on",
            )
    for one, other in permutations(live, 2):
        was = _less("key", old.key(one), old.key(other))
        if was != _less("key", new.key(one), new.key(other)):
            raise Violation(
                f"after {short(state)} was taken over, {one!r} and {other!r} are in another order",
                "export all that key depends on",
            )


def check_memory(make: Make, sources: Sequence[EngineCoreRequest], waves: int = 40) -> None:
    """What hangs on a policy does not grow while requests come and go."""
    policy, weights = make(), []
    for wave in range(2 * waves):
        live = _live(sources, wave)
        for request in live:
            _enter(policy, request)
        for request in live:
            _run(policy, request, 3)
        policy.preempted(policy.victim(list(live), _load(len(live))))
        for request in live:
            policy.finished(request)
        if wave in (waves - 1, 2 * waves - 1):
            own = {name: value for name, value in vars(policy).items() if name != "context"}
            weights.append(weigh(own))
        del live
    passed = waves * len(sources)
    if weights[1] - weights[0] >= passed // 2:
        raise Violation(
            f"what hangs on the policy grew from {weights[0]} to {weights[1]} elements while "
            f"{passed} requests came and went",
            "drop in finished() what you noted of a request",
        )


def check_speed(make: Make, sources: Sequence[EngineCoreRequest], budget: float) -> None:
    """The calls for a request cost no more than `budget` microseconds, with 256 of them."""
    count = 256
    live = [r for wave in range(-(-count // len(sources))) for r in _live(sources, wave)][:count]
    policy = make()

    def serve() -> None:
        for request in live:
            _, group = _enter(policy, request)
            policy.group_key(group, _NOW)
            policy.admit(request, _load(1))
            policy.scheduled(request, 1)
        for request in live:
            policy.finished(request)

    def choose() -> None:
        policy.victim(live, _load(count))

    costs = {"the calls for one request": best_of(5, serve)}
    for request in live:
        _enter(policy, request)
    costs["victim(), per request that runs,"] = best_of(5, choose)
    for what, seconds in costs.items():
        cost = seconds * 1e6 / count
        if cost > budget:
            raise Violation(
                f"{what} cost {cost:.0f} microseconds, the budget is {budget:.0f}",
                "keep in books what would have to be counted anew; or set budget_us_per_request",
            )


def _policy(make: Make) -> SchedulingPolicy:
    """Return a policy whose every answer is checked."""
    return watched(make())[0]


def _named(sources: list[EngineCoreRequest]) -> list[EngineCoreRequest]:
    return [
        msgspec.structs.replace(source, request_id=f"r{place}")
        for place, source in enumerate(sources)
    ]


def _live(sources: Sequence[EngineCoreRequest], wave: int = 0) -> list[Request]:
    live = []
    for place, source in enumerate(sources):
        named = msgspec.structs.replace(source, request_id=f"{source.request_id}.{wave}")
        live.append(Request(named, order=wave * len(sources) + place))
    return live


def _enter(policy: SchedulingPolicy, request: Request) -> tuple[Any, Any]:
    """Do as a scheduler does when a request comes; return its key and group."""
    policy.added(request)
    return policy.key(request), policy.group(request)


def _run(policy: SchedulingPolicy, request: Request, most: int) -> None:
    """Do as a scheduler does when a step computes some tokens of a request."""
    count = min(most, request.num_tokens - request.num_computed_tokens)
    request.status = RequestStatus.RUNNING
    policy.scheduled(request, count)
    request.num_computed_tokens += count
    if request.num_computed_tokens == request.num_tokens:
        request.append(1)


def _load(running: int) -> Load:
    return Load(
        now=_NOW,
        num_running=running,
        max_num_seqs=8,
        num_waiting=6,
        token_budget=32,
        num_free_blocks=4,
        num_blocks=16,
    )


def _less(method: str, first: Any, second: Any) -> bool:
    try:
        return bool(first < second)
    except Exception as cause:
        raise ANSWERS.broken(
            f"{method}() returned {short(first)} and {short(second)}, which do not compare: "
            f"{type(cause).__name__}: {cause}",
            "return values of one type, such as tuples of numbers",
        ) from cause


def _check_order(method: str, keys: Sequence[Any], whose: Sequence[Any]) -> None:
    """Less-than is an order: of two at most one goes first, and it carries over."""
    for (i, a), (j, b) in permutations(enumerate(keys), 2):
        if _less(method, a, b) and _less(method, b, a):
            raise Violation(
                f"{method} of {whose[i]!r} and {whose[j]!r} are each less than the other",
                "return keys of a type whose < is an order",
            )
    for (i, a), (_, b), (k, c) in permutations(enumerate(keys), 3):
        behind = not _less(method, b, a) and not _less(method, c, b)
        if behind and _less(method, c, a):
            raise Violation(
                f"{method}: {short(a)} is not behind {short(b)}, which is not behind {short(c)}, "
                f"but {short(c)} of {whose[k]!r} goes before {short(a)} of {whose[i]!r}",
                "return keys of a type whose < is an order; NaN is in no order",
            )


def _attributes(request: Request) -> dict[str, Any]:
    return {name: snapshot(getattr(request, name)) for name in Request.__slots__}
