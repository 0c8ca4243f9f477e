"""AsyncLLM: a model in a process of its own, for programs that run an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from hardpoint.core.build import build_async_engine
from hardpoint.core.config import config_from
from hardpoint.core.engine.utility_calls import AsyncControlCalls
from hardpoint.core.frontend.async_engine import AsyncEngine
from hardpoint.core.frontend.input_processor import RequestExtras
from hardpoint.core.frontend.plugin_health import Health
from hardpoint.core.frontend.prompts import Prompt
from hardpoint.plugins import (
    ConfigError,
    EngineConfig,
    RequestOutput,
    SamplingParams,
    Tokenizer,
    WaitReason,
)
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.errors import EngineDeadError
from hardpoint.plugins.manifest import Manifest

from .progress import ProgressDisplay

__all__ = ["AsyncLLM"]


class AsyncLLM(AsyncControlCalls):
    """A model that generates text for many tasks of one event loop at once.

    The model runs in a process of its own, so tokenising, streaming and whatever else the program
    does overlap with it. It may be made outside of an event loop; it belongs to the one in which
    it is used first.

    Example:
        async with AsyncLLM("smollm2") as llm:
            async for output in llm.generate("The capital of France is"):
                print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | Path | Mapping[str, Any] | EngineConfig | None = None,
        dtype: str | None = None,
        max_model_len: int | None = None,
        seed: int | None = None,
        tokenizer: str | None = None,
        restart: Literal["never", "on_failure"] = "never",
    ) -> None:
        """Start the engine process and load the model; blocks until it is ready.

        Args:
            model: an alias ("smollm2"), a directory, a .gguf file or a Hugging Face id.
            config: everything else: the path of a TOML file, a mapping or an EngineConfig.
            dtype, max_model_len, seed: short for the configuration fields of the same names.
            tokenizer: short for `tokenizer.path`.
            restart: "on_failure" starts an engine that died anew, with the weights and the latest
                configuration, at most `engine.max_restarts_per_minute` times. Requests that were
                in flight fail; later ones wait for the new engine.

        Raises:
            ConfigError, PluginError, ModelError: what is wrong, with the engine's own words.
            EngineDeadError: the engine ended without a word, or was not ready in time.
        """
        named = {
            "model": model,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "seed": seed,
            "tokenizer": None if tokenizer is None else {"path": tokenizer},
        }
        self._open(*config_from(config, named, caller="AsyncLLM"), restart)

    @classmethod
    def from_resolved(
        cls,
        config: EngineConfig,
        config_sources: ConfigSources,
        *,
        restart: Literal["never", "on_failure"] = "never",
    ) -> AsyncLLM:
        """Open one from a configuration that was read elsewhere, with its config_sources."""
        llm = cls.__new__(cls)
        llm._open(config, config_sources, restart)
        return llm

    def _open(self, config: EngineConfig, config_sources: ConfigSources, restart: str) -> None:
        if restart not in ("never", "on_failure"):
            raise ConfigError(f'restart: expected "never" or "on_failure", got {restart!r}')
        origin = config_sources.of("engine.in_process")
        if config.engine.in_process and origin != "default":
            raise ConfigError(
                "engine.in_process: expected false, for AsyncLLM always runs its engine in a "
                f"process of its own, got true (from {origin})"
            )
        engine = msgspec.structs.replace(config.engine, in_process=False)
        config = msgspec.structs.replace(config, engine=engine)
        with ProgressDisplay() as display:
            self._engine: AsyncEngine = build_async_engine(
                config, config_sources, restart=restart == "on_failure", progress=display.report
            )

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        tags: Mapping[str, str] | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt; yield outputs as they come, as `sampling_params.output_kind` says.

        Outputs that the consumer is too slow for are merged into one, so nothing piles up.
        Leaving the loop early, or cancelling the task that runs it, aborts the request.

        Args:
            prompt: as `LLM.generate` takes it.
            sampling_params: never changed; None is what the model's files recommend, see
                `default_sampling_params`.
            request_id: outputs carry it; None numbers them. Live requests may share one.
            priority: smaller is more important.
            timeout: seconds after which it ends with finish reason "timeout".
            tags: free words for policies and sinks, such as {"tenant": "acme"}.
            cache_salt: prompts with different salts never share cached beginnings.

        Raises:
            RequestError: prompt or parameters are wrong.
            OverloadedError: more would wait than `scheduler.max_waiting`.
            EngineDeadError: the engine died; the request may be sent again.
            EngineClosedError: the engine was closed.
        """
        said = {"priority": priority, "timeout": timeout, "tags": tags, "cache_salt": cache_salt}
        given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        extras = RequestExtras(**given)
        return self._engine.generate(prompt, sampling_params, request_id, extras)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by their ids; each yields what it has, with finish reason "abort".

        Unknown ids are ignored.
        """
        await self._engine.abort(request_ids)

    @property
    def config(self) -> EngineConfig:
        """The configuration, with what was left open filled in."""
        return self._engine.parts.config

    @property
    def manifest(self) -> Manifest:
        """The plugins that are on."""
        return self._engine.parts.plugins.manifest

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.parts.tokenizer

    @property
    def engine_pid(self) -> int:
        """The process id of the engine; another one after it was started anew."""
        return self._engine.engine_pid

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the model can do, as the engine said when it was opened, such as "generate"."""
        return self._engine.parts.supported_tasks

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a prompt that brings none: what the model's files recommend."""
        return self._engine.default_sampling_params()

    @property
    def is_running(self) -> bool:
        """Whether the engine serves, as far as is known; not while it is started anew."""
        return self._engine.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine is dead and is not started anew."""
        return self._engine.errored

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine is dead, if it is."""
        return self._engine.dead_error

    async def health(self) -> Health:
        """Return which plugins failed or are quarantined, and how often the engine was restarted.

        Raises:
            EngineDeadError: the engine is dead and is not started anew.
        """
        return await self._engine.health()

    async def why_waiting(self, request_id: str) -> dict[int, WaitReason | None]:
        """Return why the completions of a request got no tokens in the last step, by index.

        None stands for those that got some; completions that ended are left out.

        Raises:
            RequestError: no live request has that id.
        """
        return await self._engine.why_waiting(request_id)

    async def set_policy(self, use: str, options: Mapping[str, Any] | None = None) -> None:
        """Put another scheduling policy in the place of the one there is; no request is lost.

        Args:
            use: entry-point name or FQCN.
            options: the policy's own.

        Raises:
            ConfigError, PluginError: the policy cannot be had; the old one stays.
        """
        await self._engine.set_policy(use, options)

    def close(self) -> None:
        """End the engine; whoever waits for it gets EngineClosedError. Twice does nothing.

        It blocks for a moment; `aclose` does not block the event loop.
        """
        self._engine.close()

    async def aclose(self) -> None:
        """Do the same in another thread."""
        await asyncio.to_thread(self._engine.close)

    async def __aenter__(self) -> AsyncLLM:
        """Return itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.aclose()

    async def _call_utility(self, method: str, *args: Any) -> Any:
        return await self._engine.call_utility(method, *args)
