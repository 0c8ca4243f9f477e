"""A worker without a model: carries out plans, checks each, and answers as scripted."""

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
from hardpoint.testing.scheduling.checks.names import (
    BATCH,
    ENCODER,
    FINISHED,
    PLAN,
    POOL,
    POSITIONS,
    TRANSFER,
)

from .connector import WorkerTransfers
from .memory import Content, Memory, histories


@dataclass
class Row:
    """A request in the worker's batch.

    Attributes:
        known: prompt and outputs.
        tables: block ids per group.
        computed: leading tokens whose keys and values the worker has.
        sound: leading tokens that were not guessed from what could not be loaded.
        doubtful_from: first position whose keys and values are bad; None if all are right.
        failed: whether a fault was reported of it.
    """

    source: EngineCoreRequest
    known: list[int]
    tables: list[list[int]]
    computed: int
    sound: int = 0
    doubtful_from: int | None = None
    failed: bool = False

    @property
    def request_id(self) -> str:
        """Whose row it is."""
        return self.source.request_id

    def contents(self, tokens: Sequence[int]) -> list[list[Content]]:
        """Return per group and position what the slot must hold."""
        source = self.source
        lora = None if source.lora is None else source.lora.name
        values = histories(source, tokens)
        return [
            [Content(group, i, value, source.cache_salt, lora) for i, value in enumerate(values)]
            for group in range(len(self.tables))
        ]


@dataclass
class _Span:
    """The tokens that a step computes of one row: positions `start` up to `end`."""

    row: Row
    start: int
    end: int
    drafts: Sequence[int]
    contents: list[list[Content]]
    bad_since: int = 0


