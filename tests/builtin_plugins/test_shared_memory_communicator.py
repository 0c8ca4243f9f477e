"""Collectives through shared memory give numpy's results; every mistake is an error."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kv_stores import scripted_clock
from support.searching import examples
from support.shared_memory import our_shared_memory
from support.waiting import wait_until
from torch import distributed

from hardpoint.builtin_plugins.communicators.auto import AutoCommunicator
from hardpoint.builtin_plugins.communicators.shared_memory import SharedMemoryCommunicator
from hardpoint.builtin_plugins.communicators.torch import TorchCommunicator
from hardpoint.errors import CommunicationAbortedError
from hardpoint.kernels import cpu
from hardpoint.kernels.collectives import SUMMED
from hardpoint.plugins import ModelError
from hardpoint.plugins.parallel import CommunicatorContext, Placement

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FORK = multiprocessing.get_context("fork")
CHUNK = 4096
OPTIONS = SharedMemoryCommunicator.Options(chunk_bytes=CHUNK, ring_bytes=4096)
LARGE = SharedMemoryCommunicator.Options()
COUNTS = st.sampled_from([0, 1, 7, 1023, 1024, 1025, 2047, 2048, 2049, 8193]) | st.integers(0, 5000)
DTYPES = st.sampled_from(SUMMED)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Skips where there is no compiler."""
    try:
        return cpu.load()
    except cpu.KernelsUnavailableError as cause:
        pytest.skip(str(cause))


def context_of(rank, size, folder, options=OPTIONS, **more):
    fields = {
        "name": "shared_memory",
        "options": options,
        "group": "tensor-0",
        "device": torch.device("cpu"),
        "placement": Placement(hosts=("here",) * size, folder=str(folder)),
        "timeout_seconds": 120.0,
    }
    return CommunicatorContext(rank=rank, size=size, **(fields | more))


def in_ranks(size, function):
    """Return the result of `function(rank)` in each rank, a thread; errors are returned too."""

    def call(rank):
        try:
            return function(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, range(size)))


@pytest.fixture
def connect(tmp_path):
    """Returns a function that makes the communicators of a group, which are closed afterwards."""
    made = []

    def make(size, options=OPTIONS, group="tensor-0", **more):
        def one(rank):
            context = context_of(rank, size, tmp_path, options, group=group, **more)
            return SharedMemoryCommunicator(context)

        group = in_ranks(size, one)
        made.extend(each for each in group if isinstance(each, SharedMemoryCommunicator))
        return group

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Groups of 2, 3 and 4 ranks, with small chunks and with large ones."""
    made = {}
    for size in (2, 3, 4):
        for options in (OPTIONS, LARGE):
            folder = tmp_path_factory.mktemp("ranks")
            made[size, options.chunk_bytes] = in_ranks(
                size,
                lambda rank, size=size, options=options, folder=folder: SharedMemoryCommunicator(
                    context_of(rank, size, folder, options)
                ),
            )
    yield made
    for group in made.values():
        for each in group:
            each.close()


def values_of(count, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (count,), generator=generator, dtype=dtype)
    scales = 10.0 ** torch.randint(-12, 12, (count,), generator=generator)
    return (torch.randn(count, generator=generator) * scales).to(dtype)


def summed(parts):
    """Return the sum by numpy, rounded once."""
    dtype = parts[0].dtype
    if dtype.is_floating_point:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        arrays = [part.to(wide).numpy() for part in parts]
    else:
        arrays = [part.numpy() for part in parts]
    total = arrays[0].copy()
    with np.errstate(all="ignore"):
        for array in arrays[1:]:
            total += array
    return torch.from_numpy(total).to(dtype)


def same(a, b):
    """Return whether tensors are equal, NaN to NaN, and zeros of one sign."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    return (
        a.shape == b.shape
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(0), b.nan_to_num(0))
        and torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())
    )


@examples(8)
@given(
    size=st.integers(2, 4),
    chunk=st.sampled_from([CHUNK, LARGE.chunk_bytes]),
    count=COUNTS | st.sampled_from([16_384, 16_385, 131_072, 131_077, 300_000]),
    dtype=DTYPES,
    seed=st.integers(0, 1 << 20),
)
def test_all_reduce_is_the_sum_in_rank_order(groups, size, chunk, count, dtype, seed):
    group = groups[size, chunk]
    parts = [values_of(count, dtype, seed + rank) for rank in range(size)]
    expected = summed(parts)
    for _ in range(2):
        inputs = [part.clone() for part in parts]
        results = in_ranks(size, lambda rank, inputs=inputs: group[rank].all_reduce(inputs[rank]))
        for result in results:
            assert result.dtype == dtype
            assert same(result, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2])
