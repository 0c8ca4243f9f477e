"""The input processor: turns prompts and parameters into checked engine requests."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hardpoint import typed
from hardpoint.errors import PromptTooLongError, shown
from hardpoint.host.boundary.parts.frontend_parts import FrontendParts
from hardpoint.host.boundary.parts.output_formats import OutputFormats
from hardpoint.plugins import (
    EngineCoreRequest,
    LoRARequest,
    ModelConfig,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    Tokenizer,
)
from hardpoint.plugins.params import PoolingParams
from hardpoint.plugins.requests import Prompt, Retention
from hardpoint.plugins.step_part.part import GivenPrompt
from hardpoint.typed import copied, is_list, read_only

from .plugin_arguments import CallRules, PluginArguments

Params = SamplingParams | PoolingParams
"""What is to be made of a prompt: tokens that follow it, or vectors."""

_KEYS = ("prompt", "prompt_token_ids")
OUTPUTS = "output_token_ids"
"""Key of a prompt's outputs so far, by completion: for each a list, or None for one that has ended;
with token ids alone."""


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
        prompt_text: text that outputs have as `prompt`, of a ready-made request for example.
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
    prompt_text: str | None = None

    @property
    def retention(self) -> Retention | None:
        """The request's prefix cache retention.

        Raises:
            RequestError: one of the fields is there without the other.
        """
        if self.session is None and self.retain_seconds is None:
            return None
        if self.session is None or self.retain_seconds is None:
            present, missing = "session", "retain_seconds"
            if self.session is None:
                present, missing = missing, present
            raise RequestError(f"{missing}: expected a value with {present}, got none")
        return Retention(self.session, self.retain_seconds)


NO_EXTRAS = RequestExtras()

_POOLED = SamplingParams(max_tokens=1, seed=0, output_kind=RequestOutputKind.FINAL_ONLY)
"""Sampling parameters of a request that pools."""


class InputProcessor:
    """Checks parameters, tokenizes prompts, resolves plugin arguments. Sends nothing.

    Args:
        seed: makes the seeds of requests without one repeatable.
        in_process: whether the workers are in this process, so that callables reach them.
        share_params: whether the lists of parameters, then read-only, are those of the request
            before where both have equal parameters.

    Attributes:
        tokenizer: the model's tokenizer.
    """

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
        self._model_config = model_config
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._in_process = in_process
        self._share_params = share_params
        self._arguments, self.parts = arguments, parts
        eos = {*model_config.eos_token_ids, *tokenizer.eos_token_ids}
        # The model samples no token outside its vocabulary, which a tokenizer may have.
        self._eos_token_ids = tuple(sorted(t for t in eos if t < model_config.vocab_size))
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
        parsed: GivenPrompt | None = None,
    ) -> tuple[EngineCoreRequest, str | None, OutputFormats | None]:
        """Return the request, the prompt's text, if that is known, and the formats of its outputs.

        The caller closes the formats. Fields of `extras` override fields of a tokenized prompt.

        Args:
            arrival_time: seconds on the frontend's clock, used if neither has one.
            parsed: the result of `read` for the prompt; None reads it here.

        Raises:
            RequestError: naming the field, its value and the expected one.
        """
        pooling: PoolingParams | None = None
        if isinstance(params, PoolingParams):
            pooling = typed.convert(params, PoolingParams, path="", error=RequestError)
            params = msgspec.structs.replace(_POOLED, plugin_args=pooling.plugin_args)
        params = self.checked(params)
        if parsed is None:
            parsed = self.read(prompt)
        salt = parsed.cache_salt if extras.cache_salt is None else extras.cache_salt
        if (arrived := extras.arrival_time) is None:
            arrived = arrival_time if parsed.arrival_time is None else parsed.arrival_time
        room = 0 if pooling is not None else params.max_tokens or 1
        cut = self._cut(parsed, extras.truncate_prompt_tokens, room)
        if pooling is None:
            params = self._completed(params, len(cut.token_ids))
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=cut.token_ids,
            params=params,
            eos_token_ids=() if params.ignore_eos else self._eos_token_ids,
            arrival_time=arrived,
            priority=extras.priority,
            timeout=extras.timeout,
            tags=dict(extras.tags),
            cache_salt=salt,
            trace_headers=extras.trace_headers,
            kv_transfer_params=extras.kv_transfer_params,
            pooling_params=pooling,
            lora=extras.lora_request,
            data_parallel_rank=extras.data_parallel_rank,
            retention=extras.retention,
        )
        for name, value in cut.fields.items():
            setattr(request, name, value)
        fields, formats = self._arguments.resolve(request, extras.tools, extras.calls)
        # The arguments travel resolved; the originals would only travel twice.
        request.params = msgspec.structs.replace(request.params, **{**fields, "plugin_args": {}})
        return request, cut.text, formats

    def read(self, prompt: Prompt | GivenPrompt) -> GivenPrompt:
        """Return a prompt with its tokens. May be called in any thread, one call at a time.

        Raises:
            RequestError: it is malformed, or has no tokens.
        """
        parsed: GivenPrompt | None = None
        if isinstance(prompt, Mapping):
            mapping: Mapping[Any, Any] = copied(prompt, "prompt")
            prompt, parsed = mapping, self.parts.read_prompt(mapping, self)
        if parsed is None:
            parsed = prompt if isinstance(prompt, GivenPrompt) else read_prompt(prompt)
        if parsed.token_ids is not None or parsed.text is None:
            token_ids = checked_ids(parsed.token_ids, self._model_config.vocab_size)
        else:
            token_ids = self.tokenise(parsed.text)
        if not token_ids:
            raise RequestError("prompt: expected at least one token, got an empty prompt")
        return dataclasses.replace(parsed, token_ids=token_ids)

    def outputs_of(self, prompt: Prompt) -> Any:
        """Return the outputs that a prompt comes with, by completion; None: it has none."""
        return copied(prompt, "prompt").get(OUTPUTS) if isinstance(prompt, Mapping) else None

    def length_of(self, prompt: Prompt) -> int:
        """Return the length of a prompt's texts to tokenize; large, if it is more than texts."""
        if isinstance(prompt, Mapping):
            mapping: Mapping[Any, Any] = copied(prompt, "prompt")
            prompt = mapping
            if self.parts.reads_prompt(mapping):
                texts = (value if isinstance(value, str) else None for value in mapping.values())
                return 1 + sum(_LONG_TEXT if text is None else len(text) for text in texts)
        parsed = read_prompt(prompt)
        return 0 if parsed.text is None or parsed.token_ids is not None else len(parsed.text)

    def tokenise(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens. May be called in any thread, one call at a time.

        Raises:
            RequestError: UTF-8 cannot encode it.
        """
        typed.check_text(text, "prompt", RequestError)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

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
                "logits_processors: callables cannot travel to workers in another process; enable "
                "a factory `(params) -> callable or None` as a plugin (plugins.enable), which is "
                'called there, or use engine.in_process = true and executor.use = "uniproc"'
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
        room = self._max_model_len - prompt_length
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens: expected at most {room}, the room that the prompt leaves of "
                f"max_model_len {self._max_model_len}, got {params.min_tokens}"
            )
        room = min(params.max_tokens or room, room)
        return self.seeded(msgspec.structs.replace(params, max_tokens=room))

    def _cut(self, prompt: GivenPrompt, last: int | None, room: int) -> GivenPrompt:
        """Return a prompt with its last tokens, or as a part cuts it.

        Args:
            last: number of tokens; -1 is what leaves room for the output. A prompt without more is
                returned as it is.
            room: tokens of the output.
        """
        if last is not None and prompt.fields and prompt.cut is None:
            raise RequestError(
                "truncate_prompt_tokens: expected none for a prompt with "
                f"{', '.join(sorted(prompt.fields))}, got {last}"
            )
        if last == -1:
            last = max(self._max_model_len - room, 1)
        if last is not None:
            if last < 1:
                raise RequestError(
                    f"truncate_prompt_tokens: expected at least 1, or -1 to leave room for "
                    f"max_tokens, got {last}"
                )
            if len(prompt.token_ids) > last:
                if prompt.cut is not None:
                    prompt = prompt.cut(last)
                    ids = checked_ids(prompt.token_ids, self._model_config.vocab_size)
                else:
                    ids = prompt.token_ids[-last:]
                prompt = dataclasses.replace(prompt, token_ids=ids, text=None)
        count = len(prompt.token_ids)
        if count + min(room, 1) > self._max_model_len:
            raise PromptTooLongError.of(count, self._max_model_len, generates=room > 0)
        return prompt


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


class _TokenInput(typed.Strict):
    """A prompt that was tokenized elsewhere."""

    type: Literal["token"]
    prompt_token_ids: list[int]
    prompt: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    arrival_time: float | None = None


def read_prompt(prompt: Prompt) -> GivenPrompt:
    """Return a prompt of a form that no part has for its own, independent of it.

    These are text, token ids, `{"prompt": text}` and `{"prompt_token_ids": ids}`; or, tokenized
    elsewhere, `{"type": "token", "prompt_token_ids": ids}` with optional `prompt`, `cache_salt` and
    `arrival_time`.

    Returns:
        Its `token_ids` are unchecked; None if the text is to be tokenized.

    Raises:
        RequestError: a mapping of another form, or a list of prompts.
    """
    if isinstance(prompt, str):
        return GivenPrompt(text=prompt)
    if not isinstance(prompt, Mapping):
        token_ids = copied(prompt, "prompt") if is_list(prompt) else prompt
        _check_one(token_ids)
        return GivenPrompt(token_ids=token_ids)
    fields: dict[Any, Any] = copied(prompt, "prompt")
    if OUTPUTS in fields:
        return _with_outputs(fields)
    if "type" in fields:
        return _tokenised(fields)
    keys = [key for key in _KEYS if key in fields]
    if len(keys) != 1 or len(fields) != 1:
        raise RequestError(
            "prompt: expected a mapping with either 'prompt' or 'prompt_token_ids', "
            f"got the keys [{', '.join(sorted(map(shown, fields)))}]"
        )
    value = fields[keys[0]]
    if keys[0] == "prompt_token_ids":
        return GivenPrompt(token_ids=_listed(value))
    if not isinstance(value, str):
        raise RequestError(f"prompt: expected a string, got {type(value).__name__}")
    return GivenPrompt(text=value)


def _with_outputs(fields: dict[Any, Any]) -> GivenPrompt:
    read = read_prompt({key: value for key, value in fields.items() if key != OUTPUTS})
    if fields[OUTPUTS] is not None and read.token_ids is None:
        raise RequestError(f"{OUTPUTS}: expected prompt_token_ids with it, got a text")
    return read


def _check_one(prompt: Any) -> None:
    first = prompt[0] if is_list(prompt) and prompt else None
    if isinstance(first, str | Mapping) or is_list(first):
        items = "texts" if isinstance(first, str) else "prompts"
        raise RequestError(f"prompt: expected one prompt, got a list of {items}")


def _tokenised(prompt: dict[Any, Any]) -> GivenPrompt:
    # The ids, which may be many, are checked once, with those of all other prompts.
    rest = {key: [] if key == "prompt_token_ids" else value for key, value in prompt.items()}
    checked = typed.convert(rest, _TokenInput, path="prompt", error=RequestError)
    token_ids = _listed(prompt["prompt_token_ids"])
    return GivenPrompt(
        token_ids=token_ids,
        text=checked.prompt,
        cache_salt=checked.cache_salt,
        arrival_time=checked.arrival_time,
    )


def _listed(token_ids: Any) -> Any:
    if not is_list(token_ids):
        raise RequestError(
            f"prompt_token_ids: expected a list of token ids, got {type(token_ids).__name__}"
        )
    return copied(token_ids, "prompt_token_ids")


def checked_ids(token_ids: Any, vocab_size: int) -> list[int]:
    """Return checked token ids as a new list.

    Raises:
        RequestError: naming the item that is no token id.
    """
    if not is_list(token_ids):
        raise RequestError(
            f"prompt: expected text or a list of token ids, got {type(token_ids).__name__}"
        )
    for index, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt_token_ids[{index}]: expected a whole number from 0 to "
                f"{vocab_size - 1}, got {shown(token)}"
            )
    return list(token_ids)
