"""`hardpoint serve --on ray`: the settings of a server that apply to Ray Serve."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.plugins import ConfigError

_OF_LISTENERS = ("uds", "tls_certificate", "tls_key", "admin", "admin_keys_file")


def check_for_ray(settings: ServerConfig) -> None:
    """Check that nothing is asked for that only a server does that listens itself.

    Raises:
        ConfigError: something is.
    """
    for name in _OF_LISTENERS:
        if getattr(settings, name) is not None:
            raise ConfigError(
                f"server.{name}: expected none with --on ray, where Ray Serve listens, got "
                f"{getattr(settings, name)!r}"
            )
    if not settings.port:
        raise ConfigError("server.port: expected a port with --on ray, got 0, which is any")


def named_values(arguments: Sequence[str]) -> dict[str, str]:
    """Return options that are given as NAME=VALUE.

    Raises:
        ConfigError: one is not, or is given twice.
    """
    values: dict[str, str] = {}
    for text in arguments:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigError(f"--ray: expected NAME=VALUE, got {text!r}")
        if name in values:
            raise ConfigError(f"--ray: expected each option once, got {name} twice")
        values[name] = value
    return values
