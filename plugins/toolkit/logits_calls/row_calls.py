"""Calls of external code on the row of one request: once per position, with drafts or without."""

from __future__ import annotations

import copy
import inspect
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from hardpoint.errors import ConfigError
from hardpoint.plugins.sampling.logits import LogitsContext, LogitsProcessor
from hardpoint.plugins.sampling.rows import LogitsRequest, Rows
from hardpoint.typed import Arguments as BaseArguments

from .adapted import AdaptedProcessor, parameter_names, signature_text
from .tensor_checks import HandedOver

if TYPE_CHECKING:
    import torch


_TRANSFORMERS = ("LogitsProcessor", "LogitsProcessorList")


class CallSignature(Enum):
    """Arguments that an external callable takes."""

    TRANSFORMERS = "(input_ids [1, tokens], scores [1, vocab])"
    OUTPUT = "(output_ids, logits [vocab])"
    PROMPT_AND_OUTPUT = "(prompt_ids, output_ids, logits [vocab])"


_CALLS = {2: CallSignature.OUTPUT, 3: CallSignature.PROMPT_AND_OUTPUT}
"""Forms of callables, by the number of their parameters."""


@dataclass(eq=False)
class RequestProcessor:
    """The callable of one request.

    Attributes:
        prompt: its prompt token ids, with None in place of an embedding; None if there are no ids.
        call: None leaves the request's rows unchanged.
    """

    prompt: list[int | None] | None
    call: Callable[..., Any] | None = None
    form: CallSignature = CallSignature.TRANSFORMERS

    def copy(self) -> RequestProcessor:
        """Return one with a copy of the callable."""
        return RequestProcessor(self.prompt, copy.deepcopy(self.call), self.form)


class ResultCache:
    """The last result of each processor, and copies for the rows of draft tokens.

    Callables may count their calls. So each is called once per position, as without drafts: a step
    that runs a second time, to find the plugin responsible for an error, gets the result of before;
    the copy for the row of a draft token continues the copy of the row before; and the copy of the
    last accepted draft replaces the callable.
    """

    def __init__(self) -> None:
        """Create an empty cache; results are dropped with their processors."""
        self._last: weakref.WeakKeyDictionary[
            RequestProcessor, tuple[int, torch.Tensor, torch.Tensor]
        ]
        self._last = weakref.WeakKeyDictionary()
        self._copies: weakref.WeakKeyDictionary[
            RequestProcessor, dict[tuple[int, ...], RequestProcessor]
        ]
        self._copies = weakref.WeakKeyDictionary()

    def run_for(
        self, processor: RequestProcessor, request: LogitsRequest, row: torch.Tensor
    ) -> None:
        """Apply the callable of a row [vocab] in place.

        Args:
            processor: state of the request, also for the row of one of its draft tokens.
            request: request of the row.
            row: logits of the row.
        """
        drafts = tuple(drafts_of(request))
        if drafts:
            copies = self._copies.setdefault(processor, {})
            if drafts not in copies:
                copies[drafts] = copies.get(drafts[:-1], processor).copy()
            self.run(copies[drafts], request, row)
            return
        outputs, last = request.output_token_ids, self._last.get(processor)
        if last is not None and last[0] != len(outputs):
            accepted = self._copies.pop(processor, {}).get(tuple(outputs[last[0] : -1]))
            if accepted is not None:
                processor.call = accepted.call
        self.run(processor, request, row)

    def run(self, processor: RequestProcessor, request: LogitsRequest, row: torch.Tensor) -> None:
        """Apply a processor's callable to a row [vocab] in place."""
        position = len(request.output_token_ids)
        last = self._last.get(processor)
        if last is not None and last[0] == position and last[1].equal(row):
            row.copy_(last[2])
            return
        before = row.clone()
        outputs = request.output_token_ids
        result = _called(processor, outputs if isinstance(outputs, list) else list(outputs), row)
        if result.data_ptr() != row.data_ptr():
            row.copy_(result.view(-1))
        self._last[processor] = (position, before, row.clone())


