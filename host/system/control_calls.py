"""Typed control calls: declared once, run by an engine core, sent by name from a frontend.

A declaration is a method of a table, which is a class such as `utility_calls.ControlCalls`:

    @utility()
    def is_paused(self: UtilityHost) -> bool:
        \"\"\"Return whether the engine is paused.\"\"\"
        return self._pause.is_paused

An engine core derives from the table and runs the method. A class that derives from the table and
from SyncCaller or AsyncCaller gets a method of the same name, parameters and documentation that
sends the call; the latter's is a coroutine. On the wire a call is its name and its arguments by
position, which the engine core converts to the declared types; the caller converts the result.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from hardpoint import typed
from hardpoint.plugins import HardpointError, RequestError

P = ParamSpec("P")
R = TypeVar("R")

Function = Callable[..., Any]


class Utility(Generic[P, R]):
    """A control call: name, parameters, result type, documentation and implementation.

    Attributes:
        name: name of the call, on the wire and in Python.
        run: the implementation; its first argument is the engine core.
        has_timeout: whether `engine.call_timeout_seconds` limits it. It does not limit calls that
            may rightly take as long as requests or workers do.
    """

    def __init__(self, run: Function, *, has_timeout: bool) -> None:
        self.name = run.__name__
        self.run = run
        self.has_timeout = has_timeout
        self.__doc__ = run.__doc__
        self._signature = inspect.signature(run)

    @overload
    def __get__(self, instance: None, owner: type) -> Utility[P, R]: ...
    @overload
    def __get__(
        self, instance: AsyncCaller, owner: type
    ) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def __get__(self, instance: SyncCaller, owner: type) -> Callable[P, R]: ...
    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else MethodType(self.run, instance)

    @property
    def result_type(self) -> Any:
        """The declared type of the result."""
        return returned_type(self.run)

    def call(self, send: Callable[..., Any], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make the call through `send`, which takes the name and the arguments by position."""
        result: R = send(self.name, *self.by_position(args, kwargs))
        return result

    async def call_async(
        self, send: Callable[..., Awaitable[Any]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Make the call through `send`, as `call` does, and await the result."""
        result: R = await send(self.name, *self.by_position(args, kwargs))
        return result

    def sender(self, owner: type[SyncCaller | AsyncCaller]) -> Function:
        """Return the method of a caller class that sends this call."""
        sends: Any
        if issubclass(owner, AsyncCaller):

            async def sends(caller: AsyncCaller, *args: P.args, **kwargs: P.kwargs) -> R:
                return await self.call_async(caller._call_utility, *args, **kwargs)

        else:

            def sends(caller: SyncCaller, *args: P.args, **kwargs: P.kwargs) -> R:
                return self.call(caller._call_utility, *args, **kwargs)

        sends.__name__, sends.__doc__ = self.name, self.__doc__
        sends.__qualname__, sends.__module__ = f"{owner.__qualname__}.{self.name}", owner.__module__
        sends.__signature__ = self._signature_of_sender()
        method: Function = sends
        return method

    def run_on(self, core: object, arguments: Sequence[Any]) -> Any:
        """Run the call with arguments by position; return its result, which may be a future.

        Raises:
            RequestError: the arguments do not fit the utility's declaration.
            Exception: raised by the implementation.
        """
        converted = convert_arguments(self.run, arguments, RequestError)
        by_keyword = {
            name: value
            for (name, parameter), value in zip(
                _parameters(self.run).items(), converted, strict=False
            )
            if parameter.keyword_only
        }
        by_position = converted[: len(converted) - len(by_keyword)]
        return getattr(core, self.name)(*by_position, **by_keyword)

    def by_position(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return all arguments by position, defaults included.

        Raises:
            TypeError: as a plain call of the method would.
        """
        try:
            bound = self._signature.bind(None, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None
        bound.apply_defaults()
        return list(bound.arguments.values())[1:]

    def _signature_of_sender(self) -> inspect.Signature:
        host, *parameters = self._signature.parameters.values()
        returned = self._signature.return_annotation.removeprefix("Future[")
        if returned != self._signature.return_annotation:
            returned = returned.removesuffix("]")
        host = host.replace(annotation=inspect.Parameter.empty)
        return self._signature.replace(parameters=[host, *parameters], return_annotation=returned)


class utility:  # noqa: N801 - a decorator
    """Declares a method of a table as a control call."""

    def __init__(self, *, has_timeout: bool = True) -> None:
        self._has_timeout = has_timeout

    @overload
    def __call__(self, run: Callable[Concatenate[Any, P], Future[R]]) -> Utility[P, R]: ...
    @overload
    def __call__(self, run: Callable[Concatenate[Any, P], R]) -> Utility[P, R]: ...
    def __call__(self, run: Function) -> Utility[Any, Any]:
        """Return the utility of an implementation."""
        return Utility(run, has_timeout=self._has_timeout)


class SyncCaller:
    """Base of classes with control calls that wait for the result."""

    def __init_subclass__(cls) -> None:
        """Give the class a method for each utility that it inherits."""
        super().__init_subclass__()
        _add_senders(cls)

    def _call_utility(self, method: str, *args: Any) -> Any:
        raise NotImplementedError


class AsyncCaller:
    """Base of classes with awaitable control calls."""

    def __init_subclass__(cls) -> None:
        """Give the class a coroutine method for each utility that it inherits."""
        super().__init_subclass__()
        _add_senders(cls)

    async def _call_utility(self, method: str, *args: Any) -> Any:
        raise NotImplementedError


def _add_senders(cls: type[SyncCaller | AsyncCaller]) -> None:
    for name, declared in utilities_of(cls).items():
        setattr(cls, name, declared.sender(cls))


def utilities_of(cls: type) -> dict[str, Utility[Any, Any]]:
    """Return the utilities that a class declares or inherits and does not replace, by name."""
    members = ((name, inspect.getattr_static(cls, name)) for name in dir(cls))
    return {name: value for name, value in members if isinstance(value, Utility)}


class _Parameter(typing.NamedTuple):
    type: Any
    required: bool
    keyword_only: bool


def convert_arguments(
    method: Function, arguments: Sequence[Any], error: type[HardpointError]
) -> list[Any]:
    """Return the arguments of a method by position, `self` aside, converted to its declared types.

    Raises:
        `error`: there are too many or too few, or one is of the wrong type.
    """
    parameters = _parameters(method)
    required = sum(parameter.required for parameter in parameters.values())
    limit = len(parameters)
    if not required <= len(arguments) <= limit:
        expected = f"{limit}" if required == limit else f"{required} to {limit}"
        raise error(f"{method.__name__}: expected {expected} arguments, got {len(arguments)}")
    return [
        typed.convert(value, parameter.type, path=name, error=error)
        for value, (name, parameter) in zip(arguments, parameters.items(), strict=False)
    ]


@functools.cache
def returned_type(method: Function) -> Any:
    """Return the type that a method declares to return; of a future, the type of its result."""
    type_ = typing.get_type_hints(method)["return"]
    return typing.get_args(type_)[0] if typing.get_origin(type_) is Future else type_


@functools.cache
def _parameters(method: Function) -> Mapping[str, _Parameter]:
    hints = typing.get_type_hints(method)
    return {
        name: _Parameter(
            hints[name],
            required=parameter.default is inspect.Parameter.empty,
            keyword_only=parameter.kind is inspect.Parameter.KEYWORD_ONLY,
        )
        for name, parameter in inspect.signature(method).parameters.items()
        if name != "self"
    }
