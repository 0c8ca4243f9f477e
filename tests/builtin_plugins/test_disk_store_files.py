from __future__ import annotations

import os
import random
import shutil
import stat
import struct
from pathlib import Path

import pytest
from support.builtins.disk_harness import (
    SLOT,
    descriptors,
    has,
    keep,
    kept,
    key,
    open_disk,
    size_for,
)
from support.kv_stores import scripted_clock

from hardpoint.builtin_plugins.kv_stores.disk import DiskStore
from hardpoint.plugins import ConfigError
from hardpoint.typed import convert

NAME = "blocks-7128"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def filled(path: Path) -> Path:
    """The path of a store with blocks 0 to 7."""
    store = open_disk(path)
    assert all(keep(store, number) for number in range(8))
    store.close()
    return path


def refused(path: Path, **options: object) -> str:
    """Open a store, which is refused; return the message."""
    before = descriptors()
    with pytest.raises(ConfigError) as caught:
        open_disk(path, **options)
    assert descriptors() <= before
    return str(caught.value)


def test_only_this_user_may_use_the_files(path: Path) -> None:
    mask = os.umask(0)
    try:
        store = open_disk(path / "deeper")
        assert keep(store, 1)
        store.close()
    finally:
        os.umask(mask)
    for file in [path / "deeper", *(path / "deeper").rglob("*")]:
        expected = 0o700 if file.is_dir() else 0o600
        assert stat.S_IMODE(file.stat().st_mode) == expected, file


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_may_use_is_refused(path: Path, mode: int) -> None:
    path.mkdir()
    path.chmod(mode)
    message = refused(path)
    assert f"plugin.disk.path: {str(path)!r} cannot be used" in message
    assert f"has mode {mode:04o}: others may use it; `chmod 700` would do" in message
    path.chmod(0o700)
    open_disk(path).close()


@pytest.mark.parametrize("name", [f"{NAME}/slab", f"{NAME}/index", f"{NAME}/lock", "lock"])
def test_a_file_that_others_may_use_is_refused(filled: Path, name: str) -> None:
    (filled / name).chmod(0o640)
    message = refused(filled)
    assert message.startswith("plugin.disk.path: ")
    assert f"{name.split('/')[-1]!r} has mode 0640" in message
    assert "`chmod 600` would do" in message


def test_what_belongs_to_another_user_is_refused(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: ours + 1)
    assert f"belongs to user {ours}, and not to this process's, {ours + 1}" in refused(filled)


@pytest.mark.parametrize("name", ["", NAME])
@pytest.mark.parametrize("kind", ["link", "file", "dangling"])
def test_a_folder_must_be_one(filled: Path, tmp_path: Path, name: str, kind: str) -> None:
    place = filled / name
    place.rename(tmp_path / "moved")
    if kind == "file":
        place.write_bytes(b"")
    else:
        place.symlink_to(tmp_path / ("moved" if kind == "link" else "nowhere"))
    assert "to be a folder, and not a link to one" in refused(filled)


@pytest.mark.parametrize("name", [f"{NAME}/slab", f"{NAME}/index", f"{NAME}/lock", "lock"])
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_file_must_be_one(filled: Path, tmp_path: Path, name: str, kind: str) -> None:
    place = filled / name
    victim = tmp_path / "moved"
    place.rename(victim)
    before = victim.read_bytes()
    if kind == "link":
        place.symlink_to(victim)
    elif kind == "folder":
        place.mkdir(mode=0o700)
    else:
        os.mkfifo(place, 0o600)
    message = refused(filled)
    assert "to be a file, and not a link to one" in message or "is not a file" in message
    assert victim.read_bytes() == before


