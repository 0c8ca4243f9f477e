"""Commands with one mistake each."""

from __future__ import annotations

import sys
import traceback

from hardpoint.plugins import Command, RequestError


def configure(parser):
    parser.add_argument("--size", type=int, default=1, help="how many")


def unexplained(parser):
    parser.add_argument("--size")


def clashing(parser):
    parser.add_argument("--model", help="mine")


def table(parser):
    parser.add_argument("--color", type={"red": 1}.__getitem__, default=1, help="one of few")


def formatted(parser):
    parser.add_argument("--size", help="100 % of it")


def run(options, context):
    if options.size < 0:
        raise RequestError(f"--size: expected a number from 0, got {options.size}")
    print("size", options.size)
    return 0


def exits(options, context):
    sys.exit(0)


def nothing(options, context):
    print("done")


def fails(options, context):
    return 1 // (options.size - 1)


def prints_traceback(options, context):
    try:
        return [0, 0, 0][abs(options.size)]
    except IndexError:
        traceback.print_exc()
        return 1


def raises(options, context):
    return {1: 0}[options.size]


def accepts(options, context):
    return 0


RIGHT = Command("measure", "Measure something.", configure, run)
CLASHES = Command("generate", "Generate otherwise.", configure, run)
BAD_NAME = Command("say hello", "Say hello.", configure, run)
NO_HELP = Command("measure", " ", configure, run)
LONG_HELP = Command("measure", "Measure.\nOr not.", configure, run)
UNEXPLAINED = Command("measure", "Measure.", unexplained, accepts)
CLASHING = Command("measure", "Measure.", clashing, accepts)
BAD_FORMAT = Command("measure", "Measure.", formatted, accepts)
EXITS = Command("measure", "Measure.", configure, exits)
NOTHING = Command("measure", "Measure.", configure, nothing)
FAILS = Command("measure", "Measure.", configure, fails)
TABLE = Command("measure", "Measure.", table, accepts)
RAISES = Command("measure", "Measure.", configure, raises)
PRINTS = Command("measure", "Measure.", configure, prints_traceback)
ACCEPTS = Command("measure", "Measure.", configure, accepts)
