"""Arguments of vLLM before 0.33, which programs still give."""

from __future__ import annotations

from collections.abc import Mapping


def _names(text: str) -> list[str]:
    return text.split()


_SPEED = "it only changed speed or memory"
_RAY = 'use distributed_executor_backend="ray"'
_SPECULATION = "use speculative_config, or [speculation] (docs/speculative-decoding.md)"
_IMAGES = "sizes and tokens of images come from the model's files"

FORMER_NEEDLESS: Mapping[str, str] = {
    **dict.fromkeys(
        _names(
            """
api_process_count api_process_rank calculate_kv_scales cuda_graph_sizes
data_parallel_master_ip data_parallel_master_port disable_async_output_proc
disable_logprobs_during_spec_decoding disable_mm_preprocessor_cache
enable_multimodal_encoder_data_parallel eplb_log_balancedness eplb_step_interval
eplb_window_size logits_processor_pattern lora_dtype lora_extra_vocab_size
max_context_len_to_capture max_paddings max_seq_len_to_capture multi_step_stream_outputs
num_lookahead_slots num_redundant_experts num_scheduler_steps preemption_mode
ray_workers_use_nsight scheduler_delay_factor spec_decoding_acceptance_method
speculative_disable_by_batch_size speculative_disable_mqa_scorer swap_space
tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type
typical_acceptance_sampler_posterior_alpha typical_acceptance_sampler_posterior_threshold
use_cached_outputs use_ray_spmd_worker use_v2_block_manager override_attention_dtype
"""
        ),
        _SPEED,
    ),
    "enable_reasoning": "",
    "guided_decoding_disable_fallback": "",
}
"""Former arguments that change no output, and why."""

FORMER_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("engine_use_ray", "worker_use_ray"), _RAY),
    **dict.fromkeys(
        (
            "ngram_prompt_lookup_max",
            "ngram_prompt_lookup_min",
            "num_speculative_tokens",
            "speculative_draft_tensor_parallel_size",
            "speculative_max_model_len",
            "speculative_model",
            "speculative_model_quantization",
        ),
        _SPECULATION,
    ),
    **dict.fromkeys(
        (
            "image_feature_size",
            "image_input_shape",
            "image_input_type",
            "image_token_id",
            "vision_language_config",
        ),
        _IMAGES,
    ),
    "enable_prompt_adapter": "prompt adapters are not supported",
    "max_prompt_adapters": "prompt adapters are not supported",
    "max_prompt_adapter_token": "prompt adapters are not supported",
    "guided_decoding_disable_additional_properties": "use StructuredOutputsParams("
    "disable_additional_properties=True) in requests",
    "override_neuron_config": "there is no backend for Neuron",
    "qlora_adapter_name_or_path": "name the adapter in the request (docs/lora.md)",
    "quantization_param_path": "the cache has scales of its own for 8-bit types (kv_cache.dtype)",
}
"""Former arguments that changed outputs, and their counterparts."""
