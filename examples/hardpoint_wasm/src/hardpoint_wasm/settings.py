"""Configuration of wasmtime, equal in the process that compiles and in the workers."""

from __future__ import annotations

import wasmtime

_STACK_BYTES = 256 << 10
_DISABLED = (
    "wasm_component_model",
    "wasm_exceptions",
    "wasm_function_references",
    "wasm_gc",
    "wasm_memory64",
    "wasm_multi_memory",
    "wasm_tail_call",
    "wasm_threads",
)


def open_engine() -> wasmtime.Engine:
    """Return an engine with fuel, deterministic floats and explicit bounds checks.

    Without reserved address space an instance costs no more memory than it uses. Without traps by
    signals the process keeps its signal handlers.
    """
    config = wasmtime.Config()
    config.consume_fuel = True
    config.cranelift_nan_canonicalization = True
    config.max_wasm_stack = _STACK_BYTES
    config.memory_guard_size = 0
    config.memory_init_cow = False
    config.memory_reservation = 0
    config.memory_reservation_for_growth = 0
    config.parallel_compilation = False
    config.signals_based_traps = False
    config.wasm_relaxed_simd_deterministic = True
    for name in _DISABLED:
        setattr(config, name, False)
    return wasmtime.Engine(config)
