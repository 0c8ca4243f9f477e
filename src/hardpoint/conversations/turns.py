"""Conversations of LLM and AsyncLLM: parts go in, and each turn is a request of the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
    Sequence,
)
from types import TracebackType
from typing import Any

from hardpoint.calls.streams import OutputStream
from hardpoint.plugins import RequestError, RequestOutput, RequestOutputKind, SamplingParams
from hardpoint.plugins.requests import Prompt
from hardpoint.requests import check_generates, with_output_kind

from .parts import PromptPart, read_part
from .states import ConversationState, History

__all__ = ["AsyncConversation", "Conversation"]


_CLOSED = "it was closed"
_LOST = ("abort", "error")
"""Finish reasons after which `generate` of parts goes no further."""


class _ConversationBase:
    """Parameters, parts and state of a conversation; base of both conversations."""

    def __init__(
        self,
        opened: Callable[[], History],
        vocab_size: int,
        default_params: SamplingParams,
        params: SamplingParams | None,
    ) -> None:
        self._vocab_size, self._params = vocab_size, default_params
        self._params = self._chosen(params)
        self._history = opened()

    @property
    def request_id(self) -> str:
        """The id of its turns, and of their outputs."""
        return self._history.request_id

    @property
    def state(self) -> ConversationState:
        """Its state; ENDED also once its lease has run out."""
        return self._history.state

    @property
    def token_ids(self) -> list[int]:
        """The tokens of all turns that have ended."""
        return self._history.token_ids

    @property
    def num_turns(self) -> int:
        """The number of turns that have ended."""
        return self._history.num_turns

    @property
    def seconds_left(self) -> float | None:
        """The rest of its lease; None while a turn runs, and once it has ended."""
        return self._history.seconds_left

    def _chosen(self, params: SamplingParams | None) -> SamplingParams:
        """Return the parameters of a turn: the newest ones that were given.

        Raises:
            RequestError: they have several completions, or another type.
        """
        if params is None:
            return self._params
        check_generates(params)
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params: expected SamplingParams, got {type(params).__name__}"
            )
        if params.n != 1:
            raise RequestError(
                "n: expected 1 in a conversation, in which the answer is part of the next prompt, "
                f"got {params.n!r}"
            )
        return params

    def _begin(self, sampling_params: SamplingParams | None, *, cumulative: bool) -> _Turn | None:
        """Begin a turn; return None without one, if no part has come.

        Args:
            sampling_params: its parameters; None keeps the earlier ones.
            cumulative: whether outputs may have all tokens so far; if not, such have the new ones.

        Raises:
            RequestError: the parameters are wrong, or a turn runs.
            ConversationEndedError: the conversation has ended.
        """
        params = self._chosen(sampling_params)
        if params.output_kind is RequestOutputKind.CUMULATIVE and not cumulative:
            params = with_output_kind(params, RequestOutputKind.DELTA)
        token_ids = self._history.begin()
        if token_ids is None:
            return None
        return _Turn(self._history, token_ids, params, self._keep)

    def _keep(self, params: SamplingParams) -> None:
        self._params = params


class _Turn:
    """One turn; as a context it ends with the block, and an error undoes it.

    Attributes:
        params: its parameters, which hold from its first output on.
    """

    def __init__(
        self,
        history: History,
        token_ids: Sequence[int],
        params: SamplingParams,
        accept: Callable[[SamplingParams], None],
    ) -> None:
        """Start without outputs.

        Args:
            token_ids: all tokens before its answer.
            accept: called with them once the engine has taken it.
        """
        self.params = params
        self._history, self._prompt_ids, self._accept = history, token_ids, accept
        self._delta = params.output_kind is RequestOutputKind.DELTA
        self._number = history.num_turns
        self._token_ids: list[int] = []
        self._is_over = False

    @property
    def prompt(self) -> Mapping[str, Any]:
        """Its prompt, as `generate` takes it."""
        return {"type": "token", "prompt_token_ids": self._prompt_ids}

    def add_output(self, output: RequestOutput) -> RequestOutput:
        """Add an output, and return it with the turn's number; the last one ends the turn."""
        self._accept(self.params)
        output.turn = self._number
        for completion in output.outputs:
            if self._delta:
                self._token_ids += completion.token_ids
            else:
                self._token_ids = list(completion.token_ids)
        if output.finished:
            has_failed = any(completion.finish_reason == "error" for completion in output.outputs)
            self._end(has_failed=has_failed)
        return output

    def __enter__(self) -> _Turn:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it, if it has not ended; leaving a loop early is no error."""
        self._end(has_failed=isinstance(error, Exception))

    def _end(self, *, has_failed: bool) -> None:
        if self._is_over:
            return
        self._is_over = True
        if has_failed:
            self._history.fail()
        else:
            self._history.finish(self._token_ids)


class Conversation(_ConversationBase):
    """A conversation that stays open, of an `LLM`; `LLM.open_conversation` makes one.

    One thread at a time sends.
    """

    def __init__(
        self,
        opened: Callable[[], History],
        vocab_size: int,
        default_params: SamplingParams,
        params: SamplingParams | None,
        *,
        encode: Callable[[str, bool], list[int]],
        stream: Callable[[Any, SamplingParams], OutputStream],
    ) -> None:
        """Open a history once the parameters are checked.

        Args:
            encode: returns a text's tokens, called with whether it begins the conversation.
            stream: begins a request.
        """
        super().__init__(opened, vocab_size, default_params, params)
        self._encode, self._stream = encode, stream

    def append(self, prompt: Prompt) -> None:
        """Add a part, which is computed with the next turn. One without tokens changes nothing.

        Args:
            prompt: as for `LLM.generate`. Only the first text gets the tokenizer's special tokens.

        Raises:
            RequestError: the part is wrong, or too long; the conversation stays as it is.
            ConversationEndedError: the conversation has ended.
        """
        self._history.check_open()
        if isinstance(part := read_part(prompt, self._vocab_size), str):
            part = self._encode(part, self._history.is_empty) if part else []
        self._history.append(part)

    def commit(
        self, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Begin a turn; yield its outputs as they come, as `LLM.stream` does.

        Leaving the loop early ends the turn; the conversation then has the tokens that were taken.
        Without a part since the last turn, there is no turn and no output.

        Args:
            sampling_params: parameters of this turn and later ones; None keeps the earlier ones.

        Raises:
            RequestError: the parameters are wrong, or a turn runs. The parts wait for another turn.
            ConversationEndedError: the conversation has ended.
            EngineDeadError: the engine died. The parts wait for another turn.
        """
        turn = self._begin(sampling_params, cumulative=False)
        if turn is None:
            return
        with turn, contextlib.closing(self._stream(turn.prompt, turn.params)) as outputs:
            for output in outputs:
                yield turn.add_output(output)

    def send(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Add a part and begin a turn: `append`, then `commit`."""
        self.append(prompt)
        yield from self.commit(sampling_params)

    def close(self) -> None:
        """End the conversation; it keeps nothing. Closing twice does nothing."""
        self._history.end(_CLOSED)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncConversation(_ConversationBase):
    """A conversation that stays open, of an `AsyncLLM`; its `open_conversation` makes one.

    Several tasks may add parts, which are taken in the order of the calls; one turn runs at a time.
    """

    def __init__(
        self,
        opened: Callable[[], History],
        vocab_size: int,
        default_params: SamplingParams,
        params: SamplingParams | None,
        *,
        encode: Callable[[str, bool], Awaitable[list[int]]],
        generate: Callable[[str, Any, SamplingParams], AsyncGenerator[RequestOutput, None]],
        abort: Callable[[str], Awaitable[None]],
    ) -> None:
        """Open a history once the parameters are checked.

        Args:
            encode: returns a text's tokens, called with whether it begins the conversation.
            generate: begins a request of an id.
            abort: ends the requests of an id.
        """
        super().__init__(opened, vocab_size, default_params, params)
        self._encode, self._generate, self._abort = encode, generate, abort
        self._appending = asyncio.Lock()
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._history.on_end = self._set_ended

    async def append(self, prompt: Prompt) -> None:
        """Add a part, which is computed with the next turn. One without tokens changes nothing.

        Args:
            prompt: as for `AsyncLLM.generate`. Only the first text gets the tokenizer's special
                tokens.

        Raises:
            RequestError: the part is wrong, or too long; the conversation stays as it is.
            ConversationEndedError: the conversation has ended.
        """
        self._history.check_open()
        part = read_part(prompt, self._vocab_size)
        async with self._appending:  # a long text is tokenized while others come
            if isinstance(part, str):
                part = await self._encode(part, self._history.is_empty) if part else []
            self._history.append(part)

    async def commit(
        self, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Begin a turn; yield its outputs as they come, as `AsyncLLM.generate` does.

        Leaving the loop early ends the turn; the conversation then has the tokens that were taken.
        Without a part since the last turn, there is no turn and no output.

        Args:
            sampling_params: parameters of this turn and later ones; None keeps the earlier ones.

        Raises:
            RequestError: the parameters are wrong, or a turn runs. The parts wait for another turn.
            ConversationEndedError: the conversation has ended.
            EngineDeadError: the engine died. The parts wait for another turn.
        """
        turn = self._begin(sampling_params, cumulative=True)
        if turn is None:
            return
        with turn:
            outputs = self._generate(self.request_id, turn.prompt, turn.params)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield turn.add_output(output)

    async def send(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Add a part and begin a turn: `append`, then `commit`."""
        await self.append(prompt)
        async with contextlib.aclosing(self.commit(sampling_params)) as outputs:
            async for output in outputs:
                yield output

    async def generate(
        self, parts: AsyncIterable[Prompt | PromptPart]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Take parts as they come, a turn for each that commits; yield the outputs of all turns.

        The next part is asked for once the turn before it has ended. It ends with the parts, after
        a turn that ends with "abort" or "error", and if the conversation is aborted.

        Raises:
            RequestError: a part is wrong; the message has its index.
            ConversationEndedError: no part came within the lease, or the engine was closed.
            EngineDeadError: as `commit`.
        """
        source, index = aiter(parts), 0
        params: SamplingParams | None = None
        while (part := await self._next_of(source)) is not _NO_MORE:
            if not isinstance(part, PromptPart):
                part = PromptPart(part)
            try:
                await self.append(part.prompt)
                params = part.sampling_params or params
                if part.commit:
                    async with contextlib.aclosing(self.commit(params)) as outputs:
                        async for output in outputs:
                            yield output
                            if any(
                                completion.finish_reason in _LOST for completion in output.outputs
                            ):
                                return
            except RequestError as error:
                raise type(error)(f"parts[{index}]: {error}") from error
            index += 1

    async def cancel(self) -> None:
        """End the running turn, if any; it yields its output so far, and another may follow."""
        if self._history.cancel():
            await self._abort(self.request_id)

    async def aclose(self) -> None:
        """End the conversation, and a turn that runs; it keeps nothing. Twice does nothing."""
        runs = self._history.cancel()
        self._history.end(_CLOSED)
        if runs:
            await self._abort(self.request_id)

    async def __aenter__(self) -> AsyncConversation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _set_ended(self) -> None:
        """Wake up who waits for a part; in any thread."""
        if self._loop is None:
            self._ended.set()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ended.set)

    async def _next_of(self, source: AsyncIterator[Any]) -> Any:
        """Return the next part; `_NO_MORE` after the last one, and once it was aborted.

        Raises:
            ConversationEndedError: the lease runs out first, or the engine ends.
        """
        self._loop = asyncio.get_running_loop()
        reading = asyncio.ensure_future(_read_from(source))
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            while not (reading.done() or ended.done()):
                await asyncio.wait(
                    (reading, ended),
                    timeout=self._history.seconds_left,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not reading.done():
                    self._history.check_lease()
            if self._history.is_lost:
                raise self._history.ended()
            return reading.result() if reading.done() else _NO_MORE
        finally:
            for task in (reading, ended):
                task.cancel()
            await asyncio.gather(reading, ended, return_exceptions=True)


_NO_MORE = object()


async def _read_from(source: AsyncIterator[Any]) -> Any:
    return await anext(source, _NO_MORE)
