"""Hardpoint on Ray Serve: our HTTP application in front of engines that Serve places and counts.

    serve run hardpoint.ray_serve:app model=smollm2 max_engines=4

Needs the extra `ray-serve`; see docs/ray.md.
"""

from .version import check_ray

check_ray()

from .application import app, serve  # noqa: E402 - these import Ray

__all__ = ["app", "serve"]
