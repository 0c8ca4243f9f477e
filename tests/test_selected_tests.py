"""The tests that a run leaves out."""

from __future__ import annotations

import pytest
from support.selection import Selection

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.parametrize(("name", "is_on"), [("a", True), ("b", False), ("c", True)])
def test_table(name, is_on): pass

@pytest.mark.parametrize("place", ["here", "apart"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_product(place, count): pass

@pytest.mark.nightly
def test_long(): pass
"""


class Options:
    """Adds the options of a run, as tests/conftest.py does."""

    def pytest_addoption(self, parser):
        for name in ("--all", "--timing"):
            parser.addoption(name, action="store_true")
        parser.addoption("--shuffle")

    def pytest_configure(self, config):
        config.addinivalue_line("markers", "nightly: takes long")
        config.pluginmanager.register(Selection(config))


@pytest.fixture
def select(pytester):
    """Return the names of the tests that a run with some arguments chooses."""
    path = pytester.makepyfile(TESTS)

    def names(*arguments, test=""):
        run = pytester.inline_run(
            f"{path}{test}", "--collect-only", *arguments, plugins=[Options()]
        )
        (finished,) = run.getcalls("pytest_collection_finish")
        return [item.name for item in finished.session.items]

    return names


def test_each_value_of_a_product_is_in_one_test(select):
    chosen = [name for name in select() if name.startswith("test_product")]
    assert len(chosen) == 3
    values = [set(name[13:-1].split("-")) for name in chosen]
    assert set.union(*values) == {"1", "2", "3", "here", "apart"}


def test_a_table_is_run_as_a_whole(select):
    chosen = [name for name in select() if name.startswith("test_table")]
    assert chosen == ["test_table[a-True]", "test_table[b-False]", "test_table[c-True]"]


def test_all_is_all(select):
    assert len(select("--all")) == 10
    assert "test_long" not in select()


@pytest.mark.parametrize("name", ["1-here", "2-apart", "3-apart"])
def test_a_test_that_is_named_runs(select, name):
    assert select(test=f"::test_product[{name}]") == [f"test_product[{name}]"]
