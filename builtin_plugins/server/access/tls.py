"""HTTPS: the certificate and its key are tried before anything else starts."""

from __future__ import annotations

import ssl

from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.plugins import ConfigError

_MAX_BYTES = 1 << 20


def check_tls(settings: ServerConfig) -> bool:
    """Return whether the server speaks HTTPS.

    Raises:
        ConfigError: certificate or key is missing, cannot be read, or does not fit the other.
    """
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None and key is None:
        return False
    if certificate is None or key is None:
        missing, present = ("key", "certificate") if key is None else ("certificate", "key")
        raise ConfigError(
            f"server.tls_{missing}: expected a PEM file, because there is a tls_{present}"
        )
    contents = {}
    for name, path in (("certificate", certificate), ("key", key)):
        try:
            with open(path, "rb") as file:
                contents[name] = file.read(_MAX_BYTES)
        except OSError as cause:
            raise ConfigError(
                f"server.tls_{name}: {path!r} cannot be read: {cause.strerror}"
            ) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, OpenSSL would ask on the terminal for one.
        context.load_cert_chain(certificate, key, password=b"")
    except ssl.SSLError as cause:
        if b"ENCRYPTED" in contents["key"]:
            reason = f"{key!r} is encrypted; expected a key without a password"
        elif cause.reason == "KEY_VALUES_MISMATCH":
            reason = f"the key of {key!r} is not the certificate's"
        else:
            reason = f"{certificate!r} and {key!r} are no certificate and key in PEM"
        raise ConfigError(f"server.tls_certificate, tls_key: {reason}") from None
    return True
