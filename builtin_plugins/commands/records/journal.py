"""`hardpoint replay` and `hardpoint journal`: replay or export a recorded journal."""

from __future__ import annotations

import argparse
import json
import sys

from hardpoint.errors import ConfigError
from hardpoint.plugins import Command, CommandContext

from .new_file import new_file

_DIFFERS = 1


def _configure_replay(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the engine of a journal (engine.journal) again, from its recorded inputs; "
        "compare each plan and each token. Exit code 0: all is the same; 1: something differs; "
        "2: the journal cannot be used. The journal names plugins and options, which are loaded: "
        "replay journals of people that you trust."
    )
    parser.add_argument("file", metavar="FILE", help="the journal")
    parser.add_argument("--until", type=int, metavar="STEP", help="stop after this step")
    parser.add_argument(
        "--request", metavar="ID", help="show the history of a request instead; no engine is run"
    )
    parser.add_argument(
        "--replan",
        metavar="policy=NAME",
        help="plan again with another scheduling policy instead, without the model, and show the "
        "first step that differs",
    )
    parser.add_argument(
        "--anyway",
        action="store_true",
        help="also if another build, model or set of plugins recorded it, or it is damaged later "
        "on: its tokens are forced, and the first different one is shown",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _run_replay(options: argparse.Namespace, context: CommandContext) -> int:
    if options.request is not None:
        _refuse_with_request(options)
    journal = context.open_journal(options.file, options.anyway)
    if options.request is not None:
        for line in journal.request(options.request):
            print(line)
        return 0
    if options.replan is not None:
        setting, _, policy = options.replan.partition("=")
        if setting != "policy" or not policy:
            raise ConfigError(f"--replan: expected policy=NAME, got {options.replan!r}")
        report = journal.replan(policy, options.until)
    else:
        report = journal.replay(options.until)
    if options.json:
        print(json.dumps(report.as_dict()))
    else:
        _print_report(report.as_dict())
    return 0 if report.difference is None else _DIFFERS


def _refuse_with_request(options: argparse.Namespace) -> None:
    for option in ("replan", "until", "json"):
        if getattr(options, option) not in (None, False):
            raise ConfigError(f"--{option}: expected no --request with it, which runs no engine")


def _print_report(report: dict[str, object]) -> None:
    for note in report["notes"] if isinstance(report["notes"], list) else ():
        print(f"note: {note}", file=sys.stderr)
    if report["difference"] is None:
        print(
            f"the same: {report['steps']} steps, {report['tokens']} tokens of {report['requests']} "
            "requests"
        )
    else:
        print(f"differs after {report['steps']} steps and {report['tokens']} tokens")
        print(report["difference"])
        if count := report["num_differing"]:
            print(f"requests with another token: {count} of {report['requests']}")


REPLAY = Command("replay", "run the engine of a journal again", _configure_replay, _run_replay)


def _configure_journal(parser: argparse.ArgumentParser) -> None:
    parser.description = "Take a journal (engine.journal) elsewhere."
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = commands.add_parser(
        "export",
        help="write the times and lengths of a journal, without text, tokens or options",
        description="Write a trace of a journal: a line of JSON per request. It has no text, no "
        "token ids, no names and no options of plugins; blocks of prompts are salted hashes.",
    )
    export.add_argument("file", metavar="FILE", help="the journal")
    export.add_argument("output", metavar="OUTPUT", help="the file to write; - is standard output")
    export.add_argument(
        "--form",
        choices=("redacted", "mooncake"),
        default="redacted",
        help="redacted: also priorities, ends and steps (default); mooncake: the fields of "
        "Mooncake's traces",
    )
    export.add_argument("--anyway", action="store_true", help="also if it is damaged later on")


def _run_journal(options: argparse.Namespace, context: CommandContext) -> int:
    lines = context.open_journal(options.file, options.anyway).export(options.form)
    if options.output == "-":
        for line in lines:
            print(line)
        return 0
    try:
        with new_file(options.output, "OUTPUT") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as cause:
        raise ConfigError(f"OUTPUT: {options.output!r} cannot be written: {cause}") from cause
    return 0


JOURNAL = Command("journal", "take a journal elsewhere", _configure_journal, _run_journal)
