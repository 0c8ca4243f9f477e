"""`hardpoint plugins check --attest`: the proof of a package, written into its wheel."""

from __future__ import annotations

import argparse
import csv
import io
import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import importlib_metadata

from hardpoint.errors import ConfigError
from hardpoint.toolkit.proof import (
    SIGNATURE_FILE,
    STATEMENT_FILE,
    CheckedComponent,
    Proof,
    ProofError,
    decode_statement,
    encode_statement,
    info_folder,
    normal_name,
    package_files,
    record_entry,
    wheel_files,
)

INSTALLED = "installed"
"""Value of `--attest` that stands for the installed package instead of a wheel."""

_GROUP = "hardpoint."


def configure_attest(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of proofs."""
    parser.add_argument(
        "--attest",
        metavar="WHEEL",
        help="write the proved checks into the wheel of the installed package; "
        f'"{INSTALLED}" writes it into the installed package',
    )
    parser.add_argument(
        "--signature",
        metavar="BUNDLE",
        help="with --attest: add a Sigstore bundle of the proof that the wheel has, check nothing",
    )


def attest(
    records: Iterable[Mapping[str, Any]], name: str, wheel: str, version: str
) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a check, then write the proof and yield its record.

    Args:
        records: records of the check of all plugins of the package.
        name: the package.
        wheel: path of its wheel, or `INSTALLED`.
        version: version of Hardpoint.

    Raises:
        ConfigError: the name is no package, or its installed files differ from the wheel.
    """
    distribution = _installed(name)
    _package_files(distribution, wheel)  # before checks that take minutes
    plugins: dict[str, Mapping[str, Any]] = {}
    rules: dict[str, dict[str, str]] = {}
    code = 0
    for record in records:
        if record["record"] == "plugin":
            plugins[record["component"]] = record
        elif record["record"] == "check":
            rules.setdefault(record["component"], {})[record["check"]] = record["outcome"]
        elif record["record"] == "result":
            code = code or record["exit_code"]
        yield record
    problem = "a check failed" if code else _unchecked(distribution, plugins)
    if problem:
        yield {"record": "attestation", "file": "", "problem": problem}
        return
    proof = Proof(
        distribution=distribution.name,
        version=distribution.version,
        engine=version,
        kit=version,
        components=[
            CheckedComponent(
                component=component,
                value=record["class"],
                contract=record["contract"],
                suite=record["suite"],
                rules=rules.get(component, {}),  # type: ignore[arg-type]
            )
            for component, record in plugins.items()
        ],
        files=_package_files(distribution, wheel),
    )
    yield _write(distribution, wheel, {STATEMENT_FILE: encode_statement(proof)})


def add_signature(name: str, wheel: str, bundle: str) -> Iterator[Mapping[str, Any]]:
    """Add a Sigstore bundle of its statement to a wheel that has a proof; yield a record.

    Raises:
        ConfigError: there is no proof to sign, or the bundle cannot be read.
    """
    distribution = _installed(name)
    try:
        data = Path(bundle).read_bytes()
        if wheel == INSTALLED:
            statement = (info_folder(distribution) / STATEMENT_FILE).read_bytes()
        else:
            with zipfile.ZipFile(wheel) as file:
                statement = file.read(f"{_info_name(file)}/{STATEMENT_FILE}")
        decode_statement(statement)
    except (OSError, KeyError, zipfile.BadZipFile, ProofError) as cause:
        raise ConfigError(
            f"--signature: expected a wheel with a proof, and a bundle: {cause}"
        ) from cause
    files = {STATEMENT_FILE: statement, SIGNATURE_FILE: data}
    yield _write(distribution, wheel, files)


def attestation_lines(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of the record for a terminal."""
    if record["problem"]:
        return ["", f"no proof was written: {record['problem']}"]
    state = "with a signature, not verified here" if record["signed"] else "unsigned"
    return ["", f"proof written to {record['file']} ({state})"]


def _installed(name: str) -> importlib_metadata.Distribution:
    try:
        distribution: importlib_metadata.Distribution = importlib_metadata.Distribution.from_name(
            name
        )
        return distribution
    except (importlib_metadata.PackageNotFoundError, ValueError) as cause:
        raise ConfigError(
            f"--attest: expected the name of an installed package, to check all its plugins, "
            f"got {name!r}"
        ) from cause


def _unchecked(
    distribution: importlib_metadata.Distribution, plugins: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return which plugins of a package were not checked; empty if all were."""
    offered = {
        f"{point.group.removeprefix(_GROUP)}/{point.name}"
        for point in distribution.entry_points
        if point.group.startswith(_GROUP)
    }
    missing = sorted(offered - plugins.keys())
    if not offered:
        return f"{distribution.name} offers no plugin"
    return f"{', '.join(missing)} was not checked" if missing else ""


def _package_files(distribution: importlib_metadata.Distribution, wheel: str) -> dict[str, str]:
    """Return the hashes of the installed files, equal to the hashes of the wheel."""
    try:
        files = package_files(distribution)
        if wheel == INSTALLED:
            return files
        with zipfile.ZipFile(wheel) as file:
            _check_wheel(file, distribution)
            in_wheel = wheel_files(file)
    except (OSError, zipfile.BadZipFile, ProofError) as cause:
        raise ConfigError(f"--attest: {cause}") from cause
    if different := sorted(name for name, _ in files.items() ^ in_wheel.items()):
        raise ConfigError(
            f"--attest: expected the files of {wheel} to be installed, but {different[0]} differs; "
            f"install this wheel in a clean environment"
        )
    return files


def _check_wheel(file: zipfile.ZipFile, distribution: importlib_metadata.Distribution) -> None:
    name, _, version = _info_name(file).removesuffix(".dist-info").partition("-")
    if (normal_name(name), version) != (normal_name(distribution.name), distribution.version):
        raise ProofError(
            f"expected a wheel of {distribution.name} {distribution.version}, got one of "
            f"{name} {version}"
        )


def _info_name(file: zipfile.ZipFile) -> str:
    folders = {name.partition("/")[0] for name in file.namelist()}
    names = [name for name in folders if name.endswith(".dist-info")]
    if len(names) != 1:
        raise ProofError(f"expected a wheel with one dist-info folder, got {len(names)}")
    return names[0]


def _write(
    distribution: importlib_metadata.Distribution, wheel: str, files: Mapping[str, bytes]
) -> Mapping[str, Any]:
    try:
        if wheel == INSTALLED:
            folder = info_folder(distribution)
            (folder / SIGNATURE_FILE).unlink(missing_ok=True)
            for name, data in files.items():
                _replace(folder / name, data)
            place = str(folder)
        else:
            _replace(Path(wheel), _with_files(wheel, files))
            place = wheel
    except OSError as cause:
        raise ConfigError(f"--attest: cannot write the proof: {cause}") from cause
    signed = SIGNATURE_FILE in files
    return {"record": "attestation", "file": place, "signed": signed, "problem": ""}


def _with_files(wheel: str, files: Mapping[str, bytes]) -> bytes:
    """Return a wheel with other proof files, and a RECORD with them."""
    content = io.BytesIO()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(content, "w") as new:
        info = _info_name(old)
        proof_files = {f"{info}/{name}" for name in (STATEMENT_FILE, SIGNATURE_FILE)}
        record_name = f"{info}/RECORD"
        for item in old.infolist():
            if item.filename not in proof_files | {record_name}:
                new.writestr(item, old.read(item))
        record = io.StringIO()
        rows = csv.reader(io.StringIO(old.read(record_name).decode()))
        other_rows = [row for row in rows if row and row[0] not in proof_files | {record_name}]
        csv.writer(record, lineterminator="\n").writerows(other_rows)
        date = old.getinfo(record_name).date_time
        for name, data in files.items():
            _add(new, f"{info}/{name}", data, date)
            record.write(record_entry(f"{info}/{name}", data))
        record.write(f"{record_name},,\n")
        _add(new, record_name, record.getvalue().encode(), date)
    return content.getvalue()


def _add(file: zipfile.ZipFile, name: str, data: bytes, date: Any) -> None:
    item = zipfile.ZipInfo(name, date)
    item.external_attr = 0o644 << 16
    file.writestr(item, data, zipfile.ZIP_DEFLATED)


def _replace(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".proof-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(temporary).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
