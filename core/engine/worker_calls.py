"""What may be called on every worker by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hardpoint.plugins import Executor, LoRARequest, RequestError, Worker, typed

from .typed_calls import convert_arguments

__all__ = ["WORKER_METHODS", "WorkerCalls"]

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
