"""The enabled IO processors: found by name, called by one thread at a time, faults counted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from hardpoint.core.frontend.engine_parts import Companion, Opening
from hardpoint.errors import EngineClosedError, PluginFaultError, shown
from hardpoint.host.boundary.activity import PluginCalls
from hardpoint.host.boundary.errors import close_all
from hardpoint.host.boundary.guard import UNWATCHED, guard
from hardpoint.host.boundary.plugin_health import PluginHealth
from hardpoint.host.system.engine_lock import OwnerProcess
from hardpoint.plugins import (
    IOProcessor,
    IOProcessorContext,
    RequestError,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import PoolingRequestOutput, Prompt, RequestOutput
from hardpoint.typed import json_schema, suggest

KIND = "io_processors"
_FIELD = "io_processor"
_CLOSING_SECONDS = 1.0  # a call that runs is waited for, one that hangs is not

T = TypeVar("T")


def guarded_processor(processor: IOProcessor, source: Source) -> IOProcessor:
    """Return an IO processor with faults that name it."""
    return guard(processor, KIND, calls=PluginCalls(UNWATCHED, KIND, source))


@dataclass(frozen=True)
class ProcessorCall:
    """A call of an IO processor with known prompts.

    Attributes:
        number: id of the call, for the counts of faults.
        prompts: prompts with their parameters.
    """

    number: str
    request: Any
    prompts: Sequence[tuple[Prompt, PoolingParams | SamplingParams]]


class OpenIOProcessor:
    """One IO processor; its calls wait for one another, and for no other processor's."""

    def __init__(self, processor: IOProcessor, tokenizers: Sequence[Tokenizer]) -> None:
        self.name = processor.name
        self._processor, self._tokenizers = processor, tokenizers
        self._lock, self._thread = threading.Lock(), ThreadPoolExecutor(1, f"{_FIELD}-{self.name}")
        self._numbers = itertools.count()
        self._health: PluginHealth | None = None
        self._is_closed = False

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its inputs; it allows anything if the processor declares no type."""
        declared = self._processor.Request
        return {} if declared is None else json_schema(declared)

    def place(self, prompt: int) -> str:
        """Return the name of a prompt in messages."""
        return f"{self.prompts}[{prompt}]"

    @property
    def prompts(self) -> str:
        """The name of its prompts in messages."""
        return f"data: the IO processor {self.name!r}: prompts"

    def report_to(self, health: PluginHealth) -> None:
        """Count its faults."""
        self._health = health

    def begin(self, data: Any) -> ProcessorCall:
        """Return a call for an input.

        Raises:
            RequestError: the input is wrong, or the processor is quarantined.
            PluginFaultError: it failed.
        """
        number = f"{_FIELD}-{next(self._numbers)}"
        if self._health is not None:
            self._health.check(self.name, _FIELD)

        def run() -> ProcessorCall:
            request = self._processor.parse_request(data)
            return ProcessorCall(number, request, self._processor.pre_process(request))

        return self._counted(number, run)

    def finish(
        self,
        call: ProcessorCall,
        outputs: Sequence[PoolingRequestOutput | RequestOutput],
        *,
        as_json: bool = False,
    ) -> Any:
        """Return the output of a call from the outputs of its prompts.

        Args:
            as_json: return the encoded body for HTTP.

        Raises:
            PluginFaultError: it failed.
        """

        def run() -> Any:
            output = self._processor.post_process(call.request, outputs)
            return self._processor.output_to_response(output) if as_json else output

        return self._counted(call.number, run)

    async def run(self, function: Callable[..., T], *args: Any, **more: Any) -> T:
        """Return the result of one of its methods, called in its thread."""
        try:
            running = self._thread.submit(function, *args, **more)
        except RuntimeError:
            raise EngineClosedError("the engine is closed") from None
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Close the processor, then its tokenizers; closing twice does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.shutdown(wait=False)
        waited = self._lock.acquire(timeout=_CLOSING_SECONDS)
        try:
            close_all([*self._tokenizers, self._processor])
        finally:
            if waited:
                self._lock.release()

    def _counted(self, number: str, function: Callable[[], T]) -> T:
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("the engine is closed")
            try:
                return function()
            except PluginFaultError as fault:
                if self._health is not None:
                    self._health.record(fault.plugin or self.name, number, str(fault))
                raise


class IOProcessors(Companion):
    """The enabled IO processors of a frontend."""

    def __init__(
        self, opened: Sequence[OpenIOProcessor] = (), hint: Callable[[str], str] | None = None
    ) -> None:
        """Own open processors; `hint` returns how to get one of a name."""
        self._by_name = {processor.name: processor for processor in opened}
        self._hint = hint
        self._owner = OwnerProcess()

    def find(self, name: str | None) -> OpenIOProcessor:
        """Return the processor of a name; None is the only one.

        Raises:
            RequestError: there is none of that name, or several without one.
        """
        self._owner.check()
        known = sorted(self._by_name)
        if name is None and len(known) == 1:
            name = known[0]
        if isinstance(name, str) and (processor := self._by_name.get(name)) is not None:
            return processor
        expected = "expected none, because no IO processor is enabled (plugins.enable)"
        if known:
            expected = f"expected one of {', '.join(known)}"
        elif name is None:
            raise RequestError(f"data: {expected}")
        message = f"{_FIELD}: {expected}, got {'none' if name is None else shown(name)}"
        if isinstance(name, str):
            message += suggest(name, known) + (self._hint(name) if self._hint is not None else "")
        raise RequestError(message)

    def schemas(self) -> dict[str, dict[str, Any]]:
        """Return the JSON schema of each processor's inputs, by name."""
        return {name: processor.schema for name, processor in self._by_name.items()}

    def report_to(self, health: PluginHealth) -> None:
        """Count the faults of the processors, and reject quarantined ones."""
        for processor in self._by_name.values():
            processor.report_to(health)

    def close(self) -> None:
        """Close all of them.

        Raises:
            PluginFaultError: one failed; all were closed.
        """
        _close(self._by_name.values())


def _close(processors: Iterable[OpenIOProcessor]) -> None:
    with contextlib.ExitStack() as stack:
        for processor in processors:
            stack.callback(processor.close)


def open_io_processors(opening: Opening) -> IOProcessors:
    """Build the enabled IO processors, for an engine that is opened.

    Raises:
        PluginError, ConfigError: one cannot be built; none is left open.
    """
    plugins, opened = opening.plugins, list[OpenIOProcessor]()
    fields = {"model_config": opening.model_config, "max_model_len": opening.max_model_len}
    try:
        for entry in plugins.entries(KIND):
            tokenizers: list[Tokenizer] = []

            def tokenizer(held: list[Tokenizer] = tokenizers) -> Tokenizer:
                held.append(opening.new_tokenizer())
                return held[-1]

            try:
                made = plugins.create(entry, IOProcessorContext, tokenizer=tokenizer, **fields)
            except BaseException:
                close_all(tokenizers)
                raise
            opened.append(OpenIOProcessor(guarded_processor(made, entry.source), tokenizers))
    except BaseException:
        _close(opened)
        raise
    return IOProcessors(opened, lambda name: plugins.hint(name, KIND))
