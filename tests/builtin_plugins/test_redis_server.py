"""The KV store "redis" with a real server, and failures of servers."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from redis.exceptions import RedisError
from support.kv_stores import SIZES, block_of, found, keep, key_of, loaded, open_store
from support.redis_servers import RedisServer, seconds_of
from support.waiting import wait_until

from hardpoint import LLM, SamplingParams
from hardpoint.builtin_plugins.kv_stores.redis import RedisStore
from hardpoint.testing import scripted_config

pytestmark = pytest.mark.nightly

LARGE = (128, *[65_536] * 32)
SECRET = "pa55-word"


@pytest.fixture
def start(tmp_path):
    """Starts servers, and ends them."""
    servers = []

    def start(*settings: str) -> RedisServer:
        folder = tmp_path / str(len(servers))
        folder.mkdir()
        servers.append(RedisServer(folder, *settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def opened():
    stores = []

    def opened(url, *, faults=None, sizes=SIZES, **options) -> RedisStore:
        context = {} if faults is None else {"report_fault": faults.append}
        stores.append(open_store(RedisStore, sizes=sizes, context=context, url=url, **options))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


@pytest.mark.parametrize("sizes", [SIZES, LARGE], ids=["small", "large"])
def test_engines_share_blocks(start, opened, sizes):
    server = start()
    first, other = opened(server.url, sizes=sizes), opened(server.url, sizes=sizes)
    for number in range(20):
        assert first.store(key_of(number), block_of(number, sizes)) is True
    assert found(other, *range(25)) == [True] * 20 + [False] * 5
    assert all(loaded(other, number, sizes) for number in range(20))
    assert not loaded(other, 20, sizes)


def test_threads_get_whole_blocks_of_their_keys(start, opened):
    store = opened(start().url, sizes=LARGE)
    blocks = {number: block_of(number, LARGE) for number in range(8)}
    until = time.monotonic() + 2.0
    loads, errors = [], []

    def use(seed: int) -> None:
        choose = random.Random(seed)
        try:
            while time.monotonic() < until:
                number = choose.randrange(8)
                match choose.randrange(3):
                    case 0:
                        store.store(key_of(number), blocks[number])
                    case 1:
                        found(store, *range(8))
                    case _:
                        loads.append(loaded(store, number, LARGE))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert loads.count(True) > 50


def test_databases_are_apart(start, opened, free_port):
    port = free_port()
    start("--port", str(port), "--bind", "127.0.0.1")
    keep(opened(f"redis://127.0.0.1:{port}/3"), 1)
    assert found(opened(f"redis://127.0.0.1:{port}/3"), 1) == [True]
    assert found(opened(f"redis://127.0.0.1:{port}"), 1) == [False]


def test_blocks_expire(start, opened):
    store = opened(start().url, ttl_seconds=3.0)
    keep(store, 1)
    assert loaded(store, 1)
    wait_until(lambda: found(store, 1) == [False])
    assert not loaded(store, 1)


def test_a_server_that_is_killed_is_used_again_once_it_is_back(start, opened):
    server = start()
    store = opened(server.url)
    keep(store, 1)
    for _ in range(3):
        server.stop()
        assert seconds_of(lambda: _fails(store)) < 30
        server.start()
        assert not loaded(store, 1), "this server keeps nothing on disk"
        keep(store, 1)
        assert loaded(store, 1)


def _fails(store) -> None:
    with pytest.raises(RedisError, match="Error .* connecting to|Connection closed"):
        loaded(store, 1)


def test_a_server_that_stands_still_costs_the_time_limit(start, opened):
    server = start()
    store = opened(server.url, timeout_seconds=0.3, connect_timeout_seconds=0.3)
    keep(store, 1)
    server.signal(signal.SIGSTOP)
    try:
        for call in (lambda: loaded(store, 1), lambda: found(store, 1), lambda: keep(store, 2)):
            began = time.monotonic()
            with pytest.raises(
                RedisError, match=r"no answer in 0\.3 s, or no connection in 0\.3 s"
            ):
                call()
            assert time.monotonic() - began < 30
    finally:
        server.signal(signal.SIGCONT)
    assert loaded(store, 1)
    assert found(store, 1, 3) == [True, False]


def test_a_server_that_pauses_its_clients_costs_the_time_limit(start, opened):
    server = start()
    store = opened(server.url, timeout_seconds=0.3)
    keep(store, 1)
    assert server.call(b"CLIENT", b"PAUSE", b"1000", b"ALL").startswith(b"+OK")
    with pytest.raises(RedisError, match=r"no answer in 0\.3 s"):
        loaded(store, 1)
    time.sleep(1.0)
    assert loaded(store, 1)


def test_clients_that_the_server_drops_connect_again(start, opened):
    server = start()
    faults = []
    store = opened(server.url, faults=faults)
    keep(store, 1)
    server.call(b"CLIENT", b"KILL", b"TYPE", b"normal")
    assert loaded(store, 1)
    assert not faults


def test_a_full_server_keeps_what_it_has(start, opened):
    server = start("--maxmemory", "20mb", "--maxmemory-policy", "noeviction")
    faults = []
    store = opened(server.url, faults=faults, sizes=LARGE)
    results = [store.store(key_of(n), block_of(n, LARGE)) for n in range(12)]
    count = results.index(False)
    assert 3 <= count <= 9
    assert not any(results[count:])
    assert all(loaded(store, number, LARGE) for number in range(count))
    assert len(faults) == 1
    assert "blocks are not stored for now: the server answered: command not allowed" in faults[0]
    server.call(b"FLUSHALL")
    assert store.store(key_of(1), block_of(1, LARGE)) is True


def test_a_full_server_may_drop_what_was_not_used_for_longest(start, opened):
    server = start("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru")
    store = opened(server.url, sizes=LARGE)
    assert all(store.store(key_of(n), block_of(n, LARGE)) for n in range(20))
    assert loaded(store, 19, LARGE)
    assert 3 <= found(store, *range(20)).count(True) <= 10


def test_values_of_others_under_the_same_keys_are_not_loaded(start, opened):
    server = start()
    store = opened(server.url)
    name = b"hardpoint:" + key_of(1).hex().encode()
    server.call(b"RPUSH", name, b"value")
    assert found(store, 1) == [False]
    with pytest.raises(RedisError, match="WRONGTYPE"):
        loaded(store, 1)
    server.call(b"DEL", name)
    server.call(b"SET", name, b"short")
    assert found(store, 1) == [False]
    assert not loaded(store, 1)
    keep(store, 1)
    assert loaded(store, 1)


def test_users_have_passwords_and_rights(start, opened, tmp_path):
    server = start(
        "--requirepass", "admin", "--user", *f"engine on >{SECRET} ~hardpoint:* +@all".split()
    )
    password = tmp_path / "password"
    password.write_text(SECRET + "\n")
    password.chmod(0o600)
    store = opened(server.url, username="engine", password_file=str(password))
    keep(store, 1)
    assert loaded(store, 1)
    faults = []
    wrong = opened(server.url, faults=faults)
    assert "Authentication required" in faults[0]
    with pytest.raises(RedisError, match="Authentication required"):
        loaded(wrong, 1)
    elsewhere = {"username": "engine", "password_file": str(password), "prefix": "other:"}
    other = opened(server.url, faults=faults, **elsewhere)
    assert other.store(key_of(1), block_of(1)) is False
    assert "blocks are not stored for now: the server answered: " in faults[-1]
    assert "no permissions" in faults[-1].lower()
    assert SECRET not in "".join(faults)


def test_a_user_who_may_only_read_reads(start, opened, monkeypatch):
    rights = "+get +strlen +ping +select"
    server = start("--user", *f"reader on >{SECRET} ~hardpoint:* {rights}".split())
    monkeypatch.setenv("CACHE_PASSWORD", SECRET)
    keep(opened(server.url), 1)
    reader = opened(server.url, username="reader", password_env="CACHE_PASSWORD")
    assert found(reader, 1, 2) == [True, False]
    assert loaded(reader, 1)
    assert reader.store(key_of(2), block_of(2)) is False


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    """A certificate that signs itself, for 127.0.0.1, and its key."""
    files = folder / f"{name}.pem", folder / f"{name}.key"
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-out", str(files[0]), "-keyout", str(files[1])),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return str(files[0]), str(files[1])


def test_tls_verifies_the_server_and_the_client(start, opened, tmp_path, free_port):
    certificate, key = make_certificate(tmp_path, "server")
    client, client_key = make_certificate(tmp_path, "client")
    port = free_port()
    start(
        *("--tls-port", str(port), "--bind", "127.0.0.1", "--tls-auth-clients", "yes"),
        *("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", client),
    )
    url = f"rediss://127.0.0.1:{port}/0"
    keys = {"ssl_certfile": client, "ssl_keyfile": client_key}
    store = opened(url, ssl_ca_certs=certificate, sizes=LARGE, **keys)
    for number in range(8):
        assert store.store(key_of(number), block_of(number, LARGE)) is True
    assert all(loaded(store, number, LARGE) for number in range(8))
    assert found(store, *range(300)) == [True] * 8 + [False] * 292

    faults = []
    opened(url, faults=faults, **keys)
    assert "certificate verify failed" in faults[-1].lower().replace("_", " ")
    opened(url, faults=faults, ssl_ca_certs=certificate)
    assert len(faults) == 2, "a client without a certificate is refused"
    opened(url, faults=faults, ssl_ca_certs=client, **keys)
    assert "certificate verify failed" in faults[-1].lower().replace("_", " ")
    opened(f"redis://127.0.0.1:{port}", faults=faults)
    assert len(faults) == 4, "a connection without TLS is refused"


def config_of(scripted, server, *, tensor=1, **options):
    return scripted_config(scripted) | {
        "parallel": {"tensor": tensor},
        "executor": {"use": "multiproc" if tensor > 1 else "uniproc"},
        "kv_connector": {"stores": ["redis"]},
        "kv_cache": {"num_blocks": 64},
        "plugin": {"redis": {"url": server.url} | options},
    }


@pytest.mark.parametrize("tensor", [1, 2])
def test_engines_one_after_another_have_the_same_tokens(start, scripted, tensor):
    server = start()
    params = SamplingParams(max_tokens=8, temperature=0)
    prompts = [f"say abc {number} " * 12 for number in range(4)]
    results = []
    for _ in range(2):
        with LLM(str(scripted), config=config_of(scripted, server, tensor=tensor)) as llm:
            outputs = llm.generate(prompts, params)
            results.append([output.outputs[0].token_ids for output in outputs])
            cached = [output.num_cached_tokens for output in outputs]
    assert results[0] == results[1]
    assert min(cached) >= 16


@contextlib.contextmanager
def disturbed(server):
    """Kill the server, start it, halt it and let it go on, again and again."""
    stopped, errors = threading.Event(), []

    def disturb() -> None:
        try:
            for turn in itertools.count():
                if stopped.wait(0.3):
                    return
                if turn % 2:
                    server.stop()
                    stopped.wait(0.3)
                    server.start()
                else:
                    server.signal(signal.SIGSTOP)
                    stopped.wait(0.5)
                    server.signal(signal.SIGCONT)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
    assert not errors


def test_an_engine_outlives_its_server(start, scripted):
    """All tokens are right while it is killed, pauses and comes back."""
    server = start()
    prompts = [f"say abc {number} " * 12 for number in range(6)]
    params = SamplingParams(max_tokens=4, temperature=0)

    def generate(llm: LLM):
        outputs = llm.generate(prompts, params)
        cached = sum(output.num_cached_tokens for output in outputs)
        return [output.outputs[0].token_ids for output in outputs], cached

    plain = LLM(str(scripted), config=scripted_config(scripted))
    expected, _ = generate(plain)
    plain.close()
    config = config_of(scripted, server, timeout_seconds=0.2, connect_timeout_seconds=0.2)
    config["plugin"]["stores"] = {"breaker_seconds": 0.3}
    llm = LLM(str(scripted), config=config)
    rounds, cached = 0, 0
    with contextlib.closing(llm), disturbed(server):
        until = time.monotonic() + 12
        while time.monotonic() < until:
            tokens, more = generate(llm)
            assert tokens == expected
            rounds, cached = rounds + 1, cached + more
            llm.reset_prefix_cache()
    assert rounds > 5
    assert cached
    wait_until(lambda: not any(t.name.startswith("KV") for t in threading.enumerate()), 10)


def test_the_server_is_installed():
    assert shutil.which("redis-server"), "scripts/test --all installs it"
    assert shutil.which("openssl")
