"""Checks of a scheduling policy's return values, called directly."""

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
from hardpoint.testing.engine_access import policy_arguments
from hardpoint.testing.pace import cpu_cost
from hardpoint.testing.scheduling.fakes.policy import RETURN_VALUES, monitor_policy
from hardpoint.testing.snapshots import snapshot, without_growth
from hardpoint.testing.suite import Violation, short_repr

Make = Callable[[], SchedulingPolicy]

_NOW = 1000.0
_STATIC = "return a key that depends on the request alone, not on time or chance"


@st.composite
def _request(
    draw: st.DrawFn,
    tags: st.SearchStrategy[dict[str, str]],
    plugin_args: st.SearchStrategy[dict[str, Any]],
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="",
        prompt_token_ids=[1] * draw(st.integers(1, 40)),
        params=SamplingParams(max_tokens=draw(st.none() | st.integers(1, 40))),
        arrival_time=_NOW + draw(st.sampled_from([0.0, 0.0, 1.5, 60.0])),
        priority=draw(st.sampled_from([0, 0, 1, -2])),
        timeout=draw(st.none() | st.just(9.0)),
        tags=draw(tags),
        plugin_args=draw(plugin_args),
    )


def request_lists(
    tags: st.SearchStrategy[dict[str, str]],
    plugin_args: st.SearchStrategy[dict[str, Any]],
    max_size: int,
) -> st.SearchStrategy[list[EngineCoreRequest]]:
    """Return a strategy for up to `max_size` requests, in order of arrival."""
    return st.lists(_request(tags, plugin_args), min_size=1, max_size=max_size).map(_named)


def check_keys(make: Make, sources: Sequence[EngineCoreRequest]) -> None:
    """Check that keys are ordered, and the same for every call and instance."""
    policy = _policy(make)
    requests = _make_requests(policy, sources)
    keys = [_add(policy, request)[0] for request in requests]
    _check_order("key", keys, requests)
    for request, key in zip(requests, keys, strict=True):
        again = policy.key(request)
        if _less("key", key, again) or _less("key", again, key):
            raise Violation(
                f"key({request!r}) returned {short_repr(key)}, then {short_repr(again)}",
                _STATIC,
            )
    other = _policy(make)
    for request, key in zip(requests, keys, strict=True):
        again, _ = _add(other, request)
        if _less("key", key, again) or _less("key", again, key):
            raise Violation(
                f"key({request!r}) is {short_repr(key)} of one instance, and {short_repr(again)} "
                "of another after the same calls",
                _STATIC,
            )
    if not vars(type(make())).get("uses_priority", True):
        _check_priority_ignored(make, sources, keys)


def _check_priority_ignored(
    make: Make, sources: Sequence[EngineCoreRequest], keys: Sequence[Any]
) -> None:
    other = _policy(make)
    changed = [msgspec.structs.replace(s, priority=1 - 2 * s.priority) for s in sources]
    for request, key in zip(_make_requests(other, changed), keys, strict=True):
        again, _ = _add(other, request)
        if _less("key", key, again) or _less("key", again, key):
            raise Violation(
                f"uses_priority is False, and key({request!r}) is {short_repr(again)}, "
                f"{short_repr(key)} with another priority",
                "leave uses_priority out: the engine would warn that priorities are ignored",
            )


def check_groups(make: Make, sources: Sequence[EngineCoreRequest], tokens: Sequence[int]) -> None:
    """Check that groups do not change, and that their keys are ordered after any schedule."""
    policy = _policy(make)
    requests = _make_requests(policy, sources)
    groups = [_add(policy, request)[1] for request in requests]
    for index, count in enumerate(tokens):
        _run(policy, requests[index % len(requests)], count)
    for request, group in zip(requests, groups, strict=True):
        if policy.group(request) != group:
            raise Violation(
                f"group({request!r}) returned {short_repr(group)}, then "
                f"{short_repr(policy.group(request))}",
                "return a group that depends on the request alone",
            )
    distinct = list(dict.fromkeys(groups))
    keys = [policy.group_key(group, _NOW + 5) for group in distinct]
    _check_order("group_key", keys, distinct)
    for group, key in zip(distinct, keys, strict=True):
        again = policy.group_key(group, _NOW + 5)
        if _less("group_key", key, again) or _less("group_key", again, key):
            raise Violation(
                f"group_key({short_repr(group)}, now) returned {short_repr(key)}, then "
                f"{short_repr(again)}, for the same now",
                "let it depend on scheduled tokens and on now only",
            )


