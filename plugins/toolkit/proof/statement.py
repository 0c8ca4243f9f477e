"""The in-toto statement of a proof: encoding, and strict decoding of untrusted input."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from hardpoint.errors import HardpointError

__all__ = [
    "MAX_STATEMENT_BYTES",
    "PREDICATE_TYPE",
    "CheckedComponent",
    "Proof",
    "ProofError",
    "decode_statement",
    "encode_statement",
    "normal_name",
]

MAX_STATEMENT_BYTES = 4 << 20
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:hardpoint:conformance:1"

Outcome = Literal["proved", "failed", "expected_failure", "not_proved", "not_applicable"]


class ProofError(HardpointError):
    """A proof is missing, malformed, or of other files."""


class CheckedComponent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A component and the outcome of each rule of its suite.

    Attributes:
        component: `KIND/NAME`.
        value: its FQCN.
        contract: version of its kind's contract.
        suite: name of the suite.
        rules: outcome of each rule, by the name of its test.
    """

    component: str
    value: str
    contract: int
    suite: str
    rules: dict[str, Outcome]


class Proof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The predicate of a statement.

    Attributes:
        distribution: name of the package.
        version: version of the package.
        engine: version of Hardpoint.
        kit: version of the conformance kit.
        components: all plugins of the package.
        files: SHA-256 of each file of the package, by its name in the wheel.
    """

    distribution: str
    version: str
    engine: str
    kit: str
    components: list[CheckedComponent]
    files: dict[str, str]

    def check_outcomes(self) -> None:
        """Check that no rule failed.

        Raises:
            ProofError: a rule failed, or no component was checked.
        """
        if not self.components:
            raise ProofError("components: expected at least one checked plugin, got none")
        for component in self.components:
            failed = [rule for rule, outcome in component.rules.items() if outcome == "failed"]
            if failed or not component.rules:
                problem = f"{', '.join(failed)} failed" if failed else "no rule was checked"
                raise ProofError(f"{component.component}: {problem}")


class _Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    digest: dict[str, str]


class _Statement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str = msgspec.field(name="_type")
    subject: list[_Subject]
    predicate_type: str = msgspec.field(name="predicateType")
    predicate: Proof


def normal_name(distribution: str) -> str:
    """Return the normalized name of a distribution, as package indexes compare it."""
    return "-".join(
        part for part in distribution.lower().replace("_", "-").replace(".", "-").split("-") if part
    )


def encode_statement(proof: Proof) -> bytes:
    """Return a proof as an in-toto statement of version 1, the same bytes for the same proof."""
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": _subject_name(proof), "digest": {"sha256": _digest(proof.files)}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": msgspec.to_builtins(proof),
    }
    return json.dumps(statement, indent=1, sort_keys=True).encode() + b"\n"


def decode_statement(data: bytes) -> Proof:
    """Return the proof of a statement.

    Raises:
        ProofError: it is too large, malformed, or contradicts itself.
    """
    if len(data) > MAX_STATEMENT_BYTES:
        raise ProofError(f"expected at most {MAX_STATEMENT_BYTES} bytes, got more")
    try:
        statement = msgspec.json.decode(data, type=_Statement)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as cause:
        raise ProofError(
            f"expected an in-toto statement of a conformance check: {cause}"
        ) from cause
    proof = statement.predicate
    stated: Mapping[str, Any] = {
        "_type": (statement.type, STATEMENT_TYPE),
        "predicateType": (statement.predicate_type, PREDICATE_TYPE),
        "subject": (
            statement.subject,
            [_Subject(_subject_name(proof), {"sha256": _digest(proof.files)})],
        ),
    }
    for field, (value, expected) in stated.items():
        if value != expected:
            raise ProofError(f"{field}: expected {expected}, got {str(value)[:200]}")
    return proof


def _subject_name(proof: Proof) -> str:
    return f"pkg:pypi/{normal_name(proof.distribution)}@{proof.version}"


def _digest(files: Mapping[str, str]) -> str:
    lines = json.dumps(sorted(files.items()), ensure_ascii=True)
    return hashlib.sha256(lines.encode()).hexdigest()
