"""Checks and compiles modules; runs in a limited process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import wasmtime

COMPILED, REJECTED = b"C", b"R"
"""First byte of an answer: compiled code follows, or a message."""

_HEADER = b"\0asm\1\0\0\0"
_START = 8
EXPORTS = {
    "alloc": (("i32",), ("i32",)),
    "process": (("i32",) * 6, ()),
    "advance": (("i32",) * 3, ()),
}
"""Parameters and results of the exported functions."""
OPTIONAL = ("advance",)


def start(settings: dict[str, Any]) -> Callable[[bytes], bytes]:
    """Return the function that answers requests."""
    engine = _open_engine(settings["engine"])

    def answer(module: bytes) -> bytes:
        try:
            check_header(module)
            compiled = wasmtime.Module(engine, module)
            check_interface(compiled)
            return COMPILED + bytes(compiled.serialize())
        except (ValueError, wasmtime.WasmtimeError) as error:
            return REJECTED + str(error).split("\n")[0][:500].encode()

    return answer


def _open_engine(path: str) -> wasmtime.Engine:
    """Return the engine of `settings.py`, loaded by its path to import nothing else."""
    specification = importlib.util.spec_from_file_location("wasm_settings", path)
    assert specification is not None
    assert specification.loader is not None
    settings = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(settings)
    engine: wasmtime.Engine = settings.open_engine()
    return engine


def check_header(module: bytes) -> None:
    """Check that a module is binary, and has no start function.

    Raises:
        ValueError: it is not, or has one.
    """
    if module[: len(_HEADER)] != _HEADER:
        raise ValueError("expected a binary WebAssembly module of version 1")
    if _START in _sections(module):
        raise ValueError("expected no start function")


def _sections(module: bytes) -> Iterator[int]:
    """Iterate over the ids of the sections of a module."""
    position = len(_HEADER)
    while position < len(module):
        yield module[position]
        size, shift = 0, 0
        while True:
            position += 1
            if position >= len(module) or shift > 28:
                raise ValueError("expected whole sections")
            size |= (module[position] & 0x7F) << shift
            shift += 7
            if not module[position] & 0x80:
                break
        position += 1 + size


def check_interface(module: wasmtime.Module) -> None:
    """Check imports and exports of a module.

    Raises:
        ValueError: it has imports, or an export is missing or has another type.
    """
    if imports := module.imports:
        raise ValueError(f"expected no imports, got {imports[0].module}.{imports[0].name}"[:200])
    exports = {export.name: export.type for export in module.exports}
    if not isinstance(exports.get("memory"), wasmtime.MemoryType):
        raise ValueError("expected an exported memory named memory")
    for name, types in EXPORTS.items():
        if name in OPTIONAL and name not in exports:
            continue
        function = exports.get(name)
        if not isinstance(function, wasmtime.FuncType) or _types(function) != types:
            raise ValueError(f"expected an exported function {_signature(name)}")
    state = exports.get("state_size")
    if state is None:
        if "advance" in exports:
            raise ValueError("expected an exported global state_size with advance")
    elif not isinstance(state, wasmtime.GlobalType) or str(state.content) != "i32" or state.mutable:
        raise ValueError("expected state_size to be a constant i32 global")


def _types(function: wasmtime.FuncType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(map(str, function.params)), tuple(map(str, function.results))


def _signature(name: str) -> str:
    params, results = EXPORTS[name]
    return f"{name}({', '.join(params)}) -> ({', '.join(results)})"
