"""The persistent batch: the worker's state of its requests, as arrays by row; inputs of steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch

from hardpoint.plugins import AttentionStep, BatchUpdate, LogitsRequest, Move
from hardpoint.plugins.device import to_device
from hardpoint.plugins.kv_cache import BlockIds
from hardpoint.plugins.requests.params import EngineCoreRequest, SamplingParams
from hardpoint.plugins.requests.plan import CachedRequests, SampledTokens
from hardpoint.plugins.sampling.rows import Added
from hardpoint.toolkit.batches.groups import RowGroups
from hardpoint.toolkit.batches.packed_step import IntArray, PackedStep
from hardpoint.toolkit.batches.spans import Spans
from hardpoint.toolkit.batches.table_columns import remove_columns
from hardpoint.toolkit.batches.update_builder import BatchUpdateBuilder
from hardpoint.typed import ReadOnlyDict

Drafts = Mapping[str, Sequence[int]]
"""Draft tokens by request id, as in a plan."""

_FREE_ROW = LogitsRequest("", (), [], SamplingParams(), ())
"""The request of a row that has none."""


@dataclass(eq=False)
class StepInput:
    """The tokens of one step, flattened; sequences with a single token come first.

    Attributes:
        requests: in the order of the step's sequences.
        token_ids: int64 [tokens].
        positions: int64 [tokens].
        attention: the layout of the sequences for the attention backend, one per KV cache group.
        query_starts: as in each of `attention`.
        starts: int [seqs]; tokens of each sequence that were computed before.
        samples: bool [seqs]; whether the step reaches the sequence's last known token or draft.
        packed: the tensors in one; None if the batch does not pack them.
        token_types, needed: as in ForwardBatch.
    """

    requests: Sequence[LogitsRequest]
    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: Sequence[AttentionStep]
    query_starts: IntArray
    starts: IntArray
    samples: np.ndarray[Any, np.dtype[np.bool_]]
    packed: PackedStep | None = None
    token_types: torch.Tensor | None = None
    needed: torch.Tensor | None = None

    def read_tokens(self, device: torch.device) -> torch.Tensor | None:
        """Return the rows of hidden states to read, for `needed`; None for all."""
        if len(self.token_ids) == len(self.requests):
            return None
        for request in self.requests:
            if request.params.prompt_logprobs is not None or request.params.routed_experts:
                return None
        last = self.query_starts[1:] - 1
        return to_device(last[self.samples] if self.samples.any() else last[:1], device)

    def samples_without(
        self, request_ids: Collection[str], requests: Collection[LogitsRequest]
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return `samples` without these ids and without these requests."""
        samples = self.samples.copy()
        samples[[r.request_id in request_ids or r in requests for r in self.requests]] = False
        return samples

    def replace_last(self, tokens: Mapping[LogitsRequest, int | None]) -> None:
        """Replace the last token of each request that has another one."""
        for index, request in enumerate(self.requests):
            if (token := tokens.get(request)) is not None:
                self.token_ids[int(self.query_starts[index + 1]) - 1] = token

    def experts_by_request(self, routed: torch.Tensor) -> dict[str, Any]:
        """Return the experts of the tokens of each request that asks for them."""
        rows, starts = routed.cpu().numpy(), self.query_starts
        return {
            request.request_id: rows[starts[index] : starts[index + 1]].copy()
            for index, request in enumerate(self.requests)
            if request.params.routed_experts
        }


