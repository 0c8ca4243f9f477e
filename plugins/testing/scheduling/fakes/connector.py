"""Scripted collaborators of a scheduler: a KV connector and grammars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hardpoint.plugins import (
    BlockIds,
    ModelRunnerOutput,
    Request,
    RequestError,
    SchedulerOutput,
    WaitingFor,
    WaitReason,
)
from hardpoint.testing.scheduling.rules import KV_TRANSFER

from .memory import KVContent, KVMemory, history_hashes

_COMPILING = WaitReason(WaitingFor.GRAMMAR, "its grammar is being compiled")


@dataclass(frozen=True)
class Transfer:
    """How a scripted connector treats a request.

    Attributes:
        tokens: number of tokens that it has beyond the local cache, at most the request's.
        load_steps: number of steps that loading takes, while the request waits; None loads within
            the step that begins it.
        pending_lookups: number of lookups that it answers with "not known yet".
        failed_block: index of the loaded block that fails to load; None for no failure.
        save_steps: number of steps for which it saves the blocks of the finished request; 0
            releases them at once.
    """

    tokens: int = 0
    load_steps: int | None = None
    pending_lookups: int = 0
    failed_block: int | None = None
    save_steps: int = 0


NO_TRANSFER = Transfer()


@dataclass(frozen=True)
class LoadJob:
    """Tokens that the worker has to load: positions `start` to `end`, exclusive."""

    request: Request
    start: int
    end: int
    tables: tuple[tuple[int, ...], ...]
    transfer: Transfer


@dataclass(frozen=True)
class SaveJob:
    """Blocks that the worker saves for `steps` steps."""

    request_id: str
    tables: tuple[tuple[int, ...], ...]
    steps: int


@dataclass
class TransferJobs:
    """The connector metadata of a plan: the blocks that the worker's half has to load and save."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


class ScriptedConnector:
    """Transfers of blocks that follow a script per request.

    Attributes:
        allocated: ids passed to `update_state_after_alloc` since the last plan.
    """

    def __init__(self) -> None:
        self._planned: dict[int, TransferJobs] = {}  # by step
        self.allocated: set[str] = set()
        self._notified: set[str] = set()
        self._scripts: dict[str, Transfer] = {}
        self._lookups: dict[str, int] = {}
        self._offers: dict[str, tuple[int, int]] = {}
        self._jobs = TransferJobs()

    def expect(self, request_id: str, transfer: Transfer) -> None:
        """Set the script of a request before it is added."""
        self._scripts[request_id] = transfer
        self._lookups[request_id] = 0

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of external tokens, as in the script."""
        transfer = self._scripts.get(request.request_id, NO_TRANSFER)
        if self._lookups.get(request.request_id, 0) < transfer.pending_lookups:
            self._lookups[request.request_id] += 1
            return None, False
        available = max(min(transfer.tokens, request.num_tokens - num_computed_tokens), 0)
        self._offers[request.request_id] = (num_computed_tokens, available)
        return available, transfer.load_steps is not None and available > 0

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Queue the load of a request's external tokens."""
        request_id = request.request_id
        self.allocated.add(request_id)
        start, available = self._offers.pop(request_id, (0, 0))
        if num_external_tokens > available:
            raise KV_TRANSFER.violation(
                f"update_state_after_alloc got {num_external_tokens} external tokens of "
                f"{request_id!r}, but get_num_new_matched_tokens returned {available}"
            )
        if num_external_tokens:
            tables = tuple(tuple(table) for table in block_ids)
            transfer = self._scripts[request_id]
            end = start + num_external_tokens
            self._jobs.loads.append(LoadJob(request, start, end, tables, transfer))

    def check_admitted(self, request_ids: Iterable[str]) -> None:
        """Check that it was notified of the blocks of newly running requests."""
        self._notified |= self.allocated
        self.allocated = set()
        for request_id in request_ids:
            if request_id not in self._notified:
                raise KV_TRANSFER.violation(
                    f"{request_id!r} runs, but update_state_after_alloc was not called for it",
                    "call it after every allocation for a request that is admitted",
                )
            self._notified.discard(request_id)

    @property
    def has_jobs(self) -> bool:
        """Return whether the next plan carries jobs."""
        return bool(self._jobs.loads or self._jobs.saves)

    def has_jobs_for(self, request_id: str) -> bool:
        """Return whether the next plan carries jobs for a request."""
        jobs = self._jobs
        loading = any(load.request.request_id == request_id for load in jobs.loads)
        return loading or any(save.request_id == request_id for save in jobs.saves)

    def take_jobs(self, plan: SchedulerOutput) -> None:
        """Take the jobs of a new plan."""
        self._planned[plan.step], self._jobs = self._jobs, TransferJobs()

    def jobs_of(self, plan: SchedulerOutput) -> TransferJobs:
        """Return the jobs of a plan, which the worker gets once."""
        return self._planned.pop(plan.step, TransferJobs())

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Queue the save of the request's blocks, if the script has one."""
        request_id = request.request_id
        transfer = self._scripts.get(request_id, NO_TRANSFER)
        tables = tuple(tuple(table) for table in block_ids)
        self._offers.pop(request_id, None)
        if not transfer.save_steps or not any(tables):
            return False, None
        self._jobs.saves.append(SaveJob(request_id, tables, transfer.save_steps))
        return True, {"kept": request_id}


