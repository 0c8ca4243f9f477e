"""Options of a load, of its objective and of settings that vary."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.errors import ConfigError
from hardpoint.typed import parse_value, split_setting

VARY_EXAMPLE = "scheduler.max_num_seqs=32"
_BRACKETS = {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that define which requests a load has."""
    add = parser.add_argument
    add(
        "--load",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of the synthetic load, such as rate=4 or prompt.median=512",
    )
    forms = "mooncake, bailian, guidellm, journal or minimal"
    add("--form", help=f"of the trace: {forms} (default: found by its first lines)")
    add("--hash-tokens", type=int, metavar="N", help="tokens that each of its hash_ids stands for")
    add(
        "--speed", type=float, default=1.0, metavar="X", help="how many times as fast requests come"
    )
    add("--requests", type=int, metavar="N", help="the first N requests alone")


def add_objective_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the service level objective."""
    add = parser.add_argument
    add(
        "--slo-ttft-ms",
        type=float,
        default=1000.0,
        metavar="MS",
        help="limit to the first token (default: 1000)",
    )
    add(
        "--slo-tpot-ms",
        type=float,
        default=50.0,
        metavar="MS",
        help="limit per further token (default: 50)",
    )


def load_of(options: argparse.Namespace, trace: str | None) -> dict[str, Any]:
    """Return the fields of a load.

    Args:
        options: options of `add_load_options`.
        trace: path of a file; None is a synthetic load.
    """
    fields: dict[str, Any] = {"speed": options.speed}
    if options.requests is not None:
        fields["limit"] = options.requests
    if trace is None:
        for name in ("form", "hash_tokens"):
            if (value := getattr(options, name)) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag}: expected a file as TRACE, got {value!r} and none")
        fields["synthetic"] = _synthetic(options.load)
        return fields
    if options.load:
        raise ConfigError(f"--load: expected synthetic as TRACE, got {trace!r}")
    fields |= {"trace": trace, "form": options.form or "auto"}
    if options.hash_tokens is not None:
        fields["block_size"] = options.hash_tokens
    return fields


def _synthetic(settings: Sequence[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for setting in settings:
        steps, text = split_setting(setting, "--load", "rate=4")
        table = fields
        for step in steps[:-1]:
            table = table.setdefault(step, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--load {setting}: {step} is set to a value as well")
        table[steps[-1]] = parse_value(text)
    return fields


def objective_of(options: argparse.Namespace) -> dict[str, float]:
    """Return the fields of the objective, in seconds."""
    return {
        "ttft": _positive(options.slo_ttft_ms, "--slo-ttft-ms") / 1e3,
        "tpot": _positive(options.slo_tpot_ms, "--slo-tpot-ms") / 1e3,
    }


def _positive(value: float, name: str) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}: expected a number > 0, got {value:g}")
    return value


def varied(settings: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each setting that `--vary PATH=VALUE[,VALUE...]` names."""
    values: dict[str, list[str]] = {}
    for setting in settings:
        steps, text = split_setting(setting, "--vary", VARY_EXAMPLE)
        values.setdefault(".".join(steps), []).extend(split_values(text))
    return values


def split_values(text: str) -> list[str]:
    """Return the parts of a text between commas that are not in quotes or brackets."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += _BRACKETS.get(character, 0)
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def combinations(
    values: Mapping[str, Sequence[str]], short: Sequence[str] = (), units: Mapping[str, str] = {}
) -> dict[str, dict[str, str]]:
    """Return all combinations of settings, by names of the settings that not all of them have.

    Args:
        values: values of each setting.
        short: settings with only the value in names.
        units: settings with the value and a noun in names.

    Raises:
        ConfigError: one is there twice.
    """
    variants: dict[str, dict[str, str]] = {}
    for combination in itertools.product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        parts = []
        for path, text in settings.items():
            if len(values[path]) > 1 or len(values) == 1:
                longer = f"{text} {units[path]}" if path in units else f"{path}={text}"
                parts.append(text if path in short else longer)
        name = ", ".join(parts) or ", ".join(settings.values()) or "as configured"
        if name in variants:
            raise ConfigError(f"variants: {name!r} is given twice")
        variants[name] = settings
    return variants
