"""A scheduling policy under watch: what it answers, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from hardpoint.plugins import Load, Request, SchedulingPolicy
from hardpoint.testing.scheduling.checks.names import POLICY, BrokenRule, Rule
from hardpoint.testing.suite import short

ANSWERS = Rule(
    "answers: each method returns what the contract says, and raises nothing",
    "return a key that compares, a group that hashes, None or words, and one of those that run",
)

_TOLD = ("added", "scheduled", "preempted", "finished")
_ASKED = ("key", "group", "group_key", "admit", "victim")


class Ledger:
    """What a policy was told and has answered.

    Attributes:
        live: requests that came and did not end, by id.
        tokens: by id, what `scheduled` told since `begin_step`.
        first: the first answer that was wrong; later ones may follow from it.
        methods: those that the policy overrides.
    """

    def __init__(self, methods: frozenset[str]) -> None:
        """Begin with nothing."""
        self.methods = methods
        self.live: dict[str, Request] = {}
        self.tokens: dict[str, int] = {}
        self.first: BrokenRule | None = None

    def begin_step(self) -> None:
        """Forget what the last step scheduled."""
        self.tokens = {}

    def check_scheduled(self, expected: dict[str, int]) -> None:
        """The step's tokens were told."""
        told = {name: self.tokens.get(name, 0) for name in expected}
        if told != expected:
            raise POLICY.broken(
                f"scheduled() was told of {told} tokens, the plan has {dict(expected)}"
            )

    def added(self, request: Request) -> None:
        """A request came."""
        if request.request_id in self.live:
            raise POLICY.broken(f"added({request!r}) twice")
        self.live[request.request_id] = request

    def scheduled(self, request: Request, tokens: int) -> None:
        """A request got tokens."""
        self._check_live("scheduled", request)
        before = self.tokens.get(request.request_id, 0)
        self.tokens[request.request_id] = before + tokens

    def preempted(self, request: Request) -> None:
        """A request lost its blocks."""
        self._check_live("preempted", request)

    def finished(self, request: Request) -> None:
        """A request ended."""
        self._check_live("finished", request)
        del self.live[request.request_id]

    def _check_live(self, method: str, request: Request) -> None:
        if self.live.get(request.request_id) is not request:
            raise POLICY.broken(
                f"{method}({request!r}), of which added() did not tell, or finished() did"
            )


def watched(policy: SchedulingPolicy) -> tuple[SchedulingPolicy, Ledger]:
    """Return a policy that answers as `policy` does, under watch, and what it learns.

    It overrides what `policy` overrides and nothing else, so that a scheduler which leaves out
    calls that nobody waits for goes the same way.
    """
    own = policy.overridden | {"key"}
    ledger = Ledger(own)
    methods: dict[str, Any] = {"contract": 1, "state_format": policy.state_format}
    methods["__init__"] = lambda _self, _context: None
    for name in own | {"added", "finished"}:
        methods[name] = _method(policy, name, ledger)
    for name in ("export_state", "import_state"):
        methods[name] = _passed_on(getattr(policy, name))
    watch = type(f"Watched{type(policy).__name__}", (SchedulingPolicy,), methods)(policy.context)
    watch.context, watch.name, watch.options = policy.context, policy.name, policy.options
    return watch, ledger


def _passed_on(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _self, *given: method(*given)


def _method(policy: SchedulingPolicy, name: str, ledger: Ledger) -> Callable[..., Any]:
    def call(_self: SchedulingPolicy, *given: Any) -> Any:
        if name in _TOLD:
            getattr(ledger, name)(*given)
        try:
            answer = getattr(policy, name)(*given)
        except Exception as cause:
            ledger.first = ledger.first or ANSWERS.broken(
                f"{name}({', '.join(map(short, given))}) raised {type(cause).__name__}: {cause}"
            )
            raise ledger.first from cause
        wrong = _CHECKS[name](answer, *given) if name in _ASKED else None
        if wrong is not None:
            ledger.first = ledger.first or ANSWERS.broken(
                f"{name}({', '.join(map(short, given))}) returned {short(answer)}, {wrong}"
            )
            raise ledger.first
        return answer

    return call


def _check_key(key: Any, *_: Any) -> str | None:
    try:
        bad = bool(key < key)
    except Exception as cause:
        return f"which does not compare: {type(cause).__name__}: {cause}"
    return "which is less than itself" if bad else None


def _check_group(group: Hashable, *_: Any) -> str | None:
    try:
        hash(group)
    except TypeError as cause:
        return f"which does not hash: {cause}"
    return None


def _check_admit(reason: Any, *_: Any) -> str | None:
    if reason is None or (isinstance(reason, str) and reason):
        return None
    return "which is neither None nor words"


def _check_victim(victim: Any, running: Sequence[Request], _load: Load) -> str | None:
    return None if any(victim is request for request in running) else "which does not run"


_CHECKS: dict[str, Callable[..., str | None]] = {
    "key": _check_key,
    "group": _check_group,
    "group_key": _check_key,
    "admit": _check_admit,
    "victim": _check_victim,
}
