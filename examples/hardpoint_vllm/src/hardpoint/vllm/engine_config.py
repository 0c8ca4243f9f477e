"""The configuration of an engine as programs for vLLM read it: `model_config`, `vllm_config`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from hardpoint_vllm.tokenizers import pretrained_source

from .params import sampling_params

PARTS = ("cache_config", "device_config", "load_config", "lora_config", "model_config",
         "parallel_config", "scheduler_config", "speculative_config")  # fmt: skip
"""Parts of `vllm_config` that an engine of vLLM has as attributes."""


class ConfigFields:
    """Fields of a configuration object of vLLM; the error for others has the existing ones."""

    def __init__(self, description: str, /, **fields: Any) -> None:
        """Set the fields.

        Args:
            description: name of the object, for messages.
            fields: its fields; None is a value as any other.
        """
        vars(self).update(fields)
        self._description = description

    def __getattr__(self, name: str) -> Any:
        names = ", ".join(field for field in dir(self) if not field.startswith("_"))
        raise AttributeError(
            f"{vars(self).get('_description', 'it')} has no {name!r} here; it has {names}; "
            f"`llm.native.config` is the configuration (docs/configuration.md)"
        )

    def __repr__(self) -> str:
        fields = (f"{name}={value!r}" for name, value in vars(self).items() if name[0] != "_")
        return f"{self._description}({', '.join(fields)})"


class EngineModelConfig(ConfigFields):
    """`model_config`: the model's names and sizes."""

    def __init__(self, native: Any) -> None:
        """Read the configuration of Hardpoint's LLM or AsyncLLM."""
        config, self._tokenizer = native.config, native.tokenizer
        self._path, self._native = native.tokenizer.context.files.path, native
        is_generating = "generate" in native.model.supported_tasks
        names = config.server.served_names
        super().__init__(
            "model_config",
            model=str(config.model),
            tokenizer=str(config.tokenizer.path or config.model),
            served_model_name=names[0] if names else str(config.model),
            max_model_len=config.max_model_len,
            seed=config.seed,
            quantization=None if config.quantization.use == "auto" else config.quantization.use,
            enforce_eager=config.executor.enforce_eager,
            trust_remote_code=False,
            tokenizer_mode="auto",
            skip_tokenizer_init=config.tokenizer.use == "none",
            revision=None,
            is_multimodal_model=native.model.takes_images,
            is_encoder_decoder=False,
            runner_type="generate" if is_generating else "pooling",
            task="generate" if is_generating else native.model.supported_tasks[0],
            supported_tasks=list(native.model.supported_tasks),
        )

    @property
    def hf_config(self) -> Any:
        """The model's config.json, or the metadata of its GGUF file, as transformers has it."""
        return read_hf_config(self._path)

    @property
    def hf_text_config(self) -> Any:
        """The part about the model that produces text."""
        return self.hf_config.get_text_config()

    @property
    def architectures(self) -> list[str]:
        """The model's classes in transformers."""
        return list(self.hf_config.architectures or ())

    @property
    def dtype(self) -> Any:
        """torch's type of the weights."""
        import torch  # noqa: PLC0415

        name = self._native.config.dtype
        if name == "auto":
            name = str(getattr(self.hf_config, "dtype", None) or "bfloat16").removeprefix("torch.")
        return getattr(torch, name)

    def get_vocab_size(self) -> int:
        """Return the number of token ids."""
        return int(self._tokenizer.vocab_size)

    def get_hidden_size(self) -> int:
        """Return the size of a hidden state."""
        return int(self.hf_text_config.hidden_size)

    def get_head_size(self) -> int:
        """Return the size of an attention head."""
        config = self.hf_text_config
        return int(getattr(config, "head_dim", None)
                   or config.hidden_size // config.num_attention_heads)  # fmt: skip

    def get_sliding_window(self) -> int | None:
        """Return the window of attention in tokens, None without one."""
        config = self.hf_text_config
        uses = getattr(config, "use_sliding_window", True)
        return getattr(config, "sliding_window", None) if uses else None

    def get_total_num_hidden_layers(self) -> int:
        """Return the number of layers."""
        return int(self.hf_text_config.num_hidden_layers)

    def get_total_num_kv_heads(self) -> int:
        """Return the number of heads of keys and values."""
        config = self.hf_text_config
        return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)

    def get_num_layers(self, parallel_config: Any = None) -> int:
        """Return the number of layers of a pipeline rank."""
        del parallel_config
        return self.get_total_num_hidden_layers() // int(self._native.config.parallel.pipeline)

    def get_num_attention_heads(self, parallel_config: Any = None) -> int:
        """Return the number of attention heads of a tensor parallel rank."""
        del parallel_config
        heads = self.hf_text_config.num_attention_heads
        return int(heads) // int(self._native.config.parallel.tensor)

    def get_num_kv_heads(self, parallel_config: Any = None) -> int:
        """Return the number of heads of keys and values of a tensor parallel rank."""
        del parallel_config
        return max(1, self.get_total_num_kv_heads() // int(self._native.config.parallel.tensor))

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Return the sampling parameters that the model's files recommend."""
        native, plain = self._native.model.default_sampling_params(), sampling_params(None)
        values = {name: getattr(native, name) for name in native.__struct_fields__}
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: values[name] for name in names if values[name] != getattr(plain, name)}

    def try_get_generation_config(self) -> dict[str, Any]:
        """Return the values of the model's generation_config.json."""
        file = self._path / "generation_config.json"
        if not file.is_file():
            return self.get_diff_sampling_param()
        return dict(json.loads(file.read_text(encoding="utf-8")))


