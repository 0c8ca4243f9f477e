"""The asynchronous engine: an engine process for programs that run an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from hardpoint.core.engine.utility_calls import EngineUtilities
from hardpoint.core.frontend.engine_parts import EngineParts
from hardpoint.core.frontend.frontend import METRICS_TIMEOUT_S
from hardpoint.core.frontend.outputs.request_state import rejection
from hardpoint.core.frontend.requests.input_processor import NO_EXTRAS, Params, RequestExtras
from hardpoint.core.frontend.requests.submission import Submission
from hardpoint.errors import EngineDeadError, PluginFaultError
from hardpoint.host.boundary.errors import RefusedInCallError, engine_dead
from hardpoint.host.live.change import Action
from hardpoint.host.live.driver import next_of
from hardpoint.host.live.settings import ChangeRequest
from hardpoint.plugins import (
    EngineCoreRequest,
    FinishReason,
    HardpointError,
    RequestError,
    SamplingParams,
    WaitReason,
)
from hardpoint.plugins.component.manifest import Manifest
from hardpoint.plugins.requests import Prompt
from hardpoint.plugins.requests.stats import Health
from hardpoint.plugins.server import InstalledExtension, ServerContext
from hardpoint.plugins.step_part.part import GivenPrompt
from hardpoint.typed import convert

from .client.event_loop import EventLoopBridge, SendQueue
from .output_collector import CallCollector, RequestOutputCollector
from .server_extensions import server_extensions
from .watched_engine import WatchedEngine

Opened = contextlib.AbstractContextManager[None]


class AsyncEngine(WatchedEngine):
    """Joins frontend and engine process in an event loop: the calls of AsyncLLM."""

    def __init__(self, parts: EngineParts, bridge: EventLoopBridge) -> None:
        super().__init__(parts, bridge)
        self._send_queue = SendQueue()
        self._request_ids = itertools.count()
        self._switch_lock = asyncio.Lock()

    async def generate(
        self,
        prompt: Prompt,
        params: Params | None = None,
        request_id: str | None = None,
        extras: RequestExtras = NO_EXTRAS,
        opened: Callable[[str, EngineCoreRequest], Opened] = lambda *_: contextlib.nullcontext(),
    ) -> AsyncGenerator[Any, None]:
        """Complete a prompt, or pool it; yield outputs as they come.

        Leaving the loop early, or cancelling the task, aborts the request. `opened` returns what is
        entered while the stream of a sent request is open, by its id.

        Raises:
            RequestError, OverloadedError: the request is wrong, or too many wait.
            EngineDeadError: the engine died; the request may be sent again.
        """
        collector = RequestOutputCollector()

        async def submit(read: Sequence[GivenPrompt | None], arrived: float) -> list[Submission]:
            nonlocal collector  # outputs of a first attempt do not belong to the second one
            collector = RequestOutputCollector()
            submission = self._frontend.submitter.submit(
                name, prompt, params, extras, sink=collector.put, given=read[0], arrived=arrived
            )
            collector.kind = submission.children[0].params.output_kind
            return [submission]

        await self._ready()
        name = self._named(request_id)
        submissions = await self._submit([prompt], submit)
        finished = False
        try:
            with opened(name, submissions[0].children[0]):
                while not finished:
                    output = await collector.get()
                    if (rejected := rejection(output)) is not None:
                        raise rejected
                    finished = output.finished
                    yield output
        finally:
            if not finished:
                self._forget(submissions)

    async def generate_all(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        request_id: str | None = None,
        extras: RequestExtras = NO_EXTRAS,
        named: Callable[[HardpointError, int], HardpointError] = lambda error, _: error,
    ) -> list[Any]:
        """Return the last output of each prompt; they are sent in one message.

        Cancelling the task aborts all.

        Args:
            named: returns the error of the call for that of the prompt with an index.

        Raises:
            RequestError, OverloadedError: one is wrong, or too many wait; none runs.
            EngineDeadError: the engine died; the prompts may be sent again.
        """
        collector = CallCollector(len(prompts))

        async def submit(read: Sequence[GivenPrompt | None], arrived: float) -> list[Submission]:
            nonlocal collector
            collector, submitter = CallCollector(len(prompts)), self._frontend.submitter
            submissions: list[Submission] = []
            try:
                for index, (prompt, given_prompt) in enumerate(zip(prompts, read, strict=True)):
                    await _let_others_run(index)
                    name, sink = names[index], collector.sink(index)
                    submissions.append(
                        submitter.submit(
                            name,
                            prompt,
                            params,
                            extras,
                            sink=sink,
                            given=given_prompt,
                            arrived=arrived,
                        )
                    )
            except BaseException as error:
                self._frontend.forget([submission.parent.internal_id for submission in submissions])
                if isinstance(error, HardpointError):
                    raise named(error, len(submissions)) from error
                raise
            return submissions

        await self._ready()
        names = [self._named(request_id) for _ in prompts]
        submissions = await self._submit(prompts, submit, named)
        try:
            return await collector.outputs()
        except RefusedInCallError as refused:
            raise named(refused.error, refused.index) from refused
        finally:
            self._forget(submissions)  # those that are live still

    def _named(self, request_id: str | None) -> str:
        return str(next(self._request_ids)) if request_id is None else request_id

    async def tokenise(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens; a long text is tokenised in another thread.

        Raises:
            RequestError: it cannot be encoded.
        """
        return await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def prompt_tokens(self, prompt: Prompt) -> list[int]:
        """Return the tokens that a prompt would have; read as `generate` reads it.

        Raises:
            RequestError: it is malformed.
        """
        given_prompt = await self._tokenizer.read(prompt)
        return [] if given_prompt is None else list(given_prompt.token_ids)

    def constrained_params(
        self, prompt: Prompt, params: SamplingParams, extras: RequestExtras
    ) -> SamplingParams:
        """Return the parameters of a request, with the grammar of its tool calls; it does not run.

        Raises:
            RequestError: the request would be rejected.
        """
        request, _, formats = self._frontend.input.process("", prompt, params, extras)
        if formats is not None:
            formats.close()
        return request.params

    def server_extensions(self, server: ServerContext) -> list[InstalledExtension]:
        """Call the hook; return the server extensions of plugins, in order of enabling.

        Raises:
            PluginFaultError, PluginContractError: a plugin failed, or returned something else.
        """
        return server_extensions(self.parts.hooks, server)

    async def abort(self, ids: str | Iterable[str]) -> None:
        """End requests, by the user's or internal ids; they yield their outputs so far, and end."""
        await self._ready()
        self._send_aborts(self._frontend.abort(ids))
        self._send_queue.wake_ended()

    async def _submit(
        self,
        prompts: Sequence[Prompt],
        submit: Callable[[list[GivenPrompt | None], float], Awaitable[list[Submission]]],
        named: Callable[[HardpointError, int], HardpointError] = lambda error, _: error,
    ) -> list[Submission]:
        """Check prompts and send them.

        Args:
            submit: checks and registers them.
            named: returns the error of the call for that of the prompt with an index.
        """
        arrived = self.parts.clock()
        read = []
        for index, prompt in enumerate(prompts):
            await _let_others_run(index)
            try:
                read.append(await self._tokenizer.read(prompt))
            except HardpointError as error:
                raise named(error, index) from error
        while self._switch_lock.locked():  # its arguments are for the policy that it will meet
            async with self._switch_lock:
                pass
        await self._ready()
        submissions = await submit(read, arrived)
        self._watch_deadlines()
        await self._send(submissions)
        return submissions

    async def _send(self, submissions: Sequence[Submission]) -> None:
        """Send the requests of a call in one message, unless all end before the engine takes it.

        Without success, the whole call ends.
        """
        requests = [child for submission in submissions for child in submission.children]
        ids = [request.request_id for request in requests]
        try:
            await self._send_queue.send(
                self._client.offer_requests(requests),
                functools.partial(self._have_ended, ids),
            )
        except asyncio.CancelledError:
            self._forget(submissions)
            raise
        except BaseException:
            self._forget(submissions, FinishReason.ERROR)
            raise
        # Those that ended while the others waited to be sent were aborted too early.
        self._send_aborts(
            [request_id for request_id in ids if not self._frontend.output.is_live(request_id)]
        )

    def _end_expired(self) -> None:
        super()._end_expired()
        self._send_queue.wake_ended()

    def _have_ended(self, request_ids: Sequence[str]) -> bool:
        return not any(map(self._frontend.output.is_live, request_ids))

    def _forget(
        self, submissions: Sequence[Submission], reason: FinishReason = FinishReason.ABORT
    ) -> None:
        ids = [submission.parent.internal_id for submission in submissions]
        self._send_aborts(self._frontend.forget(ids, reason))

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request without any, as the model's files recommend."""
        return self._frontend.input.default_params()

    async def health(self) -> Health:
        """Return the faults of plugins and the number of restarts.

        Raises:
            EngineDeadError: the engine is dead and is not restarted.
        """
        fallbacks = await EngineUtilities.step_faults.call_async(self.call_utility)
        slow = await EngineUtilities.slow_plugins.call_async(self.call_utility)
        return self._frontend.health(fallbacks, slow, self._client.num_restarts)

    async def metrics(self) -> str:
        """Return the exports of observers; nothing without any.

        Takes at most about a second: if the engine does not answer, its last report is used.
        """
        answer = None
        if not self._frontend.observers.has_exports:
            return ""
        if self.is_running:
            with contextlib.suppress(HardpointError, TimeoutError):
                async with asyncio.timeout(METRICS_TIMEOUT_S):
                    answer = await EngineUtilities.plugin_report.call_async(self.call_utility)
        try:
            return self._frontend.exposition(answer, self._client.num_restarts)
        except PluginFaultError as fault:  # of a component whose faults end the engine
            self._engine_died(fault, final=True)
            return ""

    async def why_waiting(self, request_id: str) -> dict[int, WaitReason | None]:
        """Return why the completions of a request got no tokens in the last step, by index.

        Raises:
            RequestError: no live request has that id.
        """
        await self._ready()
        live = self._frontend.children_of(request_id)
        reasons = await EngineUtilities.why_waiting.call_async(self.call_utility, list(live))
        return dict(zip(live.values(), reasons, strict=True))

    async def change(self, request: ChangeRequest) -> Manifest:
        """Change plugins or settings while requests run, as `LLMEngine.change` does.

        Cancelling the task does not end a change that has begun.
        """
        await self._ready()
        return await asyncio.shield(asyncio.ensure_future(self._run_change(request)))

    async def _run_change(self, request: ChangeRequest) -> Manifest:
        async with contextlib.AsyncExitStack() as stack:
            steps, change = stack.enter_context(self._changes.begin(request))
            answer: list[str] | BaseException | None = None
            while (action := next_of(steps, answer)) is not None:
                if action == "commit":  # no request is sent before the frontend has switched
                    await stack.enter_async_context(self._switch_lock)
                try:
                    if isinstance(action, float):
                        await asyncio.sleep(action)
                        continue
                    answer = await EngineUtilities.live_change.call_async(
                        self.call_utility, action, change if action == "prepare" else None
                    )
                except BaseException as error:  # the steps raise it again, once all is undone
                    answer = error
        return change.manifest

    async def follow_change(self, request: ChangeRequest) -> None:
        """Prepare a change that the owner of the engines runs; `finish_change` is to follow."""
        self._changes.follow(request)
        while not self._changes.is_prepared():
            await asyncio.sleep(_POLL_CHANGE_S)

    def finish_change(self, action: Action) -> None:
        """Commit, keep or undo such a change."""
        self._changes.finish(action)

    async def call_utility(self, method: str, *args: Any, rank: int | None = None) -> Any:
        """Call one of the engine's utilities, as `LLMEngine.call_utility` does.

        Raises:
            HardpointError: raised by the utility, or because it could not be called.
        """
        await self._ready(serving=True)
        method = convert(method, str, path="method", error=RequestError)
        future = asyncio.wrap_future(self._client.call(method, *args, rank=rank))
        try:
            done, _ = await asyncio.wait([future], timeout=self._client.utility_timeout(method))
        except asyncio.CancelledError:
            future.cancel()  # so that it is not sent, if it was not yet
            raise
        if not done:
            future.cancel()
            raise self._client.no_answer(method)
        try:
            return future.result()
        except EngineDeadError:
            if self._lifecycle.dead_error is None:
                raise
            reported = engine_dead(
                self._lifecycle.dead_error
            )  # the client was closed because of it
            raise reported from reported.__cause__


_POLL_CHANGE_S = 0.005
_AT_ONCE = 32  # prompts of a call that are read before other tasks of the event loop run


async def _let_others_run(index: int) -> None:
    if index % _AT_ONCE == _AT_ONCE - 1:
        await asyncio.sleep(0)