def check_victim(make: Make, sources: Sequence[EngineCoreRequest]) -> None:
    """Check that the victim is running, and the same for every call."""
    policy = _policy(make)
    running = _make_requests(policy, sources)
    for request in running:
        _add(policy, request)
        _run(policy, request, 3)
    while running:
        candidates = list(running)
        victim = policy.victim(candidates, _load(len(running)))
        if candidates != running:
            raise Violation("victim() changed the sequence that it was given", "copy it first")
        again = policy.victim(candidates, _load(len(running)))
        if again is not victim:
            raise Violation(
                f"victim({short_repr(candidates)}) returned {victim!r}, then {again!r}",
                "decide by the requests and their scheduled tokens",
            )
        running.remove(victim)
        policy.preempted(victim)


def check_admit(make: Make, sources: Sequence[EngineCoreRequest], running: int) -> None:
    """Check that admit() returns None or a reason."""
    policy = _policy(make)
    requests = _make_requests(policy, sources)
    for request in requests:
        _add(policy, request)
    for request in requests:
        policy.admit(request, _load(running))


def check_reads_only(make: Make, sources: Sequence[EngineCoreRequest]) -> None:
    """Check that no method writes to a request."""
    policy = _policy(make)
    requests = _make_requests(policy, sources)

    def unchanged(method: str, *arguments: Any) -> None:
        before = [_attributes(request) for request in requests]
        getattr(policy, method)(*arguments)
        for request, values in zip(requests, before, strict=True):
            now = _attributes(request)
            if changed := [name for name, value in values.items() if now[name] != value]:
                raise Violation(
                    f"{method}() changed {changed[0]} of {request!r}",
                    "only a scheduler writes to requests; keep notes in attributes of the policy",
                )

    for request in requests:
        for method in ("added", "key", "group"):
            unchanged(method, request)
        unchanged("admit", request, _load(0))
        unchanged("scheduled", request, 2)
    unchanged("victim", list(requests), _load(len(requests)))
    for request in requests:
        unchanged("preempted", request)
        unchanged("finished", request)


def check_state(make: Make, sources: Sequence[EngineCoreRequest], tokens: Sequence[int]) -> None:
    """Check that state is plain data, and that an instance that imports it keeps the order."""
    old = _policy(make)
    requests = _make_requests(old, sources)
    groups = {_add(old, request)[1] for request in requests}
    for index, count in enumerate(tokens):
        _run(old, requests[index % len(requests)], count)
    state = old.export_state()
    try:
        msgspec.msgpack.encode(state)
    except Exception as cause:
        raise Violation(
            f"export_state did not return plain data: {type(cause).__name__}: {cause}",
            "return numbers, strings, lists and dicts of them",
        ) from cause
    new = _policy(make)
    new.import_state(copy.deepcopy(state))
    for request in requests:
        _add(new, request)
    for first, second in permutations(sorted(groups, key=repr), 2):
        was = _less("group_key", *(old.group_key(g, _NOW) for g in (first, second)))
        now = _less("group_key", *(new.group_key(g, _NOW) for g in (first, second)))
        if was != now:
            raise Violation(
                f"after {short_repr(state)} was imported, group {first!r} goes before {second!r}: "
                f"{now}; before it was {was}",
                "export all that group_key depends on",
            )
    for earlier, other in permutations(requests, 2):
        was = _less("key", old.key(earlier), old.key(other))
        if was != _less("key", new.key(earlier), new.key(other)):
            raise Violation(
                f"after {short_repr(state)} was imported, the order of {earlier!r} and "
                f"{other!r} changed",
                "export all that key depends on",
            )


