"""The owner's end of relayed clients: their requests to the engines, and the outputs back."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hardpoint.host.boundary.errors import kind_of, rejection_output
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, HardpointError
from hardpoint.process.client.process_client import EngineStart, Sink
from hardpoint.process.engine.loop import (
    Abort,
    LoopFailure,
    LoopQueues,
    Message,
    Prepared,
    PreparedCall,
    Rejection,
    Wakeup,
)
from hardpoint.process.engine.transport import EngineIO
from hardpoint.process.engine_process import EngineProcess
from hardpoint.process.protocol import (
    EngineAddresses,
    EngineCoreReadyResponse,
    UtilityCall,
    UtilityOutput,
)
from hardpoint.process.utility_calls import failed_call
from hardpoint.process.zmq_resources import SOCKET_NAMES, make_socket_folder
from hardpoint.replicas.group import ReplicaSet
from hardpoint.replicas.opening import open_engines

from .frontends import FrontendChanges
from .messages import CALL, NOTICES, OWNER, SEPARATOR, EnginesSummary, Notice

_log = logging.getLogger("hardpoint")

_IDENTITY = (0).to_bytes(2, "little")

Answer = Callable[[str, Sequence[Any]], "Future[Any]"]
"""Answers a call of a frontend to the owner of the engines, by name and arguments."""


class SharedEngines:
    """Joins the frontends of several processes to one client of the engines.

    The process that owns it has a frontend of its own. Ids of relayed requests get a prefix of
    their frontend, so that those of two frontends never meet.

    Attributes:
        faults: returns the faults of plugins so far, for frontends that come later.
    """

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}  # by token
        self._sink: Sink = _drop
        self._group: ReplicaSet | None = None
        self._ready: EngineCoreReadyResponse | None = None
        self._history: list[Notice] = []
        self.faults: Callable[[], Sequence[Notice]] = list
        self._lock = threading.Lock()
        self._following: set[str] = set()  # tokens of links whose frontends read notices
        self.changes = FrontendChanges(
            lambda: frozenset(self._following), self._notify_some, self._committed
        )

    def follows(self, link: Link) -> None:
        """Note that a link's frontend reads notices, and so takes part in live changes."""
        self._following.add(link.token)

    def _notify_some(self, notice: Notice, tokens: Collection[str]) -> None:
        with self._lock:
            for link in self._links.values():
                if link.token in tokens:
                    link.notify(notice)

    def _committed(self, notice: Notice, but: Collection[str]) -> None:
        with self._lock:
            self._history.append(notice)
            for link in self._links.values():
                if link.token not in but:
                    link.notify(notice)

    def open_engines(
        self,
        start: EngineStart,
        sink: Sink | None,
        process: EngineProcess | None,
        plugins: PluginSet,
    ) -> ReplicaSet:
        """Open the engines, as `open_engines` does; `sink` gets the outputs of the own frontend."""
        self._sink = sink or _drop
        self._group = open_engines(start, self._receive, process, plugins)
        self._group.change_slots = [*self._group.change_slots, self.changes]
        self._group.shares_engines = True
        self._ready = msgspec.structs.replace(self._group.ready, manifest_hash=start.manifest.hash)
        return self._group

    @property
    def view(self) -> EnginesSummary:
        """The engines as frontends show them now."""
        assert self._group is not None
        return EnginesSummary(
            ranks=tuple(self._group.ranks),
            pids=dict(self._group.pids),
            is_serving=self._group.is_serving,
            num_restarts=self._group.num_restarts,
        )

    def connect(self, answer: Answer) -> Link:
        """Return the link of a further frontend, with a client that connects to `link.folder`.

        Args:
            answer: answers its calls to the owner.

        Raises:
            HardpointError: no folder can be made for the sockets.
        """
        assert self._group is not None
        assert self._ready is not None
        link = Link(self._group, self._ready, answer)
        with self._lock:
            self._links[link.token] = link
            for notice in (*self._history, *self.faults()):
                link.notify(notice)
        return link

    def disconnect(self, link: Link) -> None:
        """End a link, and the requests of its frontend."""
        with self._lock:
            self._links.pop(link.token, None)
            self._following.discard(link.token)
        link.close()

    def notify(self, notice: Notice, *, but: Link | None = None, keep: bool = True) -> None:
        """Send a notice to all frontends.

        Args:
            but: one that does not need it.
            keep: whether frontends that come later get it, too, unless another one of its topic
                follows.
        """
        with self._lock:
            if keep:
                others = [earlier for earlier in self._history if earlier.topic != notice.topic]
                self._history = [*others, notice]
            for link in self._links.values():
                if link is not but:
                    link.notify(notice)

    def fail(self, error: Exception) -> None:
        """Notify all frontends that the engines are dead for good."""
        self.notify(Notice("dead", [kind_of(error), str(error)]))
        self._sink(error)

    def _receive(self, item: EngineCoreOutputs | Exception) -> None:
        """Divide the messages of the engines; in their clients' threads, one at a time."""
        if isinstance(item, Exception):
            self.fail(item)
            return
        outputs: defaultdict[Link | None, list[EngineCoreOutput]] = defaultdict(list)
        finished: defaultdict[Link | None, set[str]] = defaultdict(set)
        for output in item.outputs:
            link, output.request_id = self._owner_of(output.request_id)
            outputs[link].append(output)
        for request_id in item.finished_requests or ():
            link, own_id = self._owner_of(request_id)
            finished[link].add(own_id)
        for link in {*outputs, *finished} - {None}:
            assert link is not None
            link.put(
                EngineCoreOutputs(
                    outputs=outputs[link],
                    finished_requests=finished.get(link),
                    timestamp=item.timestamp,
                )
            )
        item.outputs = outputs.get(None, [])
        item.finished_requests = finished.get(None)
        self._sink(item)

    def _owner_of(self, request_id: str) -> tuple[Link | None, str]:
        token, separator, own_id = request_id.partition(SEPARATOR)
        link = self._links.get(token) if separator else None
        return (None, request_id) if link is None else (link, own_id)


