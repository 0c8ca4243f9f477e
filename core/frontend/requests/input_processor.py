"""The input processor: turns prompts and parameters into checked engine requests."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from hardpoint import typed
from hardpoint.boundary.parts.frontend_parts import FrontendParts
from hardpoint.core.frontend.outputs.output_parsers import OutputParsers
from hardpoint.errors import PromptTooLongError
from hardpoint.plugins import (
    EngineCoreRequest,
    LoRARequest,
    ModelConfig,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.media_format import PlacedMedia
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import MultiModalFeature, Retention
from hardpoint.plugins.tokenizer import EncodedPair
from hardpoint.typed.read_only import read_only

from .plugin_arguments import CallRules, PluginArguments
from .prompts import (
    Params,
    Prompt,
    ReadPrompt,
    Tokens,
    checked_ids,
    read_prompt,
)

T = TypeVar("T")


class RequestExtras(typed.Strict):
    """Fields of a request besides prompt and sampling parameters.

    Attributes:
        priority: smaller is more important.
        timeout: seconds from now after which it ends with finish reason "timeout", whether it
            runs or waits; None is never.
        tags: free-form labels, such as {"tenant": "acme"}; for policies and sinks.
        cache_salt: requests with different salts never share cached prompts.
        arrival_time: for latencies: seconds on the frontend's clock, which is `time.monotonic`;
            None, or a time to come, is now.
        trace_headers: headers of the request's trace, for sinks.
        tools: JSON schemas of the arguments of the tools that the model may call, by name; None
            leaves calls in the text.
        calls: calls of the tools that a grammar allows; None leaves the model free.
        kv_transfer_params: for the KV connector, which checks them.
        truncate_prompt_tokens: last tokens of the prompt that are kept; -1 keeps those that leave
            room for `max_tokens`; None keeps all.
        lora_request: its adapter, with the hash of its content.
        session: conversation that it belongs to; needs `retain_seconds`.
        retain_seconds: how long its blocks are worth more than others; needs `session`.
        data_parallel_rank: number of the engine that runs it; None lets the balancer choose.
    """

    priority: int = 0
    timeout: Annotated[float, Meta(gt=0)] | None = None
    tags: dict[str, str] = {}
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    arrival_time: float | None = None
    trace_headers: dict[str, str] | None = None
    tools: dict[str, dict[str, Any]] | None = None
    calls: CallRules | None = None
    kv_transfer_params: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    lora_request: LoRARequest | None = None
    session: str | None = None
    retain_seconds: float | None = None
    data_parallel_rank: int | None = None

    @property
    def retention(self) -> Retention | None:
        """The wish that what is computed is kept.

        Raises:
            RequestError: one of the fields is there without the other.
        """
        if self.session is None and self.retain_seconds is None:
            return None
        if self.session is None or self.retain_seconds is None:
            given, missing = "session", "retain_seconds"
            if self.session is None:
                given, missing = missing, given
            raise RequestError(f"{missing}: expected a value with {given}, got none")
        return Retention(self.session, self.retain_seconds)


NO_EXTRAS = RequestExtras()

_POOLED = SamplingParams(max_tokens=1, seed=0, output_kind=RequestOutputKind.FINAL_ONLY)
"""Sampling parameters of a request that pools."""


class InputProcessor:
    """Checks parameters, tokenises prompts, resolves plugin arguments. Sends nothing."""

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        arguments: PluginArguments,
        parts: FrontendParts,
        *,
        max_model_len: int,
        seed: int | None,
        in_process: bool = True,
        share_params: bool = True,
    ) -> None:
        """Use the tokenizer and the model's limits.

        Args:
            seed: makes the seeds of requests without one repeatable.
            in_process: whether the engine runs in this process, so that callables reach it.
            share_params: whether the lists of parameters, then read-only, are those of the request
                before where both have equal parameters.
        """
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._in_process = in_process
        self._share_params = share_params
        self._arguments, self._parts = arguments, parts
        eos = {*model_config.eos_token_ids, *tokenizer.eos_token_ids}
        self._eos_token_ids = tuple(sorted(eos))
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._default_params: SamplingParams | None = None
        self._last_checked: tuple[bytes, SamplingParams] | None = None

    def default_params(self) -> SamplingParams:
        """Return the parameters of a request without any, as the model's files recommend."""
        if self._default_params is None:
            self._default_params = SamplingParams(**self._model_config.default_sampling)
        return self._default_params

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params,
        extras: RequestExtras = NO_EXTRAS,
        *,
        arrival_time: float = 0.0,
        token_ids: Tokens | PlacedMedia | None = None,
    ) -> tuple[EngineCoreRequest, str | None, OutputParsers]:
        """Return the request, the prompt's text, if that is known, and the parsers of the output.

        The caller closes the parsers. Fields of `extras` win over those of a tokenised prompt.

        Args:
            arrival_time: seconds on the frontend's clock, used if neither has one.
            token_ids: those of a prompt given as text, or with media, from `AsyncTokenizer`; None
                finds them here.

        Raises:
            RequestError: naming the field, its value and the expected one.
        """
        pooling: PoolingParams | None = None
        if isinstance(params, PoolingParams):
            pooling = typed.convert(params, PoolingParams, path="", error=RequestError)
            params = msgspec.structs.replace(_POOLED, plugin_args=pooling.plugin_args)
        params = self.checked(params)
        given = self._read(prompt)
        salt = given.cache_salt if extras.cache_salt is None else extras.cache_salt
        times = (extras.arrival_time, given.arrival_time, arrival_time)
        whole, features = self._whole(given, token_ids, pools=pooling is not None)
        room = 0 if pooling is not None else params.max_tokens or 1
        cut = self._cut(whole, extras.truncate_prompt_tokens, room, given.fields, features)
        pair = cut if isinstance(cut, EncodedPair) else None
        token_ids = cut.token_ids if isinstance(cut, EncodedPair) else cut
        if pooling is None:
            params = self._completed(params, len(token_ids))
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=() if params.ignore_eos else self._eos_token_ids,
            arrival_time=next(time for time in times if time is not None),
            priority=extras.priority,
            timeout=extras.timeout,
            tags=dict(extras.tags),
            cache_salt=salt,
            trace_headers=extras.trace_headers,
            kv_transfer_params=extras.kv_transfer_params,
            pooling_params=pooling,
            second_type_start=None if pair is None else pair.second_type_start,
            lora=extras.lora_request,
            data_parallel_rank=extras.data_parallel_rank,
            retention=extras.retention,
            features=features,
        )
        request = msgspec.structs.replace(request, **given.fields)
        fields, parsers = self._arguments.resolve(request, extras.tools, extras.calls)
        # The arguments travel resolved; the originals would only travel twice.
        request.params = msgspec.structs.replace(request.params, **{**fields, "plugin_args": {}})
        return request, given.text if cut is whole else None, parsers

    def placed(self, prompt: Prompt, token_ids: list[int] | None = None) -> PlacedMedia:
        """Return the tokens of a prompt, with its media in their places.

        May be called in any thread, one call at a time; images take milliseconds.

        Args:
            prompt: text or token ids, with or without media.
            token_ids: those of its text, from `tokenise`; None tokenises it here.

        Raises:
            RequestError: something is wrong with it.
        """
        whole, features = self._whole(read_prompt(prompt), token_ids, pools=False)
        assert not isinstance(whole, EncodedPair), "a pair is refused"
        return PlacedMedia(whole, features)

    def outputs_of(self, prompt: Prompt) -> Any:
        """Return the outputs that a prompt comes with, by completion; None: it has none."""
        if not isinstance(prompt, Mapping) or self._parts.reads_prompt(prompt):
            return None
        return read_prompt(prompt).outputs

    def _read(self, prompt: Prompt) -> ReadPrompt:
        own = not isinstance(prompt, str) and self._parts.read_prompt(prompt, self.tokenise)
        return ReadPrompt.of(own) if own else read_prompt(prompt)

    def _whole(
        self, given: ReadPrompt, token_ids: Tokens | PlacedMedia | None, *, pools: bool
    ) -> tuple[Tokens, Sequence[MultiModalFeature]]:
        """Return the tokens of a prompt before it is cut, and its media."""
        if isinstance(token_ids, PlacedMedia):
            return token_ids.token_ids, token_ids.features
        tokens = self._tokens(given, token_ids, pools=pools)
        if given.media is None:
            return tokens, ()
        if isinstance(tokens, EncodedPair):
            raise RequestError("multi_modal_data: expected none with a pair of texts")
        placed = self._parts.place_media(tokens, given.media)
        return placed.token_ids, placed.features

    def has_media(self, prompt: Prompt) -> bool:
        """Return whether a prompt has media.

        Raises:
            RequestError: it is malformed.
        """
        if not isinstance(prompt, Mapping) or self._parts.reads_prompt(prompt):
            return False
        return read_prompt(prompt).media is not None

    def texts_of(self, prompt: Prompt) -> Sequence[str]:
        """Return the text to tokenise, or the two of a pair; none if the prompt has token ids."""
        if self._parts.reads_prompt(prompt):
            return []
        given = read_prompt(prompt)
        if given.pair is not None:
            return given.pair
        return [] if given.text is None or given.token_ids is not None else [given.text]

    def tokens_of(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of what `texts_of` has returned. Called as `tokenise`.

        Raises:
            RequestError: UTF-8 cannot encode a text, or the tokenizer takes no pairs.
        """
        if len(texts) == 1:
            return self.tokenise(texts[0])
        try:
            return self._tokenizer.encode_pair(*texts)
        except NotImplementedError as cause:
            raise RequestError(f"text_pair: expected one text: {cause}") from cause

    def tokenise(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens. May be called in any thread, one call at a time.

        Raises:
            RequestError: UTF-8 cannot encode it.
        """
        typed.check_text(text, "prompt", RequestError)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def checked(self, params: SamplingParams) -> SamplingParams:
        """Return a copy of parameters after checking every field, also against the model.

        Raises:
            RequestError: naming the field, its value and the expected one.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params: expected SamplingParams, got {type(params).__name__}"
            )
        # Requests by the thousand have equal parameters: they are checked once, and their lists are
        # fewer objects for the garbage collector to visit.
        data = _as_bytes(params) if self._share_params else None
        if data is None:
            return self._newly_checked(params)
        if self._last_checked is None or self._last_checked[0] != data:
            self._last_checked = data, read_only(self._newly_checked(params))
        return self._last_checked[1]

    def _newly_checked(self, params: SamplingParams) -> SamplingParams:
        params = params.checked()
        if params.logits_processors and not self._in_process:
            raise RequestError(
                "logits_processors: callables cannot travel to an engine in a process of its own; "
                "enable a factory `(params) -> callable or None` as a plugin (plugins.enable), "
                "which is called there, or run the engine in this process (engine.in_process)"
            )
        vocab_size = self._model_config.vocab_size
        for field in ("logprobs", "prompt_logprobs"):
            if (getattr(params, field) or 0) > vocab_size:
                raise RequestError(
                    f"{field}: expected at most the vocabulary's {vocab_size}, "
                    f"got {getattr(params, field)}"
                )
        for field in ("stop_token_ids", "logprob_token_ids"):
            for index, token in enumerate(getattr(params, field) or ()):
                if token >= vocab_size:
                    raise RequestError(
                        f"{field}[{index}]: expected a token id below {vocab_size}, got {token}"
                    )
        return params

    def seeded(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with a seed, random if they have none."""
        if params.seed is not None:
            return params
        return msgspec.structs.replace(params, seed=self._random.getrandbits(63))

    def _completed(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """Fill in open values: the length that fits, and a seed."""
        room = self._max_model_len - prompt_length
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens: expected at most {room}, the room that the prompt leaves of "
                f"max_model_len {self._max_model_len}, got {params.min_tokens}"
            )
        room = min(params.max_tokens or room, room)
        return self.seeded(msgspec.structs.replace(params, max_tokens=room))

    def _tokens(self, given: ReadPrompt, token_ids: Tokens | None, *, pools: bool) -> Tokens:
        if given.pair is not None:
            if not pools:
                raise RequestError(
                    "text_pair: expected one prompt: texts are read in pairs to be classified and "
                    "scored, not to generate"
                )
            return self.tokens_of(given.pair) if token_ids is None else token_ids
        if given.token_ids is not None or given.text is None:
            token_ids = checked_ids(given.token_ids, self._model_config.vocab_size)
        elif token_ids is None:
            token_ids = self.tokenise(given.text)
        if not token_ids:
            raise RequestError("prompt: expected at least one token, got an empty prompt")
        return token_ids

    def _cut(
        self,
        tokens: Tokens,
        last: int | None,
        room: int,
        fields: Collection[str] = (),
        features: Sequence[MultiModalFeature] = (),
    ) -> Tokens:
        """Return the last tokens of a prompt, or a pair of texts without its ends.

        Args:
            tokens: returned as they are, if there are no more.
            last: number of tokens; -1 is what leaves room for the output.
            room: tokens of the output.
            fields: fields of the prompt that stand by its positions.
            features: its media, without which it is not cut.
        """
        if last is not None and fields:
            raise RequestError(
                "truncate_prompt_tokens: expected none for a prompt with "
                f"{', '.join(sorted(fields))}, got {last}"
            )
        if last == -1:
            last = max(self._max_model_len - room, 1)
        if last is not None:
            if last < 1:
                raise RequestError(
                    f"truncate_prompt_tokens: expected at least 1, or -1 for those that leave room "
                    f"for max_tokens, got {last}"
                )
            if isinstance(tokens, EncodedPair):
                tokens = tokens.cut(last)
            elif len(tokens) > last:
                if features:
                    raise RequestError(
                        f"truncate_prompt_tokens: expected at least {len(tokens)}, the tokens of "
                        f"the prompt with its media, which is not cut, got {last}"
                    )
                tokens = tokens[-last:]
        count = len(tokens.token_ids if isinstance(tokens, EncodedPair) else tokens)
        if count + min(room, 1) > self._max_model_len:
            raise PromptTooLongError.of(count, self._max_model_len, generates=room > 0)
        return tokens


def _as_bytes(params: SamplingParams) -> bytes | None:
    """Return the same bytes for parameters that are checked alike; None if they may be anything."""
    if type(params) is not SamplingParams:
        return None
    try:
        if params.logits_processors or params.plugin_args:
            return None
        return msgspec.msgpack.encode(params)
    except Exception:  # the check reports what is wrong
        return None


_LONG_TEXT = 2000


class AsyncTokenizer:
    """Tokenises prompts for an event loop: a long text in another thread."""

    def __init__(self, processor: InputProcessor) -> None:
        """Start no thread yet."""
        self._processor = processor
        self._thread: ThreadPoolExecutor | None = None
        self._running: set[Future[Any]] = set()

    async def tokenise(self, prompt: Prompt) -> Tokens | PlacedMedia | None:
        """Return the tokens of a prompt given as text, or with media; None for any other.

        While a long text is tokenised, or media are processed, others wait for the same thread: a
        tokenizer is called with one text at a time.
        """
        texts = self._processor.texts_of(prompt)
        tokens: Tokens | None = None
        if texts:
            encode = functools.partial(self._processor.tokens_of, texts)
            tokens = await self._run(encode, sum(map(len, texts)))
        if self._processor.has_media(prompt) and not isinstance(tokens, EncodedPair):
            return await self._in_thread(functools.partial(self._processor.placed, prompt, tokens))
        return tokens

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens."""
        encode = functools.partial(
            self._processor.tokenise, text, add_special_tokens=add_special_tokens
        )
        return await self._run(encode, len(text))

    async def _run(self, encode: Callable[[], T], length: int) -> T:
        """Return the result of a call for texts of that length together."""
        if length < _LONG_TEXT and not self._running:
            return encode()
        return await self._in_thread(encode)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hardpoint-tokenise")
        future = self._thread.submit(call)
        self._running.add(future)
        future.add_done_callback(self._running.discard)  # not before the thread is done with it
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Start no more; do not wait."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
