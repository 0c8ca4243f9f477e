"""vLLM's IO processors as IO processors of Hardpoint."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from hardpoint import typed
from hardpoint.errors import PluginContractError, RequestError
from hardpoint.plugins import IOProcessor as NativeProcessor
from hardpoint.plugins import IOProcessorContext
from hardpoint.plugins.component import AdaptedComponent, Source

from .objects import NamedFields
from .origin import is_overridden, vllm_base
from .protocol import IOProcessorRequest
from .tokenizers import TokenizerLike

IOProcessorInput = TypeVar("IOProcessorInput")
IOProcessorOutput = TypeVar("IOProcessorOutput")
BASE = "IOProcessor"

_PARSERS = ("parse_data", "parse_request")
_PARAMS = ("merge_pooling_params", "validate_or_generate_params")
_CLIENT_ERRORS = (ValueError, TypeError, KeyError)


class IOProcessor(ABC, Generic[IOProcessorInput, IOProcessorOutput]):
    """vLLM's base class of IO processors."""

    def __init__(self, vllm_config: Any, renderer: Any = None) -> None:  # noqa: ARG002 - as vLLM's
        """Keep the configuration."""
        self.vllm_config = vllm_config

    def merge_pooling_params(self, params: Any = None) -> Any:
        """Return the parameters, by default the component's options."""
        return params

    @abstractmethod
    def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        """Return a prompt, or several."""

    async def pre_process_async(
        self, prompt: Any, request_id: str | None = None, **kwargs: Any
    ) -> Any:
        """Return the result of `pre_process`."""
        return self.pre_process(prompt, request_id, **kwargs)

    @abstractmethod
    def post_process(
        self, model_output: Sequence[Any], request_id: str | None = None, **kwargs: Any
    ) -> Any:
        """Return the output."""

    async def post_process_async(
        self,
        model_output: AsyncGenerator[tuple[int, Any]],
        request_id: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the result of `post_process`."""
        pairs = sorted([pair async for pair in model_output], key=lambda pair: pair[0])
        return self.post_process([output for _, output in pairs], request_id, **kwargs)


class IOProcessorOptions(typed.Options):
    """Options of an adapted IO processor.

    Attributes:
        as_request: whether the parsing method gets vLLM's `IOProcessorRequest` with the input in
            `data`, as vLLM's server passes it; otherwise it gets the input, as of `LLM.encode`.
        task: task of the model for parameters without one, or with vLLM's task "plugin".
        pooler: name of the pooler for parameters without one; None is the model's.
    """

    as_request: bool = False
    task: Literal["embed", "token_embed", "classify", "score"] = "embed"
    pooler: str | None = None


def is_processor(target: Any) -> bool:
    """Return whether a class derives from vLLM's base class of IO processors."""
    return vllm_base(target, (BASE,)) == BASE


def adapt_processor(target: type, source: Source) -> type[AdaptedIOProcessor]:
    """Return the component of a class for which `is_processor` is true.

    Raises:
        PluginContractError: the class lacks a method.
    """
    if unfinished := sorted(getattr(target, "__abstractmethods__", ())):
        raise PluginContractError(f"{source}: it lacks {', '.join(unfinished)}")
    if not any(is_overridden(target, name) for name in _PARSERS):
        raise PluginContractError(f"{source}: it lacks parse_data(data)")
    attributes = {"contract": 1, "target": target, "__doc__": inspect.getdoc(target)}
    return type(target.__name__, (AdaptedIOProcessor,), {**attributes, "__module__": __name__})


@dataclass(frozen=True)
class _Call:
    """A call of the processor: an id, and the result of the class's own parsing method."""

    request_id: str
    prompt: Any


class AdaptedIOProcessor(AdaptedComponent, NativeProcessor):
    """Runs an IO processor of vLLM.

    A coroutine method that the class overrides replaces its plain method, as in vLLM's server. All
    coroutines run in one event loop of the component, in a thread of its own.
    """

    contract = 1
    adapter = "vLLM IO processor"
    target: ClassVar[type]

    class Options(IOProcessorOptions):
        """Options of every adapted IO processor."""

    def __init__(self, context: IOProcessorContext) -> None:
        """Build the class, so that a failure stops the start."""
        super().__init__(context)
        config = context.model_config
        own_tokenizer = context.tokenizer()
        folder = str(own_tokenizer.context.files.path)
        tokenizer = TokenizerLike(own_tokenizer, "")
        hf_config = NamedFields("hf_config", **config.hf)
        model = NamedFields(
            "model_config",
            model=folder,
            tokenizer=folder,
            max_model_len=context.max_model_len,
            hf_config=hf_config,
            hf_text_config=hf_config,
            architectures=[config.architecture],
            get_vocab_size=lambda: config.vocab_size,
        )
        arguments: list[Any] = [NamedFields("vllm_config", model_config=model)]
        if _takes(self.target, 2):
            renderer = {"tokenizer": tokenizer, "get_tokenizer": lambda: tokenizer}
            arguments.append(NamedFields("renderer", **renderer))
        self.processor = self.target(*arguments)
        self._loop: _LoopThread | None = None

    def parse_request(self, data: Any) -> _Call:
        """Return the call of an input that the class accepts."""
        name = next(name for name in _PARSERS if is_overridden(self.target, name))
        argument = IOProcessorRequest(data=data) if self.options.as_request else data
        prompt = _checked(lambda: getattr(self.processor, name)(argument))
        return _Call(f"io-{uuid.uuid4().hex}", prompt)

    def pre_process(self, request: _Call) -> Sequence[tuple[Any, Any]]:
        """Return the class's prompts, each with its parameters for pooling."""
        prompt, request_id = request.prompt, request.request_id
        if is_overridden(self.target, "pre_process_async"):
            call = self.processor.pre_process_async
            prompts = _checked(lambda: self._wait(call(prompt, request_id=request_id)))
        else:
            call = self.processor.pre_process
            prompts = _checked(lambda: call(prompt, request_id=request_id))
        params = self._pooling_params()
        is_single = _program_module("inputs").is_one(prompts)
        return [(_plain_prompt(p), params) for p in ([prompts] if is_single else prompts)]

    def post_process(self, request: _Call, outputs: Sequence[Any]) -> Any:
        """Return the class's output, made of the model's tensors."""
        results = [_program_module("outputs").pooled(output, "") for output in outputs]
        if is_overridden(self.target, "post_process_async"):
            call = self.processor.post_process_async
            return self._wait(call(_numbered(results), request_id=request.request_id))
        return self.processor.post_process(results, request_id=request.request_id)

    def output_to_response(self, output: Any) -> Any:
        """Return an output as plain data: the class's response, or the fields of its model."""
        if is_overridden(self.target, "output_to_response"):
            response = self.processor.output_to_response(output)
            output = getattr(response, "data", response)
        dump = getattr(output, "model_dump", None)
        return dump() if callable(dump) else output

    def close(self) -> None:
        """End the event loop and its thread."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def _pooling_params(self) -> Any:
        params_type = _program_module("params").PoolingParams
        name = next((name for name in _PARAMS if is_overridden(self.target, name)), None)
        params = None if name is None else getattr(self.processor, name)(None)
        params = params_type() if params is None else params
        if not isinstance(params, params_type):
            raise TypeError(
                f"{name}: expected PoolingParams, got {type(params).__name__}; IO processors run "
                f"with pooling models"
            )
        params = params.clone()
        params.pooler = params.pooler or self.options.pooler
        return params.native(self.options.task if params.task in (None, "plugin") else None)

    def _wait(self, coroutine: Any) -> Any:
        if self._loop is None:
            self._loop = _LoopThread(f"io processor {self.name}")
        return self._loop.run(coroutine)


class _LoopThread:
    """An event loop in a thread of its own, so that a caller may have a loop, too."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._runner = asyncio.Runner()

    def run(self, coroutine: Any) -> Any:
        """Return the result of a coroutine."""
        return self._thread.submit(self._runner.run, coroutine).result()

    def close(self) -> None:
        """End the loop and its thread."""
        self._thread.submit(self._runner.close)
        self._thread.shutdown()


def _program_module(name: str) -> Any:
    """Return a module of `hardpoint.vllm`, which imports this package."""
    return importlib.import_module(f"hardpoint.vllm.{name}")


def _takes(call: Any, count: int) -> bool:
    try:
        inspect.signature(call).bind(*range(count))
    except TypeError:
        return False
    return True


def _checked(call: Callable[[], Any]) -> Any:
    """Return the result of a call that reads an input; its errors for wrong values are clients'.

    Raises:
        RequestError: it raised an error that vLLM's server returns with status 400.
    """
    try:
        return call()
    except RequestError:
        raise
    except _CLIENT_ERRORS as cause:
        raise RequestError(f"data: {type(cause).__name__}: {cause}") from cause


def _plain_prompt(prompt: Any) -> Any:
    native, salt = _program_module("inputs").native_prompt(prompt)
    if salt is not None:
        raise RequestError("cache_salt: expected none in a prompt of an IO processor")
    return dict(native) if isinstance(native, Mapping) else native


async def _numbered(outputs: Sequence[Any]) -> AsyncGenerator[tuple[int, Any]]:
    for pair in enumerate(outputs):
        yield pair


NAMES = {
    "IOProcessor": IOProcessor,
    "IOProcessorInput": IOProcessorInput,
    "IOProcessorOutput": IOProcessorOutput,
}
MODULES: Mapping[str, Mapping[str, Any]] = {
    "vllm.plugins": {},
    "vllm.plugins.io_processors": {"IOProcessor": IOProcessor},
    "vllm.plugins.io_processors.interface": NAMES,
    "vllm.renderers": {"BaseRenderer": NamedFields},
    "vllm.renderers.base": {"BaseRenderer": NamedFields},
}
"""Names by module, where vLLM is not installed."""
