"""From a caller's prompt to registered requests of the engine."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint import typed
from hardpoint.core.frontend.deadlines import Deadlines
from hardpoint.core.frontend.engine_parts import EngineParts
from hardpoint.core.frontend.outputs.output_processor import OutputProcessor
from hardpoint.core.frontend.outputs.request_state import OutputSink, ParentRequest
from hardpoint.host.boundary.parts.bound_half import request_fields
from hardpoint.host.registry.discovery import is_third_party
from hardpoint.host.registry.plugin_set import PluginSet
from hardpoint.plugins import EngineCoreRequest, FinishReason, RequestError
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import Prompt
from hardpoint.plugins.requests.resumed import ResumedOutputs
from hardpoint.plugins.step_part.part import GivenPrompt

from .input_processor import NO_EXTRAS, OUTPUTS, InputProcessor, Params, RequestExtras
from .plugin_arguments import PluginArguments
from .validation import ParsedRequest, PrebuiltRequestValidator, RequestReceivedHook

_log = logging.getLogger("hardpoint")

_IN_ENGINE = "resumed.output_token_ids"
_AT_ONCE = math.ulp(0.0)
"""The timeout, in seconds, of a request whose time is up before it is sent."""


@dataclass(frozen=True)
class Submission:
    """A prompt that was checked and registered, and has not been sent to the engine."""

    parent: ParentRequest
    children: Sequence[EngineCoreRequest]


class Submitter:
    """Checks prompts and registers their requests; talks to no engine."""

    def __init__(
        self,
        parts: EngineParts,
        arguments: PluginArguments,
        processor: InputProcessor,
        output: OutputProcessor,
        deadlines: Deadlines,
    ) -> None:
        self._deadlines = deadlines
        self._clock, self._client = parts.clock, parts.client
        self._tasks = parts.supported_tasks
        self._arguments, self._input, self._output = arguments, processor, output
        used = request_fields(parts.plugins, parts.config)
        vocab_size = parts.model_config.vocab_size
        states = parts.plugins.keeping_states()
        self._prebuilt = PrebuiltRequestValidator(processor, vocab_size, used, states)
        self._received_hook: RequestReceivedHook | None = None
        if parts.hooks.has("request_received"):
            self._received_hook = RequestReceivedHook(parts.hooks, self._prebuilt, arguments)
        self._warned_policies: set[str] = set()
        self._policy_ignoring_priority = _policy_ignoring_priority(parts.plugins)
        self._generation = parts.plugins.manifest.generation
        self._random_ids = parts.config.engine.random_request_ids
        if not self._random_ids:
            _log.warning("engine.random_request_ids is off: two live requests cannot share an id")

    def use_plugins(self, plugins: PluginSet) -> None:
        """Take the arguments of requests for another generation of the plugins."""
        self._arguments.use(plugins)
        self._generation = plugins.manifest.generation
        self._prebuilt.use(plugins.keeping_states())
        name = _policy_ignoring_priority(plugins)
        self._policy_ignoring_priority = None if name in self._warned_policies else name

    def submit(
        self,
        request_id: str,
        prompt: Prompt | EngineCoreRequest,
        params: Params | None,
        extras: RequestExtras = NO_EXTRAS,
        *,
        sink: OutputSink | None = None,
        given: GivenPrompt | None = None,
        arrived: float | None = None,
    ) -> Submission:
        """Check a prompt and register its requests.

        Args:
            prompt: or a prebuilt request.
            sink: gets its outputs; without one, `process_outputs` returns them.
            given: the prompt as `InputProcessor.read` returned it, if it was read already.
            arrived: time of the call, on the clock of the parts; None is now.

        Raises:
            RequestError: something is wrong; nothing was registered.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id: expected a string, got {type(request_id).__name__}")
        typed.check_text(request_id, "request_id", RequestError)
        self._check_task(prompt.pooling_params if isinstance(prompt, EngineCoreRequest) else params)
        if extras is not NO_EXTRAS:
            extras = typed.convert(extras, RequestExtras, path="", error=RequestError)
        arrived = self._clock() if arrived is None else arrived
        if isinstance(prompt, EngineCoreRequest):
            request, text = self._prebuilt.validate(prompt, params, extras), None
            formats = self._arguments.complete(request, extras.tools, extras.calls)
            request.arrival_time = request.arrival_time or arrived
        else:
            request, text, formats = self._input.process(
                request_id,
                prompt,
                self._input.default_params() if params is None else params,
                extras,
                arrival_time=arrived,
                parsed=given,
            )
        held = [formats]
        try:
            self._check_rank(request.data_parallel_rank)
            if request.priority and self._policy_ignoring_priority is not None:
                self._warn_of_priority(self._policy_ignoring_priority)
            n = request.params.n if request.pooling_params is None else 1
            internal_id = self._internal_id(request_id, n)
            parent = ParentRequest(request_id, internal_id, n, sink)
            children = [(c, formats) for c in self._completions(parent, request, prompt)]
            if self._received_hook is not None:
                children = [self._received_hook(child, held) for child in children]
            self._register(children, extras.prompt_text or text, parent, arrived)
        finally:
            for formats in held:
                if formats is not None:
                    formats.close()
        return Submission(parent, [child for child, _ in children])

    def _check_rank(self, rank: int | None) -> None:
        if rank is not None and rank not in (ranks := self._client.ranks):
            raise RequestError(
                f"data_parallel_rank: expected none, or one of {', '.join(map(str, ranks))}, the "
                f"numbers of the engines (parallel.data), got {rank}"
            )

    def _completions(
        self, parent: ParentRequest, request: EngineCoreRequest, prompt: Prompt | EngineCoreRequest
    ) -> list[EngineCoreRequest]:
        request.generation, request.is_admitted = self._generation, False
        children = parent.children(request)
        if not isinstance(prompt, EngineCoreRequest):
            outputs = self._input.outputs_of(prompt)
            children = _with_outputs(children, outputs, self._prebuilt.check_resumed)
            parent.n = len(children)
        return children

    def _warn_of_priority(self, policy: str) -> None:
        _log.warning(
            'priority: the scheduling policy "%s" ignores it; scheduler.policy = "priority" '
            "orders by it",
            policy,
        )
        self._warned_policies.add(policy)
        self._policy_ignoring_priority = None

    def _register(
        self,
        children: Sequence[ParsedRequest],
        text: str | None,
        parent: ParentRequest,
        arrived: float,
    ) -> None:
        # Clocks of two processes do not compare, so the engine gets the time that is left.
        spent = self._clock() - arrived
        registered: list[str] = []
        for child, _ in children:
            if child.members or self._input.parts.opening:
                child.members = self._input.parts.members(child, self._input.read)
        try:
            for child, formats in children:
                if child.timeout is not None:
                    child.timeout = max(child.timeout - spent, _AT_ONCE)
                # A time to come would give negative latencies.
                since = child.arrival_time if child.arrival_time <= arrived else arrived
                self._output.add_request(child, text, parent, since, formats)
                registered.append(child.request_id)
                if child.timeout is not None:
                    self._deadlines.add(child.request_id, child.timeout)
        except BaseException:
            self._output.drop(registered, FinishReason.ERROR)
            raise

    def _check_task(self, params: Params | None) -> None:
        task = params.task if isinstance(params, PoolingParams) else "generate"
        if task not in self._tasks:
            raise RequestError(
                f"{task}: this model cannot do it; it can: {', '.join(self._tasks) or 'nothing'}"
            )

    def _internal_id(self, request_id: str, n: int) -> str:
        """Return an id that no live request has."""
        if self._random_ids:
            internal = request_id
            while internal == request_id or self._output.is_live(internal):
                internal = f"{request_id}-{secrets.token_hex(4)}"
            return internal
        children = (f"{index}_{request_id}" for index in range(n if n > 1 else 0))
        if any(map(self._output.is_live, (request_id, *children))):
            raise RequestError(
                f"request_id: {request_id!r} is the id of a live request, or of a completion of one"
            )
        return request_id


