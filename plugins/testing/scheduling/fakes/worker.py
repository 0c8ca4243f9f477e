"""A worker without a model: executes plans, checks each, and samples scripted tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hardpoint.plugins import (
    EngineCoreRequest,
    ModelRunnerOutput,
    NewRequest,
    RequestFault,
    SchedulerOutput,
)
from hardpoint.plugins.requests import TokenLogprobs
from hardpoint.testing.scheduling.rules import (
    BATCH,
    BLOCKS,
    ENCODER,
    FINISH,
    KV_TRANSFER,
    PLAN,
    POSITIONS,
)

from .connector import WorkerTransfers
from .memory import KVContent, KVMemory, history_hashes

RELEASED = -1
"""In tables, a block that was released."""


@dataclass
class WorkerRow:
    """A request in the worker's batch.

    Attributes:
        token_ids: prompt and outputs.
        tables: block ids per group, `RELEASED` for released ones.
        computed: number of leading tokens with computed keys and values.
        num_valid: number of leading tokens that were not sampled from invalid KV content.
        invalid_from: first position with invalid keys and values; None if all are valid.
        failed: True once a fault of the request was reported.
    """

    source: EngineCoreRequest
    token_ids: list[int]
    tables: list[list[int]]
    computed: int
    num_valid: int = 0
    invalid_from: int | None = None
    failed: bool = False

    @property
    def request_id(self) -> str:
        """Return the request's id."""
        return self.source.request_id

    def release(self, columns: Sequence[tuple[int, int]]) -> None:
        """Release blocks, by their columns in tables without blocks that were released before."""
        for first, end in columns:
            for table in self.tables:
                held = [index for index, block in enumerate(table) if block != RELEASED]
                for index in held[first:end]:
                    table[index] = RELEASED

    def contents(self, tokens: Sequence[int]) -> list[list[KVContent]]:
        """Return the expected slot contents per group and position."""
        source = self.source
        lora = None if source.lora is None else source.lora.name
        values = history_hashes(source, tokens)
        return [
            [KVContent(group, i, value, source.cache_salt, lora) for i, value in enumerate(values)]
            for group in range(len(self.tables))
        ]


@dataclass
class _Span:
    """The tokens of one row that a step computes: positions `start` to `end`, exclusive."""

    row: WorkerRow
    start: int
    end: int
    drafts: Sequence[int]
    contents: list[list[KVContent]]
    invalid_since: int = 0


