"""Keys: the file's form and rights, comparison, reloading, and that nothing shows them."""

import asyncio
import errno
import hashlib
import hmac
import logging
import os

import pytest
from support.fake_engine import FakeEngine, configured
from support.http_server import running

from hardpoint.builtin_plugins.server.access import keys as module
from hardpoint.builtin_plugins.server.access.keys import (
    ENVIRONMENT,
    KeyStore,
    installed,
    single_key,
    stores_of,
)
from hardpoint.builtin_plugins.server.application import Authentication
from hardpoint.builtin_plugins.server.config import ServerConfig
from hardpoint.builtin_plugins.server.errors import AnswerError
from hardpoint.builtin_plugins.server.faults import Owned, ServerFaults
from hardpoint.plugins import ConfigError
from hardpoint.plugins.server import Route
from hardpoint.testing import ScriptedClock

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def hashed(key):
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def table(name, key, *lines):
    return "\n".join(["[[key]]", f'name = "{name}"', f'hash = "{hashed(key)}"', *lines, ""])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys.toml"
    write(path, table("alice", ALICE) + table("bob", BOB))
    return path


def write(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)


def client_of(store, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(store.authenticate(named, "/v1/models"))


def test_keys_are_found_in_both_headers(file):
    store = KeyStore(str(file))
    assert client_of(store, authorization=f"Bearer {ALICE}").name == "alice"
    assert client_of(store, authorization=f"bearer  {BOB} ").name == "bob"
    assert client_of(store, x_api_key=ALICE).name == "alice"
    assert client_of(store, authorization="Bearer no", x_api_key=BOB).name == "bob"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": ALICE},
        {"authorization": f"Basic {ALICE}"},
        {"authorization": f"Bearer {ALICE}x"},
        {"authorization": f"Bearer {ALICE[:-1]}"},
        {"authorization": f"Bearer {ALICE.upper()}"},
        {"authorization": f"Bearer {hashed(ALICE)}"},
        {"authorization": f"Bearer {ALICE} {BOB}"},
        {"authorization": "Bearer \xff\xfe"},
        {"x_api_key": ""},
        {"api_key": ALICE},
    ],
)
def test_everything_else_is_no_client(file, headers):
    assert client_of(KeyStore(str(file)), **headers) is None


def test_a_key_has_a_rate(file):
    write(file, table("alice", ALICE, "requests_per_minute = 3") + table("bob", BOB))
    clock, faults = ScriptedClock(), ServerFaults(10.0)
    owned = Owned("keys", "keys", installed(KeyStore(str(file))).extension)
    free = ["/v1/models", "/v1/models/{model:path}", "/health"]
    authentication = Authentication([owned], faults, (), uncounted=free, clock=clock)

    def ask(key, path="/v1/chat/completions"):
        scope = {"headers": [(b"x-api-key", key.encode())], "path": path}
        return asyncio.run(authentication.client(scope)).name

    paths = ["/tokenize", "/acme/usage", "/v1/chat/completions"]
    assert [ask(ALICE, path) for path in paths] == ["alice"] * 3
    with pytest.raises(AnswerError) as refused:
        ask(ALICE)
    assert str(refused.value) == (
        "rate: expected at most 3 requests in a minute with this key; try again in 20 s"
    )
    detail = refused.value.detail
    assert (refused.value.status, detail.type) == (429, "rate_limit_error")
    assert (detail.code, refused.value.headers) == ("rate_limit_exceeded", {"retry-after": "20"})
    assert ask(ALICE, "/v1/models/a/b") == ask(ALICE, "/health") == "alice"
    assert [ask(BOB) for _ in range(100)] == ["bob"] * 100
    clock.advance(20)
    assert ask(ALICE) == "alice"
    with pytest.raises(AnswerError, match="try again in 20 s"):
        ask(ALICE)
    clock.advance(3600)
    assert [ask(ALICE) for _ in range(3)] == ["alice"] * 3
    with pytest.raises(AnswerError):
        ask(ALICE)


def test_every_route_that_computes_or_stores_is_counted():
    free = Route(path="/acme/about", endpoint=print, is_counted=False)
    extensions = [("acme", Route(path="/acme/usage", endpoint=print)), ("acme", free)]
    with running(FakeEngine(config=configured(), extensions=extensions)) as server:
        uncounted = {route.path for route in server.service.routes if not route.is_counted}
    pages = {path for path in uncounted if path.startswith("/page/")}
    probes = {"/health", "/ready", "/ping", "/load", "/version", "/metrics"}
    models = {"/v1/models", "/v1/models/{model:path}"}
    assert uncounted - pages == {*probes, *models, "/", "/openapi.json", "/acme/about"}


@pytest.mark.parametrize("rate", ["0", "-1", "1.5", '"a"'])
def test_a_wrong_rate_is_refused(file, rate):
    write(file, table("alice", ALICE, f"requests_per_minute = {rate}"))
    with pytest.raises(ConfigError, match=r"key\[0\]\.requests_per_minute: expected"):
        KeyStore(str(file))


