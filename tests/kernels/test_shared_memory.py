"""Messages through shared memory arrive whole and in order, and no wait outlives its cause."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.searching import examples
from support.shared_memory import our_shared_memory
from support.waiting import wait_until

from hardpoint.kernels import cpu, shared_memory
from hardpoint.kernels.shared_memory import AbortedError, BroadcastRing, NoMemoryError, allocate

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FORK = multiprocessing.get_context("fork")
LIMIT_S = 60.0
"""Of a wait that ends much sooner."""


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Skips where there is no compiler."""
    try:
        return cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(str(cause))


@pytest.fixture
def make_ring():
    """Returns a function that makes both ends of a ring, which are closed afterwards."""
    ends = []

    def make(size=4096, readers=1):
        writer = BroadcastRing.create(size, readers)
        ends.append(writer)
        for reader in range(readers):
            ends.append(BroadcastRing.open(writer.fileno(), reader))
        return writer, *ends[-readers:]

    yield make
    for end in ends:
        end.close()


@pytest.fixture
def start_process():
    """Returns a function that runs another one in a child, which is ended afterwards."""
    children = []

    def start(function, *args):
        child = FORK.Process(target=function, args=args)
        child.start()
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.join()


def wait_for_calls(*ends):
    """Wait until other threads are in calls of these ends."""
    for end in ends:
        wait_until(end._session._in_call.locked, what="a call")


