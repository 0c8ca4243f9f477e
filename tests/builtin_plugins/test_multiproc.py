"""Calls, results and errors of worker processes, with scripted workers."""

import contextlib
import itertools
import os
import re
import select
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from support.kv_stores import scripted_clock
from support.process.forked_python import forked_python
from support.process.harness import holdings, nothing_left
from support.process.worker_that_obeys import executor, plan
from support.waiting import wait_until

from hardpoint.builtin_plugins.executors import multiproc_group
from hardpoint.builtin_plugins.executors.multiproc_calls import SocketSender
from hardpoint.builtin_plugins.executors.multiproc_group import RankProcesses
from hardpoint.errors import EngineClosedError, EngineDeadError
from hardpoint.kernels.shared_memory import BroadcastRing
from hardpoint.plugins import ModelError, ModelRunnerOutput


@pytest.fixture
def opened():
    """Starts executors, and closes them; nothing of them may be left."""
    before = holdings()
    executors = []

    def start(*args, **options):
        executors.append(executor(*args, **options))
        executors[-1].start()
        return executors[-1]

    yield start
    for started in executors:
        started.close()
        started.close()
    executors.clear()
    nothing_left(before)


@pytest.fixture
def clock(monkeypatch):
    """A clock for how long the errors of other ranks are waited for."""
    return scripted_clock(monkeypatch, "executors.multiproc_group")


def begin(workers, number, *orders, sampling=()):
    """Begin a step; return the future of its result."""
    step = plan(number, *orders, sampling=sampling)
    assert workers.execute_model(step).result(60) is None
    return workers.sample_tokens(step)


def step(workers, number, *orders, sampling=()):
    """Run a step; return its result."""
    return begin(workers, number, *orders, sampling=sampling).result(60)


def test_every_rank_runs_each_call_once_and_one_gives_the_result(opened):
    workers = opened(2, 2)
    assert workers.max_concurrent_batches == 2
    workers.initialize_cache(5)
    assert step(workers, 1) == ModelRunnerOutput({"r": [1]})
    received = workers.collective_rpc("stop_profile")
    assert received == [f"{rank} cache 5 execute 1" for rank in range(4)]


def test_infos_come_in_rank_order_and_progress_is_the_sum_of_the_ranks(opened):
    reports = []
    with contextlib.closing(
        executor(3, progress=lambda *progress: reports.append(progress))
    ) as workers:
        infos = workers.start()
    assert [info.available_bytes for info in infos] == [1000, 1001, 1002]
    assert reports[-1] == ("Loading weights", 9, 9)
    assert all(total == 9 and done < 9 for _, done, total in reports[:-1])


def test_results_come_in_the_order_of_plans_of_which_several_are_under_way(opened):
    workers = opened(1, 2)
    plans = [plan(number, f"{number % 2} sleep 0.01") for number in range(1, 9)]
    futures = []
    for step in plans:
        workers.execute_model(step)
        futures.append(workers.sample_tokens(step))
    assert [future.result(60).sampled_token_ids["r"] for future in futures] == [
        [number] for number in range(1, 9)
    ]


def test_a_timeout_is_of_all_ranks_together_and_late_answers_are_dropped(opened, tmp_path):
    workers = opened(2)
    began = time.monotonic()
    with pytest.raises(
        TimeoutError, match=r"start_parts: no answer within 0.1 s from rank 0 \(pid"
    ):
        workers.collective_rpc("start_parts", (f"* await {tmp_path}/end",), timeout=0.1)
    assert time.monotonic() - began < 30
    (tmp_path / "end").touch()
    assert workers.collective_rpc("stop_profile", timeout=60) == ["0", "1"]
    assert step(workers, 1).sampled_token_ids == {"r": [1]}


def test_an_error_of_one_rank_names_it_and_the_others_go_on(opened):
    workers = opened(2)
    with pytest.raises(ModelError, match="^no connector") as raised:
        workers.collective_rpc("start_parts", ("1 raise no connector",))
    assert re.match(r"In rank 1 \(pid \d+\):\n", raised.value.__notes__[-1])
    assert workers.collective_rpc("stop_profile") == ["0", "1"]


