"""The versions of Ray that this package was made for."""

from __future__ import annotations

import importlib
import importlib.metadata

from hardpoint.errors import install_command
from hardpoint.plugins import ConfigError

FIRST, END = (2, 60), (2, 61)
"""The first minor version, and the one after the last. `router.py` uses what Ray calls alpha."""


def check_ray() -> None:
    """Check that Ray Serve is installed, in a version that the router was made for.

    Raises:
        ConfigError: it is not.
    """
    wanted = f"ray[serve]>={FIRST[0]}.{FIRST[1]},<{END[0]}.{END[1]}"
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        version = "no Ray"
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not FIRST <= parts < END:
        raise ConfigError(
            f"hardpoint.ray_serve: expected {wanted}, for request routers change between versions "
            f"of Ray, got {version}; {install_command('ray-serve')}"
        )
    try:
        importlib.import_module("ray.serve")
    except ImportError as cause:
        raise ConfigError(
            f"hardpoint.ray_serve: expected {wanted}, got Ray {version} without Serve ({cause}); "
            f"{install_command('ray-serve')}"
        ) from cause