def leftovers():
    """Return the resources that would be left: descriptors, and mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line for line in maps if "hardpoint" in line]
    return len(os.listdir("/proc/self/fd")), len(mapped), len(our_shared_memory())


@examples(25)
@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 1016, 1017, 1024, 4088, 4089, 4096, 9000]) | st.integers(0, 20_000),
        max_size=12,
    ),
    readers=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_each_reader_gets_all_messages(sizes, readers, seed):
    messages = [random.Random(seed + size).randbytes(size) for size in sizes]
    with ThreadPoolExecutor(readers) as pool:
        writer = BroadcastRing.create(4096, readers)
        ends = [BroadcastRing.open(writer.fileno(), reader) for reader in range(readers)]
        results = [
            pool.submit(lambda end=end: [end.read(LIMIT_S) for _ in messages]) for end in ends
        ]
        for message in messages:
            writer.write(message, LIMIT_S)
        for result in results:
            assert result.result() == messages
        for end in (writer, *ends):
            end.close()


@pytest.mark.parametrize("prefix", ["", "total_"])
def test_the_pages_of_files_are_no_memory_that_a_control_group_lacks(tmp_path, monkeypatch, prefix):
    limit, used = tmp_path / "limit", tmp_path / "used"
    limit.write_text("1000000000\n")
    used.write_text("999999000\n")
    monkeypatch.setattr(shared_memory, "_LIMITS", ((str(limit), str(used)),))
    expected = f"2000 bytes of shared memory, which cannot be had: {limit} allows 1000 more"
    with pytest.raises(NoMemoryError, match=expected):
        allocate(2000, "it")
    counts = f"{prefix}inactive_file 600\n{prefix}active_file 500\n"
    (tmp_path / "memory.stat").write_text(f"anon 999990000\ninactive_file 1\n{counts}")
    os.close(allocate(2000, "it"))
    with pytest.raises(NoMemoryError, match="allows 2100 more"):
        allocate(2200, "it")


def test_a_message_larger_than_the_buffers_arrives(make_ring):
    writer, reader = make_ring(1 << 16)
    message = os.urandom(3_000_001)
    with ThreadPoolExecutor() as pool:
        got = pool.submit(reader.read)
        writer.write(message)
    assert got.result() == message


def test_timeouts_lose_nothing(make_ring):
    writer, reader = make_ring(4096)
    assert reader.read(0) is None
    began = time.monotonic()
    assert reader.read(0.15) is None
    assert 0.14 < time.monotonic() - began < LIMIT_S
    for number in range(4):
        writer.write(bytes([number]) * 1000)
    with pytest.raises(TimeoutError, match=r"no room for a message of 1000 bytes within 0\.1 s"):
        writer.write(b"x" * 1000, 0.1)
    assert [reader.read(0)[0] for _ in range(4)] == [0, 1, 2, 3]
    assert reader.read(0) is None
    writer.write(b"later", 0.1)
    assert reader.read() == b"later"


@pytest.mark.parametrize("by", ["writer", "reader", "other reader"])
def test_abort_wakes_all_with_its_reason(make_ring, by):
    writer, reader, other = make_ring(4096, 2)
    writer.write(b"x" * 4000)
    other.read()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(writer.write, b"x" * 4000), pool.submit(other.read)]
        wait_for_calls(writer, other)
        time.sleep(0.01)  # until they sleep: they yield for 0.1 ms
        {"writer": writer, "reader": reader, "other reader": other}[by].abort("the sky fell")
        for each in waiting:
            with pytest.raises(AbortedError, match="the sky fell"):
                each.result(LIMIT_S)
    reader.abort("a second reason")
    with pytest.raises(AbortedError, match="the sky fell"):
        reader.read(0)
    with pytest.raises(AbortedError, match="the sky fell"):
        writer.write(b"")


def test_a_long_reason_is_cut_between_characters(make_ring):
    writer, reader = make_ring()
    writer.abort("é" * 1000)
    with pytest.raises(AbortedError, match="^é+$"):
        reader.read()


@pytest.mark.timing
def test_waiting_uses_no_processor_time(make_ring):
    writer, reader = make_ring()
    writer.write(b"x" * 4000)
    reader.read()
    used = time.process_time()
    assert reader.read(0.6) is None
    assert time.process_time() - used < 0.02
    writer.write(b"x" * 4000)
    used = time.process_time()
    with pytest.raises(TimeoutError):
        writer.write(b"x" * 4000, 0.4)
    assert time.process_time() - used < 0.02


def test_other_threads_and_signals_run_while_one_waits(make_ring):
    writer, reader = make_ring()
    came = []
    before = signal.signal(signal.SIGALRM, lambda *_: (came.append(1), writer.write(b"woken")))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.22)
        assert reader.read(LIMIT_S) == b"woken"
    finally:
        signal.signal(signal.SIGALRM, before)
    assert came == [1]


def test_what_was_written_is_read_after_the_writer_has_left(make_ring):
    writer, reader = make_ring()
    writer.write(b"last")
    writer.close()
    assert reader.read() == b"last"
    with pytest.raises(AbortedError, match="the writer has ended"):
        reader.read()


def test_leaving_wakes_who_waits(make_ring):
    writer, reader = make_ring()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(reader.read)
        wait_for_calls(reader)
        time.sleep(0.01)
        writer.close()
        with pytest.raises(AbortedError, match="the writer has ended"):
            waiting.result(LIMIT_S)


def test_close_ends_the_own_call_of_another_thread(make_ring):
    _, reader = make_ring()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(reader.read)
        wait_for_calls(reader)
        reader.close()
        with pytest.raises(AbortedError, match="reader 0 was closed during a call"):
            waiting.result(LIMIT_S)


def read_for_ever(descriptor):
    ring = BroadcastRing.open(descriptor, 0)
    while ring.read():
        pass


def hold(descriptor, ends):
    BroadcastRing.open(descriptor, 0)
    ends.send("opened")
    time.sleep(3600)


def test_a_child_reads(make_ring, start_process):
    writer = BroadcastRing.create(1 << 14, 1)
    child = start_process(read_for_ever, writer.fileno())
    for size in (1, 10, 100_000):
        writer.write(os.urandom(size), LIMIT_S)
    writer.write(b"", LIMIT_S)
    child.join(LIMIT_S)
    assert child.exitcode == 0
    writer.close()


def test_a_killed_reader_ends_the_wait_for_room(start_process):
    writer = BroadcastRing.create(4096, 1)
    ours, theirs = FORK.Pipe()
    child = start_process(hold, writer.fileno(), theirs)
    assert ours.recv() == "opened"
    writer.write(b"x" * 4000)
    kill_during_call(child.pid, writer)
    with pytest.raises(AbortedError, match="reader 0 has ended"):
        writer.write(b"x" * 4000, LIMIT_S)
    writer.close()
    ours.close()
    theirs.close()


def kill_during_call(pid, end):
    """Kill a process soon after another thread's call of an end has begun."""

    def kill():
        wait_for_calls(end)
        time.sleep(0.06)  # it has looked at the process at least once
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill).start()


