"""Snapshots and sizes of arbitrary objects, to compare the state that plugins keep."""

from __future__ import annotations

import pickle
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from hardpoint.plugins.requests.releases import BlockReleases

from .suite import Violation

T = TypeVar("T")
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def snapshot(value: Any) -> Any:
    """Return a plain value that is equal for equal contents, and shares nothing with `value`.

    Tensors and arrays compare by type, shape and bytes; objects by their attributes, else by their
    pickle, else by their identity.
    """
    return _snapshot(value, set())


def count_elements(value: Any) -> int:
    """Return the number of elements of all reachable containers, tensors and arrays."""
    seen: dict[int, Any] = {}  # kept, so that no other object gets the id of one that is counted
    pending = [value]
    count = 0
    while pending:
        item = pending.pop()
        if isinstance(item, (*_PLAIN, *_CODE)) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            count += item.numel()
        elif isinstance(item, np.ndarray):
            count += item.size
        else:
            parts = list(_parts(item))
            count += len(parts)
            pending += parts
    return count


def _snapshot(value: Any, parents: set[int]) -> Any:
    if isinstance(value, BlockReleases):  # which step parts may add to a request
        value = None
    if isinstance(value, (*_PLAIN, *_CODE)):
        return (type(value).__name__, repr(value))
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return ("tensor", str(value.dtype), tuple(value.shape), plain.numpy().tobytes())
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if id(value) in parents:
        return ("cycle",)
    parents = parents | {id(value)}
    name = type(value).__qualname__
    if isinstance(value, set | frozenset):
        return (name, sorted(repr(_snapshot(item, parents)) for item in value))
    if isinstance(value, Mapping):
        pairs = [(_snapshot(k, parents), _snapshot(v, parents)) for k, v in value.items()]
        return (name, sorted(pairs, key=repr) if isinstance(value, dict) else pairs)
    parts = list(_parts(value))
    if parts or isinstance(value, list | tuple | deque):
        return (name, [_snapshot(part, parents) for part in parts])
    try:
        return (name, pickle.dumps(value))
    except Exception:
        return (name, id(value))


def _parts(value: Any) -> Iterable[Any]:
    """Return the contents of an object: items, fields, slots and attributes."""
    if isinstance(value, Mapping):
        with suppress(NotImplementedError):  # one for several threads may not be iterated
            return [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, msgspec.Struct):
        return [getattr(value, name) for name in value.__struct_fields__]
    names = [
        name
        for cls in type(value).__mro__
        for name in _slots(cls)
        if name not in ("__dict__", "__weakref__")
    ]
    held = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    held += sorted(getattr(value, "__dict__", {}).items())
    return held


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(
        f"_{cls.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n
        for n in names
    )


def without_growth(
    subject: object, waves: int, description: str, fix: str, *, limit: int | None = None
) -> Iterator[int]:
    """Yield the numbers of waves, and check that the second half leaves nothing in attributes.

    Args:
        subject: a component, all of whose attributes but the context count.
        waves: half of them.
        description: the component, a colon, and the actions of a half, for messages.
        fix: what its author should do.
        limit: most elements that may be left; by default fewer than there are waves.

    Raises:
        Violation: its attributes grew.
    """
    sizes = []
    for wave in range(2 * waves):
        yield wave
        if wave in (waves - 1, 2 * waves - 1):
            attributes = {name: v for name, v in vars(subject).items() if name != "context"}
            sizes.append(count_elements(attributes))
    if sizes[1] - sizes[0] > (waves - 1 if limit is None else limit):
        name, _, doing = description.partition(": ")
        raise Violation(
            f"{name}'s attributes grew from {sizes[0]} to {sizes[1]} elements {doing}", fix
        )


def settled(
    size: Callable[[], T],
    is_smaller: Callable[[T, T], bool],
    known_threads: Collection[threading.Thread],
    still_seconds: float,
    most_seconds: float,
    is_enough: Callable[[T], bool] = lambda _: False,
) -> T:
    """Return a size after threads have caught up, also those that a busy machine stops for a while.

    It is the smallest one until one is enough, or none was smaller for `still_seconds`. Without
    threads it is the first one.

    Args:
        known_threads: those that need not catch up.
    """
    smallest, changed_at = size(), time.monotonic()
    if not set(threading.enumerate()).difference(known_threads):
        return smallest
    end = changed_at + most_seconds
    while not is_enough(smallest) and time.monotonic() < min(changed_at + still_seconds, end):
        time.sleep(0.02)
        now = size()
        if is_smaller(now, smallest):
            smallest, changed_at = now, time.monotonic()
    return smallest