def test_a_call_that_all_ranks_refuse_leaves_them_in_step(opened, clock):
    workers = opened(2)
    future = begin(workers, 1, "* raise not this")
    with pytest.raises(ModelError, match="^not this"):
        future.result(60)
    assert step(workers, 2).sampled_token_ids == {"r": [2]}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_fails_a_step_fails_it_for_all_and_no_rank_waits_for_it(opened, rank):
    workers = opened(3)
    failures = []
    workers.on_failure(failures.append)
    others = [f"{other} meet" for other in range(3) if other != rank]
    began = time.monotonic()
    future = begin(workers, 1, f"{rank} raise broken", *others)
    with pytest.raises(ModelError, match="^broken") as raised:
        future.result(60)
    assert time.monotonic() - began < 30
    assert f"In rank {rank} (pid" in raised.value.__notes__[0]
    with pytest.raises(ModelError, match="^broken"):
        workers.collective_rpc("stop_profile")
    assert not failures  # the call has reported it
    began = time.monotonic()
    workers.close()
    assert time.monotonic() - began < 30  # the others were released


def test_the_error_of_the_rank_that_failed_comes_before_those_that_follow_from_it(opened, clock):
    workers = opened(2)
    first = begin(workers, 1, "0 follow rank 1 failed: broken")
    begin(workers, 2, "1 raise broken")  # when rank 0 was a call behind
    calls = workers._group._calls
    wait_until(lambda: {rank for call in list(calls.values()) for rank in call.failures} == {0, 1})
    clock.advance(1.0)
    with pytest.raises(ModelError, match="^broken") as raised:
        first.result(60)
    assert not any("CommunicationAborted" in note for note in raised.value.__notes__)


def test_a_rank_that_fails_what_the_output_rank_has_done_ends_the_executor(opened, tmp_path):
    workers = opened(2)
    failures = []
    workers.on_failure(failures.append)
    late = [f"1 late {tmp_path}/end too late"]
    assert step(workers, 1, sampling=late).sampled_token_ids == {"r": [1]}
    (tmp_path / "end").touch()
    wait_until(lambda: failures)
    assert str(failures[0]) == "too late"
    with pytest.raises(ModelError, match="too late"):
        step(workers, 2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["open", "load"])
def test_the_death_of_a_rank_that_starts_is_reported_by_start(rank, when):
    before = holdings()
    workers = executor(2, orders={when: [f"{rank} kill", f"{1 - rank} meet"]})
    if when == "open":
        workers = executor(2, orders={when: [f"{rank} kill"], "load": [f"{1 - rank} meet"]})
    began = time.monotonic()
    with pytest.raises(EngineDeadError) as raised:
        workers.start()
    print("reported within", time.monotonic() - began)
    message = str(raised.value)
    assert re.match(
        rf"the worker process of rank {rank} \(pid \d+\) was killed by signal 9", message
    )
    assert message.endswith("about to die\nof a signal")
    workers.close()
    nothing_left(before)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["idle", "step", "exit", "sampling"])
def test_the_death_of_a_rank_ends_everything_within_a_second(opened, rank, when):
    workers = opened(2)
    failures = []
    workers.on_failure(failures.append)
    step(workers, 1)
    other = f"{1 - rank} meet"
    began = time.monotonic()
    if when == "idle":
        meters = workers.collective_rpc("plugin_meters")[rank]
        os.kill(meters["process"].steps, signal.SIGKILL)
    else:
        last_step = plan(2, f"{rank} {'exit 3' if when == 'exit' else 'kill'}", other)
        if when == "sampling":
            last_step = plan(2, sampling=[f"{rank} kill", other])
        futures = [workers.execute_model(last_step), workers.sample_tokens(last_step)]
        with pytest.raises(EngineDeadError, match=f"of rank {rank} "):
            futures[1].result(60)
    wait_until(lambda: failures, 30)
    assert time.monotonic() - began < 30
    expected = "exited with code 3" if when == "exit" else "was killed by signal 9 (SIGKILL)"
    assert expected in str(failures[0])
    with pytest.raises(EngineDeadError, match=re.escape(expected)):
        workers.collective_rpc("stop_profile")
    began = time.monotonic()
    workers.close()
    assert time.monotonic() - began < 30
    assert len(failures) == 1


