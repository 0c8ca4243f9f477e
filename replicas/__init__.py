"""Several engines behind one client: divided requests, one answer to calls, deaths outlived.

Above core, which knows one engine: `open_engines` opens a client in the place of core's own.
"""

from .group import EngineGroup, open_engines

__all__ = ["EngineGroup", "open_engines"]
