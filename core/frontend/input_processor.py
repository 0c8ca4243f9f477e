"""The input processor: from what a user passes to a request that the engine can trust."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hardpoint.plugins import (
    EngineCoreRequest,
    ModelConfig,
    RequestError,
    SamplingParams,
    Tokenizer,
    typed,
)

from .plugin_arguments import PluginArguments

__all__ = ["NO_EXTRAS", "InputProcessor", "Prompt", "RequestExtras"]

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`."""


class RequestExtras(typed.Strict):
    """What a request may say beside prompt and sampling parameters.

    Attributes:
        priority: smaller is more important.
        timeout: seconds from now after which it ends with finish reason "timeout", whether it
            runs or waits; None is never.
        tags: free words about it, such as {"tenant": "acme"}; for policies and sinks.
        cache_salt: requests with different salts never share cached prompts.
    """

    priority: int = 0
    timeout: Annotated[float, Meta(gt=0)] | None = None
    tags: dict[str, str] = {}
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None


NO_EXTRAS = RequestExtras()


class InputProcessor:
    """Checks parameters, tokenises prompts, resolves plugin arguments. Sends nothing."""

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        arguments: PluginArguments,
        *,
        max_model_len: int,
        seed: int | None,
    ) -> None:
        """`seed` makes the seeds of requests that bring none repeatable."""
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._arguments = arguments
        self._eos_token_ids = sorted({*model_config.eos_token_ids, *tokenizer.eos_token_ids})
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        extras: RequestExtras = NO_EXTRAS,
        *,
        arrival_time: float = 0.0,
    ) -> tuple[EngineCoreRequest, str | None]:
        """Return the request and the prompt's text, if it was given as text.

        Raises:
            RequestError: naming the field, its value and what would be right.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params: expected SamplingParams, got {type(params).__name__}"
            )
        params = self._checked(params)
        extras = typed.convert(extras, RequestExtras, path="", error=RequestError)
        text, token_ids = self._tokens(prompt)
        params = self._completed(params, len(token_ids))
        eos = [] if params.ignore_eos else self._eos_token_ids
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=list(eos),
            arrival_time=arrival_time,
            priority=extras.priority,
            timeout=extras.timeout,
            tags=extras.tags,
            cache_salt=extras.cache_salt,
        )
        request.plugin_args = self._arguments.resolve(request)
        # The arguments travel resolved; the originals would only travel twice.
        request.params = msgspec.structs.replace(params, plugin_args={})
        return request, text

    def _checked(self, params: SamplingParams) -> SamplingParams:
        params = params.checked()
        vocab_size = self._model_config.vocab_size
        for field in ("logprobs", "prompt_logprobs"):
            if (getattr(params, field) or 0) > vocab_size:
                raise RequestError(
                    f"{field}: expected at most the vocabulary's {vocab_size}, "
                    f"got {getattr(params, field)}"
                )
        for index, token in enumerate(params.stop_token_ids):
            if token >= vocab_size:
                raise RequestError(
                    f"stop_token_ids[{index}]: expected a token id below {vocab_size}, got {token}"
                )
        return params

    def _completed(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """Fill in what was left open: the length that fits, and a seed."""
        room = self._max_model_len - prompt_length
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens: expected at most {room}, the room that the prompt leaves of "
                f"max_model_len {self._max_model_len}, got {params.min_tokens}"
            )
        return msgspec.structs.replace(
            params,
            max_tokens=min(params.max_tokens or room, room),
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
        )

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: str | None = None
        if isinstance(prompt, Mapping):
            prompt = self._from_mapping(prompt)
        if isinstance(prompt, str):
            text = prompt
            token_ids = self._tokenizer.encode(text)
        else:
            token_ids = self._checked_ids(prompt)
        if not token_ids:
            raise RequestError("prompt: expected at least one token, got an empty prompt")
        longest = self._max_model_len - 1
        if len(token_ids) > longest:
            raise RequestError(
                f"prompt: expected at most {longest} tokens (max_model_len {self._max_model_len} "
                f"less one to generate), got {len(token_ids)}"
            )
        return text, token_ids

    def _from_mapping(self, prompt: Mapping[str, Any]) -> str | Sequence[int]:
        keys = [key for key in ("prompt", "prompt_token_ids") if key in prompt]
        if len(keys) != 1 or len(prompt) != 1:
            raise RequestError(
                "prompt: expected a mapping with either 'prompt' or 'prompt_token_ids', "
                f"got the keys {sorted(map(str, prompt))}"
            )
        value: str | Sequence[int] = prompt[keys[0]]
        if keys[0] == "prompt" and not isinstance(value, str):
            raise RequestError(f"prompt: expected a string, got {type(value).__name__}")
        return value

    def _checked_ids(self, token_ids: Any) -> list[int]:
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, bytes | bytearray):
            raise RequestError(
                f"prompt: expected text or a list of token ids, got {type(token_ids).__name__}"
            )
        vocab_size = self._model_config.vocab_size
        for index, token in enumerate(token_ids):
            if type(token) is not int or not 0 <= token < vocab_size:
                raise RequestError(
                    f"prompt_token_ids[{index}]: expected a whole number from 0 to "
                    f"{vocab_size - 1}, got {token!r}"
                )
        return list(token_ids)
