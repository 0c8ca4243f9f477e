"""`vllm.envs`: environment variables VLLM_..., which programs read and set.

Hardpoint reads none of them; docs/migrate-from-vllm.md has the settings that replace some.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from .paths import missing

_DEFAULTS: Mapping[str, Any] = {
    "CUDA_VISIBLE_DEVICES": None,
    "LOCAL_RANK": 0,
    "VLLM_ALLOW_INSECURE_SERIALIZATION": False,
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": False,
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": False,
    "VLLM_ASSETS_CACHE": "~/.cache/vllm/assets",
    "VLLM_BATCH_INVARIANT": False,
    "VLLM_CACHE_ROOT": "~/.cache/vllm",
    "VLLM_CONFIGURE_LOGGING": True,
    "VLLM_CONFIG_ROOT": "~/.config/vllm",
    "VLLM_CPU_KVCACHE_SPACE": 0,
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": False,
    "VLLM_DISABLE_COMPILE_CACHE": False,
    "VLLM_DO_NOT_TRACK": False,
    "VLLM_DP_MASTER_IP": "127.0.0.1",
    "VLLM_DP_MASTER_PORT": 0,
    "VLLM_DP_RANK": 0,
    "VLLM_DP_RANK_LOCAL": 0,
    "VLLM_DP_SIZE": 1,
    "VLLM_ENABLE_V1_MULTIPROCESSING": True,
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": 60,
    "VLLM_ENGINE_READY_TIMEOUT_S": 600,
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": 300,
    "VLLM_HOST_IP": "",
    "VLLM_IMAGE_FETCH_TIMEOUT": 5,
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": False,
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_LOGGING_PREFIX": "",
    "VLLM_LOG_STATS_INTERVAL": 10.0,
    "VLLM_MM_INPUT_CACHE_GIB": 4,
    "VLLM_NO_USAGE_STATS": False,
    "VLLM_RAY_PER_WORKER_GPUS": 1.0,
    "VLLM_RPC_TIMEOUT": 10000,
    "VLLM_SERVER_DEV_MODE": False,
    "VLLM_TARGET_DEVICE": "cuda",
    "VLLM_TRACE_FUNCTION": 0,
    "VLLM_USE_DEEP_GEMM": True,
    "VLLM_USE_MODELSCOPE": False,
    "VLLM_USE_PRECOMPILED": False,
    "VLLM_USE_V1": True,
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}
"""vLLM's defaults, in the types of the values. Other variables are text or None."""


def value_of(name: str) -> Any:
    """Return the value of a variable, or vLLM's default.

    Raises:
        AttributeError: it is no variable of vLLM.
        ValueError: it is set to text that is no number.
    """
    if name not in _DEFAULTS and not name.startswith("VLLM_"):
        raise AttributeError(missing(f"envs.{name}"))
    default = _DEFAULTS.get(name)
    text = os.environ.get(name)
    if text is None:
        return os.path.expanduser(default) if isinstance(default, str) else default
    if isinstance(default, bool):
        return text.strip().lower() not in ("", "0", "false")
    return text if default is None else type(default)(text)


def is_set(name: str) -> bool:
    """Return whether a variable is in the environment."""
    return name in os.environ


READERS: Mapping[str, Callable[[], Any]] = {
    name: functools.partial(value_of, name) for name in _DEFAULTS
}
"""Functions that read the variables, by name."""