class SimulatedWorker:
    """Plays executor and workers; raises Violation where a plan cannot be executed.

    Attributes:
        rows: the batch, by request id.
        memory: the KV cache content.
        embeddings: identifiers of encoded features.
        transfers: the worker's half of the KV connector.
        faults: by request id, the number of output tokens after which it fails.
        verified: number of drafts verified.
        accepted: number of drafts accepted.
        uncertain: ids of lost plans, which the scheduler may or may not consider in the batch.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        block_size: int,
        next_token: Callable[[Sequence[int]], int],
    ) -> None:
        """`next_token` continues a token history; `windows` has one entry per KV cache group."""
        self.rows: dict[str, WorkerRow] = {}
        self.memory = KVMemory(block_size)
        self.embeddings: set[str] = set()
        self.transfers = WorkerTransfers(self.memory)
        self.faults: dict[str, int] = {}
        self.verified = 0
        self.accepted = 0
        self._windows = windows
        self._next_token = next_token
        self.uncertain: set[str] = set()
        self._lost = False

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Execute a plan.

        Raises:
            Violation: the plan does not fit the batch or the KV memory.
        """
        self._remove(plan)
        self._extend(plan)
        for new in plan.new_requests:
            self._add(new)
        if strange := sorted(set(plan.num_scheduled_tokens) - set(self.rows)):
            raise BATCH.violation(f"{strange} are scheduled, but are not in the worker's batch")
        result = ModelRunnerOutput()
        self.transfers.start(plan, result)
        self._encode(plan)
        spans = [
            self._span(plan, name) for name in plan.num_scheduled_tokens if self._has_no_fault(name)
        ]
        for span in spans:
            self._check_ownership(span)
            self._write(span, invalid_since=0)
        for span in spans:
            self._read(span)
        for span in spans:
            self._sample(span, result)
        self.transfers.advance(plan.step, result)
        return result

    def record_lost_plan(self, plan: SchedulerOutput) -> None:
        """Mark the requests of a lost plan as uncertain."""
        self._lost = True
        self.uncertain |= set(plan.num_scheduled_tokens) | plan.preempted_request_ids
        self.uncertain |= plan.finished_request_ids

    def _remove(self, plan: SchedulerOutput) -> None:
        for identifier in plan.freed_encoder_inputs:
            self.embeddings.discard(identifier)
        for request_id in plan.finished_request_ids:
            self.rows.pop(request_id, None)
            self.uncertain.discard(request_id)
        for request_id in plan.preempted_request_ids:
            gone = self.rows.pop(request_id, None)
            known = gone is not None or request_id in plan.finished_request_ids
            if not known and request_id not in self.uncertain:
                raise BATCH.violation(
                    f"{request_id!r} is preempted, but is not in the worker's batch"
                )

    def _extend(self, plan: SchedulerOutput) -> None:
        cached = plan.cached_requests
        for request_id, computed in zip(
            cached.request_ids, cached.num_computed_tokens, strict=True
        ):
            row = self.rows.get(request_id)
            if row is None or request_id in self.uncertain:
                reason = "was in a lost plan" if row else "is not in the worker's batch"
                raise BATCH.violation(
                    f"{request_id!r} is scheduled as a cached request, but {reason}",
                    "send it in full, as a NewRequest",
                )
            if not row.failed:
                self._rewind(row, computed)
            for group, blocks in enumerate(plan.cached_requests.new_block_ids.get(request_id, ())):
                row.tables[group] += blocks
            row.release(cached.released_columns.get(request_id, ()))

    def _rewind(self, row: WorkerRow, computed: int) -> None:
        if row.invalid_from is not None and computed <= row.invalid_from:
            del row.token_ids[row.num_valid :]
            row.computed, row.invalid_from = computed, None
        if computed != row.computed:
            raise POSITIONS.violation(
                f"the plan has {computed} computed tokens of {row.request_id!r}, the worker has "
                f"{row.computed}"
            )

    def _add(self, new: NewRequest) -> None:
        request_id = new.source.request_id
        if request_id in self.rows and request_id not in self.uncertain:
            raise BATCH.violation(
                f"{request_id!r} is scheduled as a new request, but is in the worker's batch "
                "already"
            )
        self.uncertain.discard(request_id)
        if len(new.block_ids) != len(self._windows):
            raise PLAN.violation(
                f"{request_id!r} has {len(new.block_ids)} block tables, there are "
                f"{len(self._windows)} KV cache groups"
            )
        token_ids = [*new.source.prompt_token_ids, *new.output_token_ids]
        tables = [list(table) for table in new.block_ids]
        row = WorkerRow(new.source, token_ids, tables, new.num_computed_tokens)
        row.release(new.released_columns)
        self.rows[request_id] = row

    def _has_no_fault(self, request_id: str) -> bool:
        return not self.rows[request_id].failed

    def _span(self, plan: SchedulerOutput, request_id: str) -> _Span:
        row = self.rows[request_id]
        count = plan.num_scheduled_tokens[request_id]
        drafts = plan.draft_token_ids.get(request_id, ())
        end, num_known = row.computed + count, len(row.token_ids)
        if drafts and end != num_known + len(drafts):
            raise POSITIONS.violation(
                f"{count} tokens of {request_id!r} are scheduled from {row.computed} on, with "
                f"{len(drafts)} drafts, but {num_known} are known: there is a gap"
            )
        if end > num_known + len(drafts):
            raise POSITIONS.violation(
                f"{count} tokens of {request_id!r} are scheduled from {row.computed} on, but only "
                f"{num_known} are known"
            )
        room = min(len(table) for table in row.tables) * self.memory.block_size
        if end > room:
            raise BLOCKS.violation(
                f"{request_id!r} computes up to position {end}, but its blocks have room for {room}"
            )
        contents = row.contents([*row.token_ids, *drafts][:end])
        return _Span(row, row.computed, end, drafts, contents)

    def _encode(self, plan: SchedulerOutput) -> None:
        encoded: set[str] = set()
        held = self._partly_computed(plan)
        for request_id, indices in plan.encoder_inputs.items():
            features = self.rows[request_id].source.features
            for identifier in {features[index].identifier for index in indices}:
                if identifier in held and not self._lost:
                    raise ENCODER.violation(
                        f"{identifier!r} is encoded for {request_id!r}, but is held already"
                    )
                encoded.add(identifier)
        self.embeddings |= encoded
        for request_id, count in plan.num_scheduled_tokens.items():
            row = self.rows[request_id]
            for feature in row.source.features:
                begins, ends = feature.offset, feature.offset + feature.length
                touched = begins < row.computed + count and ends > row.computed
                if touched and feature.identifier not in self.embeddings:
                    raise ENCODER.violation(
                        f"{request_id!r} computes positions {row.computed} to "
                        f"{row.computed + count}, but {feature.identifier!r} at {begins} is not "
                        "encoded"
                    )

    def _partly_computed(self, plan: SchedulerOutput) -> set[str]:
        """Return the encoded features with only some computed positions.

        Features of a new request may be loaded: it holds none before its first step.
        """
        new = {request.source.request_id for request in plan.new_requests}
        return {
            feature.identifier
            for row in self.rows.values()
            if row.request_id not in new
            for feature in row.source.features
            if feature.offset < row.computed < feature.offset + feature.length
            and feature.identifier in self.embeddings
        }

    def first_seen(self, group: int, position: int) -> int:
        """Return the first position that a token at `position` attends to."""
        window = self._windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def _check_ownership(self, span: _Span) -> None:
        """Check that a span's blocks are written by no other request and no transfer.

        Another request may have such a block in its computed prefix: its content is checked when
        that request reads it.
        """
        size, row = self.memory.block_size, span.row
        for group, table in enumerate(row.tables):
            written = set(table[span.start // size : -(-span.end // size)])
            for other in self.rows.values():
                for other_group, other_table in enumerate(other.tables):
                    if other is row and other_group == group:
                        continue
                    if shared := written.intersection(other_table[other.computed // size :]):
                        raise BLOCKS.violation(
                            f"{row.request_id!r} writes positions {span.start} to {span.end} "
                            f"into block {min(shared)}, into which {other.request_id!r} writes too"
                        )
            if (in_use := self.transfers.find_user(written)) is not None:
                raise KV_TRANSFER.violation(
                    f"{row.request_id!r} writes into block {in_use[0]}, but the KV connector "
                    f"still needs it for {in_use[1]!r}",
                    "keep a request's blocks until kv_loaded or kv_saved names it",
                )

    def _write(self, span: _Span, invalid_since: int) -> None:
        for group, table in enumerate(span.row.tables):
            for content in span.contents[group][span.start :]:
                self.memory.write(table, content, span.row.request_id, invalid_since)

    def _read(self, span: _Span) -> None:
        row = span.row
        invalid: dict[int, int] = {}
        for group, table in enumerate(row.tables):
            for content in span.contents[group][self.first_seen(group, span.start) :]:
                if table[content.position // self.memory.block_size] == RELEASED:
                    continue
                if since := self.memory.read(table, content, row.request_id):
                    invalid[content.position] = since
        if not invalid:
            return
        span.invalid_since = max(invalid.values())
        self._write(span, span.invalid_since)  # what is computed from invalid content is invalid
        if row.invalid_from is None:
            row.num_valid, row.invalid_from = len(row.token_ids), min(invalid)
        row.invalid_from = min(row.invalid_from, *invalid)

    def _sample(self, span: _Span, result: ModelRunnerOutput) -> None:
        row, request_id = span.row, span.row.request_id
        self._prompt_logprobs(span, result)
        row.computed = span.end
        if span.end < len(row.token_ids):
            return
        outputs = len(row.token_ids) - len(row.source.prompt_token_ids)
        if request_id in self.faults and outputs >= self.faults[request_id]:
            row.failed = True
            result.faults[request_id] = RequestFault("a scripted fault", plugin="scripted")
            return
        sampled: list[int] = []
        for draft in [*span.drafts, None]:
            sampled.append(self._next_token([*row.token_ids, *sampled]) + bool(span.invalid_since))
            if sampled[-1] != draft:
                break
        self.verified += len(span.drafts)
        self.accepted += len(sampled) - 1
        row.token_ids += sampled
        row.computed = len(row.token_ids) - 1
        result.sampled_token_ids[request_id] = sampled
        if row.source.params.wants_logprobs:
            result.logprobs[request_id] = [TokenLogprobs([t], [-0.5], 1) for t in sampled]

    def _prompt_logprobs(self, span: _Span, result: ModelRunnerOutput) -> None:
        """Add the log probabilities of the span's prompt positions; position 0 has None."""
        source = span.row.source
        prompt = source.prompt_token_ids
        if source.params.prompt_logprobs is None or span.start >= len(prompt):
            return
        offset = int(bool(span.invalid_since))
        entries: list[TokenLogprobs | None] = [] if span.start else [None]
        for position in range(span.start + 1, min(span.end + 1, len(prompt))):
            logprob = -float(position)
            entries.append(TokenLogprobs([prompt[position] + offset], [logprob], 1))
        result.prompt_logprobs[span.row.request_id] = entries

    def check_empty(self) -> None:
        """Check that the batch is empty."""
        if self.rows:
            raise FINISH.violation(
                f"{sorted(self.rows)} finished, but no plan reported it to the worker"
            )
