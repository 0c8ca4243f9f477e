"""Load on a server that speaks OpenAI's API: times, throughput, errors.

    python benchmarks/serve.py http://127.0.0.1:8000
    python benchmarks/serve.py http://127.0.0.1:8000 --concurrency 1 4 16 64 --ignore-eos
    python benchmarks/serve.py http://127.0.0.1:8000 --rate 2.5 --seconds 60 --json result.json
    python benchmarks/serve.py http+unix:///run/server.sock --endpoint completions

With `--concurrency`, each stream sends a request when its last one ended; with `--rate`, requests
arrive at random, as a Poisson process, whether others have ended or not. Answers are streamed.

Printed are, in milliseconds, percentiles of the time to the first text (TTFT), the time per output
token after it (TPOT), the time between two chunks with text (ITL), and the time to the end (E2E),
of the requests that ended well. Others are counted by what their error was; a stream waits after an
error for as long as Retry-After asks (0.1 s without it, at most 5 s). Prompts and lengths depend on
the seed alone; no two prompts begin alike, unless they share a prefix. Exit code: 1 if a load had
no request that ended well.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from http_load.calibrate import find_model, measure_costs
from http_load.clients import run_load, run_on_uvloop
from http_load.connection import Pool
from http_load.drive import Load
from http_load.figures import figures
from http_load.report import show
from http_load.target import Target
from http_load.workload import Costs, Lengths, SharedPrefix, Workload


def main() -> None:
    """Parse arguments, run the loads and show the figures."""
    options = _parse()
    headers = _headers(options)
    model, costs = run_on_uvloop(_ask_about(options, headers))
    workload = Workload(
        model=model,
        chat=options.endpoint == "chat",
        seed=options.seed,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        shared=options.shared_prefix,
        ignore_eos=options.ignore_eos,
        extra=options.body,
        costs=costs,
    )
    results = []
    for load in _loads(options):
        outcomes = run_load(options.url, headers, workload, load, processes=options.processes)
        results.append({"load": msgspec.to_builtins(load), **figures(outcomes)})
    notes = (
        []
        if costs.measured
        else ["/tokenize is not available: a term of a prompt counts as a token."]
    )
    show(_title(workload), {result["load"]["name"]: result for result in results}, notes)
    if options.json:
        report = {"settings": _settings(options, workload), "notes": notes, "loads": results}
        options.json.write_text(json.dumps(report, indent=1))
    if any(result["failed"] == result["requests"] for result in results):
        raise SystemExit(1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="http://HOST:PORT, https://HOST:PORT or http+unix:///PATH")
    parser.add_argument(
        "--uds", default="", metavar="PATH", help="reach the host by this Unix socket"
    )
    parser.add_argument("--insecure", action="store_true", help="do not check the certificate")
    parser.add_argument("--model", help="default: the first that /v1/models lists")
    parser.add_argument(
        "--api-key-file", type=Path, help="file of the key; default: environment HARDPOINT_API_KEY"
    )
    parser.add_argument("--endpoint", choices=["chat", "completions"], default="chat")
    arrival = parser.add_mutually_exclusive_group()
    arrival.add_argument(
        "--concurrency", type=_positive, nargs="+", default=None, help="default: 1 4 16 64"
    )
    arrival.add_argument(
        "--rate", type=float, nargs="+", help="requests per second, Poisson arrivals"
    )
    end = parser.add_mutually_exclusive_group()
    end.add_argument(
        "--requests", type=_positive, help="per load; default: 4 of each stream, at least 16"
    )
    end.add_argument("--seconds", type=float, help="per load, until its last request is sent")
    lengths = _typed(Lengths.parse)
    parser.add_argument(
        "--input-tokens", type=lengths, default="128", help="128, 64-512 or normal:128:40"
    )
    parser.add_argument("--output-tokens", type=lengths, default="64", help="max_tokens, as above")
    parser.add_argument(
        "--shared-prefix",
        type=_typed(SharedPrefix.parse),
        metavar="TOKENSxGROUPS",
        help="tokens before the input tokens that all requests of a group share",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="answers have all output tokens")
    parser.add_argument(
        "--body",
        type=_typed(_object),
        default={},
        metavar="JSON",
        help="further fields of requests",
    )
    parser.add_argument(
        "--warm-up", type=int, help="requests before a load; default: one per stream"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a request")
    parser.add_argument("--processes", type=_positive, default=1, help="that send the load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if options.rate and min(options.rate) <= 0:
        parser.error(f"argument --rate: expected numbers above 0, got {min(options.rate):g}")
    try:
        options.url = Target.parse(options.url, uds=options.uds, verify=not options.insecure)
    except ValueError as error:
        parser.error(str(error))
    return options


def _typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a type of argparse, which shows why a text is refused."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text!r}")
    return value


def _headers(options: argparse.Namespace) -> dict[str, str]:
    key = os.environ.get("HARDPOINT_API_KEY", "")
    if options.api_key_file:
        key = options.api_key_file.read_text().strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _ask_about(options: argparse.Namespace, headers: dict[str, str]) -> tuple[str, Costs]:
    """Return the model, and how many tokens text has."""
    pool = Pool(options.url, headers)
    try:
        model = options.model or await find_model(pool)
        return model, await measure_costs(pool, model, chat=options.endpoint == "chat")
    except OSError as error:
        address = options.url.uds or f"{options.url.host}:{options.url.port}"
        raise SystemExit(f"serve.py: no server at {address}: {error}") from None
    except ValueError as error:
        raise SystemExit(f"serve.py: {error}") from None
    finally:
        pool.close()


def _loads(options: argparse.Namespace) -> list[Load]:
    common = {"seconds": options.seconds, "timeout": options.timeout}
    loads = []
    for rate in options.rate or ():
        requests = options.requests or (None if options.seconds else max(16, round(30 * rate)))
        warm_up = 1 if options.warm_up is None else options.warm_up
        name = f"{rate:g} requests/s"
        loads.append(Load(name, rate=rate, requests=requests, warm_up=warm_up, **common))
    for streams in () if options.rate else options.concurrency or (1, 4, 16, 64):
        requests = options.requests or (None if options.seconds else max(16, 4 * streams))
        warm_up = streams if options.warm_up is None else options.warm_up
        name = f"{streams} streams" if streams > 1 else "1 stream"
        loads.append(Load(name, concurrency=streams, requests=requests, warm_up=warm_up, **common))
    return loads


def _settings(options: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    return {
        "url": msgspec.to_builtins(options.url),
        "model": workload.model,
        "endpoint": options.endpoint,
        "seed": workload.seed,
        "input_tokens": workload.input_tokens.text,
        "output_tokens": workload.output_tokens.text,
        "shared_prefix": msgspec.to_builtins(workload.shared),
        "ignore_eos": workload.ignore_eos,
        "body": workload.extra,
    }


def _title(workload: Workload) -> str:
    lengths = f"{workload.input_tokens.text} in / {workload.output_tokens.text} out"
    shared = workload.shared
    more = f" after one of {shared.groups} prefixes of {shared.tokens}" if shared else ""
    return f"{workload.model}: {lengths}{more}"


if __name__ == "__main__":
    main()