def test_every_narrow_number_is_summed_rightly(groups, dtype, count):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    group = groups[2, LARGE.chunk_bytes]
    others = [every, every.flip(0), torch.full_like(every, -0.0), every.roll(12_345)]
    for other in others:
        inputs = [every.repeat(count), other.repeat(count)]
        expected = summed(inputs)
        for result in in_ranks(2, lambda rank, inputs=inputs: group[rank].all_reduce(inputs[rank])):
            assert same(result, expected)


def same_bytes(a, b):
    a_bytes, b_bytes = (x.reshape(-1).view(torch.uint8) for x in (a, b))
    return a.shape == b.shape and torch.equal(a_bytes, b_bytes)


def random_call(draw, size):
    """Draw a call: its name, the tensor of each rank, its argument, and each rank's result."""
    name = draw(st.sampled_from(["all_gather", "all_to_all", "broadcast", "send"]))
    dtype, count = draw(DTYPES | st.just(torch.bool)), draw(COUNTS)
    seed, root = draw(st.integers(0, 1 << 20)), draw(st.integers(0, size - 1))
    shape = (size, count) if name == "all_to_all" else (count,)
    numbers = [
        values_of(math.prod(shape), torch.int8 if dtype == torch.bool else dtype, seed + rank)
        for rank in range(size)
    ]
    parts = [part.to(dtype).view(shape) for part in numbers]
    if name == "all_gather":
        results = [torch.stack(parts)] * size
    elif name == "all_to_all":
        results = [torch.stack([part[rank] for part in parts]) for rank in range(size)]
    elif name == "broadcast":
        results = [parts[root]] * size
    else:
        results = [parts[(rank - 1) % size] for rank in range(size)]
    return name, parts, root, results


def run_call(communicator, call):
    """Make one rank's part of a call; return its result."""
    name, parts, root, _ = call
    rank, size = communicator.rank, communicator.size
    x = parts[rank].clone()
    if name == "broadcast":
        return communicator.broadcast(x, root)
    if name != "send":
        return getattr(communicator, name)(x)
    after, before = (rank + 1) % size, (rank - 1) % size
    into = torch.empty_like(x)
    if rank % 2 or x.nbytes <= 1000:  # else all could wait for room in full rings
        communicator.send(x, after)
        x.zero_()
        return communicator.recv(into, before)
    communicator.recv(into, before)
    communicator.send(x, after)
    return into


@examples(8)
@given(data=st.data(), size=st.sampled_from([2, 4]) | st.just(3))
def test_any_sequence_of_calls(groups, data, size):
    group = groups[size, CHUNK]
    calls = [random_call(data.draw, size) for _ in range(data.draw(st.integers(1, 6)))]
    results = in_ranks(size, lambda rank: [run_call(group[rank], call) for call in calls])
    for rank, of_rank in enumerate(results):
        assert isinstance(of_rank, list), of_rank
        for result, (name, *_, expected) in zip(of_rank, calls, strict=True):
            assert same_bytes(result, expected[rank]), name


def test_send_does_not_wait_for_recv_while_there_is_room(connect):
    first, second = connect(2)
    for number in range(3):
        first.send(torch.full((100,), number), 1)
    into = torch.empty(100, dtype=torch.int64)
    assert [int(second.recv(into, 0)[-1]) for _ in range(3)] == [0, 1, 2]


def test_what_was_sent_comes_after_the_sender_has_left(connect):
    first, second = connect(2)
    first.send(torch.arange(10), 1)
    first.close()
    assert second.recv(torch.empty(10, dtype=torch.int64), 0).tolist() == list(range(10))
    with pytest.raises(
        CommunicationAbortedError, match=r"recv of rank 1 in group 'tensor-0': rank 0 \(process"
    ):
        second.recv(torch.empty(1), 0)


def test_calls_that_differ_are_named_in_all_ranks(connect):
    calls = {
        "called all_reduce with 8 bytes of float32": lambda each: each.all_reduce(torch.zeros(2)),
        "called all_reduce with 8 bytes of int64": lambda each: each.all_reduce(torch.tensor([1])),
        "called all_gather with 8 bytes of float32": lambda each: each.all_gather(torch.zeros(2)),
        "called broadcast from rank 0 with 4 bytes": lambda each: each.broadcast(torch.ones(1), 0),
    }
    names = list(calls)
    for number, other in enumerate(names[1:]):
        group = connect(2, group=f"group-{number}")
        called = [calls[names[0]], calls[other]]
        errors = in_ranks(2, lambda rank, called=called, group=group: called[rank](group[rank]))
        for error in errors:
            assert isinstance(error, CommunicationAbortedError)
            assert names[0] in str(error)
            assert other in str(error)
    first, second = connect(2, group="sends")
    first.send(torch.zeros(2), 1)
    with pytest.raises(
        CommunicationAbortedError, match=r"rank 1 .* 4 bytes of float32, rank 0 .* 8 bytes of f"
    ):
        second.recv(torch.zeros(1), 0)
    with pytest.raises(CommunicationAbortedError, match="8 bytes of float32"):
        first.all_reduce(torch.zeros(1))


