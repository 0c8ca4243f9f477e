"""State of one live request in the frontend: its text, tokens and log-probabilities so far."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from hardpoint.host.boundary.errors import error_of
from hardpoint.host.boundary.parts.output_formats import AnyOutput as AnyOutput
from hardpoint.host.boundary.parts.output_formats import BoundReader, OutputFormats
from hardpoint.host.registry.blame import logged_after
from hardpoint.plugins import (
    CompletionOutput,
    DecodeStream,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    HardpointError,
    Logprob,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    Tokenizer,
)
from hardpoint.plugins.requests import PartArray, PoolingRequestOutput, TokenLogprobs, WeightRun
from hardpoint.plugins.requests.stats import RequestMetrics

from .completion_stream import CompletionStream

OutputSink = Callable[[AnyOutput | Exception], None]
"""Gets a request's outputs, or the error that ends it."""


def rejection(output: AnyOutput) -> HardpointError | None:
    """Return the error of a request that the engine rejected, as if the engine were in-process."""
    ends = [output] if isinstance(output, PoolingRequestOutput) else output.outputs
    for end in ends:
        if end.error_kind is not None:
            return error_of(end.error_kind, end.error)
    return None


class ParentRequest(msgspec.Struct, eq=False):
    """Gathers the completions of one prompt.

    Attributes:
        request_id: id that the user gave.
        internal_id: unique among live requests.
        n: number of completions.
        sink: gets its outputs; None returns them from the step.
        finished: by index, if there are several.
    """

    request_id: str
    internal_id: str
    n: int
    sink: OutputSink | None = None
    finished: dict[int, CompletionOutput] | None = None

    def children(self, request: EngineCoreRequest) -> list[EngineCoreRequest]:
        """Return one request per completion; a single one has the internal id itself."""
        if self.n == 1:
            request.request_id, request.external_req_id = self.internal_id, self.request_id
            return [request]
        return [
            msgspec.structs.replace(
                request,
                request_id=f"{index}_{self.internal_id}",
                external_req_id=self.request_id,
                child_index=index,
                # Hooks may change what a completion has; the others keep theirs.
                prompt_token_ids=list(request.prompt_token_ids),
                plugin_args=copy.deepcopy(request.plugin_args),
                tags=dict(request.tags),
                trace_headers=copy.copy(request.trace_headers),
                kv_transfer_params=copy.deepcopy(request.kv_transfer_params),
            )
            for index in range(self.n)
        ]

    def gather(
        self, completion: CompletionOutput, *, ended: bool, final_only: bool
    ) -> tuple[list[CompletionOutput], bool]:
        """Take a child's completion.

        Args:
            ended: nothing of it follows.

        Returns:
            Those that are to be shown now, by index: with `final_only`, nothing until every
            completion has ended, then all of them. And whether every one has ended.
        """
        if self.n == 1:
            return [completion], ended
        if self.finished is None:
            self.finished = {}
        if ended:
            self.finished[completion.index] = completion
        all_ended = len(self.finished) == self.n
        if not final_only:
            return [completion], all_ended
        if not all_ended:
            return [], False
        return [self.finished[index] for index in sorted(self.finished)], True


_UNANSWERED = (FinishReason.ABORT, FinishReason.ERROR, FinishReason.TIMEOUT)
"""Ends after which no answer is validated."""


