"""The address where engines join, and the keys that it needs."""

from __future__ import annotations

import re

from hardpoint.errors import ConfigError, shown
from hardpoint.plugins import EngineConfig
from hardpoint.plugins.config import ConfigSources
from hardpoint.toolkit.curve_keys import is_loopback

_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(\d{1,5})")


def check_address(address: str, setting: str, *, has_keys: bool) -> str:
    """Return an address, which may be used without keys only on the loopback interface.

    Raises:
        ConfigError: it is malformed, or needs keys.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[2]) > 65535:
        raise ConfigError(f"{setting}: expected tcp://HOST:PORT, got {shown(address)}")
    if not has_keys and not is_loopback(match[1].strip("[]")):
        raise ConfigError(
            f"{setting}: {address} can be reached from other machines, which needs keys: make some "
            "with `hardpoint keys new`, or use an address of 127.0.0.1"
        )
    return address


def check_joining(config: EngineConfig, config_sources: ConfigSources) -> None:
    """Check the settings of a head.

    Raises:
        ConfigError: they do not fit each other.
    """
    parallel, local = config.parallel, config.parallel.local
    if local is not None and local > parallel.data:
        raise _error(
            "local", f"expected at most the {parallel.data} engines of parallel.data, got {local}",
            config_sources,
        )  # fmt: skip
    if parallel.ray is not None:
        _check_ray(config, config_sources)
    elif parallel.join_address is not None:
        check_address(
            parallel.join_address, "parallel.join_address", has_keys=parallel.keys is not None
        )
    elif parallel.num_local < parallel.data:
        joining = parallel.data - parallel.num_local
        raise _error(
            "local",
            f"{joining} of {parallel.data} engines are not local, and there is no "
            "parallel.join_address where they could join",
            config_sources,
        )


def _check_ray(config: EngineConfig, config_sources: ConfigSources) -> None:
    parallel = config.parallel
    if parallel.keys is not None:
        raise _error(
            "keys",
            "expected none with parallel.ray: its engines get a key each when they are started, "
            f"got {shown(parallel.keys)}",
            config_sources,
        )
    if config.executor.use == "ray":
        raise ConfigError(
            config_sources.locate(
                "executor.use: expected another one than 'ray' with parallel.ray, which has all "
                "ranks of an engine on one node; for an engine over several nodes use the "
                "executor without parallel.ray"
            )
        )
    if parallel.num_local == parallel.data:
        raise _error(
            "local",
            f"expected fewer than the {parallel.data} engines of parallel.data, so that some are "
            f"left for parallel.ray, got {parallel.local}",
            config_sources,
        )
    if parallel.join_address is not None:
        check_address(parallel.join_address, "parallel.join_address", has_keys=True)


def _error(field: str, reason: str, config_sources: ConfigSources) -> ConfigError:
    return ConfigError(config_sources.locate(f"parallel.{field}: {reason}"))
