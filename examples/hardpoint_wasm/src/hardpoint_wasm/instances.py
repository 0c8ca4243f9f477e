"""Calls of modules, each on a new instance with limits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import wasmtime

from .settings import open_engine

__all__ = ["Limits", "ModuleError", "RunnableModule", "token_bytes"]

Logits = npt.NDArray[np.float32]

TOKEN_BYTES = 4
_MAX_STATE_BYTES = 65536
_TABLE_ELEMENTS = 10_000
_REASONS = {
    wasmtime.TrapCode.OUT_OF_FUEL: "fuel",
    wasmtime.TrapCode.STACK_OVERFLOW: "stack",
}


class ModuleError(Exception):
    """A failure of a module.

    Attributes:
        reason: short text for programs.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Limits:
    """Limits of each call of a module.

    Attributes:
        fuel: instructions of `process`.
        advance_fuel: instructions of `advance`, per token.
        memory_bytes: linear memory.
    """

    def __init__(self, fuel: int, advance_fuel: int, memory_bytes: int) -> None:
        self.fuel, self.advance_fuel, self.memory_bytes = fuel, advance_fuel, memory_bytes


@functools.cache
def _engine() -> wasmtime.Engine:
    return open_engine()


class RunnableModule:
    """A compiled module; calls keep nothing but their results."""

    def __init__(self, compiled: bytes, limits: Limits) -> None:
        """Load compiled code, which must come from `compile_program`.

        Raises:
            ModuleError: it was compiled by another version or for another processor.
        """
        self._limits = limits
        try:
            self._module = wasmtime.Module.deserialize(_engine(), compiled)
        except wasmtime.WasmtimeError as error:
            raise ModuleError("module", _first_line(error)) from None
        self.advances = "advance" in {export.name for export in self._module.exports}

    def initial_state(self) -> bytes:
        """Return the state of a request before any token.

        Raises:
            ModuleError: the size of the state is above the limit.
        """
        with _Instance(self._module, self._limits, self._limits.fuel) as instance:
            return bytes(instance.state_size())

    def advance(self, state: bytes, tokens: bytes) -> bytes:
        """Return the state after further tokens.

        Args:
            tokens: as `token_bytes` returns them.

        Raises:
            ModuleError: the module failed, or exceeded a limit.
        """
        if not self.advances or not tokens:
            return state
        count = len(tokens) // TOKEN_BYTES
        with _Instance(self._module, self._limits, self._limits.advance_fuel * count) as instance:
            state_address = instance.put(state)
            instance.call("advance", state_address, instance.put(tokens), count)
            return instance.get(state_address, len(state))

    def process(self, logits: Logits, tokens: bytes, num_prompt: int, state: bytes) -> Logits:
        """Return the new logits of a row.

        Args:
            logits: float32 [vocab].
            tokens: prompt and output, as `token_bytes` returns them.

        Raises:
            ModuleError: the module failed, exceeded a limit, or returned invalid logits.
        """
        with _Instance(self._module, self._limits, self._limits.fuel) as instance:
            row = instance.put(logits.astype("<f4").tobytes())
            ids = instance.put(tokens)
            address = instance.put(state) if state else 0
            count = len(tokens) // TOKEN_BYTES
            instance.call("process", row, len(logits), ids, num_prompt, count, address)
            result = np.frombuffer(instance.get(row, 4 * len(logits)), "<f4").astype(np.float32)
        result[np.isneginf(logits)] = -np.inf
        if np.isnan(result).any() or np.isposinf(result).any():
            raise ModuleError("logits", "expected finite logits or -inf, got NaN or +inf")
        if np.isneginf(result).all():
            raise ModuleError("logits", "expected a token to choose, got none")
        return result


class _Instance:
    """An instance of a module for one call."""

    def __init__(self, module: wasmtime.Module, limits: Limits, fuel: int) -> None:
        self._store = wasmtime.Store(_engine())
        self._store.set_limits(
            memory_size=limits.memory_bytes,
            table_elements=_TABLE_ELEMENTS,
            instances=1,
            tables=4,
            memories=1,
        )
        self._store.set_fuel(fuel)
        try:
            self._exports = wasmtime.Instance(self._store, module, []).exports(self._store)
        except wasmtime.Trap as trap:
            raise _failure(trap) from None
        except wasmtime.WasmtimeError as error:
            raise ModuleError("memory", _first_line(error)) from None

    def __enter__(self) -> _Instance:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def state_size(self) -> int:
        """Return the size of the state of a request."""
        if "state_size" not in self._exports:
            return 0
        exported = self._exports["state_size"]
        assert isinstance(exported, wasmtime.Global), "compile_program checks the types of exports"
        size = int(exported.value(self._store))
        if not 0 <= size <= _MAX_STATE_BYTES:
            raise ModuleError(
                "state", f"state_size: expected 0 to {_MAX_STATE_BYTES} bytes, got {size}"
            )
        return size

    def put(self, data: bytes) -> int:
        """Return the address of a copy of data in the module's memory."""
        address = int(self.call("alloc", len(data))) & 0xFFFFFFFF
        self._check(address, len(data))
        self._memory().write(self._store, bytearray(data), address)
        return address

    def get(self, address: int, size: int) -> bytes:
        """Return data of the module's memory."""
        self._check(address, size)
        return bytes(self._memory().read(self._store, address, address + size))

    def _memory(self) -> wasmtime.Memory:
        memory = self._exports["memory"]
        assert isinstance(memory, wasmtime.Memory)
        return memory

    def _check(self, address: int, size: int) -> None:
        length = self._memory().data_len(self._store)
        if address % 4 or address + size > length:
            raise ModuleError(
                "memory",
                f"alloc: expected an aligned address with {size} bytes in a memory of {length} "
                f"bytes, got {address}",
            )

    def call(self, name: str, *arguments: int) -> int:
        """Call an exported function."""
        function = self._exports[name]
        assert isinstance(function, wasmtime.Func)
        signed = [value - (1 << 32) if value >= 1 << 31 else value for value in arguments]
        try:
            result: int = function(self._store, *signed)
        except wasmtime.Trap as trap:
            raise _failure(trap) from None
        except wasmtime.WasmtimeError as error:
            raise ModuleError("module", _first_line(error)) from None
        return result


def _failure(trap: wasmtime.Trap) -> ModuleError:
    reason = "trap" if trap.trap_code is None else _REASONS.get(trap.trap_code, "trap")
    return ModuleError(reason, trap.message.strip().split("\n")[-1][:200])


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:200]


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return token ids as modules get them."""
    return np.asarray(tokens, "<i4").tobytes()
