"""vLLM's engine for the tasks of an event loop."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from hardpoint import AsyncLLM as NativeAsync
from hardpoint.errors import EngineDeadError as EngineDeadError
from hardpoint.errors import HardpointError, RequestError

from .engine_args import AsyncEngineArgs, EngineArgs
from .engine_config import PARTS, ConfigFields, ConfiguredEngine, EngineModelConfig
from .engine_internals import checked_method, no_member, worker_hint
from .inputs import native_prompt
from .outputs import PoolingRequestOutput, RequestOutput, pooled
from .params import PoolingParams, SamplingParams, request_options
from .params import sampling_params as vllm_params
from .special import add_stat_loggers, add_statistics
from .tokenizer import TokenizerLike

AsyncEngineDeadError = EngineDeadError
EngineGenerateError = HardpointError


class _Engine(ConfigFields):
    """vLLM V0's engine behind an AsyncLLMEngine.

    The errors of other members name counterparts.
    """

    def __getattr__(self, name: str) -> Any:
        raise no_member("engine", name)


class AsyncLLM(ConfiguredEngine):
    """vLLM's engine for the tasks of an event loop."""

    def __init__(self, engine_args: EngineArgs, stat_loggers: Sequence[type] = ()) -> None:
        translated = engine_args.translated()
        if not engine_args.disable_log_stats:
            add_statistics(translated)
        self._processors = translated.processors
        if stat_loggers:
            add_stat_loggers(stat_loggers, translated)
        self._native = NativeAsync(config=translated.config())
        self._tokenizer = TokenizerLike(self._native.tokenizer, str(self._native.config.model))

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs | EngineArgs,
        *_: Any,
        stat_loggers: Sequence[type] | None = None,
        **__: Any,
    ) -> AsyncLLM:
        """Open an engine, with stat loggers in addition to the sinks of `stats.sinks`."""
        return cls(engine_args, stat_loggers or ())

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, **_: Any) -> AsyncLLM:
        """Open an engine by the result of `EngineArgs.create_engine_config`."""
        return cls(EngineArgs(**vllm_config.given))

    @property
    def native(self) -> NativeAsync:
        """Hardpoint's AsyncLLM."""
        return self._native

    async def get_model_config(self) -> EngineModelConfig:
        """Return `model_config`."""
        return self.model_config

    async def get_tokenizer(self, *_: Any) -> TokenizerLike:
        """Return the tokenizer."""
        return self.tokenizer

    @property
    def tokenizer(self) -> TokenizerLike:
        """The tokenizer."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model's files recommend."""
        return vllm_params(self._native.model.default_sampling_params())

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: Any = None,
        *,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request as they come, by `sampling_params.output_kind`."""
        prompt, salt = native_prompt(prompt)
        options = request_options(
            sampling_params,
            lora_request,
            tokenization_kwargs,
            cache_salt=salt,
            trace_headers=trace_headers,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
        )
        params, start = sampling_params.native(self._processors), time.time()
        async for output in self._native.generate(prompt, params, request_id, **options):
            yield RequestOutput.of(output, start)

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | PoolingParams, **options: Any
    ) -> AsyncIterator[Any]:
        """Return an iterator of a request's outputs, which starts it."""
        if isinstance(params, PoolingParams):
            return self.encode(prompt, params, request_id, **options)
        return self.generate(prompt, params, request_id, **options)

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        *,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> AsyncIterator[PoolingRequestOutput[Any]]:
        """Yield the result of a pooling request, or the output of the IO processor."""
        if isinstance(prompt, Mapping) and "data" in prompt:
            output = await self._native.plugins.process(prompt["data"])
            yield PoolingRequestOutput(request_id, output, [])
            return
        prompt, salt = native_prompt(prompt)
        params = pooling_params.native()
        options = request_options(
            pooling_params,
            lora_request,
            tokenization_kwargs,
            cache_salt=salt,
            trace_headers=trace_headers,
            priority=priority,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        async for output in self._native.encode(prompt, params, request_id, **options):
            yield pooled(output, "")

    async def abort(self, request_id: str | list[str], **_: Any) -> None:
        """End requests."""
        await self._native.abort(request_id)

    async def check_health(self) -> None:
        """Raise the error of an engine that has ended.

        Raises:
            EngineDeadError: it has.
        """
        if (error := self._native.dead_error) is not None:
            raise error

    async def is_tracing_enabled(self) -> bool:
        """Return whether traces are exported."""
        return "opentelemetry" in self._native.config.stats.sinks

    async def do_log_stats(self) -> None:
        """Do nothing: sinks log on their own (`stats.sinks`)."""

    async def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        """Clear the prefix cache."""
        await self._native.reset_prefix_cache()
        return True

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release memory."""
        await self._native.sleep(level=level, mode=mode)  # type: ignore[arg-type]

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again."""
        await self._native.wake_up(tags=tags)

    async def is_sleeping(self) -> bool:
        """Return whether memory is released."""
        return bool(await self._native.engines.is_sleeping())

    async def pause_generation(
        self, *, mode: str = "abort", clear_cache: bool = True, **_: Any
    ) -> None:
        """Stop generating."""
        await self._native.engines.pause(mode=mode, clear_cache=clear_cache)  # type: ignore[arg-type]

    async def resume_generation(self) -> None:
        """Continue after a pause."""
        await self._native.engines.resume()

    async def is_paused(self) -> bool:
        """Return whether generating is stopped."""
        return bool(await self._native.engines.is_paused())

    async def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter."""
        return bool(await self._native.adapters.add(lora_request.native()))

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; return whether there was one."""
        return await self._native.adapters.remove(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the numbers of the loaded adapters."""
        return {adapter.id for adapter in await self._native.adapters.list()}

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in CPU memory; return whether there is one."""
        return await self._native.adapters.pin(lora_id)

    async def get_vllm_config(self) -> Any:
        """Return `vllm_config`."""
        return self.vllm_config

    async def get_supported_tasks(self) -> Sequence[str]:
        """Return the tasks of the model."""
        return tuple(self._native.model.supported_tasks)

    async def reset_mm_cache(self) -> None:
        """Clear the embeddings of images."""
        if self._native.model.takes_images:
            await self._native.engines.reset_encoder_cache()

    async def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by its name; see `LLM.collective_rpc`."""
        name = checked_method(method, kwargs)
        try:
            return list(await self._native.collective_rpc(name, args=list(args), timeout=timeout))
        except RequestError as error:
            raise RequestError(f"{error}; {worker_hint(name)}") from None

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Profile the workers; `profiler_config` names the folder."""
        del profile_prefix
        await self._native.debug.start_profile()

    async def stop_profile(self) -> None:
        """Write the profiles."""
        await self._native.debug.stop_profile()

    @property
    def engine(self) -> ConfigFields:
        """vLLM V0's engine behind this one: its configuration and tokenizer."""
        config, tokenizer = self.vllm_config, self.tokenizer
        return _Engine(
            "engine",
            vllm_config=config,
            get_model_config=lambda: config.model_config,
            tokenizer=tokenizer,
            get_tokenizer=lambda: tokenizer,
            **{name: getattr(config, name) for name in PARTS},
        )

    def __getattr__(self, name: str) -> Any:
        raise no_member("AsyncLLM", name)

    @property
    def is_running(self) -> bool:
        """Whether it serves."""
        return self._native.is_running

    @property
    def errored(self) -> bool:
        """Whether it has ended by an error."""
        return self._native.errored

    @property
    def is_stopped(self) -> bool:
        """Whether it has ended."""
        return not self._native.is_running

    @property
    def dead_error(self) -> BaseException | None:
        """The error that ended it."""
        return self._native.dead_error

    def shutdown(self, *_: Any) -> None:
        """Release all."""
        self._native.close()

    shutdown_background_loop = shutdown


AsyncLLMEngine = AsyncLLM
EngineClient = AsyncLLM
