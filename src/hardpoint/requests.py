"""Arguments of calls of LLM and AsyncLLM, and LLM's requests until their outputs are taken."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import re
import textwrap
import typing as t
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import msgspec

from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.outputs.request_state import AnyOutput, rejection
from hardpoint.core.frontend.requests.input_processor import NO_EXTRAS, RequestExtras
from hardpoint.errors import EngineDeadError, EnginePausedError, shown
from hardpoint.host.boundary.errors import engine_dead
from hardpoint.host.system.engine_lock import EngineLock
from hardpoint.plugins import (
    EngineCoreRequest,
    HardpointError,
    LoRARequest,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.request_options import ChatOptions, RequestOptions
from hardpoint.typed import copied, is_list, suggest
from hardpoint.typed.describing import attribute_docs

__all__ = [
    "BatchOptions",
    "ChatBatchOptions",
    "OpenCalls",
    "check_generates",
    "conversation_list",
    "make_extras",
    "make_pooling_requests",
    "make_requests",
    "prompt_list",
    "takes_options",
    "unexpected_keyword",
    "with_output_kind",
    "with_place",
]

Call = TypeVar("Call", bound=Callable[..., Any])


class BatchOptions(TypedDict, total=False):
    """RequestOptions of several prompts: each is one for all, or a list of one per prompt."""

    priority: int | Sequence[int]
    timeout: float | Sequence[float | None] | None
    tags: Mapping[str, str] | Sequence[Mapping[str, str]] | None
    cache_salt: str | Sequence[str | None] | None
    kv_transfer_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
    trace_headers: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None
    truncate_prompt_tokens: int | Sequence[int | None] | None
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None
    session: str | Sequence[str | None] | None
    retain_seconds: float | Sequence[float | None] | None
    data_parallel_rank: int | Sequence[int | None] | None


class GenerateOptions(BatchOptions, total=False):
    """Options of a call that completes prompts.

    Attributes:
        use_tqdm: whether this call shows progress; None, the default, is `LLM(progress=...)`.
    """

    use_tqdm: bool | None


class ChatBatchOptions(ChatOptions, GenerateOptions, total=False):
    """ChatOptions of all conversations, and the options of their requests."""


class _Unstated:
    """A default that the signature leaves to the text below it."""

    def __repr__(self) -> str:
        return "..."


_UNSTATED = _Unstated()
_DOCS = (
    attribute_docs(ChatOptions) | attribute_docs(RequestOptions) | attribute_docs(GenerateOptions)
)


def unexpected_keyword(call: str, name: str, known: list[str], advice: str = "") -> TypeError:
    """Return the error of an unknown keyword argument of a call.

    Args:
        call: its name.
        advice: ends the message; "" is the nearest of the known names.
    """
    hint = advice or suggest(name, known)
    return TypeError(f"{call}() got an unexpected keyword argument {name!r}{hint}")


def takes_options(call: Call) -> Call:
    """Check the keywords of a call with `**options: Unpack[...]` as its last parameter.

    A wrong one is a TypeError of the call itself, also of one that returns an iterator. `help` and
    completions show each keyword as if the signature had it.
    """
    (options,) = t.get_args(t.get_type_hints(call)["options"])
    signature = inspect.signature(call)
    parameters = list(signature.parameters.values())[:-1]
    for name, type_ in options.__annotations__.items():
        parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_UNSTATED)
        parameters.append(parameter.replace(annotation=type_.__forward_arg__))
    known = [parameter.name for parameter in parameters[1:]]

    @functools.wraps(call)
    def checked(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in known:
                raise unexpected_keyword(call.__qualname__, name, known)
        return call(*args, **keywords)

    checked.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    if call.__doc__:
        lines = [_entry(name, _DOCS[name]) for name in options.__annotations__]
        checked.__doc__ = "\n".join([inspect.cleandoc(call.__doc__), "", "Options:", *lines])
    return t.cast(Call, checked)


def _entry(name: str, text: str) -> str:
    return textwrap.fill(f"{name}: {text}", 100, initial_indent=" " * 4, subsequent_indent=" " * 8)


_PROMPT = re.compile(r"prompt(_token_ids)?(?=[:\[])")
"""Of messages, the name of a prompt."""

_OF_PAIR = re.compile(r"text(_pair)?: ")
"""The same of a text of a pair."""

Request = tuple[Any, Any, RequestExtras]
"""Prompt, sampling parameters and extras."""

Place = Callable[[HardpointError, int], HardpointError]
"""Returns an error with the name of the prompt at an index of a call."""

Outputs = collections.deque[AnyOutput | Exception]
"""What has come for the requests of one call."""


def draws_progress(options: GenerateOptions, *, default: bool) -> bool:
    """Take `use_tqdm` out of the options of a call; return whether the call shows progress.

    Raises:
        RequestError: it is something else than a bool or None.
    """
    if not isinstance(use_tqdm := options.pop("use_tqdm", None), bool | None):
        raise RequestError(f"use_tqdm: expected true, false or None, got {shown(use_tqdm)}")
    return default if use_tqdm is None else use_tqdm


def prompt_list(prompts: Any) -> list[Any]:
    """Return prompts as a list, one prompt or many.

    Raises:
        RequestError: they are neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not is_list(prompts):
        raise RequestError(f"prompts: expected a prompt or a list, got {type(prompts).__name__}")
    listed: list[Any] = copied(prompts, "prompts")
    is_one = bool(listed) and all(isinstance(item, int) for item in listed)
    return [listed] if is_one else listed


