"""The children of this process, which it kills before it ends at once."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class Child(Protocol):
    """A process that this one has started."""

    def kill(self) -> None:
        """Kill it, if it still runs."""


_children: weakref.WeakKeyDictionary[Child, int] = weakref.WeakKeyDictionary()


def add_child(child: Child) -> None:
    """Remember a child; a copy of this process does not kill it."""
    _children[child] = os.getpid()


def kill_children() -> None:
    """Kill the children of this process, before it ends without closing them."""
    for child, owner in list(_children.items()):
        if owner == os.getpid():
            with contextlib.suppress(OSError):
                child.kill()
