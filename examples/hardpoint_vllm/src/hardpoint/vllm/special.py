"""Arguments of vLLM that become several keys, or whose meaning depends on others."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hardpoint.errors import ConfigError

from .arguments import ARGUMENTS, Translated, UnknownArgumentError, size, table, texts
from .helpers import LoggingStatLogger, PrometheusStatLogger

_log = logging.getLogger("hardpoint.vllm")

_EXECUTORS = {"mp": "multiproc", "uni": "uniproc", "ray": "ray"}
_SPECULATORS = {"ngram": "ngram", "suffix": "suffix", "draft_model": "draft_model",
                "[ngram]": "ngram", "ngram_gpu": "ngram", "eagle3": "eagle3", "mtp": "mtp",
                "deepseek_mtp": "mtp", "glm4_moe_mtp": "mtp"}  # fmt: skip
_POOLERS = ("all", "cls", "last", "mean", "step")


def translate(arguments: Mapping[str, Any], *, server: bool = False) -> Translated:
    """Return the configuration that vLLM's arguments mean.

    Args:
        arguments: by vLLM's names; None is not given.
        server: whether arguments of `vllm serve` are known, too.

    Raises:
        ConfigError: an argument changes results and has no counterpart, or is unknown, which is
            a TypeError, too.
    """
    to = Translated()
    stated = {name: value for name, value in arguments.items() if value is not None}
    for name, value in sorted(stated.items(), key=lambda item: item[0] in SPECIAL):
        if name in SPECIAL:
            SPECIAL[name](value, stated, to)
        elif (argument := ARGUMENTS.get(name)) is None or (argument.server and not server):
            raise UnknownArgumentError(_unknown(name, server=server))
        else:
            argument.apply(value, to)
    ranks = to.values.get("parallel.tensor", 1) * to.values.get("parallel.pipeline", 1)
    if ranks > 1:
        to.values.setdefault("executor.use", "multiproc")
    if to.values.get("parallel.data", 1) > 1:
        to.values.setdefault("engine.in_process", False)
    return to


def report(translated: Translated) -> None:
    """Log arguments without effect."""
    for note in translated.notes:
        _log.warning("%s", note)


def _revision(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:
    model = str(arguments.get("model"))
    if value == "main":
        return
    if Path(model).exists() or "@" in model:
        raise ConfigError(
            f"revision: expected none for the model {model!r}, got {value!r}; a revision is of a "
            f"model of the hub"
        )
    to.values["model"] = f"{model}@{value}"


def add_statistics(to: Translated) -> None:
    """Add what `disable_log_stats` turns off in vLLM: metrics of requests and of the engine."""
    sinks = to.values.get("stats.sinks", [])
    to.values["stats.sinks"] = sinks if "prometheus" in sinks else [*sinks, "prometheus"]
    to.values.setdefault("stats.request_metrics", True)
    to.values.setdefault("metrics.aliases", ["vllm"])


def _unknown(name: str, *, server: bool) -> str:
    import difflib  # noqa: PLC0415

    known = [n for n, argument in ARGUMENTS.items() if server or not argument.server]
    near = difflib.get_close_matches(name[:64], [*known, *SPECIAL], 1, 0.8)
    hint = f"; did you mean {near[0]}?" if near else "; the configuration is docs/configuration.md"
    return f"{name[:64]}: there is no such argument of vLLM 0.33{hint}"


def _memory(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:
    import torch  # noqa: PLC0415

    fraction = float(value)
    if not 0 < fraction <= 1:
        raise ConfigError(f"gpu_memory_utilization: expected above 0 to 1, got {fraction}")
    if arguments.get("device") == "cpu" or not torch.cuda.is_available():
        to.notes.append(
            f"gpu_memory_utilization={fraction} has no effect on a processor; "
            f"kv_cache_memory_bytes (kv_cache.memory_bytes) is the size of the cache"
        )
    else:
        to.values["kv_cache.memory_fraction"] = fraction


def _executor(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:
    if value not in _EXECUTORS:
        raise ConfigError(
            f"distributed_executor_backend: expected one of {', '.join(_EXECUTORS)}, got "
            f"{value!r}; use executor.use (docs/write-an-executor.md)"
        )
    to.values["executor.use"] = _EXECUTORS[value]
    if value == "mp" and arguments.get("tensor_parallel_size", 1) == 1 == arguments.get(
        "pipeline_parallel_size", 1
    ):
        del to.values["executor.use"]  # one rank runs with the engine


def _lora(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:
    if value:
        to.values["adapters.max_loras"] = int(arguments.get("max_loras") or 1)


def _max_loras(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:
    if arguments.get("enable_lora"):
        to.values["adapters.max_loras"] = int(value)


def _lora_modules(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:  # noqa: ARG001
    paths = {}
    for item in texts(value) if not isinstance(value, Mapping) else [value]:
        if isinstance(item, str) and not item.startswith("{"):
            name, separator, path = item.partition("=")
            if not separator:
                raise ConfigError(f"lora_modules: expected NAME=PATH, got {item!r}")
            paths[name] = path
        else:
            entry = table(item)
            paths[str(entry["name"])] = str(entry["path"])
    to.values["adapters.paths"] = paths


def _speculation(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:  # noqa: ARG001
    config = table(value)
    method = config.pop("method", None) or ("draft_model" if "model" in config else None)
    if method not in _SPECULATORS:
        raise ConfigError(
            f"speculative_config: expected the method ngram, suffix, draft_model, eagle3 or mtp, "
            f"got {method!r}; use speculation.use (docs/speculative-decoding.md)"
        )
    name = _SPECULATORS[method]
    to.values["speculation.use"] = [name]
    if (count := config.pop("num_speculative_tokens", None)) is not None:
        to.values["speculation.num_draft_tokens"] = int(count)
    if name in ("draft_model", "eagle3"):
        to.values[f"plugin.{name}.model"] = config.pop("model")
    if name == "ngram":
        if (longest := config.pop("prompt_lookup_max", None)) is not None:
            to.values["plugin.ngram.longest"] = int(longest)
        if (shortest := config.pop("prompt_lookup_min", None)) is not None:
            to.values["plugin.ngram.shortest"] = int(shortest)
    to.notes += [f"speculative_config.{name}={config[name]!r} has no effect: no output changes"
                 for name in config]  # fmt: skip


_ADAPTER = ({"use": "hardpoint_vllm:VLLM", "name": "vllm"},)
"""The entry of `plugins.enable` that enables the component adapter."""


def _processors(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:  # noqa: ARG001
    enable: list[Any] = [*_ADAPTER]
    for item in [value] if isinstance(value, str | type) else value:
        reference = item if isinstance(item, str) else _reference(item)
        name = _plugin_name(reference)
        enable.append({"use": reference, "name": name})
        to.values[f"plugin.{name}.every_request"] = True
        to.processors.append(name)
    _enable(enable, to)


def _reference(item: type) -> str:
    """Return the FQCN of a class; one that its module does not have is added to a module here.

    So classes of functions and notebooks are found, in this process.
    """
    found: Any = sys.modules.get(item.__module__)
    for name in item.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is item:
        return f"{item.__module__}:{item.__qualname__}"
    module = sys.modules.setdefault(_LOCAL_CLASSES, ModuleType(_LOCAL_CLASSES))
    setattr(module, item.__name__, item)
    return f"{_LOCAL_CLASSES}:{item.__name__}"


_LOCAL_CLASSES = "hardpoint_vllm_local_classes"


def _enable(entries: Sequence[Any], to: Translated) -> None:
    enabled = to.values.get("plugins.enable", [])
    to.values["plugins.enable"] = [*enabled, *(entry for entry in entries if entry not in enabled)]


def _plugin_name(reference: str) -> str:
    """Return the name of a plugin that is enabled by its FQCN: the class in snake_case."""
    name = reference.rpartition(":")[2].rpartition(".")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def add_stat_loggers(loggers: Sequence[Any], to: Translated) -> None:
    """Add classes of stat loggers to the sinks of a configuration.

    Raises:
        ConfigError: one is not a class that a module has.
    """
    for index, logger in enumerate(loggers):
        if not isinstance(logger, type):
            raise ConfigError(
                f"stat_loggers[{index}]: expected a class derived from StatLoggerBase, got "
                f"{logger!r}; a class reads its own settings in its constructor"
            )
    sinks = [_SINKS.get(logger) or _reference(logger) for logger in loggers]
    to.values["stats.sinks"] = list(dict.fromkeys([*to.values.get("stats.sinks", []), *sinks]))
    _enable(_ADAPTER, to)


_SINKS: Mapping[type, str] = {LoggingStatLogger: "log", PrometheusStatLogger: "prometheus"}


def _kv_transfer(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:  # noqa: ARG001
    config = table(value)
    connector, module = config.pop("kv_connector", None), config.pop("kv_connector_module_path", "")
    if not connector or not module:
        raise ConfigError(
            f"kv_transfer_config.kv_connector: expected a class of kv_connector_module_path, got "
            f"{connector!r}; use kv_connector.use for Hardpoint's own (docs/kv-connectors.md)"
        )
    reference = f"{module}:{connector}"
    options = f"plugin.{_plugin_name(reference)}"
    to.values["kv_connector.use"] = reference
    to.values[f"{options}.kv_role"] = config.pop("kv_role", "kv_both")
    if extra := config.pop("kv_connector_extra_config", None):
        to.values[f"{options}.extra_config"] = dict(extra)
    to.notes += [f"kv_transfer_config.{name}={config[name]!r} has no effect: connectors read "
                 f"kv_connector_extra_config" for name in config]  # fmt: skip
    _enable(_ADAPTER, to)


def _io_processor(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:  # noqa: ARG001
    _enable([*_ADAPTER, value], to)


def _structured(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:
    config = {"backend": value} if isinstance(value, str) and value[:1] != "{" else table(value)
    backend = config.pop("backend", "auto")
    if parser := config.pop("reasoning_parser", None):
        ARGUMENTS["reasoning_parser"].apply(parser, to)
    _no_whitespace(config.pop("disable_any_whitespace", False), arguments, to)
    if config.pop("disable_additional_properties", False):
        raise ConfigError(
            "structured_outputs_config.disable_additional_properties: expected false, got True; "
            "use StructuredOutputsParams(disable_additional_properties=True) in requests"
        )
    if backend not in ("auto", "guidance"):
        to.notes.append(
            f"structured_outputs_config.backend={backend!r} has no effect: answers have the form "
            f"whatever makes the masks; grammar.use selects another backend"
        )


def _no_whitespace(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:  # noqa: ARG001
    if value:
        to.values["plugin.llguidance.max_whitespace"] = 0
        to.values["plugin.llguidance.max_newlines"] = 0


def _kv_events(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:  # noqa: ARG001
    config = table(value)
    if config.get("enable_kv_cache_events", True) and config.get("publisher", "zmq") != "null":
        to.values["kv_events.publishers"] = ["zmq"]
        for name in ("endpoint", "replay_endpoint", "topic", "buffer_steps", "hwm"):
            if name in config:
                to.values[f"plugin.zmq.{name}"] = config[name]


def _images(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:  # noqa: ARG001
    limits = table(value)
    count = limits.pop("image", None)
    if isinstance(count, Mapping):
        count = count.get("count")
    if count:
        to.values["images.max_items"] = int(count)
    to.notes += [f"limit_mm_per_prompt.{name} has no effect: models take images" for name in limits
                 if limits[name]]  # fmt: skip


def _generation_config(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:
    to.neutral = value == "vllm"
    if to.neutral and _is_server(arguments):
        raise ConfigError(f"generation_config: expected 'auto', got {value!r}; {_SERVER_DEFAULTS}")
    if value not in ("auto", "vllm"):
        to.notes.append(
            f"generation_config={value!r} has no effect: that of the model's folder is read"
        )


def _override_generation(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:
    to.overrides = table(value)
    if to.overrides and _is_server(arguments):
        raise ConfigError(
            f"override_generation_config: expected none, got {value!r}; {_SERVER_DEFAULTS}"
        )


_SERVER_DEFAULTS = (
    "parameters that requests leave out come from generation_config.json of the model's folder"
)


def _is_server(arguments: Mapping[str, Any]) -> bool:
    return "host" in arguments or "port" in arguments


def _pooler(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:  # noqa: ARG001
    config = table(value)
    kind = config.pop("seq_pooling_type", None) or config.pop("pooling_type", None)
    if kind is not None:
        if (pooler := str(kind).lower()) not in _POOLERS:
            raise ConfigError(
                f"pooler_config.pooling_type: expected one of {', '.join(_POOLERS)}, got {kind!r}; "
                f"docs/write-an-activation-tap.md describes others"
            )
        to.values["plugins.enable"] = [*to.values.get("plugins.enable", []), pooler]
        to.pooling["pooler"] = pooler
    config.pop("task", None)
    for name in ("dimensions", "normalize", "use_activation", "activation", "softmax"):
        if name in config:
            to.pooling[name] = config.pop(name)
    if config:
        raise ConfigError(
            f"pooler_config.{next(iter(config))}: expected none; docs/write-an-activation-tap.md "
            f"describes custom poolers"
        )


def _native(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:  # noqa: ARG001
    """Add tables of Hardpoint's configuration."""

    def add(table: Mapping[str, Any], path: str) -> None:
        for name, item in table.items():
            if isinstance(item, Mapping):
                add(item, f"{path}{name}.")
            elif f"{path}{name}" == "plugins.enable":
                to.values["plugins.enable"] = [*to.values.get("plugins.enable", []), *item]
            else:
                to.values[f"{path}{name}"] = item

    add(value, "")


