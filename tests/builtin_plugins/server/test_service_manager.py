"""The server tells its service manager how it stands."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import time

import pytest
from support.serve_program import serving
from support.waiting import PATIENCE_S, wait_until

from hardpoint.builtin_plugins.server.operations.notify import ServiceManager


class Manager:
    """The socket of a service manager."""

    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.setblocking(False)
        self.received = []

    def messages(self):
        while True:
            try:
                self.received.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return self.received


@pytest.fixture
def manager(tmp_path):
    service_manager = Manager(str(tmp_path / "notify"))
    yield service_manager
    service_manager.socket.close()


def of(path, **variables):
    return ServiceManager.of_environment({"NOTIFY_SOCKET": str(path), **variables})


def test_what_it_is_told(manager, tmp_path):
    told = of(tmp_path / "notify")
    told.ping()
    told.ready()
    told.ping()  # nobody asked for any
    told.stopping()
    told.stopping()
    assert manager.messages() == ["READY=1", "STOPPING=1"]


def test_a_socket_of_the_abstract_namespace():
    name = f"hardpoint-test-{os.getpid()}"
    manager = Manager("\0" + name)
    of(f"@{name}").ready()
    assert manager.messages() == ["READY=1"]
    manager.socket.close()


def test_signs_of_life_come_twice_as_often_as_they_are_expected(manager, tmp_path):
    now = [0.0]
    told = ServiceManager(str(tmp_path / "notify"), 2.0, clock=lambda: now[0])
    told.ping()
    told.ready()
    for _ in range(13):
        told.ping()
        now[0] += 0.25
    assert manager.messages() == ["READY=1", *["WATCHDOG=1"] * 4]


@pytest.mark.parametrize(("pid", "is_watched"), [("", True), ("own", True), ("1", False)])
def test_the_watchdog_is_that_of_one_process(manager, tmp_path, pid, is_watched):
    told = of(
        tmp_path / "notify",
        WATCHDOG_USEC="1000000",
        WATCHDOG_PID=pid.replace("own", str(os.getpid())),
    )
    told.ready()
    told.ping()
    assert ("WATCHDOG=1" in manager.messages()) is is_watched


def test_the_variables_are_not_those_of_engines():
    environment = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "HOME": "/"}
    ServiceManager.of_environment(environment)
    assert environment == {"HOME": "/"}


@pytest.mark.parametrize("path", ["/nowhere/at/all", "relative", ""])
def test_nobody_there_is_logged_once_and_harmless(caplog, path):
    with caplog.at_level(logging.WARNING):
        told = of(path)
        told.ready()
        told.stopping()
    assert len(caplog.records) == (path != "")
    assert all("NOTIFY_SOCKET" in record.getMessage() for record in caplog.records)


def test_a_process_without_descriptors_goes_on(caplog, monkeypatch):
    def no_descriptor(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    manager = ServiceManager("/run/systemd/notify", 1.0)
    monkeypatch.setattr(socket, "socket", no_descriptor)
    manager.ready()
    manager.ping()
    manager.stopping()
    assert caplog.text.count("cannot be notified: [Errno 24] Too many open files") == 1


def test_a_manager_that_reads_nothing_does_not_hold_the_server_up(manager, tmp_path):
    told = of(tmp_path / "notify")
    began = time.monotonic()
    for _ in range(2000):
        told.ready()
    assert time.monotonic() - began < 30


def test_a_server_and_its_manager(manager, scripted, tmp_path):
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
    folder = tmp_path / "server"
    folder.mkdir()
    with serving(folder, scripted, environment=environment) as program:
        wait_until(lambda: manager.messages().count("WATCHDOG=1") >= 3, PATIENCE_S, "signs of life")
        assert manager.received[0] == "READY=1"
        program.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "STOPPING=1" in manager.messages(), PATIENCE_S, "the end")
        assert program.process.wait(PATIENCE_S) == 0
    assert manager.messages().count("STOPPING=1") == 1
