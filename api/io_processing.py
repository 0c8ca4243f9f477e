"""Calls of IO processors in LLM and AsyncLLM: other inputs, and other outputs of the model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Unpack

from hardpoint.core.frontend.async_engine import AsyncEngine
from hardpoint.core.frontend.io_processors import OpenIOProcessor, ProcessorCall
from hardpoint.core.frontend.outputs.request_state import AnyOutput, rejection
from hardpoint.core.frontend.requests.input_processor import RequestExtras
from hardpoint.core.frontend.requests.prompts import Params, Prompt
from hardpoint.errors import PluginFaultError, RequestEndedError
from hardpoint.plugins import RequestError, RequestOutputKind
from hardpoint.plugins.request_options import RequestOptions
from hardpoint.plugins.requests import PoolingRequestOutput

from .adapters import AsyncAdapterCalls, SyncAdapterCalls
from .open_model import OpenModel, PoolingCalls
from .requests import make_extras, takes_options, with_output_kind

__all__ = ["AsyncProcessorCalls", "ProcessorCalls"]


class ProcessorCalls(PoolingCalls, SyncAdapterCalls):
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
        """Return what an enabled IO processor makes of an input, by requests to the model.

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
        processor = self._engine.parts.io_processors.find(io_processor)
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
        ids = calls.add(requests, name=processor.prompts)
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


class AsyncProcessorCalls(OpenModel[AsyncEngine], AsyncAdapterCalls):
    """The calls of IO processors of a program that runs an event loop."""

    @takes_options
    async def process(
        self,
        data: Any,
        io_processor: str | None = None,
        *,
        as_json: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Return what an enabled IO processor makes of an input, by requests to the model.

        The processor is called in a thread of its own. Cancelling the task aborts its requests.

        Args:
            data, io_processor, as_json, options: as for `LLM.process`.

        Raises:
            As `LLM.process`.
            OverloadedError, EngineClosedError: as `generate`.
        """
        processor = self._engine.parts.io_processors.find(io_processor)
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
        return self._engine.parts.io_processors.schemas()


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
