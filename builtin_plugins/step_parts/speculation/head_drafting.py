"""Drafting by heads: speculators with layers in the engine's KV cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hardpoint.plugins import DraftRequest, EngineConfig, SchedulerOutput
from hardpoint.plugins.step_part import CacheObserver, ResidualStream
from hardpoint.plugins.worker_half import WorkerHalfContext

from .drafting import Drafted, DraftingFromHidden

if TYPE_CHECKING:
    import torch

    from hardpoint.plugins.model.forward import Branch
    from hardpoint.plugins.step_part.worker_data import AllocatedCache, StepRows


@dataclass
class _Blocks:
    """The blocks of a request.

    Attributes:
        ids: its block table.
        keys: hash of all tokens up to the end of each block.
        start: first position with keys and values of its head; None until it is known.
        end: position after the last hidden state that its head got.
    """

    ids: list[int]
    keys: list[int] = field(default_factory=list)
    start: int | None = None
    end: int = -1

    def key(self, index: int, request: DraftRequest, size: int) -> int:
        """Return the key of a block that the request has filled."""
        prompt, output = request.prompt_token_ids, request.output_token_ids
        while len(self.keys) <= index:
            first, last = len(self.keys) * size, (len(self.keys) + 1) * size
            rest = output[max(first - len(prompt), 0) : max(last - len(prompt), 0)]
            tokens = (*prompt[first:last], *rest)
            before = self.keys[-1] if self.keys else request.scope
            self.keys.append(hash((before, tokens)))
        return self.keys[index]


class DraftingByHeads(DraftingFromHidden, CacheObserver):
    """As `DraftingFromHidden`, for speculators of which some are heads.

    It follows block tables, and keeps the key of each block that a head has filled: blocks of
    requests without the head have nothing of it, and blocks are used again.
    """

    def __init__(self, config: EngineConfig, context: WorkerHalfContext) -> None:
        """Build the speculators.

        Raises:
            PluginError: one cannot be built; the others are closed.
        """
        super().__init__(config, context)
        self._heads = {name for name, s in self._speculators.items() if s.has_kv_cache}
        self._blocks: dict[str, _Blocks] = {}
        self._filled: dict[str, dict[int, int]] = {}  # by head: key by block
        self._block_size, self._group = 1, 0
        self._step_ids: set[str] = set()  # requests with hidden states of the step

    def cache_allocated(self, cache: AllocatedCache) -> None:
        """Give the KV cache to the heads; no block is filled."""
        self._block_size, self._group = cache.block_size, list(cache.windows).index(None)
        for name in self._heads:
            self._filled[name] = {}
            self._speculators[name].cache_allocated(cache)

    def cache_released(self) -> None:
        """Let the heads forget the KV cache."""
        for name in self._heads:
            self._speculators[name].cache_released()

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:
        """Take the data of a step, and the blocks of its requests."""
        super().begin(plan, data)
        self._step_ids = set()
        for new in plan.new_requests:
            table = list(new.block_ids[self._group]) if new.block_ids else []
            self._blocks[new.source.request_id] = _Blocks(table)
            if new.released_columns:
                del self._blocks[new.source.request_id]
        for request_id in plan.cached_requests.released_columns:  # a head sees all tokens
            self._blocks.pop(request_id, None)
        for request_id, block_ids in plan.cached_requests.new_block_ids.items():
            if (blocks := self._blocks.get(request_id)) is not None:
                blocks.ids += block_ids[self._group]

    def hidden(self, hidden: torch.Tensor, rows: StepRows) -> None:
        """Keep the hidden states of the step."""
        super().hidden(hidden, rows)
        self._step_ids = set(rows.request_ids)

    def _always_drafts(self, known: Drafted) -> bool:
        return known.speculator in self._heads

    def _without_token(
        self, token_ids: Mapping[str, Sequence[int]]
    ) -> dict[str, list[DraftRequest]]:
        """Return the requests of heads with a part of their prompt in the step."""
        shown: dict[str, list[DraftRequest]] = {}
        for name in sorted(self._step_ids - token_ids.keys()):
            known = self._known.get(name)
            if known is not None and self._always_drafts(known):
                self._show_hidden(known, 0)
                known.request.limit = 0
                shown.setdefault(known.speculator, []).append(known.request)
        return shown

    def _propose(self, name: str, requests: list[DraftRequest], budget: int) -> int:
        if name in self._heads:
            # A request may find a block in the step that fills it, and then starts after it.
            for request in sorted(requests, key=lambda request: request.hidden_start):
                self._fill(request, self._filled[name])
        drafted = super()._propose(name, requests, budget)
        if name in self._heads and name in self._failing:
            self._filled[name].clear()
        return drafted

    def _fill(self, request: DraftRequest, filled: dict[int, int]) -> None:
        """Set the fields of the cache, and note the blocks that the hidden states fill."""
        blocks, size = self._blocks.get(request.request_id), self._block_size
        if blocks is None or request.hidden is None:
            request.block_ids = ()
            return
        start, end = request.hidden_start, request.hidden_start + len(request.hidden)
        if blocks.start is None or start != blocks.end:
            index = -(-start // size)  # slots before it in its block may not be written
            while index * size <= start and index:
                if filled.get(blocks.ids[index - 1]) != blocks.key(index - 1, request, size):
                    break
                index -= 1
            blocks.start = index * size
        blocks.end, request.block_ids, request.cache_start = end, blocks.ids, blocks.start
        for index in range(max(start, blocks.start) // size, min(end // size, len(blocks.ids))):
            filled[blocks.ids[index]] = blocks.key(index, request, size)

    def finished(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""
        super().finished(request_ids)
        for name in request_ids:
            self._blocks.pop(name, None)


class DraftingByLayers(DraftingByHeads, ResidualStream):
    """As `DraftingByHeads`, for heads of which some read hidden states of several layers."""

    def __init__(self, config: EngineConfig, context: WorkerHalfContext) -> None:
        """Build the speculators.

        Raises:
            PluginError: one cannot be built; the others are closed.
        """
        super().__init__(config, context)
        speculators = self._speculators.values()
        self.layers = frozenset(i for s in speculators if s.needs_layers for i in s.hidden_layers)
        self._after: dict[int, torch.Tensor] = {}  # residual stream of the step, by layer

    def begin(self, plan: SchedulerOutput, data: bytes) -> None:
        """Take the data of a step."""
        self._after = {}
        super().begin(plan, data)

    def added(
        self,
        layer: int,
        branch: Branch,
        residual: torch.Tensor,
        delta: torch.Tensor,
        rows: StepRows,  # noqa: ARG002
    ) -> None:
        """Keep the residual stream after a layer."""
        if branch == "mlp":
            self._after[layer] = residual + delta

    def _rows_for(self, known: Drafted, hidden: torch.Tensor, start: int, end: int) -> torch.Tensor:
        import torch  # noqa: PLC0415 - features load without it

        speculator = self._speculators[known.speculator]
        if not speculator.needs_layers:
            return super()._rows_for(known, hidden, start, end)
        return torch.cat([self._after[i][start:end] for i in speculator.hidden_layers], -1)
