"""Conformance statements of packages: which checks their plugins passed, and with which files."""

from .package_files import (
    SIGNATURE_FILE,
    STATEMENT_FILE,
    info_folder,
    package_files,
    record_entry,
    wheel_files,
)
from .required import RequiredProofs, describe_proof
from .statement import (
    CheckedComponent,
    Proof,
    ProofError,
    decode_statement,
    encode_statement,
    normal_name,
)

__all__ = [
    "SIGNATURE_FILE",
    "STATEMENT_FILE",
    "CheckedComponent",
    "Proof",
    "ProofError",
    "RequiredProofs",
    "decode_statement",
    "describe_proof",
    "encode_statement",
    "info_folder",
    "normal_name",
    "package_files",
    "record_entry",
    "wheel_files",
]