@dataclass(frozen=True)
class Compile:
    """How a request's grammar compiles.

    Attributes:
        pending_polls: number of `ready` calls that return False.
        fails: True if compilation fails after them.
    """

    pending_polls: int = 0
    fails: bool = False


class ScriptedGrammars:
    """Grammars that are ready, or fail, after a scripted number of polls."""

    def __init__(self) -> None:
        self._scripts: dict[str, Compile] = {}
        self._polls: dict[str, int] = {}

    def expect(self, request_id: str, compile_: Compile | None) -> None:
        """Set the script of a request before it is added; None for one without a grammar."""
        self._polls[request_id] = 0
        self._scripts.pop(request_id, None)
        if compile_ is not None:
            self._scripts[request_id] = compile_

    def constrains(self, request_id: str) -> bool:
        """Return whether a request has a grammar."""
        return request_id in self._scripts

    def is_ready(self, request_id: str) -> bool:
        """Return whether a grammar was reported as ready."""
        return self._polls[request_id] > self._scripts[request_id].pending_polls

    def holds(self, request: Request) -> bool:
        """Return whether a grammar constrains a request."""
        return request.request_id in self._scripts

    def wait_reason(self, request: Request) -> WaitReason | None:
        """Poll a grammar; return why the request waits.

        Raises:
            RequestError: its script makes it fail.
        """
        script = self._scripts[request.request_id]
        polls = self._polls[request.request_id] = self._polls[request.request_id] + 1
        if polls <= script.pending_polls:
            return _COMPILING
        if script.fails:
            raise RequestError(f"grammar: the grammar of {request.request_id!r} cannot be compiled")
        return None

    def lacks(self, request: Request) -> WaitReason | None:  # noqa: ARG002
        """Return None: no resources are counted."""
        return None

    def acquire(self, request: Request) -> None:
        """Count nothing."""

    def release(self, request: Request) -> None:
        """Release nothing."""


@dataclass
class _RunningLoad:
    job: LoadJob
    steps_left: int


@dataclass
class _RunningSave:
    job: SaveJob
    steps_left: int


class WorkerTransfers:
    """The worker's half of the connector: loads tokens into the KV memory, and saves blocks.

    A job runs to its end even if its request finishes before.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._loads: list[_RunningLoad] = []
        self._saves: list[_RunningSave] = []

    @property
    def has_jobs(self) -> bool:
        """Return whether any job is running."""
        return bool(self._loads or self._saves)

    def has_jobs_for(self, request_id: str) -> bool:
        """Return whether any job of a request is running."""
        loading = any(load.job.request.request_id == request_id for load in self._loads)
        return loading or any(save.job.request_id == request_id for save in self._saves)

    def find_user(self, blocks: Iterable[int]) -> tuple[int, str] | None:
        """Return a block of `blocks` that is being loaded or saved, and the request's id."""
        wanted = set(blocks)
        used = [(x.job.request.request_id, self._loaded_blocks(x.job)) for x in self._loads]
        used += [(x.job.request_id, {b for t in x.job.tables for b in t}) for x in self._saves]
        for request_id, in_use in used:
            if shared := wanted & in_use:
                return min(shared), request_id
        return None

    def start(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Start a plan's jobs; run the jobs that take no further step."""
        jobs = plan.kv_connector_metadata
        if not isinstance(jobs, TransferJobs):
            return
        for load in jobs.loads:
            if load.transfer.load_steps is None:
                result.invalid_block_ids |= self._load(load, plan.step)
            else:
                self._loads.append(_RunningLoad(load, load.transfer.load_steps))
        self._saves += [_RunningSave(save, save.steps) for save in jobs.saves]

    def advance(self, step: int, result: ModelRunnerOutput) -> None:
        """Advance the running jobs by one step; add the finished ones to the result."""
        for load in list(self._loads):
            load.steps_left -= 1
            if load.steps_left <= 0:
                self._loads.remove(load)
                result.invalid_block_ids |= self._load(load.job, step)
                result.kv_loaded |= {load.job.request.request_id}
        for save in list(self._saves):
            save.steps_left -= 1
            if save.steps_left <= 0:
                self._saves.remove(save)
                result.kv_saved |= {save.job.request_id}

    def _load(self, load: LoadJob, step: int) -> set[int]:
        source = load.request.source
        tokens = load.request.token_ids(0, load.end)
        if len(tokens) < load.end:
            raise KV_TRANSFER.violation(
                f"{load.end} tokens of {source.request_id!r} are to be loaded, but it has "
                f"{len(tokens)}"
            )
        lora = None if source.lora is None else source.lora.name
        size, failing = self._memory.block_size, load.transfer.failed_block
        invalid: set[int] = set()
        values = history_hashes(source, tokens)
        for group, table in enumerate(load.tables):
            for position in range(load.start, load.end):
                bad = failing is not None and (position - load.start) // size == failing
                content = KVContent(group, position, values[position], source.cache_salt, lora)
                self._memory.write(table, content, source.request_id, step if bad else 0)
                if bad:
                    invalid.add(table[position // size])
        return invalid

    def _loaded_blocks(self, load: LoadJob) -> set[int]:
        size = self._memory.block_size
        first, end = load.start // size, -(-load.end // size)
        return {block for table in load.tables for block in table[first:end]}
