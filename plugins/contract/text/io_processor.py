"""IO processors: convert inputs of other kinds to prompts, and model outputs to results."""

from __future__ import annotations

import functools
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from hardpoint import typed
from hardpoint.errors import RequestError, shown
from hardpoint.plugins.component.base import Component, Context
from hardpoint.plugins.component.behaviour import LONG, Returned, UnusableError, returns, unusable
from hardpoint.plugins.config.model_files import ModelConfig
from hardpoint.plugins.requests.params import PoolingParams, Prompt, SamplingParams

from .tokenizer import Tokenizer

__all__ = ["IOProcessor", "IOProcessorContext"]


@dataclass(frozen=True, kw_only=True)
class IOProcessorContext(Context["IOProcessor"]):
    """Context of an IO processor.

    Attributes:
        model_config: configuration of the model.
        max_model_len: most tokens of a prompt; with `max_model_len = "auto"`, memory may allow
            less.
        tokenizer: loads a tokenizer for this processor alone, and returns it; the engine closes it.
    """

    model_config: ModelConfig
    max_model_len: int
    tokenizer: Callable[[], Tokenizer]


def _prompts(
    value: Any,
    args: Sequence[Any],  # noqa: ARG001
    originals: Sequence[Any],  # noqa: ARG001
    *,
    verb: str = "returned",
) -> list[Any]:
    expected = "expected a pair of a prompt and its PoolingParams or SamplingParams"
    if not isinstance(value, list | tuple):
        expected = "expected a list of pairs of a prompt and its parameters"
        raise UnusableError(f"{verb} {shown(value, LONG)}, {expected}")
    for place, pair in enumerate(value):
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[1], PoolingParams | SamplingParams)
        ):
            raise UnusableError(f"{verb} {shown(pair)} at [{place}], {expected}")
    return list(value)


def _plain(value: Any) -> Any:
    """Return an array, or a number of one, as plain data."""
    if callable(plain := getattr(value, "tolist", None)):
        return plain()
    raise NotImplementedError(f"a {type(value).__name__} is no plain data, struct or array")


def _as_json(value: Any, args: Sequence[Any], originals: Sequence[Any]) -> bytes:  # noqa: ARG001
    try:
        encoded = msgspec.json.encode(value, enc_hook=_plain)
        if b"null" in encoded:  # which numbers that JSON does not have become, too
            json.dumps(msgspec.to_builtins(value, enc_hook=_plain), allow_nan=False)
    except Exception as error:
        raise unusable(value, ", which is no JSON", LONG) from error
    return encoded


_PAIRS = "a list of pairs: a prompt, and `PoolingParams` or `SamplingParams`"
ANYTHING = Returned("anything", lambda value, *_: value)
PROMPTS = Returned(_PAIRS, _prompts)
ROUND = Returned(_PAIRS, functools.partial(_prompts, verb="yielded"))
"""Prompts that a generator of `post_process` yields."""
OUTPUT = Returned(f"anything; a generator yields {_PAIRS}, and returns anything", ANYTHING.check)
JSON = Returned("plain data, structs or arrays, of finite numbers", _as_json)


class IOProcessor(Component):
    """Converts an input of another kind to prompts, and their outputs to a result.

    A call is `parse_request`, `pre_process`, the requests to the engine, `post_process`, and for an
    answer over HTTP `output_to_response`. A `post_process` that is a generator has further rounds
    of requests. One thread at a time calls a processor, and none that others wait for. Calls
    overlap: keep the state of a call in its request or in the generator, not in the processor.

    An error of these methods ends the call and nothing else. Only a RequestError is the client's.

    Attributes:
        Request: type of the input, to which the default `parse_request` converts it. Its schema is
            in the OpenAPI document.
    """

    Request: ClassVar[type[msgspec.Struct] | None] = None

    context: IOProcessorContext

    def __init__(self, context: IOProcessorContext) -> None:
        """Store the context.

        Raises:
            TypeError: there is neither a `Request` nor a `parse_request`.
        """
        super().__init__(context)
        if self.Request is None and type(self).parse_request is IOProcessor.parse_request:
            raise TypeError("expected a class `Request` of the input, or a method parse_request")

    @returns(ANYTHING, raises=(RequestError,))
    def parse_request(self, data: Any) -> Any:
        """Check an input; return the processor's own request.

        Args:
            data: any object in a program; from HTTP, a JSON value. It must not be changed.

        Raises:
            RequestError: it is wrong; begins with the path of the mistake, such as `data.rows[3]`.
        """
        assert self.Request is not None
        return typed.convert(data, self.Request, path="data", error=RequestError, str_keys=True)

    @returns(PROMPTS, raises=(RequestError,))
    @abstractmethod
    def pre_process(self, request: Any) -> Sequence[tuple[Prompt, PoolingParams | SamplingParams]]:
        """Return the prompts of a request, each with its parameters; there may be none.

        A prompt is text, token ids or a mapping, as `LLM.generate` takes it. A prompt that the
        engine rejects ends the call with its error.

        Args:
            request: result of `parse_request`.

        Raises:
            RequestError: no prompts can be made of it; begins with the path of the mistake.
        """

    @returns(OUTPUT)
    @abstractmethod
    def post_process(self, request: Any, outputs: Sequence[Any]) -> Any:
        """Return the output of a request, made from the outputs of its prompts.

        A generator may yield the prompts of another round, as `pre_process` returns them: `yield`
        returns their outputs in order, and the value that the generator returns is the output. A
        call has at most `plugins.io_rounds` rounds and `plugins.io_prompts` prompts; its timeout is
        the time of all rounds. If a round fails or the caller leaves, the generator is closed.

        Args:
            request: result of `parse_request`.
            outputs: `PoolingRequestOutput` or `RequestOutput`, in the order of the prompts of the
                first round; each is finished. They must not be changed.
        """

    @returns(JSON)
    def output_to_response(self, output: Any) -> Any:
        """Return an output as it is sent over HTTP; by default as it is.

        Args:
            output: result of `post_process`.
        """
        return output