def conversation_list(messages: Any) -> Sequence[Any]:
    """Return conversations as a list, one conversation or many.

    Raises:
        RequestError: they are neither.
    """
    if not is_list(messages):
        raise RequestError(
            "messages: expected a list of messages, or a list of such lists, got "
            f"a {type(messages).__name__}"
        )
    listed: list[Any] = copied(messages, "messages")
    is_one = not listed or isinstance(listed[0], Mapping)
    return [listed] if is_one else listed


def one_per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """Return an argument's value for each of `count` prompts: a list's own, or the same for all.

    Raises:
        RequestError: the list has another length.
    """
    if not is_list(value):
        return [value] * count
    listed: list[Any] = copied(value, name)
    if len(listed) != count:
        raise RequestError(f"{name}: expected one or {count}, one per prompt, got {len(listed)}")
    return listed


def make_extras(**fields: Any) -> RequestExtras:
    """Return a request's extras; fields that are None keep their defaults."""
    present = {name: value for name, value in fields.items() if value is not None}
    return RequestExtras(**present) if present else NO_EXTRAS


def make_requests(prompts: Sequence[Any], params: Any, **extras: Any) -> list[Request]:
    """Return prompts with their parameters and extras; outputs come at the end only.

    Args:
        params, extras: values for all prompts, or lists of one per prompt.

    Raises:
        RequestError: a list has another length.
    """
    count = len(prompts)
    all_params = one_per_prompt("sampling_params", params, count)
    columns = {name: one_per_prompt(name, value, count) for name, value in extras.items()}
    return [
        (
            prompt,
            with_output_kind(prompt_params, RequestOutputKind.FINAL_ONLY),
            make_extras(**{name: column[index] for name, column in columns.items()}),
        )
        for index, (prompt, prompt_params) in enumerate(zip(prompts, all_params, strict=True))
    ]


def make_pooling_requests(prompts: Sequence[Any], params: Any, **extras: Any) -> list[Request]:
    """Return prompts that are pooled, with their parameters and extras; as `make_requests`.

    Raises:
        RequestError: a list has another length, or parameters are no PoolingParams.
    """
    for item in one_per_prompt("pooling_params", params, len(prompts)):
        if not isinstance(item, PoolingParams):
            raise RequestError(f"pooling_params: expected PoolingParams, got {type(item).__name__}")
    return make_requests(prompts, params, **extras)


def check_generates(params: Any) -> None:
    """Check the parameters of a call that generates, or a list of them.

    Raises:
        RequestError: they are of a call that pools.
    """
    if isinstance(params, SamplingParams):
        return
    listed = copied(params, "sampling_params") if is_list(params) else [params]
    for item in listed:
        if isinstance(item, PoolingParams):
            raise RequestError(
                "sampling_params: expected SamplingParams, got PoolingParams, which encode takes"
            )


def with_place(error: HardpointError, name: str, *, has_params: bool = False) -> HardpointError:
    """Return an error about a prompt with its name in the call; any other as it is.

    Args:
        has_params: whether the prompt has parameters of its own, so that any error is about it.
    """
    if not isinstance(error, RequestError):
        return error
    message = str(error)
    if (match := _PROMPT.match(message)) is not None:
        return type(error)(name + message[match.end() :])
    if _OF_PAIR.match(message):
        return type(error)(f"{name}.{message}")
    return type(error)(f"{name}: {message}") if has_params else error


def with_output_kind(params: Any, kind: RequestOutputKind) -> Any:
    """Return a copy of sampling parameters with another kind of outputs."""
    if not isinstance(params, SamplingParams):
        return params  # the input processor refuses it with its own message
    return msgspec.structs.replace(params, output_kind=kind)


