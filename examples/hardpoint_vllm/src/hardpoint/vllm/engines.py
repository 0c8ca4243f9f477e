"""vLLM's engine for programs that step it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint import PoolingRequestOutput as NativePooling
from hardpoint.calls.adapters import with_adapters
from hardpoint.requests import make_extras

from .engine_args import EngineArgs
from .engine_config import PARTS, ConfiguredEngine, EngineModelConfig
from .engine_internals import EngineCore, ModelExecutor, no_member
from .inputs import native_prompt
from .llm import LLM
from .metrics import Metric
from .outputs import PoolingRequestOutput, RequestOutput, pooled
from .params import PoolingParams, SamplingParams, request_options
from .tokenizer import TokenizerLike


class LLMEngine(ConfiguredEngine):
    """An engine to which a program adds requests, and which it steps."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._native = llm, llm.native

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> LLMEngine:
        """Open an engine."""
        return cls(LLM.from_engine_args(engine_args))

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, **_: Any) -> LLMEngine:
        """Open an engine by the result of `EngineArgs.create_engine_config`."""
        return cls.from_engine_args(EngineArgs(**vllm_config.given))

    def get_model_config(self) -> EngineModelConfig:
        """Return `model_config`."""
        return self.model_config

    @property
    def native(self) -> Any:
        """Hardpoint's LLM."""
        return self._native

    @property
    def engine_core(self) -> EngineCore:
        """Ends the engine."""
        return EngineCore(self)

    @property
    def model_executor(self) -> ModelExecutor:
        """Loads weights, and ends the engine."""
        return ModelExecutor(self)

    @model_executor.deleter
    def model_executor(self) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> Any:
        """Return a part of the configuration.

        Raises:
            AttributeError: it is another member; names what there is instead.
        """
        if name in PARTS:
            return getattr(self.vllm_config, name)
        raise no_member("LLMEngine", name)

    def get_tokenizer(self) -> TokenizerLike:
        """Return the tokenizer."""
        return self._llm.get_tokenizer()

    get_tokenizer_group = get_tokenizer

    def get_supported_tasks(self) -> Sequence[str]:
        """Return the tasks of the model."""
        return self._llm.supported_tasks

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
            self._llm.pooling_tasks[request_id] = str(native.task)
        else:
            native = params.native(self._llm.processors)
        extras = make_extras(**with_adapters(self._native.adapters, options))
        self._native.llm_engine.add_request(request_id, prompt, native, extras)
        self._llm.arrivals[request_id] = arrival_time or time.time()
        return request_id

    def abort_request(self, request_ids: str | list[str], *_: Any) -> None:
        """End requests."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self._llm.arrivals.pop(request_id, None)
        self._native.llm_engine.abort_requests(request_ids)

    def step(self) -> list[RequestOutput | PoolingRequestOutput[Any]]:
        """Run a step; return its outputs."""
        outputs: list[Any] = []
        tasks, arrivals = self._llm.pooling_tasks, self._llm.arrivals
        for output in self._native.llm_engine.step():
            arrival = arrivals.get(output.request_id, 0.0)
            if isinstance(output, NativePooling):
                outputs.append(pooled(output, tasks.pop(output.request_id, "")))
            else:
                outputs.append(RequestOutput.of(output, arrival))
            if output.finished:
                arrivals.pop(output.request_id, None)
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

    def is_sleeping(self) -> bool:
        """Return whether memory is released."""
        return bool(self._native.engines.is_sleeping())

    def reset_mm_cache(self) -> None:
        """Clear the embeddings of images."""
        self._llm.reset_mm_cache()

    def collective_rpc(self, method: Any, *args: Any, **options: Any) -> list[Any]:
        """Call a method of every worker."""
        return self._llm.collective_rpc(method, *args, **options)

    def apply_model(self, func: Any) -> list[Any]:
        """Refuse a function that gets the model."""
        return self._llm.apply_model(func)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Profile the workers."""
        self._llm.start_profile(profile_prefix)

    def stop_profile(self) -> None:
        """Write the profiles."""
        self._llm.stop_profile()

    def do_log_stats(self) -> None:
        """Do nothing: sinks log on their own (`stats.sinks`)."""

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter."""
        return bool(self._native.adapters.add(lora_request.native()))

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; return whether there was one."""
        return self._native.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded adapters."""
        return {adapter.id for adapter in self._native.adapters.list()}

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in CPU memory; return whether there is one."""
        return self._native.adapters.pin(lora_id)

    def shutdown(self) -> None:
        """Release all."""
        self._llm.close()
