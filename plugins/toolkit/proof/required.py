"""Verification of the proofs that a configuration requires, before a plugin is imported."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import importlib_metadata

from hardpoint.errors import PluginLoadError, install_command
from hardpoint.plugins.component import Source
from hardpoint.plugins.config_tables import PluginsConfig

from .package_files import (
    SIGNATURE_FILE,
    STATEMENT_FILE,
    find_module,
    package_files,
    package_paths,
    read_metadata_file,
)
from .statement import MAX_STATEMENT_BYTES, Proof, ProofError, decode_statement, normal_name

__all__ = ["RequiredProofs", "describe_proof"]

_HARDPOINT = "hardpoint"
_FIX = "install a wheel with a proof (hardpoint plugins check PACKAGE --attest WHEEL)"


class RequiredProofs:
    """The proofs that `plugins.require_proof` requires of packages.

    A package is verified once per instance.
    """

    def __init__(self, config: PluginsConfig) -> None:
        """`config` has `require_proof`, the trusted identities and the trusted root."""
        self._required, self._config = config.require_proof, config
        self._files = functools.cache(self._verified_files)

    def check(self, source: Source) -> None:
        """Check the proof of a plugin's package, given the plugin's `Source`; import nothing.

        Raises:
            PluginLoadError: the package has no proof, or its files differ from it.
        """
        if not self._required or source.distribution == _HARDPOINT:
            return
        try:
            module = source.value.partition(":")[0]
            distribution = _distribution_of(source.distribution, module)
            _check_origin(module, distribution, self._files(distribution))
        except ProofError as cause:
            raise PluginLoadError(f"{source}: plugins.require_proof: {cause}; {_FIX}") from cause

    def _verified_files(self, name: str) -> frozenset[str]:
        """Return the paths of a package's files after they matched its proof."""
        distribution = importlib_metadata.Distribution.from_name(name)
        proof, data = _read(distribution)
        if proof is None:
            raise ProofError(f"expected a proof in the package {name}, got none")
        proof.check_outcomes()
        if self._required == "signed":
            bundle = read_metadata_file(distribution, SIGNATURE_FILE, MAX_STATEMENT_BYTES)
            _check_signature(data, bundle, self._config)
        if difference := _difference(proof.files, package_files(distribution)):
            raise ProofError(f"the files of {name} differ from its proof: {difference}")
        return frozenset(map(os.path.realpath, package_paths(distribution).values()))


def _check_origin(module: str, name: str, paths: frozenset[str]) -> None:
    """Check that an import of the module, and of its packages, runs files of the proof."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        prefix = ".".join(parts[:depth])
        path = find_module(prefix)
        if path is None and depth < len(parts):
            continue  # a namespace package
        if path is None or os.path.realpath(path) not in paths:
            raise ProofError(
                f"{prefix}: expected a module of {name}, got {path or 'none'}; sys.path has "
                f"another module of this name before it"
            )


def describe_proof(distribution: str) -> str:
    """Return the state of a package's proof, as a short text; import nothing."""
    try:
        installed = importlib_metadata.Distribution.from_name(distribution)
        proof, _ = _read(installed)
        if proof is None:
            return ""
        proof.check_outcomes()
        if difference := _difference(proof.files, package_files(installed)):
            return f"invalid: {difference}"
        signature = read_metadata_file(installed, SIGNATURE_FILE, MAX_STATEMENT_BYTES)
    except importlib_metadata.PackageNotFoundError:
        return ""
    except ProofError as error:
        return f"invalid: {error}"
    return f"{'unsigned' if signature is None else 'signature not verified'}, kit {proof.kit}"


def _read(distribution: importlib_metadata.Distribution) -> tuple[Proof | None, bytes]:
    """Return the proof of a distribution and the bytes of its statement."""
    data = read_metadata_file(distribution, STATEMENT_FILE, MAX_STATEMENT_BYTES)
    if data is None:
        return None, b""
    proof = decode_statement(data)
    name, version = distribution.name, distribution.version
    if (normal_name(proof.distribution), proof.version) != (normal_name(name), version):
        raise ProofError(
            f"expected a proof of {name} {version}, got one of "
            f"{proof.distribution[:100]} {proof.version[:100]}"
        )
    return proof, data


def _distribution_of(name: str, module: str) -> str:
    try:
        return str(importlib_metadata.Distribution.from_name(name).name)
    except (importlib_metadata.PackageNotFoundError, ValueError):
        offers = importlib_metadata.packages_distributions().get(module.partition(".")[0], [])
    if len(set(offers)) != 1:
        raise ProofError(f"expected {module} in one installed package, got {len(set(offers))}")
    return str(offers[0])


def _difference(stated: Mapping[str, str], files: Mapping[str, str]) -> str:
    """Return the first files that differ, empty if none does."""
    differences = [f"{n[:200]} was added" for n in sorted(files.keys() - stated.keys())]
    differences += [f"{n[:200]} is missing" for n in sorted(stated.keys() - files.keys())]
    common = sorted(stated.keys() & files.keys())
    differences += [f"{n[:200]} was changed" for n in common if stated[n] != files[n]]
    rest = f" and {len(differences) - 3} more" if differences[3:] else ""
    return ", ".join(differences[:3]) + rest


def _check_signature(statement: bytes, bundle: bytes | None, config: PluginsConfig) -> None:
    """Check that a trusted identity signed a statement.

    Args:
        statement: the bytes of the statement.
        bundle: the Sigstore bundle of them; None if there is none.
        config: the trusted identities, and the trusted root.

    Raises:
        ProofError: it is not signed by one of them, or the package sigstore is not installed.
    """
    if bundle is None:
        raise ProofError("expected a signed proof, got an unsigned one")
    if not config.proof_signers:
        raise ProofError(
            "plugins.proof_signers: expected at least one trusted identity and its issuer, got none"
        )
    try:
        _verify(statement, bundle, config)
    except ImportError as cause:
        raise ProofError(
            f'"signed" needs the package sigstore; {install_command("sigstore")}'
        ) from cause


def _verify(statement: bytes, data: bytes, config: PluginsConfig) -> None:
    from sigstore.errors import Error  # noqa: PLC0415 - an extra
    from sigstore.models import Bundle, TrustedRoot  # noqa: PLC0415
    from sigstore.verify import Verifier  # noqa: PLC0415
    from sigstore.verify.policy import AnyOf, Identity  # noqa: PLC0415

    path, failures = config.proof_trusted_root, (Error, ValueError, TypeError, KeyError)
    try:
        # Without a network. The package's own root is copied to the cache folder of the user.
        verifier = (
            Verifier(trusted_root=TrustedRoot.from_file(path))
            if path
            else Verifier.production(offline=True)
        )
    except (OSError, RecursionError, *failures) as cause:
        raise ProofError(
            f"plugins.proof_trusted_root: expected a file of a Sigstore trusted root, got "
            f"{path or 'none, and that of the package sigstore cannot be used'}: {cause}"
        ) from cause
    signers = config.proof_signers
    policy: Any = AnyOf([Identity(identity=name, issuer=signers[name]) for name in signers])
    try:
        verifier.verify_artifact(statement, Bundle.from_json(data), policy)
    except (RecursionError, *failures) as cause:
        raise ProofError(f"its signature cannot be verified: {cause}") from cause
