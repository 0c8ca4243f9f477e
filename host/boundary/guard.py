"""The guard around a plugin's component, from the contract's declaration of each method.

Each call is recorded and timed, its result checked. What a plugin does wrong is reported with its
cause, and the declared default decides in its place; without one, it is an error that names it.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, NoReturn, TypeVar, cast

from hardpoint.errors import HardpointError, PluginFaultError, RequestError, shown
from hardpoint.host.registry.blame import StateAtFault, describe, raise_unless_fault, responsible
from hardpoint.host.registry.kinds import KINDS
from hardpoint.host.system.plugin_settings import changed
from hardpoint.plugins.component import Component, Source
from hardpoint.plugins.component.behaviour import (
    ORDERED,
    Behaviour,
    Default,
    Returned,
    UnusableError,
    behaviour_of,
)

from .activity import Activity, PluginCalls

FaultReporter = Callable[[str, BaseException | None], None]
"""Called with a message such as "victim() returned None", and the cause or None."""

C = TypeVar("C", bound=Component)
T = TypeVar("T")

HandOver = Mapping[str, Callable[[Any], Any]]
"""By the name of a first parameter, what makes of an argument what the plugin gets."""

Uses = Mapping[str, Callable[[Any], Any]]
"""By the name of a method, what makes of its checked result what the engine uses."""

PASSING = Behaviour(None, None, raises=(HardpointError,))
"""Of calls whose errors of Hardpoint's tree pass: they name what failed."""
_NAMED = Behaviour(None, None)
_declared = functools.cache(behaviour_of)
UNWATCHED = Activity()
"""Records the calls of a frontend, which has no watchdog."""

_short = functools.partial(shown, limit=60)


class Guarded:
    """Base of guarded components, besides the base of their kind.

    Members that its interface does not have are the component's own.

    Attributes:
        wrapped: the component.
        boundary: the boundary that its calls pass.
        reads: read its properties, by name.
    """

    wrapped: Any
    boundary: Boundary
    reads: dict[str, Callable[[], Any]]

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["wrapped"], name)


class Boundary:
    """The boundary that the calls of one component pass.

    Attributes:
        report: the reporter of faults for which a default decides.
        calls: record and time its methods.
        failing: names of the methods that had a fault.
    """

    def __init__(
        self, report: FaultReporter, calls: PluginCalls, component: Component | None = None
    ) -> None:
        """Store both; they are the attributes. The state of `component` is logged at a fault."""
        self.report, self.calls = report, calls
        self._state = StateAtFault(component, calls.source)
        self.failing: set[str] = set()

    @classmethod
    def naming(cls, kind: str, source: Source) -> Boundary:
        """Return the boundary of a component without default methods."""
        return cls(_unreported, PluginCalls(UNWATCHED, kind, source))

    def method(
        self,
        name: str,
        behaviour: Behaviour,
        function: Callable[..., Any],
        declared: Callable[..., Any],
        hand_over: HandOver,
    ) -> Callable[..., Any]:
        """Return a method that raises nothing and returns usable values.

        Args:
            function: the component's.
            declared: the interface's.
        """
        parameters = inspect.signature(declared).parameters
        first = next(islice(parameters, 1, None), "")
        adapt = hand_over.get(first)
        if behaviour.returned is ORDERED:
            behaviour = _sortable(behaviour, SortKeys(name, first, self))
        check = None if behaviour.returned is None else behaviour.returned.check
        assert behaviour.otherwise is not None, "`named` is for methods without a default"
        otherwise = behaviour.otherwise.decide
        calls, clock = self.calls, time.perf_counter
        cells, number, reads = calls.cells, calls.number(name), calls.settings

        def call(*args: Any, **more: Any) -> Any:
            if more:
                args = inspect.signature(declared).bind(None, *args, **more).args[1:]
            outer, cells[0], began = cells[0], number, clock()
            settings = None if reads is None else reads[0]()
            try:
                adapted = args if adapt is None else (adapt(args[0]), *args[1:])
                value = function(*adapted)
                return None if check is None else check(value, adapted, args)
            except BaseException as cause:
                self._failed(name, _call_text(name, first, args), cause)
                return otherwise(*args)
            finally:
                if reads is not None and reads[0]() != settings:
                    changed(settings, calls.source, name)
                calls.seconds += clock() - began
                cells[0] = outer

        def scheduled(request: Any, tokens: int) -> Any:
            """Do as `call` does, in half the time: for each running request and step."""
            outer, cells[0], began = cells[0], number, clock()
            try:
                value = function(request if adapt is None else adapt(request), tokens)
                return None if value is None or check is None else check(value, (), ())
            except BaseException as cause:
                return self._failed(name, _call_text(name, first, (request,)), cause)
            finally:
                calls.seconds += clock() - began
                cells[0] = outer

        is_frequent = list(parameters) == ["self", "request", "tokens"] and reads is None
        return scheduled if is_frequent else call

    def _failed(self, name: str, text: str, error: BaseException) -> None:
        problem, cause = _problem(error)
        self.failing.add(name)
        self._state.log()
        self.report(f"{text} {problem}", cause)

    def named(
        self,
        name: str,
        behaviour: Behaviour,
        function: Callable[..., Any],
        use: Callable[[Any], Any] | None = None,
    ) -> Callable[..., Any]:
        """Return a method whose errors name the plugin and the outcome for its caller.

        Args:
            use: converts its checked result for the engine.
        """
        check = None if behaviour.returned is None else behaviour.returned.check
        run = self.calls.run

        def call(*args: Any, **more: Any) -> Any:
            try:
                value = run(name, function, *args, **more)
                if check is not None:
                    value = check(value, args, args)
                return value if use is None else use(value)
            except BaseException as cause:
                self.end(name, cause, behaviour)

        return functools.cache(call) if behaviour.once else call

    def end(
        self, name: str, error: BaseException, behaviour: Behaviour = _NAMED, of: str = ""
    ) -> NoReturn:
        """End a call that failed.

        Args:
            error: raised by the method, or an UnusableError.
            of: what it was called for, as a part of the message. The component itself is named
                then, and none that it called.

        Raises:
            PluginFaultError: names the plugin.
            RequestError: the same, of a method with faults that refuse the request.
            BaseException: the error itself, if it is meant for the caller or names a plugin.
        """
        problem, cause = _problem(error)
        # A fault that names another plugin passes, as does what the contract allows.
        naming = () if behaviour.refuses else (PluginFaultError,)
        if isinstance(error, (*naming, *behaviour.raises)):
            raise error
        source = self.calls.source
        self._state.log()
        if cause is error and not of:  # with it, the component itself is named
            source, name = responsible(error, source, name)
        if of:
            problem += f" {of}" if cause is error else f", {of}"
        message = f"its {name} {problem}" + (f": {describe(cause)}" if cause is not None else "")
        if behaviour.refuses:
            raise RequestError(f"{behaviour.refuses} {source.name!r}: {message}") from cause
        fault = PluginFaultError(f"{source}: {message}")
        fault.plugin = source.name
        raise fault from cause


