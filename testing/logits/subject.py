"""The processor under test: building it as the engine does, and requests that use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from hypothesis import assume
from hypothesis import strategies as st

from hardpoint.core.worker.sampling.processor_runner import ProcessorRunner
from hardpoint.plugins import (
    BatchLogitsProcessor,
    HardpointError,
    LogitsContext,
    LogitsRequest,
    PrepareContext,
    ReasoningParser,
    SamplingParams,
    Tokenizer,
    typed,
)
from hardpoint.plugins.logits import LogitsPlugin
from hardpoint.plugins.manifest import Source
from hardpoint.testing.suite import Violation, short

MAX_ROWS = 8
"""Rows of the batches that the kit makes."""

_CPU = torch.device("cpu")
_GREEDY, _RANDOM = 0.0, 1.0


class Refused(Exception):  # noqa: N818 - it is no error of the processor's
    """`prepare` refused the arguments of a request, as it may."""


@dataclass(frozen=True, eq=False)
class Case:
    """A request to make.

    Attributes:
        arguments: as the processor gets them; None for a request that does not use it.
        outputs: tokens that it has already when it enters the batch.
    """

    arguments: Any
    params: SamplingParams
    prompt: tuple[int, ...]
    outputs: tuple[int, ...]
    stop_token_ids: tuple[int, ...]

    @property
    def uses(self) -> bool:
        """Whether it uses the processor."""
        return self.arguments is not None

    def request(
        self, subject: Subject, name: str, outputs: list[int], row: int = 0
    ) -> LogitsRequest:
        """Return it as the engine's worker makes it; `outputs` is its live list."""
        return _Request(
            request_id=name,
            prompt_token_ids=list(self.prompt),
            output_token_ids=outputs,
            params=self.params,
            stop_token_ids=list(self.stop_token_ids),
            arguments={subject.name: self.arguments} if self.uses else {},
            row=row,
        )

    def __repr__(self) -> str:
        who = short(self.arguments) if self.uses else "does not use the processor"
        greedy = ", greedy" if self.params.greedy else ""
        return f"<{who}{greedy}, prompt {list(self.prompt)}, outputs {list(self.outputs)}>"