def _profiler(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:  # noqa: ARG001
    if folder := table(value).get("torch_profiler_dir"):
        to.values["engine.profile_dir"] = folder


def _api_key(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:  # noqa: ARG001
    to.api_keys = texts(value)


def _max_logprobs(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:
    if _is_server(arguments):
        to.values["server.limits.logprobs"] = int(value)


def _memory_bytes(value: Any, arguments: Mapping[str, Any], to: Translated) -> None:  # noqa: ARG001
    if (count := size(value)) != "auto":
        to.values["kv_cache.memory_bytes"] = count


SPECIAL: Mapping[str, Callable[[Any, Mapping[str, Any], Translated], None]] = {
    "gpu_memory_utilization": _memory,
    "kv_cache_memory_bytes": _memory_bytes,
    "distributed_executor_backend": _executor,
    "enable_lora": _lora,
    "max_loras": _max_loras,
    "lora_modules": _lora_modules,
    "speculative_config": _speculation,
    "logits_processors": _processors,
    "io_processor_plugin": _io_processor,
    "kv_transfer_config": _kv_transfer,
    "structured_outputs_config": _structured,
    "guided_decoding_backend": _structured,
    "guided_decoding_disable_any_whitespace": _no_whitespace,
    "kv_events_config": _kv_events,
    "limit_mm_per_prompt": _images,
    "generation_config": _generation_config,
    "override_generation_config": _override_generation,
    "pooler_config": _pooler,
    "override_pooler_config": _pooler,
    "hardpoint_config": _native,
    "profiler_config": _profiler,
    "api_key": _api_key,
    "max_logprobs": _max_logprobs,
    "revision": _revision,
}
