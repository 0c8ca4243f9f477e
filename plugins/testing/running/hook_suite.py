"""The conformance suite for hooks; the built-in ones pass it too."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import msgspec
import pytest

from hardpoint import typed
from hardpoint.plugins import (
    Command,
    CompletionOutput,
    EngineConfig,
    EngineCoreRequest,
    HardpointError,
    RequestOutput,
    SamplingParams,
    StepRecord,
)
from hardpoint.plugins.server.hook_specs import HookSpecs
from hardpoint.testing.engine_access import HookSet, open_hooks, provided_components
from hardpoint.testing.pace import cost_of, own_seconds
from hardpoint.testing.suite import (
    ConformanceSuite,
    Rule,
    Violation,
    checks,
    reject_replaced_tests,
    short_repr,
)
from hardpoint.testing.threads import in_thread, until
from hardpoint.typed import read_only

from .extension_checks import EXTENSIONS, check_extensions

CONTRACT = Rule(
    "contract: the loader accepts it, and every hook has the name and arguments that are specified",
    "add or correct the member in the message",
)
VALID = Rule(
    "valid calls: a hook raises nothing for a valid call; request_received may refuse a request",
    "handle this case; to refuse a request, raise a ValueError",
)
READS = Rule(
    "reads only: a hook changes none of its arguments but the request of request_received",
    "copy a value before you change it",
)
REQUEST = Rule(
    "request: request_received leaves a valid request with the same identity",
    "leave request_id, external_req_id, child_index and client_index, and set valid values",
)
COMPLETIONS = Rule(
    "completions: request_received treats the n completions of a request alike",
    "let the change depend on the request alone, not on how many calls there were",
)
LIFECYCLE = Rule(
    "lifecycle: engines may start and close several times in one process, in any order",
    "keep no state that a second engine, or a close without a start, finds in its way",
)
PROMPT = Rule(
    "prompt: a hook returns at once",
    "hand long work to a thread of your own",
)
COMPONENTS = Rule(
    "components: hardpoint_components returns components by name, the same each time",
    "return classes that the loader accepts, by names, and define none of them in the call",
)
COMMANDS = Rule(
    "commands: cli_commands returns a list of Command, the same each time",
    "return a list of hardpoint.plugins.Command; CommandSuite tests each of them",
)

_NAMES = tuple(name for name in vars(HookSpecs) if not name.startswith("_"))
_IDENTITY = ("request_id", "external_req_id", "child_index", "client_index")
_LIMIT_SECONDS = 2.0
_WRITES = re.compile("immutable|read-only|does not support item")
"""Messages of Python and the read-only types about a change."""


class HookSuite(ConformanceSuite):
    """Base class of a test class, which sets `hooks`.

    Attributes:
        hooks: the module, class or object under test; a class gets `options`.
        budget_us_per_step: maximum microseconds of `step_planned`; None does not measure.
        budget_us_per_request: maximum microseconds of each hook of a request; None likewise.
    """

    hooks: ClassVar[Any]
    budget_us_per_step: ClassVar[float | None] = 1000.0
    budget_us_per_request: ClassVar[float | None] = 20_000.0

    def _component(self) -> type[Any]:
        target = vars(type(self)).get("hooks", self.hooks)
        if inspect.isclass(target):
            return target
        if isinstance(target, ModuleType):
            package, _, name = target.__name__.rpartition(".")
            return type(name, (), {"__module__": package or name})
        return type(target)

    def _target(self) -> Any:
        # A function of a class would become a method of the test.
        return inspect.getattr_static(type(self), "hooks")

    def test_contract(self) -> None:
        """The loader accepts it. Each hook has a name and arguments that are specified; a function
        with the name of a hook is marked with `hookimpl`.
        """
        self._run_checks(
            CONTRACT.text,
            lambda: reject_replaced_tests(type(self), HookSuite),
            lambda: _close(self._open()),
            self._check_marks,
        )

    @checks(VALID)
    def test_valid_calls(self) -> None:
        """No hook raises for a valid call, among them outputs without tokens and steps without
        requests, nor mutates its inputs. `request_received` may refuse by a ValueError.
        """
        hooks, config = self._opened()
        for name, arguments in _calls(config):
            if hooks.has(name):
                _call(hooks, name, arguments)

    def test_requests(self) -> None:
        """After `request_received`, a request is valid and still the same one, and it is alike for
        the `n` completions of a request.
        """
        self._needs("request_received")
        self._run_checks(REQUEST.text, self._check_requests, self._check_completions)

    @checks(LIFECYCLE)
    def test_lifecycle(self) -> None:
        """Engines start and close several times, in any order."""
        hooks, config = self._opened()
        order = ("started", "closing", "started", "closing", "closing", "started", "started")
        for index, event in enumerate(order):
            name = f"engine_{event}"
            if not hooks.has(name):
                continue
            try:
                _call(hooks, name, _started(config) if event == "started" else {})
            except Violation as violation:
                raise LIFECYCLE.violation(
                    f"{violation.observed}, after {', '.join(order[:index]) or 'nothing'}"
                ) from violation

    def test_prompt(self) -> None:
        """No hook blocks, and hooks of steps and requests keep their budgets."""
        self._run_checks(PROMPT.text, self._check_blocking, self._check_speed)

    def test_components(self) -> None:
        """`hardpoint_components` returns components that the loader accepts, the same each time."""
        self._needs("hardpoint_components")
        self._run_checks(COMPONENTS.text, self._check_components)

    def test_commands(self) -> None:
        """`cli_commands` returns a list of `Command` with distinct names, the same each time."""
        self._needs("cli_commands")
        self._run_checks(COMMANDS.text, self._check_commands)

    def test_server_extensions(self) -> None:
        """`server_extensions` returns valid extensions. Routes and middleware answer each request
        once and whole, with a status and headers that HTTP can carry; transforms return bodies; an
        authenticator returns a `Client` or None, also for malformed headers.
        """
        self._needs("server_extensions")
        self._run_checks(EXTENSIONS.text, lambda: check_extensions(*self._opened()))

    def _open(self) -> HookSet:
        return self._opened()[0]

    def _opened(self) -> tuple[HookSet, EngineConfig]:
        try:
            return open_hooks(self._target(), self.name or "under_test", self.options)
        except HardpointError as error:
            raise CONTRACT.violation(str(error)) from error

    def _check_components(self) -> None:
        components = []
        for _ in range(2):
            try:
                components.append(provided_components(self._target(), self.name or "under_test"))
            except HardpointError as error:
                raise COMPONENTS.violation(str(error)) from error
        if components[0] != components[1]:
            raise COMPONENTS.violation(f"it returned {components[0]}, then {components[1]}")

    def _needs(self, hook: str) -> None:
        if not self._open().has(hook):
            pytest.skip(f"it does not implement {hook}")

    def _check_marks(self) -> None:
        target, hooks = self._target(), self._open()
        for name in _NAMES:
            if callable(getattr(target, name, None)) and not hooks.has(name):
                raise CONTRACT.violation(
                    f"{name} is not marked with hookimpl, so nothing calls it",
                    "mark it with @hookimpl",
                )

    def _check_requests(self) -> None:
        hooks = self._open()
        for request in _requests():
            before = {field: getattr(request, field) for field in _IDENTITY}
            if _call(hooks, "request_received", {"request": request}) is None:
                continue
            for field, value in before.items():
                if (now := getattr(request, field)) != value:
                    raise REQUEST.violation(f"it changed {field} from {value!r} to {now!r}")
            if not request.prompt_token_ids:
                raise REQUEST.violation("it left a request without prompt_token_ids")
            try:
                typed.convert(msgspec.to_builtins(request.params), SamplingParams, path="params")
                msgspec.convert(msgspec.to_builtins(request), EngineCoreRequest)
            except (HardpointError, msgspec.ValidationError) as error:
                raise REQUEST.violation(f"it left an invalid value: {error}") from error

    def _check_completions(self) -> None:
        hooks = self._open()
        for first, second in zip(_requests(), _requests(child=1), strict=True):
            results = [
                _call(hooks, "request_received", {"request": request})
                for request in (first, second)
            ]
            if None in results:
                continue
            for field in ("prompt_token_ids", "params", "priority", "tags"):
                first_value, other = getattr(first, field), getattr(second, field)
                if first_value != other:
                    raise COMPLETIONS.violation(
                        f"of two completions of one request, the first got {field} "
                        f"{short_repr(first_value)} and the second {short_repr(other)}"
                    )

    def _check_blocking(self) -> None:
        hooks, config = self._opened()
        for name, arguments in _calls(config):
            if hooks.has(name) and not _returns(lambda: _quietly(hooks, name, arguments)):  # noqa: B023 - called at once
                raise PROMPT.violation(f"{name} had not returned after {_LIMIT_SECONDS:g} s")

    def _check_speed(self) -> None:
        hooks, config = self._opened()
        budgets = {
            "step_planned": self.budget_us_per_step,
            "request_received": self.budget_us_per_request,
            "request_finished": self.budget_us_per_request,
        }
        for name, budget in budgets.items():
            if budget is None or not hooks.has(name):
                continue

            def measure(name: str = name) -> float:
                arguments = next(arguments for hook, arguments in _calls(config) if hook == name)
                began = own_seconds()
                _quietly(hooks, name, arguments)
                return own_seconds() - began

            cost = cost_of(measure, budget / 1e6, rounds=8) * 1e6
            if cost > budget:
                raise PROMPT.violation(
                    f"{name} took {cost:.0f} microseconds, the budget is {budget:g}"
                )

    def _check_commands(self) -> None:
        hooks, names = self._open(), []
        for _ in range(2):
            commands = (_call(hooks, "cli_commands", {}) or [None])[0]
            if not isinstance(commands, Sequence) or not all(
                isinstance(command, Command) for command in commands
            ):
                raise COMMANDS.violation(f"cli_commands returned {short_repr(commands)}")
            names.append([command.name for command in commands])
        if len(set(names[0])) < len(names[0]):
            raise COMMANDS.violation(f"two of its commands have one name: {names[0]}")
        if names[0] != names[1]:
            raise COMMANDS.violation(f"it returned {names[0]}, and then {names[1]}")


_INFO = {
    "model": "scripted",
    "dtype": "float32",
    "max_model_len": 512,
    "num_blocks": 8,
    "load_seconds": 0.5,
}


def _call(hooks: HookSet, name: str, arguments: dict[str, Any]) -> list[Any] | None:
    """Call a hook; return its results, None if it refused the request.

    Raises:
        Violation: it raised something else, or mutated its inputs.
    """
    before = short_repr(arguments) if name != "request_received" else ""
    try:
        results = hooks.call(name, **arguments)
    except HardpointError as error:
        cause = error.__cause__ or error
        if name == "request_received" and isinstance(cause, ValueError):
            return None
        if isinstance(cause, TypeError | AttributeError) and _WRITES.search(str(cause)):
            raise READS.violation(f"{name} tried to change its argument: {cause}") from error
        raise VALID.violation(f"{name} raised {type(cause).__name__}: {cause}") from error
    if name != "request_received" and short_repr(arguments) != before:
        raise READS.violation(f"{name} changed its argument, which was {before}")
    return results


def _quietly(hooks: HookSet, name: str, arguments: dict[str, Any]) -> None:
    try:
        hooks.call(name, **arguments)
    except HardpointError:
        pass  # another test is about it


def _returns(call: Callable[[], None]) -> bool:
    """Return whether a call returns in time; it goes on in a thread if not."""
    return until(in_thread(call).done, _LIMIT_SECONDS)


def _close(_hooks: HookSet) -> None:
    """Drop hooks that were opened to see whether they can be."""


def _started(config: EngineConfig) -> dict[str, Any]:
    return {"info": read_only(_INFO), "config": config}


def _calls(config: EngineConfig) -> list[tuple[str, dict[str, Any]]]:
    record = StepRecord(
        step=1,
        timestamp=0.5,
        scheduled={"r-1": 3},
        new=["r-1"],
        resumed=[],
        preempted={"r-2": "blocks ran out"},
        finished=[],
        timed_out=[],
        waiting={},
        num_running=1,
        num_waiting=1,
        num_free_blocks=4,
        token_budget=16,
    )
    empty = msgspec.structs.replace(record, scheduled={}, new=[], preempted={}, num_running=0)
    calls: list[tuple[str, dict[str, Any]]] = [("engine_started", _started(config))]
    calls += [("step_planned", {"record": read_only(step)}) for step in (record, empty)]
    calls += [("request_received", {"request": request}) for request in _requests()]
    calls += [("request_finished", {"output": read_only(output)}) for output in _outputs()]
    return [*calls, ("engine_closing", {})]


def _requests(child: int = 0) -> list[EngineCoreRequest]:
    plain = SamplingParams(max_tokens=4, seed=1)
    rich = SamplingParams(max_tokens=1, seed=2, temperature=0.0, n=2, stop=["x"], logprobs=1)
    return [
        EngineCoreRequest(
            request_id=f"{child}_r-1",
            prompt_token_ids=[1],
            params=plain,
            external_req_id="r-1",
            child_index=child,
        ),
        EngineCoreRequest(
            request_id=f"{child}_r-2",
            prompt_token_ids=list(range(40)),
            params=rich,
            external_req_id="r-2",
            child_index=child,
            priority=3,
            tags={"tenant": "acme"},
            timeout=5.0,
            cache_salt="s",
        ),
    ]


def _outputs() -> list[RequestOutput]:
    def completion(index: int, reason: str) -> CompletionOutput:
        text, ids = ("", []) if reason == "error" else ("ab", [97, 98])
        return CompletionOutput(index=index, text=text, token_ids=ids, finish_reason=reason)

    return [
        RequestOutput(
            request_id="r-1",
            prompt=prompt,
            prompt_token_ids=[1],
            outputs=[completion(index, reason) for index, reason in enumerate(reasons)],
            finished=True,
        )
        for prompt, reasons in (
            (None, ["length"]),
            ("say", ["stop", "length"]),
            ("say", ["error"]),
        )
    ]