def test_a_key_is_compared_with_all_entries_in_constant_time(file, monkeypatch):
    """CVE-2025-59425: a comparison that ends early shows how much of a guess is right."""
    compared, in_constant_time = [], hmac.compare_digest

    def compare(one, other):
        compared.append((len(one), len(other)))
        return in_constant_time(one, other)

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    store = KeyStore(str(file))
    for key in (ALICE, BOB, "nothing"):
        compared.clear()
        store.find(key)
        assert compared == [(32, 32)] * 2


def test_bounds_tags_and_salts(file):
    lines = (
        'tags = { team = "red" }',
        "min_priority = -5",
        "max_priority = 5",
        "max_timeout = 9.5",
        "kv_transfer = true",
    )
    write(file, table("alice", ALICE, *lines) + table("bob", BOB, 'cache_salt = "shared"'))
    store = KeyStore(str(file))
    alice, bob = store.find(ALICE), store.find(BOB)
    assert (alice.tags, alice.min_priority, alice.max_priority) == ({"team": "red"}, -5, 5)
    assert (alice.max_timeout, alice.kv_transfer, alice.admin) == (9.5, True, False)
    assert (bob.tags, bob.max_timeout, bob.kv_transfer) == ({}, None, False)
    assert bob.cache_salt == "shared"
    assert len(alice.cache_salt) == 64
    assert alice.cache_salt not in (ALICE, hashed(ALICE).removeprefix("sha256:"))
    assert KeyStore(str(file), setting="server.admin_keys_file", admin=True).find(ALICE).admin


def test_every_key_has_a_salt_of_its_own_that_stays(file):
    first, second = KeyStore(str(file)), KeyStore(str(file))
    assert first.find(ALICE).cache_salt == second.find(ALICE).cache_salt
    assert first.find(ALICE).cache_salt != first.find(BOB).cache_salt


def test_plain_keys_in_a_private_file(file):
    write(file, f'[[key]]\nname = "alice"\nkey = "{ALICE}"\n', 0o640)
    assert KeyStore(str(file)).find(ALICE).name == "alice"


def test_a_single_key_in_addition_to_those_of_the_file(file):
    store = KeyStore(str(file), "single-0123456789abcdef")
    assert store.names == ["default", "alice", "bob"]
    assert store.find("single-0123456789abcdef").name == "default"


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o620, 0o660, 0o601, 0o777])
def test_a_file_that_others_can_read_or_change_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"has the mode 0{mode:o}, .* expected 0600 or 0640"):
        KeyStore(str(file))


def test_files_that_are_not_ours(file, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 4242)
        if os.getuid():
            with pytest.raises(ConfigError, match="belongs to neither this user nor root"):
                KeyStore(str(file))
    (tmp_path / "conf").mkdir()
    link = tmp_path / "conf" / "keys.toml"
    link.symlink_to(file)
    with pytest.raises(ConfigError, match="is a link out of its folder"):
        KeyStore(str(link))
    inside = tmp_path / "inside.toml"
    inside.symlink_to(file.name)  # as container platforms mount secrets
    assert KeyStore(str(inside)).names == ["alice", "bob"]
    with pytest.raises(ConfigError, match=r"keys_file: .*nowhere.* cannot be read: No such file"):
        KeyStore(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="is no plain file"):
        KeyStore(str(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is no plain file"):
        KeyStore(str(tmp_path / "pipe"))


SECRET = "s3cret-0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected at least one table \[\[key\]\]"),
        (f"name = {SECRET}", r"expected TOML, got something else \(at line 1, "),
        ('[[keys]]\nname = "a"', r"expected tables \[\[key\]\] alone, got 'keys'"),
        ('[key]\nname = "a"', r"expected at least one table \[\[key\]\]"),
        ("key = [5]", r"key\[0\]: expected a table"),
        ('[[key]]\nname = "a"', r"key\[0\]: expected either `hash` or `key`"),
        (f'[[key]]\nkey = "{SECRET}"', r"key\[0\].name: missing"),
        (f'[[key]]\nname = "a"\nkeys = "{SECRET}"', r"key\[0\].keys: unknown field"),
        (
            f'[[key]]\nname = "a"\nkey = "{SECRET}"\nhash = "{hashed(SECRET)}"',
            "either `hash` or `key`",
        ),
        ('[[key]]\nname = "a"\nkey = 5', "either `hash` or `key`, as a text"),
        (
            f'[[key]]\nname = "a"\nhash = "{SECRET}"',
            r'key\[0\].hash: expected "sha256:" and 64 hexadecimal',
        ),
        (f'[[key]]\nname = "a"\nkey = "{SECRET} "', "key 'a': expected 1 to 1024 visible ASCII"),
        ('[[key]]\nname = "a"\nkey = ""', "key 'a': expected 1 to 1024 .* got 0 characters"),
        (
            f'[[key]]\nname = "a"\nkey = "{SECRET}"\nmin_priority = 2\nmax_priority = 1',
            r"min_priority: expected at most max_priority \(1\), got 2",
        ),
        (f'[[key]]\nname = "a"\nkey = "{SECRET}"\nmax_timeout = 0', r"max_timeout: expected .*> 0"),
        (table("a", SECRET) + table("a", BOB), "two keys have the name 'a'"),
        (table("a", SECRET) + table("b", SECRET), "'a' and 'b' have the same key"),
    ],
)
def test_wrong_files_are_refused_without_quoting_a_key(file, text, message):
    write(file, text)
    with pytest.raises(ConfigError, match=message) as raised:
        KeyStore(str(file))
    assert SECRET not in str(raised.value)
    assert hashed(SECRET)[7:] not in str(raised.value)


