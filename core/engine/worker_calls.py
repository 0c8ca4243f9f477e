"""What may be called on every worker by name."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from hardpoint.plugins import Executor, HardpointError, LoRARequest, RequestError, Worker, typed


def convert_arguments(
    method: Callable[..., Any], arguments: Sequence[Any], error: type[HardpointError]
) -> list[Any]:
    """Return positional arguments of a method, `self` aside, as it declares them.

    A structure may come as a list of its fields or as a table.

    Raises:
        `error`: there are too many or too few, or one is of the wrong type.
    """
    parameters = _parameters(method)
    required = sum(1 for _, default in parameters.values() if default is inspect.Parameter.empty)
    if not required <= len(arguments) <= len(parameters):
        most = len(parameters)
        expected = f"{most}" if required == most else f"{required} to {most}"
        raise error(f"{method.__name__}: expected {expected} arguments, got {len(arguments)}")
    return [
        _converted(value, type_, name, error)
        for value, (name, (type_, _)) in zip(arguments, parameters.items(), strict=False)
    ]


def _converted(value: Any, type_: Any, name: str, error: type[HardpointError]) -> Any:
    if not _travels_as_list(type_):
        return typed.convert(value, type_, path=name, error=error)
    if not isinstance(value, Mapping | list | tuple | type_):
        fields = " and ".join(type_.__struct_fields__)
        got = "nothing" if value is None else type(value).__name__
        raise error(f"{name}: expected a table with {fields}, got {got}")
    if isinstance(value, Mapping):
        table = typed.convert(value, _table_of(type_), path=name, error=error)
        value = [getattr(table, field) for field in table.__struct_fields__]
    return typed.convert(value, type_, path=name, error=error)


def _travels_as_list(type_: Any) -> bool:
    is_struct = isinstance(type_, type) and issubclass(type_, msgspec.Struct)
    return is_struct and type_.__struct_config__.array_like


@functools.cache
def _table_of(type_: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a type with the same fields that travels as a table, so that errors name them."""
    fields = [(field.name, field.type, _default(field)) for field in msgspec.structs.fields(type_)]
    return msgspec.defstruct(type_.__name__, fields, kw_only=True, forbid_unknown_fields=True)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return msgspec.field(default=field.default)


@functools.cache
def returned_type(method: Callable[..., Any]) -> Any:
    """Return what a method declares to return, or what its future gives."""
    type_ = typing.get_type_hints(method)["return"]
    return typing.get_args(type_)[0] if typing.get_origin(type_) is Future else type_


@functools.cache
def _parameters(method: Callable[..., Any]) -> Mapping[str, tuple[Any, Any]]:
    hints = typing.get_type_hints(method)
    return {
        name: (hints[name], parameter.default)
        for name, parameter in inspect.signature(method).parameters.items()
        if name != "self"
    }


WORKER_METHODS = frozenset(
    {
        "add_lora",
        "list_loras",
        "pin_lora",
        "plugin_meters",
        "remove_lora",
        "start_profile",
        "stop_profile",
    }
)
"""Methods of Worker. What would change the state that the engine keeps is not among them."""


class WorkerCalls:
    """Calls that are passed on to the workers, with what becomes of their results."""

    def __init__(self, executor: Executor) -> None:
        """The caller closes the executor."""
        self._executor = executor

    def call(self, method: str, arguments: Sequence[Any], timeout: float | None) -> list[Any]:
        """Call a method of every worker; return the results in rank order.

        Raises:
            RequestError: no such method may be called, or its arguments are wrong.
            TimeoutError: it took longer than `timeout` seconds.
        """
        if method not in WORKER_METHODS:
            known = sorted(WORKER_METHODS)
            raise RequestError(
                f"method: expected one of {', '.join(known)}, got {method!r}"
                f"{typed.suggest(method, known)}"
            )
        arguments = convert_arguments(getattr(Worker, method), arguments, RequestError)
        if timeout is None:
            return self._executor.collective_rpc(method, arguments)
        if not timeout > 0:
            raise RequestError(f"timeout: expected a number > 0, got {timeout:g}")
        return self._executor.collective_rpc(method, arguments, timeout)

    def add_lora(self, lora: LoRARequest) -> bool:
        """Load an adapter in every worker; return whether all did."""
        return all(self._executor.collective_rpc("add_lora", (lora,)))

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter in every worker; return whether all had it."""
        return all(self._executor.collective_rpc("remove_lora", (lora_id,)))

    def list_loras(self) -> set[int]:
        """Return the adapters that every worker has."""
        return set.intersection(*map(set, self._executor.collective_rpc("list_loras")))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in every worker; return whether all had it."""
        return all(self._executor.collective_rpc("pin_lora", (lora_id,)))
