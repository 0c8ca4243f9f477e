"""Options of loads that are sent to servers, which `serve` and `sweep` have."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from hardpoint.builtin_plugins.commands.loads.options import (
    add_load_options,
    add_objective_options,
    load_of,
    objective_of,
)
from hardpoint.errors import ConfigError, shown

_API_KEY = "HARDPOINT_API_KEY"
_STREAMS = 16
"""Streams where nothing states how requests are sent."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a server's address, of the requests, and of how they are sent."""
    add = parser.add_argument
    add(
        "--url",
        metavar="URL",
        help="a server that runs: http://HOST:PORT, https://HOST:PORT or "
        "http+unix:///PATH; --model is the name that it knows, by default the first that it lists",
    )
    add("--uds", metavar="PATH", default="", help="reach the URL's host by this Unix socket")
    add("--insecure", action="store_true", help="do not check the certificate")
    add("--api-key-file", metavar="FILE", help=f"file of the key (default: {_API_KEY})")
    add("--trace", metavar="FILE", help="requests of a trace, instead of synthetic ones")
    add("--input-tokens", metavar="N", help="short for --load prompt.median=N")
    add("--output-tokens", metavar="N", help="short for --load output.median=N")
    add_load_options(parser)
    add(
        "--concurrency",
        type=int,
        nargs="+",
        metavar="N",
        help="streams, each of which sends a request when its last one ended; several values are "
        f"several loads (default: {_STREAMS}, but the times of a trace, or of --load rate=R)",
    )
    add("--rate", type=float, nargs="+", metavar="R", help="requests per second that arrive")
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="of --rate: 1 is a Poisson "
        "process, 0 equal distances, above 1 are bursts (default: 1)",
    )
    add("--seconds", type=float, metavar="S", help="after which a load sends no request any more")
    add("--warm-up", type=int, metavar="N", help="requests before a load (default: one per stream)")
    add("--timeout", type=float, default=600.0, metavar="S", help="of a request (default: 600)")
    add("--processes", type=int, default=1, metavar="N", help="client processes (default: 1)")
    add("--seed", type=int, default=0, metavar="N", help="of lengths, texts and arrivals")
    add("--endpoint", choices=["chat", "completions"], default="chat", help="(default: chat)")
    add("--stop-at-eos", action="store_true", help="answers may end before all their tokens")
    add("--only-openai", action="store_true", help="send no field that OpenAI's API does not have")
    add(
        "--retain-seconds",
        type=float,
        metavar="S",
        help="for how long a server of Hardpoint is asked to retain the cache of a conversation",
    )
    add("--body", metavar="JSON", default="{}", help="further fields of each request")
    add_objective_options(parser)


def plan_of(options: argparse.Namespace, model: str | None) -> dict[str, Any]:
    """Return the fields of a `hardpoint.bench.Plan`.

    Args:
        options: those of `add_options`.
        model: name of the model, as the server knows it; None is the first that it lists.

    Raises:
        ConfigError: one is wrong; names it.
    """
    for name in ("input", "output"):
        if (tokens := getattr(options, f"{name}_tokens")) is not None:
            field = "prompt" if name == "input" else "output"
            options.load.append(f"{field}.median={tokens}")
    if options.trace is not None and options.load:
        raise ConfigError(f"--load: expected no --trace, got {shown(options.trace)}")
    load = load_of(options, options.trace)
    if options.trace is None:
        load["synthetic"].setdefault("seed", options.seed)
    return {
        "load": load,
        "traffic": _traffic(options, load),
        "fields": {
            "model": model or "",
            "endpoint": options.endpoint,
            "ignore_eos": not options.stop_at_eos,
            "only_openai": options.only_openai,
            "retain_seconds": options.retain_seconds,
            "body": _object(options.body),
        },
        "objective": objective_of(options),
    }


def _traffic(options: argparse.Namespace, load: dict[str, Any]) -> list[dict[str, Any]]:
    if options.concurrency and options.rate:
        raise ConfigError("--rate: expected no --concurrency, got both")
    common = {
        "seconds": options.seconds,
        "warm_up": options.warm_up,
        "timeout": options.timeout,
        "processes": options.processes,
        "seed": options.seed,
        "burstiness": options.burstiness,
    }
    if options.concurrency:
        return [{**common, "concurrency": count} for count in options.concurrency]
    if options.rate:
        return [{**common, "rate": rate} for rate in options.rate]
    has_times = options.trace is not None or "rate" in load["synthetic"]
    return [common if has_times else {**common, "concurrency": _STREAMS}]


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"--body: expected a JSON object, got {shown(text)}")
    return value


def address_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a `hardpoint.bench.ServerAddress`.

    Raises:
        ConfigError: the file of the key cannot be read.
    """
    key = os.environ.get(_API_KEY, "")
    if options.api_key_file is not None:
        try:
            key = Path(options.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            name = shown(options.api_key_file)
            raise ConfigError(f"--api-key-file: {name} cannot be read: {reason}") from None
    return {
        "url": options.url,
        "uds": options.uds,
        "verify": not options.insecure,
        "api_key": key,
    }


def refuse_address_options(options: argparse.Namespace) -> None:
    """Refuse options of a server that runs, where one is started.

    Raises:
        ConfigError: one is given; names it.
    """
    for name in ("uds", "insecure", "api_key_file"):
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')}: expected --url as well")


def start_of(options: argparse.Namespace, model: str | None) -> dict[str, Any]:
    """Return the fields of a `hardpoint.bench.ServerStart`, as the command line configures it."""
    return {
        "model": model,
        "config": getattr(options, "config", None),
        "settings": list(getattr(options, "set", [])),
    }
