"""vLLM's engine arguments as objects and on a command line."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.errors import ConfigError

from .arguments import ARGUMENTS, SWITCHES, Translated
from .configs import VllmConfig
from .engine_internals import no_member
from .special import SPECIAL, report, translate

_DEFAULTS: Mapping[str, Any] = {
    "cpu_offload_gb": 0,
    "disable_log_stats": False,
    "distributed_executor_backend": None,
    "dtype": "auto",
    "enable_lora": False,
    "enable_prompt_embeds": False,
    "enable_sleep_mode": False,
    "gpu_memory_utilization": 0.9,
    "kv_cache_dtype": "auto",
    "max_loras": 1,
    "max_lora_rank": 16,
    "runner": "auto",
    "scheduling_policy": "fcfs",
    "seed": 0,
    "skip_tokenizer_init": False,
    "tokenizer_mode": "auto",
    "trust_remote_code": False,
}
"""vLLM's defaults of arguments that programs read; None stands for others."""


def _columns() -> list[tuple[str, Any, Any]]:
    names = [name for name, argument in ARGUMENTS.items() if not argument.server]
    defaults = dict.fromkeys(SPECIAL) | {name: ARGUMENTS[name].default for name in names}
    defaults.update(_DEFAULTS)
    return [(name, Any, defaults[name]) for name in sorted(defaults)]


_Arguments: Any = dataclasses.make_dataclass(
    "_Arguments", _columns(), init=False, repr=False, eq=False
)


class _CreatedConfig(VllmConfig):
    """The result of `create_engine_config`: its parts have the arguments."""

    def __init__(self, args: EngineArgs) -> None:
        super().__init__(**args.given())
        object.__setattr__(self, "args", args)

    def __getattr__(self, name: str) -> Any:
        if name in _PARTS or (name == "lora_config" and self.args.enable_lora):
            return self.args
        return super().__getattr__(name)


_PARTS = ("cache_config", "device_config", "load_config", "model_config", "parallel_config",
          "scheduler_config")  # fmt: skip


class EngineArgs(_Arguments):  # type: ignore[misc]
    """Engine arguments; attributes are vLLM's names, and fields of a dataclass.

    Raises:
        UnknownArgumentError, a ValueError and a TypeError: an argument is unknown.
    """

    progress: bool | None = None

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        if model is not None:
            arguments["model"] = model
        use_tqdm = arguments.get("use_tqdm_on_load", True)
        self.progress = None if use_tqdm else False
        self._given: dict[str, Any] = {}
        translate(arguments)
        for name, value in arguments.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in {*ARGUMENTS, *SPECIAL}:
            self._given[name] = value

    def __getattr__(self, name: str) -> Any:
        raise no_member(type(self).__name__, name)

    def given(self) -> dict[str, Any]:
        """Return the arguments that were given."""
        return dict(self._given)

    def translated(self, *, log: bool = True) -> Translated:
        """Return the equivalent configuration; log arguments without effect."""
        translated = translate(self._given)
        if log:
            report(translated)
        return translated

    def create_engine_config(self, *_: Any, **__: Any) -> Any:
        """Return the arguments as vLLM's configuration object, by part, too.

        `AsyncLLM.from_vllm_config` takes it. It has no values that an engine computes, as
        `llm_engine.vllm_config` has.
        """
        return _CreatedConfig(self)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option for each argument to a parser."""
        names = [name for name, argument in ARGUMENTS.items() if not argument.server]
        add_options(parser, [*names, *SPECIAL])
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Return the engine arguments of a parsed command line."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{n: v for n, v in vars(args).items() if n in names and v is not None})

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._given.items())
        return f"{type(self).__name__}({values})"


EngineArgs.__signature__ = inspect.Signature(
    [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=getattr(EngineArgs, field.name)
        )
        for field in dataclasses.fields(EngineArgs)
    ]
)


class AsyncEngineArgs(EngineArgs):
    """The arguments of an AsyncLLMEngine."""

    @classmethod
    def add_cli_args(
        cls, parser: argparse.ArgumentParser, async_args_only: bool = False
    ) -> argparse.ArgumentParser:
        """Add an option for each argument to a parser."""
        return parser if async_args_only else super().add_cli_args(parser)


def add_options(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add options of vLLM's names to a parser; its own options stay."""
    known = {option for action in parser._actions for option in action.option_strings}
    for name in dict.fromkeys(names):
        option = "--" + name.replace("_", "-")
        if option in known:
            continue
        options = [short for short in _SHORT.get(name, ()) if short not in known]
        argument = ARGUMENTS.get(name)
        text = (argument.target if argument else "").replace("%", "%%") or None
        if name in SWITCHES:
            parser.add_argument(
                *options,
                option,
                dest=name,
                default=None,
                action=argparse.BooleanOptionalAction,
                help=text,
            )
            if (opposite := _opposite(name)) not in {*names, None}:
                parser.add_argument(
                    "--" + str(opposite).replace("_", "-"),
                    dest=name,
                    default=None,
                    action="store_false",
                    help=argparse.SUPPRESS,
                )
        else:
            several = "*" if name in _SEVERAL else None
            parser.add_argument(
                *options,
                option,
                dest=name,
                default=None,
                nargs=several,
                type=_value,
                help=text,
            )


