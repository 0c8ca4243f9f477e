"""Hashes of weights: cached while a file is the same, and never returned for other content."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time

import pytest
from support.waiting import PATIENCE_S

from hardpoint import HardpointError
from hardpoint.toolkit.kv_blocks import file_hashes
from hardpoint.toolkit.kv_blocks.file_hashes import hash_file

OLD = 1_000_000_000_000_000_000  # ns since 1970


@pytest.fixture
def folder(tmp_path, monkeypatch):
    # The time of change of a file cannot be set, so it has to count as long ago.
    monkeypatch.setattr(file_hashes, "_RECENT_S", -1.0)
    monkeypatch.setattr(file_hashes, "_LOCK_WAIT_S", PATIENCE_S)
    return tmp_path / "cache"


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, b"some weights")
    return path


@pytest.fixture
def reads(monkeypatch):
    """Counts the files that are read."""
    count = []
    original = hashlib.sha256

    def counted(*args):
        if not args:  # of a file, in parts
            count.append(args)
        return original(*args)

    monkeypatch.setattr(file_hashes.hashlib, "sha256", counted)
    return count


def write(path, content):
    path.write_bytes(content)


def right(content):
    return hashlib.sha256(content).hexdigest()


def kept(folder):
    return json.loads((folder / "content-hashes.json").read_text())


def test_a_file_is_read_once(folder, weights, reads):
    assert [hash_file(weights, folder) for _ in range(3)] == [right(b"some weights")] * 3
    assert len(reads) == 1
    assert (folder.stat().st_mode & 0o777, len(kept(folder))) == (0o700, 1)
    assert (folder / "content-hashes.json").stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in folder.iterdir()) == [
        "content-hashes.json",
        "content-hashes.json.lock",
    ]


def test_without_a_folder_it_is_read_each_time(weights, reads):
    assert [hash_file(weights, None) for _ in range(2)] == [right(b"some weights")] * 2
    assert len(reads) == 2


def test_other_content_of_the_same_size_and_time_of_modification(folder, weights):
    os.utime(weights, ns=(OLD, OLD))
    hash_file(weights, folder)
    time.sleep(0.01)
    write(weights, b"other weight")
    os.utime(weights, ns=(OLD, OLD))
    assert hash_file(weights, folder) == right(b"other weight")


def test_a_file_in_its_place(folder, weights, tmp_path):
    hash_file(weights, folder)
    other = tmp_path / "other"
    write(other, b"other weight")
    status = weights.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(weights)
    assert hash_file(weights, folder) == right(b"other weight")


def test_another_time_alone_is_the_same_hash_again(folder, weights, reads):
    first = hash_file(weights, folder)
    os.utime(weights, ns=(OLD, OLD))
    assert hash_file(weights, folder) == first
    assert len(reads) == 2


def test_a_link_is_its_target(folder, weights, tmp_path, reads):
    blob = tmp_path / "blob"
    write(blob, b"other weight")
    link = tmp_path / "link.safetensors"
    link.symlink_to(weights)
    assert hash_file(link, folder) == right(b"some weights")
    assert hash_file(weights, folder) == right(b"some weights")
    assert len(reads) == 1
    link.unlink()
    link.symlink_to(blob)
    assert hash_file(link, folder) == right(b"other weight")


def test_a_file_that_has_just_changed_is_not_kept(tmp_path, weights, reads):
    folder = tmp_path / "cache"
    hash_file(weights, folder)
    hash_file(weights, folder)
    assert len(reads) == 2
    assert not folder.exists()


def test_a_file_that_changes_while_it_is_read_is_not_kept(folder, weights, monkeypatch):
    states = iter(range(10))
    monkeypatch.setattr(file_hashes, "file_state", lambda path, status: str(next(states)))
    hash_file(weights, folder)
    assert not folder.exists()


def damage(content):
    def do(folder):
        (folder / "content-hashes.json").write_bytes(content)

    return do


def link_to_another(folder):
    file = folder / "content-hashes.json"
    file.rename(folder.parent / "elsewhere")
    forged = json.loads((folder.parent / "elsewhere").read_text())
    (folder.parent / "elsewhere").write_text(json.dumps(dict.fromkeys(forged, "0" * 64)))
    file.symlink_to(folder.parent / "elsewhere")


def writable_by_others(folder):
    file = folder / "content-hashes.json"
    file.write_text(json.dumps(dict.fromkeys(kept(folder), "0" * 64)))
    file.chmod(0o666)


def no_digest(folder):
    digests = dict.fromkeys(kept(folder), "the same")
    (folder / "content-hashes.json").write_text(json.dumps(digests))


def a_pipe(folder):
    (folder / "content-hashes.json").unlink()
    os.mkfifo(folder / "content-hashes.json")


def a_folder(folder):
    (folder / "content-hashes.json").unlink()
    (folder / "content-hashes.json").mkdir()


@pytest.mark.parametrize(
    "harm",
    [
        damage(b""),
        damage(b"\xff" * 100),
        damage(b'{"a": 3}'),
        damage(b"[" * 5000),
        damage(b'{"' + b"a" * (5 << 20) + b'": "' + b"0" * 64 + b'"}'),
        no_digest,
        link_to_another,
        writable_by_others,
        a_pipe,
        a_folder,
    ],
)
def test_a_hostile_file_of_hashes_is_passed_over(folder, weights, harm):
    hash_file(weights, folder)
    harm(folder)
    assert hash_file(weights, folder) == right(b"some weights")


def test_a_link_in_place_of_the_temporary_file_is_not_followed(folder, weights, tmp_path):
    victim = tmp_path / "victim"
    write(victim, b"precious")
    folder.mkdir(mode=0o700)
    (folder / "content-hashes.json.temporary").symlink_to(victim)
    assert hash_file(weights, folder) == right(b"some weights")
    assert victim.read_bytes() == b"precious"
    assert len(kept(folder)) == 1


def test_a_lock_that_nobody_lets_go_is_not_waited_for(folder, weights, monkeypatch, caplog):
    monkeypatch.setattr(file_hashes, "_LOCK_WAIT_S", 0.05)
    folder.mkdir(mode=0o700)
    with (folder / "content-hashes.json.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert hash_file(weights, folder) == right(b"some weights")
    assert "hashes of weights are not kept" in caplog.text
    assert not (folder / "content-hashes.json").exists()


def test_a_folder_that_cannot_be_written_costs_a_warning(weights, tmp_path, folder, caplog):
    write(folder, b"a file")
    assert hash_file(weights, folder) == right(b"some weights")
    assert f"{folder}: hashes of weights are not kept" in caplog.text


def test_many_engines_at_once_lose_no_hash(folder, tmp_path):
    paths = [tmp_path / f"shard-{index}" for index in range(24)]
    for index, path in enumerate(paths):
        write(path, bytes([index]) * 100)

    def hash_all(part):
        for path in part:
            assert hash_file(path, folder) == right(path.read_bytes())

    threads = [threading.Thread(target=hash_all, args=(paths[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept(folder)) == 24


def test_the_oldest_are_forgotten(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(file_hashes, "_MOST", 3)
    for index in range(5):
        path = tmp_path / f"shard-{index}"
        write(path, bytes([index]))
        hash_file(path, folder)
    assert sorted(kept(folder).values()) == sorted(right(bytes([i])) for i in (2, 3, 4))


def test_it_stops_when_told(weights):
    stop = threading.Event()
    stop.set()
    with pytest.raises(HardpointError, match="its hash is not needed any more"):
        hash_file(weights, None, stop)


def test_a_missing_file_is_an_error(folder, tmp_path):
    with pytest.raises(FileNotFoundError):
        hash_file(tmp_path / "no such", folder)
