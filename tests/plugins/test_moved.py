"""Old import paths of the contract work, and warn with the new ones."""

from __future__ import annotations

import importlib
import sys
import warnings
from operator import attrgetter

import pytest

from hardpoint.plugins.moved import MOVED, MOVED_NAMES

NAMES = [
    (old, target, name)
    for old, targets in MOVED.items()
    for target in targets
    for name in importlib.import_module(target).__all__
]
NAMES += [
    (old, target, name) for old, names in MOVED_NAMES.items() for name, target in names.items()
]


def module_of(old):
    return f"hardpoint.plugins.{old}" if old else "hardpoint.plugins"


@pytest.mark.parametrize(("old", "target", "name"), NAMES)
def test_an_old_path_gives_the_same_object_and_names_the_new_one(old, target, name):
    target, _, renamed = target.partition(":")
    new = renamed or name
    with pytest.warns(DeprecationWarning, match="moved to") as caught:
        found = getattr(importlib.import_module(module_of(old)), name)
    assert found is attrgetter(new)(importlib.import_module(target))
    (warning,) = caught
    assert str(warning.message) == (
        f"{module_of(old)}.{name} moved to {target}.{new}; the old path works until hardpoint 0.3"
    )
    assert warning.filename == __file__


def test_the_import_statements_of_authors_work():
    with pytest.warns(DeprecationWarning, match=r"hardpoint\.errors\.PluginFaultError"):
        exec("from hardpoint.plugins.errors import PluginFaultError")
    with pytest.warns(DeprecationWarning, match=r"toolkit\.workers\.joining\.results_of"):
        exec("from hardpoint.plugins.executor import results_of")
    with pytest.warns(DeprecationWarning, match=r"hardpoint\.typed\.convert"):
        exec("from hardpoint.plugins import typed; typed.convert")


def test_an_unknown_name_is_an_error_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            sys.modules["hardpoint.plugins.errors"].nothing  # noqa: B018
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            sys.modules["hardpoint.plugins.executor"].nothing  # noqa: B018


def test_names_that_moved_are_in_no_list_of_the_old_module():
    for old, names in MOVED_NAMES.items():
        assert not set(names) & set(importlib.import_module(module_of(old)).__all__)