def _opposite(name: str) -> str | None:
    """Return the name of the option that turns a switch off: `disable_x` for `enable_x`."""
    for prefix, other in (("enable_", "disable_"), ("disable_", "enable_")):
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return None


_SHORT = {
    "api_server_count": ("-asc",),
    "attention_config": ("-ac",),
    "compilation_config": ("-O", "-cc"),
    "data_parallel_address": ("-dpa",),
    "data_parallel_backend": ("-dpb",),
    "data_parallel_external_lb": ("-dpe",),
    "data_parallel_hybrid_lb": ("-dph",),
    "data_parallel_multi_port_external_lb": ("-dpm",),
    "data_parallel_rank": ("-dpn",),
    "data_parallel_rpc_port": ("-dpp",),
    "data_parallel_size": ("-dp",),
    "data_parallel_size_local": ("-dpl",),
    "data_parallel_start_rank": ("-dpr",),
    "decode_context_parallel_size": ("-dcp",),
    "diffusion_config": ("-dc",),
    "enable_expert_parallel": ("-ep",),
    "gpu_memory_utilization": ("--device-memory-utilization",),
    "nnodes": ("-n",),
    "node_rank": ("-r",),
    "pipeline_parallel_size": ("-pp",),
    "prefill_context_parallel_size": ("-pcp",),
    "quantization": ("-q",),
    "speculative_config": ("-sc",),
    "tensor_parallel_size": ("-tp",),
}
"""Further names of options."""
_SEVERAL = frozenset(
    [
        "allowed_media_domains",
        "api_key",
        "collect_detailed_traces",
        "cpu_offload_params",
        "cudagraph_capture_sizes",
        "ignore_patterns",
        "kv_cache_dtype_skip_layers",
        "logits_processors",
        "lora_modules",
        "lora_target_modules",
        "middleware",
        "numa_bind_cpus",
        "numa_bind_nodes",
        "offload_params",
        "served_model_name",
        "sleep_preserve_parameter_names",
    ]
)
"""Arguments with several values on the command line."""


def _value(text: str) -> Any:
    """Return an option's value: JSON of a table or list, a number, or text."""
    if text[:1] in "{[":
        try:
            return json.loads(text)
        except ValueError:
            return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that takes `--max_model_len`, dotted options, and the values of `--config FILE`."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse arguments, by default the program's."""
        import sys  # noqa: PLC0415

        arguments = expanded(sys.argv[1:] if args is None else args)
        return super().parse_args(arguments, namespace or argparse.Namespace())


def expanded(arguments: Sequence[str]) -> list[str]:
    """Return arguments with dashes in names, and the arguments of a YAML file of `--config`.

    Dotted options (`--compilation-config.mode 3`) become one table.

    Raises:
        ConfigError: the file is no table.
    """
    expanded_arguments: list[str] = []
    tables: dict[str, dict[str, Any]] = {}
    items = iter(arguments)
    for item in items:
        if not item.startswith("--"):
            expanded_arguments.append(item)
            continue
        name, separator, value = item.partition("=")
        name, _, path = name.partition(".")
        name, path = name.replace("_", "-"), path.replace("-", "_")
        if path:
            table = tables.setdefault(name, {})
            *parents, last = path.split(".")
            for parent in parents:
                table = table.setdefault(parent, {})
            table[last] = _value(value if separator else next(items, "true"))
        elif name == "--config":
            expanded_arguments += _of_file(value if separator else next(items, ""))
        else:
            expanded_arguments.append(name + separator + value)
    for name, table in tables.items():
        expanded_arguments += [name, json.dumps(table)]
    return expanded_arguments


def _of_file(path: str) -> list[str]:
    import yaml  # type: ignore[import-untyped]  # noqa: PLC0415

    with open(path, encoding="utf-8") as file:
        values = yaml.safe_load(file)
    if not isinstance(values, Mapping):
        raise ConfigError(f"config: expected a table of arguments in {path!r}, got {values!r}")
    arguments = []
    for name, value in values.items():
        option = "--" + str(name).replace("_", "-")
        if isinstance(value, bool):
            arguments.append(option if value else option.replace("--", "--no-", 1))
        elif isinstance(value, list):
            arguments += [option, *map(str, value)]
        elif value is not None:
            arguments += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return arguments