class OpenCalls:
    """The open calls of an LLM: of several threads, or a `generate` inside a loop over `stream`.

    Adds their requests to the engine, steps it, and keeps the outputs for the call that waits for
    them. Whichever thread holds the engine's lock steps for all, so the calls share a batch.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._count = 0
        self._outputs: dict[str, Outputs] = {}

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def lock(self) -> EngineLock:
        """The engine's lock."""
        return self._engine.lock

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of the engine, in seconds."""
        return self._engine.parts.clock

    def add(
        self,
        requests: Iterable[Request],
        outputs: Outputs | None = None,
        sent: Callable[[EngineCoreRequest], object] = lambda _: None,
        place: Place = lambda error, _: error,
    ) -> list[str]:
        """Add the prompts of a call with their parameters; if one is refused, none runs on.

        The engine has the first one before the last one is read.

        Args:
            outputs: outputs of the call, if it has added requests before.
            sent: gets each request as the engine got it.
            place: adds the name of a prompt, by its index, to an error.

        Returns:
            Their ids.

        Raises:
            RequestError: one is wrong.
        """
        ids: list[str] = []
        outputs = collections.deque() if outputs is None else outputs
        with self._engine.lock:
            try:
                for request in requests:
                    added = [(self._new_id(ids, outputs), *request)]
                    self._engine.add_requests(added, sent=sent)
            except BaseException as error:
                self.drop(ids)
                if not isinstance(error, RequestError):
                    raise
                raise place(error, len(ids) - 1) from error.__cause__
        return ids

    def add_at_once(self, requests: Iterable[Request], name: str) -> list[str]:
        """Add the prompts of a call in one message; if one is refused, none runs.

        Args:
            name: name of the list of prompts in messages, with the index of the refused one.

        Returns:
            Their ids.

        Raises:
            RequestError: one is wrong.
        """
        ids: list[str] = []
        outputs: Outputs = collections.deque()
        with self._engine.lock:
            try:
                added = [(self._new_id(ids, outputs), *request) for request in requests]
                self._engine.add_requests(added, name)
            except BaseException:
                self.drop(ids)
                raise
        return ids

    def _new_id(self, ids: list[str], outputs: Outputs) -> str:
        """Return the id of a request of a call, kept first, so that an interrupt leaves none."""
        request_id = str(self._count)
        self._count += 1
        ids.append(request_id)
        self._outputs[request_id] = outputs
        return request_id

    def drop(self, ids: Sequence[str], finished: Collection[str] = ()) -> None:
        """Abort requests but for `finished` ones, drop the outputs of all; in a fork do nothing."""
        if self._engine.lock.owner.is_other:
            return
        with self._engine.lock:
            if live := [request_id for request_id in ids if request_id not in finished]:
                self._engine.abort_requests(live)
            for request_id in ids:
                self._outputs.pop(request_id, None)

    def drop_soon(self, ids: Sequence[str]) -> None:
        """Drop requests, without waiting for a thread that uses the engine.

        They end before the next call of the engine. For iterators, which the garbage collector may
        collect at any moment, or close with a generator of the program that reads them.
        """

        def drop() -> None:
            with contextlib.suppress(Exception):  # no caller would get it
                self.drop(ids)

        self._engine.lock.call_soon(drop)

    def next_output_of(self, ids: Sequence[str]) -> Any:
        """Return the next output of a call, of any kind; raises as `next_output`."""
        return self.next_output(self._outputs[ids[0]])

    def outputs(
        self, ids: Sequence[str], place: Place = lambda error, _: error
    ) -> Iterator[RequestOutput]:
        """Yield outputs of a call's requests, stepping the engine when none is left; never ends.

        Args:
            place: as for `add`.

        Raises:
            EnginePausedError: none will come before the engine is resumed.
            EngineDeadError: the engine is dead.
            HardpointError: the engine rejected one of the requests, or an interrupt of another
                thread's call ended them.
        """
        waiting = self._outputs[ids[0]]
        while True:
            output = self.next_output(waiting)
            error = rejection(output)
            if error is not None and not isinstance(error, EngineDeadError):
                raise place(error, ids.index(output.request_id)) from error.__cause__
            yield output  # of an engine that died, with what it has: the others go on

    def next_output(self, waiting: Outputs) -> Any:
        """Return the next output of a call, stepping the engine while there is none.

        Raises:
            As `outputs`; but of a rejected request, its output is returned.
        """
        while not waiting:
            self.step(waiting)
        output = waiting.popleft()
        if isinstance(output, Exception):
            raise output
        return output

    def step(self, waiting: Outputs) -> None:
        """Step the engine once, unless another thread has done so for the outputs of a call.

        Raises:
            As `outputs`.
        """
        with self._engine.lock:
            if not waiting:
                self._step()

    def _step(self) -> None:
        """Step the engine; give each call its outputs, or the error that ended its requests."""
        try:
            outputs = self._engine.step()
        except EngineDeadError as error:
            self._fail_all(functools.partial(engine_dead, error))
            raise
        except Exception:
            raise
        except BaseException:  # it has ended all requests
            message = "the request was ended by an interrupt of another call"
            self._fail_all(functools.partial(HardpointError, message))
            raise
        for output in outputs:
            if (waiting := self._outputs.get(output.request_id)) is not None:
                waiting.append(output)
        if not outputs and self._engine.is_paused:
            raise EnginePausedError(
                "the engine is paused, so this would wait for ever; call engines.resume() first, "
                "or wake_up() if it sleeps"
            )

    def _fail_all(self, error: Callable[[], Exception]) -> None:
        for waiting in self._outputs.values():
            waiting.append(error())
