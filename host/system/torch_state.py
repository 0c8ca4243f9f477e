"""torch's settings of a process or thread: read before a plugin runs, and put back after it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .plugin_settings import READ

_log = logging.getLogger("hardpoint")

_DEVICE: Any = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
"""Has what `torch.set_default_device` has set in this thread."""

_num_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""A default device is one of them."""
_dtype, _threads = torch.get_default_dtype, torch.get_num_threads
_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms

_inference, _grad = torch.is_inference_mode_enabled, torch.is_grad_enabled

State = tuple[Any, torch.dtype, int, bool, bool, bool]
"""The default device's context, the default dtype, the threads, deterministic algorithms,
inference mode, the recording of gradients.
"""

_logged: set[tuple[str, str]] = set()


def read() -> State:
    """Return the settings of this thread; takes 0.3 microseconds."""
    device = getattr(_DEVICE, "device_context", None) if _num_modes() else None
    return device, _dtype(), _threads(), _deterministic(), _inference(), _grad()


READ[0] = read


def put_back(before: State, plugin: object, method: str, *, threads: bool = True) -> None:
    """Restore settings that a plugin has changed; log each once, with the plugin.

    Args:
        before: the settings before its call.
        plugin: names it.
        method: method of the call.
        threads: whether the number of threads is restored, too.
    """
    keep = before[2] if threads else _threads()
    report = functools.partial(_log_change, f"{plugin}: its {method}", _ADVICE)
    restore((*before[:2], keep, *before[3:]), report)


_ADVICE = "pass it where it is needed instead"
_HOW_TO_FIND = "set debug.watch_plugins to find out which plugin does it"


def restore(before: State, report: Callable[[str, object, object], None]) -> None:
    """Restore settings.

    Args:
        report: called with the name of each setting that differs, its value before and its value
            now.
    """
    after = read()
    device, dtype, num_threads, deterministic, inference, grad = before
    if after[0] is not device:
        torch.set_default_device(None if device is None else device.device)
        report("default device", _device(device), _device(after[0]))
    if after[1] is not dtype:
        torch.set_default_dtype(dtype)
        report("default dtype", dtype, after[1])
    if after[2] != num_threads:
        torch.set_num_threads(num_threads)
        report("number of threads", num_threads, after[2])
    if after[3] != deterministic:
        torch.use_deterministic_algorithms(deterministic)
        report("use of deterministic algorithms", deterministic, after[3])
    if after[4] != inference:
        _set_inference_mode(inference)
        report("inference mode", inference, after[4])
    if _grad() != grad:
        torch.set_grad_enabled(grad)
        if after[4] == inference:  # which turns it on and off, too
            report("recording of gradients", grad, after[5])


def _set_inference_mode(on: bool) -> None:
    """Turn the mode on or off for good, for which torch has no function.

    Leaving it returns to the mode in which it was entered, and the second is entered in the first.
    """
    first, second = torch.inference_mode(on), torch.inference_mode(on)
    for mode in (first, second):
        mode.__enter__()
    for mode in (first, second):
        mode.__exit__(None, None, None)


def put_back_defaults(plugin: object, method: str) -> None:
    """Restore the settings that a plugin which imported torch has changed, except the threads."""
    before = (None, torch.float32, torch.get_num_threads(), False, False, True)
    if read() != before:
        put_back(before, plugin, method)


@contextlib.contextmanager
def kept(plugin: object, method: str, before: State | None = None) -> Iterator[None]:
    """Restore settings that the body changes; for calls that are rare.

    Args:
        plugin: names the plugin that the body calls.
        method: method of the call.
        before: the settings to keep; None is the current ones.
    """
    before = before or read()
    try:
        yield
    finally:
        if read() != before:
            put_back(before, plugin, method)


def kept_within(items: Iterable[Any], plugin: object, method: str) -> Iterator[Any]:
    """Yield items that a plugin makes; restore settings that it changes in the meantime.

    Args:
        items: the plugin's.
        plugin: names it.
        method: method that returned them.
    """
    left, end = iter(items), object()
    while True:
        with kept(plugin, method):
            item = next(left, end)
        if item is end:
            return
        yield item


def restore_after_step(before: State, *, threads: bool, process: bool) -> None:
    """Restore settings that plugins have changed in a step; log each once.

    Args:
        threads: whether the number of threads is restored.
        process: whether the settings that threads of a process share are restored.
    """
    device, dtype, num_threads, deterministic, *modes = before
    if not threads:
        num_threads = _threads()
    if not process:
        dtype, deterministic = _dtype(), _deterministic()
    report = functools.partial(_log_change, "a plugin", _HOW_TO_FIND)
    restore((device, dtype, num_threads, deterministic, *modes), report)


def _device(context: Any) -> str:
    return "none" if context is None else str(context.device)


def _log_change(subject: str, advice: str, setting: str, before: object, after: object) -> None:
    if (subject, setting) not in _logged:
        _logged.add((subject, setting))
        text = "%s changed torch's %s from %s to %s, which is put back; %s"
        _log.warning(text, subject, setting, before, after, advice)
