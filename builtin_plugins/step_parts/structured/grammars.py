"""Structured output as a step part: grammars are compiled while requests wait, then mask tokens."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hardpoint.errors import HardpointError, PluginFaultError, RequestError
from hardpoint.plugins import (
    EngineConfig,
    EngineCoreRequest,
    GrammarBackend,
    GrammarBitmask,
    GrammarContext,
    ModelRunnerOutput,
    Request,
    RequestFault,
    SchedulerOutput,
    StepPart,
    WaitingFor,
    WaitReason,
)
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.step_part import (
    AdmissionGate,
    EngineHalfContext,
    FrontendHalf,
    FrontendHalfContext,
    PlanData,
    RequestFilter,
    RequestLifecycle,
    StepObserver,
    TokenMask,
)
from hardpoint.plugins.structured import StructuredOutputs

from .answers import ConstrainedAnswer
from .compilations import Compilations, stack_of
from .requests import StructuredRequests

if TYPE_CHECKING:
    from hardpoint.plugins.step_part.components import ComponentFactory
    from hardpoint.plugins.text.grammars import GrammarState

_WAIT_S = 0.002
"""For a compilation, in a step without anything to compute; the next step looks for aborts."""

_COMPILING = WaitReason(WaitingFor.GRAMMAR, "its grammar is being compiled")


class StructuredOutput(StepPart):
    """Answers that keep to a schema, a pattern or a grammar; drives the `grammars` kind."""

    contract = 1

    def frontend_half(self, context: FrontendHalfContext) -> FrontendHalf:
        """Return the half that checks requests, and validates answers that nothing constrained."""
        return StructuredRequests(context, self.context.config)

    def engine_half(self, context: EngineHalfContext) -> GrammarManager | _WithoutVocabulary:
        """Return the half that compiles and masks; without a vocabulary, a half that rejects."""
        if context.vocabulary is None:
            return _WithoutVocabulary()
        return GrammarManager(
            context.components,
            self.context.config,
            context.vocabulary,
            context.vocab_size,
            describe_fault=context.describe_fault,
            scheduler=context.scheduler,
        )


class _WithoutVocabulary(RequestFilter):
    """Refuses requests with a grammar."""

    for_parameters = ("structured",)

    def check(self, request: EngineCoreRequest) -> None:  # noqa: ARG002
        """Refuse a request.

        Raises:
            RequestError: always.
        """
        raise RequestError("structured: this engine has no grammars, for it got no vocabulary")


class GrammarManager(
    RequestFilter, AdmissionGate, RequestLifecycle, PlanData, StepObserver, TokenMask
):
    """Compiles the grammars of requests, and masks the tokens that they do not allow.

    A fault of a backend ends the requests that use it.
    """

    for_parameters = ("structured",)

    def __init__(
        self,
        components: ComponentFactory,
        config: EngineConfig,
        vocabulary: Vocabulary,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        describe_fault: Callable[[BaseException], str],
        scheduler: str = "the scheduler",
    ) -> None:
        """Create the backend that the configuration names; others are created when requests do.

        Args:
            vocab_size: vocabulary size of the model.
            clock: seconds.
            describe_fault: see `EngineHalfContext`.
            scheduler: names the scheduler in messages.

        Raises:
            PluginError: the backend cannot be created.
        """
        self._components, self._config = components, config.grammar
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._describe_fault, self._scheduler = describe_fault, scheduler
        self._backends: dict[str, GrammarBackend] = {}
        self._creating = threading.Lock()
        self._compilations = Compilations(self._config.compile_seconds, clock)
        self._compiled: OrderedDict[str, GrammarState] = OrderedDict()  # newest use last
        self._pending: dict[str, tuple[Request, str]] = {}  # with the key of the grammar
        self._answers: dict[str, ConstrainedAnswer] = {}
        self._faults: dict[str, RequestFault] = {}
        self._backend(self._config.use)

    def gate(self, request: Request) -> WaitReason | None:
        """Return why a request waits for its grammar; the first call begins to compile it.

        Raises:
            RequestError: it cannot be compiled.
        """
        request_id, structured = request.request_id, request.source.params.structured
        assert structured is not None, "asked for a request without a grammar"
        pending = self._pending.get(request_id)
        key = self._key(structured) if pending is None else pending[1]
        state = self._compiled.get(key)
        if state is None:
            self._pending[request_id] = request, key
            state = self._compilation(key, request_id, structured)
            if state is None:
                return _COMPILING
            self._compiled[key] = state
            while len(self._compiled) > self._config.cache_size:
                self._compiled.popitem(last=False)
        if request_id in self._pending:
            self._forget(request_id)
        self._compiled.move_to_end(key)
        try:
            answer = ConstrainedAnswer(request, state, self._vocab_size, self._describe_fault)
        except BaseException as cause:
            raise RequestError(self._fault(structured, cause).message) from cause
        self._continue(answer)
        self._answers[request_id] = answer
        return None

    def _continue(self, answer: ConstrainedAnswer) -> None:
        """Follow the output that a request has from another engine.

        Raises:
            RequestError: the grammar does not allow it, or failed.
        """
        try:
            answer.follow()
        except BaseException as cause:
            message = self._fault(answer.structured, cause).message
            if isinstance(cause, ValueError):
                index = answer.num_followed
                message = (
                    f"resumed.output_token_ids[{index}]: expected a token that the grammar allows, "
                    f"got {answer.request.output_token_ids[index]}: {message}"
                )
            raise RequestError(message) from cause

    def _compilation(
        self, key: str, request_id: str, structured: StructuredOutputs
    ) -> GrammarState | None:
        """Return a compiled grammar, None while it is compiled."""
        name = structured.backend or self._config.use
        try:
            return self._compilations.result(
                key, request_id, lambda: self._compile(name, structured), stack_of(structured)
            )
        except HardpointError as cause:
            self._forget(request_id)
            raise RequestError(str(cause)) from cause
        except ValueError as cause:
            self._forget(request_id)
            raise RequestError(f"structured.{structured.format}: {name}: {cause}") from cause

    def begin(self, plan: SchedulerOutput) -> bytes | None:
        """Give up compilations that take too long; check that planned requests passed the gate."""
        if self._pending:
            self._compilations.give_up_late()
        for new in plan.new_requests:
            name = new.source.request_id
            if new.source.params.structured is not None and name not in self._answers:
                self._faults[name] = RequestFault(
                    f"{self._scheduler}: it planned the request without its grammar"
                )
        return None

    def needs_results(self, plan: SchedulerOutput) -> list[str]:
        """Return the requests of a plan that have a grammar: it follows their tokens."""
        planned = plan.num_scheduled_tokens
        return [name for name in self._answers if name in planned]

    def mask(self, plan: SchedulerOutput) -> GrammarBitmask | None:
        """Return the tokens that grammars allow; fail requests with a stuck grammar."""
        drafts = plan.draft_token_ids
        answers = [(name, self._answers[name]) for name in self.needs_results(plan)]
        if not answers:
            return None
        names = [name for name, _ in answers for _ in range(1 + len(drafts.get(name, ())))]
        masks = np.zeros((len(names), -(-self._vocab_size // 32)), dtype=np.int32)
        row = 0
        for name, answer in answers:
            tokens = drafts.get(name, ())
            rows = masks[row : row + 1 + len(tokens)]
            row += len(rows)
            try:
                answer.fill(rows, tokens)
            except BaseException as cause:
                self._faults[name] = self._fault(answer.structured, cause)
                rows[:] = -1  # the sampled token is dropped
        return GrammarBitmask(names, masks)

    def limit_drafts(self, drafts: Mapping[str, Sequence[int]]) -> Mapping[str, int]:
        """Return how many drafts the grammar of each request allows."""
        limits: dict[str, int] = {}
        for name, tokens in drafts.items():
            answer = self._answers.get(name)
            if answer is None:
                continue
            try:
                limits[name] = answer.num_allowed(tokens)
            except BaseException as cause:
                self._faults[name] = self._fault(answer.structured, cause)
                limits[name] = 0
        return limits

    def result(
        self,
        plan: SchedulerOutput,
        result: ModelRunnerOutput,  # noqa: ARG002
    ) -> Mapping[str, RequestFault]:
        """Return the faults of a plan's requests with a stuck grammar."""
        if not self._faults:
            return {}
        names = self._faults.keys() & plan.num_scheduled_tokens.keys()
        return {name: self._faults.pop(name) for name in names}

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._answers.pop(request_id, None)
        self._faults.pop(request_id, None)
        if request_id in self._pending:
            self._forget(request_id)

    def wait(self) -> None:
        """Wait until a compilation is done, or for a moment; return at once if none is under way.

        For a step that computed nothing.
        """
        if self._pending:
            self._compilations.wait(_WAIT_S)

    def close(self) -> None:
        """Close the backends. Compilations under way are left alone."""
        self._compilations.close()
        with contextlib.ExitStack() as stack:
            for name in self._backends:
                stack.callback(self._close, name)

    def _close(self, name: str) -> None:
        """Close a backend.

        Raises:
            PluginFaultError: it failed.
        """
        try:
            self._backends[name].close()
        except BaseException as cause:
            failed = self._describe_fault(cause)
            source = self._components.source("grammars", name)
            raise PluginFaultError(f"{source}: its close failed: {failed}") from cause

    def _fault(self, structured: StructuredOutputs, cause: BaseException) -> RequestFault:
        """Return the fault of a request with a grammar that failed while it ran."""
        name = structured.backend or self._config.use
        if isinstance(cause, ValueError):
            return RequestFault(f"structured.{structured.format}: {name}: {cause}")
        failed = self._describe_fault(cause)
        source = self._components.source("grammars", name)
        return RequestFault(f"{source}: its grammar failed: {failed}")

    def _forget(self, request_id: str) -> None:
        _, key = self._pending.pop(request_id)
        self._compilations.leave(key, request_id)

    def _key(self, structured: StructuredOutputs) -> str:
        named = msgspec.structs.replace(structured, backend=structured.backend or self._config.use)
        return hashlib.sha256(msgspec.msgpack.encode(named)).hexdigest()

    def _backend(self, name: str) -> GrammarBackend:
        """Return a backend.

        Raises:
            PluginError: there is none of that name, or it cannot be created.
        """
        with self._creating:
            if name not in self._backends:
                self._backends[name] = self._components.create(
                    "grammars",
                    name,
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
        source = self._components.source("grammars", name)
        try:
            state = backend.compile(structured)
            first = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
            can_end = state.fork().fill_bitmask(first)
        except ValueError:
            raise
        except BaseException as cause:
            failed = self._describe_fault(cause)
            raise PluginFaultError(f"{source}: its compile failed: {failed}") from cause
        if not first.any():
            but = ", but the empty one" if can_end else ""
            raise ValueError(f"no text of this model's tokens fits it{but}")
        return state
