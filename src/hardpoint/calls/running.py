"""The requests of LLM and AsyncLLM: prompts with images and adapters, run and collected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hardpoint.chat import Chat
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.core.frontend.outputs.request_state import AnyOutput, rejection
from hardpoint.core.frontend.requests.input_processor import Params, RequestExtras
from hardpoint.errors import (
    HardpointError,
    PluginFaultError,
    RequestEndedError,
)
from hardpoint.images import ImageThreads, PromptImages, has_unread_images
from hardpoint.plugins import RequestError, RequestOutput, RequestOutputKind, SamplingParams
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import PoolingRequestOutput, Prompt
from hardpoint.progress import draw_outputs
from hardpoint.requests import (
    OpenCalls,
    Request,
    check_generates,
    make_extras,
    make_pooling_requests,
    make_requests,
    prompt_list,
    with_output_kind,
    with_place,
)
from hardpoint.typed import is_list

from .adapters import AdapterGroup, AsyncAdapterGroup, with_adapters, with_adapters_async
from .forks import OpenRequests
from .io_processors import Prompts
from .streams import OutputStream, open_stream
from .unordered import UnorderedCall

if TYPE_CHECKING:
    from hardpoint.process.async_engine import AsyncEngine

__all__ = ["AsyncRequests", "SyncRequests"]


class SyncRequests:
    """Runs the requests of an LLM.

    Attributes:
        calls: the calls that wait for outputs.
        images: reads the images of prompts.
    """

    def __init__(self, engine: LLMEngine, adapters: AdapterGroup) -> None:
        """Run requests on an engine, with adapters that are loaded if necessary."""
        self._engine, self._adapters = engine, adapters
        self.calls = OpenCalls(engine)
        self.images = PromptImages(engine.parts, engine.check_open)

    def complete(
        self,
        prompts: Sequence[Any],
        params: Any,
        options: Mapping[str, Any],
        *,
        draws: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts; return their outputs in order.

        Args:
            params: parameters of all, or a list of one per prompt; None is the model's default.
            draws: whether progress is shown.
        """
        params = self._engine.default_sampling_params() if params is None else params
        check_generates(params)
        if self.images.tokens:  # of a model that takes images
            prompts = [self.images.prompt(prompt) for prompt in prompts]
        requests = make_requests(prompts, params, **self._with_adapters(options))

        def place(error: HardpointError, index: int) -> HardpointError:
            if len(requests) == 1:
                return error
            return with_place(error, f"prompts[{index}]", has_params=is_list(params))

        ids = self.calls.add(requests, place=place)
        results: dict[str, RequestOutput] = {}
        outputs = self.calls.outputs(ids, place)
        if draws:
            outputs = draw_outputs(outputs, len(ids))
        try:
            # The outputs of the engine never end, so the last one is known by counting.
            while len(results) < len(ids):
                output = next(outputs)
                results[output.request_id] = output
        finally:
            del outputs  # stops drawing
            self.calls.drop(ids, finished=results)
        return [results[request_id] for request_id in ids]

    def stream(
        self, prompt: Any, params: SamplingParams | None, options: Mapping[str, Any]
    ) -> OutputStream:
        """Complete a prompt; return its outputs as they come."""
        extras = make_extras(**with_adapters(self._adapters, options))
        params = self._engine.default_sampling_params() if params is None else params
        check_generates(params)
        if (
            isinstance(params, SamplingParams)
            and params.output_kind is RequestOutputKind.CUMULATIVE
        ):
            params = with_output_kind(params, RequestOutputKind.DELTA)
        return open_stream(self.calls, (self.images.prompt(prompt), params, extras))

    def unordered(
        self, requests: Iterable[tuple[Prompt, SamplingParams | None]]
    ) -> Iterator[tuple[int, RequestOutput | RequestError]]:
        """Complete any number of prompts; yield outputs, or errors, with their positions."""
        default = self._engine.default_sampling_params()

        def prepare(prompt: Prompt, params: SamplingParams | None) -> Request | RequestError:
            final_params = with_output_kind(params or default, RequestOutputKind.FINAL_ONLY)
            try:
                return self.images.prompt(prompt), final_params, RequestExtras()
            except RequestError as error:
                return error

        window = 2 * self._engine.parts.config.scheduler.max_num_seqs
        return UnorderedCall(self.calls, requests, prepare, window).outputs()

    def pool(
        self, prompts: Sequence[Any], params: Any, options: Mapping[str, Any]
    ) -> list[PoolingRequestOutput]:
        """Pool prompts; return their outputs in order.

        Raises:
            RequestError, PluginFaultError, HardpointError: with the prompt's index.
        """
        read = [
            self.images.prompt(prompt, f"prompts[{index}]: ")
            for index, prompt in enumerate(prompts)
        ]
        requests = make_pooling_requests(read, params, **with_adapters(self._adapters, options))
        return self._collect(requests, "prompts", lambda index: f"prompts[{index}]", _pooled)

    def whole(
        self,
        prompts: Prompts,
        options: Mapping[str, Any],
        name: str,
    ) -> list[AnyOutput]:
        """Run the prompts of an IO processor; return their whole outputs in order.

        Args:
            name: name of the list of prompts in messages.
        """
        extras = make_extras(**with_adapters(self._adapters, options))
        requests = [(prompt, _whole(params), extras) for prompt, params in prompts]
        return self._collect(requests, name, lambda index: f"{name}[{index}]", _with_result)

    def _collect(
        self,
        requests: Sequence[Request],
        name: str,
        place: Callable[[int], str],
        check: Callable[[Any, str], Any],
    ) -> list[Any]:
        """Run requests that are sent in one message; return their checked outputs in order."""
        if not requests:
            return []
        ids = self.calls.add_at_once(requests, name)
        try:
            places = {request_id: index for index, request_id in enumerate(ids)}
            results: dict[str, Any] = {}
            while len(results) < len(ids):
                output = self.calls.next_output_of(ids)
                request_id = output.request_id
                results[request_id] = check(output, place(places[request_id]))
        finally:
            self.calls.drop(ids)
        return [results[request_id] for request_id in ids]

    def rendered(self, messages: Any, chat: Chat) -> Mapping[str, Any]:
        """Return a conversation as a prompt, by the model's chat template."""
        engine = self._engine
        with _while_open(engine.check_open):
            return chat.rendered(engine.parts.tokenizer, messages, self.images, engine.lock)

    def encode_text(self, text: str, is_first: bool) -> list[int]:
        """Return the tokens of a part of a conversation."""
        with self._engine.lock:
            return self._engine.parts.tokenizer.encode(text, add_special_tokens=is_first)

    def _with_adapters(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options.get("lora_request") is None:
            return options
        return with_adapters(self._adapters, options)


class AsyncRequests:
    """Runs the requests of an AsyncLLM.

    Attributes:
        images: reads the images of prompts in threads.
        open: requests with open streams, which may be forked.
    """

    def __init__(self, engine: AsyncEngine, adapters: AsyncAdapterGroup) -> None:
        """Run requests on an engine, with adapters that are loaded if necessary."""
        self._engine, self._adapters = engine, adapters
        self.images = ImageThreads(engine.parts)
        self.open = OpenRequests(engine.parts.clock)

    def outputs(
        self,
        prompt: Prompt,
        params: Params | None,
        request_id: str | None,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[Any, None]:
        """Complete or pool a prompt; yield its outputs as they come."""
        if options.get("lora_request") is None:
            return self._outputs(prompt, params, request_id, make_extras(**options))
        return self._adapted(prompt, params, request_id, options)

    async def _adapted(
        self,
        prompt: Prompt,
        params: Params | None,
        request_id: str | None,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[Any, None]:
        """Yield the outputs of a request with an adapter, which is found, or loaded, first."""
        extras = make_extras(**await with_adapters_async(self._adapters, options))
        outputs = self._outputs(prompt, params, request_id, extras)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    def _outputs(
        self, prompt: Prompt, params: Params | None, request_id: str | None, extras: RequestExtras
    ) -> AsyncGenerator[Any, None]:
        if has_unread_images(prompt):
            return self._outputs_of_images(prompt, params, request_id, extras)
        opened = self.open.opener(params, extras)
        return self._engine.generate(prompt, params, request_id, extras, opened)

    async def _outputs_of_images(
        self, prompt: Prompt, params: Params | None, request_id: str | None, extras: RequestExtras
    ) -> AsyncGenerator[Any, None]:
        """Yield the outputs of a request with images, which are decoded first in a thread."""
        read = await self.images.prompt(prompt)
        opened = self.open.opener(params, extras)
        outputs = self._engine.generate(read, params, request_id, extras, opened)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    def fork(
        self, request_id: str, token_ids: Sequence[int]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Go on with other outputs in a copy of an open request; yield the outputs of the copy."""
        family = self.open.family(request_id)
        fork, extras = family.fork(token_ids)
        opened = self.open.opener(None, extras, family)
        prompt: Any = fork
        return self._engine.generate(prompt, None, request_id, extras, opened)

    async def pool(
        self,
        prompts: Any,
        params: PoolingParams,
        request_id: str | None,
        names: Sequence[str] | None,
        options: Mapping[str, Any],
    ) -> list[PoolingRequestOutput]:
        """Pool the prompts of one call in one message; return their outputs in order.

        Args:
            names: names of the prompts in errors; None is `prompts[0]` and so on.

        Raises:
            RequestError: a prompt is wrong, by its name; or the number of names is.
        """
        listed = prompt_list(prompts)
        if names is None:
            names = [f"prompts[{index}]" for index in range(len(listed))]
        elif len(names) != len(listed):
            raise RequestError(f"names: expected {len(listed)}, one per prompt, got {len(names)}")
        if not listed:
            return []

        def named(error: HardpointError, index: int) -> HardpointError:
            return with_place(error, names[index])

        extras = make_extras(**await with_adapters_async(self._adapters, options))
        return await self._engine.generate_all(listed, params, request_id, extras, named)

    async def whole(
        self, prompts: Prompts, options: Mapping[str, Any], name: str
    ) -> list[AnyOutput]:
        """Run the prompts of an IO processor; return their whole outputs in order.

        Args:
            name: name of the list of prompts in messages.
        """
        extras = make_extras(**await with_adapters_async(self._adapters, options))
        tasks = [
            asyncio.ensure_future(self._output(prompt, params, extras, f"{name}[{index}]"))
            for index, (prompt, params) in enumerate(prompts)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _output(
        self, prompt: Prompt, params: Params, extras: RequestExtras, where: str
    ) -> AnyOutput:
        outputs = self._engine.generate(prompt, _whole(params), None, extras)
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    if output.finished:
                        return _with_result(output, where)
        except RequestError as error:
            raise type(error)(f"{where}: {error}") from error
        raise AssertionError("a request ends with an output")

    async def rendered(self, messages: Any, chat: Chat) -> Mapping[str, Any]:
        """Return a conversation as a prompt, rendered by the model's chat template in a thread."""
        with _while_open(self._engine.check_open):
            return await self.images.rendered(chat.rendered, messages)

    async def encode_text(self, text: str, is_first: bool) -> list[int]:
        """Return the tokens of a part of a conversation."""
        return await self._engine.tokenise(text, add_special_tokens=is_first)


@contextlib.contextmanager
def _while_open(check_open: Callable[[], None]) -> Iterator[None]:
    """Let a plugin be called while the engine is open.

    The end of the engine closes its plugins: what they raise then is no fault.

    Args:
        check_open: raises the error of an engine that is closed or dead.
    """
    check_open()
    try:
        yield
    except PluginFaultError:
        check_open()
        raise


def _whole(params: Params) -> Params:
    """Return parameters of a request that has one output, at its end."""
    whole: Params = with_output_kind(params, RequestOutputKind.FINAL_ONLY)
    return whole


def _pooled(output: Any, where: str) -> PoolingRequestOutput:
    """Return the last output of a request that pools, if it has a result.

    Args:
        where: names the prompt in messages.
    """
    assert isinstance(output, PoolingRequestOutput), "the request pools"
    if (rejected := rejection(output)) is not None:
        raise type(rejected)(f"{where}: {rejected}")
    if output.finish_reason == "error":
        raise PluginFaultError(f"{where}: {output.error}")
    if output.finish_reason != "stop":
        raise HardpointError(f'{where}: it ended without a result, by "{output.finish_reason}"')
    return output


def _with_result(output: Any, where: str) -> AnyOutput:
    """Return the last output of a request, if it has a result.

    Args:
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