class Link:
    """The connection of one relayed client.

    Attributes:
        token: begins the ids of its requests at the engines.
        folder: folder of its sockets, which the client binds.
    """

    # Threads: the two of EngineIO; `_run`, which sends what the client asks for to the engines; and
    # the threads of the engines' clients, which call `put` and set the results of calls.

    def __init__(self, group: ReplicaSet, ready: EngineCoreReadyResponse, answer: Answer) -> None:
        self.token = secrets.token_hex(6)
        self.folder: Path = make_socket_folder()
        self._group, self._answer = group, answer
        self._queues = LoopQueues()
        self._live: set[str] = set()
        self._notices: deque[Notice] = deque()
        self._asked: int | None = None  # id of the call that waits for notices
        self._lock = threading.Lock()
        inputs, outputs = (f"ipc://{self.folder / name}" for name in SOCKET_NAMES)
        addresses = EngineAddresses(inputs=[inputs], outputs=[outputs])
        self._io = EngineIO(_IDENTITY, addresses, self._queues)
        self._thread = threading.Thread(target=self._run, name="RelayedClient", daemon=True)
        self._io.start(ready)
        self._thread.start()

    def put(self, outputs: EngineCoreOutputs) -> None:
        """Send outputs to the client."""
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self._live.discard(output.request_id)
        self._queues.output.put(0, outputs)

    def notify(self, notice: Notice) -> None:
        """Send a notice to the client's frontend."""
        with self._lock:
            self._notices.append(notice)
            self._send_notices()

    def close(self) -> None:
        """End all requests of the client, and the connection."""
        self._queues.input.put(Wakeup())
        self._thread.join()
        self._group.abort_requests([self._prefixed(name) for name in list(self._live)])
        self._io.close(failed=False, has_clients=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> None:
        while not isinstance(message := self._queues.input.get(), Wakeup):
            try:
                self._handle(message)
            except Exception:
                _log.exception("a message of a frontend was lost")

    def _handle(self, message: Message) -> None:
        match message:
            case Prepared():
                self._add([message.request])
            case PreparedCall():
                self._add([prepared.request for prepared in message.requests])
            case Abort():
                message.is_handled = True
                self._live.difference_update(message.request_ids)
                self._group.abort_requests(list(map(self._prefixed, message.request_ids)))
                self._io.requests_ended(0, message.request_ids)
            case UtilityCall():
                self._call(message)
            case Rejection():
                self._refuse([message.request_id], message.error)
            case LoopFailure():
                raise message.error
        with contextlib.suppress(Exception):  # only the engine's loop needs them
            self._queues.urgent_aborts.get_nowait()

    def _add(self, requests: list[EngineCoreRequest]) -> None:
        own_ids = [request.request_id for request in requests]
        for request in requests:
            request.request_id = self._prefixed(request.request_id)
        self._live.update(own_ids)
        try:
            self._group.add_requests(requests)
        except HardpointError as error:
            self._refuse(own_ids, error)

    def _refuse(self, own_ids: list[str], error: HardpointError) -> None:
        for own_id in own_ids:
            self.put(rejection_output(own_id, error))

    def _call(self, call: UtilityCall) -> None:
        try:
            future = self._future_of(call)
        except Exception as error:
            self._queues.output.put(0, failed_call(call, error))
            return
        if future is not None:
            future.add_done_callback(partial(self._answered, call))

    def _future_of(self, call: UtilityCall) -> Future[Any] | None:
        if call.method == "call_part" and call.args[:1] == [OWNER]:
            method, arguments = call.args[1], call.args[2]["arguments"]
            if method == NOTICES:
                with self._lock:
                    self._asked = call.call_id
                    self._send_notices()
                return None
            if method == CALL:
                rank, name, *call_arguments = arguments
                return self._group.call(name, *call_arguments, rank=rank)
            return self._answer(method, arguments)
        args = call.args
        if call.method == "why_waiting" and args:
            args = [list(map(self._prefixed, args[0]))]
        return self._group.call(call.method, *args)

    def _answered(self, call: UtilityCall, future: Future[Any]) -> None:
        if future.cancelled():
            self._queues.output.put(0, failed_call(call, HardpointError("the call was cancelled")))
        elif (error := future.exception()) is not None:
            self._queues.output.put(0, failed_call(call, error))
        else:
            self._queues.output.put(0, UtilityOutput.succeeded(call.call_id, future.result()))

    def _send_notices(self) -> None:
        """Answer the call that waits for notices, if there are any. While the lock is held."""
        if self._asked is None or not self._notices:
            return
        notices, call_id = list(self._notices), self._asked
        self._notices.clear()
        self._asked = None
        self._queues.output.put(
            0,
            UtilityOutput.succeeded(call_id, msgspec.to_builtins(notices, builtin_types=(bytes,))),
        )

    def _prefixed(self, own_id: str) -> str:
        return f"{self.token}{SEPARATOR}{own_id}"


def _drop(item: EngineCoreOutputs | Exception) -> None:
    """Take outputs of a frontend that wants none."""
