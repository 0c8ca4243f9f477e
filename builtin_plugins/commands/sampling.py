"""The sampling options of `generate` and `chat`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hardpoint.plugins import RequestError, RequestOutputKind, SamplingParams
from hardpoint.plugins.structured import StructuredOutputs
from hardpoint.typed import parse_value, split_setting

if TYPE_CHECKING:
    from .conversation import ChatModel

_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "stop",
    "n",
    "logprobs",
)
# For conversations with a model without recommendations. A small model repeats itself when
# it is greedy, and loses the thread at a high temperature; the penalty ends loops.
_CONVERSATION = SamplingParams(temperature=0.2, top_p=0.9, repetition_penalty=1.1)

GREEDY = SamplingParams(temperature=0.0)
"""Parameters of prompts where a model recommends nothing, and of files of them: repeatable."""


def add_sampling_options(
    parser: argparse.ArgumentParser, *, max_tokens: int, temperature: str
) -> None:
    """Add the options.

    Args:
        max_tokens: its default.
        temperature: description of its default.
    """
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add(
        "--temperature",
        type=float,
        metavar="T",
        help=f"0 is greedy (default: {temperature})",
    )
    add("--top-p", type=float, metavar="P", help="smallest set of tokens of this probability")
    add("--top-k", type=int, metavar="K", help="the K likeliest tokens")
    add("--min-p", type=float, metavar="P", help="drop tokens under P times the likeliest")
    add("--repetition-penalty", type=float, metavar="X", help="over 1 repeats tokens less")
    add("--seed", type=int, metavar="N", help="makes the choice repeatable")
    add(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"at most N output tokens (default: {max_tokens})",
    )
    add("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")
    add(
        "--structured",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="constraint on the answer: json=SCHEMA, regex=..., grammar=..., choice=TEXT "
        "(repeatable), json_object=true; @FILE is a file's content",
    )
    add(
        "--plugin-args",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="an argument of a plugin for this request; repeatable",
    )


def conversation_params(options: argparse.Namespace, generator: ChatModel) -> SamplingParams:
    """Return checked parameters of a conversation; the model's defaults replace missing ones."""
    return sampling_params(options, _recommended(generator) or _CONVERSATION)


def prompt_params(options: argparse.Namespace, generator: ChatModel) -> SamplingParams:
    """Return checked parameters of prompts; the model's defaults replace missing ones."""
    return sampling_params(options, _recommended(generator) or GREEDY)


def _recommended(generator: ChatModel) -> SamplingParams | None:
    recommended = generator.model.default_sampling_params()
    return None if recommended == SamplingParams() else recommended


def sampling_params(
    options: argparse.Namespace, defaults: SamplingParams | None = None
) -> SamplingParams:
    """Return checked parameters from the options; fields without an option keep their defaults.

    Raises:
        RequestError: a field is invalid; names its value and the expected one.
        ConfigError: a `--plugin-args` is not of the form NAME.KEY=VALUE.
    """
    return msgspec.structs.replace(
        defaults or SamplingParams(),
        **_given(options),
        structured=_structured(options.structured),
        plugin_args=_plugin_args(options.plugin_args),
        output_kind=RequestOutputKind.DELTA,
    ).checked()


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of an HTTP request from the options that are given.

    Raises:
        RequestError, ConfigError: see `sampling_params`.
    """
    fields = _given(options)
    if (structured := _structured(options.structured)) is not None:
        constraint: dict[str, Any] = msgspec.to_builtins(structured)
        fields["structured_outputs"] = {
            name: value for name, value in constraint.items() if value not in (None, False)
        }
    if arguments := _plugin_args(options.plugin_args):
        fields["plugin_args"] = arguments
    return fields


def _given(options: argparse.Namespace) -> dict[str, Any]:
    values = {name: getattr(options, name, None) for name in _FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def _structured(settings: list[str]) -> StructuredOutputs | None:
    fields: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise RequestError(
                f"--structured: expected KEY=VALUE such as regex=[0-9]+, got {setting!r}"
            )
        if text.startswith("@"):
            text = _content(text[1:])
        if key == "choice":
            fields.setdefault(key, []).append(text)
        elif key in fields:
            raise RequestError(f"--structured: {key} is given twice")
        else:
            fields[key] = parse_value(text) if key in ("json_object", "lenient") else text
    return StructuredOutputs.checked(fields, "--structured") if fields else None


def _content(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, ValueError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) else str(cause)
        raise RequestError(f"--structured: {name!r} cannot be read: {reason}") from None


def _plugin_args(settings: list[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for setting in settings:
        steps, text = split_setting(setting, "--plugin-args", "mirostat.tau=5.0")
        if len(steps) < 2:
            raise RequestError(
                f"--plugin-args: expected NAME.KEY=VALUE such as mirostat.tau=5.0, got {setting!r}"
            )
        table = arguments
        for step in steps[:-1]:
            table = table.setdefault(step, {})
            if not isinstance(table, dict):
                raise RequestError(
                    f"--plugin-args: {'.'.join(steps)} cannot be set, for {step} is {table!r}"
                )
        table[steps[-1]] = parse_value(text)
    return arguments
