"""Conformance statements of packages: which checks their plugins passed, and with which files."""

from .package_files import STATEMENT_FILE, package_files, wheel_files
from .required import RequiredProofs, describe_proof
from .statement import Proof, ProofError, decode_statement, encode_statement

__all__ = [
    "STATEMENT_FILE",
    "Proof",
    "ProofError",
    "RequiredProofs",
    "decode_statement",
    "describe_proof",
    "encode_statement",
    "package_files",
    "wheel_files",
]
