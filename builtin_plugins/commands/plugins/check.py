"""`hardpoint plugins check`: whether an installed plugin keeps the rules of its kind."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hardpoint.errors import ConfigError
from hardpoint.plugins import CommandContext
from hardpoint.typed import parse_value

from .attest import add_signature, attest, attestation_lines, configure_attest

_GIB, _MIB = 1 << 30, 1 << 20

_FROM_BEST = (0, 1, 3, 2)
"""Exit codes: no check failed, one did, another contract, cannot load."""

_NOT_TESTED = (
    "checks that are not proved were not run, for the reasons above. The author gives samples by "
    'a suite in the package, named in the class body: conformance_suite = "package.module:Class" '
    "(docs/conformance-kit.md)"
)

_MARKS = {
    "proved": "proved",
    "failed": "FAILED",
    "expected_failure": "fails as expected",
    "not_proved": "not proved",
    "not_applicable": "does not apply",
}


def configure_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Run the conformance suite of an installed plugin's kind, without a test file, in a "
        "process with limits. Exit code 0: no check failed; 1: one did, or was not proved though "
        "--require-proof is given; 2: it cannot be loaded; 3: it states another contract. The "
        "limits protect against mistakes, not against malice: this is no sandbox."
    )
    parser.add_argument(
        "name",
        metavar="PLUGIN",
        help="a name, KIND/NAME, package.module:Class, or a distribution: all of its plugins",
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON per record")
    parser.add_argument(
        "--require-proof",
        action="store_true",
        help="also end with code 1 if a check is not proved, and list such checks",
    )
    configure_attest(parser)
    parser.add_argument(
        "--against",
        type=int,
        metavar="CONTRACT",
        help="the version of its kind's contract that it has to state",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the plugin, in the place of its configured ones; repeatable",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="end each plugin's process then (default: 600)",
    )
    parser.add_argument(
        "--memory-gib",
        type=float,
        default=8.0,
        metavar="N",
        help="private memory of a process (default: 8)",
    )
    parser.add_argument(
        "--file-mib",
        type=float,
        default=1024.0,
        metavar="N",
        help="size of a file it writes (default: 1024)",
    )
    parser.add_argument(
        "--files", type=int, default=1024, metavar="N", help="files open at once (default: 1024)"
    )


def run_check(options: argparse.Namespace, context: CommandContext) -> int:
    """Check the plugins of a name, print the records, return the exit code."""
    if options.signature is not None:
        if options.attest is None:
            raise ConfigError("--signature: expected --attest WHEEL, too, got none")
        signed = add_signature(options.name, options.attest, options.signature)
        return _print_records(signed, as_json=options.json)
    limits = {
        "seconds": _positive(options.seconds, "--seconds"),
        "memory_bytes": int(_positive(options.memory_gib, "--memory-gib") * _GIB),
        "file_bytes": int(_positive(options.file_mib, "--file-mib") * _MIB),
        "num_files": _positive(options.files, "--files"),
    }
    options_by_name = dict(map(_option, options.option))
    config, config_sources = context.load_config()
    records = context.check_plugin(
        config, config_sources, options.name, limits, options_by_name, options.against
    )
    if options.require_proof:
        records = _requiring_proof(records)
    if options.attest is not None:
        records = attest(records, options.name, options.attest, context.version)
    return _print_records(records, as_json=options.json)


def _positive(value: Any, name: str) -> Any:
    if not value > 0:
        raise ConfigError(f"{name}: expected a number > 0, got {value}")
    return value


def _option(setting: str) -> tuple[str, Any]:
    name, equals, text = setting.partition("=")
    if not (name and equals):
        raise ConfigError(f"--option: expected NAME=VALUE, got {setting!r}")
    return name, parse_value(text)


def _requiring_proof(records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield records with unproved checks counted as failed; then a record of all of them."""
    unproved: dict[str, list[str]] = {}
    for record in records:
        if record["record"] == "check" and record["outcome"] == "not_proved":
            unproved.setdefault(record["component"], []).append(record["check"])
        if record["record"] == "result" and record["component"] in unproved:
            record = {**record, "exit_code": record["exit_code"] or 1}
        yield record
    if unproved:
        yield {"record": "unproved", "checks": unproved}


