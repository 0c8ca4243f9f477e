"""The base classes of LLM and AsyncLLM: what describes an open model; pooling, IO processors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

import msgspec
import numpy as np

from hardpoint.core.engine.utility_calls import AsyncControlCalls, SyncControlCalls
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.outputs.request_state import AnyOutput, rejection
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.core.frontend.requests.prompts import Params, Prompt
from hardpoint.errors import PluginFaultError, RequestEndedError, shown
from hardpoint.plugins import (
    EngineConfig,
    HardpointError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.request_options import RequestOptions
from hardpoint.plugins.requests import PoolingRequestOutput
from hardpoint.plugins.server.settings import LiveSettings
from hardpoint.typed import copied, is_list

from .calls.adapter_resolvers import AdapterResolvers
from .calls.adapters import AsyncAdapterCalls, SyncAdapterCalls
from .calls.io_processors import IOProcessors, OpenIOProcessor, ProcessorCall, open_io_processors
from .conversations.states import OpenConversations
from .images import PromptImages
from .requests import (
    BatchOptions,
    OpenCalls,
    make_extras,
    make_pooling_requests,
    prompt_list,
    takes_options,
    with_output_kind,
    with_place,
)

if TYPE_CHECKING:
    from hardpoint.process.async_engine import AsyncEngine

__all__ = ["COMPANIONS", "AsyncProcessorCalls", "OpenModel", "PoolingCalls", "ProcessorCalls"]

Engine = TypeVar("Engine", LLMEngine, "AsyncEngine")

COMPANIONS = (AdapterResolvers, open_io_processors)
"""Open the plugins of calls, with an engine."""


class OpenModel(Generic[Engine]):
    """A model with an engine that runs it; base of LLM and AsyncLLM."""

    _engine: Engine
    _conversations: OpenConversations

    def _begin(self, engine: Engine) -> None:
        """Own an engine, and its conversations."""
        self._engine = engine
        parts = engine.parts
        length = parts.config.max_model_len
        assert isinstance(length, int)
        self._conversations = OpenConversations(parts.config.conversations, length, parts.clock)

    @property
    def config(self) -> EngineConfig:
        """The configuration, with the values that the engine chose filled in."""
        return self._engine.parts.config

    @property
    def manifest(self) -> Manifest:
        """The enabled plugins."""
        return self._engine.parts.plugins.manifest

    def settings(self) -> LiveSettings:
        """Return the settings, with the origin of each, and the generation of the plugins.

        Options may be secrets, which the admin address hides and this does not.
        """
        return self._engine.parts.settings.shown()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.parts.tokenizer

    @functools.cached_property
    def _images(self) -> PromptImages:
        """Reads the images of prompts."""
        return PromptImages(self._engine.parts)

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images."""
        return bool(self._images.tokens)

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The model's tasks, such as "generate", as the engine reported them at start."""
        return self._engine.parts.supported_tasks

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a prompt without any: those that the model's files recommend."""
        return self._engine.default_sampling_params()