def test_wrong_tensors_and_ranks_are_named(connect):
    each = connect(2)[0]
    x = torch.zeros(2, 3)
    for call in (each.all_reduce, each.all_gather, each.all_to_all, lambda x: each.send(x, 1)):
        with pytest.raises(ValueError, match="x: expected a contiguous tensor on the CPU, got"):
            call(torch.zeros(3, 2).T)
    with pytest.raises(ValueError, match="on meta"):
        each.all_gather(x.to("meta"))
    with pytest.raises(ValueError, match=r"expected one of the dtypes bfloat16, .* got torch.bool"):
        each.all_reduce(x.bool())
    for wrong in (torch.zeros(3, 2), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"x: expected 2 rows, one per rank, got the shape \["):
            each.all_to_all(wrong)
    for root in (-1, 2):
        with pytest.raises(ValueError, match=f"source: expected a rank from 0 to 1, got {root}"):
            each.broadcast(x, root)
    for other in (-1, 0, 2):
        with pytest.raises(ValueError, match=f"destination: expected one of .* got {other}"):
            each.send(x, other)
        with pytest.raises(ValueError, match=f"source: expected one of .* got {other}"):
            each.recv(x, other)


@pytest.mark.parametrize(
    "call",
    [
        lambda each: each.all_reduce(torch.zeros(10)),
        lambda each: each.all_gather(torch.zeros(100_000)),
        lambda each: each.broadcast(torch.zeros(1), 2),
        lambda each: each.recv(torch.zeros(1), 2),
        lambda each: each.send(torch.zeros(100_000), 2),
    ],
)
def test_abort_wakes_all_with_its_reason(connect, call):
    group = connect(3)
    threading.Timer(0.1, group[2].abort, ("worker 7 failed",)).start()
    began = time.monotonic()
    results = in_ranks(2, lambda rank: call(group[rank]))
    assert time.monotonic() - began < 60
    for result in results:
        assert isinstance(result, CommunicationAbortedError)
        assert str(result).endswith("in group 'tensor-0': worker 7 failed")
    for each in group:
        with pytest.raises(CommunicationAbortedError, match="worker 7 failed"):
            each.all_reduce(torch.zeros(1))


def test_waiting_uses_no_processor_time(connect):
    group = connect(2)
    used = time.thread_time()
    threading.Timer(0.5, group[1].all_reduce, (torch.ones(5),)).start()
    assert group[0].all_reduce(torch.ones(5)).tolist() == [2.0] * 5
    assert time.thread_time() - used < 0.1  # of this thread alone, which waits for 0.5 s


def run_process(rank, size, folder, ends):
    each = SharedMemoryCommunicator(context_of(rank, size, folder))
    for number in range(50):
        x = torch.full((4000,), float(rank + number), dtype=torch.bfloat16)
        result = each.all_reduce(x)
    ends.send(float(result[-1]))
    ends.recv()
    try:
        each.all_reduce(torch.zeros(1))
    except CommunicationAbortedError as error:
        ends.send(str(error))
    each.close()


