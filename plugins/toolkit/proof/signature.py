"""Sigstore signatures of statements, verified without a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.errors import install_command

from .statement import ProofError

__all__ = ["check_signature"]


def check_signature(statement: bytes, bundle: bytes | None, signers: Mapping[str, str]) -> None:
    """Check that a trusted identity signed a statement.

    Args:
        statement: the bytes of the statement.
        bundle: the Sigstore bundle of them; None if there is none.
        signers: the issuer of each trusted identity.

    Raises:
        ProofError: it is not signed by one of them, or the package sigstore is not installed.
    """
    if bundle is None:
        raise ProofError("expected a signed proof, got an unsigned one")
    if not signers:
        raise ProofError(
            "plugins.proof_signers: expected at least one trusted identity and its issuer, got none"
        )
    try:
        _verify(statement, bundle, signers)
    except ImportError as cause:
        raise ProofError(
            f'"signed" needs the package sigstore; {install_command("sigstore")}'
        ) from cause


def _verify(statement: bytes, data: bytes, signers: Mapping[str, str]) -> None:
    from sigstore.errors import Error  # noqa: PLC0415 - an extra
    from sigstore.models import Bundle  # noqa: PLC0415
    from sigstore.verify import Verifier  # noqa: PLC0415
    from sigstore.verify.policy import AnyOf, Identity  # noqa: PLC0415

    policy: Any = AnyOf([Identity(identity=name, issuer=signers[name]) for name in signers])
    try:
        bundle = Bundle.from_json(data)
        Verifier.production(offline=True).verify_artifact(statement, bundle, policy)
    except (Error, ValueError, TypeError, KeyError, RecursionError) as cause:
        raise ProofError(f"its signature cannot be verified: {cause}") from cause
