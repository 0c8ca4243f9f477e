"""Several engines behind one client: divided requests, one answer to calls, deaths outlived.

Above core, which knows one engine: `open_engines` opens a client in the place of core's own.
"""

from .opening import open_engines
from .remote.address import check_joining
from .remote.joining import join_engine

__all__ = ["check_joining", "join_engine", "open_engines"]