def _problem(error: BaseException) -> tuple[str, BaseException | None]:
    """Return the problem of a failed call and its cause; raise an error that is no fault."""
    unusable = isinstance(error, UnusableError)
    raised = error.__context__ if unusable else error
    if raised is not None:
        raise_unless_fault(raised)
    return (str(error), error.__cause__) if unusable else ("failed", error)


def _unreported(message: str, cause: BaseException | None) -> None:
    raise AssertionError(f"no default is declared that could decide: {message}") from cause


def guard(
    component: C,
    kind: str,
    report: FaultReporter | None = None,
    calls: PluginCalls | None = None,
    hand_over: HandOver | None = None,
    uses: Uses | None = None,
) -> C:
    """Return a guarded component of the same kind; its methods behave as declared.

    Methods with a default raise nothing, the others errors that name the plugin. Undeclared
    methods are recorded and timed; with `report`, their own errors are raised.

    Args:
        report: is called with each fault for which a default decides; None if no method has one.
        hand_over: for the arguments of its methods.
        uses: for the results of its methods without a default.
    """
    interface = KINDS[kind].interface
    assert interface is not None, "functions are guarded by HookSet"
    cls = _guarded_type(interface)
    guarded = cls.__new__(cls)
    context = component.context
    source = context.source or Source(context.name, "", "", "", "")
    calls = calls or PluginCalls(UNWATCHED, kind, source)
    boundary = Boundary(_unreported if report is None else report, calls, component)
    members, use = vars(guarded), (uses or {}).get
    members.update(wrapped=component, boundary=boundary, context=context)
    members.update(name=context.name, options=context.options)
    members["reads"] = {
        name: boundary.named(name, declared, functools.partial(getattr, component, name), use(name))
        for name, declared in _declared_properties(interface)
    }
    for name, declared in _methods(interface):
        function = getattr(component, name)
        behaviour = behaviour_of(interface, name) or (_NAMED if report is None else None)
        if behaviour is None:
            members[name] = boundary.calls.bound(name, function)
        elif behaviour.otherwise is None:
            # Looked up with each call, which costs little: a tokenizer may change its methods.
            function = functools.partial(_call, component, name)
            members[name] = boundary.named(name, behaviour, function, use(name))
        else:
            members[name] = boundary.method(name, behaviour, function, declared, hand_over or {})
    return cast(C, guarded)


def checked(
    value: T, interface: type, method: str, plugin: object, *, arguments: Sequence[Any] = ()
) -> T:
    """Return a method's result, checked as declared; for calls that are written by hand.

    Args:
        method: its name as messages have it, with or without "()".
        arguments: its arguments, where the check needs them.

    Raises:
        PluginFaultError: it is something else.
    """
    behaviour = _declared(interface, method.removesuffix("()"))
    assert behaviour is not None
    assert behaviour.returned is not None, f"nothing is declared of {method}"
    try:
        return cast(T, behaviour.returned.check(value, arguments, arguments))
    except UnusableError as wrong:
        raise PluginFaultError(f"{plugin}: its {method} {wrong}") from wrong.__cause__