@functools.lru_cache(maxsize=8)
def read_hf_config(path: Path) -> Any:
    """Return transformers' configuration of a model's folder or GGUF file."""
    from transformers import AutoConfig, PretrainedConfig  # noqa: PLC0415

    name, in_folder = pretrained_source(path)
    if in_folder:
        return AutoConfig.from_pretrained(name, **in_folder)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError):  # a model that transformers does not know
        file = path / "config.json"
        fields = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return PretrainedConfig.from_dict(fields)


def _lora_config(adapters: Any) -> ConfigFields | None:
    if not adapters.max_loras:
        return None
    return ConfigFields(
        "lora_config",
        max_loras=adapters.max_loras,
        max_lora_rank=adapters.max_lora_rank,
        max_cpu_loras=adapters.max_cpu_loras,
    )


def _speculative_config(speculation: Any) -> ConfigFields | None:
    if not speculation.use:
        return None
    return ConfigFields(
        "speculative_config",
        method=speculation.use[0],
        num_speculative_tokens=speculation.num_draft_tokens,
    )


def vllm_config(native: Any) -> ConfigFields:
    """Return the fields of vLLM's VllmConfig that programs read."""
    config = native.config
    cache, scheduler, parallel = config.kv_cache, config.scheduler, config.parallel
    ranks = parallel.tensor * parallel.pipeline
    return ConfigFields(
        "vllm_config",
        model_config=EngineModelConfig(native),
        cache_config=ConfigFields(
            "cache_config",
            block_size=cache.block_size,
            num_gpu_blocks=cache.num_blocks,
            num_cpu_blocks=0,
            cache_dtype=cache.dtype,
            enable_prefix_caching=cache.prefix_caching,
            gpu_memory_utilization=cache.memory_fraction,
        ),
        scheduler_config=ConfigFields(
            "scheduler_config",
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            policy=scheduler.policy,
            enable_chunked_prefill=scheduler.chunked_prefill,
            chunked_prefill_enabled=scheduler.chunked_prefill,
            async_scheduling=scheduler.asynchronous,
        ),
        parallel_config=ConfigFields(
            "parallel_config",
            tensor_parallel_size=parallel.tensor,
            pipeline_parallel_size=parallel.pipeline,
            data_parallel_size=parallel.data,
            data_parallel_rank=0,
            world_size=ranks,
            world_size_across_dp=ranks * parallel.data,
            enable_expert_parallel=parallel.expert,
            distributed_executor_backend=config.executor.use,
        ),
        lora_config=_lora_config(config.adapters),
        speculative_config=_speculative_config(config.speculation),
        load_config=ConfigFields("load_config", load_format=config.load.use),
        device_config=ConfigFields("device_config", device=config.device),
        structured_outputs_config=ConfigFields(
            "structured_outputs_config", backend=config.grammar.use
        ),
        kv_transfer_config=None,
    )


class ConfiguredEngine:
    """An engine of vLLM with its configuration."""

    @property
    def native(self) -> Any:
        """Hardpoint's LLM or AsyncLLM."""
        raise NotImplementedError

    @property
    def model_config(self) -> EngineModelConfig:
        """Fields of the model's configuration."""
        return EngineModelConfig(self.native)

    @property
    def vllm_config(self) -> ConfigFields:
        """The fields of vLLM's configuration that programs read."""
        return vllm_config(self.native)
