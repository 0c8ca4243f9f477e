"""Objects that cannot travel to another process are named, with the place that holds them."""

from __future__ import annotations

import functools
import socket
import threading
from typing import Any

import msgspec
import pytest

from hardpoint import plugins
from hardpoint.errors import PluginLoadError
from hardpoint.process.child_processes.main_module.main_pickle import dumps


def with_lock():
    class Dry:
        lock = threading.Lock()

    return Dry, "Dry.lock is a _thread.lock: cannot pickle '_thread.lock' object; make it in __init"


def with_file():
    file = open(__file__)  # noqa: SIM115 - it must be open

    class Dry:
        inner = {"file": [file]}

    return Dry, "Dry.inner['file'][0] is a _io.TextIOWrapper: cannot pickle an open file"


def with_socket_in_lambda():
    sock = socket.socket()

    class Dry:
        send = staticmethod(lambda data: sock.send(data))

    return Dry, "sock, used by Dry.send, is a socket.socket: cannot pickle 'socket' object"


LOCK = threading.RLock()


def with_global():
    class Dry:
        def apply(self):
            def inner():
                return LOCK

            return inner

    Dry.apply = with_main_globals(Dry.apply)
    return Dry, "LOCK, used by Dry.apply, is a _thread.RLock: cannot pickle '_thread.RLock' object"


def with_main_globals(function):
    """Return a function as if `__main__` defined it, with globals that travel with it."""
    code = function.__code__
    made = type(function)(code, {"LOCK": LOCK, "__name__": "__main__"}, function.__name__)
    made.__qualname__ = function.__qualname__
    return made


def with_default():
    class Dry:
        def apply(self, lock=threading.Lock()):  # noqa: B008
            return lock

    return Dry, "a default of Dry.apply is a _thread.lock"


def with_struct_factory():
    lock = threading.Lock()

    class Dry:
        class Arguments(plugins.Arguments):
            held: Any = msgspec.field(default_factory=lambda: lock)

    return Dry, "lock, used by the default factory of Dry.Arguments.held, is a _thread.lock"


def with_partial_and_property():
    class Dry:
        size = property(functools.partial(print, threading.Lock()))

    return Dry, "Dry.size[1] is a _thread.lock"


def with_generator():
    class Holder:
        def __init__(self):
            self.rows = (row for row in ())

    class Dry:
        holder = Holder()

    return Dry, "Dry.holder.rows is a generator: cannot pickle 'generator' object"


def with_base():
    class Base:
        lock = threading.Lock()

    class Dry(Base):
        pass

    return Dry, "Base.lock is a _thread.lock"


CASES = [
    with_lock,
    with_file,
    with_socket_in_lambda,
    with_global,
    with_default,
    with_struct_factory,
    with_partial_and_property,
    with_generator,
    with_base,
]


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_travel_is_named(case):
    cls, words = case()
    with pytest.raises(PluginLoadError) as caught:
        dumps({"Dry": cls})
    message = str(caught.value).replace(f"{case.__name__}.<locals>.", "")
    assert message.startswith("__main__:Dry: it cannot be sent to the engine process: ")
    assert words in message
    assert caught.value.__cause__ is not None


def test_unresolvable_annotation_is_named():
    class Dry(msgspec.Struct):
        x: Missing  # noqa: F821

    with pytest.raises(PluginLoadError, match="Dry is the class .*Dry: name 'Missing' is not def"):
        dumps({"Dry": Dry})