def _print_records(records: Iterable[Mapping[str, Any]], *, as_json: bool) -> int:
    code = 0
    for record in records:
        if record["record"] == "result":
            code = max(code, record["exit_code"], key=_FROM_BEST.index)
        if record["record"] == "attestation" and record["problem"]:
            code = code or 1
        if as_json:
            print(json.dumps(record), flush=True)
        else:
            for line in _LINES[record["record"]](record):
                print(line, flush=True)
    return code


def _plugin_lines(record: Mapping[str, Any]) -> list[str]:
    accepted = " and ".join(map(str, record["accepted_contracts"]))
    return [
        record["component"],
        f"  {record['class']} from {record['package']}",
        f"  contract {record['contract']}; hardpoint {record['hardpoint']} accepts {accepted}",
        *([f"  deprecated: {record['deprecated']}"] if record["deprecated"] else []),
        f"  changes {'while an engine runs' if record['changes_live'] else 'with a restart'}",
        f"  checked by {record['suite']}",
        "",
    ]


def _check_lines(record: Mapping[str, Any]) -> list[str]:
    mark = _MARKS[record["outcome"]]
    why = f": {record['reason']}" if record["reason"] else ""
    lines = [f"  {mark:<17}  {record['check']}{why}"]
    if record["outcome"] == "proved":
        seen = f"; {record['evidence']}" if record["evidence"] else ""
        return [f"{lines[0]} ({record['seconds']:.1f} s{seen})"]
    if record["outcome"] == "failed":
        lines.append(f"      {record['claim']}")
    return lines + [f"      {line}" for line in record["evidence"].splitlines()]


def _enabling_lines(record: Mapping[str, Any]) -> list[str]:
    lines = ["", "with the plugins that are on"]
    if record["problem"]:
        return [*lines, f"  refused: {record['problem']}"]
    lines.append(f"  order of its kind: {', '.join(record['order'])}")
    for field, text in (
        ("in_place_of", "in the place of"),
        ("others_of_its_name", "has the name of"),
    ):
        lines += [f"  {text} {other}" for other in record[field]]
    return lines


def _cost_lines(record: Mapping[str, Any]) -> list[str]:
    lines = ["", "cost"]
    if "us_per_step" in record:
        without = record.get("us_per_step_without")
        compared = f", {without} without it" if without is not None else ""
        lines.append(
            f"  {record['us_per_step']} us per step of {record['rows_per_step']} rows of the "
            f"scripted model{compared}"
        )
    if metered := record.get("metered"):
        lines.append(
            f"  {metered['us_per_row']} us per row, {metered['us_per_step']} us per step in its "
            f"own methods"
        )
    return lines + ([f"  not measured: {record['reason']}"] if record["reason"] else [])


def _activity_lines(record: Mapping[str, Any]) -> list[str]:
    lines = ["", "actions of its code"]
    for verb in ("imported", "wrote", "connected", "listened", "started"):
        lines.append(f"  {verb:<9}  {', '.join(record[verb]) or 'nothing'}")
    return lines


def _result_lines(record: Mapping[str, Any]) -> list[str]:
    if record["exit_code"] in (2, 3):
        reason = "another contract" if record["exit_code"] == 3 else "cannot be loaded"
        return [f"{record['component']}: {reason}: {record['problem']}"]
    counts = [f"{record[name]} {_MARKS[name].lower()}" for name in _MARKS if record[name]]
    lines = ["", f"{record['component']}: {', '.join(counts)} ({record['seconds']:.1f} s)"]
    if record["not_proved"]:
        lines.append(f"  {_NOT_TESTED}")
    return lines + [f"  {line}" for line in record["problem"].splitlines()]


def _unproved_lines(record: Mapping[str, Any]) -> list[str]:
    named = [f"{component}: {', '.join(names)}" for component, names in record["checks"].items()]
    return ["", f"--require-proof: not proved: {'; '.join(named)}"]


_LINES = {
    "plugin": _plugin_lines,
    "check": _check_lines,
    "enabling": _enabling_lines,
    "cost": _cost_lines,
    "activity": _activity_lines,
    "result": _result_lines,
    "unproved": _unproved_lines,
    "attestation": attestation_lines,
}
