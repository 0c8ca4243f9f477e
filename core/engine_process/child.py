"""The child's side of a launch, once the parent's modules can be imported."""

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

from hardpoint.core.engine_process.main_module.pickling import loads

from .launch import Launch, decode_launch

_GLANCE_S = 0.25
_EXIT_CODE = 1

Report = Callable[[BaseException], None]


class ParentWatch:
    """Ends this process when its parent is gone, however the parent ended.

    A thread waits on the launch socket, which the system closes with the parent. Another process
    that the parent forked may hold it open, so the parent's id is looked at as well.

    Attributes:
        report: tells the parent now why this process fails; what it is told first counts.
    """

    def __init__(
        self, channel: socket.socket, parent: int, report: Report, folder: str = ""
    ) -> None:
        """Watch for the end of a parent.

        Args:
            channel: the launch socket.
            parent: the process that started this one.
            report: tells the parent of an error.
            folder: the parent's, to be removed when it is gone; empty is none.
        """
        self.report = report
        self._channel = channel  # never closed: a closed one would look like a lost parent
        self._parent = parent
        self._folder = folder
        self._callback: Callable[[], None] | None = None
        self._grace_s = 0.0

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._watch, name="hardpoint-parent-watch", daemon=True).start()

    def on_gone(self, callback: Callable[[], None], grace_s: float) -> None:
        """Have `callback` called when the parent is gone, in a thread of its own.

        The process has `grace_s` seconds from then on; without a callback it ends at once.
        """
        self._grace_s = grace_s
        self._callback = callback

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        while not poller.poll(_GLANCE_S * 1000) and os.getppid() == self._parent:
            pass
        if self._folder:  # first of all, for this process may end at any time now
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._callback is not None:
            threading.Thread(target=self._callback, daemon=True).start()
            time.sleep(self._grace_s)
        os._exit(_EXIT_CODE)  # nothing that hangs may keep an orphan alive


Run = Callable[[Launch, ParentWatch], None]
"""What a child does: it returns when it is done."""


def serve(channel: socket.socket, parent: int, data: bytes, run: Run, report: Report) -> None:
    """Watch the parent, make what its program defines importable, and run.

    Raises:
        PluginLoadError: what the program defines cannot be rebuilt here.
    """
    launch = decode_launch(data)
    watch = ParentWatch(channel, parent, report, launch.folder)
    watch.start()
    _become_main(launch.main_objects)
    run(launch, watch)


def _become_main(main_objects: bytes) -> None:
    """Put a module that holds the program's objects in the place of `__main__`.

    It has no file, so that a process spawned from here does not run one again.
    """
    module = ModuleType("__main__", "What the program that started this engine defines.")
    sys.modules["__hardpoint_main__"] = sys.modules["__main__"]
    sys.modules["__main__"] = module
    if main_objects:
        vars(module).update(loads(main_objects))
