"""Finding out whose code an error came from."""

from __future__ import annotations

from hardpoint.plugins import Component, HardpointError, PluginFaultError, PluginSet
from hardpoint.registry.loading import Source

__all__ = ["blamed", "guilty"]


def guilty(error: BaseException, plugins: PluginSet) -> Source | None:
    """Return the component whose method the error came from, the innermost of several."""
    found: Component | None = None
    traceback = error.__traceback__
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, Component):
            found = owner
        traceback = traceback.tb_next
    if found is None:
        return None
    for entry in plugins.manifest.entries:
        if entry.name == found.name and plugins.loaded(entry) is type(found):
            return entry.source
    return None


def blamed(error: Exception, plugins: PluginSet) -> Exception:
    """Return an error that names the guilty plugin, with the error as its cause.

    That is the error itself if it says who is guilty, or nobody is.
    """
    source = None if isinstance(error, HardpointError) else guilty(error, plugins)
    if source is None:
        return error
    named = PluginFaultError(f"{source}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
