"""Scripted collaborators of a scheduler: a KV connector and grammars that do as they are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hardpoint.plugins import (
    BlockIds,
    GrammarBitmask,
    ModelRunnerOutput,
    Request,
    RequestError,
    SchedulerOutput,
)
from hardpoint.testing.scheduling.checks.names import TRANSFER

from .memory import Content, Memory, histories


@dataclass(frozen=True)
class Transfer:
    """What a scripted connector does for a request.

    Attributes:
        tokens: how many it has, beyond what the local cache has; cut where the request ends.
        steps: so many steps after the one that began it they are there, while the request waits;
            None loads them within the step.
        asks: how often it answers that it does not know yet.
        fails: index of the loaded block that cannot be loaded; None is none.
        keeps: so many steps after its end its blocks are still needed; 0 lets them go at once.
    """

    tokens: int = 0
    steps: int | None = None
    asks: int = 0
    fails: int | None = None
    keeps: int = 0


NO_TRANSFER = Transfer()


@dataclass(frozen=True)
class Load:
    """Tokens that the worker has to load: positions `start` up to `end`."""

    request: Request
    start: int
    end: int
    tables: tuple[tuple[int, ...], ...]
    transfer: Transfer


@dataclass(frozen=True)
class Save:
    """Blocks that the worker has to keep for so many steps."""

    request_id: str
    tables: tuple[tuple[int, ...], ...]
    steps: int


@dataclass
class Work:
    """What a plan asks of the workers' half."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


class ScriptedConnector:
    """The scheduler's half of a connector that does what it was told per request.

    Attributes:
        last: what the last plan carries.
        allocated: ids of the requests of which `update_state_after_alloc` told, in this step.
    """

    def __init__(self) -> None:
        """Know nothing of any request."""
        self.last: Work | None = None
        self.allocated: set[str] = set()
        self._told: set[str] = set()
        self._scripts: dict[str, Transfer] = {}
        self._asked: dict[str, int] = {}
        self._offers: dict[str, tuple[int, int]] = {}
        self._work = Work()

    def expect(self, request_id: str, transfer: Transfer) -> None:
        """Do this for a request that is about to come."""
        self._scripts[request_id] = transfer
        self._asked[request_id] = 0

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Answer as the script says."""
        transfer = self._scripts.get(request.request_id, NO_TRANSFER)
        if self._asked.get(request.request_id, 0) < transfer.asks:
            self._asked[request.request_id] += 1
            return None, False
        there = max(min(transfer.tokens, request.num_tokens - num_computed_tokens), 0)
        self._offers[request.request_id] = (num_computed_tokens, there)
        return there, transfer.steps is not None and there > 0

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Begin to load."""
        request_id = request.request_id
        self.allocated.add(request_id)
        start, there = self._offers.pop(request_id, (0, 0))
        if num_external_tokens > there:
            raise TRANSFER.broken(
                f"update_state_after_alloc was told of {num_external_tokens} external tokens of "
                f"{request_id!r}, but get_num_new_matched_tokens said {there}"
            )
        if num_external_tokens:
            tables = tuple(tuple(table) for table in block_ids)
            transfer = self._scripts[request_id]
            end = start + num_external_tokens
            self._work.loads.append(Load(request, start, end, tables, transfer))

    def check_admitted(self, request_ids: Iterable[str]) -> None:
        """Check that it was told of the blocks of requests which run from now on."""
        self._told |= self.allocated
        self.allocated = set()
        for request_id in request_ids:
            if request_id not in self._told:
                raise TRANSFER.broken(
                    f"{request_id!r} runs, but update_state_after_alloc was not told of its blocks",
                    "call it after every allocation for a request that is admitted",
                )
            self._told.discard(request_id)

    @property
    def busy(self) -> bool:
        """Whether the next plan carries work."""
        return bool(self._work.loads or self._work.saves)

    def concerns(self, request_id: str) -> bool:
        """Whether the next plan carries work for a request."""
        work = self._work
        loading = any(load.request.request_id == request_id for load in work.loads)
        return loading or any(save.request_id == request_id for save in work.saves)

    def build_connector_meta(self, plan: SchedulerOutput) -> Any:  # noqa: ARG002
        """Return the work of this step."""
        self.last, self._work = self._work, Work()
        return self.last

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """Keep the blocks if the script says so."""
        request_id = request.request_id
        transfer = self._scripts.get(request_id, NO_TRANSFER)
        tables = tuple(tuple(table) for table in block_ids)
        self._offers.pop(request_id, None)
        if not transfer.keeps or not any(tables):
            return False, None
        self._work.saves.append(Save(request_id, tables, transfer.keeps))
        return True, {"kept": request_id}


@dataclass(frozen=True)
class Compile:
    """How a request's grammar is made ready.

    Attributes:
        asks: how often it is not ready when somebody asks.
        fails: whether it turns out to be wrong then.
    """

    asks: int = 0
    fails: bool = False


