"""`hardpoint simulate`: what other settings would do to the requests of a trace."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hardpoint.errors import ConfigError
from hardpoint.plugins import Command, CommandContext, EngineConfig
from hardpoint.typed import parse_value, split_setting

from . import DEFAULT_FILE
from .page import page
from .progress import Progress
from .summary import print_summary

_SYNTHETIC = "synthetic"
_PATHS = {
    "policy": "scheduler.policy",
    "balancer": "parallel.balancer",
    "eviction": "kv_cache.eviction",
    "replicas": "parallel.data",
}
"""The setting of each option that may be given several times."""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the requests of a trace through the real scheduler, KV cache, policies and balancer, "
        "on a virtual clock with the step times of `hardpoint calibrate`. Options that are given "
        "several times make a variant of each value; the variants are compared with the first one."
    )
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a file of requests, or `synthetic`: some that are made")
    add("--policy", action="append", default=[], help="name or FQCN of a scheduling policy")
    add("--balancer", action="append", default=[], help="name or FQCN of a balancer")
    add("--eviction", action="append", default=[], help="name or FQCN of an eviction policy")
    add("--replicas", action="append", default=[], type=int, help="number of engines")
    add(
        "--vary",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="any other setting, such as scheduler.max_num_seqs=32",
    )
    add("--cost", default=DEFAULT_FILE, metavar="FILE", help=f"(default: {DEFAULT_FILE})")
    add("--slo-ttft-ms", type=float, default=1000.0, help="to the first token (default: 1000)")
    add("--slo-tpot-ms", type=float, default=50.0, help="per further token (default: 50)")
    add(
        "--load",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of the synthetic load, such as rate=4 or prompt.median=512",
    )
    add("--form", default="auto", help="of the trace: mooncake, bailian, guidellm or minimal")
    add("--hash-tokens", type=int, metavar="N", help="tokens that each of its hash_ids stands for")
    add("--speed", type=float, default=1.0, help="how many times as fast requests come")
    add("--requests", type=int, metavar="N", help="the first N requests alone")
    add("--processes", type=int, help="variants that run at the same time (default: processors)")
    add("--json", action="store_true", help="print JSON")
    add("--html", metavar="FILE", help="also write a page with plots")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    objective = {
        "ttft": _positive(options.slo_ttft_ms, "--slo-ttft-ms") / 1e3,
        "tpot": _positive(options.slo_tpot_ms, "--slo-tpot-ms") / 1e3,
    }
    variants = _variants(options, context)
    load = _load(options)
    processes = options.processes or min(len(variants), os.cpu_count() or 1)
    results: dict[str, Any] = {"load": load, "cost": options.cost, "variants": {}}
    with Progress(is_shown=not context.quiet) as progress:
        for record in context.simulate(
            variants, load, cost=options.cost, objective=objective, processes=processes
        ):
            if record["record"] == "progress":
                progress.show(
                    f"{record['variant']}: {record['requests']} of {record['of']} requests, "
                    f"{record['seconds']:.0f} s simulated"
                )
            elif record["record"] == "result":
                results["variants"][record["variant"]] = {
                    key: record[key] for key in ("report", "curves", "real_seconds")
                }
            else:
                results["comparison"] = {key: record[key] for key in ("with", "changes")}
    results["variants"] = {name: results["variants"][name] for name in variants}
    if options.html:
        _write(Path(options.html), page(results, context.version))
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        print_summary(results)
    return 0


def _positive(value: float, name: str) -> float:
    if not value > 0:
        raise ConfigError(f"{name}: expected a number > 0, got {value:g}")
    return value


def _variants(options: argparse.Namespace, context: CommandContext) -> dict[str, EngineConfig]:
    """Return the configuration of each combination of the settings that have several values."""
    values: dict[str, list[str]] = {}
    for option, path in _PATHS.items():
        if given := getattr(options, option):
            values[path] = [str(value) for value in given]
    for setting in options.vary:
        steps, text = split_setting(setting, "--vary", "scheduler.max_num_seqs=32")
        values.setdefault(".".join(steps), []).append(text)
    found: dict[str, EngineConfig] = {}
    for combination in itertools.product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        name = _name(settings, values)
        if name in found:
            raise ConfigError(f"variants: {name!r} is given twice")
        given = (f"{path}={text}" for path, text in settings.items())
        found[name], sources = context.load_config(*given)
        context.load_catalog(found[name], sources)  # refuses unknown names, with their origin
    return found


def _name(settings: Mapping[str, str], values: Mapping[str, Sequence[str]]) -> str:
    """Return the name of a variant: the settings that not all variants have."""
    parts = []
    for path, text in settings.items():
        if len(values[path]) > 1 or len(values) == 1:
            short = path in (_PATHS["policy"], _PATHS["balancer"], _PATHS["eviction"])
            number = f"{text} replicas" if path == _PATHS["replicas"] else f"{path}={text}"
            parts.append(text if short else number)
    return ", ".join(parts) or ", ".join(settings.values()) or "as configured"


def _load(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the load."""
    found: dict[str, Any] = {"speed": options.speed}
    if options.requests is not None:
        found["limit"] = options.requests
    if options.trace == _SYNTHETIC:
        found["synthetic"] = _synthetic(options.load)
        return found
    if options.load:
        raise ConfigError(f"--load: expected {_SYNTHETIC} as TRACE, got {options.trace!r}")
    found |= {"trace": options.trace, "form": options.form}
    if options.hash_tokens is not None:
        found["block_size"] = options.hash_tokens
    return found


def _synthetic(settings: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in settings:
        steps, text = split_setting(setting, "--load", "rate=4")
        table = found
        for step in steps[:-1]:
            table = table.setdefault(step, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--load {setting}: {step} is set to a value as well")
        table[steps[-1]] = parse_value(text)
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: {str(path)!r} cannot be written: {error.strerror}") from None


COMMAND = Command(
    "simulate", "Run a trace on a virtual clock, under several settings.", _configure, _run
)
