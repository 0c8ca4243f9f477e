"""Admission of engines by a head, and engines that misbehave, which the test plays."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import stat
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
from support.http_bytes import receive
from support.joining import HELLO, NO_PLUGINS, Head, free_address
from support.waiting import PATIENCE_S, wait_until

from hardpoint.calls.engines import EngineGroup
from hardpoint.errors import ConfigError, EngineClosedError, EngineDeadError, PluginLoadError
from hardpoint.host.system.encoding import Encoder
from hardpoint.plugins import EngineConfig, EngineCoreOutput, EngineCoreOutputs
from hardpoint.plugins.component.manifest import Manifest, PluginEntry
from hardpoint.plugins.config import ConfigSources
from hardpoint.plugins.config.engine import ParallelConfig, RayConfig
from hardpoint.plugins.config_tables import ExecutorConfig
from hardpoint.process.protocol import EngineCoreReadyResponse, RequestType
from hardpoint.replicas.remote import admission, listener
from hardpoint.replicas.remote.address import check_address, check_joining
from hardpoint.replicas.remote.comparison import check_manifest, hello_of, processor
from hardpoint.replicas.remote.joined_host import JoinedHost
from hardpoint.replicas.remote.joined_hosts import JoinedHosts
from hardpoint.replicas.remote.messages import (
    WINDOW,
    MessageKind,
    ProcessEnd,
    RemoteFailure,
    Window,
    encode,
)
from hardpoint.toolkit.curve_keys import client_keys, make_client, revoke_client

# Engines that tests play send no heartbeats.
PATIENT = {"heartbeat_seconds": 40.0}


@pytest.fixture(autouse=True)
def short_interval(monkeypatch):
    """Let heads send heartbeats often, and so notice the end of sessions soon."""
    monkeypatch.setattr(listener, "_INTERVAL_S", 0.1)


@pytest.fixture
def head():
    with Head(**PATIENT) as head:
        yield head


def packed(value):
    return msgspec.msgpack.encode(value)


def test_messages_go_both_ways(head):
    place, peer = head.host(), head.peer()
    peer.join()
    place.joined()
    assert (place.host.pid, place.host.label) == (4711, "joined engine process (pid 4711 on there)")
    ready = EngineCoreReadyResponse(manifest_hash="", max_model_len=9)
    peer.send(MessageKind.READY, *map(bytes, Encoder().encode(ready)))
    assert place.sockets.poll_ready(PATIENCE_S * 1000) == ready
    got = []
    place.sockets.read(got.append, got.append)
    place.sockets.send(RequestType.ABORT, ["a"])
    _kind, _session, *frames = peer.get(MessageKind.DATA)
    assert frames == [b"\x01", packed(["a"])]
    outputs = EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="r", new_token_ids=[7])])
    for _ in range(WINDOW):
        peer.send(MessageKind.DATA, *map(bytes, Encoder().encode(outputs)))
    wait_until(lambda: len(got) == WINDOW, PATIENCE_S, "the outputs")
    assert got[0].outputs[0].new_token_ids == [7]
    kind, _session, count = peer.get(MessageKind.BEAT)
    while kind == MessageKind.BEAT and msgspec.msgpack.decode(count) < WINDOW - 16:
        kind, _session, count = peer.get(MessageKind.BEAT)
    peer.send(
        MessageKind.ENDED,
        encode(ProcessEnd(description="was ended", was_killed=True, activity=b"")),
    )
    assert "activity" in place.failure()  # its record is malformed


SIZES = {"max_model_len": 100, "kv_cache": {"num_blocks": 50}}


@pytest.mark.parametrize(
    ("config", "field", "most"),
    [
        (SIZES, "max_model_len", 100),
        (SIZES, "num_gpu_blocks", 50),
        ({}, "max_model_len", 2**31 - 1),
        ({"max_model_len": "auto", "kv_cache": {"num_blocks": None}}, "num_gpu_blocks", 2**31 - 1),
    ],
)
@pytest.mark.parametrize("more", [0, 1])
def test_sizes_that_the_configuration_does_not_allow_end_an_engine(head, config, field, most, more):
    """Other engines get the sizes of the first one."""
    place, peer = head.host(config=config), head.peer()
    peer.join()
    place.joined()
    sizes = {"max_model_len": 9, "num_gpu_blocks": 9} | {field: most + more}
    ready = EngineCoreReadyResponse(manifest_hash="", **sizes)
    peer.send(MessageKind.READY, *map(bytes, Encoder().encode(ready)))
    if more:
        assert f"{field}: expected at most {most}, got {most + 1}" in place.failure()
    else:
        assert place.sockets.poll_ready(PATIENCE_S * 1000) == ready


def test_a_first_message_that_is_malformed_ends_an_engine(head):
    place, peer = head.host(), head.peer()
    peer.join()
    place.joined()
    peer.send(MessageKind.READY, b"\xc1")
    assert "sent a malformed message" in place.failure()


def test_what_differs_is_named_with_both_sides(head):
    head.host()
    peer = head.peer()
    for field, value, words in (
        ("hardpoint", "2.0", "version of hardpoint: the head here has 1.0, the engine on th"),
        ("torch", "2.1", "version of torch: the head here has 2.0, the engine on there 2.1"),
        ("wire", 5, "wire protocol: the head here has 4, the engine on there 5"),
        ("protocol", 9, "join protocol: the head has version 3, the engine 9"),
        ("contracts", {"models": 2}, "contract of models: the head here has version 1, the eng"),
        ("contracts", {"models": 1, "ops": 1}, "contract of ops: the head here has version None"),
        ("fingerprint", "e" * 64, "model: the head here has 'm' with the fingerprint ffffffffffff, "
         "the engine on there has 'm' with eeeeeeeeeeee"),
        ("rank", 7, "rank: expected one of 0, 1, which join the head here, got 7"),
    ):  # fmt: skip
        refusal = peer.hello(**{field: value})
        assert refusal.reason.startswith(words)
        assert refusal.retry_seconds == 0
    wait_until(lambda: peer.hello() is None, PATIENCE_S, "the place")


def test_engines_that_go_on_with_requests_of_others_have_processors_of_one_kind(head):
    """The kind of the first engine; a head without engines of its own may have another."""
    first, place = head.host(0), head.host(1)
    head.peer().join(rank=0, processor="x86_64 avx512f")
    first.joined()
    peer, refusals = head.peer(), []

    def is_offered():
        refusals.append(peer.hello(rank=1, processor="x86_64 avx2"))
        return "no rank waits" not in refusals[-1].reason

    wait_until(is_offered, PATIENCE_S, "the place")
    refusal = refusals[-1]
    assert refusal.reason.startswith(
        "processor: the engines of the head here have 'x86_64 avx512f', there has 'x86_64 avx2', "
        'so a request could not go on there with the same tokens (engine.resume = "exact")'
    )
    head.peer().join(rank=1, processor="x86_64 avx512f")
    place.joined()


READY = EngineCoreReadyResponse(manifest_hash="", max_model_len=9)


@pytest.mark.parametrize(
    ("messages", "is_decided"),
    [
        ([(MessageKind.DECLINED, packed("a plugin is not enabled"))], False),
        ([(MessageKind.STARTED, packed(1)), (MessageKind.ENDED, b"no weights")], False),
        ([(MessageKind.STARTED, packed(1)), (MessageKind.READY, *Encoder().encode(READY))], True),
    ],
    ids=["declines", "fails", "serves"],
)
def test_an_engine_that_serves_decides_on_the_processor(head, messages, is_decided):
    """While one is about to serve, engines with another processor wait."""
    head.host(0)
    other = head.host(1)
    peer, late, refusals = head.peer(), head.peer(), []
    wait_until(lambda: peer.hello(rank=0, processor="a") is None, PATIENCE_S, "the place")

    def is_refused(retry_seconds):
        refusals.append(late.hello(rank=1, processor="b"))
        words, seconds = refusals[-1].reason, refusals[-1].retry_seconds
        return words.startswith("processor: ") and seconds == retry_seconds

    wait_until(lambda: is_refused(math.inf), PATIENCE_S, "the refusal")
    for kind, *frames in messages:
        peer.send(kind, *map(bytes, frames))
    if is_decided:
        wait_until(lambda: is_refused(0.0), PATIENCE_S, "the refusal")
    else:
        late.join(rank=1, processor="b")
        other.joined()


def test_a_processor_is_known_by_what_kernels_differ_in(tmp_path):
    (tmp_path / "cpuinfo").write_text(
        "processor : 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 fma sse avx512f\n\n"
    )
    card = tmp_path / "driver" / "nvidia" / "gpus" / "0000"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t NVIDIA H100\nIRQ: 1\n")
    description = processor(tmp_path)
    assert description.endswith(" AuthenticAMD avx2 avx512f fma NVIDIA H100")
    assert processor(tmp_path / "none") == description.partition(" ")[0]


def test_a_rank_has_one_owner(head):
    place = head.host(1)
    owner, other = head.peer(), head.peer()
    owner.join(rank=1, host="first")
    place.joined()
    refusal = other.hello(rank=1)
    assert refusal.reason == "rank 1 is taken by first"
    assert 0 < refusal.retry_seconds < 60
    refusal = other.hello()
    assert refusal.reason == "no rank waits for an engine; taken: 1 by first"
    assert refusal.retry_seconds > 1e9
    assert place.host.failure() is None


def test_an_engine_that_joins_again_ends_what_it_had(head):
    place, peer = head.host(), head.peer()
    peer.join()
    place.joined()
    again, other = head.peer(), head.host()
    again.join(former=peer.session)
    other.joined()
    assert place.failure().endswith("has lost its connection, and joins again")
    assert place.host.was_killed


def test_wrong_joins_are_cheap_and_logged_once(head, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "hardpoint")
    monkeypatch.setattr(admission, "_LOG_INTERVAL_S", 3600.0)
    place, peer = head.host(), head.peer()
    peer.join()
    place.joined()
    wrong = head.peer()
    began = time.monotonic()
    for index in range(1000):
        frames = [MessageKind.HELLO, b"", b"\xc1 no hello"] if index % 2 else [b"?", b"", b"x"]
        wrong.socket.send_multipart(frames)
    wrong.hello(torch="9")  # behind them all
    assert time.monotonic() - began < PATIENCE_S
    assert place.host.failure() is None
    wait_until(lambda: "refused attempts" in caplog.text, PATIENCE_S, "the log")
    assert caplog.text.count("refused attempts to join") == 1
    other, late = head.host(1), head.peer()
    late.join()
    other.joined()


def test_half_open_joins_give_their_place_back(head, monkeypatch):
    place, silent = head.host(), head.peer()
    wait_until(lambda: silent.hello() is None, PATIENCE_S, "the place")  # and no more
    peer = head.peer()
    assert peer.hello() is not None
    with monkeypatch.context() as patch:
        patch.setattr(listener, "_START_S", 0.0)
        assert silent.get(MessageKind.GONE)[1] == silent.session
    wait_until(lambda: peer.hello() is None, PATIENCE_S, "the place")
    peer.send(MessageKind.STARTED, packed(1))
    place.joined()
    silent.send(MessageKind.STARTED, packed(2))
    assert place.host.pid == 1


def test_silent_connections_take_no_place(head):
    host, _, port = head.address.removeprefix("tcp://").rpartition(":")
    mute = [socket.create_connection((host, int(port))) for _ in range(50)]
    mute[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    place, peer = head.host(), head.peer()
    peer.join()
    place.joined()
    for connection in mute:
        connection.close()


def test_an_engine_that_declines_leaves_its_place(head, caplog):
    place, peer = head.host(), head.peer()
    wait_until(lambda: peer.hello() is None, PATIENCE_S, "the place")
    peer.send(MessageKind.DECLINED, packed("plugin 'x' is not enabled"))
    other = head.peer()
    wait_until(lambda: other.hello() is None, PATIENCE_S, "the place")
    other.send(MessageKind.STARTED, packed(1))
    place.joined()
    assert "an engine on there does not join: plugin 'x' is not enabled" in caplog.text


@pytest.mark.parametrize(
    "frames",
    [
        [b"?", b"x"],
        [MessageKind.STARTED, b"\x01"],
        [MessageKind.BEAT, b"\x05", b""],
        [MessageKind.BEAT, b"\x00", b"no activity"],
        [MessageKind.ENDED, b"garbage"],
        [MessageKind.DATA],
    ],
)
def test_garbage_ends_its_engine_alone(head, frames):
    place, other = head.host(0), head.host(1)
    peer, good = head.peer(), head.peer()
    peer.join(rank=0)
    place.joined()
    good.join(rank=1)
    other.joined()
    peer.send(*frames)
    words = "the joined engine process (pid 4711 on there) sent a malformed message"
    assert place.failure().startswith(words)
    assert peer.get(MessageKind.GONE)[1] == peer.session
    good.send(MessageKind.BEAT, b"\x00", b"")
    assert good.get(MessageKind.BEAT)
    assert other.host.failure() is None


def test_messages_of_a_session_that_is_over_are_dropped(head):
    place, peer = head.host(), head.peer()
    peer.join()
    place.joined()
    session, peer.session = peer.session, b"x" * 16
    peer.send(MessageKind.BEAT, b"\x00", b"")
    place.failure()
    peer.session = session
    peer.send(MessageKind.DATA, b"late")
    assert peer.get(MessageKind.GONE)
    assert peer.get(MessageKind.GONE)[1] == session
    assert not place.has_output()


def test_an_engine_that_is_silent_is_dead(monkeypatch):
    with Head(**PATIENT) as head:
        place, peer = head.host(), head.peer()
        peer.join()
        place.joined()
        monkeypatch.setattr(head.listener, "_limit_s", 0.5)
        words = "sent nothing for 0.5 s (parallel.heartbeat_seconds)"
        assert place.failure().endswith(words)
        assert place.host.was_killed


def test_a_cut_connection_is_noticed_before_the_time_is_up():
    with Head(heartbeat_seconds=600) as head:
        place, peer = head.host(), head.peer()
        peer.join()
        place.joined()
        peer.close()
        assert place.failure().endswith("has lost its connection")


def test_reports_and_activity_are_those_of_the_engine(head):
    place, peer = head.host(), head.peer()
    peer.join()
    place.joined()
    report = {"kind": "ModelError", "message": "no weights", "notes": ["a traceback"]}
    peer.send(MessageKind.REPORT, packed(list(report.values())))
    assert place.failure() == "no weights"
    assert type(place.host.failure()).__name__ == "ModelError"
    assert place.host.failure().__notes__ == ["a traceback"]
    assert place.host.reported
    place.host.kill()
    assert peer.get(MessageKind.KILL)


def test_reports_without_end_stop_no_other_engine(head):
    """Each one wrote a byte for the client to read, until the listener waited for room."""
    place, other = head.host(0), head.host(1)
    peer, good = head.peer(), head.peer()
    peer.join(rank=0)
    place.joined()
    for _ in range(2000):
        peer.send(MessageKind.REPORT, packed(["ModelError", "no weights", []]))
    good.join(rank=1)
    other.joined()
    assert place.failure() == "no weights"
    assert peer.get(MessageKind.GONE)[1] == peer.session


def test_notices_that_are_not_read_do_not_block():
    host = JoinedHost(lambda *_: None, 0, "tcp://a:1", 1.0)
    for _ in range(2000):
        host.failed(RemoteFailure(kind="ModelError", message="x", notes=[]))
    assert str(host.failure()) == "x"
    host.release()


def test_texts_of_an_engine_are_one_line_of_the_log(head, caplog):
    caplog.set_level(logging.INFO, "hardpoint")
    place, peer = head.host(), head.peer()
    wait_until(lambda: peer.hello(host="a\nb" + "h" * 1000) is None, PATIENCE_S, "the place")
    peer.send(MessageKind.DECLINED, packed("no\nINFO forged \x1b[31m"))
    other = head.peer()
    wait_until(lambda: other.hello(host="a\nb") is None, PATIENCE_S, "the place")
    other.send(MessageKind.STARTED, packed(1))
    place.joined()
    assert "\\x1b[31m" in caplog.text
    other.send(MessageKind.REPORT, packed(["ModelError", "no\nweights" + "x" * 5000, ["n\n\x1b"]]))
    failure = place.failure()
    assert failure.startswith("no\\nweights")
    assert len(failure) < 2100
    assert place.host.failure().__notes__ == ["n\n\\x1b"]
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert len(record.getMessage()) < 2200


def zmtp(frames, *, more):
    """Return frames of ZMTP; the last one may promise another one."""
    data = b""
    for index, frame in enumerate(frames):
        flags = int(more or index + 1 < len(frames)) | 2
        data += bytes([flags]) + len(frame).to_bytes(8, "big") + frame
    return data


def zmtp_connection(head):
    """Return a TCP connection that has done the handshake of a DEALER without keys."""
    host, _, port = head.address.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(PATIENCE_S)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\0" + b"NULL".ljust(52, b"\0"))
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    connection.sendall(bytes([4, len(ready)]) + ready)
    received = b""
    while b"READY" not in received:  # the head takes no message before it has sent this
        received += receive(connection)
    return connection


def send_often(connection, frames):
    for _ in range(200):
        connection.sendall(frames)
        threading.Event().wait(0.01)


@pytest.mark.parametrize("size", [0, 1 << 16])
def test_a_message_without_an_end_is_cut(head, size, monkeypatch, caplog):
    """libzmq keeps its frames, each of 64 bytes at least, until the last one comes."""
    monkeypatch.setattr(admission, "_LOG_INTERVAL_S", 0.0)
    connection = zmtp_connection(head)
    frames = zmtp([bytes(size)], more=True) * max((1 << 20) // (size + 9), 1)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):  # else it ends with 200 MiB
        send_often(connection, frames)
    connection.close()
    wait_until(lambda: "a message without an end" in caplog.text, PATIENCE_S, "the log")
    place, peer = head.host(), head.peer()
    peer.join()
    place.joined()


def test_whole_messages_without_end_are_not_cut(head):
    connection = zmtp_connection(head)
    for _ in range(20):
        connection.sendall(zmtp([b"?", b"", bytes(1 << 20)], more=False))
    place, peer = head.host(), head.peer()
    peer.join()
    place.joined()
    connection.close()


def test_waiting_has_a_limit_and_an_end(head):
    place = head.host(0, limit_s=0.2)
    place.returned()
    assert isinstance(place.error, EngineDeadError)
    assert str(place.error) == (
        f"no engine has joined at {head.address} within 0.2 s (parallel.join_seconds)"
    )
    place = head.host(1)
    place.close()
    assert isinstance(place.error, EngineClosedError)


def test_an_address_has_one_owner(head):
    config = ParallelConfig(data=1, local=0, join_address=head.address)
    with pytest.raises(ConfigError) as refused:
        listener.JoinListener(config, None, None)
    assert str(refused.value) == (
        f"parallel.join_address: {head.address} cannot be used: Address already in use"
    )


# Keys


def test_keys_decide_who_may_join(tmp_path, caplog):
    keys = tmp_path / "keys"
    for name in ("alpha", "beta"):
        make_client(str(keys), name)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in keys.rglob("*.key*") if file.is_file()}
    assert modes == {0o600}
    alpha, beta = (client_keys(str(keys / name), "--keys") for name in ("alpha", "beta"))
    revoke_client(str(keys), "beta")
    with Head(keys=keys, **PATIENT) as head:
        place, peer = head.host(), head.peer(alpha)
        peer.join()
        place.joined()
        assert place.host.label == "joined engine process (pid 4711 on there, key alpha)"
        other, late = head.host(1), head.peer(beta)
        late.socket.send_multipart([MessageKind.HELLO, b"", encode(HELLO)])
        wait_until(lambda: "refused attempts" in caplog.text, PATIENCE_S, "the refusal")
        assert "the last one: a key that is not among the keys that may join" in caplog.text
        plain = head.peer()
        plain.socket.send_multipart([MessageKind.HELLO, b"", encode(HELLO)])
        new = client_keys(str(make_client(str(keys), "gamma")), "--keys")
        added = head.peer(new)
        added.join()
        other.joined()
        revoke_client(str(keys), "alpha")
        assert place.failure().endswith("had the key alpha, which was revoked")
        assert other.host.failure() is None
        assert (late.socket.poll(0), plain.socket.poll(0)) == (0, 0)


@pytest.mark.parametrize("has_joined", [True, False])
def test_a_key_that_is_revoked_does_not_join_by_an_open_connection(
    tmp_path, caplog, monkeypatch, has_joined
):
    monkeypatch.setattr(admission, "_LOG_INTERVAL_S", 0.0)
    keys = tmp_path / "keys"
    alpha = client_keys(str(make_client(str(keys), "alpha")), "--keys")
    with Head(keys=keys, **PATIENT) as head:
        peer = head.peer(alpha)
        if has_joined:
            place = head.host(0)
            peer.join()
            place.joined()
        else:
            assert peer.hello().reason.startswith("no rank waits")
        revoke_client(str(keys), "alpha")
        assert not has_joined or peer.get(MessageKind.GONE)
        other = head.host(1)
        peer.socket.send_multipart([MessageKind.HELLO, b"", encode(HELLO)])
        # The connection is cut, and a new one refused.
        words = "the last one: a key that is not among the keys that may join"
        wait_until(lambda: words in caplog.text, PATIENCE_S, "the refusal")
        assert peer.get(*MessageKind, seconds=0) is None
        assert not other.host.pid


def test_what_is_wrong_with_keys_is_named(tmp_path):
    folder = str(tmp_path)
    with pytest.raises(ConfigError, match=r"No such file.*; `hardpoint keys new` makes keys"):
        client_keys(folder, "--keys")
    client = make_client(folder, "alpha")
    with pytest.raises(ConfigError, match="alpha: expected a name without keys"):
        make_client(folder, "alpha")
    with pytest.raises(ConfigError, match="name: expected letters, digits"):
        make_client(folder, "../alpha")
    with pytest.raises(ConfigError, match=r"beta: expected the name of a client \(alpha\)"):
        revoke_client(folder, "beta")
    secret = client / "client.key_secret"
    secret.chmod(0o644)
    words = r"--keys: .*: expected a file that its owner alone can read \(0600\), got 0644"
    with pytest.raises(ConfigError, match=words):
        client_keys(str(client), "--keys")
    secret.chmod(0o600)
    secret.write_text("nothing")
    with pytest.raises(ConfigError, match="--keys: .*: expected a file of keys"):
        client_keys(str(client), "--keys")


# Settings


def test_an_address_off_the_machine_needs_keys():
    for address in ("tcp://127.0.0.1:80", "tcp://localhost:80", "tcp://[::1]:80"):
        assert check_address(address, "--join", has_keys=False) == address
    for address in ("tcp://10.0.0.1:80", "tcp://*:80", "tcp://node-1:80"):
        assert check_address(address, "--join", has_keys=True) == address
        words = f"--join: {address} can be reached from other machines, which needs keys"
        with pytest.raises(ConfigError) as refused:
            check_address(address, "--join", has_keys=False)
        assert str(refused.value).startswith(words)
    for address in ("node:80", "tcp://node", "tcp://node:99999", "ipc://x"):
        with pytest.raises(ConfigError, match="--join: expected tcp://HOST:PORT, got"):
            check_address(address, "--join", has_keys=True)


def test_settings_that_do_not_fit_each_other():
    sources = ConfigSources({"parallel": "file x"})
    for fields, words in (
        ({"data": 2, "local": 3}, "parallel.local: expected at most the 2 engines of parallel.dat"),
        ({"data": 2, "local": 1}, "parallel.local: 1 of 2 engines are not local, and there is no "),
        ({"data": 2, "join_address": "tcp://a:1"}, "parallel.join_address: tcp://a:1 can be reach"),
        (
            {"ray": RayConfig(), "keys": "k"},
            "parallel.keys: expected none with parallel.ray: its",
        ),
        ({"ray": RayConfig(), "local": 1}, "parallel.local: expected fewer than the 1 engines of "),
        ({"ray": RayConfig(), "join_address": "a"}, "parallel.join_address: expected tcp://HOST:"),
    ):
        with pytest.raises(ConfigError) as refused:
            check_joining(EngineConfig(parallel=ParallelConfig(**fields)), sources)
        assert str(refused.value).startswith(words)
    joining = ParallelConfig(data=2, local=0, join_address=free_address())
    check_joining(EngineConfig(parallel=joining), sources)
    on_ray = ParallelConfig(ray=RayConfig(), join_address="tcp://10.0.0.1:7")
    check_joining(EngineConfig(parallel=on_ray), sources)
    with pytest.raises(ConfigError, match=r"^executor.use: expected another one than 'ray' with"):
        check_joining(EngineConfig(parallel=on_ray, executor=ExecutorConfig(use="ray")), sources)


def entry(name="a", **fields):
    defaults = {"kind": "samplers", "value": f"acme:{name}", "distribution": "acme", "version": "1"}
    return PluginEntry(name=name, **(defaults | fields))


def test_plugins_must_be_enabled_there():
    manifest = Manifest(hardpoint="1", entries=(entry("a"), entry("b", options={"x": 1})))
    fewer = Manifest(hardpoint="1", entries=(entry("b", options={"x": 1}, origin="other"),))
    check_manifest(fewer, manifest, "tcp://h:1")
    check_manifest(NO_PLUGINS, manifest, "tcp://h:1")
    frontend = entry("c", kind="balancers")
    check_manifest(Manifest(hardpoint="1", entries=(frontend,)), manifest, "tcp://h:1")
    for wrong, words in (
        (entry("c"), "the head tcp://h:1 has it enabled, the configuration on "),
        (entry("a", value="evil:a"), "the head tcp://h:1 has it enabled, the configuration on "),
        (entry("a", version="2"), "version: the head tcp://h:1 has 2, here on "),
        (entry("b", options={"y": 1}), "options: the head tcp://h:1 has others, of y, here on "),
    ):
        with pytest.raises(PluginLoadError) as refused:
            check_manifest(Manifest(hardpoint="1", entries=(wrong,)), manifest, "tcp://h:1")
        assert words in str(refused.value)


def test_a_fingerprint_is_that_of_the_files(tmp_path, scripted):
    from hardpoint.plugins import EngineConfig

    def of(path):
        return hello_of(EngineConfig(model=str(path))).fingerprint

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in scripted.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        (tmp_path / name / "model.safetensors").write_bytes(bytes(3 << 20))
    assert of(tmp_path / "one") == of(tmp_path / "two")
    with (tmp_path / "two" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert of(tmp_path / "one") != of(tmp_path / "two")


def test_a_window_bounds_what_is_under_way():
    window = Window()
    window.sent = WINDOW
    assert window.is_full
    assert window.acknowledge(1)
    assert not window.is_full
    assert not window.acknowledge(WINDOW + 1)
    assert all(window.receive() for _ in range(2 * WINDOW))
    assert not window.receive()


class Local:
    """Runs no engine of this machine."""

    def close(self):
        """Nothing."""


class JoinedClient:
    def __init__(self, hosts):
        self.join_address = hosts.join_address


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_that_the_system_chooses_is_named(scripted, tmp_path, caplog, host):
    """The log, the list of engines and the file of scripts have it, not 0."""
    caplog.set_level(logging.INFO, logger="hardpoint")
    file = tmp_path / "address"
    parallel = ParallelConfig(
        data=1, local=0, join_address=f"tcp://{host}:0", join_address_file=str(file)
    )
    with contextlib.closing(
        JoinedHosts(EngineConfig(model=str(scripted), parallel=parallel), Local())
    ) as hosts:
        name, _, port = hosts.join_address.removeprefix("tcp://").rpartition(":")
        assert int(port) > 0
        assert file.read_text() == f"{hosts.join_address}\n"
        engine = SimpleNamespace(parts=SimpleNamespace(client=JoinedClient(hosts)))
        assert EngineGroup(engine).join_address == hosts.join_address
        assert f"engines may join at {hosts.join_address}" in caplog.text
        assert f"{host}:0" not in caplog.text
        with socket.create_connection((name, int(port)), timeout=PATIENCE_S):
            pass
    assert not file.exists()  # nobody may join any more


def test_a_file_that_cannot_be_written_is_named(scripted, tmp_path):
    parallel = ParallelConfig(
        data=1,
        local=0,
        join_address="tcp://127.0.0.1:0",
        join_address_file=str(tmp_path / "absent" / "address"),
    )
    config = EngineConfig(model=str(scripted), parallel=parallel)
    with pytest.raises(ConfigError, match="parallel.join_address_file: expected a file that can"):
        JoinedHosts(config, Local())