def test_a_death_before_the_callback_is_registered_is_reported_to_it(opened):
    workers = opened(2)
    with pytest.raises(EngineDeadError):
        workers.collective_rpc("start_parts", ("1 kill",))
    failures = []
    workers.on_failure(failures.append)
    assert "rank 1" in str(failures[0])


def test_a_rank_does_not_end_before_the_executor_has_seen_the_death_of_another(opened, monkeypatch):
    """The thread that watches the ranks is slow: it sees at once all that ended meanwhile."""
    real = select.poll()

    def poll(timeout):
        time.sleep(0.3)
        return real.poll(timeout)

    slow = SimpleNamespace(register=real.register, unregister=real.unregister, poll=poll)
    names = SimpleNamespace(poll=lambda: slow, POLLIN=select.POLLIN)
    monkeypatch.setattr(multiproc_group, "select", names)
    workers = opened(2)
    with pytest.raises(EngineDeadError, match=r"rank 1 \(pid \d+\) was killed by signal 9"):
        workers.collective_rpc("start_parts", ("1 kill",))


def test_ranks_that_a_call_leaves_out_of_step_are_lost(opened, monkeypatch):
    workers = opened(3)
    failures = []
    workers.on_failure(failures.append)
    with monkeypatch.context() as patch:
        scripted_clock(patch, "executors.multiproc_group")
        with pytest.raises(ModelError, match="^not this"):
            workers.collective_rpc("wake_up", (["* raise not this"],))
    assert workers.collective_rpc("stop_profile") == ["0", "1", "2"]  # they all refused it
    with pytest.raises(ModelError, match="^no room") as first:
        workers.collective_rpc("wake_up", (["1 raise no room", "0 meet", "2 sleep 0.4"],))
    first.value.add_note("of the first one")
    wait_until(lambda: failures, what="the loss to be reported")
    with pytest.raises(ModelError, match="^no room") as later:
        workers.collective_rpc("stop_profile")
    assert "of the first one" not in later.value.__notes__
    began = time.process_time()
    time.sleep(0.5)  # in which rank 2 answers
    assert time.process_time() - began < 0.3
    assert [str(failure) for failure in failures] == ["no room"]


