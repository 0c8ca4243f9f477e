"""The base of the suite of step parts: builds parts and their halves, and opens sessions."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import torch

from hardpoint.host.boundary.parts.hooks import (
    ENGINE_HOOKS,
    FRONTEND_HOOKS,
    WORKER_HOOKS,
    HookTable,
)
from hardpoint.plugins import (
    EngineHalf,
    FrontendHalf,
    ModelConfig,
    StepPart,
    StepPartContext,
    WorkerHalf,
)
from hardpoint.plugins.component import Component
from hardpoint.plugins.grammars import Vocabulary
from hardpoint.plugins.step_part import EngineHalfContext
from hardpoint.plugins.step_part.part import FrontendHalfContext
from hardpoint.plugins.worker_half import WorkerHalfContext
from hardpoint.testing.component_suite import GeneralComponentSuite, LiveComponentSuite
from hardpoint.testing.engine_access import describe_fault, engine_config, fault_counter
from hardpoint.testing.hidden_states.drafting_model import ModelOfTests
from hardpoint.testing.reporting.calls import call

from . import rules
from .compared import Halves, block_hashes
from .frontend import BytesReader, ScriptedComponents
from .session import StepPartSession
from .worker import HIDDEN_SIZE, WorkerSteps, overrides

__all__ = ["END", "OpenedSession", "StepPartHalves"]

END = 256
"""The token that ends a text in the vocabulary of bytes."""

_NUM_LAYERS = 4
_MAX_MODEL_LEN = 4096
_BYTES = Vocabulary(tokens=(*(bytes([byte]) for byte in range(256)), b"<eos>"), special=(END,))


@functools.cache
def _further_model(vocab_size: int) -> ModelOfTests:
    """Return the model that worker halves open: each drawn example builds a half."""
    return ModelOfTests(vocab_size, _MAX_MODEL_LEN, _NUM_LAYERS, torch.device("cpu"))


class StepPartHalves(GeneralComponentSuite, LiveComponentSuite):
    """Builds the halves of the part under test.

    `open_model` of the worker half returns sequences of a random model, under any name.

    Attributes:
        part: the class under test.
        config: tables of the engine's configuration, as an operator writes them.
        components: classes that the part's factory builds instead of installed components, by
            kind and name.
        vocabulary: vocabulary of the tokenizer; None for an engine without one.
        vocab_size: vocabulary size of the model.
        model_config: configuration of the model, `StepPartContext.model_config`.
        ready_steps: calls of a gate after which, and
        ready_seconds: seconds after which, it has to have ended.
    """

    kind = "step_parts"
    part: ClassVar[type[StepPart]]
    config: ClassVar[Mapping[str, Any]] = {}
    components: ClassVar[Mapping[str, Mapping[str, type[Component]]]] = {}
    vocabulary: ClassVar[Vocabulary | None] = _BYTES
    vocab_size: ClassVar[int] = 300
    model_config: ClassVar[ModelConfig | None] = None
    ready_steps: ClassVar[int] = 100
    ready_seconds: ClassVar[float] = 10.0

    def _component(self) -> type[Component]:
        return self.part

    def loaded(self) -> Any:
        """Return the model that the worker half gets, `WorkerHalfContext.loaded`."""
        return None

    def change_weights(self, loaded: Any) -> None:
        """Give a model that `loaded` returned other weights."""

    def _make(self, clock: Callable[[], float] = time.monotonic) -> Halves:
        """Return the halves of new parts; skip the test if there is none in the engine.

        Args:
            clock: clock of the engine's half.
        """
        loaded = self.loaded()
        worker_part, worker = self._build_worker_half(loaded)
        halves = Halves(*self._build_engine_half(worker, clock), worker_part, worker, loaded)
        if halves.engine is None:
            halves.close()
            pytest.skip("the part has no half in the engine")
        worker, moves_blocks = halves.worker, halves.worker_part.moves_blocks is not None
        if worker is not None and moves_blocks and overrides(worker, "start"):
            call(rules.WORKER, worker.start, None)  # the suite has no blocks
        return halves

    def _build_half(self, method: str, context: type, **fields: Any) -> tuple[StepPart, Any]:
        """Return a new part, as each process has one, and its half.

        Args:
            method: name of the part's method that returns the half.
            context: class of the half's context.
            fields: fields of it besides `components` and `vocab_size`.
        """
        config = engine_config(self.config)
        part: StepPart = self._build(StepPartContext, config=config, model_config=self.model_config)
        components = ScriptedComponents(self.components, config)
        half_context = context(components=components, vocab_size=self.vocab_size, **fields)
        return part, call(rules.HALVES, getattr(part, method), half_context)

    def _build_frontend_half(self) -> tuple[StepPart, FrontendHalf | None]:
        part, half = self._build_half(
            "frontend_half",
            FrontendHalfContext,
            vocabulary=self._vocabulary_or_none,
            encode=lambda text: list(text.encode()),
            tokenizer=BytesReader.tokenizer,
        )
        return part, self._completed(half, FRONTEND_HOOKS, "frontend_half")

    def _vocabulary_or_none(self) -> Vocabulary:
        if self.vocabulary is None:
            raise NotImplementedError("this tokenizer has no vocabulary")
        return self.vocabulary

    def _build_engine_half(
        self, worker: WorkerHalf | None = None, clock: Callable[[], float] = time.monotonic
    ) -> tuple[StepPart, EngineHalf | None]:
        part, half = self._build_half(
            "engine_half",
            EngineHalfContext,
            describe_fault=describe_fault,
            faults=fault_counter(engine_config(self.config)),
            clock=clock,
            scheduler="the scheduler",
            vocabulary=self.vocabulary,
            block_size=16,
            world_size=1,
            block_hashes=block_hashes,
            publish=lambda _events: None,
            can_release_blocks=self.part.releases_blocks,
            call_workers=lambda message: [] if worker is None else [worker.call(message)],
        )
        cls = type(part)
        is_elsewhere = cls.worker_half is not StepPart.worker_half
        is_elsewhere = is_elsewhere or cls.frontend_half is not StepPart.frontend_half
        if half is None and not is_elsewhere:
            raise rules.HALVES.violation("engine_half() returned None, expected an EngineHalf")
        return part, self._completed(half, ENGINE_HOOKS, "engine_half")

    def _build_worker_half(self, loaded: Any) -> tuple[StepPart, WorkerHalf | None]:
        part, half = self._build_half(
            "worker_half",
            WorkerHalfContext,
            device=torch.device("cpu"),
            rank=0,
            world_size=1,
            hidden_size=HIDDEN_SIZE,
            describe_fault=describe_fault,
            host_memory=lambda: 1 << 30,
            loaded=loaded,
            open_model=_further_model(self.vocab_size).open,
            num_layers=_NUM_LAYERS,
        )
        return part, self._completed(half, WORKER_HOOKS, "worker_half")

    def _completed(self, half: Any, hooks: HookTable, method: str) -> Any:
        """Return a half with all hooks, as the engine calls it; None if there is none."""
        if half is None:
            return None
        if (defect := hooks.defect(half)) is not None:
            raise rules.HALVES.violation(f"{method}() {defect}")
        return hooks.completed(half)

    def _opened(
        self, *, clock: Callable[[], float] = time.monotonic, **named: Any
    ) -> OpenedSession:
        return OpenedSession(functools.partial(self._make, clock), self._session, named)

    def _session(self, halves: Halves, *, watch: bool = False, **named: Any) -> StepPartSession:
        worker = None
        if halves.worker is not None:
            name = halves.worker_part.name
            worker = WorkerSteps(halves.worker, name, self.vocab_size, watch=watch)
        assert halves.engine is not None, "_make() gives one"
        named["change_weights"] = functools.partial(self.change_weights, halves.loaded)
        return self._engine_session(halves.engine, worker=worker, watch=watch, **named)

    def _engine_session(self, half: EngineHalf, **named: Any) -> StepPartSession:
        limits = rules.GateLimits(self.ready_steps, self.ready_seconds)
        key = f"step_parts/{self._name()}" if self.part.named_only else None
        return StepPartSession(half, self.vocab_size, limits, required_arguments=key, **named)


class OpenedSession:
    """A session with new halves, which are closed with it."""

    def __init__(
        self,
        make: Callable[[], Halves],
        open_session: Callable[..., StepPartSession],
        named: Mapping[str, Any],
    ) -> None:
        """Build halves by `make`; `named` are arguments of `open_session` after the halves."""
        self._make, self._open, self._named = make, open_session, named

    def __enter__(self) -> StepPartSession:
        self._halves = self._make()
        return self._open(self._halves, **self._named)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._halves.close()
        else:
            with suppress(Exception):  # the violation is the finding
                self._halves.close()