class RowwiseProcessor(AdaptedProcessor, LogitsProcessor):
    """Base of the processors that call an external one row by row."""

    def __init__(self, context: LogitsContext) -> None:
        super().__init__(context)
        self._results = ResultCache()

    @abstractmethod
    def start(self, request: LogitsRequest) -> RequestProcessor:
        """Return the processor of a request."""

    def advance(self, state: RequestProcessor, token: int) -> RequestProcessor:  # noqa: ARG002
        """Return the state unchanged, for the token ids carry it."""
        return state  # defined because only states that advance are forked

    def fork(self, state: RequestProcessor) -> RequestProcessor:
        """Return the state unchanged: `apply` makes the copies for draft rows."""
        return state

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the logits [rows, vocab], edited in the rows that have a callable."""
        for row, request, processor in zip(logits, rows.requests, rows.states(), strict=True):
            if processor.call is not None:
                self._results.run_for(processor, request, row)
        return logits


class OwnObjects(RowwiseProcessor):
    """Base of the processors with an external object for each request, since some have state."""

    class Options(AdaptedProcessor.Options):
        """Options of a processor that each request has one of.

        Attributes:
            args: its constructor's arguments, by name.
        """

        args: dict[str, Any] = {}

    class Arguments(BaseArguments):
        """No arguments: a request that names the plugin uses it."""

    @classmethod
    def configured(cls, options: Any) -> type[AdaptedProcessor]:
        """Return the component, after checking that the class accepts the configured arguments."""
        target, path = cls.external.target, f"plugin.{cls.external.name}.args"
        if not inspect.isclass(target):
            if options.args:
                raise ConfigError(f"{path}: {cls.external.source.value} is built already")
        else:
            try:
                inspect.signature(target).bind(**options.args)
            except TypeError as cause:
                raise ConfigError(
                    f"{path}: they do not fit {signature_text(target)}: {cause}"
                ) from None
        return super().configured(options)

    def start(self, request: LogitsRequest) -> RequestProcessor:
        """Return the processor of a request."""
        target: Any = self.external.target
        built = inspect.isclass(target)
        call = target(**self.options.args) if built else copy.deepcopy(target)
        if not callable(call):
            maker = "its constructor made" if built else "its __deepcopy__ returned"
            raise TypeError(f"{maker} a {type(call).__name__}, expected a processor")
        return RequestProcessor(prompt_of(request), call, call_signature(call))


def is_transformers_form(target: Any) -> bool:
    """Return whether an object is a transformers processor, by its base class or its signature.

    The signature is `(input_ids, scores)` with `input_ids` annotated as a tensor. Without the
    annotation it could be a per-request callable, which gets lists.
    """
    cls = target if inspect.isclass(target) else type(target)
    for base in cls.__mro__:
        if base.__module__.startswith("transformers.") and base.__name__ in _TRANSFORMERS:
            return True
    if "__call__" not in {name for base in cls.__mro__[:-1] for name in vars(base)}:
        return False
    try:
        parameters = list(inspect.signature(cls.__call__).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    if [parameter.name for parameter in parameters] != ["input_ids", "scores"]:
        return False
    annotation = parameters[0].annotation
    return "Tensor" in (annotation if isinstance(annotation, str) else str(annotation))


def call_signature(call: Any) -> CallSignature:
    """Return the arguments that a callable takes.

    Raises:
        TypeError: it cannot be called, or its parameters are of no accepted form.
    """
    if is_transformers_form(call):
        return CallSignature.TRANSFORMERS
    wanted = "expected a callable with exactly two positional parameters (output_ids, logits) or "
    wanted += "three (prompt_ids, output_ids, logits)"
    if not callable(call):
        raise TypeError(f"{wanted}, or None, got {type(call).__name__}")
    try:
        names = parameter_names(call)
    except TypeError as cause:
        raise TypeError(f"{wanted}, got {cause}") from None
    if len(names) not in _CALLS:
        raise TypeError(f"{wanted}, got {signature_text(call)}")
    return _CALLS[len(names)]


def prompt_of(request: LogitsRequest) -> list[int | None] | None:
    """Return the prompt for callables; None for a prompt of embeddings alone."""
    ids: Sequence[int | None] = request.prompt_token_ids
    return None if ids and all(token is None for token in ids) else list(ids)


def with_ids(form: CallSignature, prompt: Sequence[int | None] | None) -> CallSignature:
    """Return the form of a callable that can be called after a prompt.

    Raises:
        ValueError: it gets a tensor of all ids, and there are embeddings instead of some.
    """
    if form is CallSignature.TRANSFORMERS and (prompt is None or None in prompt):
        raise ValueError(
            f"a callable {form.value} needs the ids of the whole prompt, which has embeddings"
        )
    return form


def _called(processor: RequestProcessor, outputs: list[int], row: torch.Tensor) -> torch.Tensor:
    """Return the checked result [vocab], or [1, vocab] in transformers' form."""
    import torch  # noqa: PLC0415 - the contract imports no torch until it is used

    from hardpoint.plugins.device import to_device  # noqa: PLC0415 - it imports torch

    assert processor.call is not None
    arguments: tuple[Any, ...] = (outputs,)
    logits = row
    if processor.form is CallSignature.TRANSFORMERS:
        assert processor.prompt is not None, "see with_ids"
        ids = to_device([*processor.prompt, *outputs], row.device, torch.int64)
        arguments, logits = (ids.unsqueeze(0),), row.unsqueeze(0)
    elif processor.form is CallSignature.PROMPT_AND_OUTPUT:
        arguments = (processor.prompt, outputs)
    handed_over = HandedOver(logits)
    result = processor.call(*arguments, logits)
    if not isinstance(result, torch.Tensor):
        raise TypeError(
            f"expected the logits back, also after an edit in place, got {type(result).__name__}"
        )
    return handed_over.result(result)


def drafts_of(request: LogitsRequest) -> Sequence[int]:
    """Return the draft tokens before the position of a row; none for a row without drafts."""
    if request.draft_of is None:
        return ()
    return request.output_token_ids[len(request.draft_of.output_token_ids) :]