class RequestState:
    """One request's text, tokens and log-probabilities so far.

    Args:
        prompt: its text, if it was given as text.
        formats: formats of its outputs; None without any.
        stream_interval: outputs between the first and the last wait for so many new tokens.
        validate: returns the flaw of the whole answer, where the request is lenient.

    Attributes:
        observed: states that observers have of it.
        metrics: for its last output.
        plain: after the first output, the stream of a request whose outputs until the last one are
            deltas of text alone or are not shown, for `advance`; None of others.
        plugins: names of the plugins that get arguments of the request.
    """

    observed: Sequence[Any] = ()
    metrics: RequestMetrics | None = None
    _num_resumes = 0
    _token_texts: dict[int, str] | None = None  # of log-probabilities, which repeat tokens

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent: ParentRequest,
        tokenizer: Tokenizer,
        stream_interval: int = 1,
        formats: OutputFormats | None = None,
        validate: Callable[[str], str | None] | None = None,
    ) -> None:
        params = request.params
        self.parent = parent
        self.finish_reason: FinishReason | None = None
        self._request = request
        self.plugins = tuple(request.plugin_args)
        self._prompt = prompt
        self._prompt_token_ids = request.known_prompt_ids
        self._tokenizer = tokenizer
        self._has_text = request.pooling_params is None
        self._decoder = self._new_decoder() if params.detokenize and self._has_text else None
        # Made on use: a hundred thousand requests may wait, and the garbage collector visits each
        # object.
        self._stream: CompletionStream | None = None
        self._interval = stream_interval
        self._formats = None if formats is None else formats.hold()
        self.plain: CompletionStream | None = None
        # Read once per token: looked up once per request.
        self._final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._delta = params.output_kind is RequestOutputKind.DELTA
        # None where the request does not ask for them.
        has_logprobs = params.wants_logprobs and self._has_text
        self._logprobs: list[Mapping[int, Logprob]] | None = [] if has_logprobs else None
        self._num_given = len(params.logprob_token_ids or ())
        self._cumulative_logprob = 0.0
        self._prompt_logprobs: list[Mapping[int, Logprob] | None] | None = (
            None if params.prompt_logprobs is None else []
        )
        self._flaw_of, self._answer = validate, ""  # the answer so far, of deltas
        self._stop_reason: int | str | dict[str, Any] | None = None
        self._error: str | None = None
        self._error_kind: str | None = None
        self._num_cached_tokens: int | None = None
        self._kv_transfer_params: dict[str, Any] | None = None
        self._part_figures: dict[str, dict[str, Any]] | None = None
        self._part_arrays: dict[tuple[str, str], list[PartArray]] = {}
        self._routed_experts: list[np.ndarray[Any, Any]] | None = None
        self._weight_runs: list[WeightRun] | None = None
        self._sent_prompt = self._num_before = 0  # before: those of another engine
        if request.resumed is not None and request.resumed.output_token_ids:
            self._go_on(request.resumed.output_token_ids)

    @property
    def index(self) -> int:
        """Which of the `n` completions this is."""
        return self._request.child_index

    @property
    def num_tokens(self) -> int:
        """How many output tokens it has."""
        return 0 if self._stream is None else self._stream.num_tokens

    def _new_decoder(self) -> DecodeStream:
        skip = self._request.params.skip_special_tokens
        return self._tokenizer.decode_stream(
            self._request.last_prompt_ids, skip_special_tokens=skip
        )

    def update(self, output: EngineCoreOutput) -> None:
        """Update the state from one engine output."""
        self.finish_reason = output.finish_reason
        self._stop_reason = output.stop_reason
        self._error, self._error_kind = output.error, output.error_kind
        if output.num_cached_tokens is not None:
            self._num_cached_tokens = output.num_cached_tokens
        self._part_figures = output.part_figures or self._part_figures
        self._weight_runs = output.weight_runs or self._weight_runs
        self._num_resumes = output.num_resumes
        if output.kv_transfer_params is not None:
            self._kv_transfer_params = output.kv_transfer_params
        if output.prompt_logprobs is not None and self._prompt_logprobs is not None:
            self._prompt_logprobs += [
                self._decoded(entry) if entry else None for entry in output.prompt_logprobs
            ]
        if output.routed_experts is not None or output.part_arrays is not None:
            self._keep_arrays(output)
        stream = self._stream or self._begin(output)
        for reader in stream.readers:
            reader.update(output)
        is_shown = isinstance(output.stop_reason, dict)  # no token has ended it
        new = stream.push(output.new_token_ids, output.finish_reason, is_shown=is_shown)
        if stream.stop_string is not None:
            self._stopped_by(stream.stop_string, has_tokens=bool(new))
        elif stream.finished_by is not None:
            self._stopped_by(stream.finished_by.shown, has_tokens=True)
        if output.logprobs and self._logprobs is not None:
            entries = output.logprobs[: len(new)]
            self._logprobs += [self._decoded(entry, self._num_given) for entry in entries]
            for entry in entries:
                self._cumulative_logprob += entry.logprobs[0]

    def _begin(self, output: EngineCoreOutput) -> CompletionStream:
        stream = self._stream = self._new_stream()
        if output.finish_reason is None and self._is_plain():
            self.plain = stream
        return stream

    def _keep_arrays(self, output: EngineCoreOutput) -> None:
        if output.routed_experts is not None:
            self._routed_experts = self._routed_experts or []
            self._routed_experts.append(output.routed_experts)
        for part, arrays in (output.part_arrays or {}).items():
            for key, new in arrays.items():
                self._part_arrays.setdefault((part, key), []).extend(new)

    def _go_on(self, token_ids: list[int]) -> None:
        """Begin after outputs that the caller has."""
        try:
            stream = self._stream = self._new_stream()
            stream.push(list(token_ids), None)
            if (stop := stream.stop_string) is not None:
                raise RequestError(f"output_token_ids: expected no text that ends at stop {stop!r}")
            shown = stream.pop(finished=False)
        except BaseException:
            self.close()
            raise
        self._answer, self._num_before = shown.content or "", len(token_ids)

    def _new_stream(self, *, is_first: bool = True) -> CompletionStream:
        """Return a stream without tokens.

        Args:
            is_first: whether an output of the engine follows; else there is no text to read.
        """
        params, index = self._request.params, self._request.child_index
        readers: Sequence[BoundReader] = ()
        is_read = not self._has_text or (is_first and self._decoder is not None)
        if self._formats is not None and is_read:
            readers = self._formats.open(self._request)
        return CompletionStream(
            self._tokenizer,
            self._decoder,
            params,
            index=index,
            interval=self._interval,
            readers=readers,
        )

    def _is_plain(self) -> bool:
        params = self._request.params
        asks = self._logprobs is not None or self._prompt_logprobs is not None
        asks = asks or params.routed_experts or bool(params.stop_strings or params.include)
        if asks or self._formats is not None:
            return False
        is_alone = self._delta and self.parent.n == self._interval == 1 and not self.index
        is_text = is_alone and self._decoder is not None and self._flaw_of is None
        return is_text or self._final_only

    def end(self, reason: FinishReason) -> None:
        """End the request without the engine."""
        self.finish_reason = reason
        if self._stream is not None:
            self._stream.finish()
            if self._stream.stop_string is not None:
                self._stopped_by(self._stream.stop_string)

    def fail(self, error: str) -> None:
        """End the request because a plugin failed; it keeps the text that it has."""
        self.finish_reason = FinishReason.ERROR
        if self._stream is not None:
            self._stream.readers = ()
        self._error = self._error or error
        self._error_kind = None
        with logged_after("its request has failed"):
            self.close()

    def close(self, reason: FinishReason = FinishReason.ERROR) -> None:
        """Hold the formats no longer; `reason` is why the request ends, if nothing has ended it."""
        if (formats := self._formats) is not None:
            self._formats = None
            formats.close(self.finish_reason or reason)

    def _stopped_by(self, stop: str | dict[str, Any], *, has_tokens: bool = False) -> None:
        """Record a stop string or a reader's reason of the end, unless a fault ended the request.

        A fault in a message with tokens is one of a later step, which the stop string forestalls.
        """
        if has_tokens or self.finish_reason is not FinishReason.ERROR:
            self.finish_reason, self._stop_reason = FinishReason.STOP, stop
            self._error = self._error_kind = None

    def rejected(self, output: EngineCoreOutput) -> AnyOutput | None:
        """Return the user's output of a request that the engine rejected.

        Raises:
            PluginFaultError: a step part failed.
        """
        completion = CompletionOutput(
            index=self.index,
            text="",
            token_ids=[],
            finish_reason=str(FinishReason.ERROR),
            error=output.error,
            error_kind=output.error_kind,
            metrics=self.metrics,
        )
        stream = self._stream or self._new_stream(is_first=False)
        with logged_after("its request has ended"):
            self.close()
        return _result(self._to_user([completion], finished=True), stream.readers)

    def advance(self, token_ids: list[int]) -> RequestOutput | None:
        """`update` with tokens and return the `output`, in one call, of a request that is `plain`.

        Raises:
            PluginFaultError: the tokenizer failed.
        """
        stream = self.plain
        if not token_ids or stream is None:
            return None
        if self._final_only:
            stream.push(token_ids, None)
            return None
        text = stream.decode(token_ids)
        stream.num_shown += len(token_ids)
        shown = CompletionOutput(index=0, text=text, token_ids=token_ids[:], content=text or None)
        return RequestOutput(
            request_id=self.parent.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[shown],
            finished=False,
            num_cached_tokens=self._num_cached_tokens,
            lora_request=self._request.lora,
            seed=self._request.params.seed,
        )

    def output(self) -> AnyOutput | None:
        """Return the user's next output, if there is one.

        Raises:
            PluginFaultError: a step part failed.
        """
        finished = self.finish_reason is not None
        stream = self._stream or self._new_stream(is_first=False)
        if not finished and (self._final_only or (self._has_text and stream.waits())):
            return None
        first_token = stream.num_shown - self._num_before if self._delta else 0
        completion = stream.pop(finished=finished)
        if self._flaw_of is not None:
            self._validate(self._flaw_of, completion, finished=finished)
        if self._logprobs is not None:
            completion.cumulative_logprob = self._cumulative_logprob
            completion.logprobs = self._logprobs[first_token:]
        completion.weight_runs = self._weight_runs
        if finished:
            completion.finish_reason = self._reason()
            completion.stop_reason, completion.error = self._stop_reason, self._error
            completion.error_kind = self._error_kind
            completion.metrics = self.metrics
            completion.part_figures = self._part_figures
            completion.num_resumes = self._num_resumes
            if self._part_arrays:
                completion.part_arrays = self._all_arrays()
            if self._routed_experts is not None:
                completion.routed_experts = self._all_experts(self._routed_experts)
            self.close()
        outputs, is_last = self.parent.gather(
            completion, ended=finished, final_only=self._final_only
        )
        if not outputs:
            return None
        shown = self._to_user(outputs, finished=is_last)
        if self._prompt_logprobs is not None:
            shown.prompt_logprobs = self._prompt_logprobs[self._sent_prompt if self._delta else 0 :]
            self._sent_prompt = len(self._prompt_logprobs)
        return _result(shown, stream.readers) if stream.readers else shown

    def _all_arrays(self) -> dict[str, dict[str, PartArray]]:
        by_part: dict[str, dict[str, PartArray]] = {}
        end = len(self._prompt_token_ids) + self.num_tokens - 1
        for (part, key), arrays in self._part_arrays.items():
            positions = np.concatenate([array.positions for array in arrays])
            values = np.concatenate([array.values for array in arrays])
            # Another engine may have given some again.
            unique, first = np.unique(positions, return_index=True)
            first = first[unique < end]
            by_part.setdefault(part, {})[key] = PartArray(positions[first], values[first])
        return by_part

    def _all_experts(self, experts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        self._routed_experts = [np.concatenate(experts)]
        # A stop string ends the output before tokens that the engine has computed.
        return self._routed_experts[0][: len(self._prompt_token_ids) + self.num_tokens - 1]

    def _validate(
        self,
        flaw_of: Callable[[str], str | None],
        completion: CompletionOutput,
        *,
        finished: bool,
    ) -> None:
        answer = completion.content or ""
        self._answer = self._answer + answer if self._delta else answer
        has_calls = self._stream is not None and self._stream.has_calls
        if finished and self.finish_reason not in _UNANSWERED and not has_calls:
            completion.validation_error = flaw_of(self._answer)

    def _reason(self) -> str:
        stream, is_stop = self._stream, self.finish_reason is FinishReason.STOP
        if is_stop and stream is not None and stream.has_calls:
            return "tool_calls"
        return str(self.finish_reason)

    def _to_user(self, outputs: list[CompletionOutput], *, finished: bool) -> RequestOutput:
        return RequestOutput(
            request_id=self.parent.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=finished,
            num_cached_tokens=self._num_cached_tokens,
            kv_transfer_params=self._kv_transfer_params,
            lora_request=self._request.lora,
            seed=self._request.params.seed,
        )

    def _decoded(self, entry: TokenLogprobs, num_given: int = 0) -> Mapping[int, Logprob]:
        result: dict[int, Logprob] = {}
        texts = self._token_texts = self._token_texts or {}
        ranked = len(entry.token_ids) - num_given
        for place, (token, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
            if token not in result:  # the chosen token may be among the likeliest again
                rank = entry.rank if not place else place if place < ranked else None
                if (text := texts.get(token)) is None:
                    text = self._tokenizer.decode([token], skip_special_tokens=False)
                    texts[token] = text
                result[token] = Logprob(logprob, rank, text)
        return result


def _result(output: RequestOutput, readers: Sequence[BoundReader]) -> AnyOutput | None:
    """Return the caller's output, as the readers replace it."""
    shown: AnyOutput | None = output
    for reader in readers:
        if isinstance(shown, RequestOutput):
            shown = reader.result(shown)
    return shown
