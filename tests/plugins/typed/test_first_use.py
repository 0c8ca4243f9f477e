"""Threads may use a type for the first time at the same moment."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from typing import Annotated

import pytest

from hardpoint.plugins import ConfigError
from hardpoint.typed import Strict, convert, prepared

CONVERT = importlib.import_module(convert.__module__)  # `typed.convert` is the function

FIRST_USES = """
import faulthandler, sys, threading, types

faulthandler.enable()
import msgspec
from hardpoint.typed import convert

SOURCE = '''
from __future__ import annotations
from typing import Annotated
from msgspec import Meta
from hardpoint.typed import Strict

class Inner(Strict):
%s

class Outer(Strict):
    first: Inner
    second: Inner | None = None
''' % "\\n".join(f"    f{n}: Annotated[int, Meta(ge=0)] = 1" for n in range(20))

sys.setswitchinterval(1e-6)
for number in range(40):
    module = types.ModuleType(f"made_{number}")
    sys.modules[module.__name__] = module
    exec(SOURCE, vars(module))
    barrier, results = threading.Barrier(4), []

    def use(type_=module.Outer):
        barrier.wait()
        results.append(convert({"first": {"f19": 4}, "second": {}}, type_, path=""))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.first.f19 for result in results] == [4] * 4
"""


def test_threads_convert_to_a_new_type_at_the_same_time():
    """In a process of its own, since it ends with a segmentation fault if that is not guarded."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USES], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_import_that_waits_for_the_lock_and_one_inside_it_end(monkeypatch):
    """As where an annotation names an attribute that its module imports when it is read."""
    monkeypatch.setattr(CONVERT, "_LONGEST_WAIT_S", 0.2)
    import_lock = threading.Lock()
    is_importing, is_reading = threading.Event(), threading.Event()
    results = []

    class Inner(Strict):
        size: int = 0

    class Lazy:
        @property
        def Inner(self):  # noqa: N802
            is_reading.set()
            with import_lock:
                return Inner

    class Outer(Strict):
        inner: "lazy.Inner" = None  # noqa: F821, UP037 - found when it is read

    def imports():
        with import_lock:
            is_importing.set()
            is_reading.wait(60)
            results.append(convert({"size": 2}, Inner, path=""))

    monkeypatch.setitem(globals(), "lazy", Lazy())
    thread = threading.Thread(target=imports, daemon=True)
    thread.start()
    is_importing.wait(60)
    assert convert({"inner": {"size": 3}}, Outer, path="").inner.size == 3
    thread.join(60)
    assert [result.size for result in results] == [2]


def test_a_copy_of_a_process_does_not_wait_for_a_thread_that_it_has_not(monkeypatch):
    monkeypatch.setattr(CONVERT, "_LONGEST_WAIT_S", 60)
    has_it, ends = threading.Event(), threading.Event()

    def hold():
        with vars(CONVERT)["_lock"]:
            has_it.set()
            ends.wait(60)

    class New(Strict):
        size: int = 0

    thread = threading.Thread(target=hold)
    thread.start()
    has_it.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(50)
        os._exit(0 if convert({"size": 3}, New, path="").size == 3 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    ends.set()
    thread.join()


class _Table(Strict):
    size: int = 1


def test_a_type_that_has_no_hash_is_prepared_each_time():
    type_ = Annotated[_Table, {"of": "a plugin"}]
    assert prepared(type_) is type_
    assert convert({"size": 3}, type_, path="") == _Table(size=3)


def test_a_type_that_cannot_be_read_is_an_error_of_its_use():
    class Wrong(Strict):
        size: Annotated[str, "no", threading.Lock] | bytes = ""

    assert prepared(Wrong) is Wrong
    with pytest.raises(TypeError, match="may not contain more than one str-like type"):
        convert({"size": "x"}, Wrong, path="")
    with pytest.raises(ConfigError, match="size: expected a whole number, got 'x'"):
        convert({"size": "x"}, _Table, path="")
