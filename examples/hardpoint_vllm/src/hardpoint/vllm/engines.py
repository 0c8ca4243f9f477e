"""vLLM's engines: one for programs that step it, and one for the tasks of an event loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hardpoint import AsyncLLM as NativeAsync
from hardpoint import PoolingRequestOutput as NativePooling
from hardpoint.errors import EngineDeadError as EngineDeadError
from hardpoint.errors import HardpointError
from hardpoint.requests import make_extras

from .engine_args import AsyncEngineArgs, EngineArgs
from .inputs import native_prompt
from .llm import LLM
from .metrics import Metric
from .outputs import PoolingRequestOutput, RequestOutput, pooled
from .params import PoolingParams, SamplingParams, request_options
from .params import sampling_params as vllm_params
from .special import add_stat_loggers
from .tokenizer import TokenizerLike

AsyncEngineDeadError = EngineDeadError
EngineGenerateError = HardpointError


def _model_config(native: Any) -> SimpleNamespace:
    """Return the fields of vLLM's ModelConfig that programs read."""
    config, tokenizer = native.config, native.tokenizer
    return SimpleNamespace(
        model=str(config.model),
        tokenizer=str(config.tokenizer.path or config.model),
        max_model_len=config.max_model_len,
        dtype=config.dtype,
        seed=config.seed,
        get_vocab_size=lambda: tokenizer.vocab_size,
        is_multimodal_model=native.model.takes_images,
        hf_config=_hf_config(tokenizer.context.files.path),
        runner_type="generate" if "generate" in native.model.supported_tasks else "pooling",
    )


def _vllm_config(native: Any) -> SimpleNamespace:
    """Return the fields of vLLM's VllmConfig that programs read."""
    config = native.config
    cache, scheduler, parallel = config.kv_cache, config.scheduler, config.parallel
    return SimpleNamespace(
        model_config=_model_config(native),
        cache_config=SimpleNamespace(
            block_size=cache.block_size,
            num_gpu_blocks=cache.num_blocks,
            cache_dtype=cache.dtype,
            enable_prefix_caching=cache.prefix_caching,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=config.max_model_len,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=parallel.tensor,
            pipeline_parallel_size=parallel.pipeline,
            data_parallel_size=parallel.data,
            world_size=parallel.tensor * parallel.pipeline,
        ),
    )


def _hf_config(path: Path) -> Any:
    """Return the fields of a model's config.json, or the configuration that a GGUF file has."""
    if path.suffix == ".gguf":
        from transformers import AutoConfig  # noqa: PLC0415

        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    file = path / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if "id2label" in fields:
        fields["id2label"] = {int(number): label for number, label in fields["id2label"].items()}
    return SimpleNamespace(**fields)


class LLMEngine:
    """An engine to which a program adds requests, and which it steps."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._native = llm, llm.native
        self._tasks: dict[str, str] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> LLMEngine:
        """Open an engine."""
        return cls(LLM.from_engine_args(engine_args))

    @property
    def model_config(self) -> SimpleNamespace:
        """Fields of the model's configuration."""
        return _model_config(self._native)

    @property
    def vllm_config(self) -> Any:
        """The fields of vLLM's configuration that programs read."""
        return _vllm_config(self._native)

    def get_model_config(self) -> SimpleNamespace:
        """Return `model_config`."""
        return self.model_config

    def get_tokenizer(self) -> TokenizerLike:
        """Return the tokenizer."""
        return self._llm.get_tokenizer()

    @property
    def tokenizer(self) -> TokenizerLike:
        """The tokenizer."""
        return self.get_tokenizer()

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        **_: Any,
    ) -> str:
        """Add a request."""
        del arrival_time
        prompt, salt = native_prompt(prompt)
        options = request_options(
            params,
            lora_request,
            tokenization_kwargs,
            cache_salt=salt,
            trace_headers=trace_headers,
            priority=priority,
        )
        if isinstance(params, PoolingParams):
            native: Any = params.native()
            self._tasks[request_id] = str(native.task)
        else:
            native = params.native(self._llm.processors)
        self._native.llm_engine.add_request(request_id, prompt, native, make_extras(**options))
        return request_id

    def abort_request(self, request_ids: str | list[str], *_: Any) -> None:
        """End requests."""
        self._native.llm_engine.abort_requests(request_ids)

    def step(self) -> list[RequestOutput | PoolingRequestOutput[Any]]:
        """Run a step; return its outputs."""
        outputs: list[Any] = []
        for output in self._native.llm_engine.step():
            if isinstance(output, NativePooling):
                outputs.append(pooled(output, self._tasks.pop(output.request_id, "")))
            else:
                outputs.append(RequestOutput.of(output))
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether a request has not ended."""
        return self._native.llm_engine.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return self._native.llm_engine.get_num_unfinished_requests()

    def get_metrics(self) -> list[Metric]:
        """Return the metrics."""
        return self._llm.get_metrics()

    def reset_prefix_cache(self, *_: Any, **__: Any) -> bool:
        """Clear the prefix cache."""
        return self._llm.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release memory."""
        self._llm.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again."""
        self._llm.wake_up(tags)

    def collective_rpc(self, method: Any, *args: Any, **options: Any) -> list[Any]:
        """Call a method of every worker."""
        return self._llm.collective_rpc(method, *args, **options)

    def shutdown(self) -> None:
        """Release all."""
        self._llm.close()


class AsyncLLM:
    """vLLM's engine for the tasks of an event loop."""

    def __init__(self, engine_args: EngineArgs, stat_loggers: Sequence[type] = ()) -> None:
        translated = engine_args.translated()
        self._processors = translated.processors
        if stat_loggers:
            add_stat_loggers(stat_loggers, translated)
        self._native = NativeAsync(config=translated.config())

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

    @property
    def model_config(self) -> SimpleNamespace:
        """Fields of the model's configuration."""
        return _model_config(self._native)

    @property
    def vllm_config(self) -> Any:
        """The fields of vLLM's configuration that programs read."""
        return _vllm_config(self._native)

    async def get_model_config(self) -> SimpleNamespace:
        """Return `model_config`."""
        return self.model_config

    async def get_tokenizer(self, *_: Any) -> TokenizerLike:
        """Return the tokenizer."""
        return self.tokenizer

    @property
    def tokenizer(self) -> TokenizerLike:
        """The tokenizer."""
        return TokenizerLike(self._native.tokenizer, str(self._native.config.model))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model's files recommend."""
        return vllm_params(self._native.model.default_sampling_params())

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: Any = None,
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
        params = sampling_params.native(self._processors)
        async for output in self._native.generate(prompt, params, request_id, **options):
            yield RequestOutput.of(output)

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        **_: Any,
    ) -> AsyncIterator[PoolingRequestOutput[Any]]:
        """Yield the result of a pooling request, or the output of the IO processor."""
        if isinstance(prompt, Mapping) and "data" in prompt:
            output = await self._native.plugins.process(prompt["data"])
            yield PoolingRequestOutput(request_id, output, [])
            return
        prompt, salt = native_prompt(prompt)
        params = pooling_params.native()
        options = request_options(pooling_params, lora_request, cache_salt=salt)
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
