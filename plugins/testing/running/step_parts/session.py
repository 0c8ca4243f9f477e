"""A simulation of the engine's calls of one step part, with real requests, plans and results."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hardpoint.host.boundary.parts.gates import without_data
from hardpoint.host.boundary.parts.hooks import selects
from hardpoint.plugins import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineHalf,
    FinishReason,
    ModelRunnerOutput,
    Request,
    RequestError,
    SchedulerOutput,
    WaitReason,
)
from hardpoint.plugins.requests.plan import CachedRequests, NewRequest, PartData
from hardpoint.testing.running.request_scripts import RequestScript, drawn, guessed
from hardpoint.testing.snapshots import snapshot
from hardpoint.testing.suite import Rule, short_repr

from . import rules
from .encoding import FeaturePlans
from .worker import PositionRows, Rows, WorkerSteps

__all__ = ["CallTrace", "StepPartSession"]

_MAX_RUNNING = 8
_MAX_STEPS = 2000
_NO_DRAFT = SchedulerOutput.NO_DRAFT
_OTHER = "other"  # a request that uses no part
_WITHOUT_EFFECT = ("uses", "needs_results")


@dataclass
class CallTrace:
    """The calls of a part for one request.

    Attributes:
        gate: "ready", "refused", or "" where it was not asked to the end.
        cost: cost of the request.
        tokens: its tokens of each of its steps.
        masks: rows of each of its steps, as bytes; None where all tokens are allowed.
        rows: its rows that the worker half has changed in each step.
        masks_by_index: rows of the mask by the index of the output that they are for, and
        rows_by_position: rows that the worker half has changed, without rows of rejected drafts.
        figures: figures after each of its steps.
        arrays: rows of arrays, as bytes, by name and position.
        ended: "finished", "fault", "refused" or "aborted".
    """

    gate: str = ""
    cost: dict[str, int] = field(default_factory=dict)
    tokens: list[list[int]] = field(default_factory=list)
    masks: list[bytes | None] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    masks_by_index: dict[int, bytes | None] = field(default_factory=dict)
    rows_by_position: PositionRows = field(default_factory=dict)
    figures: list[Mapping[str, Any]] = field(default_factory=list)
    arrays: dict[tuple[str, int], bytes] = field(default_factory=dict)
    ended: str = ""


@dataclass
class _Live:
    """A request in the simulation."""

    script: RequestScript
    request: Request
    trace: CallTrace
    ready: bool = False
    running: bool = False
    sent: bool = False  # workers have it
    num_gate_calls: int = 0
    gate_since: float = 0.0
    num_steps: int = 0
    lost_rows: bytes | None = None
    was_lost: bool = False
    num_computed: int = 0
    num_planned: int = 0  # tokens in this step, which may end before the last known token
    encodes: list[int] = field(default_factory=list)  # features, in this step
    drafts: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)  # by the part
    forms: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # of arrays, by name

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def samples(self) -> bool:
        """Whether this step computes the last known token."""
        return self.num_computed + self.num_planned >= self.request.num_tokens

    def plan(self) -> None:
        """Set the tokens of this step, which ends before the next release of blocks."""
        known = self.request.num_tokens - self.num_computed
        releases, self.num_planned = self.request.releases, known + len(self.drafts)
        if releases is not None:
            self.num_planned = min(self.num_planned, releases.num_before_next(self.num_computed))
            self.drafts = self.drafts[: max(self.num_planned - known, 0)]
        self.request.num_computed_tokens = self.num_computed + self.num_planned

    def computed(self, num_tokens: int) -> None:
        """Note how many tokens have been computed."""
        self.num_computed = self.request.num_computed_tokens = num_tokens


class StepPartSession:
    """Calls a half like the engine does, and checks its results.

    Attributes:
        traces: traces of the requests that ended or live, by id; the newest of each id.
        call_seconds: seconds of the calls of each step with a plan.
        effects: names of the methods that have returned something.
        idle: called after a step that computed nothing.
    """

    def __init__(
        self,
        half: EngineHalf,
        vocab_size: int,
        limits: rules.GateLimits,
        *,
        worker: WorkerSteps | None = None,
        lost: Sequence[int] = (),
        watch: bool = False,
        change_weights: Callable[[], None] = lambda: None,
        required_arguments: str | None = None,
    ) -> None:
        """Begin without requests.

        Args:
            vocab_size: vocabulary size of the model.
            worker: calls the worker half of the part; None if it has none.
            lost: numbers of plans that are lost, before or after their mask in turn.
            watch: whether to compare the inputs of the half before and after each call.
            change_weights: gives the model of the worker half other weights.
            required_arguments: key of the arguments that requests which use the part give; None if
                others may use it, too.
        """
        self._required_arguments = required_arguments
        self.idle: Callable[[], None] = lambda: None
        self.effects: set[str] = set()
        self.half, self._vocab_size, self._limits = half, vocab_size, limits
        self._lost, self._watch = frozenset(lost), watch
        self._worker, self._change_weights = worker, change_weights
        self._features = FeaturePlans(half)
        self.traces: dict[str, CallTrace] = {}
        self.call_seconds: list[float] = []
        self._waiting: list[_Live] = []
        self._running: dict[str, _Live] = {}
        self._used: Counter[str] = Counter()
        self._finished: list[str] = []
        self._preempted: set[str] = set()
        self._seconds = 0.0
        self._step = 0

    def play(self, scripts: Sequence[RequestScript]) -> dict[str, CallTrace]:
        """Play scripts to their ends; return their traces by id.

        Raises:
            Violation: a rule was broken.
        """
        coming = sorted(scripts, key=lambda script: script.arrives)
        started, computed = self._step, 0
        while coming or self._waiting or self._running or self._finished:
            now = self._step - started
            while coming and coming[0].arrives <= now:
                self._add(coming.pop(0))
            self._abort(now)
            self._admit()
            if self._run_plan():
                computed += 1
            else:
                self._call(rules.GATE, "wait")
                self.idle()
            self._step += 1
            if computed > _MAX_STEPS:
                left = [live.request_id for live in (*self._waiting, *self._running.values())]
                raise rules.READY.violation(f"after {_MAX_STEPS} steps {left} have not ended")
        return self.traces

    def change_weights(self, *, notify: bool) -> None:
        """Give the model of the worker half other weights, and notify both halves."""
        self._change_weights()
        if notify:
            if self._worker is not None:
                self._worker.weights_changed()
            self._call(rules.WEIGHTS, "weights_changed")

    def _add(self, script: RequestScript) -> None:
        name, trace = script.request.request_id, CallTrace()
        self.traces[name] = trace
        if not self.is_used_by(script.request):
            trace.ended = "other"
            return
        try:
            self._call(rules.USES, "check", script.request)
            is_refused = script.ends == "refused" or self._features.refuses(script.request)
        except RequestError:
            is_refused = True
        if is_refused:
            trace.ended = "refused"
            self._call(rules.ENDED, "refused", name)
            return
        request = Request(without_data(script.request))
        self._waiting.append(_Live(script, request, trace, num_steps=script.begun))

    def is_used_by(self, request: EngineCoreRequest) -> bool:
        """Return whether a new request uses the part."""
        if self._required_arguments not in {None, *request.plugin_args} or not self.half.is_active:
            return False
        if not selects(self.half, request):
            return False
        uses = self._call(rules.USES, "uses", request)
        if not isinstance(uses, bool):
            raise rules.USES.violation(f"uses() returned {short_repr(uses)}, expected a bool")
        return uses

    def _abort(self, now: int) -> None:
        for live in [*self._waiting, *self._running.values()]:
            if live.script.ends == "aborted" and now > live.script.arrives:
                self._end(live, "aborted")

    def _end(self, live: _Live, how: str) -> None:
        live.trace.ended = how
        self._release(live)
        if live in self._waiting:
            self._waiting.remove(live)
        self._preempted.discard(live.request_id)
        self._finished.append(live.request_id)

    def _release(self, live: _Live) -> None:
        live.computed(0)
        self._features.left(live.request)
        if self._running.pop(live.request_id, None) is not None:
            self._used.subtract(live.trace.cost)

    def _admit(self) -> None:
        for live in list(self._waiting):
            if not live.ready and not self._ask_gate(live):
                continue
            if len(self._running) < _MAX_RUNNING and self._has_room(live):
                self._waiting.remove(live)
                self._running[live.request_id] = live
                self._used.update(live.trace.cost)

    def _ask_gate(self, live: _Live) -> bool:
        if not live.num_gate_calls:
            live.gate_since = time.monotonic()
        live.num_gate_calls += 1
        try:
            reason = self._call(rules.GATE, "gate", live.request)
        except RequestError:
            live.trace.gate = "refused"
            self._end(live, "refused")
            return False
        if reason is None:
            live.ready, live.trace.gate = True, "ready"
            return True
        if not isinstance(reason, str | WaitReason):
            raise rules.GATE.violation(f"gate() returned {short_repr(reason)}")
        self._limits.check(live.num_gate_calls, live.gate_since, reason)
        return False

    def _has_room(self, live: _Live) -> bool:
        first = self._call(rules.COSTS, "cost", live.request)
        second = self._call(rules.COSTS, "cost", live.request)
        rules.check_costs(first, second, self.half.capacity)
        cost = dict(first)
        if live.trace.cost and live.trace.cost != cost:
            raise rules.COSTS.violation(
                f"cost() returned {live.trace.cost} for a request, and later {cost}"
            )
        live.trace.cost = cost
        capacity = self.half.capacity
        if any(amount > capacity[name] for name, amount in cost.items()):
            self._end(live, "refused")
            return False
        return all(self._used[name] + n <= capacity[name] for name, n in cost.items())

    def _run_plan(self) -> bool:
        self._features.begin()
        batch = [live for live in self._running.values() if self._encode(live)]
        for live in batch:
            live.drafts = self._draw_drafts(live)
            live.plan()
        plan = self._plan(batch)
        self._seconds = 0.0
        for name in self._finished:
            self._call(rules.ENDED, "ended", name)
        for name in self._preempted:
            self._call(rules.LOST, "preempted", name)
        self._finished, self._preempted = [], set()
        if not batch and not self._waiting:  # the engine calls no part without live requests
            self._run_worker(plan, None, ModelRunnerOutput())
            return False
        users = {live.request_id: len(live.drafts) for live in batch}
        data = self._call(rules.DATA, "begin", plan)
        rules.check_data(data, users, every_plan=self.half.every_plan)
        rules.check_names(self._call(rules.MASKS, "needs_results", plan), users)
        lost = self._step in self._lost and bool(batch)
        if lost and self._step % 2:
            self._lose(plan)
            return True
        mask = self._call(rules.MASKS, "mask", plan)
        rows = rules.check_mask(mask, users, self._vocab_size)
        sampling = [live for live in batch if live.samples]
        for live in sampling:
            self._check_again(live, rows, lost)
        if lost:
            self._lose(plan)
            return True
        self._process(plan, data, batch, rows)
        if batch and self.half.num_draft_tokens:
            self._take_drafts()
        self._limit_drafts()
        if batch:
            self.call_seconds.append(self._seconds)
        return bool(batch)

    def _encode(self, live: _Live) -> bool:
        if live.request.source.features:
            positions = range(live.num_computed, live.request.num_tokens)
            chosen = self._features.choose(live.request, positions)
            live.encodes = chosen or []
            return chosen is not None
        return True

    def _lose(self, plan: SchedulerOutput) -> None:
        self._call(rules.LOST, "lost", plan)
        self._features.lost(plan, {name: live.request for name, live in self._running.items()})
        if self._worker is not None:
            self._worker.lost(plan)

    def _run_worker(
        self, plan: SchedulerOutput, data: bytes | None, output: ModelRunnerOutput
    ) -> tuple[Mapping[str, Rows], Mapping[str, PositionRows]]:
        if self._worker is None:
            return {}, {}
        users = [self._running[name] for name in plan.num_scheduled_tokens if name != _OTHER]
        names = None if self.half.every_plan else [live.request_id for live in users]
        seeds = {live.request_id: str(live.script.seed) for live in users}
        part = None if data is None else PartData(data, names)
        changed, by_position = self._worker.run(plan, part, {_OTHER: _OTHER, **seeds}, output)
        self.effects.update(f"{hook} of the worker half" for x in changed.values() for hook in x)
        if output.part_reports:
            self.effects.add("report")
        return changed, by_position

    def _plan(self, batch: Sequence[_Live]) -> SchedulerOutput:
        new, cached, computed = [], [], []
        for live in batch:
            if live.sent:
                cached.append(live.request_id)
                computed.append(live.num_computed)
                continue
            request = live.request
            outputs, resumed = list(request.output_token_ids), request.num_preemptions > 0
            new.append(NewRequest(request.source, outputs, [[0]], 0, resumed))
        num = {live.request_id: live.num_planned for live in batch}
        if self._step % 3 == 0:
            cached.append(_OTHER)
            computed.append(0)
            num[_OTHER] = 1
        return SchedulerOutput(
            step=self._step + 1,
            new_requests=new,
            cached_requests=CachedRequests(cached, computed),
            num_scheduled_tokens=num,
            total_num_scheduled_tokens=sum(num.values()),
            draft_token_ids={x.request_id: x.drafts for x in batch if x.drafts},
            encoder_inputs={x.request_id: x.encodes for x in batch if x.encodes},
            freed_encoder_inputs=self._features.take_freed() if batch or self._waiting else (),
            preempted_request_ids=frozenset(self._preempted),
            finished_request_ids=frozenset(self._finished),
        )

    def _take_drafts(self) -> None:
        drafts = self._call(rules.DRAFTS, "drafts")
        users = {live.request_id for live in (*self._waiting, *self._running.values())}
        users.update(self._finished)
        rules.check_drafts(drafts, users, self.half.num_draft_tokens, self._vocab_size)
        for name, live in self._running.items():
            live.proposed = list(drafts.get(name, ()))

    def _limit_drafts(self) -> None:
        """Let the part limit drafts of the next step; the steps have some that it would drop."""
        drafts = {name: tokens for name, x in self._running.items() if (tokens := self._drawn(x))}
        if drafts:
            limits = self._call(rules.DRAFT_LIMITS, "limit_drafts", drafts)
            rules.check_draft_limits(limits, drafts)

    def _draw_drafts(self, live: _Live) -> list[int]:
        if not live.num_computed:  # its prompt is computed, with the output of one that resumes
            return []
        if live.script.outputs is not None:
            done = len(live.request.output_token_ids)
            return guessed(live.script.outputs, done, live.script.seed, self._vocab_size)
        if live.proposed:
            return live.proposed
        tokens = self._drawn(live)
        if tokens and random.Random(f"{live.script.seed} {live.num_steps} none").random() < 0.2:
            tokens[-1] = _NO_DRAFT
        return tokens

    def _drawn(self, live: _Live) -> list[int]:
        return drawn(f"{live.script.seed} {live.num_steps} drafts", self._vocab_size)

    def _check_again(self, live: _Live, rows: Mapping[str, Any], lost: bool) -> None:
        """Compare the mask of a plan with the mask of the lost plan before it."""
        request_rows = rows.get(live.request_id)
        row_bytes = None if request_rows is None else request_rows.tobytes()
        if live.was_lost and live.lost_rows != row_bytes:
            raise rules.LOST.violation(
                f"the mask of {live.request_id!r} is another one when its lost plan is planned "
                "again"
            )
        live.was_lost, live.lost_rows = lost, row_bytes if lost else None

    def _process(
        self,
        plan: SchedulerOutput,
        data: bytes | None,
        batch: Sequence[_Live],
        rows: Mapping[str, Any],
    ) -> None:
        """Sample, let the part read the result, and give the tokens to the requests.

        Args:
            plan: the executed plan.
            data: data of the half for the worker half.
            batch: requests of the plan that use the part.
            rows: the mask's rows, by request.
        """
        sampling = [live for live in batch if live.samples]
        sampled = {live.request_id: self._sample(live, rows) for live in sampling}
        if _OTHER in plan.num_scheduled_tokens:
            sampled[_OTHER] = [0]
        output = ModelRunnerOutput(sampled_token_ids=sampled)
        changed, by_position = self._run_worker(plan, data, output)
        faults = self._call(rules.RESULTS, "result", plan, output)
        rules.check_faults(faults, {live.request_id for live in batch})
        self._take_chunks([live for live in batch if live not in sampling], faults or {})
        for live in sampling:
            request_rows = rows.get(live.request_id)
            live.trace.tokens.append(sampled[live.request_id])
            live.trace.masks.append(None if request_rows is None else request_rows.tobytes())
            live.trace.rows.append(changed.get(live.request_id, {}))
            self._keep_rows(live, sampled[live.request_id], request_rows, by_position)
            self._keep_figures(live, len(sampled[live.request_id]))
            live.num_steps += 1
            live.sent, live.proposed = True, []
            if live.request_id in (faults or {}):
                self._end(live, "fault")
                continue
            for token in sampled[live.request_id]:
                live.request.append(token)
            live.computed(live.request.num_tokens - 1)
            if live.request.source.features:
                self._features.computed(live.request, live.num_computed)
            self._end_step(live, sampled[live.request_id])
        if self.half.is_active:
            outputs = [_output(live, sampled[live.request_id]) for live in sampling]
            before = msgspec.msgpack.encode(outputs)
            self._call(rules.RESULTS, "publish", {0: EngineCoreOutputs(outputs=outputs)})
            if msgspec.msgpack.encode(outputs) != before:
                self.effects.add("publish")
        self._call(rules.RESULTS, "updated", plan)

    def _end_step(self, live: _Live, tokens: Sequence[int]) -> None:
        """End or preempt a request after a step, as its script has it."""
        ends = live.request.source.eos_token_ids
        is_by_index = live.script.outputs is not None
        length = len(live.request.output_token_ids) if is_by_index else live.num_steps
        if length >= live.script.steps or set(ends) & {*tokens}:
            self._end(live, "finished")
        elif live.num_steps == live.script.preempted_after:
            self._release(live)
            live.sent, live.request.num_preemptions = False, 1
            self._preempted.add(live.request_id)
            self._waiting.insert(0, live)

    def _take_chunks(self, chunks: Sequence[_Live], faults: Collection[str]) -> None:
        """Note the tokens of requests without a new token: a release ended their step."""
        for live in chunks:
            live.sent = True
            live.computed(live.num_computed + live.num_planned)
            if live.request_id in faults:
                self._end(live, "fault")

    def _keep_rows(
        self,
        live: _Live,
        sampled: Sequence[int],
        request_rows: Any,
        by_position: Mapping[str, PositionRows],
    ) -> None:
        first = len(live.request.output_token_ids)
        for index in range(len(sampled)):
            allows_all = (
                request_rows is None or len(self._allowed(request_rows, index)) == self._vocab_size
            )
            row = None if allows_all else request_rows[index].tobytes()
            live.trace.masks_by_index[first + index] = row
        last = live.request.num_tokens - 1 + len(sampled) - 1
        for place, values in by_position.get(live.request_id, {}).items():
            if place[1] <= last:
                live.trace.rows_by_position[place] = values

    def _keep_figures(self, live: _Live, num_sampled: int) -> None:
        figures = self._call(rules.FIGURES, "figures", live.request_id)
        rules.check_figures(figures)
        live.trace.figures.append(dict(figures))
        arrays = self._call(rules.ARRAYS, "arrays", live.request_id)
        num_positions = live.request.num_tokens + num_sampled - 1
        rules.check_arrays(arrays, num_positions, live.forms)
        for name, array in arrays.items():
            for position, row in zip(array.positions.tolist(), array.values, strict=True):
                live.trace.arrays.setdefault((name, position), row.tobytes())

    def _sample(self, live: _Live, rows: Mapping[str, Any]) -> list[int]:
        if live.script.outputs is not None:
            return self._sample_by_index(live, rows)
        drawn = random.Random(f"{live.script.seed} {live.num_steps} tokens")
        request_rows, accepted = rows.get(live.request_id), list[int]()
        ends = live.request.source.eos_token_ids
        for index, token in enumerate(live.drafts):
            if (
                token == _NO_DRAFT
                or not rules.is_allowed(request_rows, index, token)
                or token in ends
            ):
                break
            accepted.append(token)
        return [*accepted, drawn.choice(self._allowed(request_rows, len(accepted)))]

    def _allowed(self, request_rows: Any, index: int) -> list[int]:
        return rules.allowed_tokens(request_rows, index, self._vocab_size)

    def _sample_by_index(self, live: _Live, rows: Mapping[str, Any]) -> list[int]:
        """Return tokens that depend on their index while the drafts before were right."""
        request_rows, ends = rows.get(live.request_id), live.request.source.eos_token_ids
        first, sampled = len(live.request.output_token_ids), list[int]()
        for index in range(1 + len(live.drafts)):
            drawn = random.Random(f"{live.script.seed} {first + index} tokens")
            token = drawn.choice(self._allowed(request_rows, index))
            sampled.append(token)
            if token in ends or live.drafts[index : index + 1] != [token]:
                break
        return sampled

    def _call(self, rule: Rule, method: str, *arguments: Any) -> Any:
        """Call a method of the half; anything raised but a RequestError of a new one is wrong."""
        reads_only = self._watch and method != "publish"
        before = snapshot(_engines_own(arguments)) if reads_only else None
        may_refuse = method in ("check", "gate")
        started = time.perf_counter()
        try:
            returned = getattr(self.half, method)(*arguments)
        except Exception as cause:
            if may_refuse and isinstance(cause, RequestError):
                self.effects.add(method)
                raise
            raise rule.violation(f"{method}() raised {type(cause).__name__}: {cause}") from cause
        finally:
            self._seconds += time.perf_counter() - started
        if reads_only and snapshot(_engines_own(arguments)) != before:
            raise rules.READS_ONLY.violation(f"{method}() mutated its input")
        is_empty = isinstance(returned, Collection) and not returned
        if method not in _WITHOUT_EFFECT and returned is not None and not is_empty:
            self.effects.add(method)
        return returned


def _output(live: _Live, sampled: Sequence[int]) -> EngineCoreOutput:
    ended = FinishReason.STOP if live.trace.ended else None
    return EngineCoreOutput(
        request_id=live.request_id, new_token_ids=list(sampled), finish_reason=ended
    )


def _engines_own(arguments: Sequence[Any]) -> list[Any]:
    return [
        dataclasses.replace(
            item,
            kv_loaded=frozenset(),
            kv_saved=frozenset(),
            invalid_block_ids=frozenset(),
            pooler_output={},
        )
        if isinstance(item, ModelRunnerOutput)
        else item
        for item in arguments
    ]
