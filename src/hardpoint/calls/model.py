"""The group `model` of LLM and AsyncLLM: tasks, default parameters, prompts as tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from hardpoint.chat import Chat, Messages
from hardpoint.core.frontend.llm_engine import LLMEngine
from hardpoint.images import PromptImages
from hardpoint.plugins import EngineConfig, SamplingParams
from hardpoint.plugins.request_options import ChatOptions
from hardpoint.requests import make_extras, takes_options
from hardpoint.typed import copied, is_list

from .running import AsyncRequests, SyncRequests

if TYPE_CHECKING:
    from hardpoint.process.async_engine import AsyncEngine

__all__ = ["AsyncModelGroup", "ModelGroup", "ShownModel", "chat_params"]


class ShownModel:
    """A base of LLM and AsyncLLM: a short text of an object, for tracebacks and notebooks."""

    def __repr__(self) -> str:
        name, engine = type(self).__name__, getattr(self, "_engine", None)
        if engine is None:  # its construction failed
            return f"<{name}>"
        config: EngineConfig = engine.parts.config
        return f"{name}({config.model!r}, max_model_len={config.max_model_len})"


def chat_params(sampling_params: Any, default: SamplingParams) -> Any:
    """Return the sampling parameters of conversations, one or a list; see `for_chat`.

    Args:
        sampling_params: as the caller gave them; None is the default.
        default: `default_sampling_params` of the model.
    """
    if sampling_params is None:
        return default.for_chat()
    if is_list(sampling_params):
        return [
            chat_params(params, default) for params in copied(sampling_params, "sampling_params")
        ]
    return (
        sampling_params.for_chat()
        if isinstance(sampling_params, SamplingParams)
        else sampling_params
    )


class ModelGroup:
    """The model of an LLM: `llm.model`."""

    def __init__(self, engine: LLMEngine, requests: SyncRequests) -> None:
        self._engine, self._requests = engine, requests

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The model's tasks, such as "generate", as the engine reported them at start."""
        return self._engine.parts.supported_tasks

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images."""
        return bool(self._requests.images.tokens)

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a prompt without any, as the model's files recommend."""
        return self._engine.default_sampling_params()

    @takes_options
    def apply_chat_template(
        self, messages: Messages, **options: Unpack[ChatOptions]
    ) -> Mapping[str, Any]:
        """Return a conversation as a prompt: `prompt` is its text, `prompt_token_ids` its ids.

        Args:
            messages: as for `chat`.
            options: `ChatOptions`; `parallel_tool_calls` changes nothing.

        Raises:
            RequestError: the model has no chat template, or it rejects the messages.
        """
        return self._requests.rendered(messages, Chat(**options))


class AsyncModelGroup:
    """The model of an AsyncLLM: `llm.model`."""

    def __init__(self, engine: AsyncEngine, requests: AsyncRequests) -> None:
        self._engine, self._requests = engine, requests

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """The model's tasks, such as "generate", as the engine reported them at start."""
        return self._engine.parts.supported_tasks

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images."""
        return bool(PromptImages(self._engine.parts).tokens)

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a prompt without any, as the model's files recommend."""
        return self._engine.default_sampling_params()

    @takes_options
    async def apply_chat_template(
        self, messages: Messages, **options: Unpack[ChatOptions]
    ) -> Mapping[str, Any]:
        """Return a conversation as a prompt: `prompt` is its text, `prompt_token_ids` its ids.

        The template is rendered in another thread.

        Args:
            messages: as for `chat`.
            options: `ChatOptions`; `parallel_tool_calls` changes nothing.

        Raises:
            RequestError: the model has no chat template, or it rejects the messages.
        """
        return await self._requests.rendered(messages, Chat(**options))

    async def prompt_tokens(self, prompt: Mapping[str, Any]) -> list[int]:
        """Return the tokens that a prompt would have, read as `generate` reads it.

        Raises:
            RequestError: it is malformed.
        """
        ids = prompt.get("prompt_token_ids")
        is_empty = isinstance(ids, list) and not ids  # as that of a template may be
        return [] if is_empty else await self._engine.prompt_tokens(prompt)

    async def constrained_params(
        self,
        prompt: Mapping[str, Any],
        sampling_params: SamplingParams,
        **options: Unpack[ChatOptions],
    ) -> SamplingParams:
        """Return the parameters of a conversation, with the grammar of its tool calls.

        With them, `generate` answers the prompt as `chat` answers the conversation.

        Args:
            prompt: result of `apply_chat_template`.
            sampling_params: parameters of the conversation.
            options: `ChatOptions`; the tools, their choice and `parallel_tool_calls` count.

        Raises:
            RequestError: the request would be rejected.
        """
        chat = Chat(**options)
        extras = make_extras(tools=chat.schemas, calls=chat.calls)
        return self._engine.constrained_params(prompt, sampling_params, extras)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens; a long text is tokenized in another thread.

        Raises:
            RequestError: the text cannot be encoded.
        """
        return await self._engine.tokenise(text, add_special_tokens=add_special_tokens)