def check_memory(make: Make, sources: Sequence[EngineCoreRequest], waves: int = 40) -> None:
    """Check that a policy's attributes do not grow with the number of finished requests."""
    policy, finished = make(), waves * len(sources)
    description = f"the policy: while {finished} requests finished"
    fix = "in finished(), drop the notes on the request"
    for wave in without_growth(policy, waves, description, fix, limit=finished // 2 - 1):
        run_requests(policy, sources, wave)


def run_requests(
    policy: SchedulingPolicy, sources: Sequence[EngineCoreRequest], number: int
) -> None:
    """Let requests come, run, be preempted and finish, with ids that depend on the number."""
    requests = _make_requests(policy, sources, number)
    for request in requests:
        _add(policy, request)
    for request in requests:
        _run(policy, request, 3)
    policy.preempted(policy.victim(list(requests), _load(len(requests))))
    for request in requests:
        policy.finished(request)


def check_speed(make: Make, sources: Sequence[EngineCoreRequest], budget: float) -> None:
    """Check the cost of the calls per request against a budget in microseconds."""
    count = 256
    policy = make()
    waves = range(-(-count // len(sources)))
    requests = [r for wave in waves for r in _make_requests(policy, sources, wave)][:count]

    def serve() -> None:
        for request in requests:
            _, group = _add(policy, request)
            policy.group_key(group, _NOW)
            policy.admit(request, _load(1))
            policy.scheduled(request, 1)
        for request in requests:
            policy.finished(request)

    def choose() -> None:
        policy.victim(requests, _load(count))

    enough = budget * count / 1e6
    costs = {"the calls for one request": cpu_cost(serve, enough, rounds=5)}
    for request in requests:
        _add(policy, request)
    costs["victim(), per running request,"] = cpu_cost(choose, enough, rounds=5)
    for operation, seconds in costs.items():
        cost = seconds * 1e6 / count
        if cost > budget:
            raise Violation(
                f"{operation} cost {cost:.0f} microseconds, the budget is {budget:.0f}",
                "keep counts instead of counting again; or set budget_us_per_request",
            )


def _policy(make: Make) -> SchedulingPolicy:
    return monitor_policy(make())[0]


def _named(sources: list[EngineCoreRequest]) -> list[EngineCoreRequest]:
    return [
        msgspec.structs.replace(source, request_id=f"r{index}")
        for index, source in enumerate(sources)
    ]


def _make_requests(
    policy: SchedulingPolicy, sources: Sequence[EngineCoreRequest], wave: int = 0
) -> list[Request]:
    convert, requests = policy_arguments(policy), []
    for index, source in enumerate(sources):
        named = msgspec.structs.replace(source, request_id=f"{source.request_id}.{wave}")
        requests.append(Request(named, order=wave * len(sources) + index))
        requests[-1].arguments = convert.of(named)
    return requests


def _add(policy: SchedulingPolicy, request: Request) -> tuple[Any, Any]:
    policy.added(request)
    return policy.key(request), policy.group(request)


def _run(policy: SchedulingPolicy, request: Request, max_tokens: int) -> None:
    count = min(max_tokens, request.num_tokens - request.num_computed_tokens)
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
        raise RETURN_VALUES.violation(
            f"{method}() returned {short_repr(first)} and {short_repr(second)}, which do not "
            f"compare: {type(cause).__name__}: {cause}",
            "return values of one type, such as tuples of numbers",
        ) from cause


def _check_order(method: str, keys: Sequence[Any], owners: Sequence[Any]) -> None:
    """Check that `<` is a strict weak order of the keys: asymmetric and transitive."""
    for (i, a), (j, b) in permutations(enumerate(keys), 2):
        if _less(method, a, b) and _less(method, b, a):
            raise Violation(
                f"{method} of {owners[i]!r} and {owners[j]!r} are each less than the other",
                "return keys of a type with an ordered <",
            )
    for (i, a), (_, b), (k, c) in permutations(enumerate(keys), 3):
        in_order = not _less(method, b, a) and not _less(method, c, b)
        if in_order and _less(method, c, a):
            raise Violation(
                f"{method}: {short_repr(a)} is not after {short_repr(b)}, which is not after "
                f"{short_repr(c)}, but {short_repr(c)} of {owners[k]!r} goes before "
                f"{short_repr(a)} of {owners[i]!r}",
                "return keys of a type with an ordered <; NaN is not ordered",
            )


def _attributes(request: Request) -> dict[str, Any]:
    return {name: snapshot(getattr(request, name)) for name in Request.__slots__}
