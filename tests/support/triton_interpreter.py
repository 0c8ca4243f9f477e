"""Skips work of Triton's interpreter with a dropped result, half of its time.

None of it is public: with a version of Triton that has other names, no test is collected.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any


@functools.cache
def speed_up() -> None:
    """Change the interpreter of this process; compiled kernels are as ever."""
    from triton.runtime import interpreter

    _pass_over_overflows(interpreter)
    _patch_once(vars(interpreter))
    _keep_dtypes(vars(interpreter))


def _pass_over_overflows(interpreter: Any) -> None:
    """Compute each sum and product of integers once.

    They are computed again with more bits, for `device_assert`, which passes over the comparison
    unless `debug` is set.
    """
    options = interpreter.interpreter_builder.options
    assert options.sanitize_overflow
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(
            options, sanitize_overflow=False
        )


def _patch_once(interpreter: dict[str, Any]) -> None:
    """Let a launch replace the functions of a module of `triton.language` once.

    Each call of a function that a kernel uses would replace them again, by the same.
    """
    patch, executor = interpreter["_patch_lang"], interpreter["GridExecutor"]
    launch = executor.__call__
    patched: set[str] = set()

    @functools.cache
    def modules_of(function: Any) -> set[str]:
        named = (interpreter["tl"], interpreter["tl"].core)
        used = filter(inspect.ismodule, function.__globals__.values())
        return {module.__name__ for module in used if module in named}

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.clear()

    def patch_first(function: Any) -> Any:
        modules = modules_of(function)
        if modules and modules <= patched:
            return interpreter["_LangPatchScope"]()
        patched.update(modules)
        return patch(function)

    executor.__call__, interpreter["_patch_lang"] = run, patch_first


def _keep_dtypes(interpreter: dict[str, Any]) -> None:
    """Make the table of the dtypes of numpy once for each dtype of elements."""
    of_elements = functools.cache(interpreter["_get_np_dtype"])
    address = interpreter["np"].dtype("uint64")

    def dtype_of(triton_dtype: Any) -> Any:
        elements = triton_dtype.scalar
        return address if elements.is_ptr() else of_elements(elements)

    interpreter["_get_np_dtype"] = dtype_of
