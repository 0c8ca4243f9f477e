"""Processors that see one request's row: transformers' and per-request callables."""

from __future__ import annotations

import copy
import inspect
import weakref
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from hardpoint.plugins.errors import ConfigError, PluginContractError, RequestError
from hardpoint.plugins.logits import (
    LogitsContext,
    LogitsProcessor,
    LogitsRequest,
    Phase,
    PrepareContext,
    Rows,
)
from hardpoint.plugins.typed import Arguments as BaseArguments

from .base import Adapter, Foreign, ForeignArguments, ForeignParams, parameter_names, signature_text

if TYPE_CHECKING:
    import torch


_TRANSFORMERS = ("LogitsProcessor", "LogitsProcessorList")


class Form(Enum):
    """What a foreign callable is called with."""

    TRANSFORMERS = "(input_ids [1, tokens], scores [1, vocab])"
    OUTPUT = "(output_ids, logits [vocab])"
    PROMPT_AND_OUTPUT = "(prompt_ids, output_ids, logits [vocab])"


@dataclass(eq=False)
class Seat:
    """One request's own callable.

    Attributes:
        call: None leaves the request's rows as they are.
    """

    prompt: list[int]
    call: Callable[..., Any] | None = None
    form: Form = Form.TRANSFORMERS


class Answers:
    """The last answer of each seat's callable.

    A step may be run a second time, to find whose fault something was; objects that count their
    calls must not notice. So each is called once per position and its answer kept for that.
    """

    def __init__(self) -> None:
        """Start with none; those of seats that are gone go too."""
        self._last: weakref.WeakKeyDictionary[Seat, tuple[int, torch.Tensor, torch.Tensor]]
        self._last = weakref.WeakKeyDictionary()

    def run(self, seat: Seat, request: LogitsRequest, row: torch.Tensor) -> None:
        """Change a row [vocab] in place, as the seat's callable wants it."""
        position = len(request.output_token_ids)
        last = self._last.get(seat)
        if last is not None and last[0] == position and last[1].equal(row):
            row.copy_(last[2])
            return
        before = row.clone()
        outputs = request.output_token_ids
        result = _called(seat, outputs if isinstance(outputs, list) else list(outputs), row)
        if result.data_ptr() != row.data_ptr():
            row.copy_(result.view(-1))
        self._last[seat] = (position, before, row.clone())


class Rowwise(Adapter, LogitsProcessor):
    """Calls something foreign row by row."""

    def __init__(self, context: LogitsContext) -> None:
        """Start with no answers."""
        super().__init__(context)
        self._answers = Answers()

    @abstractmethod
    def start(self, request: LogitsRequest) -> Seat:
        """Return the request's own callable."""

    def advance(self, state: Seat, token: int) -> Seat:  # noqa: ARG002
        """Return the state: the ids tell how far it is. (Only what advances is forked.)"""
        return state

    def fork(self, state: Seat) -> Seat:
        """Return a copy for draft rows."""
        return Seat(state.prompt, copy.deepcopy(state.call), state.form)

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the logits [rows, vocab], edited in the rows that have a callable."""
        for row, request, seat in zip(logits, rows.requests, rows.states(), strict=True):
            if seat.call is not None:
                self._answers.run(seat, request, row)
        return logits


class TransformersProcessor(Rowwise):
    """Runs a processor in transformers' form; each request has an object of its own."""

    contract = 1
    phase = Phase.PENALTY
    adapter = "transformers LogitsProcessor"

    class Options(Adapter.Options):
        """Options of a processor in transformers' form.

        Attributes:
            args: its constructor's arguments, by name.
        """

        args: dict[str, Any] = {}

    class Arguments(BaseArguments):
        """None; naming the plugin is using it."""

    @classmethod
    def configured(cls, options: Any) -> type[Adapter]:
        """Return the component; the class must accept the arguments that it shall be built with."""
        target, path = cls.foreign.target, f"plugin.{cls.foreign.name}.args"
        if not inspect.isclass(target):
            if options.args:
                raise ConfigError(f"{path}: {cls.foreign.source.value} is built already")
        else:
            try:
                inspect.signature(target).bind(**options.args)
            except TypeError as cause:
                raise ConfigError(
                    f"{path}: they do not fit {signature_text(target)}: {cause}"
                ) from None
        return super().configured(options)

    def start(self, request: LogitsRequest) -> Seat:
        """Build the request's own object: some keep state between calls."""
        target: Any = self.foreign.target
        built = inspect.isclass(target)
        call = target(**self.options.args) if built else copy.deepcopy(target)
        return Seat(list(request.prompt_token_ids), call)


class PerRequestFactory(Rowwise):
    """Runs the callables that a factory `(params) -> callable | None` makes for each request."""

    contract = 1
    phase = Phase.BIAS
    adapter = "per-request callables"

    class Arguments(ForeignArguments):
        """What the factory reads of one request."""

    def start(self, request: LogitsRequest) -> Seat:
        """Ask the factory.

        Raises:
            TypeError: what it gave is in none of the accepted forms.
        """
        extra_args = request.arguments[self.name].extra_args
        params = ForeignParams(request.params, extra_args, request.stop_token_ids)
        call = self.foreign.target(params)
        prompt = list(request.prompt_token_ids)
        return Seat(prompt) if call is None else Seat(prompt, call, form_of(call))


