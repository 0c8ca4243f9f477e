"""Names of models: Ollama's clients add the tag `:latest`."""

from __future__ import annotations

from hardpoint.plugins.server import ServerContext

_TAG = ":latest"


def served_name(server: ServerContext, name: str) -> str:
    """Return the name of a model as the server has it, without `:latest` if it has no tags."""
    if not name.endswith(_TAG):
        return name
    try:
        server.model(name)
    except Exception:  # the server's own error of an unknown model
        return name.removesuffix(_TAG)
    return name
