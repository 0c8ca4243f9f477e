"""The KV store "redis" with a server in a thread that answers as a test asks."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from redis.exceptions import InvalidResponse, RedisError
from support.kv_stores import SIZES, block_of, found, keep, key_of, loaded, open_store, room
from support.processes import run
from support.redis_servers import FakeRedis, seconds_of
from support.waiting import wait_until

from hardpoint import LLM, ConfigError, SamplingParams
from hardpoint.builtin_plugins.kv_stores.redis import RedisStore
from hardpoint.errors import PluginLoadError
from hardpoint.testing import scripted_config

SECRET = "pa55-word"


@pytest.fixture
def server(tmp_path):
    server = FakeRedis(tmp_path / "redis.sock")
    yield server
    server.stop()


@pytest.fixture
def opened():
    """Opens stores, and closes them."""
    stores = []

    def opened(server, *, faults=None, sizes=SIZES, **options) -> RedisStore:
        options = {"url": server.url, "timeout_seconds": 60} | options
        context = {} if faults is None else {"report_fault": faults.append}
        stores.append(open_store(RedisStore, sizes=sizes, context=context, **options))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


def private(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_blocks_come_back_as_they_were(server, opened):
    store = opened(server)
    keep(store, 1, 2)
    assert found(store, 1, 2, 3) == [True, True, False]
    assert [loaded(store, number) for number in (2, 1, 3)] == [True, True, False]
    assert found(store) == []


def test_large_blocks_come_back(server, opened):
    sizes = (128, *[300_001] * 15)
    store = opened(server, sizes=sizes, timeout_seconds=60)
    assert store.store(key_of(1), block_of(1, sizes)) is True
    assert loaded(store, 1, sizes)


def test_keys_and_expiry_are_as_configured(server, opened):
    keep(opened(server), 1)
    keep(opened(server, prefix="mine/", ttl_seconds=1.5), 1)
    value = bytes(block_of(1).whole)
    key = key_of(1).hex().encode()
    assert server.commands == [
        [b"SET", b"hardpoint:" + key, value],
        [b"SET", b"mine/" + key, value, b"PX", b"1500"],
    ]


def test_lookups_ask_for_many_keys_at_once(server, opened):
    """The answers are held back until all questions of a batch are there."""
    store = opened(server)
    keep(store, 0, 500)
    server.commands.clear()
    held = []

    def answer(command):
        if command[0] != b"STRLEN":
            return None
        held.append(b":%d\r\n" % len(server.values.get(command[1], b"")))
        if len(held) < 500:
            return b""
        answers, held[:] = b"".join(held), []
        return answers

    server.answer = answer
    assert found(store, *range(500)) == [True, *[False] * 499]
    assert len(server.commands) == 500


def test_one_connection_serves_calls_one_after_another_and_each_thread_has_its_own(server, opened):
    store = opened(server, timeout_seconds=60)
    for number in range(20):
        keep(store, number)
    assert server.connections == 1
    meeting = threading.Barrier(4)

    def answer(command):
        if command[0] == b"GET":
            meeting.wait(60)

    server.answer = answer
    threads = [threading.Thread(target=loaded, args=(store, n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not meeting.broken
    assert server.connections == 4


def test_a_value_of_another_size_is_not_there(server, opened):
    store = opened(server)
    keep(store, 1)
    (name,) = server.values
    server.values[name] += b"more"
    assert found(store, 1) == [False]
    assert not loaded(store, 1)
    server.answer = lambda command: b":1152\r\n" if command[0] == b"GET" else None
    assert not loaded(store, 1)
    server.answer = lambda command: None
    keep(store, 1)
    assert loaded(store, 1)


def test_values_of_other_types_are_not_there(server, opened):
    store = opened(server)
    keep(store, 1, 3)
    wrong = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
    key = b"hardpoint:" + key_of(2).hex().encode()
    server.answer = lambda command: wrong if command[1:2] == [key] else None
    assert found(store, 1, 2, 3) == [True, False, True]
    with pytest.raises(RedisError, match="WRONGTYPE"):
        loaded(store, 2)
    assert loaded(store, 1)
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$x\r\n",
        b"x" * 10_000,
        b"$99999999999999999999999999\r\n",
    ],
    ids=["http", "letters", "no-line", "huge"],
)
def test_what_is_not_of_redis_is_a_fault_and_the_connection_is_given_up(server, opened, answer):
    store = opened(server)
    keep(store, 1)
    server.answer = lambda command: answer if command[0] == b"GET" else None
    with pytest.raises(InvalidResponse):
        store.load(key_of(1), room())
    server.answer = lambda command: None
    assert loaded(store, 1)
    assert server.connections == 2


def test_an_error_in_the_midst_of_a_lookup_leaves_no_answers_for_others(server, opened):
    store = opened(server)
    keep(store, 1, 2, 3)
    second, third = (b"hardpoint:" + key_of(n).hex().encode() for n in (2, 3))

    def answer(command):
        if command[1:] == [second]:
            return b"-LOADING Redis is loading the dataset in memory\r\n"
        if command[1:] == [third]:
            time.sleep(0.05)

    server.answer = answer
    with pytest.raises(RedisError, match="Redis is loading the dataset"):
        found(store, 1, 2, 3)
    server.answer = lambda command: None
    assert found(store, 3, 4, 1) == [True, False, True]


def test_a_full_server_stops_saving_is_reported_once_and_can_be_read(server, opened):
    faults = []
    store = opened(server, faults=faults)
    keep(store, 1)
    oom = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
    server.answer = lambda command: oom if command[0] == b"SET" else None
    assert [store.store(key_of(n), block_of(n)) for n in (2, 3)] == [False, False]
    assert loaded(store, 1)
    assert len(faults) == 1
    assert (
        "KV store 'kept': blocks are not stored for now: the server answered: command not"
        in faults[0]
    )
    server.answer = lambda command: None
    keep(store, 2)
    server.answer = lambda command: oom if command[0] == b"SET" else None
    assert not store.store(key_of(3), block_of(3))
    assert len(faults) == 2


def test_other_errors_of_storing_are_faults(server, opened):
    store = opened(server)
    server.answer = lambda command: b"-ERR invalid\r\n" if command[0] == b"SET" else None
    with pytest.raises(RedisError, match="invalid"):
        keep(store, 1)


def test_a_silent_server_costs_the_time_limit_and_no_more(server, opened):
    keep(opened(server), 1)
    store = opened(server, timeout_seconds=0.15)
    server.answer = lambda command: b""
    for call in (lambda: loaded(store, 1), lambda: found(store, 1), lambda: keep(store, 2)):
        began = time.monotonic()
        with pytest.raises(RedisError, match=r"no answer in 0\.15 s"):
            call()
        assert time.monotonic() - began < 30.0


def test_connections_come_back_after_a_restart(server, opened):
    faults = []
    store = opened(server, faults=faults)
    keep(store, 1)
    server.stop()
    with pytest.raises(RedisError, match=r"Error \d+ connecting to .*redis\.sock"):
        loaded(store, 1)
    server.start()
    assert loaded(store, 1)
    server.stop()
    server.start()
    assert loaded(store, 1), "a restart between two calls is no fault"
    assert not faults


def test_an_engine_starts_without_its_server_and_reports_it(server, opened):
    server.stop()
    faults = []
    store = opened(server, faults=faults)
    assert len(faults) == 1
    assert faults[0].startswith("KV store 'kept': Error ")
    assert f"connecting to {server.path}" in faults[0]
    server.start()
    keep(store, 1)
    assert loaded(store, 1)


def test_user_and_password_come_from_a_file_or_the_environment(tmp_path, opened, monkeypatch):
    server = FakeRedis(tmp_path / "redis.sock", password=SECRET)
    try:
        file = private(tmp_path / "password", SECRET + "\n")
        keep(opened(server, username="engine", password_file=file), 1)
        assert server.commands[0] == [b"AUTH", b"engine", SECRET.encode()]
        monkeypatch.setenv("CACHE_PASSWORD", SECRET)
        assert loaded(opened(server, password_env="CACHE_PASSWORD"), 1)
        assert [b"AUTH", SECRET.encode()] in server.commands
    finally:
        server.stop()


def test_a_password_that_changes_is_read_again(tmp_path, opened):
    server = FakeRedis(tmp_path / "redis.sock", password=SECRET)
    try:
        file = private(tmp_path / "password", SECRET)
        store = opened(server, password_file=file)
        keep(store, 1)
        server.stop()
        server.password = "another"
        server.start()
        with pytest.raises(RedisError, match="invalid username-password pair"):
            loaded(store, 1)
        private(tmp_path / "password", "another")
        assert loaded(store, 1)
    finally:
        server.stop()


def test_no_password_is_in_an_error_a_log_or_the_manifest(tmp_path, opened, caplog):
    caplog.set_level(logging.DEBUG)
    server = FakeRedis(tmp_path / "redis.sock", password="another")
    faults = []
    try:
        file = private(tmp_path / "password", SECRET)
        store = opened(server, faults=faults, password_file=file)
        assert "invalid username-password pair" in faults[0]
        with pytest.raises(RedisError, match="invalid username-password pair") as raised:
            loaded(store, 1)
        shown = [*faults, str(raised.value), repr(raised.value.__cause__), caplog.text]
        assert SECRET not in "".join([*shown, repr(store.options), repr(store.context)])
    finally:
        server.stop()


URLS = {
    f"redis://user:{SECRET}@host:1/0": "expected no user or password in it; set username",
    f"redis://:{SECRET}/x@host": "expected no user or password in it; set username",
    f"redis://host:{SECRET}/0": "expected a URL such as redis://127.0.0.1:6379/0",
    f"redis://host/0?password={SECRET}": "expected redis://HOST:PORT/DB, rediss://HOST:PORT/DB",
    "http://host": "expected redis://HOST:PORT/DB",
    "127.0.0.1:6379": "expected redis://HOST:PORT/DB",
    "redis://": "expected a host, and a number of a database",
    "redis://a..b/0": "expected a host, and a number of a database",
    "redis://host/first": "expected a host, and a number of a database",
    "unix://run/redis.sock": "expected the path of a socket: unix:///run/redis/redis.sock",
}


@pytest.mark.parametrize("url", URLS)
def test_urls_that_cannot_be_used_are_refused_and_never_repeated(url):
    with pytest.raises(ConfigError) as raised:
        open_store(RedisStore, name="redis", url=url)
    message = str(raised.value)
    assert message.startswith("plugin.redis.url: ")
    assert URLS[url] in message
    assert SECRET not in message


def test_an_engine_repeats_no_password_that_it_refuses(scripted, caplog):
    caplog.set_level(logging.DEBUG)
    config = scripted_config(scripted) | {
        "kv_connector": {"stores": ["redis"]},
        "plugin": {"redis": {"url": f"redis://user:{SECRET}@127.0.0.1/0"}},
    }
    with pytest.raises(ConfigError, match=r"plugin\.redis\.url: expected no user or") as raised:
        LLM(str(scripted), config=config)
    assert SECRET not in str(raised.value) + caplog.text


def test_options_that_do_not_fit_are_refused():
    def refusal(**options) -> str:
        with pytest.raises(ConfigError) as raised:
            open_store(RedisStore, name="redis", **options)
        return str(raised.value)

    both = refusal(password_file="a", password_env="B")
    assert both == "plugin.redis.password_env: expected none besides password_file"
    alone = refusal(username="engine")
    assert alone == "plugin.redis.username: expected password_file or password_env, too"
    unset = refusal(password_env="NO_SUCH_VARIABLE")
    assert "plugin.redis.password_env: the environment of this process has no variable" in unset


def test_password_files_that_others_can_read_are_refused(tmp_path, opened, server):
    def refusal(file: str) -> str:
        with pytest.raises(ConfigError) as raised:
            opened(server, password_file=file)
        return str(raised.value)

    path = tmp_path / "password"
    start = f"plugin.kept.password_file: {str(path)!r}: "
    assert refusal(str(path)) == start + "No such file or directory"
    wrong = refusal(private(path, SECRET, 0o644))
    assert wrong.startswith(start + "expected a file of yours or root's with mode 0600 or 0640")
    assert "got mode 0644" in wrong
    assert refusal(private(path, "\n")).startswith(start + "expected a password, in UTF-8")
    assert refusal(private(path, "x" * 5000)).startswith(start + "expected a password, in UTF-8")
    path.write_bytes(b"\xff\xfe")
    assert refusal(str(path)).startswith(start + "expected a password, in UTF-8")
    path.unlink()
    os.mkfifo(path, 0o600)
    assert refusal(str(path)) == start + "expected a regular file"


def test_certificates_that_cannot_be_read_are_refused(tmp_path):
    path = str(tmp_path / "none.pem")
    expected = rf"plugin\.kept\.ssl_ca_certs: '{path}': .*No such file"
    with pytest.raises(ConfigError, match=expected):
        open_store(RedisStore, url="rediss://127.0.0.1:1", ssl_ca_certs=path)
    expected = rf"plugin\.kept\.ssl_certfile: '{path}' and its key: .*No such file"
    with pytest.raises(ConfigError, match=expected):
        open_store(RedisStore, url="rediss://127.0.0.1:1", ssl_certfile=path)


def test_a_closed_store_connects_no_more(server, opened):
    store = opened(server)
    keep(store, 1)
    store.close()
    for call in (lambda: loaded(store, 1), lambda: found(store, 1), lambda: keep(store, 2)):
        with pytest.raises(RedisError, match="the store is closed"):
            call()
    assert server.connections == 1


def test_closing_while_a_thread_waits_ends_its_connection(server, opened):
    store = opened(server)
    keep(store, 1)
    received, go_on = threading.Event(), threading.Event()

    def answer(command):
        if command[0] == b"GET":
            received.set()
            go_on.wait(60)

    server.answer = answer
    thread = threading.Thread(target=loaded, args=(store, 1))
    thread.start()
    assert received.wait(60)
    assert seconds_of(store.close) < 30
    go_on.set()
    thread.join(60)
    wait_until(lambda: not server.open)


def test_without_the_library_the_error_names_what_to_install(monkeypatch, scripted):
    monkeypatch.setitem(sys.modules, "redis", None)
    config = scripted_config(scripted) | {"kv_connector": {"stores": ["redis"]}}
    expected = r"it needs the library redis: pip install '\S*hardpoint\[redis\]'"
    with pytest.raises(PluginLoadError, match=expected):
        LLM(str(scripted), config=config)


def test_hardpoint_does_not_import_the_library(tmp_path):
    program = (
        "import sys, hardpoint, hardpoint.builtin_plugins.kv_stores.redis as module\n"
        "sys.exit('redis' in sys.modules)"
    )
    run(sys.executable, "-c", program, cwd=tmp_path)


def test_an_engine_gives_the_same_tokens_from_the_server(server, scripted):
    config = scripted_config(scripted) | {
        "kv_connector": {"stores": ["redis"]},
        "plugin": {"redis": {"url": server.url}},
    }
    prompt, params = "say abc " * 20, SamplingParams(max_tokens=8, temperature=0)

    def generate():
        with contextlib.closing(LLM(str(scripted), config=config)) as llm:
            (output,) = llm.generate([prompt], params)
            assert llm.plugins.health().fallbacks == {}
            return output.outputs[0].token_ids, output.num_cached_tokens

    cold, warm = generate(), generate()
    assert cold[0] == warm[0]
    assert cold[1] == 0
    assert warm[1] >= 16
