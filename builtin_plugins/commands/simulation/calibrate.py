"""`hardpoint calibrate`: measure the cost of a model's steps on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardpoint.builtin_plugins.commands.loads.progress import ProgressLine
from hardpoint.errors import ConfigError
from hardpoint.plugins import Command, CommandContext

from . import DEFAULT_FILE

_DISTURBED = 0.1  # share of the steps from which it is worth a remark


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a model with batches of many sizes, measure each step, and write the cost of a "
        "step by its work, for `hardpoint simulate`. Leave the machine idle otherwise."
    )
    parser.add_argument("measured", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--output",
        default=DEFAULT_FILE,
        metavar="FILE",
        help=f"the file to write (default: {DEFAULT_FILE})",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="for how long; each size is run at least once (default: 60)",
    )


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    model = options.measured
    config, sources = context.load_config(model=model) if model else context.load_config()
    path = Path(options.output)
    if not path.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {str(path.parent)!r}")
    cost: Mapping[str, Any] = {}
    with ProgressLine(is_shown=not context.quiet) as progress:
        for record in context.calibrate(config, sources, options.seconds):
            if record["record"] == "result":
                cost = record["cost"]
            else:
                progress.show(
                    f"{record['seconds']:.0f} of {record['of']:.0f} s, {record['steps']} steps"
                )
    try:
        path.write_text(json.dumps(cost, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {str(path)!r} cannot be written: {error.strerror}") from None
    if not context.quiet:
        _print(cost, path)
    return 0


def _print(cost: Mapping[str, Any], path: Path) -> None:
    residuals = cost["residuals"]
    print(f"{path}: {cost['model']} on {cost['machine']}")
    for name, of in (("decode", "steps of one token per request"), ("prompts", "with prompts")):
        error = residuals[name]
        print(
            f"  {error['steps']} {of}: error of half of them at most {error['p50']:.1%}, of 95 % "
            f"{error['p95']:.1%}; of all together {error['bias']:+.1%}"
        )
    if cost["disturbed"] > _DISTURBED:
        print(
            f"hardpoint: {cost['disturbed']:.0%} of the steps took another time than equal ones, "
            "and do not count: was the machine busy?",
            file=sys.stderr,
        )


COMMAND = Command("calibrate", "measure the cost of a model's steps", _configure, _run)
