"""The logits processor under test, built as the engine builds it, and requests that use it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from hypothesis import assume, reject
from hypothesis import strategies as st

from hardpoint import typed
from hardpoint.plugins import (
    BatchLogitsProcessor,
    HardpointError,
    LogitsContext,
    LogitsRequest,
    PrepareContext,
    ReasoningMarkers,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.sampling.logits import LogitsPlugin
from hardpoint.testing.engine_access import ProcessorPipeline, logits_ops
from hardpoint.testing.suite import Violation, short_repr
from hardpoint.typed import prepared_type

MAX_ROWS = 8
"""Maximum number of rows in a test batch."""

MAX_LENGTH = 512
"""Maximum number of tokens of a request in a test."""

_CPU = torch.device("cpu")
_MOST_IDS = 16  # of a request's arguments that are drawn into its prompt and outputs
_MOST_IN_A_RUN = 4
_GREEDY, _RANDOM = 0.0, 1.0


class RequestRejectedError(Exception):
    """`prepare` rejected the arguments of a request, which it may."""


@dataclass(frozen=True, eq=False)
class RequestCase:
    """A request to create.

    Attributes:
        arguments: prepared arguments; None for a request that does not use the processor.
        outputs: its output tokens when it enters the batch.
        argument_ids: the token ids in its arguments, given and prepared, in their order.
    """

    arguments: Any
    params: SamplingParams
    prompt: tuple[int, ...]
    outputs: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    argument_ids: tuple[int, ...] = ()

    def token(self, number: int) -> int:
        """Return a drawn token id; a negative number stands for one of the arguments' ids."""
        return _meeting_token(number, self.argument_ids)

    @property
    def uses(self) -> bool:
        """Return whether it uses the processor."""
        return self.arguments is not None

    def request(
        self, subject: Subject, name: str, outputs: list[int], row: int = 0
    ) -> LogitsRequest:
        """Return it as the worker builds it; `outputs` is its growing list of output tokens."""
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
        arguments = short_repr(self.arguments) if self.uses else "does not use the processor"
        greedy = ", greedy" if self.params.greedy else ""
        return f"<{arguments}{greedy}, prompt {list(self.prompt)}, outputs {list(self.outputs)}>"


