"""The built-in resolver of adapters: folders in one folder, and nothing else."""

from __future__ import annotations

import pytest

from hardpoint import typed
from hardpoint.builtin_plugins.adapters.folder import Folder
from hardpoint.plugins import AdapterResolverContext, ConfigError, RequestError


def resolver(path):
    options = typed.convert({"path": str(path)}, Folder.Options, path="plugin.folder")
    return Folder(AdapterResolverContext(name="folder", options=options, model="m"))


def adapter(folder):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_a_folder_with_a_configuration_is_an_adapter(tmp_path):
    adapter_folder = adapter(tmp_path / "all" / "sql-2.1")
    (tmp_path / "all" / "notes").mkdir()
    folder = resolver(tmp_path / "all")
    assert folder.resolve("sql-2.1") == adapter_folder
    assert folder.resolve("notes") is None
    adapter(tmp_path / "all" / "later")
    assert folder.resolve("later") == tmp_path / "all" / "later"


@pytest.mark.parametrize(
    "name", ["..", ".", "all/sql", "../all/sql", "/etc", ".hidden", "sql\0", "sql\n", "s" * 129]
)
def test_other_names_are_unknown(tmp_path, name):
    adapter(tmp_path / "all" / "sql")
    adapter(tmp_path / "all" / ".hidden")
    assert resolver(tmp_path / "all").resolve(name) is None


def test_links_inside_of_the_folder_are_followed(tmp_path):
    adapter_folder = adapter(tmp_path / "all" / "sql-2")
    (tmp_path / "all" / "sql").symlink_to("sql-2")
    (adapter_folder / "adapter_model.safetensors").symlink_to("adapter_config.json")
    assert resolver(tmp_path / "all").resolve("sql") == adapter_folder


@pytest.mark.parametrize("of_file", [False, True])
def test_links_that_leave_the_folder_are_refused(tmp_path, of_file):
    outside = adapter(tmp_path / "outside")
    (tmp_path / "all").mkdir()
    if of_file:
        adapter(tmp_path / "all" / "sql")
        (tmp_path / "all" / "sql" / "adapter_model.safetensors").symlink_to(
            outside / "adapter_config.json"
        )
    else:
        (tmp_path / "all" / "sql").symlink_to(outside)
    with pytest.raises(RequestError, match="'sql', which has a link that leaves it") as error:
        resolver(tmp_path / "all").resolve("sql")
    assert str(tmp_path) not in str(error.value)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"plugin.folder.path: expected a folder of adapters, g"):
        resolver(tmp_path / "absent")