class PoolingCalls(OpenModel[LLMEngine], SyncControlCalls, SyncAdapterCalls):
    """The calls of a program that waits for vectors and scores."""

    _calls: OpenCalls

    @takes_options
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[PoolingRequestOutput]:
        """Return the results of prompts by `PoolingParams.task`, by default vectors.

        All prompts share running batches. No token is generated, so that a prompt may be as long as
        the model's context.

        Args:
            prompts: as for `generate`; at least one.
            pooling_params: one for all, or one per prompt.
            options: `RequestOptions`, each one for all, or a list of one per prompt.

        Returns:
            One output per prompt, in the order asked: `outputs` is a float32 array [dimensions],
            or of the task "token_embed" [tokens, dimensions].

        Raises:
            RequestError: a prompt or its parameters are wrong, or the model cannot do the task; the
                message has the prompt's index. None of them runs.
            PluginFaultError: a pooler failed.
            EnginePausedError, EngineDeadError: as `generate`.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        listed = prompt_list(prompts)
        if not listed:
            return []
        listed = [
            self._images.prompt(prompt, f"prompts[{index}]: ")
            for index, prompt in enumerate(listed)
        ]
        calls = self._calls
        requests = make_pooling_requests(listed, params, **self._with_adapters(options))
        ids = calls.add_at_once(requests, "prompts")
        try:
            places = {request_id: index for index, request_id in enumerate(ids)}
            found: dict[str, PoolingRequestOutput] = {}
            while len(found) < len(ids):
                output = calls.next_output_of(ids)
                place = places[output.request_id]
                found[output.request_id] = pooled(output, f"prompts[{place}]")
        finally:
            calls.drop(ids)
        return [found[request_id] for request_id in ids]

    @takes_options
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        prompt_name: str | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[PoolingRequestOutput]:
        """Return a vector for each prompt: `encode` with the task "embed".

        Args:
            prompts, pooling_params: as for `encode`.
            prompt_name: name of the model's text that is put before texts, such as "query"; None is
                the default one of the model's folder, mostly none.
            options: `RequestOptions`.

        Raises:
            RequestError: the model has no prompt of that name; or as `encode`.
        """
        params = with_task("embed", pooling_params)
        return self.encode(self._prefixed(prompts, prompt_name), params, **options)

    def _prefixed(self, prompts: Any, name: str | None) -> list[Any]:
        """Return prompts with the model's text before those that are texts."""
        listed = prompt_list(prompts)
        if not {"embed", "score"}.intersection(self.supported_tasks):
            return listed  # which is the error of the call itself
        prefix = self.call_part("pooling", "prompt", {"name": name})
        return [prefix + one if prefix and isinstance(one, str) else one for one in listed]

    @takes_options
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[PoolingRequestOutput]:
        """Return the probability of each class for each prompt: `encode` with "classify".

        A prompt may be a pair of texts, `{"text": text, "text_pair": text}`.

        Raises:
            As `encode`.
        """
        return self.encode(prompts, with_task("classify", pooling_params), **options)

    @takes_options
    def score(
        self,
        texts_1: Prompt | Sequence[Prompt],
        texts_2: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[PoolingRequestOutput]:
        """Return how well texts match: by a model with one class, which reads them in pairs, what
        its head gives; by other models the cosine of their vectors.

        Args:
            texts_1: one text, which is compared with each of `texts_2`, or as many as these.
            texts_2: one text or several.
            pooling_params: parameters of all texts, of the task "score" or "embed".
            options: `RequestOptions`.

        Returns:
            One output per text of `texts_2`: `outputs` is a number.

        Raises:
            RequestError: the numbers of texts do not fit; or as `encode`.
        """
        is_paired = "embed" not in self.supported_tasks
        first = self._prefixed(texts_1, None)
        second = prompt_list(texts_2) if is_paired else self._prefixed(texts_2, None)
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"texts_1: expected one text or {len(second)}, as texts_2 has, got {len(first)}"
            )
        if is_paired:
            params = with_task("score", pooling_params)
            outputs = self.encode(text_pairs(first, second), params, **options)
            return [msgspec.structs.replace(one, outputs=float(one.outputs)) for one in outputs]
        params = with_task("embed", pooling_params)
        outputs = self.encode([*first, *second], params, **options)
        return list(similarity(outputs[: len(first)], outputs[len(first) :]))


def with_task(task: Any, params: Any) -> Any:
    """Return parameters of a call that has one task.

    Raises:
        RequestError: they have another one.
    """
    if params is None:
        return PoolingParams(task=task)
    for one in copied(params, "pooling_params") if is_list(params) else [params]:
        if isinstance(one, PoolingParams) and one.task != task:
            raise RequestError(
                f'pooling_params.task: expected "{task}" in this call, got {shown(one.task)}'
            )
    return params


def pooled(output: Any, where: str) -> PoolingRequestOutput:
    """Return an output that has a result.

    Args:
        output: last output of a request that pools.
        where: names the prompt in messages.

    Raises:
        HardpointError: it has none.
    """
    assert isinstance(output, PoolingRequestOutput), "the request pools"
    if (rejected := rejection(output)) is not None:
        raise type(rejected)(f"{where}: {rejected}")
    if output.finish_reason == "error":
        raise PluginFaultError(f"{where}: {output.error}")
    if output.finish_reason != "stop":
        raise HardpointError(f'{where}: it ended without a result, by "{output.finish_reason}"')
    return output


