"""The child's side of a launch, after the parent's `sys.path` is set."""

from __future__ import annotations

import os
import select
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType

from . import parent_death
from .children import kill_children
from .launch import ChildLaunch, decode_launch
from .main_module.main_pickle import loads

_POLL_INTERVAL_S = 0.25
_EXIT_CODE = 1

Report = Callable[[BaseException], None]


class ParentWatch:
    """Ends this process when its parent has ended, in whatever way.

    Attributes:
        report: sends the parent the error that ends this process; only the first one counts.
    """

    # A thread waits on the launch socket, which the system closes with the parent. A process that
    # the parent forked may hold it open, so the parent's id is checked as well. A process in which
    # no thread can run is ended by the system, see `parent_death`.

    def __init__(
        self, channel: socket.socket, parent: int, report: Report, folder: str = ""
    ) -> None:
        """Create a watch; `start` starts it.

        Args:
            channel: the launch socket.
            parent: process id of the parent.
            folder: folder of the parent's sockets, removed when the parent has ended; empty for
                none.
        """
        self.report = report
        self._channel = channel  # never closed: that would look like the end of the parent
        self._parent = parent
        self._folder = folder
        self._callback: Callable[[], None] | None = None
        self._grace_s = 0.0

    def start(self) -> None:
        """Start the thread."""
        parent_death.end_with_parent()
        threading.Thread(target=self._watch, name="hardpoint-parent-watch", daemon=True).start()

    def on_gone(self, callback: Callable[[], None], grace_s: float) -> None:
        """Set the callback for the end of the parent; it runs in a thread of its own.

        The process is ended `grace_s` seconds later; without a callback at once.
        """
        self._grace_s = grace_s
        self._callback = callback

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        while not poller.poll(_POLL_INTERVAL_S * 1000) and os.getppid() == self._parent:
            parent_death.withdraw()
        parent_death.demand()  # what follows may hang
        if self._folder:  # first, because this process may end at any time now
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._callback is not None:
            threading.Thread(target=self._callback, daemon=True).start()
            time.sleep(self._grace_s)
        kill_children()  # those that cannot see the end of this process, as they hang
        os._exit(_EXIT_CODE)  # even if another thread hangs


Run = Callable[[bytes, ParentWatch], None]
"""The function that a child runs; it gets the encoded launch."""


def serve(channel: socket.socket, parent: int, data: bytes, run: Run, report: Report) -> None:
    """Watch the parent, rebuild the objects of its `__main__`, and run.

    Raises:
        PluginLoadError: the objects cannot be rebuilt here.
    """
    launch = decode_launch(data, ChildLaunch)
    watch = ParentWatch(channel, parent, report, launch.folder)
    watch.start()
    _become_main(launch.main_objects)
    run(data, watch)


def _become_main(main_objects: bytes) -> None:
    # It has no file: a process that is spawned from here would run that file again.
    module = ModuleType("__main__", "Objects of the program that started this process.")
    sys.modules["__hardpoint_main__"] = sys.modules["__main__"]
    sys.modules["__main__"] = module
    if main_objects:
        vars(module).update(loads(main_objects))
