"""The client of several engine processes: divides requests among them, and outlives any of them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from hardpoint.core.client.base import Death, DeathWatcher
from hardpoint.errors import EngineClosedError, EngineDeadError
from hardpoint.host.boundary.activity import Activity
from hardpoint.host.boundary.errors import ended_by, engine_dead, rejection_output
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    HardpointError,
)
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.process.client.base import Attempt, UtilityCalls
from hardpoint.process.client.output_queue import OutputQueue
from hardpoint.process.client.process_client import EngineStart, Sink, close_outside
from hardpoint.process.client.sockets import SEND_TIMEOUT_S, send_timeout

from .choice import EngineChoice
from .dispatch import RETRY_S, Dispatch
from .hosts import EngineHosts
from .joint_calls import JointCalls
from .ledger import Entry, Ledger
from .load import Loads
from .recovery import Recovery
from .replica import Replica, ReplicaClient, set_starting
from .replicas import Receiver, Replicas, ReplicasOf
from .restarts import RestartBudget
from .scaling import Scaling, leaving

_log = logging.getLogger("hardpoint")

_REFUSED = EngineDeadError.__name__
"""The `error_kind` of a request that an engine refuses because it is about to end."""


class ReplicaSet(UtilityCalls):
    """Starts several engines of one model; implements `EngineCoreClient` over all of them.

    Each has a number, its rank, and a process and a cache of its own. A request runs on one of
    them; a control call goes to all. If one dies, its requests go on at another one with the same
    tokens, or end with an error that names the engine; the others run on.

    Attributes:
        ready: the ready response of the first engine.
        join_address: address where engines join; None if no engine does.
    """

    # Threads: senders call `add_requests` and the like, one reader per engine calls `_receive`, and
    # readers or watchers call `_lost`. `_lock` guards the ledger, the list of engines and the order
    # of what the sink gets; no message is sent and no engine started while it is held. `_changed`
    # is notified where an engine starts or stops serving.
    # An engine is dead once `_lost` has the lock: another `Replica` is in its place, so what it
    # sends later is dropped.

    in_process = False

    def __init__(
        self,
        start: EngineStart,
        choice: EngineChoice,
        budget: RestartBudget,
        hosts: EngineHosts,
        *,
        sink: Sink | None = None,
        replicas: ReplicasOf = Replicas,
    ) -> None:
        """Start the engines and wait until all are ready.

        Args:
            start: parameters of the first engine; `config.parallel.data` is their number.
            choice: chooses the engine of each request; closed with the group.
            hosts: where the engines run; closed with the group.
            sink: called with outputs, and last with the error that ended them, in other threads;
                must not hold this client. Without a sink they wait for `get_output`.

        Raises:
            HardpointError: an engine cannot be started; the others are closed.
        """
        super().__init__(start.config.engine.call_timeout_seconds)
        self._choice, self._budget, self.change_slots = choice, budget, [choice]
        self._outputs = OutputQueue()
        self._sink = self._outputs.put if sink is None else sink
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ledger = Ledger()
        self._recovery = Recovery(start.config.engine)
        self._error: EngineDeadError | None = None
        self._restarts: list[threading.Thread] = []
        self._watcher: weakref.WeakMethod[DeathWatcher] | None = None
        self_reference = weakref.ref(self)  # for the threads of clients, which would keep it
        self._replicas = replicas(
            start, hosts, lambda replica: Receiver(self_reference, replica), self._changed
        )
        self._dispatch = Dispatch(
            choice, self._replicas, self._ledger, self._recovery, self._lock, self._refuse
        )
        self._calls = JointCalls(choice, self._replicas)
        scaling = Scaling(self._replicas, self._ledger, self._changed, self._move, self._report_end)
        self.scale, self.retire, self._succeed = scaling.scale, scaling.retire, scaling.replace
        self.join_address = hosts.join_address
        hosts.on_leave(leaving(weakref.WeakMethod(self._let_go)))
        self.load = Loads(self._replicas, self._changed).report
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.ready = self._replicas.open_all().ready
            undo.pop_all()

    # What clients of one engine have

    @property
    def pid(self) -> int:
        """The process id of the first engine that serves, or served."""
        return self._replicas.any_client.pid

    @property
    def pids(self) -> Mapping[int, int]:
        """The process ids of the engines that serve, by rank."""
        return {replica.rank: replica.open_client.pid for replica in self._replicas.serving}

    @property
    def ranks(self) -> Collection[int]:
        """The numbers of the engines that a request may name."""
        return self._replicas.ranks

    @property
    def activity(self) -> Activity:
        """The record of the first engine that serves; of a dead group, of the last engine."""
        return self._replicas.any_client.activity

    @property
    def num_restarts(self) -> int:
        """How often engines were restarted."""
        return self._replicas.totals.num_restarts.total()

    @property
    def is_serving(self) -> bool:
        """Whether an engine accepts requests."""
        return bool(self._replicas.serving)

    def watch_deaths(self, watcher: DeathWatcher) -> None:
        """Call a bound method for each engine that dies while the client lives; held weakly."""
        self._watcher = weakref.WeakMethod(watcher)

    # Requests

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to one of the engines, as `add_requests` does."""
        self.add_requests([request])

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Send the requests of one call, each to one of the engines. If one is rejected, all are.

        Raises:
            EngineDeadError: all engines are gone.
            EngineTimeoutError: an engine accepted no message for some seconds.
            RequestError: one cannot be encoded.
        """
        attempt = self.offer_requests(requests)
        deadline = time.monotonic() + SEND_TIMEOUT_S
        while not attempt():
            if time.monotonic() >= deadline:
                self.abort_requests([request.request_id for request in requests])
                raise send_timeout()
            time.sleep(RETRY_S)

    def offer_requests(self, requests: Sequence[EngineCoreRequest]) -> Attempt:
        """Return a function that tries to send the requests of one call without waiting.

        Raises:
            RequestError: one cannot be encoded.
            EngineDeadError: all engines are gone.
        """
        with self._lock:
            self._check()
        try:
            return self._dispatch.offer(requests)
        except BaseException:
            self.abort_requests([request.request_id for request in requests])
            raise

    def _check(self) -> None:
        if self._replicas.is_closed:
            raise EngineClosedError("the engine is closed")
        if self._error is not None:
            raise engine_dead(self._error)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without waiting; a request sent later reaches its engine after this."""
        ids: dict[Replica, list[str]] = {}
        with self._lock:
            for request_id in list(request_ids):
                if (entry := self._ledger.get(request_id)) is not None:
                    if entry.replica is not None:
                        ids.setdefault(entry.replica, []).append(request_id)
                    self._end(entry)
        for replica, listed in ids.items():
            replica.open_client.abort_requests(listed)
        self._dispatch.send_waiting()

    def _end(self, entry: Entry) -> None:
        self._ledger.close(entry)
        self._recovery.forget(entry)

    # Outputs

    def receive(self, replica: Replica, item: EngineCoreOutputs | Exception) -> None:
        """Hand on the messages of an engine; in its reader's or watcher's thread."""
        if isinstance(item, Exception):
            self._lost(replica, item)
            return
        with self._lock:
            if not self._replicas.is_current(replica):
                return
            self._note(replica, item)
            outputs: list[EngineCoreOutput] = []
            for output in item.outputs:
                if (entry := self._read(replica, output)) is not None:
                    outputs.append(output)
                    if output.error_kind is not None:
                        outputs += self._refuse_others(entry, output)
            for request_id in item.finished_requests or ():
                entry = self._ledger.get(request_id)
                if entry is not None and entry.replica is replica:
                    self._end(entry)
            item.outputs = outputs
            item.engine_index = replica.rank
            if item.scheduler_stats is not None:
                item.scheduler_stats = self._replicas.stats()
            if item.outputs or item.finished_requests or item.scheduler_stats is not None:
                self._sink(item)
        self._dispatch.send_waiting()

    def _note(self, replica: Replica, item: EngineCoreOutputs) -> None:
        replica.read(item)
        if not replica.is_reachable:
            self._replicas.set_reachable(replica, reachable=True)
        if replica.is_leaving and replica.is_serving:
            _log.warning("engine %d is about to end: its process was asked to", replica.rank)
            self._replicas.leave(replica)

    def _read(self, replica: Replica, output: EngineCoreOutput) -> Entry | None:
        entry = self._ledger.get(output.request_id)
        if entry is None or entry.replica is not replica:
            return None
        if replica.is_leaving and output.error_kind == _REFUSED:
            self._dispatch.send_elsewhere(entry)
            return None
        entry.read(output)
        if output.finish_reason is not None:
            output.num_resumes = entry.num_moves
            self._end(entry)
        else:
            self._recovery.record_output(entry)
        return entry

    def _refuse_others(self, rejected: Entry, refused: EngineCoreOutput) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        for request_id in rejected.call:
            entry = self._ledger.get(request_id)
            if entry is None or entry.call is not rejected.call or entry.has_output:
                continue
            replica = entry.replica
            outputs.append(msgspec.structs.replace(refused, request_id=request_id))
            self._end(entry)
            if replica is not None:
                replica.open_client.abort_requests([request_id])
        return outputs

    def get_output(self, *, wait: bool, timeout: float | None = None) -> EngineCoreOutputs | None:
        """Return the next batch of outputs of any engine, as `ProcessClient.get_output` does."""
        return self._outputs.pop(wait=wait, timeout_s=timeout)

    def end_waiting(self) -> None:
        """Let a thread that waits in `get_output` raise EngineClosedError, before `close`."""
        self._outputs.put(EngineClosedError("the engine is closed"))

    # Deaths

    def _lost(self, replica: Replica, error: Exception) -> None:
        with self._lock:
            if replica.client is None:
                replica.failure = error
            client, replicas = replica.client, self._replicas
            if client is None or replicas.is_closed or not replicas.is_current(replica):
                return
            ended = replicas.ending_with(replica)
            entries = self._ledger.of(replica)
            bystanders = [entry for dead in ended[1:] for entry in self._ledger.of(dead)]
            for entry in (*entries, *bystanders):
                entry.leave()
            may_restart = not replica.is_draining and self._may_restart(replica)
            successors = [replicas.succeed(dead, is_starting=may_restart) for dead in ended]
            for dead in ended:
                self._report_end(dead)
        blameless = client.was_killed
        reported, in_step = self._reported(replica, client, error, blameless=blameless)
        _log.warning("engine %d died: %s", replica.rank, reported)
        with self._lock:
            for listed, steps in ((entries, in_step), (bystanders, ())):
                live = [
                    entry for entry in listed if self._ledger.has(entry)
                ]  # the others were aborted
                for entry, reason in self._recovery.lost(
                    live, steps, blameless=blameless, version=self._replicas.weight_version
                ):
                    self._refuse(entry, reported, reason)
            self._end_hopeless(reported)
        restart = threading.Thread(
            target=self._replace, args=(ended, successors), name="hardpoint-restart", daemon=True
        )
        with self._lock:
            self._restarts = [thread for thread in self._restarts if thread.is_alive()]
            self._restarts.append(restart)
            restart.start()
        self._dispatch.send_waiting()

    def _may_restart(self, replica: Replica) -> bool:
        return self._budget.may_restart(replica.rank if self._is_remote(replica) else None)

    def _is_remote(self, replica: Replica) -> bool:
        """Return whether an engine has joined from another machine, which is not trusted."""
        parallel = self._replicas.start.config.parallel
        return parallel.join_address is not None and replica.rank >= parallel.num_local

    def _reported(
        self, replica: Replica, client: ReplicaClient, error: Exception, *, blameless: bool
    ) -> tuple[EngineDeadError, Collection[str] | None]:
        last = client.activity.snapshot()
        call = None if blameless or self._is_remote(replica) else last.call
        repeated = "" if call is None else self._budget.died_in(call)
        watcher = None if self._watcher is None else self._watcher()
        if watcher is None:
            return engine_dead(error), last.in_step
        return watcher(Death(error, last.in_step, call, repeated)), last.in_step

    def _refuse(self, entry: Entry, error: Exception, reason: str) -> None:
        self._end(entry)
        self._sink(rejection_output(entry.request.request_id, ended_by(error, reason)))

    def _end_hopeless(self, error: Exception) -> None:
        """End the requests that wait for an engine that is not coming; be dead if none is."""
        if not (coming := self._replicas.coming) and self._replicas.keep_draining():
            coming = self._replicas.coming
        if not coming:
            self._error = engine_dead(error)
            if self._budget.is_spent:
                self._error.args = (f"{error}; {self._budget.limit_text}",)
                _log.error("%s", self._error)
            self._changed.notify_all()
            self._sink(self._error)
            return
        for entry in self._ledger:
            rank = entry.request.data_parallel_rank
            if entry.replica is None and rank is not None and rank not in coming:
                self._refuse(entry, error, "names that engine (data_parallel_rank)")

    def _replace(self, ended: Sequence[Replica], successors: Sequence[Replica]) -> None:
        for replica in ended:
            self._replicas.forget(replica.client)
        first = successors[0]
        while first.is_starting:
            try:
                self._replicas.reopen(successors)
            except Exception as error:
                if not isinstance(error, EngineClosedError):  # neither closed nor retired
                    _log.warning("engine %d cannot be restarted: %s", first.rank, error)
                with self._lock:
                    died = isinstance(error, EngineDeadError)
                    set_starting(successors, is_starting=died and self._may_restart(first))
                    if not first.is_starting and not self._replicas.is_closed:
                        self._end_hopeless(error)
            else:
                self._dispatch.send_waiting()

    def _let_go(self, rank: int) -> None:
        """Let an engine go if its machine wants to end it; another one may replace it."""
        if pair := self._succeed(rank, is_starting=self._budget.enabled):
            with self._lock:
                self._end_hopeless(EngineDeadError(f"engine {rank} was ended where it runs"))
            self._replace(pair[:1], pair[1:])

    def _move(self, replica: Replica) -> None:
        with self._lock:
            left = HardpointError(f"engine {replica.rank} was retired")
            for entry in self._ledger.of(replica):
                self._dispatch.send_elsewhere(entry)
            if replica.rank not in self._replicas.coming:
                for entry in self._ledger:
                    if entry.request.data_parallel_rank == replica.rank:
                        self._refuse(entry, left, "names that engine (data_parallel_rank)")
        self._dispatch.send_waiting()

    def _report_end(self, replica: Replica) -> None:
        with self._lock:
            if replica.stats is not None:
                stats = self._replicas.stats()
                self._sink(EngineCoreOutputs(engine_index=replica.rank, scheduler_stats=stats))

    # Control calls

    def call(self, method: str, *args: Any, rank: int | None = None) -> Future[Any]:
        """Call a utility of all engines without waiting; one answer is made of theirs.

        Args:
            method: one of `utility_calls.UTILITIES`.
            args: by position.
            rank: the engine to call; None is all that serve.

        Raises:
            EngineDeadError: all engines are gone.
            RequestError: the arguments cannot be encoded.
        """
        with self._lock:
            self._check()
            serving = [
                replica for replica in self._replicas.serving if rank in (None, replica.rank)
            ]
        return self._calls.call(serving, self._owner_of, method, args, is_for_all=rank is None)

    def _owner_of(self, request_id: str, otherwise: Replica) -> Replica | None:
        entry = self._ledger.get(request_id)  # one look-up, so without the lock
        return otherwise if entry is None else entry.replica

    def _wait_until_serving(self, timeout_s: float | None) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self.is_serving or self._error or self._replicas.is_closed, timeout_s
            )

    def restart_with(self, config: EngineConfig, manifest: Manifest) -> None:
        """Start engines with other parameters from now on."""
        start = self._replicas.start
        self._replicas.start = dataclasses.replace(start, config=config, manifest=manifest)

    def close(self) -> None:
        """End all engines and release everything. Closing twice does nothing."""
        if not self._replicas.is_closed:
            close_outside(self._close)

    def _close(self) -> None:
        self._replicas.close()
        for restart in {*self._restarts} - {threading.current_thread()}:
            restart.join()
        self._choice.close()
