"""Compilation of modules in a limited process, with a cache by content."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import threading
from collections import OrderedDict
from typing import Annotated

from msgspec import Meta

from hardpoint import plugins
from hardpoint.toolkit.limited import LimitedProcess

from . import compile_program, settings

__all__ = ["CompileOptions", "Compiler", "open_compiler", "read_module"]

_CACHE_BYTES = 64 << 20
_ARTIFACT_FACTOR = 64


class CompileOptions(plugins.Options):
    """Limits of modules and of their compilation.

    Attributes:
        max_module_bytes: maximum size of a module.
        compile_seconds: maximum seconds to compile a module.
        compile_bytes: maximum memory of the process that compiles.
    """

    max_module_bytes: Annotated[int, Meta(ge=8, le=16 << 20)] = 256 << 10
    compile_seconds: Annotated[float, Meta(gt=0, le=60)] = 2.0
    compile_bytes: Annotated[int, Meta(ge=64 << 20)] = 1 << 30


class Compiler:
    """Compiles modules, and keeps the results of the latest ones."""

    def __init__(self, seconds: float, max_bytes: int, max_module_bytes: int) -> None:
        self._limits = f"{seconds:g} s (compile_seconds) or {max_bytes} bytes (compile_bytes)"
        self._process = LimitedProcess(
            str(compile_program.__file__),
            "to compile WebAssembly",
            seconds=seconds,
            max_bytes=max_bytes,
            max_answer_bytes=_ARTIFACT_FACTOR * max_module_bytes + (1 << 20),
            needs="wasmtime",
            settings={"engine": str(settings.__file__)},
        )
        self._results: OrderedDict[bytes, bytes] = OrderedDict()
        self._admitted: set[bytes] = set()
        self._lock = threading.Lock()

    def admit(self, module: bytes, owner: str) -> None:
        """Compile a module of a caller that may send modules; keep the result, also a failure.

        Args:
            owner: whom the module is of; owners have turns.

        Raises:
            HardpointError: no process can be started.
        """
        digest = _digest(module)
        self._result(digest, module, owner)
        with self._lock:
            if digest in self._results:
                self._admitted.add(digest)

    def is_admitted(self, module: bytes) -> bool:
        """Return whether a caller that may send modules has sent this one."""
        return _digest(module) in self._admitted

    def compile(self, module: bytes) -> bytes:
        """Return the compiled code of a module.

        Raises:
            ValueError: it is invalid, or compiling it takes too much time or memory.
            HardpointError: no process can be started.
        """
        result = self._result(_digest(module), module, "")
        if result[:1] == compile_program.REJECTED:
            raise ValueError(result[1:].decode(errors="replace"))
        return result[1:]

    def _result(self, digest: bytes, module: bytes, owner: str) -> bytes:
        with self._lock:
            result = self._results.get(digest)
            if result is not None:
                self._results.move_to_end(digest)
                return result
        answer = self._process.ask(module, owner=owner)
        failure = f"expected a module that compiles within {self._limits}, got a larger one"
        result = compile_program.REJECTED + failure.encode() if answer is None else answer
        with self._lock:
            self._results[digest] = result
            while len(self._results) > 1 and sum(map(len, self._results.values())) > _CACHE_BYTES:
                evicted, _ = self._results.popitem(last=False)
                self._admitted.discard(evicted)
        return result


@functools.lru_cache(maxsize=8)
def _open(seconds: float, max_bytes: int, max_module_bytes: int) -> Compiler:
    return Compiler(seconds, max_bytes, max_module_bytes)


def _digest(module: bytes) -> bytes:
    return hashlib.sha256(module).digest()


def open_compiler(options: CompileOptions) -> Compiler:
    """Return the compiler of this process with the limits of some options."""
    return _open(options.compile_seconds, options.compile_bytes, options.max_module_bytes)


def read_module(text: str, options: CompileOptions) -> bytes:
    """Return a module from base64.

    Raises:
        ValueError: it is not base64, or is too large.
    """
    limit = options.max_module_bytes
    if len(text) > (limit + 2) // 3 * 4:
        raise ValueError(f"expected at most {limit} bytes (max_module_bytes), got more")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("expected base64") from None