def test_a_link_in_the_place_of_a_new_index_is_not_followed(filled: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (filled / NAME / "index.new").symlink_to(victim)
    assert "'index.new'" in refused(filled, blocks=100)
    assert victim.read_bytes() == b"mine"


def test_sizes_that_hold_no_block_are_refused(path: Path) -> None:
    least = size_for(1)
    message = refused(path, size_bytes=least - 1)
    assert message == (
        f"plugin.disk.size_bytes: {least - 1} bytes have no room for a block of this model, which "
        f"needs {least}"
    )
    assert not path.exists()
    open_disk(path, size_bytes=least).close()


def test_sizes_that_the_disk_does_not_have_are_refused(path: Path) -> None:
    status = os.statvfs(path.parent)
    limit = status.f_blocks * status.f_frsize
    message = refused(path / "deeper", size_bytes=limit + 1)
    assert message == (
        f"plugin.disk.size_bytes: {limit + 1} bytes are more than the file system of "
        f"{str(path / 'deeper')!r} has, which are {limit}"
    )
    assert not path.exists()


@pytest.mark.parametrize("sizes", [(4096,), (100,), (1 << 17,)])
@pytest.mark.parametrize("size_bytes", [size_for(1), 10**6, (1 << 23) + 1])
def test_the_index_is_part_of_the_size(path: Path, sizes: tuple[int, ...], size_bytes: int) -> None:
    size_bytes += sizes[0]
    store = open_disk(path, sizes=sizes, size_bytes=size_bytes)
    index = next(path.glob("blocks-*/index")).stat().st_size
    slot = -(-sizes[0] // 4096) * 4096
    used = index + store.slab.capacity * slot
    assert size_bytes * 0.94 - slot < used <= size_bytes
    store.close()


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({}, "plugin.disk.path"),
        ({"path": ""}, "plugin.disk.path"),
        ({"path": "/kv", "size_bytes": 0}, "plugin.disk.size_bytes"),
        ({"path": "/kv", "size": 5}, "plugin.disk.size"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        convert(options, DiskStore.Options, path="plugin.disk")


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk have no room, until the patches are undone."""

    def fail(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", fail)


def test_a_disk_that_is_full_at_start_saves_nothing_until_there_is_room(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = scripted_clock(monkeypatch, "kv_stores.disk")
    allocate = os.posix_fallocate
    fill_disk(monkeypatch)
    faults: list[str] = []
    before = descriptors()
    store = open_disk(path, faults=faults)
    assert faults == ["plugin.disk.path: no block is saved: [Errno 28] No space left on device"]
    assert not keep(store, 1)
    assert kept(store, [1]) == []
    assert store.used_bytes == 0
    store.drain()
    clock.advance(30.1)
    assert not keep(store, 1)
    monkeypatch.setattr("os.posix_fallocate", allocate)
    assert not keep(store, 1), "it tries only now and then"
    clock.advance(30.1)
    assert keep(store, 1)
    assert kept(store, [1]) == [1]
    assert len(faults) == 1
    store.close()
    assert not keep(store, 2)
    assert descriptors() <= before


def test_a_store_that_never_opened_can_be_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = scripted_clock(monkeypatch, "kv_stores.disk")
    fill_disk(monkeypatch)
    before = descriptors()
    store = open_disk(path)
    store.close()
    clock.advance(30.1)
    assert not keep(store, 1)
    assert descriptors() <= before


@pytest.mark.parametrize(("blocks", "left"), [(100, 8), (4, 4)])
def test_another_size_on_a_full_disk_keeps_the_index(
    filled: Path, blocks: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch)
    faults: list[str] = []
    store = open_disk(filled, blocks, faults)
    assert kept(store, range(8)) == list(range(left))
    assert store.used_bytes == left * 7128
    assert [text[:55] for text in faults] == (
        ["plugin.disk.size_bytes: there is room for 16 blocks, an"] if blocks > 16 else []
    )
    assert not (filled / NAME / "index.new").exists()
    assert keep(store, 20)
    assert kept(store, [20]) == [20]
    store.close()


def test_a_path_that_another_process_keeps_locked_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hardpoint.builtin_plugins.kv_stores.disk_files import FileLocks, open_file, open_folder

    folder = open_folder(path)
    locks = FileLocks(open_file("lock", folder))
    assert locks.try_lock(0)
    monkeypatch.setattr("hardpoint.builtin_plugins.kv_stores.disk._OPEN_SECONDS", 0.05)
    assert "another process has kept it locked for 0.05 s" in refused(path)
    locks.close()
    os.close(folder)
    open_disk(path).close()


# Files that are not what a store has written


def test_a_damaged_block_is_a_miss_and_is_stored_again(filled: Path) -> None:
    slab = filled / NAME / "slab"
    content = slab.read_bytes()
    for place in (0, 127, 128, 5000, 7127):
        damaged = bytearray(content)
        damaged[place] ^= 1
        slab.write_bytes(damaged)
        faults: list[str] = []
        store = open_disk(filled, faults=faults)
        missing = [number for number in range(8) if not has(store, number)]
        assert len(missing) == 1, place
        assert len(faults) == 1
        assert "plugin.disk.path: a block was damaged" in faults[0]
        assert store.lookup([key(missing[0])]) == [False]
        assert keep(store, missing[0])
        assert kept(store, range(8)) == list(range(8))
        store.close()


@pytest.mark.parametrize("size", [0, 1, SLOT, 8 * SLOT - 1])
def test_a_slab_that_was_cut_is_begun_again(filled: Path, size: int) -> None:
    os.truncate(filled / NAME / "slab", size)
    store = open_disk(filled)
    assert kept(store, range(8)) == []
    assert all(keep(store, number) for number in range(8))
    assert kept(store, range(8)) == list(range(8))
    store.close()


def test_a_slab_that_is_cut_while_it_is_open_has_misses(filled: Path) -> None:
    store = open_disk(filled)
    os.truncate(filled / NAME / "slab", 3 * SLOT + 100)
    left = [number for number in range(8) if has(store, number)]
    assert len(left) == 3
    store.close()


def test_a_second_engine_refuses_files_that_are_wrong(filled: Path) -> None:
    store = open_disk(filled)
    os.truncate(filled / NAME / "slab", SLOT)
    assert f"{NAME}/slab is shorter than its index" in refused(filled)
    store.close()


def test_files_of_an_index_that_are_wrong_are_replaced(filled: Path) -> None:
    index = filled / NAME / "index"
    content = index.read_bytes()
    large = struct.pack("<Q", 1 << 62)
    wrong = [
        b"",
        b"x",
        content[:4096],
        content[:-1],
        content + bytes(8),
        bytes(len(content)),
        b"HPKVIDX\1" + content[8:],  # another format
        content[:8] + b"\2\0\0\0" + content[12:],  # another version
        content[:16] + struct.pack("<Q", 7129) + content[24:],  # another size of blocks
        content[:24] + bytes(8) + content[32:],  # room for no slot
        content[:24] + large + content[32:],
        content[:24] + struct.pack("<Q", 17) + content[32:],
        content[:32] + struct.pack("<Q", 9) + content[40:],  # more slots than the slab has
    ]
    for number, data in enumerate(wrong):
        index.write_bytes(data)
        store = open_disk(filled)
        assert kept(store, range(8)) == [], number
        assert all(keep(store, number) for number in range(8)), number
        assert kept(store, range(8)) == list(range(8)), number
        store.close()
    index.write_bytes(content[:32] + large + content[40:])
    store = open_disk(filled)
    assert kept(store, range(8)) == []
    store.close()


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_random_bytes_in_an_index_give_no_wrong_block(filled: Path, is_open: bool) -> None:
    index, slab = filled / NAME / "index", filled / NAME / "slab"
    content, blocks = index.read_bytes(), slab.read_bytes()
    for seed in range(25):
        generator, damaged = random.Random(seed), bytearray(content)
        for _change in range(generator.choice((1, 5, 50, 500))):
            first = generator.choice((24, 4096))  # the header's sizes, or what is after it
            place = generator.randrange(first, len(content) if first > 24 else 48)
            damaged[place] = generator.choice((0, 1, 255, generator.randrange(256)))
        store = open_disk(filled) if is_open else None
        with index.open("r+b") as file:  # it stays the same file, which is mapped
            file.write(damaged)
        slab.write_bytes(blocks) if store is None else None
        store = store or open_disk(filled)
        numbers = [number for number in range(30) if has(store, number)]
        assert set(numbers) <= set(range(8))
        assert len(store.lookup([key(number) for number in range(30)])) == 30
        for number in range(50, 60):
            keep(store, number)
        assert all(
            number in (*range(8), *range(50, 60)) for number in range(70) if has(store, number)
        )
        store.close()
        with index.open("wb") as file:
            file.write(content)
        slab.write_bytes(blocks)


def test_two_slots_of_one_key_and_cells_that_lead_elsewhere(filled: Path) -> None:
    index = filled / NAME / "index"
    content = bytearray(index.read_bytes())
    first = bytes(content[4096:4128])
    for slot in range(1, 8):
        content[4096 + 32 * slot : 4128 + 32 * slot] = first
    index.write_bytes(content)
    store = open_disk(filled)
    assert len([number for number in range(8) if has(store, number)]) <= 1
    assert all(keep(store, number) for number in range(20, 28))
    assert kept(store, range(20, 28)) == list(range(20, 28))
    store.close()


def test_files_that_are_deleted_while_they_are_open_are_reported_and_not_used(path: Path) -> None:
    faults: list[str] = []
    store = open_disk(path, faults=faults)
    assert keep(store, 1)
    shutil.rmtree(path)
    assert not keep(store, 2)
    assert not has(store, 1)
    assert store.lookup([key(1)]) == [False]
    assert store.used_bytes == 0
    assert faults == [
        f"plugin.disk.path: the files in {str(path)!r} were deleted; no block is saved or loaded "
        f"until the engine is started again"
    ]
    store.close()
    assert not path.exists()


@pytest.mark.parametrize("size", [0, 4096, 5000])
@pytest.mark.parametrize("is_written", [False, True])
def test_an_index_that_is_cut_short_while_it_is_open_is_not_touched(
    filled: Path, size: int, is_written: bool
) -> None:
    """The index is mapped: a read beyond its end would kill the process."""
    faults: list[str] = []
    store = open_disk(filled, faults=faults)
    assert kept(store, range(8)) == list(range(8))
    os.truncate(filled / NAME / "index", size)
    if is_written:
        assert not keep(store, 9)
    assert not has(store, 1)
    assert store.lookup([key(1), key(2)]) == [False, False]
    assert store.used_bytes == 0
    store.drain()
    assert faults == [
        f"plugin.disk.path: the files in {str(filled)!r} were cut short; no block is saved or "
        f"loaded until the engine is started again"
    ]
    store.close()
    store = open_disk(filled)
    assert keep(store, 9)
    assert has(store, 9)
    store.close()


def test_an_index_that_is_cut_short_during_a_call_is_not_touched(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a block is read or written, which takes longest."""
    store = open_disk(filled)

    def cut(move):
        def then(*arguments):
            os.truncate(filled / NAME / "index", 4096)
            return move(*arguments)

        return then

    with monkeypatch.context() as patched:
        patched.setattr(store.slab, "read", cut(store.slab.read))
        assert not has(store, 1)
    store.close()
    store = open_disk(filled)
    monkeypatch.setattr(store.slab, "write", cut(store.slab.write))
    assert not keep(store, 9)
    store.close()


def test_slots_that_are_cut_off_while_they_are_open_are_misses(filled: Path) -> None:
    faults: list[str] = []
    store = open_disk(filled, faults=faults)
    os.truncate(filled / NAME / "slab", 3 * SLOT)
    assert [number for number in range(8) if has(store, number)] == [0, 1, 2]
    assert len(faults) == 1
    assert "a block was damaged" in faults[0]
    store.close()
