"""`hardpoint engine --join`: an engine for a program on another machine."""

from __future__ import annotations

import argparse

from hardpoint.plugins import Command, CommandContext


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] --join ADDRESS [--keys DIR]"
    parser.description = (
        "Run an engine for the program at ADDRESS (its parallel.join_address). The configuration "
        "here has the model, and all plugins that may be loaded; the rest is the program's. When "
        "an engine ends, or the program is gone, the next one joins; SIGTERM ends all."
    )
    add = parser.add_argument
    add("--join", required=True, metavar="ADDRESS", help="tcp://HOST:PORT")
    add("--keys", metavar="DIR", help="the folder that `hardpoint keys new` made for this machine; "
        "needed where ADDRESS is not on this machine")  # fmt: skip
    add("--rank", type=int, metavar="N", help="the rank to take (default: any that waits)")
    add("--once", action="store_true", help="end with the first engine, or when its program ends")


def _run(options: argparse.Namespace, context: CommandContext) -> int:
    config, config_sources = context.load_config()
    context.join_engine(
        config,
        config_sources,
        options.join,
        keys=options.keys,
        rank=options.rank,
        once=options.once,
    )
    return 0


COMMAND = Command("engine", "run an engine for a program on another machine", _configure, _run)
