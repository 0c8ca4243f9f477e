"""The enabled IO processors: found by name, called by one thread at a time, faults counted."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import math
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from hardpoint.core.frontend.engine_parts import Companion, Opening
from hardpoint.core.frontend.outputs.request_state import AnyOutput
from hardpoint.errors import EngineClosedError, PluginFaultError, shown
from hardpoint.host.boundary.activity import PluginCalls
from hardpoint.host.boundary.errors import close_all
from hardpoint.host.boundary.guard import UNWATCHED, boundary_of, guard
from hardpoint.host.boundary.plugin_health import PluginHealth
from hardpoint.host.registry.blame import logged_after
from hardpoint.host.system.engine_lock import OwnerProcess
from hardpoint.plugins import (
    IOProcessor,
    IOProcessorContext,
    RequestError,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.component import Source
from hardpoint.plugins.component.behaviour import Behaviour, UnusableError
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import Prompt
from hardpoint.plugins.text.io_processor import ROUND
from hardpoint.typed import json_schema, suggest

KIND = "io_processors"
_FIELD = "io_processor"
_CLOSING_SECONDS = 1.0  # a call that runs is waited for, one that hangs is not

_NAMED = Behaviour(None, None)

Prompts = Sequence[tuple[Prompt, PoolingParams | SamplingParams]]
"""Prompts with their parameters."""

T = TypeVar("T")


def guarded_processor(processor: IOProcessor, source: Source) -> IOProcessor:
    """Return an IO processor with faults that name it."""
    return guard(processor, KIND, calls=PluginCalls(UNWATCHED, KIND, source))


@dataclass(frozen=True, kw_only=True)
class RoundLimits:
    """The limits of one call of an IO processor.

    Attributes:
        rounds: maximum number of rounds.
        prompts: maximum number of prompts in all rounds.
        clock: seconds.
    """

    rounds: int
    prompts: int
    clock: Callable[[], float]


class ProcessorCall:
    """A call of an IO processor, round by round.

    Attributes:
        number: id of the call, for the counts of faults.
        request: result of `parse_request`.
        prompts: prompts of the present round with their parameters; None after the last round.
        output: output of the call, after the last round.
        generator: yields further prompts; None if there is none, or none any more.
    """

    def __init__(self, number: str, limits: RoundLimits) -> None:
        self.number, self._limits, self._began = number, limits, limits.clock()
        self.request: Any = None
        self.prompts: Prompts | None = None
        self.output: Any = None
        self.generator: Generator[Any, Any, Any] | None = None
        self._num_rounds = self._num_prompts = 0

    def begin_round(self, prompts: Prompts) -> None:
        """Use the prompts of the next round.

        Raises:
            RequestError: there are too many prompts.
        """
        self._num_rounds += 1
        self._num_prompts += len(prompts)
        if self._num_prompts > self._limits.prompts:
            raise RequestError(
                f"data: expected at most {self._limits.prompts} prompts in all rounds "
                f"(plugins.io_prompts), got {self._num_prompts}"
            )
        self.prompts = prompts

    def next_round(
        self, generator: Generator[Any, Any, Any], outputs: Sequence[AnyOutput] | None
    ) -> Prompts | None:
        """Return the prompts that a generator yields; None if it has returned the output.

        Args:
            outputs: outputs of the last round; None starts the generator.

        Raises:
            UnusableError: it yields something else, or after too many rounds.
        """
        try:
            prompts = generator.send(outputs)
        except StopIteration as end:
            self.end(end.value)
            return None
        if self._num_rounds == (limit := self._limits.rounds):
            raise UnusableError(
                f"yielded prompts after {limit} rounds, expected its output (plugins.io_rounds)"
            )
        checked: Prompts = ROUND.check(prompts, (), ())
        return checked

    def end(self, output: Any) -> None:
        """Store the output of the call; no round follows."""
        self.prompts = self.generator = None
        self.output = output

    @property
    def place(self) -> str:
        """The name of the prompts of the present round in messages."""
        return "prompts" if self._num_rounds == 1 else f"round {self._num_rounds}: prompts"

    def options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of the requests of a round: their timeout is the time that is left."""
        timeout = options.get("timeout")
        if self._num_rounds == 1 or not isinstance(timeout, int | float):
            return options
        left = timeout - (self._limits.clock() - self._began)
        return {**options, "timeout": max(left, math.ulp(0.0))}


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

    def prompts_of(self, call: ProcessorCall) -> str:
        """Return the name of the prompts of the present round of a call in messages."""
        return f"data: the IO processor {self.name!r}: {call.place}"

    def report_to(self, health: PluginHealth) -> None:
        """Count its faults."""
        self._health = health

    def begin(self, data: Any, limits: RoundLimits) -> ProcessorCall:
        """Return a call for an input, in its first round.

        Raises:
            RequestError: the input is wrong, or the processor is quarantined.
            PluginFaultError: it failed.
        """
        call = ProcessorCall(f"{_FIELD}-{next(self._numbers)}", limits)
        if self._health is not None:
            self._health.check(self.name, _FIELD)

        def run() -> None:
            call.request = self._processor.parse_request(data)
            call.begin_round(self._processor.pre_process(call.request))

        self._counted(call.number, run)
        return call

    def advance(
        self,
        call: ProcessorCall,
        outputs: Sequence[AnyOutput],
        *,
        as_json: bool = False,
    ) -> None:
        """Begin the next round of a call, or end the call, by the outputs of a round.

        Args:
            as_json: the output of the call is the encoded body for HTTP.

        Raises:
            RequestError: there are too many prompts.
            PluginFaultError: the processor failed.
        """

        def run() -> None:
            if (generator := call.generator) is not None:
                self._advance(call, generator, outputs)
            elif inspect.isgenerator(output := self._processor.post_process(call.request, outputs)):
                call.generator = output
                self._advance(call, output, None)
            else:
                call.end(output)
            if call.prompts is None and as_json:
                call.output = self._processor.output_to_response(call.output)

        self._counted(call.number, run)

    def drop(self, call: ProcessorCall) -> None:
        """Close the generator of a call that does not go on; count and log a fault of it."""
        if (generator := call.generator) is not None:
            call.generator = None
            with contextlib.suppress(EngineClosedError), logged_after("its call has ended"):
                self._counted(call.number, lambda: self._guarded(generator.close))

    def drop_later(self, call: ProcessorCall) -> None:
        """Do as `drop` does, in the thread of the processor."""
        if call.prompts is not None:
            with contextlib.suppress(RuntimeError):  # the engine is closed
                self._thread.submit(self.drop, call)

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

    def _advance(
        self,
        call: ProcessorCall,
        generator: Generator[Any, Any, Any],
        outputs: Sequence[AnyOutput] | None,
    ) -> None:
        prompts = self._guarded(lambda: call.next_round(generator, outputs))
        if prompts is not None:
            call.begin_round(prompts)

    def _guarded(self, function: Callable[[], T]) -> T:
        """Return the result of a function of a generator; its faults name the processor."""
        named = boundary_of(self._processor).named("post_process", _NAMED, function)
        result: T = named()
        return result

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
