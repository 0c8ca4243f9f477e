"""Names of members that are not shown: old ones, which warn and work until 0.3, and vLLM's."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hardpoint.calls.streams import OutputStream
from hardpoint.configuration.names_of_vllm import key_hint
from hardpoint.plugins import RequestError
from hardpoint.requests import unexpected_keyword

__all__ = ["ASYNC_NAMES", "SYNC_NAMES", "ModelClass", "old_member"]

_UNTIL = "the old name works until hardpoint 0.3"

_SHARED = {
    "add_lora": "adapters.add",
    "remove_lora": "adapters.remove",
    "list_loras": "adapters.list",
    "pin_lora": "adapters.pin",
    "resolve_adapter": "adapters.resolve",
    "scale": "engines.scale",
    "retire": "engines.retire",
    "load": "engines.load",
    "pause": "engines.pause",
    "resume": "engines.resume",
    "is_paused": "engines.is_paused",
    "is_sleeping": "engines.is_sleeping",
    "scheduler_stats": "engines.scheduler_stats",
    "live_requests": "engines.live_requests",
    "reset_encoder_cache": "engines.reset_encoder_cache",
    "release_session": "engines.release_session",
    "settings": "engines.settings",
    "set_config": "engines.set_config",
    "update_weights": "weights.update",
    "manifest": "plugins.manifest",
    "set_plugins": "plugins.change",
    "set_policy": "plugins.set_policy",
    "health": "plugins.health",
    "plugin_meters": "plugins.meters",
    "plugin_states": "plugins.states",
    "call_part": "plugins.call_part",
    "process": "plugins.process",
    "trace": "debug.trace",
    "start_profile": "debug.start_profile",
    "stop_profile": "debug.stop_profile",
    "supported_tasks": "model.supported_tasks",
    "takes_images": "model.takes_images",
    "default_sampling_params": "model.default_sampling_params",
    "apply_chat_template": "model.apply_chat_template",
}

SYNC_NAMES: Mapping[str, str] = _SHARED | {
    "fork": "OutputStream.fork",
    "get_num_unfinished_requests": "engines.get_num_unfinished_requests",
}
"""New names of members of LLM, by the old ones."""

ASYNC_NAMES: Mapping[str, str] = _SHARED | {
    "engine_pid": "engines.pid",
    "io_processor_schemas": "plugins.io_processor_schemas",
    "argument_schemas": "plugins.argument_schemas",
    "server_extensions": "plugins.server_extensions",
    "why_waiting": "debug.why_waiting",
    "prompt_tokens": "model.prompt_tokens",
    "tokenise": "model.tokenize",
}
"""The same of AsyncLLM."""

_GETTERS: Mapping[str, Callable[[Any], Any]] = {
    "get_tokenizer": attrgetter("tokenizer"),
    "get_default_sampling_params": lambda llm: llm.model.default_sampling_params(),
    "get_metrics": lambda llm: llm.metrics(),
}
"""Calls of LLM in programs written for vLLM."""


class ModelClass(type):
    """Metaclass of LLM and AsyncLLM: the old name of a class method, and unknown arguments."""

    if not TYPE_CHECKING:  # which take the arguments from `__init__`

        def __call__(cls, *args: Any, **named: Any) -> Any:
            """Return an instance, or raise the error of an unknown argument with advice."""
            known = inspect.signature(cls.__init__).parameters
            is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
            for name in named:
                if name not in known and not is_open:
                    raise unexpected_keyword(cls.__name__, name, list(known)[1:], key_hint(name))
            return super().__call__(*args, **named)

    def __getattr__(cls, name: str) -> Any:
        if name != "from_resolved":
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        owner = next(base for base in cls.__mro__ if base.__name__ in ("LLM", "AsyncLLM"))
        new = f"{owner.__module__}.open_resolved"
        warnings.warn(
            f"{owner.__name__}.{name} is now {new}; {_UNTIL}", DeprecationWarning, stacklevel=2
        )
        return functools.partial(sys.modules[owner.__module__].open_resolved, cls=cls)


def old_member(llm: object, owner: str, name: str, names: Mapping[str, str]) -> Any:
    """Return a member by a name that is not shown, with a warning for the caller if it is old.

    Args:
        owner: LLM or AsyncLLM.
        names: new names by the old ones.

    Raises:
        AttributeError: there is no such name.
    """
    if owner == "LLM" and name in _GETTERS:
        return functools.partial(_GETTERS[name], llm)
    if (new := names.get(name)) is None:
        raise AttributeError(f"{type(llm).__name__!r} object has no attribute {name!r}")
    is_function = new == "OutputStream.fork"
    place = new if is_function else f"{owner}.{new}"
    warnings.warn(f"{owner}.{name} is now {place}; {_UNTIL}", DeprecationWarning, stacklevel=3)
    return _fork if is_function else attrgetter(new)(llm)


def _fork(stream: OutputStream, token_ids: Sequence[int]) -> OutputStream:
    if not isinstance(stream, OutputStream):
        raise RequestError(f"stream: expected the result of `stream`, got {type(stream).__name__}")
    return stream.fork(token_ids)