class ScriptedGrammars:
    """Grammars that are ready, or fail, after so many questions."""

    def __init__(self) -> None:
        """Know of no grammar."""
        self._scripts: dict[str, Compile] = {}
        self._asked: dict[str, int] = {}

    def expect(self, request_id: str, compile_: Compile | None) -> None:
        """Do this for a request that is about to come; None is one without a grammar."""
        self._asked[request_id] = 0
        self._scripts.pop(request_id, None)
        if compile_ is not None:
            self._scripts[request_id] = compile_

    def constrains(self, request_id: str) -> bool:
        """Whether a request has a grammar."""
        return request_id in self._scripts

    def is_ready(self, request_id: str) -> bool:
        """Whether a grammar was said to be ready."""
        return self._asked[request_id] > self._scripts[request_id].asks

    def uses(self, request: Request) -> bool:
        """Whether a grammar constrains a request."""
        return request.request_id in self._scripts

    def ready(self, request: Request) -> bool:
        """Answer as the script says.

        Raises:
            RequestError: the grammar is one of those that fail.
        """
        script = self._scripts[request.request_id]
        asked = self._asked[request.request_id] = self._asked[request.request_id] + 1
        if asked <= script.asks:
            return False
        if script.fails:
            raise RequestError(f"grammar: that of {request.request_id!r} cannot be compiled")
        return True

    def bitmask(self, plan: SchedulerOutput) -> GrammarBitmask | None:  # noqa: ARG002
        """Return None: a scheduler does not ask, and every token is allowed."""
        return None


@dataclass
class _Pending:
    load: Load
    steps: int


@dataclass
class _Kept:
    save: Save
    steps: int


class WorkerTransfers:
    """Loads tokens into the memory, at once or after some steps, and keeps blocks that are saved.

    What it once began it ends, also if the request is gone by then.
    """

    def __init__(self, memory: Memory) -> None:
        """Begin with nothing to do."""
        self._memory = memory
        self._loads: list[_Pending] = []
        self._saves: list[_Kept] = []

    @property
    def busy(self) -> bool:
        """Whether something is not done yet."""
        return bool(self._loads or self._saves)

    def concerns(self, request_id: str) -> bool:
        """Whether something is not done yet for a request."""
        loading = any(p.load.request.request_id == request_id for p in self._loads)
        return loading or any(kept.save.request_id == request_id for kept in self._saves)

    def user_of(self, blocks: Iterable[int]) -> tuple[int, str] | None:
        """Return one of these blocks that is being loaded or saved, and for which request."""
        wanted = set(blocks)
        used = [(p.load.request.request_id, self._loaded_blocks(p.load)) for p in self._loads]
        used += [(k.save.request_id, {b for t in k.save.tables for b in t}) for k in self._saves]
        for request_id, theirs in used:
            if shared := wanted & theirs:
                return min(shared), request_id
        return None

    def begin(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Take a plan's work; do what is to be done within the step."""
        work = plan.kv_connector_metadata
        if not isinstance(work, Work):
            return
        for load in work.loads:
            if load.transfer.steps is None:
                result.invalid_block_ids |= self._load(load, plan.step)
            else:
                self._loads.append(_Pending(load, load.transfer.steps))
        self._saves += [_Kept(save, save.steps) for save in work.saves]

    def go_on(self, step: int, result: ModelRunnerOutput) -> None:
        """Take the others one step further, and say what is done."""
        for pending in list(self._loads):
            pending.steps -= 1
            if pending.steps <= 0:
                self._loads.remove(pending)
                result.invalid_block_ids |= self._load(pending.load, step)
                result.kv_loaded |= {pending.load.request.request_id}
        for kept in list(self._saves):
            kept.steps -= 1
            if kept.steps <= 0:
                self._saves.remove(kept)
                result.kv_saved |= {kept.save.request_id}

    def _load(self, load: Load, step: int) -> set[int]:
        """Write what was loaded; return the blocks that could not be."""
        source = load.request.source
        tokens = load.request.token_ids(0, load.end)
        if len(tokens) < load.end:
            raise TRANSFER.broken(
                f"{load.end} tokens of {source.request_id!r} are to be loaded, it has {len(tokens)}"
            )
        lora = None if source.lora is None else source.lora.name
        size, failing = self._memory.block_size, load.transfer.fails
        invalid: set[int] = set()
        values = histories(source, tokens)
        for group, table in enumerate(load.tables):
            for position in range(load.start, load.end):
                bad = failing is not None and (position - load.start) // size == failing
                content = Content(group, position, values[position], source.cache_salt, lora)
                self._memory.write(table, content, source.request_id, step if bad else 0)
                if bad:
                    invalid.add(table[position // size])
        return invalid

    def _loaded_blocks(self, load: Load) -> set[int]:
        size = self._memory.block_size
        first, end = load.start // size, -(-load.end // size)
        return {block for table in load.tables for block in table[first:end]}