def _with_outputs(
    children: list[EngineCoreRequest],
    values: Any,
    check: Callable[[EngineCoreRequest], None],
) -> list[EngineCoreRequest]:
    """Return the completions of a prompt to resume, each with its outputs.

    Args:
        children: one request per completion.
        values: token ids of the output of each so far, None for one that has ended; None for a
            prompt without any.
        check: raises a RequestError for a request that cannot go on.
    """
    if values is None:
        return children
    outputs: list[list[int] | None] = typed.convert(
        values, list[list[int] | None], path=OUTPUTS, error=RequestError
    )
    if len(outputs) != len(children):
        raise RequestError(
            f"{OUTPUTS}: expected a list of token ids, or none, for each of n ({len(children)}) "
            f"completions, got {len(outputs)}"
        )
    going_on = []
    for child, token_ids in zip(children, outputs, strict=True):
        if token_ids is None:
            continue
        child.resumed = ResumedOutputs(token_ids)
        try:
            check(child)
        except RequestError as error:
            path = f"{OUTPUTS}[{child.child_index}]"
            raise RequestError(str(error).replace(_IN_ENGINE, path)) from error
        going_on.append(child)
    if not going_on:
        raise RequestError(f"{OUTPUTS}: expected a list of token ids of a completion, got none")
    return going_on


def _policy_ignoring_priority(plugins: PluginSet) -> str | None:
    if is_third_party(plugins.one("schedulers")):  # which may look at them itself
        return None
    entry = plugins.one("scheduling_policies")
    return None if vars(plugins.target(entry)).get("uses_priority", True) else entry.name
