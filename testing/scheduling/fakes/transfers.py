"""The workers' half of the scripted connector: loads and saves that take steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hardpoint.plugins import ModelRunnerOutput, SchedulerOutput
from hardpoint.testing.scheduling.checks.names import TRANSFER

from .connector import Load, Save, Work
from .memory import Content, Memory, histories

__all__ = ["WorkerTransfers"]


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
