"""Engines of other machines: they join over TCP, and run like local ones.

`open_hosts` listens for them in the program that has the requests (the head); `join_engine` runs
one on another machine.
"""

from .address import check_joining
from .hosts import open_hosts
from .joining import join_engine

__all__ = ["check_joining", "join_engine", "open_hosts"]