class _Request(LogitsRequest):
    """A request that can be watched: whether anybody still holds it."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, eq=False)
class Subject:
    """A processor class and the surroundings that its author chose; see LogitsSuiteBase.

    Attributes:
        refusals: why `prepare` refused requests, in turn.
    """

    cls: type[LogitsPlugin]
    name: str
    options: Mapping[str, Any]
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None
    reasoning: ReasoningParser | None = None
    refusals: list[str] = field(default_factory=list)

    @property
    def batchwise(self) -> bool:
        """Whether it is of the batch form."""
        return issubclass(self.cls, BatchLogitsProcessor)

    def source(self) -> Source:
        """Return who it is, for messages."""
        value = f"{self.cls.__module__}:{self.cls.__qualname__}"
        return Source(self.name, value, "under test", "0", "default")

    def checked_options(self) -> Any:
        """Return the options as the engine gives them.

        Raises:
            Violation: they do not fit the class's Options.
        """
        try:
            return typed.convert(self.options, self.cls.Options, path=f"plugin.{self.name}")
        except HardpointError as error:
            raise Violation(
                f"the suite's `options` do not fit {self.cls.__name__}.Options: {error}",
                "set `options` of the test class to what an operator would write",
            ) from None

    def build(
        self, *, vocab_size: int | None = None, device: torch.device = _CPU
    ) -> ProcessorRunner:
        """Return a fresh instance in a stage of its own.

        Raises:
            Violation: its constructor raised.
        """
        context = LogitsContext(
            name=self.name,
            options=self.checked_options(),
            device=device,
            vocab_size=vocab_size or self.vocab_size,
            max_num_seqs=MAX_ROWS,
        )
        try:
            return ProcessorRunner(self.cls(context), self.source(), device, MAX_ROWS)
        except Exception as cause:
            raise Violation(
                f"the constructor, or device_state(), raised {type(cause).__name__}: {cause}",
                "a constructor takes one LogitsContext, passes it to super().__init__ and may "
                "raise for no options that Options accepts",
            ) from cause

    def everybody_uses_it(self, params: SamplingParams) -> bool:
        """Whether a request that says nothing of the processor uses it all the same."""
        if issubclass(self.cls, BatchLogitsProcessor):
            return self.cls.uses(params)
        return self.cls.Arguments is LogitsPlugin.Arguments

    def checked(self, given: Any) -> Any:
        """Return arguments as the frontend checks them.

        Raises:
            Violation: they do not fit the class's Arguments.
        """
        try:
            path = f"plugin_args.{self.name}"
            return typed.convert(given, self.cls.Arguments, path=path)
        except HardpointError as error:
            raise Violation(
                f"{short(given)} does not fit {self.cls.__name__}.Arguments: {error}",
                "let the strategy `arguments` make only what Arguments accepts; a processor that "
                "every request uses must accept no arguments at all",
            ) from None

    def case(
        self,
        given: Any,
        base: SamplingParams,
        prompt: Sequence[int] = (1,),
        outputs: Sequence[int] = (),
    ) -> Case:
        """Return a request with arguments as the frontend makes them; `given` None gives none.

        Raises:
            Refused: `prepare` refuses it.
            Violation: `prepare` raises anything else, or returns something else.
        """
        params = base
        if given is not None:
            params = self._asking(given, base)
        elif self.everybody_uses_it(base):
            given = {}
        arguments = None if given is None else self._prepared(self.checked(given), params, prompt)
        return Case(arguments, params, tuple(prompt), tuple(outputs), self.stop_token_ids)

    def _asking(self, given: Any, base: SamplingParams) -> SamplingParams:
        """Return parameters that ask for the processor in the way that its class wants."""
        if not self.cls.params_fields:
            plugin_args = {**base.plugin_args, self.name: given}
            return msgspec.structs.replace(base, plugin_args=plugin_args)
        checked = self.checked(given)
        fields = {f: getattr(checked, f) for f in self.cls.params_fields if hasattr(checked, f)}
        return msgspec.structs.replace(base, **fields)

    def _prepared(self, arguments: Any, params: SamplingParams, prompt: Sequence[int]) -> Any:
        context = PrepareContext(
            options=self.checked_options(),
            params=params,
            prompt_token_ids=list(prompt),
            stop_token_ids=list(self.stop_token_ids),
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
            reasoning=self.reasoning,
        )
        try:
            prepared = self.cls.prepare(arguments, context)
        except ValueError as refusal:
            self.refusals.append(str(refusal))
            raise Refused(str(refusal)) from None
        except Exception as cause:
            raise Violation(
                f"prepare raised {type(cause).__name__}: {cause}, for {short(arguments)}",
                "prepare refuses a request by a ValueError, whose message reaches the user",
            ) from cause
        if not isinstance(prepared, self.cls.Arguments):
            raise Violation(
                f"prepare returned {type(prepared).__name__}, for {short(arguments)}",
                "return the arguments, or others of the same type",
            )
        return typed.convert(prepared, self.cls.Arguments, path=f"plugin_args.{self.name}")

    def cases(
        self,
        arguments: st.SearchStrategy[Any] | None,
        params: st.SearchStrategy[SamplingParams] | None = None,
        *,
        users_only: bool = False,
        sampled_only: bool = False,
    ) -> st.SearchStrategy[Case]:
        """Return a strategy for requests.

        Args:
            arguments: for those that use the processor; None gives no arguments.
            params: what they ask for beside.
            users_only: leave out requests that do not use it.
            sampled_only: leave out greedy requests.
        """
        base = st.just(SamplingParams(max_tokens=None)) if params is None else params
        given = st.just({}) if arguments is None else arguments
        temperature = st.just(_RANDOM) if sampled_only else st.sampled_from([_RANDOM, _GREEDY])
        uses = st.just(True) if users_only else st.sampled_from([True, True, False])
        tokens = st.integers(0, 3) | st.integers(0, self.vocab_size - 1)
        prompts = st.lists(tokens, min_size=1, max_size=8)
        outputs = st.lists(tokens, max_size=8)

        def make(
            uses: bool,
            given: Any,
            params: SamplingParams,
            warmth: float,
            prompt: list[int],
            outputs: list[int],
        ) -> Case:
            params = msgspec.structs.replace(params, temperature=warmth)
            try:
                case = self.case(given if uses else None, params, prompt, outputs)
            except Refused:
                assume(False)
                raise
            assume(not (sampled_only and case.params.greedy))
            return case

        return st.builds(make, uses, given, base, temperature, prompts, outputs)