class ScriptedWorker:
    """Plays executor and workers, and raises BrokenRule where a plan cannot be carried out.

    Attributes:
        rows: the batch, by request id.
        memory: the KV cache.
        embeddings: identifiers of encoded features.
        transfers: what the KV connector's half does.
        faults: by request id, so many output tokens after which it fails.
        verified: drafts that were looked at.
        accepted: drafts that were right.
        doubtful: ids of which nobody knows whether the batch should have them: a plan was lost.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        block_size: int,
        next_token: Callable[[Sequence[int]], int],
    ) -> None:
        """`next_token` continues a history; `windows` has one entry per group of layers."""
        self.rows: dict[str, Row] = {}
        self.memory = Memory(block_size)
        self.embeddings: set[str] = set()
        self.transfers = WorkerTransfers(self.memory)
        self.faults: dict[str, int] = {}
        self.verified = 0
        self.accepted = 0
        self._windows = windows
        self._next_token = next_token
        self.doubtful: set[str] = set()
        self._lost = False

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Carry out a plan."""
        self._remove(plan)
        self._extend(plan)
        for new in plan.new_requests:
            self._add(new)
        if strange := sorted(set(plan.num_scheduled_tokens) - set(self.rows)):
            raise BATCH.broken(f"{strange} are scheduled, but the worker does not have them")
        result = ModelRunnerOutput()
        self.transfers.begin(plan, result)
        self._encode(plan)
        spans = [self._span(plan, name) for name in plan.num_scheduled_tokens if self._sound(name)]
        for span in spans:
            self._check_ownership(span)
            self._write(span, bad_since=0)
        for span in spans:
            self._read(span)
        for span in spans:
            self._sample(span, result)
        self.transfers.go_on(plan.step, result)
        return result

    def lose(self, plan: SchedulerOutput) -> None:
        """Take it that nobody knows whether a plan was carried out."""
        self._lost = True
        self.doubtful |= set(plan.num_scheduled_tokens) | plan.preempted_request_ids
        self.doubtful |= plan.finished_request_ids

    def _remove(self, plan: SchedulerOutput) -> None:
        for identifier in plan.freed_encoder_inputs:
            self.embeddings.discard(identifier)
        for request_id in plan.finished_request_ids:
            self.rows.pop(request_id, None)
            self.doubtful.discard(request_id)
        for request_id in plan.preempted_request_ids:
            gone = self.rows.pop(request_id, None)
            known = gone is not None or request_id in plan.finished_request_ids
            if not known and request_id not in self.doubtful:
                raise BATCH.broken(f"{request_id!r} is preempted, but the worker has it not")

    def _extend(self, plan: SchedulerOutput) -> None:
        cached = plan.cached_requests
        for request_id, computed in zip(
            cached.request_ids, cached.num_computed_tokens, strict=True
        ):
            row = self.rows.get(request_id)
            if row is None or request_id in self.doubtful:
                why = "was in a plan that was lost" if row else "the worker has it not"
                raise BATCH.broken(
                    f"{request_id!r} comes as a cached request, but {why}",
                    "send it in full, as a NewRequest",
                )
            if not row.failed:
                self._rewind(row, computed)
            for group, blocks in enumerate(plan.cached_requests.new_block_ids.get(request_id, ())):
                row.tables[group] += blocks

    def _rewind(self, row: Row, computed: int) -> None:
        if row.doubtful_from is not None and computed <= row.doubtful_from:
            del row.known[row.sound :]
            row.computed, row.doubtful_from = computed, None
        if computed != row.computed:
            raise POSITIONS.broken(
                f"the plan says that {computed} tokens of {row.request_id!r} are computed, the "
                f"worker has computed {row.computed}"
            )

    def _add(self, new: NewRequest) -> None:
        request_id = new.source.request_id
        if request_id in self.rows and request_id not in self.doubtful:
            raise BATCH.broken(
                f"{request_id!r} comes as a new request, but the worker has it already"
            )
        self.doubtful.discard(request_id)
        if len(new.block_ids) != len(self._windows):
            raise PLAN.broken(
                f"{request_id!r} comes with {len(new.block_ids)} block tables, there are "
                f"{len(self._windows)} groups"
            )
        known = [*new.source.prompt_token_ids, *new.output_token_ids]
        tables = [list(table) for table in new.block_ids]
        self.rows[request_id] = Row(new.source, known, tables, new.num_computed_tokens)

    def _sound(self, request_id: str) -> bool:
        """Whether a row did not fail in a step whose result may be on its way yet."""
        return not self.rows[request_id].failed

    def _span(self, plan: SchedulerOutput, request_id: str) -> _Span:
        row = self.rows[request_id]
        count = plan.num_scheduled_tokens[request_id]
        drafts = plan.draft_token_ids.get(request_id, ())
        end, known = row.computed + count, len(row.known)
        if drafts and end != known + len(drafts):
            raise POSITIONS.broken(
                f"{count} tokens of {request_id!r} are scheduled from {row.computed} on, with "
                f"{len(drafts)} drafts, but {known} are known: the drafts do not follow"
            )
        if end > known + len(drafts):
            raise POSITIONS.broken(
                f"{count} tokens of {request_id!r} are scheduled from {row.computed} on, but only "
                f"{known} are known"
            )
        room = min(len(table) for table in row.tables) * self.memory.block_size
        if end > room:
            raise POOL.broken(
                f"{request_id!r} computes up to position {end}, but its blocks have room for {room}"
            )
        contents = row.contents([*row.known, *drafts][:end])
        return _Span(row, row.computed, end, drafts, contents)

    def _encode(self, plan: SchedulerOutput) -> None:
        encoded: set[str] = set()
        for request_id, indices in plan.encoder_inputs.items():
            features = self.rows[request_id].source.features
            for identifier in {features[index].identifier for index in indices}:
                if identifier in self._held() and not self._lost:
                    raise ENCODER.broken(
                        f"{identifier!r} is encoded for {request_id!r}, but it is there already"
                    )
                encoded.add(identifier)
        self.embeddings |= encoded
        for request_id, count in plan.num_scheduled_tokens.items():
            row = self.rows[request_id]
            for feature in row.source.features:
                begins, ends = feature.offset, feature.offset + feature.length
                touched = begins < row.computed + count and ends > row.computed
                if touched and feature.identifier not in self.embeddings:
                    raise ENCODER.broken(
                        f"{request_id!r} computes positions {row.computed} to "
                        f"{row.computed + count}, but {feature.identifier!r} at {begins} is not "
                        "encoded"
                    )

    def _held(self) -> set[str]:
        """Return the features of which some positions are computed and others are not."""
        return {
            feature.identifier
            for row in self.rows.values()
            for feature in row.source.features
            if feature.offset < row.computed < feature.offset + feature.length
            and feature.identifier in self.embeddings
        }

    def first_seen(self, group: int, position: int) -> int:
        """Return the first position that a token at `position` sees."""
        window = self._windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def _check_ownership(self, span: _Span) -> None:
        """Nobody writes where others write too, or into what a connector needs.

        Others may have a block that is written in this step as part of their computed prefix;
        whether it holds what they need is seen when they read it.
        """
        size, row = self.memory.block_size, span.row
        for group, table in enumerate(row.tables):
            written = set(table[span.start // size : -(-span.end // size)])
            for other in self.rows.values():
                for g, theirs in enumerate(other.tables):
                    if other is row and g == group:
                        continue
                    if shared := written.intersection(theirs[other.computed // size :]):
                        raise POOL.broken(
                            f"{row.request_id!r} writes positions {span.start} to {span.end} "
                            f"into block {min(shared)}, into which {other.request_id!r} writes too"
                        )
            if (busy := self.transfers.user_of(written)) is not None:
                raise TRANSFER.broken(
                    f"{row.request_id!r} writes into block {busy[0]}, but the KV connector "
                    f"still needs it for {busy[1]!r}",
                    "keep a request's blocks until kv_loaded or kv_saved names it",
                )

    def _write(self, span: _Span, bad_since: int) -> None:
        for group, table in enumerate(span.row.tables):
            for content in span.contents[group][span.start :]:
                self.memory.write(table, content, span.row.request_id, bad_since)

    def _read(self, span: _Span) -> None:
        row = span.row
        bad: dict[int, int] = {}
        for group, table in enumerate(row.tables):
            for content in span.contents[group][self.first_seen(group, span.start) :]:
                if since := self.memory.read(table, content, row.request_id):
                    bad[content.position] = since
        if not bad:
            return
        span.bad_since = max(bad.values())
        self._write(span, span.bad_since)  # what follows from nonsense is nonsense
        if row.doubtful_from is None:
            row.sound, row.doubtful_from = len(row.known), min(bad)
        row.doubtful_from = min(row.doubtful_from, *bad)

    def _sample(self, span: _Span, result: ModelRunnerOutput) -> None:
        row, request_id = span.row, span.row.request_id
        self._prompt_logprobs(span, result)
        row.computed = span.end
        if span.end < len(row.known):
            return
        outputs = len(row.known) - len(row.source.prompt_token_ids)
        if request_id in self.faults and outputs >= self.faults[request_id]:
            row.failed = True
            result.faults[request_id] = RequestFault("a scripted fault", plugin="scripted")
            return
        sampled: list[int] = []
        for draft in [*span.drafts, None]:
            sampled.append(self._next_token([*row.known, *sampled]) + bool(span.bad_since))
            if sampled[-1] != draft:
                break
        self.verified += len(span.drafts)
        self.accepted += len(sampled) - 1
        row.known += sampled
        row.computed = len(row.known) - 1
        result.sampled_token_ids[request_id] = sampled
        if row.source.params.logprobs is not None:
            result.logprobs[request_id] = [TokenLogprobs([t], [-0.5], 1) for t in sampled]

    def _prompt_logprobs(self, span: _Span, result: ModelRunnerOutput) -> None:
        """Give each prompt position of the span its token; the first of all has None."""
        source = span.row.source
        prompt = source.prompt_token_ids
        if source.params.prompt_logprobs is None or span.start >= len(prompt):
            return
        wrong = bool(span.bad_since)
        entries: list[TokenLogprobs | None] = [] if span.start else [None]
        for position in range(span.start + 1, min(span.end + 1, len(prompt))):
            logprob = -float(position)
            entries.append(TokenLogprobs([prompt[position] + wrong], [logprob], 1))
        result.prompt_logprobs[span.row.request_id] = entries

    def check_empty(self) -> None:
        """Every request that ended was told."""
        if self.rows:
            raise FINISHED.broken(f"{sorted(self.rows)} ended, but the worker was never told")
