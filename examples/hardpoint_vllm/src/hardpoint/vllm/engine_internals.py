"""Internal objects of vLLM's engine that programs reach into, with their uses.

Programs end an engine by them, or load weights into its model. Other members have no counterpart:
the error names the nearest thing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hardpoint.errors import RequestError

from .names import COUNTERPARTS

_WEIGHTS = COUNTERPARTS["distributed.weight_transfer"]
_INTERNALS = {
    "_add_request": "`enqueue` and `wait_for_completion`, or `llm_engine.add_request`",
    "_run_engine": "`wait_for_completion`, or `llm_engine.step`",
    "_validate_and_add_requests": "`enqueue` and `wait_for_completion`",
    "create_model_config": "`create_engine_config().model_config`",
    "init_weight_transfer_engine": _WEIGHTS,
    "list_loras": "`native.adapters.list`; docs/lora.md",
    "preprocess_chat": "get_tokenizer().apply_chat_template; `native.model.apply_chat_template`",
    "release_kv_cache_memory": '`sleep`, and `wake_up(tags=["kv_cache"])`',
    "scale_elastic_ep": "`native.engines.scale`: docs/replicas.md",
    "save_sharded_state": "weights stay in the model's files: docs/models.md",
    "start_weight_update": _WEIGHTS,
    "update_weights": _WEIGHTS,
    "wait_for_requests_to_drain": '`pause_generation` with mode="wait"; docs/python-api.md',
    "engine_core": "`llm_engine` has shutdown, abort_request, add_request, step and sleep",
    "input_processor": "prompts are checked and tokenized by add_request and generate",
    "log_stats": "the option disable_log_stats; stat sinks: docs/metrics.md",
    "logger_manager": "stat sinks: docs/metrics.md",
    "model_executor": f"{_WEIGHTS}; code in workers is a step part: docs/step-parts.md",
    "output_processor": "output parsers: docs/write-an-output-parser.md",
    "processor": "prompts are checked and tokenized by add_request and generate",
    "renderer": "get_tokenizer().apply_chat_template renders messages",
    "scheduler": "schedulers: docs/write-a-scheduler.md",
    "stat_loggers": "stat sinks: docs/metrics.md",
}
_WORKER_METHODS = ("update", "weight", "init_", "param", "broadcast", "process_group", "load")


def no_member(owner: str, name: str) -> AttributeError:
    """Return the error for a member of a class of vLLM; it names the counterpart."""
    hint = _INTERNALS.get(name, "`native` is Hardpoint's own object: docs/python-api.md")
    return AttributeError(f"{owner} has no {name!r}: {hint}")


class EngineCore:
    """`llm_engine.engine_core`: ends the engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def shutdown(self, timeout: float | None = None) -> None:
        """Release all."""
        del timeout
        self._engine.shutdown()

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests."""
        self._engine.abort_request(request_ids)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"engine_core has no {name!r}: {_INTERNALS['engine_core']}")


class ModelExecutor:
    """`llm_engine.model_executor` of vLLM V0, and the worker, runner and model below it."""

    _BELOW = ("driver_worker", "model_runner", "worker", "model", "executor")

    def __init__(self, engine: Any, path: str = "model_executor") -> None:
        vars(self).update(_engine=engine, _path=path)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replace weights of the model by tensors with the names of the checkpoint.

        Raises:
            ModelError: they are not the model's.
        """
        self._engine.native.weights.update(dict(weights))

    def shutdown(self) -> None:
        """Release all."""
        self._engine.shutdown()

    def collective_rpc(self, method: Any, *args: Any, **options: Any) -> list[Any]:
        """Call a method of every worker."""
        return self._engine.collective_rpc(method, *args, **options)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name in self._BELOW:
            return ModelExecutor(self._engine, f"{self._path}.{name}")
        raise AttributeError(f"{self._path} has no {name!r}: {_INTERNALS['model_executor']}")

    def __delattr__(self, name: str) -> None:
        """Release all: so programs of vLLM V0 free memory."""
        if name not in self._BELOW:
            raise AttributeError(name)
        self._engine.shutdown()


def checked_method(method: Any, kwargs: Any) -> str:
    """Return the name of a method that `collective_rpc` calls, which has no keyword arguments.

    Raises:
        RequestError: it is a function, or has keyword arguments.
    """
    if not isinstance(method, str) or kwargs:
        raise RequestError(
            f"method: expected the name of a method and arguments by position, got {method!r} and "
            f"{kwargs or {}!r}; {COUNTERPARTS['worker']}"
        )
    return method


def worker_hint(method: str) -> str:
    """Return the counterpart of a method of vLLM's workers."""
    changes_weights = any(part in method for part in _WORKER_METHODS)
    return _WEIGHTS if changes_weights else COUNTERPARTS["worker"]


class Worker:
    """The worker of vLLM V0, for programs that patch its check of memory.

    Workers of Hardpoint do not use it: code in workers is a step part.
    """

    def _assert_memory_footprint_increased_during_profiling(self) -> None:
        """Check nothing."""
