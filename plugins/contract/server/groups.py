"""Groups of members of an open model, as `AsyncGenerator` has them."""

from __future__ import annotations

import collections.abc as c
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol, Unpack

from hardpoint.plugins.requests.lora import LoRARequest
from hardpoint.plugins.requests.options import ChatOptions
from hardpoint.plugins.requests.params import SamplingParams
from hardpoint.plugins.requests.stats import SchedulerStats
from hardpoint.plugins.scheduling.step_record import LiveRequest

from .engine_set import EngineSet, LoadReport
from .settings import LiveSettings

PauseModeName = Literal["abort", "wait", "keep"]


class AdapterControl(Protocol):
    """The adapters (LoRA) of an open model."""

    async def add(self, lora: LoRARequest) -> LoRARequest:
        """Load an adapter; one of the same name is replaced for the requests that follow."""

    async def remove(self, lora_id: int, mode: Literal["drain", "end"] = "drain") -> bool:
        """Unload an adapter; return whether there was one."""

    async def list(self) -> c.Sequence[LoRARequest]:
        """Return the loaded adapters."""

    async def pin(self, lora_id: int) -> bool:
        """Keep an adapter in CPU memory until it is removed; return whether there is one."""

    async def resolve(self, name: str) -> Path | LoRARequest | None:
        """Return the adapter that the enabled resolvers find for a name; None if there is none.

        Raises:
            RequestError: one rejects the name.
            PluginFaultError: one failed, or took too long.
        """


class EngineControl(Protocol):
    """The engines of an open model; `ControlCalls` of the engine documents the control calls."""

    async def pause(self, mode: PauseModeName = "abort", *, clear_cache: bool = True) -> None:
        """Stop generating until `resume`; return once no step is under way."""

    async def resume(self) -> None:
        """Continue after a pause."""

    async def is_paused(self) -> bool:
        """Return whether the engine is paused."""

    async def is_sleeping(self) -> bool:
        """Return whether the engine is asleep."""

    async def scheduler_stats(self) -> SchedulerStats:
        """Return how many requests run and wait, and the state of the KV cache."""

    async def live_requests(self, external_ids: Sequence[str] | None = None) -> list[LiveRequest]:
        """Return live completions: all, or the completions of some requests by the user's ids."""

    async def reset_encoder_cache(self) -> None:
        """Clear the embeddings of images and the like."""

    async def load(self) -> LoadReport:
        """Return the load of each engine; usually without a question to them."""

    async def scale(self, num_engines: int, *, drain_seconds: float = 30.0) -> EngineSet:
        """Start or retire engines, so that there are so many; see `LLM.engines.scale`."""

    async def retire(self, ranks: Sequence[int], *, drain_seconds: float = 30.0) -> EngineSet:
        """End engines by rank, once their requests have ended or the time is up."""

    def settings(self) -> LiveSettings:
        """Return the settings, with the origin of each, and the generation of the plugins."""


class WeightControl(Protocol):
    """The weights of an open model."""

    async def update(
        self,
        weights: str | PathLike[str] | Mapping[str, Any],
        *,
        version: str | None = None,
        mode: PauseModeName = "keep",
        recompute: bool = True,
    ) -> str:
        """Replace weights of the model; return their version."""


class DebugControl(Protocol):
    """Profiles of an open model."""

    async def start_profile(self) -> None:
        """Start profiling the workers."""

    async def stop_profile(self) -> list[str]:
        """Stop profiling; return the files that were written."""


class ModelControl(Protocol):
    """The model itself: tasks, default parameters, tokens of prompts."""

    @property
    def supported_tasks(self) -> Sequence[str]:
        """The tasks of the model, such as "generate" and "embed"."""

    @property
    def takes_images(self) -> bool:
        """Whether prompts and conversations may have images."""

    def default_sampling_params(self) -> SamplingParams:
        """Return the default parameters of a prompt, as the model's files recommend them."""

    async def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> Mapping[str, Any]:
        """Return a conversation as a prompt: `prompt` is its text, `prompt_token_ids` its ids."""

    async def prompt_tokens(self, prompt: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a prompt, including the tokens of its images.

        Raises:
            RequestError: it is malformed.
        """

    async def constrained_params(
        self,
        prompt: Mapping[str, Any],  # noqa: ARG002
        sampling_params: SamplingParams,
        **options: Unpack[ChatOptions],  # noqa: ARG002
    ) -> SamplingParams:
        """Return the parameters of a conversation, with the grammar of its tool calls."""
        return sampling_params

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens; a long text is tokenized in another thread."""


class PromptControl(Protocol):
    """The default parameters and the chat template of an open model."""

    def default_sampling_params(self) -> SamplingParams:
        """Return the default parameters of a prompt, as the model's files recommend them."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return a conversation as a prompt: `prompt` is its text, `prompt_token_ids` its ids.

        Raises:
            RequestError: the model has no chat template, or it rejects the messages.
        """