def test_an_interrupt_while_a_call_is_sent_leaves_the_ranks_in_step(opened, monkeypatch):
    workers = opened(2)
    write = BroadcastRing.write

    def before(_ring, _data):
        raise KeyboardInterrupt

    def after(ring, data):
        write(ring, data)
        raise KeyboardInterrupt

    for number, interrupted in ((1, before), (3, after)):
        with monkeypatch.context() as patch:
            patch.setattr(BroadcastRing, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                workers.execute_model(plan(number))
        assert step(workers, number + 1).sampled_token_ids == {"r": [number + 1]}
    calls = "execute 2 execute 3 execute 4"
    assert workers.collective_rpc("stop_profile") == [f"{rank} {calls}" for rank in range(2)]


def test_a_fork_closes_without_the_locks_that_a_thread_had(monkeypatch):
    """As in the child of a fork, in which another thread would have had to release them."""
    made = []

    def lock():
        made.append(threading.Lock())
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(
            multiproc_group, "threading", SimpleNamespace(**{**vars(threading), "Lock": lock})
        )
        group = RankProcesses(executor(2).context, SocketSender(2))
        patch.setattr(os, "getpid", lambda: -1)
        for made_lock in made:
            made_lock.acquire()
        fork = threading.Thread(target=group.close, daemon=True)
        fork.start()
        fork.join(60)
        assert made
        assert not fork.is_alive()
    for made_lock in made:
        made_lock.release()
    group.close()


def test_streams_that_are_closed_are_no_descriptors_of_workers(tmp_path):
    script = tmp_path / "script.py"
    out = tmp_path / "out"
    script.write_text(
        "import os, sys\n"
        "for number in range(3):\n"
        "    os.close(number)\n"
        "sys.stdin = sys.stdout = sys.stderr = None\n"
        "from support.process.worker_that_obeys import executor, plan\n"
        "workers = executor(1)\n"
        "infos = workers.start()\n"
        f"open({str(out)!r}, 'w').write(str(len(infos)))\n"
        "workers.close()\n"
    )
    paths = os.pathsep.join(map(str, sys.path))
    program = forked_python().popen([str(script)], env=os.environ | {"PYTHONPATH": paths})
    program.wait(120)
    assert out.read_text() == "1"


def test_an_error_of_a_rank_at_load_is_of_its_class_and_no_rank_waits():
    before = holdings()
    workers = executor(2, orders={"load": ["1 raise weights are missing", "0 meet"]})
    with pytest.raises(ModelError, match="^weights are missing"):
        workers.start()
    workers.close()
    nothing_left(before)


def test_an_error_of_a_rank_that_opens_is_of_its_class():
    before = holdings()
    workers = executor(2, orders={"open": ["1 raise no such device"]})
    with pytest.raises(ModelError, match="^no such device") as raised:
        workers.start()
    assert re.match(r"In the worker process of rank 1 \(pid \d+\):\n", raised.value.__notes__[0])
    workers.close()
    nothing_left(before)


def test_a_rank_that_does_not_open_in_time_is_named(monkeypatch):
    monkeypatch.setattr(multiproc_group, "_GRACE_AFTER_FAILURE_S", 0.1)
    before = holdings()
    workers = executor(2, orders={"open": ["1 sleep 60"]}, start_seconds=0.5)
    with pytest.raises(EngineDeadError, match=r"rank 1 \(pid \d+\): not ready within 0.5 s \(par"):
        workers.start()
    workers.close()
    nothing_left(before)


def test_close_lets_workers_close_and_fails_what_is_under_way(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(multiproc_group, "_GRACE_S", 60.0)
    closed = tmp_path / "closed"
    workers = opened(2, orders={"closed": str(closed)})
    future = begin(workers, 1, "* meet")
    workers.close()
    with pytest.raises(EngineClosedError, match="execute_model: the executor was closed"):
        future.result(60)
    assert sorted(closed.read_text().split()) == ["0", "1"]
    with pytest.raises(EngineClosedError):
        workers.execute_model(plan(2))


@pytest.mark.nightly
def test_close_kills_a_worker_that_hangs(opened, tmp_path):
    workers = opened(2)
    workers.execute_model(plan(1, f"1 hang {tmp_path}/begun"))
    wait_until((tmp_path / "begun").exists)
    began = time.monotonic()
    workers.close()
    assert 4.5 < time.monotonic() - began < 30


def test_stderr_is_passed_on_and_stacks_of_a_long_call_are_written(opened, capfd):
    workers = opened(2, watchdog_seconds=0.2)
    numbers, received = itertools.count(1), ""

    def has_stack():
        nonlocal received
        step(workers, next(numbers), "1 sleep 0.3")
        workers.collective_rpc("stop_profile")
        received += capfd.readouterr().err
        return "in _sleep" in received

    wait_until(has_stack)
    assert "Timeout (0:00:00.2" in received


def test_an_executor_that_is_dropped_ends_its_processes():
    before = holdings()
    workers = executor(2)
    workers.start()
    del workers
    nothing_left(before)


def test_calls_of_several_threads_do_not_mix(opened):
    workers = opened(2)
    received = []

    def ask():
        for _ in range(20):
            received.append(workers.collective_rpc("stop_profile", timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert received == [["0", "1"]] * 80
