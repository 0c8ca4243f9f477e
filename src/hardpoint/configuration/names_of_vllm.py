"""Arguments of vLLM's engine, for the errors of unknown ones."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KEYS", "key_hint"]

KEYS: Mapping[str, str] = {
    "tokenizer": "tokenizer.path",
    "skip_tokenizer_init": "tokenizer.use",
    "chat_template": "plugin.transformers.chat_template",
    "gpu_memory_utilization": "kv_cache.memory_fraction",
    "kv_cache_memory_bytes": "kv_cache.memory_bytes",
    "num_gpu_blocks_override": "kv_cache.num_blocks",
    "block_size": "kv_cache.block_size",
    "kv_cache_dtype": "kv_cache.dtype",
    "enable_prefix_caching": "kv_cache.prefix_caching",
    "prefix_caching_hash_algo": "kv_cache.hash_algorithm",
    "disable_hybrid_kv_cache_manager": "kv_cache.window_groups",
    "watermark": "kv_cache.watermark",
    "kv_transfer_config": "kv_connector.use",
    "kv_events_config": "kv_events",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "max_num_queued_reqs": "scheduler.max_waiting",
    "max_num_queued_tokens": "scheduler.max_waiting_tokens",
    "long_prefill_token_threshold": "scheduler.long_prefill_token_threshold",
    "enable_chunked_prefill": "scheduler.chunked_prefill",
    "scheduling_policy": "scheduler.policy",
    "async_scheduling": "scheduler.asynchronous",
    "scheduler_cls": "scheduler.use",
    "tensor_parallel_size": "parallel.tensor",
    "pipeline_parallel_size": "parallel.pipeline",
    "data_parallel_size": "parallel.data",
    "enable_expert_parallel": "parallel.expert",
    "distributed_executor_backend": "executor.use",
    "enforce_eager": "executor.enforce_eager",
    "quantization": "quantization.use",
    "load_format": "load.use",
    "model_impl": "models.use",
    "attention_backend": "attention.use",
    "logits_processors": "plugins.enable",
    "logprobs_mode": "sampler.logprobs",
    "speculative_config": "speculation.use",
    "structured_outputs_config": "grammar.use",
    "reasoning_parser": "reasoning.parser",
    "tool_call_parser": "tools.parser",
    "enable_lora": "adapters.max_loras",
    "max_loras": "adapters.max_loras",
    "max_lora_rank": "adapters.max_lora_rank",
    "max_cpu_loras": "adapters.max_cpu_loras",
    "lora_modules": "adapters.paths",
    "enable_prompt_embeds": "plugin.prompt_embeddings.enabled",
    "allowed_local_media_path": "images.folders",
    "allowed_media_domains": "images.remote.hosts",
    "disable_log_stats": "stats.sinks",
    "stream_interval": "engine.stream_interval",
    "shutdown_timeout": "engine.drain_seconds",
    "served_model_name": "server.served_names",
}
"""Keys of the configuration, by the arguments of vLLM's engine that they stand for."""


def key_hint(name: str) -> str:
    """Return the end of a message with the key for an argument of vLLM, or "" for other names."""
    key = KEYS.get(name.replace("-", "_"))
    return f"; vLLM's {name} is {key} in the configuration" if key else ""
