"""Throughput of several engines whose devices sleep, and what they cost the program before them.

    python benchmarks/many_engines.py
    python benchmarks/many_engines.py --engines 1 8 --rows 8 --tokens 200 --milliseconds 40

Each engine has the scripted model and a step of a given time in which its processor is free, as
with a GPU. The requests of all engines come at once. Printed are tokens per second, their share of
what as many engines alone would give, and the processor time of the program: per request, with one
token, and per further token.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from engines import parser_of, save
from tables import show_table

from hardpoint import LLM, SamplingParams, plugins
from hardpoint.plugins import LogitsProcessor, Phase, Rows
from hardpoint.testing import scripted_config, write_scripted_model


class Device(LogitsProcessor):
    """Ends a step some milliseconds after it began to sample."""

    contract = 1
    phase = Phase.PENALTY

    class Arguments(plugins.Arguments):
        """The time."""

        milliseconds: float

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Sleep."""
        time.sleep(max(one.milliseconds for one in rows.arguments()) / 1000)
        return logits


def run(llm: LLM, count: int, tokens: int, milliseconds: float) -> tuple[float, float]:
    """Return the seconds and the processor seconds of requests that come at once."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        plugin_args={"device": {"milliseconds": milliseconds}},
    )
    prompts = [f"prompt {number}" for number in range(count)]
    began, spent = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params)
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return time.perf_counter() - began, time.process_time() - spent


def measure(folder: Path, engines: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the figures of so many engines."""
    config = scripted_config(
        folder,
        {
            "engine": {"in_process": False},
            "parallel": {"data": engines},
            "plugins": {"enable": ["many_engines:Device"]},
        },
    )
    count = engines * arguments.rows
    with LLM(config=config) as llm:
        run(llm, count, 2, 1.0)  # whatever is done once
        first = statistics.median(run(llm, count, 1, 0.0)[1] for _ in range(arguments.rounds))
        seconds, spent = run(llm, count, arguments.tokens, arguments.milliseconds)
    further = count * (arguments.tokens - 1)
    return {
        "tokens_per_second": count * arguments.tokens / seconds,
        "microseconds_per_request": first / count * 1e6,
        "microseconds_per_token": (spent - first) / further * 1e6,
    }


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, rounds=5, peers=False)
    parser.add_argument("--engines", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, default=8, help="requests of each engine")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--milliseconds", type=float, default=40.0, help="of a step")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = write_scripted_model(Path(name))
        results = {str(n): measure(folder, n, arguments) for n in arguments.engines}
    first, one = next(iter(results.items()))
    rows = []
    for size, figures in results.items():
        share = figures["tokens_per_second"] / (one["tokens_per_second"] * int(size) / int(first))
        rate, request, token = figures.values()
        rows.append([size, f"{rate:.0f}", f"{share:.3f}", f"{request:.0f}", f"{token:.1f}"])
    title = f"{arguments.rows} requests each, steps of {arguments.milliseconds:g} ms"
    show_table(
        title, ("engines", "tok/s", "of n times one", "us per request", "us per token"), rows
    )
    save(arguments.json, results)


if __name__ == "__main__":
    main()
