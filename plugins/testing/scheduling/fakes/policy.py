"""A scheduling policy with recorded and checked calls and return values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hardpoint.plugins import EngineCoreRequest, Request, SchedulingPolicy
from hardpoint.testing.declared import declared_result
from hardpoint.testing.engine_access import policy_arguments
from hardpoint.testing.scheduling.rules import POLICY_CALLS
from hardpoint.testing.suite import Rule, Violation, short_repr

RETURN_VALUES = Rule(
    "return values: each method returns a result as the contract states, and raises nothing",
    "return a comparable key, a hashable group, None or a reason, and a victim that is running",
)

_NOTIFICATIONS = ("added", "scheduled", "preempted", "finished")


class PolicyMonitor:
    """Records and checks the calls of a scheduling policy.

    Attributes:
        unfinished: requests added and not finished, by id.
        tokens: by id, the tokens passed to `scheduled` since `begin_step`.
        first_violation: the first wrong return value; later ones may follow from it.
        methods: names of the methods that the policy overrides.
    """

    def __init__(self, policy: SchedulingPolicy, methods: frozenset[str]) -> None:
        self.methods = methods
        self._convert = policy_arguments(policy)
        self._arguments: dict[str, tuple[EngineCoreRequest, Any]] = {}
        self.unfinished: dict[str, Request] = {}
        self.tokens: dict[str, int] = {}
        self.first_violation: Violation | None = None

    def give_arguments(self, request: Request) -> None:
        """Set the arguments that a request has for the policy, as the engine does."""
        source = request.source
        known = self._arguments.get(source.request_id)
        if known is None or known[0] is not source:  # ids are used again
            known = self._arguments[source.request_id] = (source, self._convert.of(source))
        request.arguments = known[1]

    def begin_step(self) -> None:
        """Clear the tokens of the last step."""
        self.tokens = {}

    def check_scheduled(self, expected: dict[str, int]) -> None:
        """Check that `scheduled` got the tokens of the plan."""
        recorded = {name: self.tokens.get(name, 0) for name in expected}
        if recorded != expected:
            raise POLICY_CALLS.violation(
                f"scheduled() got the tokens {recorded}, the plan has {dict(expected)}"
            )

    def added(self, request: Request) -> None:
        """Record that a request was added."""
        if request.request_id in self.unfinished:
            raise POLICY_CALLS.violation(f"added({request!r}) twice")
        self.unfinished[request.request_id] = request

    def scheduled(self, request: Request, tokens: int) -> None:
        """Record the tokens scheduled for a request."""
        self._check_unfinished("scheduled", request)
        before = self.tokens.get(request.request_id, 0)
        self.tokens[request.request_id] = before + tokens

    def preempted(self, request: Request) -> None:
        """Record that a request was preempted."""
        self._check_unfinished("preempted", request)

    def finished(self, request: Request) -> None:
        """Record that a request finished."""
        self._check_unfinished("finished", request)
        del self.unfinished[request.request_id]

    def record(self, violation: Violation) -> Violation:
        """Record a violation by a call; return the first one."""
        self.first_violation = self.first_violation or violation
        return self.first_violation

    def _check_unfinished(self, method: str, request: Request) -> None:
        if self.unfinished.get(request.request_id) is not request:
            raise POLICY_CALLS.violation(
                f"{method}({request!r}) without added(), or after finished()"
            )


def monitor_policy(policy: SchedulingPolicy) -> tuple[SchedulingPolicy, PolicyMonitor]:
    """Return a policy that forwards every call to `policy`, and the monitor of these calls.

    It overrides `key`, `added`, `finished` and the methods that `policy` overrides: a scheduler
    may skip the others.
    """
    overridden = policy.overridden | {"key"}
    monitor = PolicyMonitor(policy, overridden)
    methods: dict[str, Any] = {"contract": 1, "state_format": policy.state_format}
    for name in ("Arguments", "Prepared", "prepare"):
        if hasattr(policy, name):
            methods[name] = getattr(type(policy), name)
    methods["__init__"] = lambda _self, _context: None
    for name in overridden | {"added", "finished"}:
        methods[name] = _monitored_method(policy, name, monitor)
    for name in ("export_state", "import_state"):
        methods[name] = _forward(getattr(policy, name))
    monitored = type(f"Monitored{type(policy).__name__}", (SchedulingPolicy,), methods)(
        policy.context
    )
    monitored.context = policy.context
    monitored.name, monitored.options = policy.name, policy.options
    return monitored, monitor


def _forward(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _self, *arguments: method(*arguments)


def _monitored_method(
    policy: SchedulingPolicy, name: str, monitor: PolicyMonitor
) -> Callable[..., Any]:
    def call(_self: SchedulingPolicy, *args: Any) -> Any:
        for argument in args:
            for request in argument if isinstance(argument, Sequence) else (argument,):
                if isinstance(request, Request):
                    monitor.give_arguments(request)
        if name in _NOTIFICATIONS:
            getattr(monitor, name)(*args)
        try:
            result = getattr(policy, name)(*args)
            declared_result(RETURN_VALUES, SchedulingPolicy, name, result, args)
        except Violation as violation:
            raise monitor.record(violation) from None
        except Exception as cause:
            arguments = ", ".join(map(short_repr, args))
            message = f"{name}({arguments}) raised {type(cause).__name__}: {cause}"
            raise monitor.record(RETURN_VALUES.violation(message)) from cause
        return result

    return call
