"""System resources for an engine's sockets, and the errors where the system lacks them."""

from __future__ import annotations

import os
import resource
import stat
import tempfile

import pytest
from support.process.harness import process_config

from hardpoint import LLM, HardpointError
from hardpoint.process import zmq_resources
from hardpoint.process.client.sockets import EngineSockets
from hardpoint.testing import scripted_config


@pytest.fixture
def few_descriptors():
    """A limit that leaves this process room for eight more descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = set(map(int, os.listdir("/dev/fd")))
    few = [number for number in range(limits[0]) if number not in used][8]
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def long_folder(tmp_path, monkeypatch):
    """The directory of `tempfile`, with a path that is longer than a socket's may be."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("publishers", [[], ["zmq"]], ids=["own_process", "in_process"])
def test_too_few_descriptors_are_an_error_before_anything_is_opened(
    scripted, few_descriptors, publishers
):
    config = process_config(scripted)
    if publishers:
        config = scripted_config(scripted, {"kv_events": {"publishers": publishers}})
    before = set(os.listdir("/dev/fd"))
    with pytest.raises(HardpointError, match=r"expected at least 32 free ones.* got \d") as caught:
        LLM(config=config)
    assert f"of {few_descriptors}; raise its limit (`ulimit -n`, RLIMIT_NOFILE)" in str(
        caught.value
    )
    assert set(os.listdir("/dev/fd")) <= before


def test_a_long_temporary_directory_gives_way_to_a_short_private_one(long_folder):
    mask = os.umask(0o777)
    try:
        sockets = EngineSockets()
    finally:
        os.umask(mask)
    folder = sockets.folder
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert (str(folder.parent), folder.stat().st_uid) == ("/tmp", os.geteuid())
    assert (stat.S_IMODE(folder.stat().st_mode), modes) == (0o700, {0o600})
    assert all(
        a.startswith("ipc:///") for a in sockets.addresses.inputs + sockets.addresses.outputs
    )
    sockets.close()
    assert not folder.exists()
    assert list(long_folder.iterdir()) == []


def test_without_any_folder_the_error_has_paths_lengths_and_limit(
    long_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(zmq_resources, "_SHORT_FOLDERS", (str(tmp_path / "missing"),))
    with pytest.raises(HardpointError) as caught:
        EngineSockets()
    length = len(str(long_folder / "hardpoint-12345678" / "output"))
    assert f"{str(long_folder)!r} makes socket paths of {length} bytes" in str(caught.value)
    assert "a system allows 107" in str(caught.value)
    assert f"{str(tmp_path / 'missing')!r} gives none (No such file or directory)" in str(
        caught.value
    )
    assert "set TMPDIR to a directory of your own with a short path" in str(caught.value)


def test_a_folder_that_others_could_open_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(zmq_resources, "_SHORT_FOLDERS", ())
    chmod = os.chmod
    monkeypatch.setattr(os, "chmod", lambda path, _mode: chmod(path, 0o755))  # as FAT does
    with pytest.raises(HardpointError, match="keeps no owners and permissions"):
        EngineSockets()
    assert list(tmp_path.iterdir()) == []