def text_pairs(first: Sequence[Any], second: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the prompts of texts in pairs; of one text with all others, if there is one."""
    return [
        {"text": first[index % len(first)], "text_pair": other}
        for index, other in enumerate(second)
    ]


def similarity(
    first: Sequence[PoolingRequestOutput], second: Sequence[PoolingRequestOutput]
) -> Iterator[PoolingRequestOutput]:
    """Yield the cosine of each pair of vectors; of one vector with all, if there is one."""
    for index, output in enumerate(second):
        a = np.asarray(first[index % len(first)].outputs, np.float64)
        b = np.asarray(output.outputs, np.float64)
        lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
        yield msgspec.structs.replace(output, outputs=float(a @ b) / max(lengths, 1e-24))


class ProcessorCalls(PoolingCalls):
    """The calls of IO processors of a program that waits for them."""

    @takes_options
    def process(
        self,
        data: Any,
        io_processor: str | None = None,
        *,
        as_json: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Return the output of an IO processor for an input, by requests to the model.

        Args:
            data: the input, which the processor checks; any object that it takes.
            io_processor: its name; None is the only one that is enabled.
            as_json: return what it sends over HTTP, as bytes.
            options: `RequestOptions`, of each request to the model.

        Raises:
            RequestError: the input is wrong, no such processor is enabled, or the engine refuses
                one of its prompts.
            PluginFaultError: the processor failed, or another plugin.
            RequestEndedError: a request to the model ended without a result.
            EnginePausedError, EngineDeadError: as `generate`.
        """
        processor = self._engine.parts.companion(IOProcessors).find(io_processor)
        call = processor.begin(data)
        extras = make_extras(**self._with_adapters(options))
        return processor.finish(call, self._outputs(processor, call, extras), as_json=as_json)

    def _outputs(
        self, processor: OpenIOProcessor, call: ProcessorCall, extras: RequestExtras
    ) -> list[AnyOutput]:
        """Return the outputs of the prompts of a call, in their order."""
        if not call.prompts:
            return []
        calls = self._calls
        requests = [(prompt, _whole(params), extras) for prompt, params in call.prompts]
        ids = calls.add_at_once(requests, processor.prompts)
        try:
            places = {request_id: place for place, request_id in enumerate(ids)}
            found: dict[str, AnyOutput] = {}
            while len(found) < len(ids):
                output = calls.next_output_of(ids)
                where = processor.place(places[output.request_id])
                found[output.request_id] = _with_result(output, where)
        finally:
            calls.drop(ids)
        return [found[request_id] for request_id in ids]


class AsyncProcessorCalls(OpenModel["AsyncEngine"], AsyncControlCalls, AsyncAdapterCalls):
    """The calls of a program that runs an event loop that pool, and those of IO processors."""

    @takes_options
    async def encode_batch(
        self,
        prompts: Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        names: Sequence[str] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[PoolingRequestOutput]:
        """Pool the prompts of one call, which travel to the engine in one message.

        Cancelling the task ends all.

        Args:
            prompts: as `LLM.encode` takes them.
            pooling_params: parameters of all.
            request_id: id of all; None numbers them.
            names: what errors call the prompts; by default `prompts[0]` and so on.
            options: `RequestOptions` of all.

        Returns:
            Their outputs, in order. One that a fault of a pooler, a timeout or `abort` ended has no
            `outputs`; its `finish_reason` gives the reason.

        Raises:
            RequestError: one is wrong, by its name, or the model cannot do the task; none runs.
            OverloadedError, EngineDeadError, EngineClosedError: as `generate`.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(params, PoolingParams):
            raise RequestError(
                f"pooling_params: expected PoolingParams, got {type(params).__name__}"
            )
        listed = prompt_list(prompts)
        if names is None:
            names = [f"prompts[{index}]" for index in range(len(listed))]
        elif len(names) != len(listed):
            raise RequestError(f"names: expected {len(listed)}, one per prompt, got {len(names)}")
        if not listed:
            return []

        def named(error: HardpointError, index: int) -> HardpointError:
            return with_place(error, names[index])

        extras = make_extras(**await self._with_adapters(options))
        return await self._engine.generate_all(listed, params, request_id, extras, named)

    @takes_options
    async def process(
        self,
        data: Any,
        io_processor: str | None = None,
        *,
        as_json: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Return the output of an IO processor for an input, by requests to the model.

        The processor is called in a thread of its own. Cancelling the task aborts its requests.

        Args:
            data, io_processor, as_json, options: as for `LLM.process`.

        Raises:
            As `LLM.process`.
            OverloadedError, EngineClosedError: as `generate`.
        """
        processor = self._engine.parts.companion(IOProcessors).find(io_processor)
        call = await processor.run(processor.begin, data)
        extras = make_extras(**await self._with_adapters(options))
        tasks = [
            asyncio.ensure_future(self._output(prompt, params, extras, processor.place(place)))
            for place, (prompt, params) in enumerate(call.prompts)
        ]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return await processor.run(processor.finish, call, outputs, as_json=as_json)

    async def _output(
        self, prompt: Prompt, params: Params, extras: RequestExtras, where: str
    ) -> AnyOutput:
        """Return the output of one prompt, which `where` names in messages."""
        outputs = self._engine.generate(prompt, _whole(params), None, extras)
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    if output.finished:
                        return _with_result(output, where)
        except RequestError as error:
            raise type(error)(f"{where}: {error}") from error
        raise AssertionError("a request ends with an output")

    def io_processor_schemas(self) -> dict[str, dict[str, Any]]:
        """Return the JSON schema of the inputs of each enabled IO processor, by name."""
        return self._engine.parts.companion(IOProcessors).schemas()


def _whole(params: Params) -> Params:
    """Return parameters of a request that has one output, at its end."""
    whole: Params = with_output_kind(params, RequestOutputKind.FINAL_ONLY)
    return whole


def _with_result(output: Any, where: str) -> AnyOutput:
    """Return an output that has a result.

    Args:
        output: last output of a request.
        where: names the prompt in messages.

    Raises:
        HardpointError: it has none.
    """
    if (rejected := rejection(output)) is not None:
        raise type(rejected)(f"{where}: {rejected}")
    parts: Sequence[Any] = [output]
    if not isinstance(output, PoolingRequestOutput):
        parts = output.outputs
    for part in parts:
        if part.finish_reason == "error":
            raise PluginFaultError(f"{where}: {part.error}")
        if part.finish_reason in ("abort", "timeout"):
            ended = RequestEndedError(f'{where}: it ended by "{part.finish_reason}"')
            ended.finish_reason = part.finish_reason
            raise ended
    return output  # type: ignore[no-any-return]