def test_a_changed_file_is_read_once_a_second_at_most(file):
    clock = ScriptedClock()
    store = KeyStore(str(file), clock=clock)
    write(file, table("carol", BOB))
    clock.now = 0.9
    assert client_of(store, x_api_key=ALICE).name == "alice"
    clock.now = 1.0
    assert client_of(store, x_api_key=ALICE) is None
    assert client_of(store, x_api_key=BOB).name == "carol"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: write(file, "[[key"),
        lambda file: file.chmod(0o644),
        lambda file: file.unlink(),
    ],
    ids=["broken", "readable", "gone"],
)
def test_a_malformed_file_leaves_the_keys_and_is_logged_once(file, caplog, spoil):
    clock = ScriptedClock()
    store = KeyStore(str(file), clock=clock)
    spoil(file)
    for seconds in (1.0, 2.0, 3.0):
        clock.now = seconds
        assert client_of(store, x_api_key=ALICE).name == "alice"
    (record,) = [record for record in caplog.records if "keys from before stay" in record.message]
    assert "server.keys_file" in record.message
    write(file, table("carol", BOB))
    clock.now = 4.0
    assert client_of(store, x_api_key=ALICE) is None


def test_a_file_that_could_not_be_opened_for_once_is_read_again(file, caplog, monkeypatch):
    """A key that was taken back must not stay because the process had no descriptor then."""
    clock, opened = ScriptedClock(), os.open
    store = KeyStore(str(file), clock=clock)
    write(file, table("carol", BOB))

    def no_descriptor(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", no_descriptor)
    for seconds in (1.0, 2.0, 3.0):
        clock.now = seconds
        assert client_of(store, x_api_key=ALICE).name == "alice"
    monkeypatch.setattr(os, "open", opened)
    clock.now = 4.0
    assert client_of(store, x_api_key=ALICE) is None
    assert client_of(store, x_api_key=BOB).name == "carol"
    assert caplog.text.count("keys from before stay") == 1


def test_a_users_key_is_no_administrators(file, tmp_path):
    admin = tmp_path / "admin.toml"
    write(admin, table("root", "root-0123456789abcdef"))
    settings = ServerConfig(keys_file=str(file), admin_keys_file=str(admin))
    stores = stores_of(settings, None)
    assert stores.users.find("root-0123456789abcdef") is None
    assert stores.admin.find(ALICE) is None
    assert stores.admin.find("root-0123456789abcdef").admin
    write(admin, table("root", ALICE))
    with pytest.raises(ConfigError, match="the key of 'root' is that of the user 'alice'"):
        stores_of(settings, None)
    stores.reload()
    assert stores.admin.names == ["root"]
    assert stores.admin.find(ALICE) is None


def test_a_server_without_keys():
    stores = stores_of(ServerConfig(), None)
    assert (stores.users, stores.admin) == (None, None)
    stores.reload()


def test_reload_does_not_wait(file):
    store = KeyStore(str(file))
    write(file, table("carol", BOB))
    store.reload()
    assert store.names == ["carol"]


def test_nothing_shows_a_key(file, caplog):
    caplog.set_level(logging.DEBUG)
    write(file, table("alice", ALICE) + f'[[key]]\nname = "bob"\nkey = "{BOB}"\n')
    store = KeyStore(str(file), SECRET)
    store.reload()
    shown = " ".join([repr(vars(store)), str(store), repr(store.find(ALICE)), caplog.text])
    for key in (ALICE, BOB, SECRET):
        assert key not in shown
        assert hashlib.sha256(key.encode()).hexdigest() not in shown


def test_a_short_key_is_warned_of(caplog):
    KeyStore(None, "short")
    assert "key 'default': it has 5 characters" in caplog.text
    assert "short" not in caplog.text


def test_the_environment_loses_the_key(monkeypatch, caplog):
    monkeypatch.setenv(ENVIRONMENT, ALICE)
    assert single_key(None) == ALICE
    assert ENVIRONMENT not in os.environ
    assert single_key(None) is None
    assert not caplog.records
    monkeypatch.setenv(ENVIRONMENT, ALICE)
    assert single_key(BOB) == BOB
    assert "--api-key: every user of this machine sees it" in caplog.text
    assert BOB not in caplog.text


@pytest.mark.parametrize(("option", "variable"), [("", ALICE), (None, "")])
def test_an_empty_key_is_refused_instead_of_none(monkeypatch, option, variable):
    monkeypatch.setenv(ENVIRONMENT, variable)
    with pytest.raises(ConfigError, match="expected a key, got an empty text"):
        single_key(option)
