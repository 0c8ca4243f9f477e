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
        in_process: bool = True,
    ) -> None:
        """Prepare.

        Args:
            seed: makes the seeds of requests that bring none repeatable.
            in_process: whether the engine runs in this process, so that callables reach it.
        """
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._in_process = in_process
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
        token_ids: list[int] | None = None,
    ) -> tuple[EngineCoreRequest, str | None]:
        """Return the request and the prompt's text, if it was given as text.

        Args:
            token_ids: of a prompt given as text, from `tokenise`; None tokenises it here.

        Raises:
            RequestError: naming the field, its value and what would be right.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params: expected SamplingParams, got {type(params).__name__}"
            )
        params = self._checked(params)
        extras = typed.convert(extras, RequestExtras, path="", error=RequestError)
        text, token_ids = self._tokens(prompt, token_ids)
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

    def text_of(self, prompt: Prompt) -> str | None:
        """Return the text that is to be tokenised, None if there is none."""
        if isinstance(prompt, Mapping):
            prompt = self._from_mapping(prompt)
        return prompt if isinstance(prompt, str) else None

    def tokenise(self, text: str) -> list[int]:
        """Return a text's tokens. May be called in any thread, one call at a time."""
        return self._tokenizer.encode(text)

    def _checked(self, params: SamplingParams) -> SamplingParams:
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

    def _tokens(self, prompt: Prompt, token_ids: list[int] | None) -> tuple[str | None, list[int]]:
        text: str | None = None
        if isinstance(prompt, Mapping):
            prompt = self._from_mapping(prompt)
        if isinstance(prompt, str):
            text = prompt
            token_ids = self.tokenise(text) if token_ids is None else token_ids
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