def write_once(ends):
    writer = BroadcastRing.create(4096, 1)
    ends.send((os.getpid(), writer.fileno()))
    ends.recv()
    writer.write(b"once")
    time.sleep(3600)


def test_a_killed_writer_ends_the_wait_for_a_message(start_process):
    ours, theirs = FORK.Pipe()
    child = start_process(write_once, theirs)
    pid, number = ours.recv()
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    reader = BroadcastRing.open(descriptor, 0)
    os.close(descriptor)
    ours.send(None)
    assert reader.read(LIMIT_S) == b"once"
    kill_during_call(child.pid, reader)
    with pytest.raises(AbortedError, match="the writer has ended"):
        reader.read(LIMIT_S)
    reader.close()
    ours.close()
    theirs.close()


def test_nothing_is_left(make_ring):
    before = leftovers()
    writer = BroadcastRing.create(1 << 20, 2)
    ends = [writer, *(BroadcastRing.open(writer.fileno(), reader) for reader in range(2))]
    assert leftovers() != before
    for end in ends + ends:  # twice
        end.close()
    assert leftovers() == before
    assert writer.fileno() == -1
    writer.abort("too late")
    for call in (writer.write, lambda _: ends[1].read()):
        with pytest.raises(AbortedError, match="it is closed"):
            call(b"")


def test_too_little_memory_reports_how_much_is_needed():
    before = leftovers()
    with pytest.raises(
        NoMemoryError,
        match=r"this test needs \d{15,} bytes of shared memory, which cannot be had: .* allows \d+",
    ):
        allocate(1 << 50, "this test")
    assert leftovers() == before


def limited(ends):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    try:
        BroadcastRing.create(1 << 20, 1)
    except NoMemoryError as error:
        ends.send(str(error))
    BroadcastRing.create(1 << 12, 1)


def test_a_resource_limit_is_named(start_process):
    ours, theirs = FORK.Pipe()
    child = start_process(limited, theirs)
    assert ours.recv().endswith("RLIMIT_FSIZE, ulimit -f")
    child.join()
    assert child.exitcode == 0
    ours.close()
    theirs.close()


def test_systems_without_memfd_use_a_file_without_a_name(monkeypatch):
    before = leftovers()
    monkeypatch.delattr(os, "memfd_create")
    writer = BroadcastRing.create(1 << 14, 1)
    assert os.readlink(f"/proc/self/fd/{writer.fileno()}").startswith("/dev/shm/hardpoint-")
    assert len(our_shared_memory()) == before[2]
    reader = BroadcastRing.open(writer.fileno(), 0)
    writer.write(b"here")
    assert reader.read() == b"here"
    reader.close()
    writer.close()
    with pytest.raises(NoMemoryError, match="cannot be had"):
        allocate(1 << 50, "this test")
    assert leftovers() == before


def test_wrong_arguments_are_named(make_ring, monkeypatch):
    for readers in (0, -1, shared_memory.MAX_MEMBERS):
        with pytest.raises(ValueError, match=f"num_readers: expected 1 to 63, got {readers}"):
            BroadcastRing.create(4096, readers)
    for size in (0, -5, 100, (1 << 30) + 1):
        with pytest.raises(ValueError, match=f"expected 4096 to 1073741824 bytes, got {size}"):
            BroadcastRing.create(size, 1)
    writer, _ = make_ring()
    for reader in (-2, 1):
        with pytest.raises(ValueError, match=f"reader: expected 0 to 0, got {reader}"):
            BroadcastRing.open(writer.fileno(), reader)
    other = os.memfd_create("other")
    os.write(other, bytes(4096))
    with pytest.raises(ValueError, match="expected memory that this version of hardpoint shares"):
        BroadcastRing.open(other, 0)
    os.close(other)
    before = leftovers()
    monkeypatch.setenv(cpu.VARIABLE, "off")
    cpu.load.cache_clear()
    with pytest.raises(cpu.KernelsUnavailableError, match="HARDPOINT_KERNELS is off"):
        BroadcastRing.create(4096, 1)
    monkeypatch.undo()
    cpu.load.cache_clear()
    assert leftovers() == before
