"""Old import paths of the contract work, and warn with the new ones."""

from __future__ import annotations

import importlib
import sys
import warnings
from operator import attrgetter

import pytest

from hardpoint.old_names.modules import MOVED, MOVED_NAMES


def public_names(path):
    module = importlib.import_module(path)
    names = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == path
    ]
    return getattr(module, "__all__", [name for name in names if not name.startswith("_")])


NAMES = {
    old: [(target, name) for target in targets for name in public_names(target)]
    for old, targets in MOVED.items()
}
for old_module, new_names in MOVED_NAMES.items():
    NAMES.setdefault(old_module, []).extend((target, name) for name, target in new_names.items())


def module_of(old):
    return f"hardpoint.plugins.{old}" if old else "hardpoint.plugins"


def exporter(path, name):
    """Return the group of the contract that exports a name of one of its modules."""
    group = path.rpartition(".")[0]
    in_group = group.startswith("hardpoint.plugins.")
    is_exported = in_group and name.partition(".")[0] in importlib.import_module(group).__all__
    return group if is_exported else path


@pytest.mark.parametrize("old", NAMES)
def test_an_old_path_gives_the_same_objects_and_names_the_new_one(old):
    assert NAMES[old]
    for target, name in NAMES[old]:
        path, _, renamed = target.partition(":")
        new = renamed or name
        with pytest.warns(DeprecationWarning, match="moved to") as caught:
            resolved = getattr(importlib.import_module(module_of(old)), name)
        assert resolved is attrgetter(new)(importlib.import_module(path))
        (warning,) = caught
        assert str(warning.message) == (
            f"{module_of(old)}.{name} moved to {exporter(path, new)}.{new}; "
            f"the old path works until hardpoint 0.3"
        )
        assert warning.filename == __file__


def test_the_import_statements_of_authors_work():
    with pytest.warns(DeprecationWarning, match=r"hardpoint\.errors\.PluginFaultError"):
        exec("from hardpoint.plugins.errors import PluginFaultError")
    with pytest.warns(DeprecationWarning, match=r"toolkit\.workers\.joining\.results_of"):
        exec("from hardpoint.plugins.executor import results_of")
    with pytest.warns(DeprecationWarning, match=r"hardpoint\.typed\.convert"):
        exec("from hardpoint.plugins import typed; typed.convert")


def test_the_modules_before_the_groups_of_the_contract_have_their_names():
    with pytest.warns(DeprecationWarning, match=r"hardpoint\.plugins\.requests\.ImageSource;"):
        exec("from hardpoint.plugins.media import ImageSource")
    with pytest.warns(DeprecationWarning, match=r"kv_cache\.block_hash\.HASH_VERSION;"):
        exec("from hardpoint.plugins.block_hash import HASH_VERSION")
    with pytest.warns(DeprecationWarning, match=r"hardpoint\.plugins\.component\.manifest"):
        exec("from hardpoint.plugins import manifest; manifest.Manifest")


def test_an_unknown_name_is_an_error_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            sys.modules["hardpoint.plugins.errors"].nothing  # noqa: B018
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            sys.modules["hardpoint.plugins.executor"].nothing  # noqa: B018


def test_names_that_moved_are_in_no_list_of_the_old_module():
    for old, names in MOVED_NAMES.items():
        if old not in MOVED:
            assert not set(names) & set(importlib.import_module(module_of(old)).__all__)