class InputBatch:
    """The persistent batch. Between `settle` and the next removal, rows 0 to n-1 are in use.

    Attributes:
        max_model_len: tokens of a row.
        block_size: tokens per block.
        num_groups: KV cache groups.
        groups: groups of requests.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int = 1,
        *,
        packs: bool = False,
        attention_defaults: Any = None,
    ) -> None:
        """Allocate the arrays; their memory is touched as rows fill.

        Args:
            max_num_seqs: rows.
            num_groups: KV cache groups; each has a block table for each row.
            packs: whether a step's tensors are parts of one, which one copy takes to a device.
            attention_defaults: arguments for the attention backend of requests that have none.
        """
        self.max_model_len, self.block_size = max_model_len, block_size
        self._packs, self._attention_defaults = packs, attention_defaults
        self._token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        width = -(-max_model_len // block_size)
        self._blocks = np.zeros((num_groups, max_num_seqs, width), dtype=np.int32)
        self.num_groups = num_groups
        # The same memory: numpy takes longer to look up in three dimensions.
        self._tables = self._blocks if num_groups > 1 else self._blocks[0]
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_released = np.zeros(max_num_seqs, dtype=np.int64)  # tokens without blocks
        self._second_types = np.full(max_num_seqs, max_model_len)  # where token types are 1
        self._has_types = False  # whether a request has had some
        self._added_in: dict[str, int] = {}
        self._last_sampled = 0  # step of another rank whose tokens came last
        self._late_ids: torch.Tensor | None = None  # tokens of the last step, on the device
        self._late_at = np.full(max_num_seqs, -1, dtype=np.int64)  # index of a row's late token
        self._drafted: set[str] = set()  # requests with drafts in their last step
        self._spans: Spans | None = None  # of requests with bidirectional attention, if any came
        self._for_attention: dict[str, Any] = {}  # arguments of requests that have some
        self._requests: list[LogitsRequest] = []
        self._outputs: list[list[int]] = []
        self._row_of: dict[str, int] = {}
        self._updates = BatchUpdateBuilder()
        self.groups = RowGroups()

    def __len__(self) -> int:
        return len(self._row_of)

    def add(
        self,
        request: LogitsRequest,
        output_token_ids: list[int],
        block_ids: BlockIds,
        num_computed_tokens: int,
        step: int = 0,
        second_type_start: int | None = None,
        attention: Any = None,
    ) -> None:
        """Add a request in the lowest free row.

        Args:
            output_token_ids: the request's live list.
            block_ids: its block table, one per group.
            num_computed_tokens: number of tokens with keys and values in these blocks.
            step: number of the plan that adds it.
            second_type_start: as in EngineCoreRequest.
            attention: its arguments for the attention backend, if it has some.
        """
        row = self._updates.pop_removed()
        if row is None:
            row = len(self._requests)
            self._requests.append(_FREE_ROW)
            self._outputs.append([])
        self._requests[row] = request
        self._outputs[row] = output_token_ids
        self._place(request, row)
        self._added_in[request.request_id] = step
        known = [*request.prompt_token_ids, *output_token_ids]
        known = [token or 0 for token in known] if None in known else known  # for embeddings
        self._token_ids[row, : len(known)] = known
        self._num_tokens[row] = len(known)
        self._num_computed[row] = num_computed_tokens
        types = len(known) if second_type_start is None else second_type_start
        has_types = types < len(request.prompt_token_ids)
        self._second_types[row] = types if has_types else self.max_model_len
        self._has_types |= has_types
        self._num_blocks[row] = self._num_released[row] = 0
        self._late_at[row] = -1
        self._blocks[:, row] = 0
        self.extend_blocks(request.request_id, block_ids)
        self._updates.add(self._added(row))
        if attention is not None:
            self._for_attention[request.request_id] = attention

    def add_spans(self, request: EngineCoreRequest) -> None:
        """Add the bidirectional attention spans of a request that was added."""
        self._spans = self._spans or Spans()
        self._spans.add(request)

    def extend_blocks(self, request_id: str, block_ids: BlockIds) -> None:
        """Append blocks to a request's tables, as many to each."""
        if block_ids and (count := len(block_ids[0])):
            row = self._row_of[request_id]
            held = self._num_blocks[row]
            self._blocks[:, row, held : held + count] = block_ids
            self._num_blocks[row] += count

    def release_columns(self, request_id: str, columns: Iterable[tuple[int, int]]) -> None:
        """Remove columns of a request's tables, one range after the other."""
        row = self._row_of[request_id]
        count = remove_columns(self._blocks[:, row], int(self._num_blocks[row]), columns)
        self._num_blocks[row] -= count
        self._num_released[row] += count * self.block_size

    def remove(self, request_ids: frozenset[str]) -> None:
        """Remove the requests that are in the batch; skip others."""
        # The smaller one is walked: most of a hundred thousand that ended may never have run. The
        # operator & of keys and a frozenset walks the set.
        known = self._row_of
        if self.groups.by_leader:
            self.groups.remove(request_ids)
        fewer = request_ids if len(request_ids) < len(known) else known
        for request_id in [name for name in fewer if name in request_ids and name in known]:
            row = known.pop(request_id)
            del self._added_in[request_id]
            self._drafted.discard(request_id)
            self._for_attention.pop(request_id, None)
            if self._spans is not None:
                self._spans.remove(request_id)
            self._requests[row] = _FREE_ROW
            self._updates.remove(row)

    def settle(self) -> BatchUpdate | None:
        """Move the last rows into free ones; return the update since the last call."""
        self._trim()
        while (hole := self._updates.peek_removed()) is not None:
            last = len(self._requests) - 1
            if hole > last:
                break
            self._updates.pop_removed()
            self._move(last, hole)
            self._updates.move(last, hole, Move.UNIDIRECTIONAL)
            self._trim()
        return self._updates.get_and_reset(len(self._requests))

    def full_update(self) -> BatchUpdate:
        """Return the settled batch as an update that adds every request."""
        rows = range(len(self._requests))
        return BatchUpdate(len(rows), added=tuple(self._added(row) for row in rows))

    def _added(self, row: int) -> Added:
        request = self._requests[row]
        params = msgspec.structs.replace(
            request.params, plugin_args=ReadOnlyDict(request.arguments)
        )
        prompt: Sequence[int] | None = request.prompt_token_ids
        if prompt and prompt[0] is None and all(token is None for token in prompt):
            prompt = None
        return Added(row, params, prompt, self._outputs[row], request.generation)

    def _place(self, request: LogitsRequest, row: int) -> None:
        object.__setattr__(request, "row", row)  # frozen, since processors get it
        self._row_of[request.request_id] = row

    def _trim(self) -> None:
        while self._requests and self._requests[-1] is _FREE_ROW:
            self._requests.pop()
            self._outputs.pop()

    def append(self, request_id: str, token: int) -> None:
        """Append a sampled token to a request."""
        row = self._row_of[request_id]
        self._token_ids[row, self._num_tokens[row]] = token
        self._num_tokens[row] += 1
        list.append(self._outputs[row], token)  # processors cannot: theirs is a ReadOnlyList

    def append_late(self, requests: Sequence[LogitsRequest], ids: torch.Tensor) -> None:
        """Append a token on the device to each request; `settle_late` brings it to the host.

        Args:
            ids: int64 [requests].
        """
        at: Sequence[int] = range(len(requests))
        if self.groups.by_leader:
            requests, at = self.groups.with_members(requests)
        rows = np.array([request.row for request in requests], np.int64)
        self._token_ids[rows, self._num_tokens[rows]] = -1  # no model takes it for a token
        self._num_tokens[rows] += 1
        self._late_ids, self._late_at[rows] = ids, at

    def settle_late(self, tokens: Mapping[LogitsRequest, int | None]) -> bool:
        """Write the tokens of `append_late`, None takes one back; return whether no row left."""
        self._late_ids, self._late_at[:] = None, -1
        present = [request for request in tokens if self.has(request)]
        rows = np.array([request.row for request in present], np.int64)
        ids = np.array([-1 if (t := tokens[r]) is None else t for r in present], np.int64)
        self._num_tokens[rows] -= ids < 0
        self._token_ids[rows, self._num_tokens[rows] - (ids >= 0)] = np.maximum(ids, 0)
        for request, token in tokens.items():
            if token is not None:
                list.append(request.output_token_ids, token)  # type: ignore[arg-type]
        return len(present) == len(tokens)

    def has(self, request: LogitsRequest) -> bool:
        """Return whether this request, and not another one of its id, is in the batch."""
        return request.row < len(self._requests) and self._requests[request.row] is request

    def append_sampled(self, sampled: SampledTokens) -> None:
        """Append the tokens sampled by another rank; steps come in their order, and some twice.

        Requests that left the batch after that step, and may have come back, are passed over.
        """
        if sampled.step <= self._last_sampled:
            return
        self._last_sampled = sampled.step
        for request_id, tokens in sampled.token_ids.items():
            if self._added_in.get(request_id, sampled.step + 1) <= sampled.step:
                for token in tokens:
                    self.append(request_id, token)

    def drop_rejected(self, cached: CachedRequests) -> None:
        """Count rejected drafts of the last step of a plan's requests as not computed."""
        if not self._drafted:
            return
        for request_id, computed in zip(
            cached.request_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in self._drafted:
                self._drafted.remove(request_id)
                self._num_computed[self._row_of[request_id]] = computed

    def _with_drafts(self, drafts: Drafts) -> IntArray:
        if not drafts:
            return self._num_tokens
        ends = self._num_tokens.copy()
        for request_id, tokens in drafts.items():
            row = self._row_of[request_id]
            known = ends[row]
            ends[row] += len(tokens)
            self._token_ids[row, known : ends[row]] = np.maximum(tokens, 0)  # NO_DRAFT is no token
        self._drafted |= drafts.keys()
        return ends

    def prepare(
        self, scheduled: dict[str, int], device: torch.device, drafts: Drafts = MappingProxyType({})
    ) -> StepInput:
        """Return the input of a step, its drafts included; count its tokens as computed."""
        rows = np.array([self._row_of[request_id] for request_id in scheduled], np.int64)
        counts = np.fromiter(scheduled.values(), np.int64, len(scheduled))
        if (num_single := int(np.count_nonzero(counts == 1))) < len(rows):
            order = np.argsort(counts > 1, kind="stable")
            rows, counts = rows[order], counts[order]
        ends = self._with_drafts(drafts)[rows]
        starts = self._num_computed[rows]
        query_starts = np.zeros(len(rows) + 1, dtype=np.int64)
        counts.cumsum(out=query_starts[1:])
        row_of, positions = rows, starts.copy()
        if num_single < len(rows):
            seq_of = np.repeat(np.arange(len(rows)), counts)
            positions = np.arange(query_starts[-1]) - (query_starts[:-1] - starts)[seq_of]
            row_of = rows[seq_of]
        token_ids = self._token_ids[row_of, positions].astype(np.int64)
        computed = starts + counts
        seq_lens = computed - self._num_released[rows]
        width = -(-int(seq_lens.max()) // self.block_size)
        slots = self._slots_of(row_of, positions - self._num_released[row_of])
        tables = self._tables[..., rows, :width].astype(np.int64, order="C")
        self._num_computed[rows], requests = computed, [self._requests[row] for row in rows]
        step = (requests, starts, query_starts, positions)
        sees = None if self._spans is None else self._spans.last_seen(*step)
        arguments = self._arguments(requests) if self._for_attention else ()
        packed: PackedStep | None = None
        if self._packs or device.type != "cpu":
            by_group = slots.reshape(-1, len(positions)), tables.reshape(-1, len(rows), width)
            packed = PackedStep(token_ids, positions, *by_group, seq_lens, query_starts, device)
        ids = torch.from_numpy(token_ids) if packed is None else packed.token_ids
        self._insert_late(ids, row_of, positions)
        attention = [
            AttentionStep(
                query_starts=query_starts,
                seq_lens=seq_lens,
                num_single=num_single,
                block_table=group_table,
                slots=group_slots,
                block_size=self.block_size,
                group=group,
                sees=sees,
                arguments=arguments,
                on_device=None if packed is None else (packed.starts, packed.lens),
            )
            for group, (group_table, group_slots) in enumerate(_by_group(packed, tables, slots))
        ]
        return StepInput(
            requests=requests,
            token_ids=ids,
            positions=torch.from_numpy(positions) if packed is None else packed.positions,
            attention=attention,
            query_starts=query_starts,
            starts=starts,
            samples=computed == ends,
            packed=packed,
            token_types=self._token_types(row_of, positions, device) if self._has_types else None,
        )

    def _arguments(self, requests: Sequence[LogitsRequest]) -> list[Any]:
        arguments, defaults = self._for_attention, self._attention_defaults
        return [arguments.get(request.request_id, defaults) for request in requests]

    def _slots_of(self, row_of: IntArray, places: IntArray) -> IntArray:
        columns, offsets = places // self.block_size, places % self.block_size
        # Backends read rows of elements side by side; numpy may give the groups side by side.
        blocks: IntArray = self._tables[..., row_of, columns].astype(np.int64, order="C")
        return blocks * self.block_size + offsets

    def _insert_late(self, token_ids: torch.Tensor, row_of: IntArray, positions: IntArray) -> None:
        """Write the tokens that are only on the device into the input of a step."""
        if self._late_ids is None:
            return
        index = self._late_at[row_of]
        places = ((index >= 0) & (positions == self._num_tokens[row_of] - 1)).nonzero()[0]
        if count := len(places):
            late, index = self._late_ids, index[places]
            if count < len(late) or (index != np.arange(count)).any():
                late = late.index_select(0, to_device(index, late.device))
            if places[-1] == count - 1:
                token_ids[:count].copy_(late)
            else:
                token_ids.index_copy_(0, to_device(places, late.device), late)

    def _token_types(
        self, row_of: IntArray, positions: IntArray, device: torch.device
    ) -> torch.Tensor | None:
        """Return the types of the tokens of a step; None if all are 0."""
        types = positions >= self._second_types[row_of]
        return to_device(types.astype(np.int64), device) if types.any() else None

    def _move(self, source: int, target: int) -> None:
        tokens = self._num_tokens[source]
        self._token_ids[target, :tokens] = self._token_ids[source, :tokens]
        self._blocks[:, target] = self._blocks[:, source]
        self._num_tokens[target] = tokens
        self._num_computed[target] = self._num_computed[source]
        self._num_blocks[target] = self._num_blocks[source]
        self._num_released[target] = self._num_released[source]
        self._late_at[target], self._late_at[source] = self._late_at[source], -1
        self._second_types[target] = self._second_types[source]
        request = self._requests[source]
        self._requests[target], self._requests[source] = request, _FREE_ROW
        self._outputs[target] = self._outputs[source]
        self._place(request, target)


def _by_group(
    packed: PackedStep | None, tables: IntArray, slots: IntArray
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    if packed is not None:
        return zip(packed.tables, packed.slots, strict=True)
    both = torch.from_numpy(tables), torch.from_numpy(slots)
    return [both] if slots.ndim == 1 else zip(*(tensor.unbind() for tensor in both), strict=True)
