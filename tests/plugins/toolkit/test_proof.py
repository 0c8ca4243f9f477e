"""Proofs of packages: verification before an import, and hostile packages."""

import json
import os
import sys
import zipfile
from pathlib import Path

import importlib_metadata
import pytest
from support.strangers import open_site

from hardpoint.builtin_plugins.commands.plugins import attest as attesting
from hardpoint.cli import main
from hardpoint.errors import ConfigError, PluginLoadError
from hardpoint.host.registry.plugin_set import resolve_plugins
from hardpoint.plugins import EngineConfig
from hardpoint.toolkit.proof import (
    STATEMENT_FILE,
    ProofError,
    decode_statement,
    describe_proof,
    package_files,
)
from hardpoint.toolkit.proof.package_files import SIGNATURE_FILE, record_entry
from hardpoint.typed import convert

INFO = "acme_proved-1.0.dist-info"
SOURCE = """
from hardpoint.plugins import SchedulingPolicy


class LastFirst(SchedulingPolicy):
    contract = 1

    def key(self, request):
        return -request.arrival_time
"""
FILES = {
    "acme_proved/__init__.py": "",
    "acme_proved/policy.py": SOURCE,
    "acme_proved/data/table.txt": "1 2 3",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: acme-proved\nVersion: 1.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/entry_points.txt": (
        "[hardpoint.scheduling_policies]\nacme_last = acme_proved.policy:LastFirst\n"
    ),
}
RECORDS = [
    {
        "record": "plugin",
        "component": "scheduling_policies/acme_last",
        "class": "acme_proved.policy:LastFirst",
        "contract": 1,
        "suite": "SchedulingPolicySuite",
    },
    {
        "record": "check",
        "component": "scheduling_policies/acme_last",
        "check": "test_order",
        "outcome": "proved",
    },
    {"record": "result", "component": "scheduling_policies/acme_last", "exit_code": 0},
]


def make_wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        lines = "".join(record_entry(name, text.encode()) for name, text in files.items())
        wheel.writestr(f"{INFO}/RECORD", f"{lines}{INFO}/RECORD,,\n")
    return path


def write_proof(wheel, records=RECORDS):
    *_, last = attesting.attest(records, "acme-proved", str(wheel), "0.1.0")
    return last