class _Request(LogitsRequest):
    """A request with weak references, to check that no reference to it is left."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, eq=False)
class Subject:
    """A processor class with the settings of its LogitsProcessorSuite.

    Attributes:
        tokenizer: tokenizer for `prepare`; None gives some requests the `default_tokenizer`.
        default_tokenizer: its ids are below `vocab_size`.
        rejections: the messages with which `prepare` rejected requests, in order.
    """

    cls: type[LogitsPlugin]
    name: str
    options: Mapping[str, Any]
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None
    default_tokenizer: Tokenizer | None = None
    reasoning: ReasoningMarkers | None = None
    rejections: list[str] = field(default_factory=list)

    @property
    def is_batch_level(self) -> bool:
        """Return whether it is a BatchLogitsProcessor."""
        return issubclass(self.cls, BatchLogitsProcessor)

    @property
    def observes(self) -> bool:
        """Return whether its state depends on logits, so that it only starts without outputs."""
        return self.cls.observe is not LogitsPlugin.observe

    def checked_options(self) -> Any:
        """Return the options, validated as the engine does.

        Raises:
            Violation: they do not fit the class's Options.
        """
        try:
            path = f"plugin.{self.name}"
            return typed.convert(self.options, self.cls.Options, path=path, str_keys=True)
        except HardpointError as error:
            raise Violation(
                f"the suite's `options` do not fit {self.cls.__name__}.Options: {error}",
                "set `options` of the test class to the options of an operator",
            ) from None

    def build(
        self, *, vocab_size: int | None = None, device: torch.device = _CPU
    ) -> ProcessorPipeline:
        """Return a new instance in a pipeline of its own.

        Raises:
            Violation: its constructor raised.
        """
        context = LogitsContext(
            name=self.name,
            options=self.checked_options(),
            device=device,
            vocab_size=vocab_size or self.vocab_size,
            max_num_seqs=MAX_ROWS,
            ops=logits_ops(device),
            max_model_len=MAX_LENGTH,
        )
        try:
            return ProcessorPipeline(self.cls(context), self.name, device, MAX_ROWS)
        except Exception as cause:
            raise Violation(
                f"the constructor, or device_state(), raised {type(cause).__name__}: {cause}",
                "let the constructor take one LogitsContext, pass it to super().__init__ and "
                "accept all options that Options accepts",
            ) from cause

    def used_by_default(self, params: SamplingParams) -> bool:
        """Return whether a request uses the processor without asking for it.

        Raises:
            Violation: `uses` raised.
        """
        try:
            return bool(self.cls.uses(params))
        except Exception as cause:
            raise Violation(
                f"uses() raised {type(cause).__name__}: {cause}, for {short_repr(params)}",
                "let uses be a classmethod that returns a bool for all SamplingParams: an engine "
                "rejects requests for which it raises",
            ) from cause

    def convert_arguments(self, values: Any) -> Any:
        """Return arguments, validated as the frontend does.

        Raises:
            Violation: they do not fit the class's Arguments.
        """
        try:
            path = f"plugin_args.{self.name}"
            return typed.convert(values, self.cls.Arguments, path=path, str_keys=True)
        except HardpointError as error:
            raise Violation(
                f"{short_repr(values)} does not fit {self.cls.__name__}.Arguments: {error}",
                "let the strategy `arguments` draw only values that Arguments accepts",
            ) from None

    def _convert_no_arguments(self) -> Any:
        """Return the arguments of a request that uses the processor without asking for it.

        Raises:
            Violation: Arguments has a field without a default.
        """
        try:
            return self.convert_arguments({})
        except Violation as violation:
            raise Violation(
                f"uses() returned True for a request without arguments, but {violation.observed}",
                "give every field of Arguments a default, or let uses() return False: an engine "
                "rejects such requests",
            ) from None

    def case(
        self,
        values: Any,
        base: SamplingParams,
        prompt: Sequence[int] = (1,),
        outputs: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
    ) -> RequestCase:
        """Return a request with prepared arguments; `values` None does not ask for the processor.

        Raises:
            RequestRejectedError: `prepare` rejects it.
            Violation: `prepare` raises another exception, or returns something else.
        """
        params = base
        converted = arguments = None
        if values is not None:
            params = self._requesting_params(values, base)
            converted = self.convert_arguments(values)
        elif self.used_by_default(base):
            converted = self._convert_no_arguments()
        if converted is not None:
            arguments = self._prepared(converted, params, prompt, tokenizer)
        return RequestCase(arguments, params, tuple(prompt), tuple(outputs), self.stop_token_ids)

    def _requesting_params(self, values: Any, base: SamplingParams) -> SamplingParams:
        """Return parameters that ask for the processor: by plugin_args or by its own fields."""
        if not self.cls.params_fields:
            plugin_args = {**base.plugin_args, self.name: values}
            return msgspec.structs.replace(base, plugin_args=plugin_args)
        convert_arguments = self.convert_arguments(values)
        fields = {
            f: getattr(convert_arguments, f)
            for f in self.cls.params_fields
            if hasattr(convert_arguments, f)
        }
        return msgspec.structs.replace(base, **fields)

    def _prepared(
        self,
        arguments: Any,
        params: SamplingParams,
        prompt: Sequence[int],
        tokenizer: Tokenizer | None,
    ) -> Any:
        context = PrepareContext(
            options=self.checked_options(),
            params=params,
            prompt_token_ids=list(prompt),
            stop_token_ids=list(self.stop_token_ids),
            vocab_size=self.vocab_size,
            tokenizer=tokenizer,
            reasoning=self.reasoning,
        )
        try:
            prepared = self.cls.prepare(arguments, context)
        except ValueError as error:
            self.rejections.append(str(error))
            raise RequestRejectedError(str(error)) from None
        except Exception as cause:
            raise Violation(
                f"prepare raised {type(cause).__name__}: {cause}, for {short_repr(arguments)}"
                f"{' without a tokenizer' if tokenizer is None else ''}",
                "let prepare reject a request by a ValueError; its message reaches the user",
            ) from cause
        if not isinstance(prepared, prepared_type(self.cls)):
            raise Violation(
                f"prepare returned {type(prepared).__name__}, for {short_repr(arguments)}",
                "return an instance of Prepared if the class has it, else of Arguments",
            )
        return typed.convert(prepared, prepared_type(self.cls), path=f"plugin_args.{self.name}")

    def cases(
        self,
        arguments: st.SearchStrategy[Any] | None,
        params: st.SearchStrategy[SamplingParams] | None = None,
        *,
        users_only: bool = False,
        sampled_only: bool = False,
    ) -> st.SearchStrategy[RequestCase]:
        """Return a strategy for requests.

        Args:
            arguments: a strategy for arguments; None draws empty ones.
            params: a strategy for the other parameters.
            users_only: leave out requests that do not use it.
            sampled_only: leave out greedy requests.
        """
        base = st.just(SamplingParams(max_tokens=None)) if params is None else params
        values = st.just({}) if arguments is None else arguments
        temperatures = st.just(_RANDOM) if sampled_only else st.sampled_from([_RANDOM, _GREEDY])
        uses = st.just(True) if users_only else st.sampled_from([True, True, False])
        prompts = drawn_tokens(self.vocab_size, min_size=1, max_size=8)
        outputs = drawn_tokens(self.vocab_size, max_size=0 if self.observes else 8)

        def make(
            uses: bool,
            values: Any,
            params: SamplingParams,
            temperature: float,
            prompt: list[int],
            outputs: list[int],
            tokenizers: list[Tokenizer | None],
        ) -> RequestCase:
            params = msgspec.structs.replace(params, temperature=temperature)
            case = None
            for tokenizer in tokenizers:
                with contextlib.suppress(RequestRejectedError):
                    requested = values if uses else None
                    case = self._meeting_case(requested, params, prompt, outputs, tokenizer)
                    break
            if case is None:
                reject()
            assume(not (sampled_only and case.params.greedy))
            return case

        tokenizers = st.sampled_from(self._tokenizers())
        return st.builds(make, uses, values, base, temperatures, prompts, outputs, tokenizers)

    def _tokenizers(self) -> list[list[Tokenizer | None]]:
        """Return the choices of tokenizers for `prepare`, tried in order until one is accepted.

        An engine need not have a tokenizer, so each processor has to take that, or refuse it.
        """
        if self.tokenizer is not None or self.default_tokenizer is None:
            return [[self.tokenizer]]
        return [[self.default_tokenizer], [None, self.default_tokenizer]]

    def _meeting_case(
        self,
        values: Any,
        params: SamplingParams,
        prompt: list[int],
        outputs: list[int],
        tokenizer: Tokenizer | None,
    ) -> RequestCase:
        """Return `case`, with the arguments' ids instead of negative numbers.

        It is made again if `prepare` returned other ids than the arguments have, such as ids of a
        text.
        """

        def make(ids: tuple[int, ...]) -> RequestCase:
            begun = [_meeting_token(number, ids) for number in prompt]
            generated = [_meeting_token(number, ids) for number in outputs]
            case = self.case(values, params, begun, generated, tokenizer)
            return replace(case, argument_ids=ids)

        ids = token_ids_in(values, self.vocab_size)
        case = make(ids)
        prepared_ids = token_ids_in(case.arguments, self.vocab_size)
        if set(prepared_ids) <= set(ids):
            return case
        return make((*prepared_ids, *(token for token in ids if token not in prepared_ids)))


def drawn_tokens(
    vocab_size: int, *, min_size: int = 0, max_size: int
) -> st.SearchStrategy[list[int]]:
    """Return a strategy for lists of token ids, in which small ones are frequent, as in arguments.

    Negative numbers stand for the ids in a request's arguments (`RequestCase.token`), and often
    follow each other: so prompt, outputs and arguments often have the same ids, in the same order,
    whatever an author draws for the latter.

    Args:
        vocab_size: ids are less.
        min_size: 0 or 1.
        max_size: the same of the list.
    """
    tokens = st.integers(-_MOST_IDS, 3) | st.integers(0, vocab_size - 1)
    runs = st.builds(
        lambda first, length: list(range(first, min(first + length, 0))),
        st.integers(-_MOST_IDS, -1),
        st.integers(2, _MOST_IN_A_RUN),
    )
    pieces = tokens.map(lambda token: [token]) | runs
    lists = st.lists(pieces, min_size=min_size, max_size=max_size)
    return lists.map(lambda drawn: [token for piece in drawn for token in piece][:max_size])


def _meeting_token(number: int, argument_ids: Sequence[int]) -> int:
    if number >= 0:
        return number
    return argument_ids[number % len(argument_ids)] if argument_ids else -number % 4


def token_ids_in(arguments: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the numbers in arguments that may be token ids, in their order, and not too many."""
    ids: list[int] = []
    pending = [msgspec.to_builtins(arguments, str_keys=False)]
    while pending and len(ids) < _MOST_IDS:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += reversed([*value, *value.values()])
        elif isinstance(value, list | tuple | set):
            pending += reversed([*value])
        elif type(value) is int and 0 <= value < vocab_size:
            ids.append(value)
    return tuple(ids)
