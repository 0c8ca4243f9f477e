"""Clients of httpx that are made sooner: all of them share the certificates that they trust.

To read these takes 30 milliseconds of processor time for each client, also for one of `http://`.
"""

import functools

from httpx._transports import default

default.create_ssl_context = functools.cache(default.create_ssl_context)