class Installed:
    """A package with a proof, installed in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info = folder / INFO
        self.wheel = make_wheel(folder.parent / "acme_proved-1.0-py3-none-any.whl", FILES)
        self.unpack()
        write_proof(self.wheel)
        self.unpack()

    def unpack(self) -> None:
        with zipfile.ZipFile(self.wheel) as wheel:
            wheel.extractall(self.folder)
        (self.info / "INSTALLER").write_text("pip\n")
        importlib_metadata.MetadataPathFinder.invalidate_caches()

    @property
    def statement(self) -> Path:
        return self.info / STATEMENT_FILE

    def rewrite(self, change) -> None:
        statement = json.loads(self.statement.read_bytes())
        change(statement)
        self.statement.write_text(json.dumps(statement))

    def record(self, line: str) -> None:
        with (self.info / "RECORD").open("a") as file:
            file.write(line)


@pytest.fixture
def package(tmp_path, monkeypatch):
    with open_site(tmp_path / "site", monkeypatch):
        yield Installed(tmp_path / "site")
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_proved"]:
        del sys.modules[name]


def resolve(use="acme_last", **plugins):
    plugins = {"require_proof": True, **plugins}
    tables = {"scheduler": {"policy": use}, "plugins": plugins}
    return resolve_plugins(convert(tables, EngineConfig, path=""))


def assert_refused(*words, use="acme_last", **plugins):
    """Assert that the package is refused before its import, for a reason with these words."""
    with pytest.raises(PluginLoadError) as caught:
        resolve(use, **plugins)
    message = str(caught.value)
    assert "plugins.require_proof" in message
    for word in words:
        assert word in message
    assert not [name for name in sys.modules if name.partition(".")[0] == "acme_proved"]


def test_package_with_proof_is_used(package):
    assert resolve().one("scheduling_policies").value == "acme_proved.policy:LastFirst"
    assert describe_proof("acme-proved") == "unsigned, kit 0.1.0"


def test_bytecode_that_python_writes_is_no_change(package):
    resolve()
    (package.folder / "acme_proved/__pycache__").mkdir(exist_ok=True)
    assert list(package_files(importlib_metadata.distribution("acme-proved"))) == sorted(FILES)


def test_statement_has_rules_versions_and_files(package):
    statement = json.loads(package.statement.read_bytes())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"][0]["name"] == "pkg:pypi/acme-proved@1.0"
    proof = decode_statement(package.statement.read_bytes())
    (component,) = proof.components
    assert component.rules == {"test_order": "proved"}
    assert (component.suite, component.contract) == ("SchedulingPolicySuite", 1)
    assert (proof.engine, proof.kit) == ("0.1.0", "0.1.0")
    assert proof.files.keys() == FILES.keys()


def test_wheel_keeps_its_files_and_records_the_proof(package):
    write_proof(package.wheel)  # a second proof replaces the first
    with zipfile.ZipFile(package.wheel) as wheel:
        names = wheel.namelist()
        record = wheel.read(f"{INFO}/RECORD").decode()
    assert sorted(names) == sorted([*FILES, f"{INFO}/{STATEMENT_FILE}", f"{INFO}/RECORD"])
    assert record_entry(f"{INFO}/{STATEMENT_FILE}", package.statement.read_bytes()) in record


def test_package_without_proof_is_refused(package):
    package.statement.unlink()
    assert_refused("expected a proof in the package acme-proved, got none")
    assert describe_proof("acme-proved") == ""
    assert resolve(require_proof=False)


def test_module_outside_a_package_is_refused(package):
    (package.folder / "acme_loose.py").write_text(SOURCE)
    assert_refused("acme_loose", use="acme_loose:LastFirst")
    assert "acme_loose" not in sys.modules


def test_fqcn_of_a_package_with_changed_files_is_refused(package):
    (package.folder / "acme_proved/policy.py").write_text(f"{SOURCE}\nOther = LastFirst\n")
    assert_refused("policy.py was changed", use="acme_proved.policy:Other")


def test_enabled_fqcn_is_refused_before_adapters_are_looked_for(package):
    package.statement.unlink()
    with pytest.raises(PluginLoadError, match="got none"):
        resolve("fcfs", enable=["acme_proved.policy:LastFirst"])
    assert "acme_proved" not in sys.modules


@pytest.mark.parametrize(
    "name", ["acme_proved/policy.py", "acme_proved/data/table.txt", f"{INFO}/entry_points.txt"]
)
def test_changed_file_is_refused(package, name):
    with (package.folder / name).open("a") as file:
        file.write("\n# more\n")
    assert_refused(f"{name} was changed")
    assert describe_proof("acme-proved") == f"invalid: {name} was changed"


@pytest.mark.parametrize(
    "name", ["acme_proved/more.py", "acme_proved/sub/__init__.py", f"{INFO}/more.txt"]
)
def test_added_file_is_refused(package, name):
    (package.folder / name).parent.mkdir(exist_ok=True)
    (package.folder / name).write_text("")
    assert_refused(f"{name} was added")


def test_removed_file_is_refused(package):
    (package.folder / "acme_proved/data/table.txt").unlink()
    assert_refused("acme_proved/data/table.txt", "missing")


def test_pth_file_of_the_package_is_refused(package):
    (package.folder / "acme.pth").write_text("import os\n")
    package.record("acme.pth,,\n")
    assert_refused("acme.pth: expected no .pth file")


def test_unchecked_bytecode_is_refused(package):
    cache = package.folder / "acme_proved/__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "policy.cpython-311.pyc").write_bytes(b"\xa7\r\r\n\x01\0\0\0" + bytes(8))
    assert_refused("policy.cpython-311.pyc was added")


@pytest.mark.parametrize("name", ["../outside.py", "/etc/passwd", "acme_proved/../../x.py"])
def test_recorded_path_outside_the_package_is_refused(package, name):
    for outside in ("outside.py", "x.py"):
        (package.folder.parent / outside).write_text("")
        (package.folder / outside).write_text("")
    package.record(f"{name},,\n")
    assert_refused("expected the relative path of a file of the package")


@pytest.mark.parametrize("data", [b"\xff\xfe,,\n", b"a,b,c,d\n", b"a,sha256,x\n", b"\0,,\n"])
def test_malformed_record_is_refused(package, data):
    (package.info / "RECORD").write_bytes(data)
    assert_refused("acme-proved")


@pytest.mark.parametrize("name", ["acme_proved/policy.py", f"{INFO}/{STATEMENT_FILE}"])
def test_symbolic_link_is_refused(package, name):
    path = package.folder / name
    moved = package.folder.parent / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    assert_refused("expected a plain file")


def test_linked_folder_is_refused(package):
    moved = package.folder.parent / "moved"
    (package.folder / "acme_proved").rename(moved)
    (package.folder / "acme_proved").symlink_to(moved)
    assert_refused("symbolic link")


def test_pipe_instead_of_the_statement_is_refused(package):
    package.statement.unlink()
    os.mkfifo(package.statement)
    assert_refused("expected a plain file")


@pytest.mark.parametrize(
    ("field", "value"), [("distribution", "acme-other"), ("version", "2.0"), ("version", "../1.0")]
)
def test_statement_of_another_package_is_refused(package, field, value):
    def change(statement):
        statement["predicate"][field] = value
        proof = statement["predicate"]
        name = f"pkg:pypi/{proof['distribution']}@{proof['version']}"
        statement["subject"][0]["name"] = name

    package.rewrite(change)
    assert_refused("expected a proof of acme-proved 1.0, got one of")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\xff",
        "[" * 100_000,
        '{"_type": "https://in-toto.io/Statement/v1"}',
        '{"_type": 1, "subject": [], "predicateType": "", "predicate": {}}',
    ],
)
def test_malformed_statement_is_refused(package, text):
    package.statement.write_text(text, encoding="latin-1")
    assert_refused("expected an in-toto statement")


def test_statement_that_contradicts_its_digest_is_refused(package):
    package.rewrite(lambda statement: statement["predicate"]["files"].popitem())
    assert_refused("subject: expected")


@pytest.mark.parametrize(
    ("field", "value"), [("_type", "https://in-toto.io/Statement/v0.1"), ("predicateType", "x")]
)
def test_statement_of_another_type_is_refused(package, field, value):
    package.rewrite(lambda statement: statement.__setitem__(field, value))
    assert_refused(f"{field}: expected")


def test_statement_of_a_failed_check_is_refused(package):
    package.rewrite(lambda s: s["predicate"]["components"][0]["rules"].update(test_order="failed"))
    assert_refused("scheduling_policies/acme_last: test_order failed")


def test_huge_statement_is_refused(package):
    with package.statement.open("ab") as file:
        file.truncate(1 << 33)  # sparse
    assert_refused("expected at most 4194304 bytes")


def test_module_of_the_same_name_earlier_on_the_path_is_refused(package, monkeypatch, tmp_path):
    shadow = tmp_path / "shadow" / "acme_proved"
    shadow.mkdir(parents=True)
    for name in ("__init__.py", "policy.py"):
        (shadow / name).write_text(SOURCE)
    monkeypatch.syspath_prepend(str(shadow.parent))
    assert_refused("acme_proved: expected a module of acme-proved, got", str(shadow))


def test_editable_package_is_verified_by_its_sources(package, tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    (package.folder / "acme_proved").rename(source / "acme_proved")
    monkeypatch.syspath_prepend(str(source))
    (package.folder / "__editable__.acme_proved-1.0.pth").write_text(f"{source}\n")
    names = ["__editable__.acme_proved-1.0.pth", *(f"{INFO}/{n}" for n in ("METADATA", "WHEEL"))]
    (package.info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    url = {"url": source.as_uri(), "dir_info": {"editable": True}}
    (package.info / "direct_url.json").write_text(json.dumps(url))
    assert_refused("__editable__.acme_proved-1.0.pth was added")
    write_proof(attesting.INSTALLED)
    assert describe_proof("acme-proved") == "unsigned, kit 0.1.0"
    (source / "acme_proved/more.py").write_text("")
    assert_refused("acme_proved/more.py was added")
    (source / "acme_proved/more.py").unlink()
    assert resolve().one("scheduling_policies").value == "acme_proved.policy:LastFirst"


@pytest.mark.parametrize("name", ["acme.pth", "acme_proved/__pycache__/policy.cpython-311.pyc"])
def test_wheel_that_changes_how_python_starts_gets_no_proof(package, name):
    make_wheel(package.wheel, {**FILES, name: ""})
    with pytest.raises(ConfigError, match="expected no .pth file, no bytecode"):
        write_proof(package.wheel)


def test_other_wheel_than_the_installed_one_gets_no_proof(package):
    make_wheel(package.wheel, {**FILES, "acme_proved/policy.py": ""})
    with pytest.raises(ConfigError, match=r"acme_proved/policy\.py differs; install this wheel"):
        write_proof(package.wheel)


def test_failed_check_writes_no_proof(package):
    before = package.wheel.read_bytes()
    result = write_proof(package.wheel, [*RECORDS[:2], {**RECORDS[2], "exit_code": 1}])
    assert result["problem"] == "a check failed"
    assert package.wheel.read_bytes() == before


def test_plugin_that_was_not_checked_writes_no_proof(package):
    result = write_proof(package.wheel, RECORDS[2:])
    assert result["problem"] == "scheduling_policies/acme_last was not checked"


def test_name_of_no_package_gets_no_proof(package):
    with pytest.raises(ConfigError, match="expected the name of an installed package"):
        list(attesting.attest([], "../acme_proved", str(package.wheel), "0.1.0"))


def test_unsigned_proof_is_refused_where_a_signature_is_required(package):
    assert_refused("expected a signed proof, got an unsigned one", require_proof="signed")


def test_signature_needs_trusted_identities(package):
    (package.info / SIGNATURE_FILE).write_text("{}")
    assert_refused("plugins.proof_signers: expected at least one", require_proof="signed")


def test_signature_needs_sigstore(package, monkeypatch):
    (package.info / SIGNATURE_FILE).write_text("{}")
    monkeypatch.setitem(sys.modules, "sigstore.errors", None)
    signers = {"release@acme.example": "https://accounts.example"}
    assert_refused("[sigstore]'", require_proof="signed", proof_signers=signers)


SIGNER, ISSUER = "release@acme.example", "https://accounts.example"


class Signed:
    """A package whose proof is signed by an instance of Sigstore that the tests have."""

    def __init__(self, package):
        pytest.importorskip("sigstore")
        from support.sigstore_instance import SigstoreInstance  # needs what sigstore needs

        self._package, self.instance = package, SigstoreInstance()
        self._root = package.folder.parent / "trusted_root.json"
        self._root.write_text(self.instance.trusted_root)
        self.bundle = self.instance.sign(package.statement.read_bytes(), SIGNER, ISSUER)
        self.plugins = {
            "require_proof": "signed",
            "proof_signers": {"other@acme.example": ISSUER, SIGNER: ISSUER},
            "proof_trusted_root": str(self._root),
        }
        self.add(self.bundle)

    def add(self, bundle):
        path = self._package.folder.parent / "bundle.json"
        path.write_text(bundle)
        list(attesting.add_signature("acme-proved", str(self._package.wheel), str(path)))
        self._package.unpack()

    def assert_refused(self, *words, **plugins):
        assert_refused(*words, **self.plugins | plugins)


@pytest.fixture
def signed(package):
    return Signed(package)


def test_package_with_signed_proof_is_used(signed):
    assert resolve(**signed.plugins).one("scheduling_policies").value.endswith(":LastFirst")
    assert describe_proof("acme-proved") == "signature not verified, kit 0.1.0"


@pytest.mark.parametrize("signers", [{"other@acme.example": ISSUER}, {SIGNER: "https://x.example"}])
def test_signature_of_another_identity_is_refused(signed, signers):
    signed.assert_refused("its signature cannot be verified", proof_signers=signers)


def test_signature_of_another_statement_is_refused(signed):
    signed.add(signed.instance.sign(b"{}", SIGNER, ISSUER))
    signed.assert_refused("its signature cannot be verified: Bundle message digest mismatch")


def test_signature_of_another_instance_is_refused(signed, tmp_path, monkeypatch):
    from support.sigstore_instance import SigstoreInstance

    other = SigstoreInstance()
    signed.add(other.sign(b"{}", SIGNER, ISSUER))
    signed.assert_refused("its signature cannot be verified")
    signed.add(signed.bundle)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    signed.assert_refused("its signature cannot be verified", proof_trusted_root="")


def test_changed_file_of_a_signed_package_is_refused(signed, package):
    (package.folder / "acme_proved/data/table.txt").write_text("1 2 4")
    signed.assert_refused("acme_proved/data/table.txt was changed")


@pytest.mark.parametrize("text", [None, "", "{}", "[]", "[" * 50_000, '{"mediaType": "x"}'])
def test_malformed_trusted_root_is_refused(signed, tmp_path, text):
    path = tmp_path / "root.json"
    if text is not None:
        path.write_text(text)
    words = "plugins.proof_trusted_root: expected a file of a Sigstore trusted root"
    signed.assert_refused(f"{words}, got {path}: ", proof_trusted_root=str(path))


def test_default_root_needs_a_cache_folder(signed, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    signed.assert_refused("plugins.proof_trusted_root", "package sigstore", proof_trusted_root="")


@pytest.mark.parametrize("bundle", ["{}", "{", "[]", '{"mediaType": "x"}', "[" * 50_000])
def test_malformed_signature_is_refused(signed, bundle):
    signed.add(bundle)
    signed.assert_refused("its signature cannot be verified")
    assert resolve()  # a signature is not looked at, if none is required


def test_decoding_refuses_more_than_the_limit():
    with pytest.raises(ProofError, match="at most"):
        decode_statement(b" " * (5 << 20))


def test_list_shows_proofs(package, capsys):
    assert main(["plugins", "list", "--json"]) == 0
    listed = {each["name"]: each["proof"] for each in json.loads(capsys.readouterr().out)}
    assert listed["acme_last"] == "unsigned, kit 0.1.0"
    assert listed["fcfs"] == ""
    assert main(["plugins", "list"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["KIND", "NAME", "FROM", "STATE", "ORDER", "PROOF", "WHY"]
    (line,) = [line for line in lines if "acme_last" in line]
    assert "unsigned, kit 0.1.0" in line


def test_show_refuses_to_import_a_package_without_proof(package, capsys):
    package.statement.unlink()
    assert main(["plugins", "show", "acme_last", "--set", "plugins.require_proof=true"]) == 2
    assert "expected a proof" in capsys.readouterr().err
    assert "acme_proved" not in sys.modules


def test_check_writes_a_proof_into_the_wheel(package, monkeypatch, capsys):
    monkeypatch.setenv("HARDPOINT_EXAMPLES", "0.05")
    make_wheel(package.wheel, FILES)
    assert main(["plugins", "check", "acme-proved", "--attest", str(package.wheel)]) == 0
    assert f"proof written to {package.wheel} (unsigned)" in capsys.readouterr().out
    package.unpack()
    assert resolve().one("scheduling_policies").name == "acme_last"
