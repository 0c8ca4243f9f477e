"""The engine's half of adapters: names, contents, leases of requests and slots of steps."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hardpoint.errors import HardpointError
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreRequest,
    LoRARequest,
    ModelError,
    ModelRunnerOutput,
    Request,
    RequestError,
    RequestFault,
    SchedulerOutput,
    SchedulerStats,
)
from hardpoint.plugins.step_part import (
    AdmissionGate,
    EngineHalfContext,
    PlanData,
    ProgramCalls,
    RequestFilter,
    RequestLifecycle,
    StepObserver,
    WorkerSetup,
)

from .identity import LinkedFolders, content_hash, read_files
from .leases import GroupAdapters, Leases
from .messages import AdapterSlot, StepAdapters, requested_lora
from .names import AdapterNames
from .readings import Readings

_UNASKED_SECONDS = 120.0
"""After this, a reading that no program asks for is forgotten."""

_WAIT_SECONDS = 0.002


class AdapterSlots(
    RequestFilter,
    AdmissionGate,
    RequestLifecycle,
    PlanData,
    StepObserver,
    WorkerSetup,
    ProgramCalls,
):
    """Knows the adapters by name and content, and gives requests leases of slots.

    A name is an alias of a content, and may become that of another one: a request keeps the content
    that it was admitted with.
    """

    for_fields = ("lora",)

    def __init__(self, name: str, config: EngineConfig, context: EngineHalfContext) -> None:
        """Know the adapters of the configuration.

        Args:
            name: name of the part, by which the reports of its worker halves are found.

        Raises:
            ModelError: files of one are missing.
        """
        self._name, self._config, self._clock = name, config.adapters, context.clock
        self._names = AdapterNames()
        self._paths: dict[str, str] = {}  # of each content that is known
        self._host: dict[str, float] = {}  # contents that workers keep, and their last use
        self._pinned: set[str] = set()
        self._requests: dict[str, str] = {}  # content of each request
        self._named: dict[str, LoRARequest] = {}  # the adapter of each request
        self._groups = GroupAdapters(self._config.max_loras)
        self._scales: dict[str, float] = {}  # of requests, if they are not 1.0
        self._ending: set[str] = set()  # requests that a removal ends
        self._leaving: set[str] = set()  # contents that requests have and no name has
        self._readings = Readings(context.call_workers, context.clock)
        self._wanted: dict[str, int] = {}  # contents that requests wait for, and their readings
        self._links = LinkedFolders()  # removed when nothing needs them
        self._has_started = False
        self._leases = Leases(self._config.max_loras, self._clock)
        self._methods: Mapping[str, Callable[..., Any]] = {
            "resolve": self._resolve,
            "load": self._load,
            "poll": self._poll,
            "remove": self._remove,
            "removed": lambda: self._names.removed,
            "list": self._list,
            "pin": self._pin,
        }
        for index, (name, path) in enumerate(self._config.paths.items()):
            content = content_hash(*read_files(path))
            self._set_alias(LoRARequest(name, index + 1, path, content))

    def workers_started(self) -> Mapping[str, RequestFault]:
        """Let workers read configured adapters or, after a sleep, the adapters of live requests.

        Returns:
            Requests with an adapter that a rank cannot read again.

        Raises:
            ModelError: a rank cannot read an adapter of the configuration.
        """
        if not self._has_started:
            self._has_started = True
            for lora in self._names:
                self._read_now(lora.content_hash)
            return {}
        self._host = {}
        ended: dict[str, RequestFault] = {}
        for content in self._leases.contents():
            try:
                self._read_now(content)
            except ModelError as error:
                users = [user for user, has in self._requests.items() if has == content]
                ended |= dict.fromkeys(users, RequestFault(f"lora: {error}"))
        return ended

    def _read_now(self, content: str) -> None:
        """Wait until workers have read a content.

        Raises:
            ModelError: one of them cannot.
        """
        while content not in self._host and not self._is_read(content):
            time.sleep(_WAIT_SECONDS)

    # Requests

    def check(self, request: EngineCoreRequest) -> None:
        """Take note of the content that a request uses from now on.

        One that this engine does not know, as after a restart, is read from the request's path.

        Raises:
            RequestError: it was removed, or cannot be found, or is not stated; or its scale is
                wrong; or its group has more adapters than slots.
        """
        assert request.lora is not None
        name, content, scale = request.lora.name, request.lora.content_hash, request.lora.scale
        if not math.isfinite(scale):
            raise RequestError(f"lora.scale: expected a finite number, got {scale}")
        if not content:
            raise RequestError(
                f"lora.content_hash: expected the hash of a loaded adapter, as LLM.adapters.add "
                f"returns it, got none for {name!r}"
            )
        is_admitted = request.is_admitted
        self._names.check_request(request.lora, self._paths, is_admitted=is_admitted)
        self._groups.add(request, content)
        if content not in self._paths:
            self._paths[content] = request.lora.path
            self._leaving.add(content)
        self._requests[request.request_id] = content
        self._named[request.request_id] = request.lora
        if scale != 1.0:
            self._scales[request.request_id] = scale

    def refused(self, request_id: str) -> None:
        """Forget a request."""
        self.ended(request_id)

    def gate(self, request: Request) -> str | None:
        """Give a request a lease of its adapter, once there is a slot and workers have it.

        A request and its members get the leases of all their adapters at the same time.

        Raises:
            RequestError: it was removed, or its files cannot be read again.
        """
        name = request.request_id
        contents = self._groups.of(name) or {name: self._requests[name]}
        for ending in self._ending & contents.keys():
            raise RequestError(self._removal_of(contents[ending]))
        if self._leases.is_holder(name):  # since the gate of another one of its group
            return None
        wanted = dict.fromkeys(contents.values())
        try:
            present = [key for key in wanted if key in self._host or self._is_read(key)]
        except ModelError as error:
            raise RequestError(f"lora: {error}") from None
        self._host |= dict.fromkeys(present, self._clock())
        return self._leases.acquire(contents) if present == [*wanted] else "its adapter is read"

    def ended(self, request_id: str) -> None:
        """Release the lease of a request."""
        content = self._requests.pop(request_id, None)
        self._named.pop(request_id, None)
        self._scales.pop(request_id, None)
        self._ending.discard(request_id)
        self._leases.release(request_id)
        self._groups.remove(request_id)
        if content is None:
            return
        if content in self._wanted and content not in self._requests.values():
            self._readings.drop(self._wanted.pop(content))
        if self._is_needed(content):
            return
        if content in self._leaving or content not in self._host:
            self._leaving.discard(content)
            self._paths.pop(content, None)
            self._remove_unused()

    def begin(self, plan: SchedulerOutput) -> bytes | None:
        """Return the slots of a plan."""
        slots: dict[int, str] = {}
        requests: dict[str, int] = {}
        for name in plan.num_scheduled_tokens:
            if (content := self._requests.get(name)) is not None:
                slot = requests[name] = self._leases.slot(content)
                slots[slot] = content
        if not requests:
            return None
        listed = [AdapterSlot(slot, content) for slot, content in slots.items()]
        scales = {name: self._scales[name] for name in self._scales.keys() & requests.keys()}
        return msgspec.msgpack.encode(StepAdapters(listed, requests, scales))

    def result(
        self,
        plan: SchedulerOutput,
        result: ModelRunnerOutput,
    ) -> Mapping[str, RequestFault]:
        """Return the requests that the removal, or a failure, of their adapter ends."""
        names = self._ending & plan.num_scheduled_tokens.keys()
        ended = {name: RequestFault(self._removal_of(self._requests[name])) for name in names}
        for report in result.part_reports.get(self._name, {}).values():
            failures = msgspec.msgpack.decode(report, type=dict[str, str])
            for name in plan.num_scheduled_tokens.keys() & self._requests.keys():
                if (reason := failures.get(self._requests[name])) is not None:
                    adapter = self._named[name].name
                    ended[name] = RequestFault(f"lora: {adapter!r} cannot be used: {reason}")
        return ended

    def wait(self) -> None:
        """Wait a moment for adapters that are read."""
        time.sleep(_WAIT_SECONDS)

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add the numbers of requests that run with and wait for each adapter."""
        running = self._leases.counts()
        waiting = Counter(
            lora.name for user, lora in self._named.items() if not self._leases.is_holder(user)
        )
        stats.num_waiting_by_adapter = dict(waiting)
        stats.num_adapter_slots = self._config.max_loras
        stats.num_requests_by_adapter = {
            lora.name: running.get(lora.content_hash, 0) for lora in self._names
        }

    def close(self) -> None:
        """Remove the folders of tensors."""
        self._links.remove()

    def _removal_of(self, content: str) -> str:
        return f'lora: its adapter, content {content[:16]}, was removed with mode "end"'

    # Calls of programs

    def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Answer a call of `LLM.adapters.add` and the like.

        Raises:
            RequestError: there is no such method or adapter, or arguments are wrong.
            ModelError: an adapter cannot be loaded.
        """
        if (function := self._methods.get(method)) is None:
            known = ", ".join(self._methods)
            raise RequestError(f"method: expected one of {known}, got {method!r}")
        try:
            return function(**arguments)
        except TypeError:
            raise RequestError(
                f"arguments: expected the arguments of {method!r}, got {sorted(arguments)}"
            ) from None
        finally:
            self._remove_unused()

    def _resolve(self, loras: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
        """Return adapters as this engine loaded them; None for a name without an adapter.

        Raises:
            RequestError: one has another path or content.
        """
        found = [self._names.find(requested_lora(lora), self._paths) for lora in loras]
        return [None if lora is None else msgspec.structs.asdict(lora) for lora in found]

    def _load(
        self, lora: Mapping[str, Any], *, ticket: int | None = None, is_temporary: bool = False
    ) -> int:
        """Begin to load an adapter; return the ticket to ask for it with.

        Args:
            ticket: a number that the caller chooses, as for several engines; None for any.
            is_temporary: whether the program removes the files once they are loaded, so that this
                engine needs links to them.

        Raises:
            RequestError: its number is another adapter's, or it has no path; or a scale, which
                requests have.
        """
        new = requested_lora(lora)
        if not new.path:
            raise RequestError(f"lora.path: expected the folder of {new.name!r}, got an empty one")
        if new.scale != 1.0:
            raise RequestError(
                f"lora.scale: expected 1.0, as each request has a scale of its own, got {new.scale}"
            )
        self._names.check_number(new)
        if is_temporary:
            new = msgspec.structs.replace(new, path=self._links.add(new.path))
        self._readings.drop_unasked(_UNASKED_SECONDS)
        return self._readings.begin(new.path, new, ticket)

    def _poll(self, ticket: int) -> dict[str, Any] | None:
        """Return an adapter that was loaded, under its name now; None while it is read.

        Raises:
            RequestError: there is no such ticket.
        """
        reading = self._readings.get(ticket)
        if reading is None or reading.lora is None:
            raise RequestError(
                f"ticket: expected the ticket of an adapter being loaded, got {ticket}"
            )
        reading.asked = self._clock()
        content = self._readings.progress(ticket)
        if content is None:
            return None
        new = reading.lora
        try:
            self._names.check_number(new)
            if new.content_hash not in ("", content):
                raise ModelError(
                    f"{new.path}: lora.content_hash: expected {content}, got {new.content_hash}"
                )
        except HardpointError:
            self._readings.drop(ticket)
            raise
        lora = msgspec.structs.replace(new, content_hash=content)
        self._set_alias(lora)
        self._keep(ticket, content)
        return msgspec.structs.asdict(lora)

    def _remove(self, lora_id: int, mode: str) -> bool:
        """Forget a name; return whether there was one.

        Raises:
            RequestError: an unknown mode.
        """
        if mode not in ("drain", "end"):
            raise RequestError(f'mode: expected "drain" or "end", got {mode!r}')
        lost = filter(self._names.is_lost, self._named.values())  # of requests alone
        lora = self._names.with_number(lora_id)
        lora = lora or next((other for other in lost if other.id == lora_id), None)
        self._names.note_removed(lora_id)
        if lora is None:
            return False
        replaced = self._names.remove(lora.name)
        if mode == "end":  # also requests with an earlier content of the name
            users = self._named.items()
            self._ending |= {user for user, has in users if has.name == lora.name}
        contents = dict.fromkeys([lora.content_hash, *replaced])
        if unused := [content for content in contents if self._leave(content)]:
            self._forget(unused)
        return True

    def _list(self) -> list[dict[str, Any]]:
        return [msgspec.structs.asdict(lora) for lora in self._names]

    def _pin(self, lora_id: int) -> bool:
        """Keep an adapter in CPU memory; return whether there is one.

        Raises:
            RequestError: as many as there is room for are kept already.
        """
        lora = self._names.with_number(lora_id)
        if lora is None:
            return False
        pinned, limit = self._pinned | {lora.content_hash}, self._config.num_cpu_loras
        if len(pinned) > limit:
            raise RequestError(
                f"lora_id: {limit} adapters are pinned, as many as adapters.max_cpu_loras, "
                f"got {lora_id}"
            )
        self._pinned = pinned
        return True

    # Contents

    def _set_alias(self, lora: LoRARequest) -> None:
        for earlier in self._names.set(lora):
            self._leave(earlier)
        self._pinned = set(filter(self._names.has_content, self._pinned))
        self._leaving.discard(lora.content_hash)
        self._paths[lora.content_hash] = lora.path

    def _leave(self, content: str) -> bool:
        """Let a content without a name go after its last request; return whether it has none."""
        if self._names.has_content(content):
            return False
        self._pinned.discard(content)
        if content in self._requests.values():
            self._leaving.add(content)
            return False
        self._paths.pop(content, None)  # workers keep it until the next reading
        return True

    def _is_needed(self, content: str) -> bool:
        return content in self._requests.values() or self._names.has_content(content)

    def _is_read(self, content: str) -> bool:
        """Read a content that requests need; return whether workers have it now.

        Raises:
            ModelError: it cannot be read, or is another one now.
        """
        ticket = self._wanted.get(content)
        if ticket is None:
            self._wanted[content] = self._readings.begin(self._paths[content], None)
            return False
        try:
            progress = self._readings.progress(ticket)
            if progress not in (None, content):
                self._readings.drop(ticket)
                raise ModelError(
                    f"{self._paths[content]}: its files have changed since the adapter was added"
                )
        except ModelError:
            del self._wanted[content]
            raise
        if progress is None:
            return False
        del self._wanted[content]
        self._keep(ticket, content)
        return True

    def _keep(self, ticket: int, content: str) -> None:
        self._host[content] = self._clock()
        needed = self._pinned | self._groups.with_content(content)
        evictable = [
            other
            for other in sorted(self._host, key=self._host.__getitem__)
            if other not in needed and not self._leases.has(other)
        ]
        surplus = max(len(self._host) - self._config.num_cpu_loras, 0)
        forgotten = [c for c in evictable if c not in self._paths]
        forgotten += [c for c in evictable if c in self._paths][: max(surplus - len(forgotten), 0)]
        self._readings.keep(ticket, forgotten)
        self._forgotten(forgotten)

    def _forget(self, contents: list[str]) -> None:
        self._readings.forget(contents)
        self._forgotten(contents)

    def _forgotten(self, contents: Sequence[str]) -> None:
        for content in contents:
            self._host.pop(content, None)
            if not self._is_needed(content):
                self._paths.pop(content, None)

    def _remove_unused(self) -> None:
        if self._links:
            named = (lora.path for lora in self._names)
            self._links.remove({*self._paths.values(), *named, *self._readings.paths})
