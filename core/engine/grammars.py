"""The grammars of an engine's requests: compiled in threads, followed token by token."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from hardpoint.boundary.errors import close_all
from hardpoint.errors import PluginFaultError
from hardpoint.plugins import (
    GrammarBitmask,
    HardpointError,
    ReasoningMarkers,
    ReasoningPosition,
    ReasoningTracker,
    Request,
    RequestError,
    RequestFault,
    RequestStatus,
    SchedulerOutput,
)
from hardpoint.plugins.config import GrammarConfig
from hardpoint.plugins.grammars import (
    GrammarBackend,
    GrammarContext,
    GrammarState,
    Vocabulary,
    allow_tokens,
)
from hardpoint.plugins.plan import NO_DRAFT
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.registry.blame import describe, raise_unless_fault
from hardpoint.registry.plugin_set import PluginSet

_MAX_RUNNING = 2
"""Compilations at a time."""

_MAX_GIVEN_UP = 4
"""Compilations that took too long and still run; with more, no other begins."""

_STACK_BYTES = 64 << 20
_STACK_BYTES_PER_BYTE = 1024
"""Of a compilation, for each byte of what it compiles: compilers recurse into it, and end the
process where the stack does. What is not used costs no memory."""

_WAIT_S = 0.002
"""For a compilation, in a step without anything to compute; the next step looks for aborts."""


class GrammarManager:
    """Compiles the grammars of requests, and says which of their tokens may come next.

    What a backend does wrong ends the requests that use it.
    """

    def __init__(
        self,
        plugins: PluginSet,
        config: GrammarConfig,
        vocabulary: Vocabulary,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the backend that the configuration names; others are created when requests do.

        Args:
            vocabulary: of the tokenizer.
            vocab_size: of the model.
            clock: seconds.

        Raises:
            PluginError: the backend cannot be created.
        """
        self._plugins, self._config = plugins, config
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._backends: dict[str, GrammarBackend] = {}
        self._creating = threading.Lock()
        self._compilations = _Compilations(config.compile_seconds, clock)
        self._compiled: OrderedDict[str, GrammarState] = OrderedDict()  # newest use last
        self._pending: dict[str, tuple[Request, str]] = {}  # with the key of the grammar
        self._answers: dict[str, Answer] = {}
        self._new: set[str] = set()  # ids since the last `finish`
        self._faults: dict[str, RequestFault] = {}
        self._backend(config.use)

    def uses(self, request: Request) -> bool:
        """Return whether a grammar constrains a request."""
        return request.source.params.structured is not None

    def ready(self, request: Request) -> bool:
        """Return whether the grammar of a request is compiled; the first call begins that.

        Raises:
            RequestError: it cannot be compiled.
        """
        request_id, structured = request.request_id, request.source.params.structured
        assert structured is not None, "asked for a request without a grammar"
        pending = self._pending.get(request_id)
        if pending is not None and pending[0] is request:
            key = pending[1]
        else:
            if pending is not None:  # of a request that has ended
                self._forget(request_id)
            key = self._key(structured)
            self._new.add(request_id)
        state = self._compiled.get(key)
        if state is None:
            self._pending[request_id] = request, key
            state = self._compilation(key, request_id, structured)
            if state is None:
                return False
            self._compiled[key] = state
            while len(self._compiled) > self._config.cache_size:
                self._compiled.popitem(last=False)
        if request_id in self._pending:
            self._forget(request_id)
        self._compiled.move_to_end(key)
        try:
            self._answers[request_id] = Answer(request, state, self._vocab_size)
        except BaseException as cause:
            raise_unless_fault(cause)
            raise RequestError(self._fault(structured, cause).message) from cause
        return True

    def _compilation(
        self, key: str, request_id: str, structured: StructuredOutputs
    ) -> GrammarState | None:
        """Return a compiled grammar, None while it is compiled.

        Raises:
            RequestError: it cannot be compiled.
        """
        name = structured.backend or self._config.use
        try:
            return self._compilations.result(
                key, request_id, lambda: self._compile(name, structured), _stack_of(structured)
            )
        except HardpointError as cause:
            self._forget(request_id)
            raise RequestError(str(cause)) from cause
        except ValueError as cause:
            self._forget(request_id)
            raise RequestError(f"structured.{structured.format}: {name}: {cause}") from cause

    def bitmask(self, plan: SchedulerOutput) -> GrammarBitmask | None:
        """Return the tokens that may be sampled in a step.

        A request whose grammar cannot go on gets a fault, see `pop_faults`.
        """
        drafts = plan.draft_token_ids
        names = [
            name
            for name in plan.structured_request_ids
            for _ in range(1 + len(drafts.get(name, ())))
        ]
        masks = np.zeros((len(names), -(-self._vocab_size // 32)), dtype=np.int32)
        row = 0
        for name in plan.structured_request_ids:
            tokens = drafts.get(name, ())
            rows = masks[row : row + 1 + len(tokens)]
            row += len(rows)
            answer = self._answers.get(name)
            if answer is None:  # it has ended since the step was planned
                rows[:] = -1
                continue
            try:
                answer.fill(rows, tokens)
            except BaseException as cause:
                raise_unless_fault(cause)
                self._faults[name] = self._fault(answer.structured, cause)
                rows[:] = -1  # what is sampled is dropped
        return GrammarBitmask(names, masks)

    def pop_faults(self, plan: SchedulerOutput) -> dict[str, RequestFault]:
        """Return and clear the faults of a plan's requests whose grammar could not go on, by id."""
        if not self._faults:
            return {}
        found = self._faults.keys() & plan.num_scheduled_tokens.keys()
        return {name: self._faults.pop(name) for name in found}

    def begin_step(self, plan: SchedulerOutput, scheduler: str) -> None:
        """Forget the requests that a new plan says have ended.

        Those that were ready since the last plan are others with the same ids. A request that is
        planned without its grammar gets a fault.

        Args:
            plan: each once, in order.
            scheduler: names the scheduler in messages.
        """
        for request_id in plan.finished_request_ids:
            if (answer := self._answers.get(request_id)) and self._is_over(answer.request):
                del self._answers[request_id]
            if (pending := self._pending.get(request_id)) and self._is_over(pending[0]):
                self._forget(request_id)
        self._new.clear()
        if self._pending:
            self._compilations.give_up_late()
        for new in plan.new_requests:
            request_id = new.source.request_id
            if new.source.params.structured is not None and (
                request_id not in plan.structured_request_ids or request_id not in self._answers
            ):
                self._faults[request_id] = RequestFault(
                    f"{scheduler}: it planned the request without its grammar"
                )

    def wait(self) -> None:
        """Wait until a compilation is done, or for a moment; return at once if none is under way.

        For a step that computed nothing.
        """
        if self._pending:
            self._compilations.wait(_WAIT_S)

    def close(self) -> None:
        """Close the backends. Compilations under way are left alone."""
        self._compilations.close()
        close_all(list(self._backends.values()))

    def _fault(self, structured: StructuredOutputs, cause: BaseException) -> RequestFault:
        """Return the fault of a request whose grammar failed while it ran."""
        name = structured.backend or self._config.use
        if isinstance(cause, ValueError):
            return RequestFault(f"structured.{structured.format}: {name}: {cause}")
        source = self._plugins.get("grammars", name).source
        return RequestFault(f"{source}: its grammar failed: {describe(cause)}")

    def _is_over(self, request: Request) -> bool:
        """Return whether it is a request that has ended, and not a later one with its id."""
        return request.request_id not in self._new or request.status is RequestStatus.FINISHED

    def _forget(self, request_id: str) -> None:
        _, key = self._pending.pop(request_id)
        self._compilations.leave(key, request_id)

    def _key(self, structured: StructuredOutputs) -> str:
        """Return the same text for the same grammar."""
        named = msgspec.structs.replace(structured, backend=structured.backend or self._config.use)
        return hashlib.sha256(msgspec.msgpack.encode(named)).hexdigest()

    def _backend(self, name: str) -> GrammarBackend:
        """Return a backend.

        Raises:
            PluginError: there is none of that name, or it cannot be created.
        """
        with self._creating:
            if name not in self._backends:
                self._backends[name] = self._plugins.create(
                    self._plugins.get("grammars", name),
                    GrammarContext,
                    vocabulary=self._vocabulary,
                    vocab_size=self._vocab_size,
                    compile_seconds=self._config.compile_seconds,
                )
            return self._backends[name]

    def _compile(self, name: str, structured: StructuredOutputs) -> GrammarState:
        """Compile a grammar; runs in a thread of its own.

        Raises:
            ValueError: it cannot be compiled, or no text fits it.
            PluginError: the backend cannot be created, or failed.
        """
        backend = self._backend(name)
        source = self._plugins.get("grammars", name).source
        try:
            state = backend.compile(structured)
            first = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
            can_end = state.fork().fill_bitmask(first)
        except ValueError:
            raise
        except BaseException as cause:
            raise_unless_fault(cause)
            raise PluginFaultError(f"{source}: its compile failed: {describe(cause)}") from cause
        if not first.any():
            but = ", but the empty one" if can_end else ""
            raise ValueError(f"no text of this model's tokens fits it{but}")
        return state


class _Text:
    """A grammar's state, and how many tokens have advanced it."""

    def __init__(self, compiled: GrammarState) -> None:
        self.state = compiled.fork()
        self.num_advanced = 0

    def advance(self, token: int) -> bool:
        """Take a token; return False, and stay, if the grammar does not allow it."""
        allowed = self.state.advance(token)
        self.num_advanced += allowed
        return allowed

    def return_to(self, num_advanced: int) -> None:
        """Undo the tokens after the first ones."""
        if (count := self.num_advanced - num_advanced) > 0:
            self.state.rollback(count)
            self.num_advanced = num_advanced


class _At(NamedTuple):
    """Where an output is.

    Attributes:
        position: among the markers of reasoning.
        starts: what is left of each marker that may begin reasoning here.
        prefix: tokens that are left before the text of the answer; None where it has not begun.
        text: of the answer, of which there are `num_advanced` tokens here.
    """

    position: ReasoningPosition
    starts: tuple[tuple[int, ...], ...]
    prefix: tuple[int, ...] | None
    text: _Text
    num_advanced: int


class Answer:
    """The answer in the output of one request: after the reasoning, its grammar constrains it.

    Reasoning may begin where the output does. The prefix of the markers comes before the answer.

    Attributes:
        request: whose output it is.
        structured: what the answer must be.
    """

    def __init__(self, request: Request, compiled: GrammarState, vocab_size: int) -> None:
        """Begin after the prompt.

        Args:
            request: whose outputs are followed.
            compiled: its grammar's state before the first token.
            vocab_size: of the model.
        """
        # Of a row's last number those that stand for tokens; 0 is all.
        self._last_bits = np.int32((1 << vocab_size % 32) - 1)
        source = request.source
        assert source.params.structured is not None
        self.structured = source.params.structured
        self.request, self._compiled = request, compiled
        self._ends = tuple(source.eos_token_ids) or tuple(source.params.stop_token_ids)
        markers = source.reasoning_markers or ReasoningMarkers()
        self._tracker = ReasoningTracker(markers)
        self._prefix = markers.message_prefix + markers.content_prefix
        prompt = source.prompt_token_ids
        position = self._tracker.after(prompt)
        starts: tuple[tuple[int, ...], ...] = ()
        prefix = None
        if not position.inside:
            starts = tuple(filter(None, markers.start))
            prefix = self._prefix[_overlap(prompt, self._prefix) :]
        self._at = _At(position, starts, prefix, _Text(compiled), 0)
        self._seen = 0  # output tokens

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token is one of the reasoning."""
        return self._at.position.inside

    def fill(self, rows: np.ndarray, drafts: Sequence[int] = ()) -> None:
        """Set the bits of the tokens that may come next, and after each draft.

        Args:
            rows: int32 [1 + drafts, columns], all zero. Rows after a draft that the grammar forbids
                allow everything, for no token is chosen there.
            drafts: tokens after the output so far.

        Raises:
            ValueError: the grammar forbids the output, or allows no token after it.
        """
        outputs = self.request.output_token_ids
        while self._seen < len(outputs):
            token = outputs[self._seen]
            if not self.advance(token):
                raise ValueError(
                    f"it does not allow the token {token}, the output's number {self._seen + 1}"
                )
            self._seen += 1
        before = self._at
        self._fill(rows[0])
        try:
            for index, token in enumerate(drafts, 1):
                if token == NO_DRAFT or not _is_allowed(rows[index - 1], token):
                    rows[index:] = -1
                    break
                if token in self._ends:  # the output ends there
                    rows[index:] = -1
                    break
                if not self.advance(token):
                    raise ValueError(f"it refused the token {token}, which its mask allows")
                self._fill(rows[index])
        finally:
            self._return_to(before)

    def advance(self, token: int) -> bool:
        """Follow one more token; return False if the grammar does not allow it.

        Raises:
            ValueError: the grammar cannot go on.
        """
        position, starts, prefix, text, count = self._at
        if position.inside:
            position = self._tracker.advance(position, token)
            if not position.inside:
                prefix = self._prefix
            self._at = _At(position, (), prefix, text, count)
            return True
        if starts:
            position = self._tracker.advance(position, token)
            if position.inside:
                # The answer begins again after the reasoning.
                self._at = _At(position, (), None, _Text(self._compiled), 0)
                return True
            starts = tuple(rest for marker in starts if marker[0] == token and (rest := marker[1:]))
        if prefix:
            prefix = prefix[1:] if prefix[0] == token else None
        elif prefix is not None:
            if text.advance(token):
                count += 1
            else:
                prefix = None
        if prefix is None and not starts:
            return token in self._ends
        self._at = _At(position, starts, prefix, text, count)
        return True

    def _fill(self, row: np.ndarray) -> None:
        at = self._at
        if at.position.inside:
            row[:] = -1
            _forbid(row, self._ends)
            return
        if at.prefix == ():
            can_end = at.text.state.fill_bitmask(row)
            if self._last_bits:
                row[-1] &= self._last_bits
            (allow_tokens if can_end else _forbid)(row, self._ends)
        elif at.prefix:
            allow_tokens(row, at.prefix[:1])
        if at.starts:
            allow_tokens(row, [marker[0] for marker in at.starts if self._begins(marker)])
        if not np.count_nonzero(row):  # quicker than any()
            raise ValueError("it allows no token after the output so far")

    def _begins(self, rest: tuple[int, ...]) -> bool:
        """Return whether the next token of a start marker leads to reasoning.

        Its last one does not where a longer end marker, which the prompt began, ends with it.
        """
        return len(rest) > 1 or self._tracker.advance(self._at.position, rest[0]).inside

    def _return_to(self, before: _At) -> None:
        """Undo tokens, for drafts are not accepted yet."""
        before.text.return_to(before.num_advanced)
        self._at = before


def _overlap(prompt: Sequence[int], prefix: Sequence[int]) -> int:
    """Return how many tokens of a prefix the prompt ends with."""
    longest = min(len(prompt), len(prefix))
    ends = (n for n in range(longest, 0, -1) if tuple(prompt[-n:]) == tuple(prefix[:n]))
    return next(ends, 0)


def _forbid(row: np.ndarray, tokens: Iterable[int]) -> None:
    bits = row.view(np.uint32)
    for token in tokens:
        bits[token // 32] &= ~(1 << token % 32) & 0xFFFFFFFF


def _is_allowed(row: np.ndarray, token: int) -> bool:
    return bool(row.view(np.uint32)[token // 32] >> token % 32 & 1)


def _stack_of(structured: StructuredOutputs) -> int:
    """Return the bytes of stack of a compilation."""
    size = len(msgspec.msgpack.encode(structured)) * _STACK_BYTES_PER_BYTE
    return _STACK_BYTES + -(-size // 4096) * 4096


class _Job:
    """One compilation.

    Attributes:
        waiting: ids of the requests that wait for it.
        started: when it began; None while others run.
        state: its result.
        error: what it raised.
        done: whether it has ended.
    """

    def __init__(self, compile_: Callable[[], GrammarState], stack_bytes: int) -> None:
        self.compile, self.stack_bytes = compile_, stack_bytes
        self.waiting: set[str] = set()
        self.started: float | None = None
        self.state: GrammarState | None = None
        self.error: BaseException | None = None
        self.done = False


class _Compilations:
    """Runs compilations in threads, each with a limit of time.

    A thread cannot be ended: one that takes too long is given up, and goes on unheeded.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._given_up: list[_Job] = []
        self._changed = threading.Condition()

    def result(
        self, key: str, request_id: str, compile_: Callable[[], GrammarState], stack_bytes: int
    ) -> GrammarState | None:
        """Return the result of a compilation, None while it is under way; begin it if it is new.

        Args:
            stack_bytes: of its thread.

        Raises:
            ValueError: it failed, or took too long.
            PluginFaultError: the backend failed.
        """
        with self._changed:
            job = self._jobs.get(key)
            if job is None:
                self._give_up_late()
                if len(self._given_up) >= _MAX_GIVEN_UP:
                    raise ValueError(
                        f"no grammar is compiled, for {len(self._given_up)} compilations that "
                        f"took longer than {self._seconds:g} s still run"
                    )
                job = self._jobs[key] = _Job(compile_, stack_bytes)
                self._start_next()
            job.waiting.add(request_id)
            if job.error is not None:
                raise job.error
            return job.state

    def give_up_late(self) -> None:
        """Give up what takes too long, and begin what waits; once per step."""
        with self._changed:
            self._give_up_late()
            self._start_next()

    def leave(self, key: str, request_id: str) -> None:
        """Forget that a request waits; what none waits for does not begin."""
        with self._changed:
            if (job := self._jobs.get(key)) is not None:
                job.waiting.discard(request_id)
                self._drop_if_unused(key, job)
            self._give_up_late()
            self._start_next()

    def wait(self, seconds: float) -> None:
        """Wait until a compilation is done, at most so long."""
        with self._changed:
            if any(not job.done for job in self._jobs.values()):
                self._changed.wait(seconds)

    def close(self) -> None:
        """Begin no further compilation."""
        with self._changed:
            self._jobs.clear()

    def _drop_if_unused(self, key: str, job: _Job) -> None:
        if not job.waiting and (job.done or job.started is None):
            del self._jobs[key]

    def _give_up_late(self) -> None:
        self._given_up = [job for job in self._given_up if not job.done]
        latest = self._clock() - self._seconds
        for key, job in list(self._jobs.items()):
            if job.started is None or job.done or job.error or job.started > latest:
                continue
            job.error = ValueError(
                f"compiling it took longer than {self._seconds:g} s (grammar.compile_seconds)"
            )
            self._given_up.append(job)
            if not job.waiting:
                del self._jobs[key]

    def _start_next(self) -> None:
        """Start the jobs that are first in the queue, as far as threads are free."""
        running = sum(
            job.started is not None and not job.done and job.error is None
            for job in self._jobs.values()
        )
        for key, job in self._jobs.items():
            if running >= _MAX_RUNNING:
                return
            if job.started is None:
                job.started = self._clock()
                running += 1
                name = "hardpoint-grammar"
                thread = threading.Thread(target=self._run, args=(key, job), name=name, daemon=True)
                before = threading.stack_size(job.stack_bytes)
                try:
                    thread.start()
                except RuntimeError as cause:  # no thread is left
                    job.error, job.done = ValueError(f"it cannot be compiled now: {cause}"), True
                finally:
                    threading.stack_size(before)

    def _run(self, key: str, job: _Job) -> None:
        state = error = None
        try:
            state = job.compile()
        except BaseException as raised:
            error = raised
        with self._changed:
            if job.error is None:  # it was not given up
                job.state, job.error = state, error
            job.done = True
            if self._jobs.get(key) is job:
                self._drop_if_unused(key, job)
            self._start_next()
            self._changed.notify_all()