@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_rank_ends_the_calls_of_the_others(tmp_path, size):
    pipes = [FORK.Pipe() for _ in range(size)]
    children = [
        FORK.Process(target=run_process, args=(rank, size, tmp_path, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    total = sum(range(size)) + 49 * size
    assert [ours.recv() for ours, _ in pipes] == [total] * size
    for ours, _ in pipes[:-1]:
        ours.send("go")
    time.sleep(0.2)  # until they sleep
    began = time.monotonic()
    os.kill(children[-1].pid, signal.SIGKILL)
    for ours, _ in pipes[:-1]:
        assert ours.poll(60)
        assert f"rank {size - 1} (process {children[-1].pid}) has ended" in ours.recv()
    assert time.monotonic() - began < 60
    for child in children:
        child.join()


def leftovers():
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line for line in maps if "memfd:hardpoint" in line]
    files = os.listdir("/proc/self/fd")
    return {*files, *mapped, *our_shared_memory(), *threading.enumerate()}


def test_nothing_is_left(connect):
    before = leftovers()
    group = connect(3)
    assert not leftovers() <= before
    in_ranks(3, lambda rank: group[rank].all_reduce(torch.zeros(1)))
    for each in group + group:  # twice
        each.close()
    assert leftovers() <= before
    group[0].abort("too late")
    with pytest.raises(CommunicationAbortedError, match="it is closed"):
        group[0].all_reduce(torch.zeros(1))


def errors_of(results):
    assert all(isinstance(error, ModelError) for error in results), results
    assert len({str(error) for error in results}) == 1
    return str(results[0])


def test_groups_that_cannot_share_memory_are_refused_in_all_ranks(connect, monkeypatch):
    before = leftovers()
    hosts = Placement(hosts=("a", "b"), store="127.0.0.1:1")
    assert "its ranks are on several hosts: a, b" in errors_of(connect(2, placement=hosts))
    cuda = errors_of(connect(2, device=torch.device("cuda")))
    assert "it moves tensors of the CPU, these are on cuda" in cuda
    nowhere = Placement(hosts=("a", "a"), folder="/nowhere")
    assert "there is no folder '/nowhere'" in errors_of(connect(2, placement=nowhere))
    assert "got none" in errors_of(connect(2, placement=Placement(hosts=("a", "a"))))
    monkeypatch.setenv(cpu.VARIABLE, "off")
    cpu.load.cache_clear()
    assert "HARDPOINT_KERNELS is off" in errors_of(connect(2, group="off"))
    monkeypatch.undo()
    cpu.load.cache_clear()
    assert leftovers() <= before


def test_a_failure_of_one_rank_is_that_of_all(connect, monkeypatch):
    before = leftovers()
    load = cpu.load

    def load_in_one(*args):
        if threading.current_thread().name.endswith("_1"):
            raise cpu.KernelsUnavailableError("no kernels in this thread")
        return load(*args)

    monkeypatch.setattr(cpu, "load", load_in_one)
    assert "no kernels in this thread" in errors_of(connect(3))
    monkeypatch.undo()
    too_large = SharedMemoryCommunicator.Options(chunk_bytes=1 << 30, ring_bytes=1 << 30)
    error = errors_of(connect(40, too_large, group="too-large"))
    assert "rank 0: a group of 40 ranks needs" in error
    assert "bytes of shared memory, which cannot be had" in error
    assert leftovers() <= before


def test_ranks_that_do_not_come_are_named(tmp_path, monkeypatch):
    before = leftovers()

    def come(rank):
        return SharedMemoryCommunicator(context_of(rank * 2, 4, tmp_path, timeout_seconds=20.0))

    def both_are_there():
        return len(list(tmp_path.iterdir())) >= 2

    clock = scripted_clock(monkeypatch, "communicators.meeting")
    with ThreadPoolExecutor(1) as pool:
        errors = pool.submit(in_ranks, 2, come)
        wait_until(both_are_there)
        assert not errors.done()
        clock.advance(20.1)
        error = errors_of(errors.result(60))
    assert f"rank 1, rank 3 did not come to {tmp_path} within 20 s" in error
    assert leftovers() <= before


def test_ranks_of_one_host_meet_at_the_store_of_several(connect):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = distributed.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    group = connect(2, placement=Placement(hosts=("a", "a"), store=f"127.0.0.1:{port}"))
    results = in_ranks(2, lambda rank: group[rank].all_reduce(torch.ones(1)))
    assert [result.tolist() for result in results] == [[2.0], [2.0]]
    del store


def auto(rank, folder, created=None, **more):
    """Return the choice by default."""
    classes = {"shared_memory": SharedMemoryCommunicator, "torch": TorchCommunicator}

    def create(name):
        if created is not None:
            created.append(name)
        options = classes[name].Options()
        return classes[name](context_of(rank, 2, folder, options, name=name, **more))

    options = AutoCommunicator.Options()
    context = context_of(rank, 2, folder, options, name="auto", creator=create, **more)
    return AutoCommunicator(context)


def test_auto_takes_shared_memory_else_torch_and_reports_why(tmp_path, monkeypatch):
    def run(rank):
        each = auto(rank, tmp_path)
        result = each.all_reduce(torch.full((3,), rank + 1.0)).tolist()
        described = each.describe(), each.rank, each.size
        each.close()
        return described, result

    assert in_ranks(2, run) == [(("shared memory", rank, 2), [3.0] * 3) for rank in range(2)]
    monkeypatch.setenv(cpu.VARIABLE, "off")
    cpu.load.cache_clear()
    second = tmp_path / "second"
    second.mkdir()
    tmp_path = second
    for (described, _, _), result in in_ranks(2, run):
        assert result == [3.0] * 3
        assert not described.startswith("shared memory")
        assert described.endswith("HARDPOINT_KERNELS is off)")
    monkeypatch.undo()
    cpu.load.cache_clear()


def test_auto_does_not_wait_twice_for_a_rank(tmp_path):
    created = []
    with pytest.raises(ModelError, match=r"rank 1 did not come to .* within 0\.2 s"):
        auto(0, tmp_path, created, timeout_seconds=0.2)
    assert created == ["shared_memory"]
