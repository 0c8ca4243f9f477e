"""An engine process for programs that run an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hardpoint.core.client.event_loop import Item, Relay, Turns
from hardpoint.core.client.process_client import ProcessClient
from hardpoint.core.client.sockets import dead
from hardpoint.core.engine.utility_calls import EngineUtilities
from hardpoint.core.errors import blamed, error_of
from hardpoint.plugins import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    HardpointError,
    RequestOutput,
    SamplingParams,
    WaitReason,
)
from hardpoint.plugins.errors import EngineClosedError, EngineDeadError
from hardpoint.plugins.manifest import Manifest

from .frontend import EngineParts, Frontend, Submission
from .input_processor import NO_EXTRAS, RequestExtras
from .output_collector import RequestOutputCollector
from .plugin_health import Health
from .prompts import Prompt
from .restart import Restarter

_LONG_TEXT = 2000
_NEWS_S, _GLANCE_S = 20.0, 0.01


class AsyncEngine:
    """Joins frontend and engine process in an event loop.

    Everything but the constructor and `close` is for one loop: that of the first use.
    """

    def __init__(self, parts: EngineParts, relay: Relay, restarter: Restarter) -> None:
        """Take over the parts; `close` closes them.

        Args:
            parts: with a ProcessClient.
            relay: what that client tells of its outputs.
            restarter: decides whether a dead engine is started anew, and does it.
        """
        self.parts = parts
        self._relay = relay
        self._restarter = restarter
        self._frontend = Frontend(parts)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = Turns()
        self._serials = itertools.count()
        self._tokenisers: ThreadPoolExecutor | None = None
        self._tokenising: set[Future[list[int]]] = set()
        self._restart: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._closed = False
        self._dead: EngineDeadError | None = None
        self._closing: threading.Thread | None = None

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        extras: RequestExtras = NO_EXTRAS,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt; yield outputs as they come.

        Leaving the loop early, or cancelling the task, aborts the request.

        Raises:
            RequestError, OverloadedError: it is wrong, or too many wait.
            EngineDeadError: the engine died; the request may be sent again.
        """
        submission, collector = await self._submit(prompt, params, request_id, extras)
        finished = False
        try:
            while not finished:
                output = await collector.get()
                assert isinstance(output, RequestOutput)  # nothing that pools was added
                refused = next((c for c in output.outputs if c.error_kind is not None), None)
                if refused is not None:
                    raise error_of(refused.error_kind, refused.error)
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._forget(submission)

    async def abort(self, ids: str | Iterable[str]) -> None:
        """End requests, by the user's or internal ids; they yield what they have, and end."""
        await self._ready()
        self._send_aborts(self._frontend.abort([ids] if isinstance(ids, str) else ids))
        self._turns.look()

    async def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        extras: RequestExtras,
    ) -> tuple[Submission, RequestOutputCollector]:
        """Check a prompt and send it; once more if the engine turns out to have died unnoticed.

        Returns:
            And where its outputs come.
        """
        await self._ready()
        request_id = str(next(self._serials)) if request_id is None else request_id
        arrived = self.parts.clock()
        token_ids = await self._tokenised(prompt)
        for attempt in itertools.count():
            await self._ready()
            # Anew each time: what a first attempt brought is no part of the second one's.
            collector = RequestOutputCollector()
            submission = self._frontend.submit(
                request_id,
                prompt,
                params,
                extras,
                sink=collector.put,
                token_ids=token_ids,
                arrived=arrived,
            )
            collector.kind = submission.children[0].params.output_kind
            try:
                for child in submission.children:
                    await self._send(self._client, child)
            except EngineDeadError:
                self._forget(submission, FinishReason.ERROR)
                if attempt or not self._restarter.enabled:
                    raise
                await self._noticed()
            except asyncio.CancelledError:
                self._forget(submission)
                raise
            except BaseException:
                self._forget(submission, FinishReason.ERROR)
                raise
            else:
                break
        return submission, collector

    async def _tokenised(self, prompt: Prompt) -> list[int] | None:
        """Return the tokens of a text, None if there is none.

        A long one is tokenised in another thread, and any other that comes meanwhile as well: a
        tokenizer is asked for one text at a time.
        """
        text = self._frontend.input.text_of(prompt)
        if text is None:
            return None
        tokenise = self._frontend.input.tokenise
        if len(text) < _LONG_TEXT and not self._tokenising:
            return tokenise(text)
        if self._tokenisers is None:
            self._tokenisers = ThreadPoolExecutor(1, thread_name_prefix="hardpoint-tokenise")
        future = self._tokenisers.submit(tokenise, text)
        self._tokenising.add(future)
        future.add_done_callback(self._tokenising.discard)  # not before the thread is done with it
        return await asyncio.wrap_future(future)

    async def _send(self, client: ProcessClient, request: EngineCoreRequest) -> None:
        """Send a request, unless it ends before the engine takes it."""
        await self._turns.sent(
            client.offer_request(request),
            lambda: not self._frontend.output.is_live(request.request_id),
        )

    def _forget(self, submission: Submission, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request that nobody waits for any more."""
        self._send_aborts(self._frontend.forget([submission.parent.internal_id], reason))

    def _send_aborts(self, ids: list[str]) -> None:
        if ids and not self._closed and self._restart is None and self.dead_error is None:
            self._client.abort_requests(ids)

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request that brings none: what the model's files recommend."""
        return self._frontend.input.default_params()

    @property
    def engine_pid(self) -> int:
        """The engine's process id."""
        return self._client.pid

    @property
    def is_running(self) -> bool:
        """Whether the engine serves, as far as is known."""
        if self._closed or self.errored or self._restart is not None:
            return False
        return self._relay.failure is None

    @property
    def errored(self) -> bool:
        """Whether the engine is dead and is not started anew; `dead_error` says why."""
        return self.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine is dead, if it is and is not started anew."""
        failure = self._relay.failure
        if self._dead is None and failure is not None and not self._restarter.enabled:
            return dead(failure)  # it died before its first use
        return self._dead

    async def health(self) -> Health:
        """Return which plugins failed and how often the engine was started anew.

        Raises:
            EngineDeadError: the engine is dead and is not started anew.
        """
        fallbacks = await EngineUtilities.step_faults.call_async(self.call_utility)
        return self._frontend.health(fallbacks, self._restarter.count)

    async def why_waiting(self, request_id: str) -> dict[int, WaitReason | None]:
        """Return why the completions of a request got no tokens in the last step, by index.

        Raises:
            RequestError: no live request has that id.
        """
        await self._ready()
        live = self._frontend.children_of(request_id)
        reasons = await EngineUtilities.why_waiting.call_async(self.call_utility, list(live))
        return dict(zip(live.values(), reasons, strict=True))

    async def set_policy(self, use: str, options: Mapping[str, Any] | None = None) -> Manifest:
        """Put another scheduling policy in the place of the one there is; no request is lost.

        An engine that is started anew has it too.

        Raises:
            ConfigError, PluginError: the policy cannot be had; the old one stays.
        """
        await self._ready()
        async with self._changing:
            parts = self.parts.with_policy(use, options or {})
            manifest = parts.plugins.manifest
            await EngineUtilities.set_policy.call_async(self.call_utility, manifest)
            self.parts = dataclasses.replace(parts, client=self.parts.client)
        return manifest

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call one of the engine's utilities, as `LLMEngine.call_utility` does.

        Raises:
            HardpointError: what the utility raised, or why it could not be asked.
        """
        await self._ready()
        future = asyncio.wrap_future(self._client.call(method, *args))
        try:
            done, _ = await asyncio.wait([future], timeout=self._client.patience(method))
        except asyncio.CancelledError:
            future.cancel()  # so that it is not sent any more, if it was not
            raise
        if not done:
            future.cancel()
            raise self._client.no_answer(method)
        try:
            return future.result()
        except EngineDeadError:
            if self._dead is None:
                raise
            told = dead(self._dead)  # it was closed because of that
            raise told from told.__cause__

    def close(self) -> None:
        """End the engine; whoever waits is told. In any thread, and twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self._restarter.close()
        if self._tokenisers is not None:
            self._tokenisers.shutdown(wait=False)
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._frontend.fail_all, _closed, FinishReason.ABORT)
        if self._closing is not None:
            self._closing.join()
        self._frontend.close(self.parts.client.close)

    @property
    def _client(self) -> ProcessClient:
        client = self.parts.client
        assert isinstance(client, ProcessClient)
        return client

    async def _ready(self) -> None:
        """Wait until the engine serves.

        Raises:
            EngineClosedError: it was closed.
            EngineDeadError: it is dead and is not started anew.
        """
        self._bind()
        while True:
            if self._closed:
                raise _closed()
            if self._dead is not None:
                raise dead(self._dead)
            if self._restart is None:
                return
            await asyncio.wait([self._restart])

    def _bind(self) -> None:
        """Belong to the running loop, from the first use on.

        Raises:
            HardpointError: it belongs to another one.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._relay.connect(loop, self._arrived)
            if (statistics := self._frontend.statistics) is not None and statistics.has_sinks:
                _report_every(loop, statistics.interval_seconds, weakref.WeakMethod(self._report))
        elif self._loop is not loop:
            raise HardpointError(
                "this engine belongs to the event loop in which it was used first, which is "
                f"{'closed' if self._loop.is_closed() else 'another one'}; "
                "open one engine per event loop"
            )

    def _arrived(self, relay: Relay, item: Item) -> None:
        """Take what the client's threads have brought."""
        if relay is not self._relay:  # of an engine that is gone
            return
        if isinstance(item, Exception):
            self._died(item)
        elif item.outputs:
            self._take(item)

    def _take(self, batch: EngineCoreOutputs) -> None:
        try:
            self._send_aborts(self._frontend.take(batch).aborts)
            if self._frontend.statistics is not None:
                self._frontend.statistics.record()
        except Exception as error:  # nobody else would hear of it
            self._died(blamed(error, self.parts.plugins), final=True)

    def _report(self) -> bool:
        """Have the sinks report; return whether there will be more to report."""
        try:
            if self._frontend.statistics is not None and not self._closed:
                self._frontend.statistics.report()
        except Exception as error:  # of a sink whose faults end the engine
            self._died(error, final=True)
        return not self._closed

    def _died(self, error: Exception, *, final: bool = False) -> None:
        """Tell everybody who waits; start the engine anew, or be dead.

        Args:
            final: the engine's process may be well, and yet nothing is to be had from it.
        """
        if self._closed or self._restart is not None or self._dead is not None:
            return
        self._relay = Relay()  # nothing of this engine counts any more
        self._frontend.fail_all(lambda: dead(error) if final else _retryable(error))
        if not final and self._restarter.may_restart() and self._loop is not None:
            self._restart = self._loop.create_task(self._start_anew())
            return
        self._dead = dead(error)
        if not final:
            self._restarter.give_up(self._dead)
        # Its process may live: it would hold its memory for as long as somebody holds this.
        closing = threading.Thread(target=self._client.close, name="hardpoint-close")
        closing.start()
        self._closing = closing

    async def _start_anew(self) -> None:
        try:
            old = self._client
            await asyncio.to_thread(old.close)
            client, self._relay = await self._restarter.restart(self.parts)
            self.parts = dataclasses.replace(self.parts, client=client)
            assert self._loop is not None
            self._relay.connect(self._loop, self._arrived)
            if self._closed:  # in another thread, just now
                await asyncio.to_thread(client.close)
        except Exception as error:
            self._dead = dead(error)
        finally:
            self._restart = None

    async def _noticed(self) -> None:
        """Wait until the word of the engine's death has come through to the loop."""
        relay = self._relay
        patience = asyncio.get_running_loop().time() + _NEWS_S
        while relay is self._relay and self._restart is None and not self._closed:
            if asyncio.get_running_loop().time() > patience:
                return
            await asyncio.sleep(_GLANCE_S)


def _report_every(
    loop: asyncio.AbstractEventLoop,
    seconds: float,
    report: weakref.WeakMethod[Callable[[], bool]],
) -> None:
    """Call a bound method regularly while it returns true. Does not keep its object alive."""

    def tick() -> None:
        method = report()
        if method is not None and method():
            loop.call_later(seconds, tick)

    loop.call_later(seconds, tick)


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine is closed")


def _retryable(error: Exception) -> EngineDeadError:
    """Return what a request in flight is told of the engine's death."""
    told = dead(error)
    told.args = (f"{error}; the request may be sent again",)
    return told