class RequestCallables(LogitsProcessor):
    """Runs `SamplingParams.logits_processors` over the request's own row, in order.

    They travel as they are, so they work only where the engine runs in the caller's process.
    """

    contract = 1
    phase = Phase.BIAS
    params_fields = ("logits_processors",)

    class Arguments(BaseArguments):
        """None: the callables stay in the request's parameters."""

    def __init__(self, context: LogitsContext) -> None:
        """Start with no answers."""
        super().__init__(context)
        self._answers = Answers()

    @classmethod
    def prepare(cls, arguments: Any, context: PrepareContext) -> Any:
        """Check each callable's form.

        Raises:
            RequestError: it is none, or does not take two or three positional parameters.
        """
        for index, call in enumerate(context.params.logits_processors):
            try:
                form_of(call)
            except TypeError as cause:
                raise RequestError(f"logits_processors[{index}]: {cause}") from None
        return arguments

    def start(self, request: LogitsRequest) -> list[Seat]:
        """Give each callable its place; the ids tell them how far the request is."""
        prompt = list(request.prompt_token_ids)
        return [Seat(prompt, call, form_of(call)) for call in request.params.logits_processors]

    def advance(self, state: list[Seat], token: int) -> list[Seat]:  # noqa: ARG002
        """Return the state. (Only what advances is forked.)"""
        return state

    def fork(self, state: list[Seat]) -> list[Seat]:
        """Return fresh places: the callables are the caller's own and are not copied."""
        return [Seat(seat.prompt, seat.call, seat.form) for seat in state]

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the logits, edited row by row."""
        for row, request, seats in zip(logits, rows.requests, rows.states(), strict=True):
            for seat in seats:
                self._answers.run(seat, request, row)
        return logits


def adapt_factory(foreign: Foreign) -> type[Adapter]:
    """Return the component for a factory of per-request callables.

    Raises:
        PluginContractError: it does not take exactly one positional parameter.
    """
    target = foreign.target
    try:
        names = parameter_names(target)
        problem = "" if len(names) == 1 else signature_text(target)
    except TypeError as cause:
        problem = str(cause)
    if not problem:
        return PerRequestFactory.of(foreign)
    advice = "it seems to be such a callable itself, or a class of them: name a function that takes"
    raise PluginContractError(
        f"{foreign.source}: it derives from no interface of hardpoint.plugins; to make per-request "
        f"callables it must take exactly one positional parameter, (params), this is {problem}; "
        f"{advice} the parameters of a request and returns the callable for it, or None"
    )


def is_transformers_form(target: Any) -> bool:
    """Whether something derives from transformers' LogitsProcessor (or list), or is called so.

    Called so: with `input_ids` and `scores`, the first annotated as a tensor. Without the
    annotation it could as well be a per-request callable, which gets lists.
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


def form_of(call: Any) -> Form:
    """Return what a callable is to be called with.

    Raises:
        TypeError: it is none, or its parameters are of no accepted form.
    """
    if is_transformers_form(call):
        return Form.TRANSFORMERS
    wanted = "expected a callable with exactly two positional parameters (output_ids, logits) or "
    wanted += "three (prompt_ids, output_ids, logits)"
    if not callable(call):
        raise TypeError(f"{wanted}, or None, got {type(call).__name__}")
    try:
        names = parameter_names(call)
    except TypeError as cause:
        raise TypeError(f"{wanted}, got {cause}") from None
    forms = {2: Form.OUTPUT, 3: Form.PROMPT_AND_OUTPUT}
    if len(names) not in forms:
        raise TypeError(f"{wanted}, got {signature_text(call)}")
    return forms[len(names)]


def _called(seat: Seat, outputs: list[int], row: torch.Tensor) -> torch.Tensor:
    """Return the checked answer: of the row's shape, or [1, vocab] in transformers' form."""
    import torch  # noqa: PLC0415 - the contract imports no torch until it is used

    assert seat.call is not None
    given = row
    if seat.form is Form.TRANSFORMERS:
        ids = torch.tensor(seat.prompt + outputs, dtype=torch.int64, device=row.device)
        given = row.unsqueeze(0)
        result = seat.call(ids.unsqueeze(0), given)
    elif seat.form is Form.PROMPT_AND_OUTPUT:
        result = seat.call(seat.prompt, outputs, row)
    else:
        result = seat.call(outputs, row)
    if not isinstance(result, torch.Tensor):
        raise TypeError(
            f"expected the logits back, also after an edit in place, got {type(result).__name__}"
        )
    for what in ("shape", "dtype", "device"):
        wanted, got = getattr(given, what), getattr(result, what)
        if got != wanted:
            raise ValueError(f"expected logits of {what} {wanted}, got {got}")
    return result
