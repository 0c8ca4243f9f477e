"""The process of a worker: started for an executor, which names the function that it runs."""

from __future__ import annotations

import contextlib
import importlib
import logging
import operator
import os
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from hardpoint.core.engine.worker_launch import record_worker_in
from hardpoint.errors import PluginLoadError
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.boundary.copies import watch_forks
from hardpoint.host.registry.kinds import KINDS, Process
from hardpoint.plugins import HardpointError
from hardpoint.plugins.component.manifest import Manifest, PluginEntry
from hardpoint.plugins.executor import WorkerLaunch

from .child_processes.child import ParentWatch
from .child_processes.launch import ChildLaunch, decode_launch, main_objects
from .child_processes.naming import log_to_stderr, name_process
from .child_processes.process import ChildProcess, socket_pair

_log = logging.getLogger("hardpoint")


class _ProcessLaunch(ChildLaunch, frozen=True, kw_only=True):
    """The launch of a worker's process.

    Attributes:
        launch: the WorkerLaunch, encoded.
        run: the executor's function that the process runs.
        descriptors: the first is that of the channel, the second that of the activity; the others
            are for the function.
        log_level: level of the logger "hardpoint".
    """

    launch: bytes
    run: str
    descriptors: tuple[int, ...]
    log_level: str


class _ChildWorker(ChildProcess):
    """A process of a worker.

    Attributes:
        rank: rank of the worker.
    """

    title = "worker process"
    run = "hardpoint.process.worker_process:run_worker_process"
    keeps_output = True
    rank = 0

    @property
    def label(self) -> str:
        return f"{self.title} of rank {self.rank} (pid {self.pid})"


class LaunchedWorker:
    """See `hardpoint.plugins.executor.WorkerProcess`."""

    def __init__(
        self,
        launch: WorkerLaunch,
        run: str,
        pass_fds: Sequence[int],
        manifest: Manifest,
        folder: str = "",
    ) -> None:
        """Start the process.

        Args:
            run: the executor's function.
            pass_fds: descriptors that it gets.
            folder: folder that the process removes, if this one ends without doing so.
        """
        references = [entry.value for entry in manifest.tree() if _is_needed(entry)]
        objects = main_objects([*references, run])
        self.channel, theirs = socket_pair()
        activity, shared = Activity.create_unnamed()
        try:
            self._child = _ChildWorker.spawn(pass_fds=(theirs.fileno(), shared, *pass_fds))
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()
            os.close(shared)
        self._child.rank = launch.rank
        self._activity = activity
        self._owner = os.getpid()
        self.pid = self._child.pid
        try:
            self._child.launch(
                _ProcessLaunch(
                    main_objects=objects,
                    folder=folder,
                    launch=launch.encode(),
                    run=run,
                    descriptors=self._child.passed_fds,
                    log_level=logging.getLevelName(_log.getEffectiveLevel()),
                )
            )
        except BaseException:
            self.close(0)
            raise

    def sentinels(self) -> list[int]:
        """Return descriptors; if `failure` may return an error, one of them is readable."""
        return self._child.sentinels

    def failure(self) -> HardpointError | None:
        """Return the error that ended the child, or how it exited; None while it runs."""
        return self._child.failure()

    def doing(self) -> str | None:
        """Return whether it is stopped, and the method of a plugin that runs in a call."""
        is_busy, is_stopped = self._activity.is_busy, self._child.is_stopped
        if not (is_busy or is_stopped):
            return None
        stopped = ", stopped by a signal" if is_stopped else ""
        return stopped + (self._activity.snapshot().during if is_busy else "")

    def close(self, grace_s: float = 5.0) -> None:
        """End the child: it sees the end of the channel; kill it after `grace_s` seconds."""
        if os.getpid() == self._owner:  # a shutdown would reach the child from a fork, too
            with contextlib.suppress(OSError):
                self.channel.shutdown(socket.SHUT_RDWR)
            self._child.wait(grace_s)
        self.channel.close()
        self._child.close(0)
        self._activity.close()


def _is_needed(entry: PluginEntry) -> bool:
    return Process.WORKER in KINDS[entry.kind].processes


def run_worker_process(data: bytes, watch: ParentWatch) -> NoReturn:
    """Run an executor's function in a worker's process, and end the process."""
    code = 0
    try:
        _run_worker_process(data)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException as error:
        watch.report(error)
        code = 1
    # At once, as the children of multiprocessing end: to tear down the interpreter and the threads
    # of torch takes up to a second, in which the other ranks would wait.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed
            stream.flush()
    os._exit(code & 0xFF)


def _run_worker_process(data: bytes) -> None:
    """Run an executor's function.

    Raises:
        PluginLoadError: there is no such function.
    """
    start = decode_launch(data, _ProcessLaunch)
    watch_forks()
    launch = WorkerLaunch.decode(start.launch)
    name_process(f"Worker_{launch.rank}")
    log_to_stderr(f"Worker {launch.rank}", start.log_level)
    channel = socket.socket(fileno=start.descriptors[0])
    channel.set_inheritable(False)
    record_worker_in(Activity.open_unnamed(start.descriptors[1]))
    for descriptor in start.descriptors[2:]:
        os.set_inheritable(descriptor, False)
    module, _, name = start.run.partition(":")
    try:
        run = operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as cause:
        raise PluginLoadError(
            f"{start.run}: the function that a worker's process is to run cannot be found there: "
            f"{cause}"
        ) from cause
    run(launch, channel, list(start.descriptors[2:]))