def boundary_of(component: Component) -> Boundary:
    """Return the boundary that the calls of a guarded component pass."""
    assert isinstance(component, Guarded), "it comes from guard()"
    return component.boundary


@functools.cache
def _guarded_type(interface: type[Component]) -> type[Component]:
    methods = {name for name, _ in _methods(interface)}
    members = {
        name: property(attrgetter(f"wrapped.{name}"))
        for name in dir(interface)
        if not name.startswith("_") and name not in methods and not hasattr(Component, name)
    }
    for name, _ in _declared_properties(interface):
        members[name] = property(functools.partial(_read, name))
    cls: Any = type(
        f"Guarded{interface.__name__}", (Guarded, interface), {"contract": 1, **members}
    )
    cls.__abstractmethods__ = frozenset()  # each guarded component has them itself
    return cast(type[Component], cls)


def _call(component: Component, method: str, /, *args: Any, **more: Any) -> Any:
    return getattr(component, method)(*args, **more)


def _read(name: str, guarded: Guarded) -> Any:
    return guarded.reads[name]()


@functools.cache
def _declared_properties(interface: type[Component]) -> list[tuple[str, Behaviour]]:
    members = ((name, inspect.getattr_static(interface, name)) for name in dir(interface))
    names = [name for name, member in members if isinstance(member, property)]
    return [(name, declared) for name in names if (declared := behaviour_of(interface, name))]


@functools.cache
def _methods(interface: type[Component]) -> list[tuple[str, Callable[..., Any]]]:
    members = ((name, inspect.getattr_static(interface, name)) for name in dir(interface))
    return [(name, f) for name, f in members if inspect.isfunction(f) and not name.startswith("_")]


def _call_text(name: str, first: str, args: Sequence[Any]) -> str:
    match first:
        case "request":
            return f"{name}() of request {_short(args[0].request_id)}"
        case "group":
            return f"{name}() of group {_short(args[0])}"
        case "block_ids":
            return f"{name}() of {blocks(len(args[0]))}"
        case "count":
            return f"{name}({args[0]})"
    return f"{name}()"


def blocks(number: int) -> str:
    """Return a number of blocks as text."""
    return "1 block" if number == 1 else f"{number} blocks"


def _sortable(behaviour: Behaviour, keys: SortKeys) -> Behaviour:
    """Return the behavior of a method with wrapped values, so that all of them compare."""
    returned, default = behaviour.returned, behaviour.otherwise
    assert returned is not None
    assert default is not None
    decide = default.decide

    def check(value: Any, adapted: Sequence[Any], args: Sequence[Any]) -> SortKey:
        returned.check(value, adapted, args)
        return SortKey(keys.owner(args), decide(*args), value, keys)

    def otherwise(*args: Any) -> SortKey:
        return SortKey(keys.owner(args), decide(*args))

    return Behaviour(Returned(returned.text, check), Default(default.text, otherwise))


class SortKeys:
    """The sort keys that one method gave; reports keys that do not compare."""

    def __init__(self, name: str, first: str, boundary: Boundary) -> None:
        """`name` and `first` are the method's, and its first parameter's."""
        self._prefix = f"{name}() of {first}s"
        self._of_requests = first == "request"
        self._boundary = boundary

    def owner(self, args: Sequence[Any]) -> Hashable:
        """Return the id of the request, or the group, of a call."""
        owner: Hashable = args[0].request_id if self._of_requests else args[0]
        return owner

    def report(self, key: SortKey, other: SortKey, cause: BaseException) -> None:
        """Report two keys that do not compare."""
        owners = f"{_short(key.owner)} and {_short(other.owner)}"
        self._boundary.report(f"{self._prefix} {owners} do not compare", cause)


class SortKey:
    """A value to sort by that compares with every other one of its method, whatever it is.

    Where two do not compare, or one is unusable, their defaults do.
    """

    __slots__ = ("default", "is_reported", "keys", "owner", "value")

    def __init__(
        self, owner: Hashable, default: float = 0.0, value: Any = None, keys: SortKeys | None = None
    ) -> None:
        """Without `keys`, the value is not usable."""
        self.owner = owner
        self.default = default
        self.value = value
        self.keys = keys
        self.is_reported = False

    def __lt__(self, other: SortKey) -> bool:
        if self.keys is not None and other.keys is not None:
            try:
                return bool(self.value < other.value)
            except BaseException as cause:
                raise_unless_fault(cause)
                if not (self.is_reported and other.is_reported):  # once is enough
                    self.is_reported = other.is_reported = True
                    self.keys.report(self, other, cause)
        return self.default < other.default

    def __eq__(self, other: object) -> bool:
        # By order alone, so that values which only have `<` can be equal.
        return isinstance(other, SortKey) and not (self < other or other < self)

    __hash__ = None  # type: ignore[assignment]
