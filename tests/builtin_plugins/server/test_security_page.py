"""docs/server-security.md is true: limits, tests that it names, and the keys file that it shows."""

import re

from support.processes import ROOT

from hardpoint.builtin_plugins.server.access.keys import KeyStore
from hardpoint.builtin_plugins.server.config import ServerConfig, ServerLimits

TEXT = (ROOT / "docs" / "server-security.md").read_text()


def test_the_limits():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", TEXT, re.MULTILINE))
    limits = ServerLimits()
    expected = {name: getattr(limits, name) for name in limits.__struct_fields__}
    shown = {name: "none" if value is None else str(value) for name, value in expected.items()}
    assert rows == shown


def test_the_tests_that_it_names_exist():
    named = set(re.findall(r"`(test_\w+\.py)`", TEXT))
    assert len(named) > 8
    assert named <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def test_the_settings_that_it_names_exist():
    named = set(re.findall(r"`server\.(\w+)", TEXT)) - {"limits"}
    assert named <= set(ServerConfig.__struct_fields__)


def test_the_open_routes():
    assert ServerConfig().open_routes == ["/health", "/ready", "/ping", "/"]


def test_the_keys_file(tmp_path):
    (example,) = re.findall(r"^```toml\n(\[\[key\]\].*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    path = tmp_path / "keys.toml"
    path.write_text(example.replace("the key itself, if you must", "the-key-itself-if-you-must"))
    path.chmod(0o600)
    store = KeyStore(str(path))
    assert store.names == ["alice", "bob"]
    assert store.find("the-key-itself-if-you-must").name == "bob"
